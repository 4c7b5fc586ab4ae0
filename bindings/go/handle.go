package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"encoding/json"
	"io/fs"
	"runtime/cgo"
	"sync"
	"sync/atomic"
	"unsafe"
)

// handle is what Model, Session, Library and Cache have in common: it counts the calls that run, so that nothing is released under one, and
// refuses calls when it is closed. The zero value is closed.
type handle struct {
	name string // for messages

	mu      sync.Mutex
	idle    sync.Cond
	running int
	open    bool
	release func() // what Close does, once; it may not lead to the handle, or no finalizer would run

	logs []*logger // whose functions calls on this handle may call; unchanged while it is open
}

// opened makes the handle usable. release is called once, when it is closed.
func (h *handle) opened(name string, release func()) {
	h.name, h.release, h.open = name, release, true
	h.idle.L = &h.mu
}

// enter begins a call, which leave ends.
func (h *handle) enter() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.open {
		name := h.name
		if name == "" {
			name = "handle"
		}
		return failure(ErrBadState, "the "+name+" is closed", fs.ErrClosed)
	}
	h.running++
	return nil
}

func (h *handle) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.running--; h.running == 0 && !h.open {
		h.idle.Broadcast()
	}
}

func (h *handle) close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.running > 0 && callbacks.inside() {
		return failure(ErrBusy, "the "+h.name+" cannot be closed by a callback while a call on it is running; it stays open")
	}
	h.open = false
	for h.running > 0 {
		h.idle.Wait()
	}
	if h.release != nil {
		h.release()
		h.release = nil
		h.forget()
	}
	return nil
}

// do is a call that cannot be cancelled and has no callbacks but the log's.
func (h *handle) do(ask func(e *C.kv_error) C.kv_status) (err error) {
	defer raise(&err)
	if err := h.enter(); err != nil {
		return err
	}
	defer h.leave()
	var e C.kv_error
	return h.result(ask(&e), &e)
}

// long is a call that can be cancelled and tells its progress.
func (h *handle) long(ctx context.Context, progress ProgressFunc, ask func(c *call) C.kv_status) (err error) {
	defer raise(&err)
	if err := h.enter(); err != nil {
		return err
	}
	defer h.leave()
	c, err := begin(ctx, nil, progress)
	if err != nil {
		return err
	}
	return c.end(h, ask(c))
}

// statistics is what kv_stats and kv_cache_stats write.
func (h *handle) statistics(ask func(to *C.char, capacity C.size_t, size *C.size_t, e *C.kv_error) C.kv_status) (json.RawMessage, error) {
	var stats []byte
	err := h.do(func(e *C.kv_error) (status C.kv_status) {
		stats, status = all(4096, func(to *byte, capacity C.size_t, size *C.size_t) C.kv_status {
			return ask((*C.char)(unsafe.Pointer(to)), capacity, size, e)
		})
		return status
	})
	if err != nil {
		return nil, err
	}
	return stats[:len(stats)-1], nil // without the NUL
}

// forget lets go of the log functions, which nothing will call any more.
func (h *handle) forget() {
	for _, l := range h.logs {
		l.drop()
	}
	h.logs = nil
}

// result is the error of a call on this handle, or what panicked in a log function during it.
func (h *handle) result(status C.kv_status, e *C.kv_error) error {
	var first *panicked
	for _, l := range h.logs {
		if p := l.panicked.Swap(nil); p != nil && first == nil {
			first = p
		}
	}
	if first != nil {
		return first
	}
	return newError(status, e)
}

// panicked carries what a callback panicked with past the code that tidies up, to raise. No caller gets to see it.
type panicked struct{ value any }

func (p *panicked) Error() string { return "a callback panicked" }

// raise goes on with a callback's panic. Every call that can run a callback defers it, before anything else.
func raise(err *error) {
	if p, ok := (*err).(*panicked); ok {
		panic(p.value)
	}
}

// LogLevel says how much a line of the log matters.
type LogLevel int32

const (
	LogWarning LogLevel = C.KV_LOG_WARNING
	LogInfo    LogLevel = C.KV_LOG_INFO
)

// LogFunc is given one line without a newline, on a goroutine that calls the library, of which there may be several at once.
type LogFunc func(level LogLevel, message string)

// logger is a LogFunc that C can call: as long as any handle is open that was made with it, or from such a one.
type logger struct {
	log      LogFunc
	handle   cgo.Handle
	user     unsafe.Pointer // in C's memory
	holders  atomic.Int32
	panicked atomic.Pointer[panicked] // the first, until a call takes it
}

// newLogger returns what an option struct takes, and adds to the loggers that h holds; without a function nothing of both.
func (h *handle) newLogger(log LogFunc) (C.kv_log_fn, unsafe.Pointer, error) {
	if log == nil {
		return nil, nil, nil
	}
	l := &logger{log: log}
	l.handle = cgo.NewHandle(l)
	if l.user = C.kvasir_go_user(C.uintptr_t(l.handle)); l.user == nil {
		l.handle.Delete()
		return nil, nil, failure(ErrNoMemory, "no memory for a log function")
	}
	l.holders.Store(1)
	h.logs = append(h.logs, l)
	return C.kv_log_fn(C.kvasir_go_log), l.user, nil
}

// inherit holds the loggers of its parents too, of which a call on this handle may make use. Calls run on the parents.
func (h *handle) inherit(parents ...*handle) {
	for _, parent := range parents {
		for _, l := range parent.logs {
			l.holders.Add(1)
			h.logs = append(h.logs, l)
		}
	}
}

func (l *logger) drop() {
	if l.holders.Add(-1) == 0 {
		l.handle.Delete()
		C.free(l.user)
	}
}

//export kvasirGoLog
func kvasirGoLog(level C.int32_t, message *C.char, user, thread C.uintptr_t) {
	l := cgo.Handle(user).Value().(*logger)
	callbacks.begin(thread)
	defer callbacks.end(thread)
	defer func() {
		if value := recover(); value != nil {
			l.panicked.CompareAndSwap(nil, &panicked{value})
		}
	}()
	l.log(LogLevel(level), C.GoString(message))
}

// callbacks knows the threads that run a callback now. A goroutine in a callback does not leave its thread, and no other runs there.
var callbacks = callbackThreads{depth: map[C.uintptr_t]int{}}

type callbackThreads struct {
	mu    sync.Mutex
	depth map[C.uintptr_t]int // a callback may call the library for something else
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

// inside is true in a callback, on its goroutine.
func (c *callbackThreads) inside() bool {
	thread := C.kvasir_go_thread()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.depth[thread] > 0
}
