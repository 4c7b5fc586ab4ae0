package kvasir_test

import (
	"context"
	"errors"
	"io/fs"
	"iter"
	"runtime"
	"strings"
	"testing"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

func TestAStreamHasTheAnswer(t *testing.T) {
	session := load(t, nil)
	want := ask(t, session)
	var got strings.Builder
	pieces := 0
	for text, err := range session.Stream(ctx, question, nil) {
		check(t, err)
		got.WriteString(text)
		pieces++
	}
	expect(t, got.String() == want && pieces > 3, "%q is not %q", got.String(), want)
	expect(t, ask(t, session) == want, "another answer afterwards")
}

func TestABreakStopsAStream(t *testing.T) {
	session := load(t, nil)
	want := ask(t, session)
	before, err := session.Tokens()
	check(t, err)
	for _, err := range session.Stream(ctx, question, nil) {
		check(t, err)
		_, err := session.Stats()
		refused(t, err, kvasir.ErrBusy, "")
		break
	}
	after, err := session.Tokens()
	check(t, err)
	expect(t, len(after) == len(before), "%d tokens, not %d", len(after), len(before))
	for range session.Stream(ctx, question, &kvasir.GenerateOptions{KeepTurn: true}) {
		break
	}
	after, err = session.Tokens()
	check(t, err)
	expect(t, len(after) > len(before), "the turn was not kept")
	check(t, session.Rewind(len(before)))
	expect(t, ask(t, session) == want, "another answer afterwards")
}

func TestAStreamMayBePulled(t *testing.T) {
	session := load(t, nil)
	next, stop := iter.Pull2(session.Stream(ctx, question, nil))
	text, err, more := next()
	expect(t, text != "" && err == nil && more, "%q, %v, %v", text, err, more)
	stop()
	ask(t, session)
}

func TestCloseStopsAStream(t *testing.T) {
	session := load(t, nil)
	var last error
	for _, err := range session.Stream(ctx, question, nil) {
		if last = err; err == nil {
			check(t, session.Close())
		}
	}
	expect(t, errors.Is(last, kvasir.ErrCancelled) && errors.Is(last, fs.ErrClosed), "%v", last)
}

func TestAContextStopsAStream(t *testing.T) {
	session := load(t, nil)
	stopping, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var last error
	for _, err := range session.Stream(stopping, question, nil) {
		last = err
		cancel(errEnough)
	}
	expect(t, errors.Is(last, kvasir.ErrCancelled) && errors.Is(last, context.Canceled), "%v", last)
	expect(t, errors.Is(last, errEnough) && !errors.Is(last, fs.ErrClosed), "%v", last)
	ask(t, session)
}

// A panic in the body, in a progress function or in a log function reaches the caller of the loop.
func TestAPanicLeavesAStream(t *testing.T) {
	session := load(t, nil)
	value := recovered(func() {
		for range session.Stream(ctx, question, nil) {
			panic("body")
		}
	})
	expect(t, value == "body", "%v", value)
	options := &kvasir.GenerateOptions{
		Progress: func(kvasir.Phase, int64, int64) error { panic("progress") }}
	value = recovered(func() {
		for range session.Stream(ctx, question, options) {
		}
	})
	expect(t, value == "progress", "%v", value)
	ask(t, session)
}

// runtime.Goexit, which t.FailNow calls, may leave the body of a loop.
func TestGoexitLeavesAStream(t *testing.T) {
	session := load(t, nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range session.Stream(ctx, question, nil) {
			runtime.Goexit()
		}
	}()
	<-done
	ask(t, session)
}

func TestInstructionsAreInTheFile(t *testing.T) {
	model := open(t)
	session, err := model.NewSession(&kvasir.SessionOptions{Instructions: "Answer briefly."})
	check(t, err)
	defer session.Close()
	_, err = session.PrefillTokens(ctx, []int32{5}, nil)
	refused(t, err, kvasir.ErrBadState, "")
	_, err = session.Prefill(ctx, document, nil)
	check(t, err)
	tokens, err := session.Tokens()
	check(t, err)
	text, err := model.Detokenize(tokens, 0)
	check(t, err)
	expect(t, strings.Contains(text[:100], "Answer briefly."), "%.100q", text)
	path := t.TempDir() + "/a.kv"
	check(t, session.Save(ctx, path, nil))
	_, err = model.Load(ctx, path, &kvasir.SessionOptions{Instructions: "Answer at length."}, nil)
	refused(t, err, kvasir.ErrModelMismatch, "")
	loaded, err := model.Load(ctx, path, nil, nil)
	check(t, err)
	check(t, loaded.Close())
}
