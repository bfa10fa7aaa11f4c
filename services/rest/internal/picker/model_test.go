package picker

import (
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
)

// The reference reads the whole object.
func reference(body []byte) string {
	var object map[string]json.RawMessage
	if json.Unmarshal(body, &object) != nil {
		return ""
	}
	var model string
	_ = json.Unmarshal(object["model"], &model)
	return model
}

func randomText(random *rand.Rand) string {
	alphabet := []string{`"`, `\`, "{", "}", "[", "]", ":", ",", " ", "model", `"model":"x"`, "é", "a", "\n"}
	var text strings.Builder
	for range random.IntN(12) {
		text.WriteString(alphabet[random.IntN(len(alphabet))])
	}
	return text.String()
}

func randomValue(random *rand.Rand, depth int) any {
	switch kind := random.IntN(6); {
	case kind == 0:
		return random.Float64()
	case kind == 1:
		return nil
	case kind == 2 && depth < 3:
		var list []any
		for range random.IntN(4) {
			list = append(list, randomValue(random, depth+1))
		}
		return list
	case kind == 3 && depth < 3:
		return randomObject(random, depth+1)
	}
	return randomText(random)
}

func randomObject(random *rand.Rand, depth int) map[string]any {
	object := map[string]any{}
	for range random.IntN(5) {
		object[randomText(random)] = randomValue(random, depth)
	}
	if random.IntN(2) == 0 {
		object["model"] = randomValue(random, depth)
	}
	return object
}

func find(body []byte, random *rand.Rand) *modelFinder {
	var finder modelFinder
	for len(body) > 0 {
		count := 1 + random.IntN(min(len(body), 9))
		finder.take(body[:count])
		body = body[count:]
	}
	return &finder
}

func TestTheModelOfAnyObjectInAnyPieces(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 1))
	for range 3000 {
		body, err := json.Marshal(randomObject(random, 0))
		if err != nil {
			t.Fatal(err)
		}
		if random.IntN(2) == 0 {
			var indented strings.Builder
			encoder := json.NewEncoder(&indented)
			encoder.SetIndent(" ", "\t")
			encoder.SetEscapeHTML(false)
			var object any
			_ = json.Unmarshal(body, &object)
			_ = encoder.Encode(object)
			body = []byte(indented.String())
		}
		finder := find(body, random)
		if want := reference(body); finder.model != want || !finder.found {
			t.Fatalf("seed %d: %q: %q (%v), not %q", seed, body, finder.model, finder.found, want)
		}
	}
}

func TestWhatIsNoObjectHasNoModel(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for _, body := range []string{
		`[{"model":"x"}]`, `"model"`, `1`, `}`, ` null`, `{}`, `{"a":1}}{"model":"x"`,
		`{"model":5}`, `{"model":"` + strings.Repeat("x", 2*maxModelBytes) + `"}`, `{"model":"\q"}`,
		"\x00\xff", `{"messages":[{"model":"x"}],"prompt":"model"}`,
	} {
		if finder := find([]byte(body), random); finder.model != "" || !finder.found {
			t.Fatalf("%q: %q %v", body, finder.model, finder.found)
		}
	}
	for _, part := range []string{"", " ", `{"mod`, `{"messages": "`, `{"model": "x`} {
		if finder := find([]byte(part), random); finder.found {
			t.Fatalf("%q is not all of it", part)
		}
	}
}

func FuzzTheFinderTakesAnything(f *testing.F) {
	f.Add([]byte(`{"model":"x"}`))
	f.Fuzz(func(_ *testing.T, body []byte) {
		var finder modelFinder
		finder.take(body)
		if len(finder.text) > maxModelBytes+1 {
			panic("the text is kept")
		}
	})
}
