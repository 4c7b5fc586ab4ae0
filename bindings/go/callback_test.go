package kvasir_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

var errEnough = errors.New("enough")

// recovered is what f panics with.
func recovered(f func()) (value any) {
	defer func() { value = recover() }()
	f()
	return nil
}

func TestAnErrorOfACallbackStopsTheCall(t *testing.T) {
	session := load(t, nil)
	want := ask(t, session)
	count := 0
	answer, err := session.Generate(ctx, question, nil, func(string) error {
		if count++; count == 2 {
			return errEnough
		}
		return nil
	})
	refused(t, err, kvasir.ErrCancelled, "")
	expect(t, errors.Is(err, errEnough) && !errors.Is(err, context.Canceled), "%v", err)
	expect(t, count == 2 && answer.StopReason == kvasir.StopCancelled && answer.AnswerTokens >= 2,
		"%d calls, %+v", count, answer)
	done, err := empty(t).Prefill(ctx, document,
		&kvasir.PrefillOptions{Progress: func(kvasir.Phase, int64,
			int64) error {
			return errEnough
		}})
	expect(t, errors.Is(err, errEnough) && errors.Is(err, kvasir.ErrCancelled), "%v", err)
	expect(t, done.Bytes < len(document), "%+v", done)
	expect(t, ask(t, session) == want, "another answer afterwards")
}

func TestAPanicGoesOnInTheCaller(t *testing.T) {
	session := load(t, nil)
	want := ask(t, session)
	boom := func(string) error { panic(errEnough) }
	value := recovered(func() { session.Generate(ctx, question, nil, boom) })
	expect(t, value == errEnough, "%v", value)
	var nothing func(string)
	value = recovered(func() {
		session.Generate(ctx, question, nil,
			func(s string) error { nothing(s); return nil })
	})
	expect(t, strings.Contains(value.(error).Error(), "nil pointer"), "%v", value)
	progress := func(kvasir.Phase, int64, int64) error { panic("progress") }
	value = recovered(func() { session.Save(ctx, t.TempDir()+"/a.kv", progress) })
	expect(t, value == "progress", "%v", value)
	value = recovered(func() { kvasir.VerifyFile(ctx, saved, progress) })
	expect(t, value == "progress", "%v", value)
	value = recovered(func() {
		open(t).Load(ctx, saved, nil, &kvasir.LoadOptions{Verify: true, Progress: progress})
	})
	expect(t, value == "progress", "%v", value)
	expect(t, ask(t, session) == want, "another answer afterwards")
}

func TestTheLogIsHeardAndMayPanic(t *testing.T) {
	var lines []string
	session := load(t, &kvasir.SessionOptions{Decode: strategy(t, "quest"),
		Log: func(level kvasir.LogLevel, message string) {
			expect(t, level == kvasir.LogInfo || level == kvasir.LogWarning, "level %d", level)
			lines = append(lines, message)
		}})
	ask(t, session)
	expect(t, strings.Contains(strings.Join(lines, "\n"), "quest"), "%q", lines)

	session = load(t, &kvasir.SessionOptions{Decode: strategy(t, "quest"),
		Log: func(kvasir.LogLevel, string) { panic("log") }})
	value := recovered(func() { session.Ask(ctx, question, nil) })
	expect(t, value == "log", "%v", value)
	_, err := session.Stats()
	check(t, err)
}

// What a fork inherits of the session's log stays when the session is closed.
func TestTheLogOutlivesTheSession(t *testing.T) {
	lines := 0
	session := load(t, &kvasir.SessionOptions{Decode: strategy(t, "full"),
		Log: func(kvasir.LogLevel, string) { lines++ }})
	fork, err := session.Fork()
	check(t, err)
	defer fork.Close()
	check(t, session.Close())
	lines = 0
	check(t, fork.SetStrategy(strategy(t, "quest", kvasir.BudgetTokens(64))))
	ask(t, fork)
	expect(t, lines > 0, "nothing was said")
}

func TestACallbackMayNotCallItsSession(t *testing.T) {
	session := load(t, nil)
	answer, err := session.Generate(ctx, question, &kvasir.GenerateOptions{MaxTokens: 4},
		func(string) error {
			_, err := session.Stats()
			refused(t, err, kvasir.ErrBusy, "another call on this session")
			_, err = session.Ask(ctx, question, nil)
			refused(t, err, kvasir.ErrBusy, "another call on this session")
			refused(t, session.Close(), kvasir.ErrBusy, "callback")
			return nil
		})
	check(t, err)
	expect(t, answer.AnswerTokens == 4, "%+v", answer)
	ask(t, session) // it is open
}

