package picker

import "encoding/json"

// More of a name than any model has is not looked at.
const maxModelBytes = 1 << 10

// modelFinder finds the value of the key `model` of a JSON object in pieces of its text, without
// keeping the text. It checks nothing else: what is no JSON has no model, or any.
type modelFinder struct {
	// found is set once the value is known, or it is known that there is none.
	found bool
	model string

	depth    int
	inString bool
	escaped  bool
	isValue  bool   // the next string is a value, not a key
	isModel  bool   // it is the value of `model`
	text     []byte // of a string that may be wanted, with its quotes
	begun    bool
}

// take reads the next piece.
func (f *modelFinder) take(piece []byte) {
	for _, character := range piece {
		if f.found {
			return
		}
		if f.inString {
			f.inside(character)
		} else {
			f.outside(character)
		}
	}
}

func (f *modelFinder) inside(character byte) {
	if f.depth == 1 && len(f.text) <= maxModelBytes {
		f.text = append(f.text, character)
	}
	switch {
	case f.escaped:
		f.escaped = false
	case character == '\\':
		f.escaped = true
	case character == '"':
		f.inString = false
		f.ended()
	}
}

// ended is called at the end of a string.
func (f *modelFinder) ended() {
	if f.depth != 1 {
		return
	}
	if !f.isValue {
		f.isModel = string(f.text) == `"model"`
		return
	}
	if f.isModel {
		f.found = true
		if len(f.text) > maxModelBytes || json.Unmarshal(f.text, &f.model) != nil {
			f.model = ""
		}
	}
}

func (f *modelFinder) outside(character byte) {
	switch character {
	case ' ', '\t', '\r', '\n':
		return
	case '"':
		f.inString = true
		f.text = append(f.text[:0], character)
	case '{', '[':
		f.depth++
	case '}', ']':
		f.depth--
	case ':':
		f.isValue = f.isValue || f.depth == 1
	case ',':
		if f.depth == 1 {
			f.isValue, f.isModel = false, false
		}
	}
	// Only an object has keys, and nothing follows its end.
	f.found = (!f.begun && character != '{') || f.depth <= 0
	f.begun = true
}
