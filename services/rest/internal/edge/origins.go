package edge

import (
	"net/http"

	"github.com/rs/cors"

	"weft.dev/weft/services/rest/internal/apierror"
)

// Seconds for which a browser may cache the answer to a preflight: Chrome's longest time.
const originsMaxAge = 7200

// origins says what pages in browsers may do, by their origin.
type origins struct {
	// cors is nil if only the edge's own pages are allowed.
	cors       *cors.Cors
	protection *http.CrossOriginProtection
}

func newOrigins(allowed []string) origins {
	made := origins{protection: http.NewCrossOriginProtection()}
	if len(allowed) > 0 {
		made.cors = cors.New(cors.Options{
			AllowedOrigins: allowed,
			AllowedMethods: []string{
				http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete,
			},
			AllowedHeaders: []string{"*"},
			ExposedHeaders: []string{"*", "Retry-After", requestIDHeader, "Request-Id"},
			MaxAge:         originsMaxAge,
		})
	}
	return made
}

// allow lets pages of allowed origins read answers, and answers their browsers' questions
// (preflights) without the gateway. Without origins it changes nothing: browsers then keep pages of
// other sites from reading answers.
func (o origins) allow(next http.Handler) http.Handler {
	if o.cors == nil {
		return next
	}
	return o.cors.Handler(next)
}

// refuse answers a request that a browser sends for a page of an origin that is not allowed, and says
// whether it was one. Browsers ask for no permission to send a POST of plain text: it would have its
// effect, although the page cannot read the answer.
func (o origins) refuse(w http.ResponseWriter, r *http.Request) bool {
	// Allowed origins may have wildcards, which the library's own list does not support.
	if o.protection.Check(r) == nil || (o.cors != nil && o.cors.OriginAllowed(r)) {
		return false
	}
	apierror.New(http.StatusForbidden, "cross_origin",
		"This request is from a web page of another origin. To allow that, list the page's origin "+
			"in --allowed-origins of the REST edge.").
		For(r.Context()).Write(w)
	return true
}
