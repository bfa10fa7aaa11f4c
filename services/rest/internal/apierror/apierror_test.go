package apierror

import (
	"encoding/json"
	"strings"
	"testing"
)

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
