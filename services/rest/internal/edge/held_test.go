package edge

import (
	"bytes"
	"strings"
	"testing"
)

func TestRoomForBodiesFollowsTheLargest(t *testing.T) {
	for _, one := range []struct{ body, held, want int64 }{
		{body: 8 << 20, want: 128 << 20},
		{body: 93 << 20, want: 372 << 20},
		{body: 93 << 20, held: 200 << 20, want: 200 << 20},
		{body: 93 << 20, held: 1, want: 93 << 20},
	} {
		if got := NewRoom(one.held, one.body).limit; got != one.want {
			t.Errorf("%+v: %d", one, got)
		}
	}
}

func TestABodyThatHasNotComeHoldsLittle(t *testing.T) {
	for announced, most := range map[int64]int64{
		0: bytes.MinRead, 1000: 1000 + bytes.MinRead, 93 << 20: 1 << 20, -1: bytes.MinRead,
	} {
		if got := firstBodyBytes(&limitedBody{announced: announced}); got != most {
			t.Errorf("%d bytes are announced: %d", announced, got)
		}
	}
	if got := firstBodyBytes(strings.NewReader("")); got != bytes.MinRead {
		t.Errorf("no length: %d", got)
	}
}
