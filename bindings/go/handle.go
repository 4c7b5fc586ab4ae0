package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"encoding/json"
	"io/fs"
	"sync"
	"unsafe"
)

// handle is the common part of Model, Session, Library and Cache. It counts running calls, so that
// none is released under a call, and refuses calls after Close. The zero value is closed.
type handle struct {
	name string // for messages

	mu      sync.Mutex
	idle    sync.Cond
	running int
	open    bool
	// release runs once, in Close. It must not refer to the handle, or no finalizer would run.
	release func()
	streams map[*stream]struct{} // running loops over Session.Stream, which Close stops

	logs []*logger // log functions that calls may use; constant while the handle is open
}

// opened makes the handle usable. Close runs release once.
func (h *handle) opened(name string, release func()) {
	h.name, h.release, h.open = name, release, true
	h.idle.L = &h.mu
}

// enter begins a call, which leave ends.
func (h *handle) enter() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.enterLocked()
}

func (h *handle) enterLocked() error {
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
		return failure(ErrBusy, "the "+h.name+
			" stays open: a callback cannot close it while a call on it is running")
	}
	h.open = false
	for s := range h.streams {
		s.stop(fs.ErrClosed)
	}
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

// do runs a call without a context. Its only callbacks are log functions.
func (h *handle) do(run func(e *C.kv_error) C.kv_status) (err error) {
	defer raise(&err)
	if err := h.enter(); err != nil {
		return err
	}
	defer h.leave()
	var e C.kv_error
	return h.result(run(&e), &e)
}

// long runs a call that has a context and reports progress.
func (h *handle) long(ctx context.Context, progress ProgressFunc,
	run func(c *call) C.kv_status) (err error) {
	defer raise(&err)
	if err := h.enter(); err != nil {
		return err
	}
	defer h.leave()
	c, err := begin(ctx, nil, progress)
	if err != nil {
		return err
	}
	return c.end(h, run(c))
}

// json returns what kv_session_stats_json or kv_cache_stats_json writes.
func (h *handle) json(run func(to *C.char, capacity C.size_t, size *C.size_t,
	e *C.kv_error) C.kv_status) (json.RawMessage, error) {
	var stats []byte
	err := h.do(func(e *C.kv_error) (status C.kv_status) {
		stats, status = all(4096, func(to *byte, capacity C.size_t, size *C.size_t) C.kv_status {
			return run((*C.char)(unsafe.Pointer(to)), capacity, size, e)
		})
		return status
	})
	if err != nil {
		return nil, err
	}
	return stats[:len(stats)-1], nil // without the NUL
}

// forget drops the log functions. No call uses them any more.
func (h *handle) forget() {
	for _, l := range h.logs {
		l.drop()
	}
	h.logs = nil
}

// result returns the error of a call on this handle, or the panic of a log function during it.
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

// panicked carries the value of a callback's panic to raise. No caller sees it.
type panicked struct{ value any }

func (p *panicked) Error() string { return "a callback panicked" }

// raise continues a callback's panic. Every call that can run a callback defers it first.
func raise(err *error) {
	if p, ok := (*err).(*panicked); ok {
		panic(p.value)
	}
}
