package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"fmt"
	"iter"
	"strings"
	"time"
	"unicode/utf8"
)

// GenerateOptions are for Generate and Ask. The zero value is the default.
type GenerateOptions struct {
	Sampling
	MaxTokens uint32       // of the answer; 0: 512
	Keep      bool         // the turn stays in the sequence; false: afterwards it is back where it was, exactly
	Stop      []string     // strings that end the answer and are not part of it
	Special   bool         // text of the question that spells a control token becomes that token; false: it is text
	Trace     bool         // what the answer attends of the document is noted, for Session.Trace, at some cost
	Progress  ProgressFunc // while the question is read
}

// StopReason says why an answer ended.
type StopReason uint32

const (
	StopEndOfTurn   StopReason = C.KV_STOP_END_OF_TURN
	StopString      StopReason = C.KV_STOP_STRING
	StopMaxTokens   StopReason = C.KV_STOP_MAX_TOKENS
	StopContextFull StopReason = C.KV_STOP_CONTEXT_FULL
	StopCancelled   StopReason = C.KV_STOP_CANCELLED
)

// Answer tells of an answer, also of one that was cancelled.
type Answer struct {
	StopReason     StopReason
	QuestionTokens uint64 // with the marks of the turn
	AnswerTokens   uint64
	FirstToken     time.Duration // from the call to the first token
	Total          time.Duration
	TokensRead     uint64 // summed over the decode steps, layers and KV heads: store tokens whose keys and values were read
	TokensPresent  uint64 // and how many full attention would have read
}

// Generate asks: it puts the question in the model's turn and answers it through onText, in whole UTF-8 characters as they are made. An error of
// onText stops the answer: ErrCancelled, and that error. options and onText may be nil. With Keep, a stopped or failed call leaves the
// whole tokens made so far; without, the sequence is as before.
// ErrCancelled, ErrContextFull (the question does not fit), ErrBadState (an empty sequence, and a question without a token), ErrNoMemory, ErrLimit (MemoryBudget
// has no room for the question), ErrCorrupt (a damaged page of a mapped file was met), ErrBusy.
func (s *Session) Generate(ctx context.Context, question string, options *GenerateOptions, onText func(text string) error) (answer Answer, err error) {
	defer raise(&err)
	if err := s.enter(); err != nil {
		return Answer{}, err
	}
	defer s.leave()
	if options == nil {
		options = &GenerateOptions{}
	}
	var memory memory
	defer memory.free()
	o := options.Sampling.options()
	o.max_tokens = C.uint32_t(options.MaxTokens)
	o.keep = flag(options.Keep)
	o.trace = flag(options.Trace)
	o.stop, o.stop_count = memory.array("stop string", options.Stop)
	if options.Special {
		o.flags = C.KV_TOKENIZE_SPECIAL
	}
	if memory.err != nil {
		return Answer{}, memory.err
	}
	c, err := begin(ctx, onText, options.Progress)
	if err != nil {
		return Answer{}, err
	}
	o.cancel = c.cancel
	o.progress, o.progress_user = c.reports()
	var texts C.kv_text_fn
	if onText != nil {
		texts = C.kv_text_fn(C.kvasir_go_text)
	}
	bytes, size := bytesOf(question)
	a := C.kv_answer{struct_size: C.sizeof_kv_answer}
	err = c.end(&s.handle, C.kv_generate(s.ptr, bytes, size, o, texts, c.user, &a, &c.e))
	return Answer{
		StopReason:     StopReason(a.stop_reason),
		QuestionTokens: uint64(a.question_tokens),
		AnswerTokens:   uint64(a.answer_tokens),
		FirstToken:     time.Duration(a.first_token_ns),
		Total:          time.Duration(a.total_ns),
		TokensRead:     uint64(a.tokens_read),
		TokensPresent:  uint64(a.tokens_present),
	}, err
}

// Ask is Generate with the whole answer at the end; with an error, what there was of it. options may be nil.
func (s *Session) Ask(ctx context.Context, question string, options *GenerateOptions) (string, error) {
	var answer strings.Builder
	_, err := s.Generate(ctx, question, options, func(text string) error {
		answer.WriteString(text)
		return nil
	})
	return answer.String(), err
}

// Next makes one more token after what is in the sequence and adds it: a raw continuation, no turn is opened. end is true when the
// token ends the turn. sampling may be nil. ErrCancelled, ErrBadState (empty sequence), ErrContextFull, ErrBusy.
func (s *Session) Next(ctx context.Context, sampling *Sampling) (token int32, end bool, err error) {
	token, end, _, err = s.next(ctx, sampling, false)
	return token, end, err
}

// Stream goes on with Next, and gives the text of the tokens, in whole UTF-8 characters, until a token ends the turn. An error is the last
// thing that it gives. Breaking off ends it at once; what was made is in the sequence, and Rewind takes it back. Between two tokens the
// session is free for other calls. sampling may be nil.
//
// Generate opens a turn for a question and closes it; Stream continues what is there. PrefillTokens can open one, with the marks of
// the model's chat format, by Tokenize with TokenizeSpecial.
func (s *Session) Stream(ctx context.Context, sampling *Sampling) iter.Seq2[string, error] {
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

// next also gives the token's bytes, where they are asked for and it does not end the turn.
func (s *Session) next(ctx context.Context, sampling *Sampling, wantText bool) (token int32, end bool, bytes []byte, err error) {
	if sampling == nil {
		sampling = &Sampling{}
	}
	o := sampling.options()
	err = s.long(ctx, nil, func(c *call) C.kv_status {
		o.cancel = c.cancel
		var id, ends C.int32_t
		status := C.kv_next(s.ptr, o, &id, &ends, &c.e)
		token, end = int32(id), ends != 0
		if status == C.KV_OK && wantText && !end {
			bytes, status = piece(s.model, token, &c.e)
		}
		return status
	})
	return token, end, bytes, err
}

// piece is the text of one token within a text. kv_detokenize takes the first space off what a SentencePiece tokenizer made; of the token
// twice, the second one is whole either way.
func piece(model *C.kv_model, token int32, e *C.kv_error) ([]byte, C.kv_status) {
	twice, status := detokenize(model, []int32{token, token}, 0, 64, e)
	return twice[len(twice)/2:], status
}

// characters makes whole characters of the bytes of tokens. Bytes that can never become one come out as U+FFFD, one for each
// sequence of them that might have become one, as in Generate.
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

// finish is the end: a character that is not whole comes out as U+FFFD.
func (c *characters) finish() string {
	if len(c.pending) == 0 {
		return ""
	}
	c.pending = nil
	return string(utf8.RuneError)
}

// String is the reason's name.
func (r StopReason) String() string {
	names := map[StopReason]string{StopEndOfTurn: "end of turn", StopString: "stop string", StopMaxTokens: "max tokens",
		StopContextFull: "context full", StopCancelled: "cancelled"}
	if name, ok := names[r]; ok {
		return name
	}
	return fmt.Sprintf("StopReason(%d)", uint32(r))
}
