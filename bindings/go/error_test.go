package kvasir_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

// refused expects an error of a status with words in its message.
func refused(t *testing.T, err error, status kvasir.Status, words string) *kvasir.Error {
	t.Helper()
	var e *kvasir.Error
	expect(t, errors.As(err, &e) && e.Status == status && errors.Is(err, status),
		"%v (%T) is not %q", err, err, status)
	expect(t, strings.Contains(err.Error(), words) && err.Error() == e.Message,
		"%q does not have %q", err, words)
	return e
}

func TestAMissingFileIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("long ", 40)+"\xff.gguf")
	_, err := kvasir.Open(path, nil)
	e := refused(t, err, kvasir.ErrNotFound, strings.Repeat("long ", 40))
	expect(t, errors.Is(err, fs.ErrNotExist) && errors.Is(err, syscall.ENOENT) &&
		e.Errno == syscall.ENOENT && e.Offset == -1, "%+v", e)
	expect(t, !errors.Is(err, kvasir.ErrIO) && !errors.Is(err, fs.ErrPermission) &&
		!kvasir.IsStale(err), "%v is too much", err)
	_, err = kvasir.InspectModel(path)
	refused(t, err, kvasir.ErrNotFound, "long")
	_, err = kvasir.InspectFile(path)
	refused(t, err, kvasir.ErrNotFound, "long")
	_, err = kvasir.InspectPacked(path)
	refused(t, err, kvasir.ErrNotFound, "long")
	refused(t, kvasir.VerifyFile(ctx, path, nil), kvasir.ErrNotFound, "long")
	refused(t, kvasir.Pack(ctx, path, path+"2", nil), kvasir.ErrNotFound, "long")
	refused(t, kvasir.Unpack(ctx, path, path+"2", nil), kvasir.ErrNotFound, "long")
	_, err = open(t).Load(ctx, path, nil, nil)
	refused(t, err, kvasir.ErrNotFound, "long")
	_, err = kvasir.LoadCache(ctx, path, shape, nil, nil)
	refused(t, err, kvasir.ErrNotFound, "long")
	_, err = kvasir.OpenLibrary(path+"/below", nil)
	refused(t, err, kvasir.ErrNotFound, "long")
	_, err = kvasir.Open("", nil)
	refused(t, err, kvasir.ErrNotFound, "")
}

func TestDamageSaysWhere(t *testing.T) {
	bytes, err := os.ReadFile(saved)
	check(t, err)
	path := filepath.Join(t.TempDir(), "damaged.kv")
	bytes[len(bytes)/2] ^= 1
	check(t, os.WriteFile(path, bytes, 0o600))
	err = kvasir.VerifyFile(ctx, path, nil)
	e := refused(t, err, kvasir.ErrCorrupt, path)
	expect(t, e.Offset >= 0 && e.Offset < int64(len(bytes)), "offset %d", e.Offset)
	if toolPath != "" {
		out, err := exec.Command(toolPath, "verify", path).CombinedOutput()
		expect(t, err != nil && strings.Contains(string(out), e.Message),
			"%q is not the whole of %q", e.Message, out)
	}
	_, err = open(t).Load(ctx, path, nil, &kvasir.LoadOptions{Verify: true})
	refused(t, err, kvasir.ErrCorrupt, path)

	check(t, os.WriteFile(path, []byte(strings.Repeat("a text. ", 2000)), 0o600))
	_, err = open(t).Load(ctx, path, nil, nil)
	refused(t, err, kvasir.ErrNotACache, path)
	_, err = kvasir.Open(path, nil)
	refused(t, err, kvasir.ErrUnsupported, path)
}

func TestStaleIsToldApart(t *testing.T) {
	expect(t, kvasir.ErrVersion.Stale() && kvasir.ErrModelMismatch.Stale() &&
		!kvasir.ErrCorrupt.Stale(), "stale")
	expect(t, kvasir.IsStale(&kvasir.Error{Status: kvasir.ErrVersion}) && !kvasir.IsStale(nil) &&
		!kvasir.IsStale(fs.ErrClosed), "IsStale")
	denied := &kvasir.Error{Status: kvasir.ErrPermission}
	expect(t, errors.Is(denied, fs.ErrPermission) && !errors.Is(denied, fs.ErrNotExist), "%v",
		denied.Unwrap())
	expect(t, kvasir.ErrCorrupt.Error() == "corrupt" &&
		kvasir.Status(-5).Error() == "unknown status", "texts")
}

