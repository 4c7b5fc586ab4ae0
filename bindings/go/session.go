package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"unsafe"
)

// Session is a sequence of tokens and its KV cache.
type Session struct {
	handle
	ptr   *C.kv_session
	model *C.kv_model // a reference of the session
}

// adopt makes s.ptr usable. With an error it releases everything that s holds.
func (s *Session) adopt(model *C.kv_model, err error) (*Session, error) {
	if err != nil {
		C.kv_session_close(s.ptr)
		s.forget()
		return nil, err
	}
	ptr := s.ptr
	s.model = C.kv_model_retain(model)
	s.opened("session", func() {
		C.kv_session_close(ptr)
		C.kv_close(model)
	})
	runtime.SetFinalizer(s, (*Session).Close)
	return s, nil
}

// Close stops a running Stream, waits for the running call and releases the session.
func (s *Session) Close() error { return s.close() }

// SetStrategy replaces the decode strategy; nil: "auto". Other options stay.
// ErrBadArgument (a parameter that does not fit), ErrNoMemory, ErrBusy.
func (s *Session) SetStrategy(decode *Strategy) error {
	var a arguments
	defer a.free()
	raw := a.strategy(decode)
	if a.err != nil {
		return a.err
	}
	return s.do(func(e *C.kv_error) C.kv_status { return C.kv_session_set_strategy(s.ptr, raw, e) })
}

// Prepare builds now what the decode strategy needs besides the KV cache, such as an index or a
// sketch. Otherwise Generate, Score or Save builds it. Save saves an index, and forks share it.
// With a GPU, Prepare also uploads what the GPU reads. progress may be nil.
// ErrCancelled, ErrNoMemory, ErrLimit, ErrCorrupt, ErrDevice, ErrBusy.
func (s *Session) Prepare(ctx context.Context, progress ProgressFunc) error {
	return s.long(ctx, progress, func(c *call) C.kv_status {
		return C.kv_session_prepare(s.ptr, c.control(0), &c.e)
	})
}

// PrefillOptions are the options of Prefill.
type PrefillOptions struct {
	Special  bool // text that spells a control token becomes that token
	Progress ProgressFunc
}

// PrefillResult is the part of a text that was appended, also by a cancelled or failed call.
type PrefillResult struct {
	Tokens int // appended
	Bytes  int // of the text, where the tokens end: continue with text[Bytes:]
}

// Prefill appends document text to the sequence, in the turn of the chat format. Several calls
// continue one document. Attention is exact unless the session has a prefill strategy. After a
// failure the complete chunks stay. A later call with the rest of the text continues there. options
// may be nil.
// ErrCancelled, ErrContextFull (nothing was appended), ErrBadState (a conversation has begun),
// ErrNoMemory, ErrCorrupt, ErrBusy; with a MemoryLimit ErrLimit, ErrNoSpace, ErrIO.
func (s *Session) Prefill(ctx context.Context, text string, options *PrefillOptions) (
	PrefillResult, error) {
	if options == nil {
		options = &PrefillOptions{}
	}
	bytes, size := bytesOf(text)
	flags := flag(options.Special, C.KV_TOKENIZE_SPECIAL)
	var tokensDone, bytesDone C.uint64_t
	err := s.long(ctx, options.Progress, func(c *call) C.kv_status {
		return C.kv_prefill(s.ptr, bytes, size, c.control(flags), &tokensDone, &bytesDone, &c.e)
	})
	return PrefillResult{int(tokensDone), int(bytesDone)}, err
}

// PrefillTokens appends the caller's own tokens, without a turn or special tokens. It returns the
// number of appended tokens, also after a failure. progress may be nil. Errors as Prefill;
// ErrBadArgument (an id outside the vocabulary).
func (s *Session) PrefillTokens(ctx context.Context, tokens []int32, progress ProgressFunc) (
	int, error) {
	var done C.uint64_t
	ids, count := idsOf(tokens)
	err := s.long(ctx, progress, func(c *call) C.kv_status {
		return C.kv_prefill_tokens(s.ptr, ids, count, c.control(0), &done, &c.e)
	})
	return int(done), err
}

// Score scores a given continuation. It returns, per token, the natural logarithm of its
// probability after everything before it. exp(-mean) is the perplexity. Each token is decoded with
// the strategy. Afterwards the sequence is exactly as before. progress may be nil.
// ErrCancelled, ErrBadState (the sequence is empty), ErrContextFull, ErrNoMemory, ErrLimit,
// ErrCorrupt, ErrBusy.
func (s *Session) Score(ctx context.Context, tokens []int32, progress ProgressFunc) (
	[]float32, error) {
	scores := make([]float32, len(tokens))
	ids, count := idsOf(tokens)
	to := (*C.float)(unsafe.SliceData(scores))
	err := s.long(ctx, progress, func(c *call) C.kv_status {
		return C.kv_session_score(s.ptr, ids, count, to, c.control(0), &c.e)
	})
	if err != nil {
		return nil, err
	}
	return scores, nil
}

// Tokens returns the tokens of the sequence.
func (s *Session) Tokens() (tokens []int32, err error) {
	err = s.do(func(e *C.kv_error) (status C.kv_status) {
		tokens, status = s.tokens(e)
		return status
	})
	return tokens, err
}

func (s *Session) tokens(e *C.kv_error) ([]int32, C.kv_status) {
	return all(4096, func(to *int32, capacity C.size_t, count *C.size_t) C.kv_status {
		return C.kv_session_tokens(s.ptr, (*C.int32_t)(to), capacity, count, e)
	})
}

// Rewind truncates the sequence to its first tokens. Tokens that had left the window return with
// the precision of their pages.
// ErrBadArgument (the sequence is shorter), ErrCorrupt, ErrNoMemory, ErrBusy.
func (s *Session) Rewind(tokens int) error {
	var a arguments
	count := a.u64("tokens", int64(tokens))
	if a.err != nil {
		return a.err
	}
	return s.do(func(e *C.kv_error) C.kv_status { return C.kv_session_rewind(s.ptr, count, e) })
}

// Fork makes a session with an exact copy of the sequence and the same options, log function
// included. Both share the pages; each writes only its own tail.
// ErrNoMemory, ErrLimit, ErrBusy.
func (s *Session) Fork() (fork *Session, err error) {
	defer raise(&err)
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	fork = &Session{}
	var e C.kv_error
	status := C.kv_session_fork(s.ptr, &fork.ptr, &e)
	fork.inherit(&s.handle)
	return fork.adopt(s.model, fork.result(status, &e))
}

// Save writes the sequence to a cache file, atomically and durably. After any failure the path
// holds either the old file or the complete new one. Save first builds what the strategy needs, as
// Prepare does. progress may be nil.
// ErrNoSpace, ErrPermission, ErrIO, ErrCancelled, ErrBadArgument, ErrNoMemory, ErrBusy: the old
// file stays.
func (s *Session) Save(ctx context.Context, path string, progress ProgressFunc) error {
	var a arguments
	defer a.free()
	file := a.path("the path", path)
	if a.err != nil {
		return a.err
	}
	return s.long(ctx, progress, func(c *call) C.kv_status {
		return C.kv_save(s.ptr, file, c.control(0), &c.e)
	})
}
