package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"fmt"
	"runtime/cgo"
	"sync"
	"unsafe"
)

// Phase is the work that a progress report is about.
type Phase int32

const (
	PhasePrefill Phase = C.KV_PHASE_PREFILL // tokens
	PhaseSave    Phase = C.KV_PHASE_SAVE    // bytes written
	PhaseVerify  Phase = C.KV_PHASE_VERIFY  // bytes verified
	PhasePrepare Phase = C.KV_PHASE_PREPARE // steps of building a strategy's index or sketch
	PhasePack    Phase = C.KV_PHASE_PACK    // bytes of the document packed
	PhaseUnpack  Phase = C.KV_PHASE_UNPACK  // bytes of the document restored
)

var phaseNames = map[Phase]string{
	PhasePrefill: "prefill",
	PhaseSave:    "save",
	PhaseVerify:  "verify",
	PhasePrepare: "prepare",
	PhasePack:    "pack",
	PhaseUnpack:  "unpack",
}

// String returns the phase's name.
func (p Phase) String() string { return name(p, "Phase", phaseNames) }

// name returns the name of an enumerator, or its type and number.
func name[T ~int32 | ~uint32](value T, kind string, names map[T]string) string {
	if name, ok := names[value]; ok {
		return name
	}
	return fmt.Sprintf("%s(%d)", kind, value)
}

// ProgressFunc receives progress at most ten times a second and once at the end. total is 0 while
// unknown. An error stops the call, which returns ErrCancelled with that error. After the last step
// there is nothing to stop, and an error changes nothing.
type ProgressFunc func(phase Phase, done, total int64) error

// call is one long call with its context and callbacks.
type call struct {
	ctx      context.Context
	onText   func(string) error
	thinking func(string) error
	progress ProgressFunc

	cancel *C.kv_cancel
	stop   func() bool   // keeps the context from firing cancel
	fired  chan struct{} // closed after the context has fired cancel

	handle cgo.Handle     // of the call, for callbacks
	user   unsafe.Pointer // C memory; nil without callbacks

	err       error     // of a callback
	panicking *panicked // panic of a callback
	e         C.kv_error
}

// begin prepares a call. end must follow.
func begin(ctx context.Context, onText func(string) error, progress ProgressFunc) (*call, error) {
	return beginAnswer(ctx, onText, nil, progress)
}

// beginAnswer is begin with a function that receives thoughts.
func beginAnswer(ctx context.Context, onText, thinking func(string) error, progress ProgressFunc) (
	*call, error) {
	if ended := endings(ctx); ended != nil {
		return nil, failure(ErrCancelled, "cancelled before the call began", ended...)
	}
	c := &call{ctx: ctx, onText: onText, thinking: thinking, progress: progress}
	if ctx.Done() != nil {
		if err := newError(C.kv_cancel_create(&c.cancel, &c.e), &c.e); err != nil {
			return nil, err
		}
		cancel, fired := c.cancel, make(chan struct{})
		c.fired = fired
		c.stop = context.AfterFunc(ctx, func() {
			C.kv_cancel_fire(cancel)
			close(fired)
		})
	}
	if onText != nil || thinking != nil || progress != nil {
		c.handle = cgo.NewHandle(c)
		if c.user = C.kvasir_go_user(C.uintptr_t(c.handle)); c.user == nil {
			c.tidy()
			return nil, failure(ErrNoMemory, "no memory for a callback")
		}
	}
	return c, nil
}

// end releases what begin made and returns the call's error: a *panicked if a callback panicked.
func (c *call) end(h *handle, status C.kv_status) error {
	c.tidy()
	err := h.result(status, &c.e)
	if c.panicking != nil {
		return c.panicking
	}
	if e, ok := err.(*Error); ok && e.Status == ErrCancelled {
		if c.err != nil {
			e.causes = []error{c.err}
		} else {
			e.causes = endings(c.ctx)
		}
	}
	return err
}

func (c *call) tidy() {
	if c.stop != nil && !c.stop() {
		<-c.fired
	}
	C.kv_cancel_release(c.cancel)
	if c.handle != 0 {
		c.handle.Delete()
	}
	C.free(c.user)
}

// control returns the kv_control of the call.
func (c *call) control(flags C.uint32_t) *C.kv_control {
	control := sized[C.kv_control]()
	control.flags, control.cancel = flags, c.cancel
	if c.progress != nil {
		control.progress, control.user = C.kv_progress_fn(C.kvasir_go_progress), c.user
	}
	return control
}

// run runs a callback on its thread. A non-zero result stops the call.
func (c *call) run(thread C.uintptr_t, callback func() error) (stop C.int32_t) {
	if c.err != nil || c.panicking != nil {
		return 1
	}
	callbacks.begin(thread)
	defer callbacks.end(thread)
	defer func() {
		if value := recover(); value != nil {
			c.panicking, stop = &panicked{value}, 1
		}
	}()
	if c.err = callback(); c.err != nil {
		return 1
	}
	return 0
}

//export kvasirGoText
func kvasirGoText(text *C.char, size C.size_t, user, thread C.uintptr_t) C.int32_t {
	c := cgo.Handle(user).Value().(*call)
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(text)), size)
	return c.run(thread, func() error { return c.onText(string(bytes)) })
}

//export kvasirGoThinking
func kvasirGoThinking(text *C.char, size C.size_t, user, thread C.uintptr_t) C.int32_t {
	c := cgo.Handle(user).Value().(*call)
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(text)), size)
	return c.run(thread, func() error { return c.thinking(string(bytes)) })
}

//export kvasirGoProgress
func kvasirGoProgress(phase C.int32_t, done, total C.uint64_t, user, thread C.uintptr_t) C.int32_t {
	c := cgo.Handle(user).Value().(*call)
	return c.run(thread, func() error {
		return c.progress(Phase(phase), int64(done),
			int64(total))
	})
}

// callbacks holds the threads that run a callback now. A goroutine in a callback does not leave its
// thread, and no other goroutine runs there.
var callbacks = callbackThreads{depth: map[C.uintptr_t]int{}}

type callbackThreads struct {
	mu    sync.Mutex
	depth map[C.uintptr_t]int // a callback may call another handle, which has callbacks too
}

func (c *callbackThreads) begin(thread C.uintptr_t) {
	c.mu.Lock()
	c.depth[thread]++
	c.mu.Unlock()
}

func (c *callbackThreads) end(thread C.uintptr_t) {
	c.mu.Lock()
	if c.depth[thread]--; c.depth[thread] == 0 {
		delete(c.depth, thread)
	}
	c.mu.Unlock()
}

// inside reports whether the calling goroutine runs a callback.
func (c *callbackThreads) inside() bool {
	thread := C.kvasir_go_thread()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.depth[thread] > 0
}
