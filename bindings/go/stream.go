package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"errors"
	"io/fs"
	"iter"
	"strings"
	"unicode/utf8"
)

// Stream is Generate as a loop:
//
//	for text, err := range session.Stream(ctx, "Who ...?", nil) {
//		if err != nil { ... }
//		fmt.Print(text)
//	}
//
// Each element is the next whole UTF-8 characters of the answer. An error is the last element.
// Leaving the loop stops the answer. The session is busy until then: another call on it in the body
// is [ErrBusy], but Close stops the answer. Decode runs on another goroutine, and so does
// options.Progress. options may be nil.
func (s *Session) Stream(ctx context.Context, question string, options *GenerateOptions) (
	texts iter.Seq2[string, error]) {
	return func(yield func(string, error) bool) {
		running, err := s.start(ctx, question, options)
		if err != nil {
			yield("", err)
			return
		}
		defer running.finish()
		for text := range running.texts {
			if !yield(text, nil) {
				return
			}
		}
		if err := running.finish(); err != nil {
			yield("", err)
		}
	}
}

// stream is a running loop over Session.Stream.
type stream struct {
	session *Session
	texts   chan string             // closed after the answer
	stop    context.CancelCauseFunc // stops the answer
	result  chan error              // of the answer
}

// start begins the answer on a goroutine. finish must follow.
func (s *Session) start(ctx context.Context, question string, options *GenerateOptions) (
	*stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.enterLocked(); err != nil {
		return nil, err
	}
	within, stop := context.WithCancelCause(ctx)
	running := &stream{session: s, texts: make(chan string), stop: stop,
		result: make(chan error, 1)}
	if s.streams == nil {
		s.streams = map[*stream]struct{}{}
	}
	s.streams[running] = struct{}{}
	go func() {
		defer s.leave()
		_, err := s.generate(within, question, options, func(text string) error {
			select {
			case running.texts <- text:
				return nil
			case <-within.Done():
				return errors.Join(endings(within)...)
			}
		})
		running.result <- err
		close(running.texts)
	}()
	return running, nil
}

// finish stops the answer if it is running, waits for it and returns its error, once. It continues
// a callback's panic.
func (r *stream) finish() (err error) {
	defer raise(&err)
	r.stop(fs.ErrClosed)
	for range r.texts {
	}
	r.session.mu.Lock()
	delete(r.session.streams, r)
	r.session.mu.Unlock()
	select {
	case err = <-r.result:
	default:
	}
	return err
}

// Next samples one token after the end of the sequence and appends it: a raw continuation without
// turns. end reports whether the token ends the turn. sampling may be nil.
// ErrCancelled, ErrBadState (the sequence is empty), ErrContextFull, ErrNoMemory, ErrLimit,
// ErrCorrupt, ErrBusy.
func (s *Session) Next(ctx context.Context, sampling *Sampling) (token int32, end bool, err error) {
	token, end, _, err = s.next(ctx, sampling, false)
	return token, end, err
}

// Continuation continues the sequence with Next until a token ends the turn: a raw continuation
// without turns. Each element is the next whole UTF-8 characters; an error is the last element.
// Decoded tokens stay in the sequence; Rewind removes them. The session is free for other calls in
// the body of the loop. sampling may be nil.
//
// Stream answers a question in a turn of its own. For Continuation, PrefillTokens can open a turn:
// Tokenize with TokenizeSpecial makes the marks of the model's chat format.
func (s *Session) Continuation(ctx context.Context, sampling *Sampling) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		var whole characters
		for {
			_, end, bytes, err := s.next(ctx, sampling, true)
			if err != nil || end {
				if rest := whole.finish(); rest != "" && !yield(rest, nil) {
					return
				}
				if err != nil {
					yield("", err)
				}
				return
			}
			if text := whole.push(bytes); text != "" && !yield(text, nil) {
				return
			}
		}
	}
}

// next also returns the token's bytes if wantText is set and the token does not end the turn.
func (s *Session) next(ctx context.Context, sampling *Sampling, wantText bool) (
	token int32, end bool, bytes []byte, err error) {
	if sampling == nil {
		sampling = &Sampling{}
	}
	var a arguments
	o := sampling.options(&a)
	if a.err != nil {
		return 0, false, nil, a.err
	}
	err = s.long(ctx, nil, func(c *call) C.kv_status {
		var id, ends C.int32_t
		status := C.kv_session_next(s.ptr, o, c.control(0), &id, &ends, &c.e)
		token, end = int32(id), ends != 0
		if status == C.KV_OK && wantText && !end {
			bytes, status = piece(s.model, token, &c.e)
		}
		return status
	})
	return token, end, bytes, err
}

// piece returns the text of one token within a text. kv_detokenize removes the first space of a
// SentencePiece tokenizer. Of the same token twice, the second half is always whole.
func piece(model *C.kv_model, token int32, e *C.kv_error) ([]byte, C.kv_status) {
	twice, status := detokenize(model, []int32{token, token}, 0, 64, e)
	return twice[len(twice)/2:], status
}

// characters joins the bytes of tokens to whole characters. A sequence of bytes that cannot become
// a character is U+FFFD, as in Generate.
type characters struct{ pending []byte }

func (c *characters) push(bytes []byte) string {
	c.pending = append(c.pending, bytes...)
	var out strings.Builder
	rest := c.pending
	for len(rest) > 0 && utf8.FullRune(rest) {
		r, size := utf8.DecodeRune(rest)
		if r == utf8.RuneError && size == 1 {
			for size < len(rest) && !utf8.FullRune(rest[:size]) && !utf8.FullRune(rest[:size+1]) {
				size++
			}
		}
		out.WriteRune(r)
		rest = rest[size:]
	}
	c.pending = append(c.pending[:0], rest...)
	return out.String()
}

// finish returns U+FFFD for an incomplete character at the end.
func (c *characters) finish() string {
	if len(c.pending) == 0 {
		return ""
	}
	c.pending = nil
	return string(utf8.RuneError)
}