// Another session may be used, and closed, and may panic in its own callback.
func TestACallbackMayCallAnotherSession(t *testing.T) {
	session, other := load(t, nil), load(t, nil)
	want := ask(t, other)
	_, err := session.Generate(ctx, question, &kvasir.GenerateOptions{MaxTokens: 1},
		func(string) error {
			expect(t, ask(t, other) == want, "another answer")
			value := recovered(func() {
				other.Generate(ctx, question, nil,
					func(string) error { panic("within") })
			})
			expect(t, value == "within", "%v", value)
			return other.Close()
		})
	check(t, err)
	expect(t, ask(t, session) == want, "another answer")
}

func TestAContextStopsEveryLongCall(t *testing.T) {
	book := strings.Repeat(document+"\n", 60) // takes longer than the test waits
	session := empty(t)
	stopping, cancel := context.WithCancelCause(ctx)
	reading := make(chan struct{})
	var once sync.Once
	var stopped time.Time
	go func() {
		<-reading
		stopped = time.Now()
		cancel(errEnough)
	}()
	done, err := session.Prefill(stopping, book,
		&kvasir.PrefillOptions{Progress: func(_ kvasir.Phase, done, _ int64) error {
			if done > 0 {
				once.Do(func() { close(reading) })
			}
			return nil
		}})
	late := time.Since(stopped)
	refused(t, err, kvasir.ErrCancelled, "")
	expect(t, errors.Is(err, context.Canceled) && errors.Is(err, errEnough), "%v", err)
	expect(t, late < 20*time.Second, "%v late", late) // it is 100 ms where processors are free
	tokens, err := session.Tokens()
	check(t, err)
	expect(t, done.Bytes > 0 && done.Bytes < len(book) && len(tokens) >= done.Tokens,
		"%+v, %d tokens", done, len(tokens))

	short, cancelShort := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancelShort()
	_, err = session.Prefill(short, book[done.Bytes:], nil)
	expect(t, errors.Is(err, kvasir.ErrCancelled) && errors.Is(err, context.DeadlineExceeded), "%v",
		err)
}

func TestAContextThatIsDoneStopsBefore(t *testing.T) {
	model, session := open(t), load(t, nil)
	library, err := kvasir.OpenLibrary(t.TempDir(), nil)
	check(t, err)
	defer library.Close()
	cache, err := kvasir.OpenCache(shape, nil)
	check(t, err)
	defer cache.Close()
	dead, cancel := context.WithCancel(ctx)
	cancel()
	for name, call := range map[string]func() error{
		"LoadCache": func() error {
			_, err := kvasir.LoadCache(dead, saved, shape, nil,
				nil)
			return err
		},
		"FromCache": func() error {
			_, err := model.SessionFromCache(dead, cache, nil, nil,
				nil)
			return err
		},
		"FromCheckpoint": func() error {
			_, err := model.SessionFromCheckpoint(dead, cache, nil, &kvasir.Checkpoint{}, nil,
				nil)
			return err
		},
		"SaveCache": func() error { return cache.Save(dead, saved+"2", nil) },
		"Attention": func() error {
			q := make(kvasir.Float32, 4*shape.Heads*shape.HeadDim)
			return cache.Attention(dead, 0, q, slices.Clone(q), nil)
		},
		"Load": func() error {
			_, err := model.Load(dead, saved, &kvasir.SessionOptions{Log: func(kvasir.LogLevel,
				string) {
			}}, nil)
			return err
		},
		"Prefix": func() error {
			_, err := model.LoadPrefix(dead, saved, 50, nil,
				nil)
			return err
		},
		"Prepare": func() error { return session.Prepare(dead, nil) },
		"Prefill": func() error { _, err := session.Prefill(dead, "text", nil); return err },
		"Tokens": func() error {
			_, err := session.PrefillTokens(dead, []int32{5},
				nil)
			return err
		},
		"Logits": func() error {
			return session.PrefillLogits(dead, []int32{5},
				make([]float32, 6144), nil)
		},
		"Score":  func() error { _, err := session.Score(dead, []int32{5}, nil); return err },
		"Save":   func() error { return session.Save(dead, saved+"2", nil) },
		"Ask":    func() error { _, err := session.Ask(dead, question, nil); return err },
		"Next":   func() error { _, _, err := session.Next(dead, nil); return err },
		"Verify": func() error { return kvasir.VerifyFile(dead, saved, nil) },
		"Pack":   func() error { return kvasir.Pack(dead, saved, saved+"z", nil) },
		"Unpack": func() error { return kvasir.Unpack(dead, saved, saved+"2", nil) },
		"Library": func() error {
			_, _, err := library.Session(dead, model, "text",
				nil)
			return err
		},
	} {
		err := call()
		expect(t, errors.Is(err, kvasir.ErrCancelled) && errors.Is(err, context.Canceled), "%s: %v",
			name, err)
	}
}
