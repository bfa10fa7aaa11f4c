package apierror

import (
	"encoding/json"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestTheRouterNamesParametersThatItCannotRead(t *testing.T) {
	said := `parsing field "stream": strconv.ParseBool: parsing "` +
		strings.Repeat("z", 9000) + `": invalid syntax`
	got := From(status.Error(codes.InvalidArgument, said))
	if got.Status != 400 || got.Param != "stream" || got.Code != "invalid_request" ||
		!strings.HasPrefix(got.Message, "stream: ") || len(got.Message) > 200 {
		t.Fatalf("%+v", got)
	}
}

func TestFailuresAreOneLineForEveryClient(t *testing.T) {
	text := "a\u0085b\u2028c\u2029d\ne"
	got := string(New(400, "bad", text).JSON())
	if strings.ContainsAny(got, "\u0085\u2028\u2029\n") {
		t.Fatalf("%q", got)
	}
	var body payload
	if err := json.Unmarshal([]byte(got), &body); err != nil || body.Error.Message != text {
		t.Fatalf("%v %q", err, body.Error.Message)
	}
}
