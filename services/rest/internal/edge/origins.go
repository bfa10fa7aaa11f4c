package edge

import (
	"net/http"

	"github.com/rs/cors"
)

// How long a browser may remember what it was told, in seconds: Chrome's longest time.
const originsMaxAge = 7200

// allowOrigins lets pages of these origins read answers, and answers their browsers' questions
// (preflights) without the gateway. Without origins it changes nothing: browsers then keep pages of
// other sites from reading answers.
func allowOrigins(next http.Handler, origins []string) http.Handler {
	if len(origins) == 0 {
		return next
	}
	return cors.New(cors.Options{
		AllowedOrigins: origins,
		AllowedMethods: []string{http.MethodGet, http.MethodHead, http.MethodPost},
		AllowedHeaders: []string{"*"},
		ExposedHeaders: []string{"*", "Retry-After", requestIDHeader},
		MaxAge:         originsMaxAge,
	}).Handler(next)
}
