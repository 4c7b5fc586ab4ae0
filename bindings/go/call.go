package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"math"
	"runtime/cgo"
	"strings"
	"unsafe"
)

// Phase says what a progress report is about.
type Phase int32

const (
	PhasePrefill Phase = C.KV_PHASE_PREFILL // tokens read
	PhaseSave    Phase = C.KV_PHASE_SAVE    // bytes written
	PhaseVerify  Phase = C.KV_PHASE_VERIFY  // bytes checked
	PhasePrepare Phase = C.KV_PHASE_PREPARE // steps of making what a strategy needs beside keys and values
	PhasePack    Phase = C.KV_PHASE_PACK    // bytes of the document packed
	PhaseUnpack  Phase = C.KV_PHASE_UNPACK  // bytes of the document restored
)

// ProgressFunc is called at most ten times a second, and at the end of the work. total is 0 while unknown. An error stops the call,
// which then returns ErrCancelled with it; at the end of the work there is nothing to stop any more, and it changes nothing.
type ProgressFunc func(phase Phase, done, total uint64) error

// call is one long call: its context, its callbacks, and what became of them.
type call struct {
	ctx      context.Context
	onText   func(string) error
	progress ProgressFunc

	cancel *C.kv_cancel
	stop   func() bool   // keeps the context from firing cancel
	fired  chan struct{} // closed when the context has done so

	handle cgo.Handle     // of this, for callbacks
	user   unsafe.Pointer // in C's memory; nil without callbacks

	err       error     // what a callback returned
	panicking *panicked // what it panicked with
	e         C.kv_error
}

// begin readies a call; end has to follow.
func begin(ctx context.Context, onText func(string) error, progress ProgressFunc) (*call, error) {
	if ended := endings(ctx); ended != nil {
		return nil, failure(ErrCancelled, "cancelled before it began", ended...)
	}
	c := &call{ctx: ctx, onText: onText, progress: progress}
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
	if onText != nil || progress != nil {
		c.handle = cgo.NewHandle(c)
		if c.user = C.kvasir_go_user(C.uintptr_t(c.handle)); c.user == nil {
			c.tidy()
			return nil, failure(ErrNoMemory, "no memory for a callback")
		}
	}
	return c, nil
}

// end releases what begin made, and gives the call's error: a *panicked where a callback panicked.
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

// options are those of most calls.
func (c *call) options(flags C.uint32_t) *C.kv_call_options {
	o := defaults(func(o *C.kv_call_options, size C.size_t) { C.kv_call_options_init(o, size) })
	o.flags, o.cancel = flags, c.cancel
	o.progress, o.progress_user = c.reports()
	return o
}

// reports is what an option struct has for progress.
func (c *call) reports() (C.kv_progress_fn, unsafe.Pointer) {
	if c.progress == nil {
		return nil, nil
	}
	return C.kv_progress_fn(C.kvasir_go_progress), c.user
}

// run calls a callback, on the thread that it was called on, and tells C whether to go on.
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
	return c.run(thread, func() error { return c.onText(string(unsafe.Slice((*byte)(unsafe.Pointer(text)), size))) })
}

//export kvasirGoProgress
func kvasirGoProgress(phase C.int32_t, done, total C.uint64_t, user, thread C.uintptr_t) C.int32_t {
	c := cgo.Handle(user).Value().(*call)
	return c.run(thread, func() error { return c.progress(Phase(phase), uint64(done), uint64(total)) })
}

// defaults is an option struct as its init function fills it.
func defaults[T any](init func(*T, C.size_t)) *T {
	o := new(T)
	init(o, C.size_t(unsafe.Sizeof(*o)))
	return o
}

// memory is C's memory for the strings of one call.
type memory struct {
	blocks []unsafe.Pointer
	err    error // of the first string that C cannot have
}

// path is a string, also an empty one.
func (m *memory) path(name, value string) *C.char {
	if strings.IndexByte(value, 0) >= 0 {
		if m.err == nil {
			m.err = failure(ErrBadArgument, "the "+name+" contains a NUL byte")
		}
		return nil
	}
	text := C.CString(value)
	m.blocks = append(m.blocks, unsafe.Pointer(text))
	return text
}

// option is a string, NULL when it is empty: the default.
func (m *memory) option(name, value string) *C.char {
	if value == "" {
		return nil
	}
	return m.path(name, value)
}

// array is an array of strings and their number, NULL and 0 when there are none.
func (m *memory) array(name string, values []string) (**C.char, C.uint32_t) {
	if len(values) == 0 {
		return nil, 0
	}
	if uint64(len(values)) > math.MaxUint32 {
		m.err = failure(ErrBadArgument, "too many strings: "+name)
		return nil, 0
	}
	block := C.calloc(C.size_t(len(values)), C.size_t(unsafe.Sizeof((*C.char)(nil))))
	if block == nil {
		m.err = failure(ErrNoMemory, "no memory for strings: "+name)
		return nil, 0
	}
	m.blocks = append(m.blocks, block)
	list := unsafe.Slice((**C.char)(block), len(values))
	for i, value := range values {
		list[i] = m.path(name, value)
	}
	return &list[0], C.uint32_t(len(values))
}

func (m *memory) free() {
	for _, block := range m.blocks {
		C.free(block)
	}
}

// text is what stands in an array of C up to its NUL.
func text(array []C.char) string {
	var b strings.Builder
	for _, c := range array {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}

// bytesOf is a string's memory, for the time of a call.
func bytesOf(s string) (*C.char, C.size_t) {
	if s == "" {
		return nil, 0
	}
	return (*C.char)(unsafe.Pointer(unsafe.StringData(s))), C.size_t(len(s))
}

// all asks for an array until there is room for the whole of it.
func all[T any](guess int, ask func(to *T, capacity C.size_t, count *C.size_t) C.kv_status) ([]T, C.kv_status) {
	for {
		var count C.size_t
		room := make([]T, guess)
		status := ask(unsafe.SliceData(room), C.size_t(guess), &count)
		if status == C.KV_LIMIT && count > C.size_t(guess) {
			guess = int(count)
			continue
		}
		if status != C.KV_OK {
			return nil, status
		}
		return room[:count], status
	}
}
