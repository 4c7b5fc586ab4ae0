package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"math"
	"strings"
	"time"
)

// GenerateOptions are the options of Generate, Ask and Stream. The zero value is the default.
type GenerateOptions struct {
	Sampling
	MaxTokens int      // of the answer; 0: 512
	KeepTurn  bool     // question and answer stay in the sequence
	Stop      []string // each ends the answer and is not part of it
	Special   bool     // text of the question that spells a control token becomes that token
	// TracePassages records Session.Passages. The answer is the same, but slower.
	TracePassages bool
	// Thinking lets the model think before it answers; ErrUnsupported unless ModelInfo.Thinks. Off:
	// marks before the answer skip the thought.
	Thinking       bool
	ThinkingTokens int  // of the thought, after which the model answers; 0: 2048
	KeepThinking   bool // with KeepTurn, the thought stays too
	// OnThinking receives whole characters of the thought. An error stops the call, as onText's.
	OnThinking func(text string) error
	Progress   ProgressFunc // PhasePrepare, then PhasePrefill of the question
}

// StopReason is why an answer ended.
type StopReason uint32

const (
	StopEndOfTurn   StopReason = C.KV_STOP_END_OF_TURN
	StopString      StopReason = C.KV_STOP_STRING
	StopMaxTokens   StopReason = C.KV_STOP_MAX_TOKENS
	StopContextFull StopReason = C.KV_STOP_CONTEXT_FULL
	StopCancelled   StopReason = C.KV_STOP_CANCELLED
)

var stopNames = map[StopReason]string{
	StopEndOfTurn:   "end of turn",
	StopString:      "stop string",
	StopMaxTokens:   "max tokens",
	StopContextFull: "context full",
	StopCancelled:   "cancelled",
}

// String returns the reason's name.
func (r StopReason) String() string { return name(r, "StopReason", stopNames) }

// Answer describes an answer, also a cancelled one.
type Answer struct {
	StopReason     StopReason
	QuestionTokens int           // with the marks of the turn
	ThinkingTokens int           // of the thought, without its marks
	AnswerTokens   int           // without the end-of-turn token
	FirstToken     time.Duration // from the call to the first token
	Total          time.Duration // from the call to its return
	TokensRead     int64         // tokens whose K and V were read: sum over steps, layers, KV heads
	TokensPresent  int64         // the same sum for full attention
}

// Generate appends the question as a turn of the chat format and decodes the answer into onText, in
// whole UTF-8 characters. Afterwards the sequence is exactly as before, unless KeepTurn is set.
// With KeepTurn a stopped or failed call keeps the tokens decoded so far. An error of onText stops
// the answer: ErrCancelled with that error. options and onText may be nil.
// ErrCancelled, ErrContextFull (the question does not fit), ErrBadState (sequence and question are
// both empty), ErrUnsupported (the model does not think), ErrNoMemory, ErrBusy; ErrLimit (the
// MemoryLimit has no room for the question or for the strategy's index); ErrCorrupt (a damaged page
// of a mapped file).
func (s *Session) Generate(ctx context.Context, question string, options *GenerateOptions,
	onText func(text string) error) (answer Answer, err error) {
	defer raise(&err)
	if err := s.enter(); err != nil {
		return Answer{}, err
	}
	defer s.leave()
	return s.generate(ctx, question, options, onText)
}

