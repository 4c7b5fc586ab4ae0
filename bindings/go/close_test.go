package kvasir_test

import (
	"context"
	"errors"
	"io/fs"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

// methods calls every method of a handle with zero values and a context, and passes on its error.
func methods(handle any, call func(name string, err error)) {
	value := reflect.ValueOf(handle)
	for i := range value.NumMethod() {
		method, name := value.Method(i), value.Type().Method(i).Name
		if name == "Close" || name == "Stream" || name == "Continuation" {
			continue
		}
		var in []reflect.Value
		for j := range method.Type().NumIn() {
			if want := method.Type().In(j); want.Name() == "Context" {
				in = append(in, reflect.ValueOf(ctx))
			} else if want == reflect.TypeFor[*kvasir.Model]() {
				in = append(in, reflect.ValueOf(&kvasir.Model{}))
			} else if want == reflect.TypeFor[*kvasir.Cache]() {
				in = append(in, reflect.ValueOf(&kvasir.Cache{}))
			} else {
				in = append(in, reflect.Zero(want))
			}
		}
		out := method.Call(in)
		err, _ := out[len(out)-1].Interface().(error)
		call(name, err)
	}
}

func TestUseAfterCloseIsAnError(t *testing.T) {
	model, session := open(t), load(t, nil)
	library, err := kvasir.OpenLibrary(t.TempDir(), nil)
	check(t, err)
	cache, err := kvasir.OpenCache(shape, nil)
	check(t, err)
	check(t, model.Close())
	check(t, session.Close())
	check(t, library.Close())
	check(t, cache.Close())
	count := 0
	for _, handle := range []any{model, session, library, cache, &kvasir.Model{}, &kvasir.Session{},
		&kvasir.Library{}, &kvasir.Cache{}} {
		methods(handle, func(name string, err error) {
			count++
			expect(t, errors.Is(err, kvasir.ErrBadState) && errors.Is(err, fs.ErrClosed),
				"%T.%s: %v", handle, name, err)
		})
		check(t, handle.(interface{ Close() error }).Close())
	}
	expect(t, count > 60, "%d methods", count)
	for _, err := range session.Continuation(ctx, nil) {
		expect(t, errors.Is(err, fs.ErrClosed), "%v", err)
	}
	for _, err := range session.Stream(ctx, question, nil) {
		expect(t, errors.Is(err, fs.ErrClosed), "%v", err)
	}
	_, err = session.Stats()
	expect(t, err.Error() == "the session is closed", "%v", err)
	library, err = kvasir.OpenLibrary(t.TempDir(), nil)
	check(t, err)
	defer library.Close()
	_, _, err = library.Session(ctx, nil, "text", nil)
	refused(t, err, kvasir.ErrBadArgument, "nil")
	_, _, err = library.Session(ctx, model, "text", nil)
	expect(t, errors.Is(err, fs.ErrClosed), "%v", err)
	_, err = open(t).SessionFromCache(ctx, nil, nil, nil, nil)
	refused(t, err, kvasir.ErrBadArgument, "nil")
	_, err = open(t).SessionFromCache(ctx, cache, nil, nil, nil)
	expect(t, errors.Is(err, fs.ErrClosed), "%v", err)
}

func TestHandlesAreClosedInAnyOrder(t *testing.T) {
	want := ask(t, load(t, nil))
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {2, 0, 3, 1}} {
		model := open(t)
		session, err := model.Load(ctx, saved, nil, nil)
		check(t, err)
		fork, err := session.Fork()
		check(t, err)
		library, err := kvasir.OpenLibrary(t.TempDir(), nil)
		check(t, err)
		from, _, err := library.Session(ctx, model, document, nil)
		check(t, err)
		closers := []interface{ Close() error }{model, session, fork, library}
		for i, next := range order {
			check(t, closers[next].Close())
			if i == 1 {
				for _, s := range []*kvasir.Session{session, fork} {
					answer, err := s.Ask(ctx, question, nil)
					expect(t, answer == want || errors.Is(err, fs.ErrClosed), "%q, %v", answer, err)
				}
			}
		}
		expect(t, ask(t, from) == want, "the library's session answers otherwise")
		check(t, from.Close())
	}
}

func TestCloseWaitsForTheCall(t *testing.T) {
	session := load(t, nil)
	stopping, cancel := context.WithCancel(ctx)
	began := make(chan struct{})
	var returned atomic.Bool
	var once sync.Once
	var group sync.WaitGroup
	group.Add(1)
	go func() {
		defer group.Done()
		_, err := session.Generate(stopping, question, nil, func(string) error {
			once.Do(func() { close(began) })
			time.Sleep(20 * time.Millisecond)
			return nil
		})
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		returned.Store(true)
	}()
	<-began
	_, err := session.Stats()
	refused(t, err, kvasir.ErrBusy, "another call")
	time.AfterFunc(100*time.Millisecond, cancel)
	check(t, session.Close())
	_, err = session.Stats()
	expect(t, errors.Is(err, fs.ErrClosed), "%v", err)
	group.Wait()
	expect(t, returned.Load(), "the call did not return")
}

// Everything at once on one model and one session: each call gives an answer, ErrBusy, or that the
// handle is closed.
func TestGoroutinesShareHandles(t *testing.T) {
	model := open(t)
	shared := load(t, nil)
	want := ask(t, shared)
	var group sync.WaitGroup
	for i := range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for round := range 3 {
				own, err := model.Load(ctx, saved, &kvasir.SessionOptions{Threads: 1}, nil)
				if err != nil {
					t.Error(err)
					return
				}
				stopping, cancel := context.WithTimeout(ctx,
					time.Duration(1+5*round)*time.Millisecond)
				_, err = own.Ask(stopping, question, nil)
				if err != nil && !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
				cancel()
				if answer, err := own.Ask(ctx, question, nil); err != nil || answer != want {
					t.Errorf("%q, %v", answer, err)
				}
				if answer, err := shared.Ask(ctx, question, nil); answer != want &&
					!errors.Is(err, kvasir.ErrBusy) && !errors.Is(err, fs.ErrClosed) {
					t.Errorf("%q, %v", answer, err)
				}
				if i == 3 && round == 2 {
					shared.Close()
				}
				own.Close()
			}
		}()
	}
	group.Wait()
}

// The garbage collector closes a session and so releases its log function.
func TestWhatIsForgottenIsCollected(t *testing.T) {
	var collected atomic.Int32
	model := open(t)
	for range 5 {
		lines := new([64]int)
		runtime.SetFinalizer(lines, func(*[64]int) { collected.Add(1) })
		_, err := model.Load(ctx, saved, &kvasir.SessionOptions{Log: func(kvasir.LogLevel,
			string) {
			lines[0]++
		}}, nil)
		check(t, err)
	}
	for range 1000 {
		runtime.GC()
		time.Sleep(time.Millisecond)
		if collected.Load() == 5 {
			return
		}
	}
	t.Fatalf("%d of 5 sessions were collected: something leads to them", collected.Load())
}
