package edge

import (
	"io"
	"net/http"
	"net/http/httptest"
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

// stalling is a body of which only its beginning has come; it fails where the rest is waited for.
type stalling struct {
	come int
}

func (s *stalling) Read(p []byte) (int, error) {
	if s.come == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	n := min(s.come, len(p))
	s.come -= n
	return n, nil
}

func (s *stalling) Close() error { return nil }

func TestMemoryFollowsWhatHasComeOfABody(t *testing.T) {
	for _, announced := range []int64{-1, 0, 1000, 1 << 20, 93 << 20} {
		for _, come := range []int{0, 1, firstBodyBytes, 1 << 20, 3<<20 + 7} {
			body := &stalling{come: come}
			data, err := readBody(&limitedBody{
				ctx: t.Context(), announced: announced, limit: 100 << 20, limited: body,
				room: NewRoom(0, 100<<20), controller: http.NewResponseController(httptest.NewRecorder()),
			})
			if err == nil || len(data) != come {
				t.Errorf("%d of %d bytes: read %d: %v", come, announced, len(data), err)
			}
			if most := max(firstBodyBytes, 2*come); cap(data) > most {
				t.Errorf("%d of %d bytes hold %d", come, announced, cap(data))
			}
			if announced > firstBodyBytes && come == int(announced) && cap(data) > come+1 {
				t.Errorf("all of %d bytes hold %d", announced, cap(data))
			}
		}
	}
}