// generate is Generate within a call that has entered the session.
func (s *Session) generate(ctx context.Context, question string, options *GenerateOptions,
	onText func(text string) error) (Answer, error) {
	if options == nil {
		options = &GenerateOptions{}
	}
	var a arguments
	defer a.free()
	o := options.Sampling.options(&a)
	o.max_tokens = a.u32("MaxTokens", options.MaxTokens)
	o.thinking = flag(options.Thinking, C.KV_THINKING_ON)
	o.thinking_tokens = a.u32("ThinkingTokens", options.ThinkingTokens)
	o.stop, o.stop_count = a.array("Stop", options.Stop)
	o.flags = flag(options.KeepTurn, C.KV_KEEP_TURN) |
		flag(options.TracePassages, C.KV_TRACE_PASSAGES) |
		flag(options.KeepThinking, C.KV_KEEP_THINKING) |
		flag(options.Special, C.KV_TOKENIZE_SPECIAL)
	if a.err != nil {
		return Answer{}, a.err
	}
	c, err := beginAnswer(ctx, onText, options.OnThinking, options.Progress)
	if err != nil {
		return Answer{}, err
	}
	if options.OnThinking != nil {
		o.on_thinking = C.kv_text_fn(C.kvasir_go_thinking)
	}
	var texts C.kv_text_fn
	if onText != nil {
		texts = C.kv_text_fn(C.kvasir_go_text)
	}
	bytes, size := bytesOf(question)
	answer := sized[C.kv_answer]()
	err = c.end(&s.handle, C.kv_generate(s.ptr, bytes, size, o, c.control(0), texts, c.user, answer,
		&c.e))
	return Answer{
		StopReason:     StopReason(answer.stop_reason),
		QuestionTokens: int(answer.question_tokens),
		ThinkingTokens: int(answer.thinking_tokens),
		AnswerTokens:   int(answer.answer_tokens),
		FirstToken:     time.Duration(answer.first_token_ns),
		Total:          time.Duration(answer.total_ns),
		TokensRead:     int64(answer.tokens_read),
		TokensPresent:  int64(answer.tokens_present),
	}, err
}

// Ask returns the whole answer to a question; with an error, what was decoded before. options may
// be nil. Errors as Generate.
func (s *Session) Ask(ctx context.Context, question string, options *GenerateOptions) (
	string, error) {
	var answer strings.Builder
	_, err := s.Generate(ctx, question, options, func(text string) error {
		answer.WriteString(text)
		return nil
	})
	return answer.String(), err
}

// Passage is a passage of the document: neighbouring tokens, and the bytes of the text that they
// spell.
type Passage struct {
	Text       string  // of the tokens; a character that is cut at an end is U+FFFD
	FirstToken int     // index in Session.Tokens, or in Session.DocumentTokens
	Tokens     int     // 1 or more
	FirstByte  int     // in the document: all texts of Prefill, in order; -1: unknown
	Bytes      int     // widened to whole UTF-8 characters; 0 where FirstByte is unknown
	Share      float32 // of all recorded attention, 0 to 1
	Document   int     // of Compose: index in Session.Documents; otherwise 0
}

// Passages lists the passages that the last answer attended, the largest share first. They show
// where the model looked and prove nothing about the answer. The answer needs
// GenerateOptions.TracePassages.
// ErrBadState (the last answer was not traced, or the sequence has changed since), ErrNoMemory,
// ErrBusy.
func (s *Session) Passages() (passages []Passage, err error) {
	err = s.do(func(e *C.kv_error) C.kv_status {
		raw, status := all(64, func(to *C.kv_passage, capacity C.size_t,
			count *C.size_t) C.kv_status {
			return C.kv_session_passages(s.ptr, to, capacity, count, e)
		})
		if status != C.KV_OK || len(raw) == 0 {
			return status
		}
		_, status = s.document(0, e)
		composed := status == C.KV_OK
		tokens, status := s.tokens(e)
		for i := 0; i < len(raw) && status == C.KV_OK; i++ {
			if composed {
				tokens, status = s.documentTokens(int(raw[i].document), e)
			}
			var p Passage
			if status == C.KV_OK {
				p, status = s.passage(&raw[i], tokens, e)
			}
			passages = append(passages, p)
		}
		return status
	})
	if err != nil {
		return nil, err
	}
	return passages, nil
}

func (s *Session) passage(raw *C.kv_passage, tokens []int32, e *C.kv_error) (Passage, C.kv_status) {
	first := int(raw.first_token)
	bytes, status := detokenize(s.model, tokens[first:first+int(raw.tokens)], 0, 256, e)
	p := Passage{
		Text:       strings.ToValidUTF8(string(bytes), "\uFFFD"),
		FirstToken: first,
		Tokens:     int(raw.tokens),
		FirstByte:  -1,
		Bytes:      int(raw.bytes),
		Share:      float32(raw.share),
		Document:   int(raw.document),
	}
	if raw.first_byte <= math.MaxInt64 {
		p.FirstByte = int(raw.first_byte)
	}
	return p, status
}
