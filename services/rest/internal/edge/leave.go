package edge

import (
	"context"
	"net/http"

	"weft.dev/weft/services/rest/internal/apierror"
	"weft.dev/weft/services/rest/internal/reqinfo"
)

// readiness has the paths by which load balancers ask whether to send requests here.
var readiness = map[string]bool{"/readyz": true, "/ping": true, "/health_generate": true}

// closeIfLeaving makes an answer the last one of its connection once the edge leaves, so that the
// client's next request goes to another edge. Over HTTP/2 it becomes a GOAWAY.
func closeIfLeaving(leaving context.Context, header http.Header) {
	if leaving != nil && leaving.Err() != nil {
		header.Set("Connection", "close")
	}
}

// closing applies closeIfLeaving to answers to come, those to preflights included. The recorder does
// it for requests that came before.
func closing(leaving context.Context, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		closeIfLeaving(leaving, w.Header())
		next.ServeHTTP(w, r)
	})
}

// refuseReadiness answers questions for readiness while the edge leaves, and says whether it was one.
func (e *edge) refuseReadiness(w http.ResponseWriter, r *http.Request) bool {
	if e.config.Leaving.Err() == nil || !readiness[r.URL.Path] {
		return false
	}
	reqinfo.From(r.Context()).Route = r.URL.Path
	apierror.From(apierror.ErrDraining).For(r.Context()).Write(w)
	return true
}
