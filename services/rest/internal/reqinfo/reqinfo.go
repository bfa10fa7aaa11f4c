// Package reqinfo carries what the edge knows about one HTTP request through its context.
package reqinfo

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"regexp"

	"google.golang.org/grpc/status"
)

// Info belongs to one request and is used by its handler goroutine alone.
type Info struct {
	// ID is sent to the gateway and to the client.
	ID string
	// Route is the matched path pattern; empty while nothing matched.
	Route string
	// Failure ended a stream after its first message; nil when nothing did.
	Failure error
}

// FailureCode is the gRPC code of Failure; empty when there is none.
func (i *Info) FailureCode() string {
	if i.Failure == nil {
		return ""
	}
	return status.Code(i.Failure).String()
}

type contextKey struct{}

var acceptable = regexp.MustCompile(`^[A-Za-z0-9._:-]{1,64}$`)

// New keeps the client's request id if it is valid, else makes one.
func New(clientID string) *Info {
	if acceptable.MatchString(clientID) {
		return &Info{ID: clientID}
	}
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand ends the program instead
	return &Info{ID: "req-" + hex.EncodeToString(random[:])}
}

// With puts info into the context.
func With(ctx context.Context, info *Info) context.Context {
	return context.WithValue(ctx, contextKey{}, info)
}

// From gives the request's info; an empty one when there is none.
func From(ctx context.Context) *Info {
	if info, ok := ctx.Value(contextKey{}).(*Info); ok {
		return info
	}
	return &Info{}
}