func TestANULIsRefused(t *testing.T) {
	bad := saved + "\x00.kv"
	model, session := open(t), load(t, nil)
	library, err := kvasir.OpenLibrary(t.TempDir(), nil)
	check(t, err)
	defer library.Close()
	cache, err := kvasir.OpenCache(shape, nil)
	check(t, err)
	defer cache.Close()
	for name, call := range map[string]func() error{
		"Open": func() error { _, err := kvasir.Open(bad, nil); return err },
		"ChatFormat": func() error {
			_, err := kvasir.Open(modelPath, &kvasir.ModelOptions{ChatFormat: "raw\x00"})
			return err
		},
		"Device": func() error {
			_, err := kvasir.Open(modelPath,
				&kvasir.ModelOptions{Device: "cpu\x00"})
			return err
		},
		"Inspect":     func() error { _, err := kvasir.InspectModel(bad); return err },
		"InspectFile": func() error { _, err := kvasir.InspectFile(bad); return err },
		"Packed":      func() error { _, err := kvasir.InspectPacked(bad); return err },
		"Verify":      func() error { return kvasir.VerifyFile(ctx, bad, nil) },
		"Pack":        func() error { return kvasir.Pack(ctx, saved, bad, nil) },
		"Unpack":      func() error { return kvasir.Unpack(ctx, saved, bad, nil) },
		"Load":        func() error { _, err := model.Load(ctx, bad, nil, nil); return err },
		"Save":        func() error { return session.Save(ctx, bad, nil) },
		"Strategy":    func() error { _, err := kvasir.NewStrategy("full\x00"); return err },
		"Spill": func() error {
			_, err := model.NewSession(&kvasir.SessionOptions{SpillDirectory: "/\x00"})
			return err
		},
		"Instructions": func() error {
			_, err := model.NewSession(&kvasir.SessionOptions{Instructions: "a\x00"})
			return err
		},
		"Stop": func() error {
			_, err := session.Ask(ctx, question,
				&kvasir.GenerateOptions{Stop: []string{"a", "b\x00"}})
			return err
		},
		"Cache": func() error {
			_, err := kvasir.LoadCache(ctx, bad, shape, nil,
				nil)
			return err
		},
		"CacheSave": func() error { return cache.Save(ctx, bad, nil) },
		"CacheSpill": func() error {
			_, err := kvasir.OpenCache(shape, &kvasir.CacheOptions{SpillDirectory: "/\x00"})
			return err
		},
		"OpenLibrary": func() error { _, err := kvasir.OpenLibrary(bad, nil); return err },
		"Name": func() error {
			_, _, err := library.Session(ctx, model, "text",
				&kvasir.LibrarySessionOptions{Name: "a\x00"})
			return err
		},
		"Rename": func() error { return library.Rename("a", "b\x00") },
		"Remove": func() error { return library.Remove("a\x00") },
	} {
		err := call()
		expect(t, errors.Is(err, kvasir.ErrBadArgument) && strings.Contains(err.Error(), "NUL"),
			"%s: %v", name, err)
	}
}

// Each option arrives: a value out of its range is refused by a message that names it, or by what
// it leads to.
func TestOptionsOfASessionArrive(t *testing.T) {
	model := open(t)
	for words, options := range map[string]kvasir.SessionOptions{
		"threads":        {Threads: 1 << 30},
		"Threads":        {Threads: -1},
		"context_tokens": {Context: 1 << 40},
		"precision":      {Precision: 7},
		"window":         {Window: 1 << 31},
		"prefill_chunk":  {PrefillChunk: 5000},
		"99":             {Decode: strategy(t, "filter-layers", kvasir.FilterLayers(2, 99))},
		"hnsw":           {Prefill: strategy(t, "hnsw")},
		"memory_limit":   {Precision: kvasir.PrecisionF32, MemoryLimit: 1 << 30},
		"MemoryLimit":    {MemoryLimit: -1},
		"no-folder":      {MemoryLimit: 1 << 30, SpillDirectory: "no-folder"},
	} {
		session, err := model.NewSession(&options)
		if err == nil {
			session.Close()
		}
		expect(t, err != nil && strings.Contains(err.Error(), words), "%s: %v", words, err)
	}
	_, err := model.Load(ctx, saved, &kvasir.SessionOptions{MemoryLimit: 1}, nil)
	refused(t, err, kvasir.ErrLimit, "memory_limit")
}

