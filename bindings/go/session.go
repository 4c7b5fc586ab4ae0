package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"encoding/json"
	"fmt"
	"runtime"
	"unsafe"
)

// Session is one sequence of tokens with its keys and values.
type Session struct {
	handle
	ptr   *C.kv_session
	model *C.kv_model // a reference of its own
}

// adopt makes s.ptr usable, unless err says why not; then everything that s has is released.
func (s *Session) adopt(model *C.kv_model, err error) (*Session, error) {
	if err != nil {
		C.kv_session_close(s.ptr)
		s.forget()
		return nil, err
	}
	ptr := s.ptr
	s.model = C.kv_retain(model)
	s.opened("session", func() {
		C.kv_session_close(ptr)
		C.kv_close(model)
	})
	runtime.SetFinalizer(s, (*Session).Close)
	return s, nil
}

// Close releases the session when the call that runs on it has returned.
func (s *Session) Close() error { return s.close() }

// SetStrategy changes what decode reads from now on, as the options of the same names do; other options stay, SelectTokens where the
// new strategy takes it. ErrBadArgument leaves it as it was.
func (s *Session) SetStrategy(strategy string, budgetTokens uint64, budgetFraction float64) error {
	var memory memory
	defer memory.free()
	name := memory.option("strategy", strategy)
	if memory.err != nil {
		return memory.err
	}
	return s.do(func(e *C.kv_error) C.kv_status {
		return C.kv_session_set_strategy(s.ptr, name, C.uint64_t(budgetTokens), C.double(budgetFraction), e)
	})
}

// Prepare makes now what the strategy needs beside keys and values, where the sequence does not have it: an index or a sketch. Otherwise it is
// made before the next question or save. It is saved with the sequence and shared by forks. A GPU gets what it attends of this session, and of its forks
// while it is open the memory that is pinned. progress may be nil.
// ErrCancelled, ErrNoMemory, ErrLimit, ErrCorrupt, ErrDevice, ErrBusy.
func (s *Session) Prepare(ctx context.Context, progress ProgressFunc) error {
	return s.long(ctx, progress, func(c *call) C.kv_status { return C.kv_prepare(s.ptr, c.options(0), &c.e) })
}

// PrefillOptions are for Prefill.
type PrefillOptions struct {
	Special  bool // text that spells a control token becomes that token; false: it is text
	Progress ProgressFunc
}

// Done is how much of a text was read, also by a call that was cancelled or failed.
type Done struct {
	Tokens uint64 // added to the sequence
	Bytes  int    // of the text, at which these end: go on with text[Bytes:]
}

// Prefill adds document text at the end of the sequence, in the turn that the model's chat format has for it. Several calls continue one
// document. Attention is exact over everything before, unless PrefillStrategy says otherwise. When cancelled it keeps whole chunks; a later
// call with the rest of the text goes on there. options may be nil.
// ErrCancelled, ErrContextFull (nothing was added), ErrBadState (a conversation has begun), ErrNoMemory, ErrCorrupt, ErrBusy.
func (s *Session) Prefill(ctx context.Context, text string, options *PrefillOptions) (Done, error) {
	if options == nil {
		options = &PrefillOptions{}
	}
	flags := C.uint32_t(0)
	if options.Special {
		flags = C.KV_TOKENIZE_SPECIAL
	}
	bytes, size := bytesOf(text)
	var tokensDone, bytesDone C.uint64_t
	err := s.long(ctx, options.Progress, func(c *call) C.kv_status {
		return C.kv_prefill(s.ptr, bytes, size, c.options(flags), &tokensDone, &bytesDone, &c.e)
	})
	return Done{uint64(tokensDone), int(bytesDone)}, err
}

// PrefillTokens does the same with the caller's own tokens: no turn is opened, no special token added. It returns how many tokens were
// added, also when it was cancelled. progress may be nil.
func (s *Session) PrefillTokens(ctx context.Context, tokens []int32, progress ProgressFunc) (uint64, error) {
	var done C.uint64_t
	ids := (*C.int32_t)(unsafe.SliceData(tokens))
	err := s.long(ctx, progress, func(c *call) C.kv_status {
		return C.kv_prefill_tokens(s.ptr, ids, C.size_t(len(tokens)), c.options(0), &done, &c.e)
	})
	return uint64(done), err
}

// PrefillLogits does as PrefillTokens, and logits receives the logits at each token: [len(tokens)][ModelInfo.Vocabulary], row by row. For
// measurement. When it fails midway, whole chunks stay, as Tokens tells, and the logits of the others are not written. progress may be nil.
func (s *Session) PrefillLogits(ctx context.Context, tokens []int32, logits []float32, progress ProgressFunc) (err error) {
	defer raise(&err)
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	info := C.kv_model_information{struct_size: C.sizeof_kv_model_information}
	var e C.kv_error
	if err := s.result(C.kv_model_info(s.model, &info, &e), &e); err != nil {
		return err
	}
	if want := uint64(len(tokens)) * uint64(info.vocabulary); uint64(len(logits)) != want {
		return failure(ErrBadArgument, fmt.Sprintf("logits has %d numbers where %d are needed; nothing was read", len(logits), want))
	}
	ids, to := (*C.int32_t)(unsafe.SliceData(tokens)), (*C.float)(unsafe.SliceData(logits))
	return s.long(ctx, progress, func(c *call) C.kv_status {
		return C.kv_prefill_logits(s.ptr, ids, C.size_t(len(tokens)), to, c.options(0), &c.e)
	})
}

