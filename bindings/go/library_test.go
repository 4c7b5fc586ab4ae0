package kvasir_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

const magic = "\x8bKVC\r\n\x1a\n" // that a document begins with

func TestALibraryPrefillsATextOnce(t *testing.T) {
	model := open(t)
	folder := filepath.Join(t.TempDir(), "library")
	library, err := kvasir.OpenLibrary(folder, nil)
	check(t, err)
	defer library.Close()
	phases := map[kvasir.Phase]bool{}
	options := &kvasir.LibrarySessionOptions{Name: "a name", Verify: true,
		Session:  &kvasir.SessionOptions{Decode: strategy(t, "quest")},
		Progress: func(phase kvasir.Phase, _, _ int64) error { phases[phase] = true; return nil }}
	first, result, err := library.Session(ctx, model, document, options)
	check(t, err)
	defer first.Close()
	expect(t, result.Saved && result.SaveErr == nil && result.TokensFound == 0 &&
		result.Tokens > 400 && result.Name == "a name", "%+v", result)
	expect(t, phases[kvasir.PhasePrefill] && phases[kvasir.PhaseSave], "%v", phases)
	stats, err := first.Stats()
	check(t, err)
	expect(t, stats.DecodeStrategy == "quest", "%+v", stats)

	tokens := result.Tokens
	second, result, err := library.Session(ctx, model, document, nil)
	check(t, err)
	defer second.Close()
	expect(t, !result.Saved && result.TokensFound == tokens && result.Tokens == tokens &&
		result.Name == "a name", "%+v", result)
	expect(t, ask(t, first) == ask(t, second) && strings.Contains(ask(t, second), "4821907"),
		"%q, %q", ask(t, first), ask(t, second))

	info, err := model.Info()
	check(t, err)
	documents, err := library.Documents()
	check(t, err)
	expect(t, len(documents) == 1 && documents[0].Name == "a name" && documents[0].Err == nil &&
		documents[0].Tokens >= tokens && documents[0].FileBytes > 0 &&
		documents[0].ModelName == info.Name && documents[0].Fingerprint == info.Fingerprint &&
		documents[0].LastUsed.Year() > 2020, "%+v", documents)

	refused(t, library.Remove("a name"), kvasir.ErrBusy, "a name")
	check(t, first.Close())
	check(t, second.Close())
	check(t, library.Rename("a name", "another"))
	refused(t, library.Remove("a name"), kvasir.ErrNotFound, "a name")
	check(t, library.Remove("another"))
	documents, err = library.Documents()
	check(t, err)
	expect(t, len(documents) == 0, "%+v", documents)
}

func TestReplaceReplacesADocument(t *testing.T) {
	model := open(t)
	library, err := kvasir.OpenLibrary(t.TempDir(), nil)
	check(t, err)
	defer library.Close()
	names := map[string]bool{}
	for _, replace := range []bool{false, false, true} {
		text := document + string(rune('a'+len(names)))
		options := &kvasir.LibrarySessionOptions{Name: "a name", Replace: replace}
		session, result, err := library.Session(ctx, model, text, options)
		check(t, err)
		check(t, session.Close())
		expect(t, (result.Name == "a name") == (replace || len(names) == 0), "%+v", result)
		names[result.Name] = true
	}
	documents, err := library.Documents()
	check(t, err)
	expect(t, len(documents) == 2 && len(names) == 2, "%+v", documents)
}

func TestALibraryReportsBadDocumentsAndArguments(t *testing.T) {
	model, folder := open(t), t.TempDir()
	check(t, os.WriteFile(filepath.Join(folder, "text.kv"),
		[]byte("this is a text, and no document"), 0o600))
	check(t, os.WriteFile(filepath.Join(folder, "cut.kv"), []byte(magic), 0o600))
	lines, mutex := 0, sync.Mutex{}
	library, err := kvasir.OpenLibrary(folder,
		&kvasir.LibraryOptions{MaxBytes: 1 << 20, Log: func(kvasir.LogLevel, string) {
			mutex.Lock()
			lines++
			mutex.Unlock()
		}})
	check(t, err)
	defer library.Close()
	documents, err := library.Documents()
	check(t, err)
	expect(t, len(documents) == 1 && documents[0].Name == "cut", "%+v", documents)
	expect(t, errors.Is(documents[0].Err, kvasir.ErrCorrupt), "%+v", documents)

	_, _, err = library.Session(ctx, model, "", nil)
	refused(t, err, kvasir.ErrBadArgument, "")
	_, _, err = library.Session(ctx, model, "text", &kvasir.LibrarySessionOptions{Name: "a/b"})
	refused(t, err, kvasir.ErrBadArgument, "slash")
	_, _, err = library.Session(ctx, model, "text", &kvasir.LibrarySessionOptions{
		Session: &kvasir.SessionOptions{Prefill: strategy(t, "ood")}})
	refused(t, err, kvasir.ErrBadArgument, "ood")

	// It does not fit: the session is there all the same.
	session, result, err := library.Session(ctx, model, document, nil)
	check(t, err)
	defer session.Close()
	expect(t, !result.Saved && errors.Is(result.SaveErr, kvasir.ErrNoSpace), "%+v", result)
	ask(t, session)
	expect(t, lines > 0, "the log was silent")

	stopping, cancel := context.WithCancel(ctx)
	_, _, err = library.Session(stopping, model, document, &kvasir.LibrarySessionOptions{
		Progress: func(kvasir.Phase, int64, int64) error { cancel(); return errEnough }})
	expect(t, errors.Is(err, kvasir.ErrCancelled) && errors.Is(err, errEnough), "%v", err)
	value := recovered(func() {
		library.Session(ctx, model, document, &kvasir.LibrarySessionOptions{
			Progress: func(kvasir.Phase, int64, int64) error { panic("reading") }})
	})
	expect(t, value == "reading", "%v", value)
}

func TestListsDoNotMix(t *testing.T) {
	folder := t.TempDir()
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		check(t, os.WriteFile(filepath.Join(folder, name+".kv"), []byte(magic+name), 0o600))
	}
	library, err := kvasir.OpenLibrary(folder, nil)
	check(t, err)
	defer library.Close()
	var group sync.WaitGroup
	for range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for range 20 {
				documents, err := library.Documents()
				names := map[string]bool{}
				for _, d := range documents {
					names[d.Name] = true
				}
				if err != nil || len(documents) != 5 || len(names) != 5 {
					t.Errorf("%v, %v", names, err)
				}
			}
		}()
	}
	group.Wait()
}