func TestValuesOutOfTheirRangeAreRefused(t *testing.T) {
	model, session := open(t), load(t, nil)
	for words, sampling := range map[string]kvasir.Sampling{"temperature": {Temperature: -1},
		"top_p": {TopP: 2}, "min_p": {MinP: 1},
		"repetition_penalty": {RepetitionPenalty: -1}} {
		_, err := session.Ask(ctx, question, &kvasir.GenerateOptions{Sampling: sampling})
		refused(t, err, kvasir.ErrBadArgument, words)
		_, _, err = session.Next(ctx, &sampling)
		refused(t, err, kvasir.ErrBadArgument, words)
	}
	_, err := session.Ask(ctx, question, &kvasir.GenerateOptions{Stop: []string{""}})
	refused(t, err, kvasir.ErrBadArgument, "stop")
	refused(t, session.Rewind(1<<40), kvasir.ErrBadArgument, "")
	refused(t, session.Rewind(-1), kvasir.ErrBadArgument, "-1")
	_, err = session.PrefillTokens(ctx, []int32{-1}, nil)
	refused(t, err, kvasir.ErrBadArgument, "-1")
	_, err = session.Score(ctx, []int32{1 << 30}, nil)
	refused(t, err, kvasir.ErrBadArgument, "")
	refused(t, session.PrefillLogits(ctx, []int32{1}, make([]float32, 5), nil),
		kvasir.ErrBadArgument, "6144")
	none := strategy(t, "filter-layers", kvasir.FilterLayers(1, 99))
	refused(t, session.SetStrategy(none), kvasir.ErrBadArgument, "99")
	_, err = model.Tokenize("a", 1<<20)
	refused(t, err, kvasir.ErrBadArgument, "flags")
	_, err = model.Detokenize([]int32{1 << 30}, 0)
	refused(t, err, kvasir.ErrBadArgument, "vocabulary")
	_, err = model.LoadPrefix(ctx, saved, 1<<40, nil, nil)
	refused(t, err, kvasir.ErrBadArgument, "")
	refused(t, kvasir.Pack(ctx, saved, filepath.Join(t.TempDir(), "p"),
		&kvasir.PackOptions{Level: 99}), kvasir.ErrBadArgument, "level")
	_, err = kvasir.Open(modelPath, &kvasir.ModelOptions{ChatFormat: "no-such"})
	expect(t, err != nil && strings.Contains(err.Error(), "no-such"), "%v", err)
	_, err = kvasir.Open(modelPath, &kvasir.ModelOptions{Device: "cpu", DeviceMemory: 5})
	refused(t, err, kvasir.ErrBadArgument, "device_memory")
	_, err = empty(t).Score(ctx, []int32{5}, nil)
	refused(t, err, kvasir.ErrBadState, "empty")
	_, err = empty(t).Prefill(ctx, "", nil)
	check(t, err)
	small, err := model.NewSession(&kvasir.SessionOptions{Context: 20})
	check(t, err)
	defer small.Close()
	done, err := small.Prefill(ctx, document, nil)
	refused(t, err, kvasir.ErrContextFull, "20")
	expect(t, done == kvasir.PrefillResult{}, "%+v", done)
}

// A failed call leaves the session as it was.
func TestAfterAFailureTheSessionAnswers(t *testing.T) {
	session := load(t, nil)
	want := ask(t, session)
	dead, cancel := context.WithCancel(ctx)
	cancel()
	_, err := session.Ask(dead, question, nil)
	refused(t, err, kvasir.ErrCancelled, "before")
	expect(t, errors.Is(err, context.Canceled), "%v", err)
	refused(t, session.Rewind(1<<40), kvasir.ErrBadArgument, "")
	refused(t, session.Save(ctx, "/no/such/folder/a.kv", nil), kvasir.ErrNotFound,
		"/no/such/folder")
	expect(t, ask(t, session) == want, "another answer")
}
