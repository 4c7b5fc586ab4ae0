package kvasir

import (
	"strings"
	"testing"
)

// Whatever the bytes and however they are cut, whole characters come out, and U+FFFD for each
// sequence that cannot become one.
func TestBytesOfTokensBecomeWholeCharacters(t *testing.T) {
	for bytes, want := range map[string]string{
		"":                         "",
		"plain":                    "plain",
		"Grüße, 世界 \U0001F600":     "Grüße, 世界 \U0001F600",
		"a\xffb":                   "a\uFFFDb",
		"\xe4\xb8":                 "\uFFFD",
		"\xe4\xb8X":                "\uFFFDX",
		"\xf0\x9f\x98X":            "\uFFFDX",
		"\xf0\x9f\x98\xf0\x9f\x98": "\uFFFD\uFFFD",
		"\xed\xa0\x80":             "\uFFFD\uFFFD\uFFFD",
		"\xc0\xaf":                 "\uFFFD\uFFFD",
		"\uFFFD":                   "\uFFFD",
	} {
		for step := 1; step <= 4; step++ {
			var c characters
			var got strings.Builder
			for at := 0; at < len(bytes); at += step {
				got.WriteString(c.push([]byte(bytes[at:min(at+step, len(bytes))])))
			}
			got.WriteString(c.finish())
			if got.String() != want {
				t.Errorf("%q by %d: %q, not %q", bytes, step, got.String(), want)
			}
		}
	}
}
