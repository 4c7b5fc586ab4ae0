package kvasir_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

const (
	fact     = "The access code of the north gate is 4821907."
	question = "What is the access code of the north gate?"
)

var (
	cycles    = flag.Int("cycles", 30, "cycles of TestCyclesLeaveNothing")
	ctx       = context.Background()
	modelPath = environment("KVASIR_MODEL", "../../examples/mini-reader-q8_0.gguf")
	toolPath  = os.Getenv("KVASIR_TOOL") // "": tests that compare with the command line are skipped
	document  string                     // some hundred tokens with the fact among them
	saved     string                     // path of its cache file
)

func environment(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := prepared(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// prepared saves the document once for all tests.
func prepared(m *testing.M) (int, error) {
	book, err := os.ReadFile(filepath.Join(filepath.Dir(modelPath), "demo.txt"))
	if err != nil {
		return 0, err
	}
	words := strings.Fields(string(book))
	document = strings.Join(words[200:450], " ") + " " + fact + " " + strings.Join(words[450:700],
		" ")
	folder, err := os.MkdirTemp("", "kvasir-go")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(folder)
	saved = filepath.Join(folder, "saved.kv")
	model, err := kvasir.Open(modelPath, nil)
	if err != nil {
		return 0, err
	}
	defer model.Close()
	session, err := model.NewSession(nil)
	if err != nil {
		return 0, err
	}
	defer session.Close()
	if _, err := session.Prefill(ctx, document, nil); err != nil {
		return 0, err
	}
	if err := session.Save(ctx, saved, nil); err != nil {
		return 0, err
	}
	code := m.Run()
	// Finalizers run, so that AddressSanitizer does not take leaked memory for reachable.
	for range 3 {
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
	}
	return code, nil
}

func open(t testing.TB) *kvasir.Model {
	t.Helper()
	model, err := kvasir.Open(modelPath, nil)
	check(t, err)
	t.Cleanup(func() { model.Close() })
	return model
}

// load is a session over the saved document.
func load(t testing.TB, options *kvasir.SessionOptions) *kvasir.Session {
	t.Helper()
	session, err := open(t).Load(ctx, saved, options, nil)
	check(t, err)
	t.Cleanup(func() { session.Close() })
	return session
}

// empty is a session with an empty sequence.
func empty(t testing.TB) *kvasir.Session {
	t.Helper()
	session, err := open(t).NewSession(nil)
	check(t, err)
	t.Cleanup(func() { session.Close() })
	return session
}

// strategy is one that the library accepts.
func strategy(t testing.TB, name string, settings ...kvasir.Setting) *kvasir.Strategy {
	t.Helper()
	s, err := kvasir.NewStrategy(name, settings...)
	check(t, err)
	return s
}

func ask(t testing.TB, session *kvasir.Session) string {
	t.Helper()
	answer, err := session.Ask(ctx, question, nil)
	check(t, err)
	return answer
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func expect(t testing.TB, good bool, format string, values ...any) {
	t.Helper()
	if !good {
		t.Fatalf(format, values...)
	}
}