// Score returns how likely the model finds a given continuation: [len(tokens)], the natural logarithm of the probability of each token after
// everything before it, each read one at a time as decode reads, through the strategy. The sequence is afterwards where it was, exactly. For
// measurement: exp(-mean) is the perplexity. progress may be nil.
// ErrCancelled, ErrBadState (empty sequence), ErrContextFull, ErrNoMemory, ErrLimit, ErrCorrupt, ErrBusy.
func (s *Session) Score(ctx context.Context, tokens []int32, progress ProgressFunc) ([]float32, error) {
	logarithms := make([]float32, len(tokens))
	ids, to := (*C.int32_t)(unsafe.SliceData(tokens)), (*C.float)(unsafe.SliceData(logarithms))
	err := s.long(ctx, progress, func(c *call) C.kv_status {
		return C.kv_score(s.ptr, ids, C.size_t(len(tokens)), to, c.options(0), &c.e)
	})
	if err != nil {
		return nil, err
	}
	return logarithms, nil
}

// Tokens returns the tokens in the sequence.
func (s *Session) Tokens() ([]int32, error) {
	var tokens []int32
	err := s.do(func(e *C.kv_error) (status C.kv_status) {
		tokens, status = all(4096, func(to *int32, capacity C.size_t, count *C.size_t) C.kv_status {
			return C.kv_session_tokens(s.ptr, (*C.int32_t)(to), capacity, count, e)
		})
		return status
	})
	return tokens, err
}

// Span is a passage of the document; Model.Detokenize of its tokens is its text.
type Span struct {
	FirstToken uint64 // of Session.Tokens
	Tokens     uint64
	Share      float32 // of all that was noted, 0 to 1
}

// Trace tells the passages of the document that the last answer attended, the largest share first: where the model looked, which is no proof of what it
// says. For answers with GenerateOptions.Trace; ErrBadState for others, and when the sequence has changed since.
func (s *Session) Trace() ([]Span, error) {
	var raw []C.kv_span
	err := s.do(func(e *C.kv_error) (status C.kv_status) {
		raw, status = all(64, func(to *C.kv_span, capacity C.size_t, count *C.size_t) C.kv_status {
			return C.kv_trace(s.ptr, to, capacity, count, e)
		})
		return status
	})
	spans := make([]Span, len(raw))
	for i, span := range raw {
		spans[i] = Span{uint64(span.first_token), uint64(span.tokens), float32(span.share)}
	}
	return spans, err
}

// Rewind goes back to the first so many tokens. Tokens that had left the window come back with the precision of their pages.
// ErrBadArgument when there are fewer.
func (s *Session) Rewind(tokens uint64) error {
	return s.do(func(e *C.kv_error) C.kv_status { return C.kv_rewind(s.ptr, C.uint64_t(tokens), e) })
}

// Fork makes a second sequence that begins as an exact copy: pages are shared, each session writes only its own tail. It has the
// same options, its log function too.
func (s *Session) Fork() (fork *Session, err error) {
	defer raise(&err)
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	fork = &Session{}
	var e C.kv_error
	status := C.kv_fork(s.ptr, &fork.ptr, &e)
	fork.inherit(&s.handle)
	return fork.adopt(s.model, fork.result(status, &e))
}

// Stats is JSON about the sequence and the last decode: tokens, sealed pages, window, strategy asked and planned and why, budget, tokens read,
// pages touched, bytes of memory and of mapped file, timings.
func (s *Session) Stats() (json.RawMessage, error) {
	return s.statistics(func(to *C.char, capacity C.size_t, size *C.size_t, e *C.kv_error) C.kv_status {
		return C.kv_stats(s.ptr, to, capacity, size, e)
	})
}

// Save writes the sequence to a file, atomically: the path holds the old file or the complete new one, durably, whatever happens. What the
// strategy needs is made first, as by Prepare. progress may be nil.
// ErrNoSpace, ErrPermission, ErrIO, ErrCancelled: the old file stays.
func (s *Session) Save(ctx context.Context, path string, progress ProgressFunc) error {
	var memory memory
	defer memory.free()
	file := memory.path("path", path)
	if memory.err != nil {
		return memory.err
	}
	return s.long(ctx, progress, func(c *call) C.kv_status { return C.kv_save(s.ptr, file, c.options(0), &c.e) })
}
