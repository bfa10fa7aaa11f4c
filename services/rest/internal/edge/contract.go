package edge

import (
	"context"
	"net/http"
	"strings"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/apierror"
)

// Contract is what the services' contract says of requests that do not come to this edge themselves:
// the endpoint picker sees their headers.
type Contract struct {
	mux      *runtime.ServeMux
	shapes   shapes
	admitted map[string]bool
}

// NewContract reads it.
func NewContract() *Contract {
	c := &Contract{
		mux:      runtime.NewServeMux(runtime.WithIncomingHeaderMatcher(incomingHeader)),
		shapes:   readShapes(weftv1.File_weft_v1_dialects_proto),
		admitted: map[string]bool{},
	}
	for _, file := range []protoreflect.FileDescriptor{
		weftv1.File_weft_v1_openai_proto, weftv1.File_weft_v1_dialects_proto,
	} {
		for i := range file.Services().Len() {
			c.addAdmitted(file.Services().Get(i).Methods())
		}
	}
	return c
}

func (c *Contract) addAdmitted(methods protoreflect.MethodDescriptors) {
	for i := range methods.Len() {
		method := methods.Get(i)
		rule, _ := proto.GetExtension(method.Options(), annotations.E_Http).(*annotations.HttpRule)
		if !method.IsStreamingServer() {
			continue
		}
		for _, one := range append(rule.GetAdditionalBindings(), rule) {
			if path := one.GetPost(); path != "" {
				c.admitted[path] = true
			}
		}
	}
}

// IsAdmitted says whether a request passes the gateway's admission, and may be refused for load.
// Those are the calls whose answers are streams: the ones that workers answer.
func (c *Contract) IsAdmitted(method, path string) bool {
	return method == http.MethodPost && c.admitted[cleanPath(path)]
}

// Context is that of a call to the gateway on behalf of a request: its metadata are the request's
// headers that the gateway sees, its deadline is that of `Grpc-Timeout`.
func (c *Contract) Context(
	ctx context.Context, r *http.Request, method string,
) (context.Context, error) {
	return runtime.AnnotateContext(ctx, c.mux, r, method)
}

// WithShape puts the shape of a request's failures into the context.
func (c *Contract) WithShape(ctx context.Context, path, requestID string) context.Context {
	return apierror.WithShape(ctx, c.shapes.of(cleanPath(path)), requestID)
}

// cleanPath is without a query and without slashes at its end.
func cleanPath(path string) string {
	path, _, _ = strings.Cut(path, "?")
	return strings.TrimRight(path, "/")
}
