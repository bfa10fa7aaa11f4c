package edge

import "testing"

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
