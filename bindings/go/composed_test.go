package kvasir_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

const otherFact = "The access code of the south gate is 5530914."
const otherQuestion = "What is the access code of the south gate?"

func TestSeveralDocumentsAreAskedAtOnce(t *testing.T) {
	model := open(t)
	folder := filepath.Join(t.TempDir(), "library")
	library, err := kvasir.OpenLibrary(folder, nil)
	check(t, err)
	defer library.Close()
	for name, text := range map[string]string{"a": document,
		"b": strings.ReplaceAll(document, fact, otherFact)} {
		session, _, err := library.Session(ctx, model, text,
			&kvasir.LibrarySessionOptions{Name: name})
		check(t, err)
		check(t, session.Close())
	}
	paths := []string{filepath.Join(folder, "b.kv"), filepath.Join(folder, "a.kv")}
	session, err := model.Compose(ctx, paths, &kvasir.ComposeOptions{MaxDocuments: 1,
		Session: &kvasir.SessionOptions{Threads: 2}})
	check(t, err)
	defer session.Close()
	asking := &kvasir.GenerateOptions{TracePassages: true, MaxTokens: 24, KeepTurn: true}
	var answer strings.Builder
	_, err = session.Generate(ctx, otherQuestion, asking, func(text string) error {
		answer.WriteString(text)
		return nil
	})
	check(t, err)
	expect(t, strings.Contains(answer.String(), "5530914"), "%q", answer.String())
	documents, err := session.Documents()
	check(t, err)
	expect(t, len(documents) == 2 && documents[0].Path == paths[0] && documents[0].Attended &&
		documents[0].Candidate && !documents[1].Attended && documents[1].Tokens > 400 &&
		documents[0].Score > documents[1].Score && documents[1].Score >= 0, "%+v", documents)
	passages, err := session.Passages()
	check(t, err)
	expect(t, passages[0].Document == 0 && strings.Contains(passages[0].Text, "5530914"), "%+v",
		passages[0])
	tokens, err := session.DocumentTokens(1)
	check(t, err)
	expect(t, len(tokens) == documents[1].Tokens, "%d", len(tokens))
	_, err = session.DocumentTokens(2)
	refused(t, err, kvasir.ErrNotFound, "2 documents")
	check(t, session.LimitDocuments([]int{1}))
	documents, err = session.Documents()
	check(t, err)
	expect(t, !documents[0].Candidate && documents[1].Candidate, "%+v", documents)
	refused(t, session.LimitDocuments([]int{1, 0}), kvasir.ErrBadArgument, "0")
	check(t, session.LimitDocuments(nil))

	check(t, session.SetDocuments(ctx, paths[1:]))
	documents, err = session.Documents()
	check(t, err)
	expect(t, len(documents) == 1 && documents[0].Path == paths[1], "%+v", documents)
	refused(t, session.SetDocuments(ctx, []string{"none.kv"}), kvasir.ErrNotFound, "none.kv")
	check(t, session.SetDocuments(ctx, paths))
	_, err = session.Generate(ctx, otherQuestion, &kvasir.GenerateOptions{MaxTokens: 2}, nil)
	check(t, err)

	// a small file refers to them
	path := filepath.Join(t.TempDir(), "over.kv")
	check(t, session.Save(ctx, path, nil))
	info, err := kvasir.InspectFile(path)
	check(t, err)
	expect(t, info.Documents == 2 && info.Tokens > 0, "%+v", info)
	loaded, err := model.Load(ctx, path, nil, nil)
	check(t, err)
	defer loaded.Close()
	there, err := loaded.Documents()
	check(t, err)
	expect(t, len(there) == 2 && there[0].Path == paths[0], "%+v", there)
	check(t, os.Remove(paths[1]))
	files, err := kvasir.FileDocuments(path)
	check(t, err)
	expect(t, len(files) == 2 && files[0].Err == nil && files[0].Path == paths[0] &&
		files[1].Err == kvasir.ErrNotFound && files[0].Tokens == there[0].Tokens &&
		files[0].Attended && !files[1].Attended && files[0].FileBytes > 0, "%+v", files)
	_, err = model.Load(ctx, path, nil, nil)
	refused(t, err, kvasir.ErrNotFound, "a.kv")
}

func TestAllDocumentsOfALibraryAreAskedAtOnce(t *testing.T) {
	model := open(t)
	library, err := kvasir.OpenLibrary(filepath.Join(t.TempDir(), "library"), nil)
	check(t, err)
	defer library.Close()
	_, err = library.Compose(ctx, model, nil, nil)
	refused(t, err, kvasir.ErrNotFound, "no document")
	for _, name := range []string{"b", "a"} {
		session, _, err := library.Session(ctx, model, name+" "+document,
			&kvasir.LibrarySessionOptions{Name: name})
		check(t, err)
		check(t, session.Close())
	}
	names := func(names ...string) string {
		session, err := library.Compose(ctx, model, names, nil)
		check(t, err)
		defer session.Close()
		documents, err := session.Documents()
		check(t, err)
		var found string
		for _, document := range documents {
			found += strings.TrimSuffix(filepath.Base(document.Path), ".kv")
		}
		return found
	}
	expect(t, names() == "ab", "%s", names())
	expect(t, names("b", "a") == "ba", "%s", names("b", "a"))
	_, err = library.Compose(ctx, model, []string{"c"}, nil)
	refused(t, err, kvasir.ErrNotFound, "'c'")
	_, err = library.Compose(ctx, nil, nil, nil)
	refused(t, err, kvasir.ErrBadArgument, "model")
	session, err := model.NewSession(nil)
	check(t, err)
	defer session.Close()
	documents, err := session.Documents()
	expect(t, err == nil && len(documents) == 0, "%+v, %v", documents, err)
	refused(t, session.LimitDocuments([]int{0}), kvasir.ErrBadState, "composed")
}
