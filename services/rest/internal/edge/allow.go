package edge

import (
	"context"
	"net/http"
	"strings"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
)

type probeKey struct{}

// answerProbes ends requests that only ask whether there is a route, which `allowed` sends.
func answerProbes(next runtime.HandlerFunc) runtime.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		if isRouted := probeOf(r.Context()); isRouted != nil {
			*isRouted = true
			return
		}
		next(w, r, params)
	}
}

// allowed lists the methods that there are routes for at the path of a request, as an Allow header
// does (RFC 9110, section 15.5.6).
func (e *edge) allowed(r *http.Request) string {
	var methods []string
	for _, method := range []string{
		http.MethodDelete, http.MethodGet, http.MethodPatch, http.MethodPost, http.MethodPut,
	} {
		var isRouted bool
		probe := r.Clone(context.WithValue(r.Context(), probeKey{}, &isRouted))
		probe.Method, probe.Body = method, http.NoBody
		e.mux.ServeHTTP(nil, probe)
		if isRouted {
			methods = append(methods, method)
			if method == http.MethodGet {
				methods = append(methods, http.MethodHead)
			}
		}
	}
	return strings.Join(methods, ", ")
}

// probeOf returns where the answer to a probe goes; nil for other requests.
func probeOf(ctx context.Context) *bool {
	isRouted, _ := ctx.Value(probeKey{}).(*bool)
	return isRouted
}
