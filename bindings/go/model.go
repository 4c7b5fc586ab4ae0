package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"unsafe"
)

// Model is the weights of a model (a mapped GGUF file), its tokenizer and its chat format. It does
// not change.
type Model struct {
	handle
	ptr *C.kv_model
}

// ModelOptions are the options of Open.
type ModelOptions struct {
	// ChatFormat is "" (recognised from the file's template, which is never executed), a name of
	// docs/models.md, such as "chatml", or the text of a custom format: one conversation with
	// {document}, {question} and {answer}. Load then refuses a file of another format.
	ChatFormat string
	// Device chooses where weights are multiplied. "" or "cpu": the CPU. "cuda", "cuda:1": one
	// NVIDIA GPU, with as many layers as fit. "cuda:0,cuda:1", "cuda:all": several, over which the
	// layers are split. "auto": GPUs, or the CPU where there is none.
	// Except for "auto", ErrNotFound without such a GPU or driver, and ErrUnsupported in a build
	// without CUDA.
	Device string
	// DeviceMemory is the bytes of GPU memory per entry in Device; 0: all free memory.
	DeviceMemory int64
	// HashDirectory is a directory for hashes of whole model files, created where it does not
	// exist; "": no hash. A background thread of low priority computes a missing hash.
	HashDirectory string
	// VocabularyOnly reads only tokenizer and chat format, no weights. The architecture need not be
	// supported, and the file may have no tensors. The model serves Info, Tokenize and Detokenize.
	VocabularyOnly bool
	// PlanDrafts lets GPUs leave room for the MTP layer, for sessions with DraftTokens.
	PlanDrafts bool
	Log        LogFunc // nil: silent
}

// ModelInfo describes a model.
type ModelInfo struct {
	Layers          int   // transformer blocks
	Width           int   // elements of the residual stream
	Heads           int   // query heads per layer
	KVHeads         int   // KV heads per layer
	HeadDim         int   // elements per head
	FeedForward     int   // elements of the FFN's hidden layer
	Vocabulary      int   // tokens
	Context         int   // tokens that the model was trained for
	Parameters      int64 // elements of all weights
	WeightBytes     int64 // in the file
	KVBytesPerToken int64 // with scales and page summaries
	Architecture    string
	Name            string // the model's own
	Weights         string // formats, most used first: "Q4_K Q6_K F32"
	Tokenizer       string
	ChatFormat      string
	Fingerprint     string // of the weights, 64 hexadecimal digits: cache files belong to it
	Hash            string // of the whole file, 32 hexadecimal digits; "": unknown (Model.Hash)
	Thinks          bool   // GenerateOptions.Thinking can be set
	MTPLayers       int    // that predict one token more, for SessionOptions.DraftTokens
}

// Open maps a GGUF file and checks its metadata and tensor shapes. Pages of weights are read when
// they are used. The file must not change while the model or a session of it is open. options may
// be nil.
// ErrNotFound, ErrPermission, ErrIO, ErrNoMemory, ErrDevice; ErrCorrupt (damaged or contradictory);
// ErrUnsupported (not a GGUF file, or an architecture, weight type, tokenizer or feature that the
// message names); ErrLimit (open files, or too many or too long keys, tensors or tokens).
func Open(path string, options *ModelOptions) (m *Model, err error) {
	defer raise(&err)
	if options == nil {
		options = &ModelOptions{}
	}
	var a arguments
	defer a.free()
	m = &Model{}
	o := sized[C.kv_model_options]()
	o.chat_format = a.option("ChatFormat", options.ChatFormat)
	o.device = a.option("Device", options.Device)
	o.device_memory = a.u64("DeviceMemory", options.DeviceMemory)
	o.flags = flag(options.VocabularyOnly, C.KV_VOCABULARY_ONLY) |
		flag(options.PlanDrafts, C.KV_PLAN_DRAFTS)
	o.hash_directory = a.option("HashDirectory", options.HashDirectory)
	file := a.path("the path", path)
	if a.err != nil {
		return nil, a.err
	}
	if o.log, o.log_user, err = m.newLogger(options.Log); err != nil {
		return nil, err
	}
	var e C.kv_error
	if err := m.result(C.kv_open(file, o, nil, &m.ptr, &e), &e); err != nil {
		C.kv_close(m.ptr)
		m.forget()
		return nil, err
	}
	ptr := m.ptr
	m.opened("model", func() { C.kv_close(ptr) })
	runtime.SetFinalizer(m, (*Model).Close)
	return m, nil
}

// Close releases the model after the running calls on it have returned. Its sessions stay usable.
func (m *Model) Close() error { return m.close() }

// Info describes the model.
func (m *Model) Info() (ModelInfo, error) {
	if err := m.enter(); err != nil {
		return ModelInfo{}, err
	}
	defer m.leave()
	info := sized[C.kv_model_info]()
	var e C.kv_error
	err := m.result(C.kv_model_get_info(m.ptr, info, &e), &e)
	return newModelInfo(info), err
}

// Hash hashes the whole file, unless the hash is known. Info then has it. progress may be nil.
// ErrCancelled, ErrIO, ErrCorrupt (the file changed while it was open), ErrNoMemory.
func (m *Model) Hash(ctx context.Context, progress ProgressFunc) error {
	return m.long(ctx, progress, func(c *call) C.kv_status {
		return C.kv_model_hash(m.ptr, c.control(0), &c.e)
	})
}

// InspectModel describes a model file. It reads metadata and no weights. Errors as Open.
func InspectModel(path string) (ModelInfo, error) {
	info := sized[C.kv_model_info]()
	err := short(path, func(file *C.char, e *C.kv_error) C.kv_status {
		return C.kv_model_inspect(file, info, e)
	})
	return newModelInfo(info), err
}

func newModelInfo(info *C.kv_model_info) ModelInfo {
	return ModelInfo{
		Layers:          int(info.layers),
		Width:           int(info.width),
		Heads:           int(info.heads),
		KVHeads:         int(info.kv_heads),
		HeadDim:         int(info.head_dim),
		FeedForward:     int(info.feed_forward),
		Vocabulary:      int(info.vocabulary),
		Context:         int(info.context_tokens),
		Parameters:      int64(info.parameters),
		WeightBytes:     int64(info.weight_bytes),
		KVBytesPerToken: int64(info.kv_bytes_per_token),
		Architecture:    text(info.architecture[:]),
		Name:            text(info.name[:]),
		Weights:         text(info.weights[:]),
		Tokenizer:       text(info.tokenizer[:]),
		ChatFormat:      text(info.chat_format[:]),
		Fingerprint:     text(info.fingerprint[:]),
		Hash:            text(info.hash[:]),
		Thinks:          info.thinks != 0,
		MTPLayers:       int(info.mtp_layers),
	}
}

// TokenizeFlags are the flags of Tokenize and Detokenize.
type TokenizeFlags uint32

const (
	// TokenizeSpecial makes text that spells a control token that token, and back.
	TokenizeSpecial TokenizeFlags = C.KV_TOKENIZE_SPECIAL
	// TokenizeBOS begins with the begin-of-text token if the model wants one. Tokenize only.
	TokenizeBOS TokenizeFlags = C.KV_TOKENIZE_BOS
	// TokenizeDocument begins as Prefill begins a document without instructions. Tokenize only.
	TokenizeDocument TokenizeFlags = C.KV_TOKENIZE_DOCUMENT
)

// Tokenize returns the token ids of a text in linear time.
func (m *Model) Tokenize(text string, flags TokenizeFlags) ([]int32, error) {
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	bytes, size := bytesOf(text)
	var e C.kv_error
	tokens, status := all(len(text)/2+16, func(to *int32, capacity C.size_t,
		count *C.size_t) C.kv_status {
		return C.kv_tokenize(m.ptr, bytes, size, C.uint32_t(flags), nil, (*C.int32_t)(to), capacity,
			count, &e)
	})
	return tokens, m.result(status, &e)
}

// Detokenize returns the text of tokens. It omits control tokens unless flags has TokenizeSpecial.
// With a SentencePiece tokenizer the text loses its first space. The texts of parts then do not add
// up to the text of the whole. Session.Continuation accounts for that.
func (m *Model) Detokenize(tokens []int32, flags TokenizeFlags) (string, error) {
	if err := m.enter(); err != nil {
		return "", err
	}
	defer m.leave()
	var e C.kv_error
	text, status := detokenize(m.ptr, tokens, flags, 8*len(tokens)+16, &e)
	return string(text), m.result(status, &e)
}

func detokenize(model *C.kv_model, tokens []int32, flags TokenizeFlags, guess int,
	e *C.kv_error) ([]byte, C.kv_status) {
	ids, count := idsOf(tokens)
	return all(guess, func(to *byte, capacity C.size_t, size *C.size_t) C.kv_status {
		text := (*C.char)(unsafe.Pointer(to))
		return C.kv_detokenize(model, ids, count, C.uint32_t(flags), text, capacity, size, e)
	})
}

// NewSession makes a session with an empty sequence. options may be nil.
// ErrBadArgument (an option out of range, a parameter that does not fit), ErrNoMemory, ErrLimit;
// with a MemoryLimit also ErrNotFound, ErrPermission, ErrNoSpace (SpillDirectory).
func (m *Model) NewSession(options *SessionOptions) (s *Session, err error) {
	defer raise(&err)
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	var a arguments
	defer a.free()
	s = &Session{}
	o, err := s.options(options, &a)
	if err != nil {
		return nil, err
	}
	var e C.kv_error
	status := C.kv_session_open(m.ptr, o, &s.ptr, &e)
	s.inherit(&m.handle)
	return s.adopt(m.ptr, s.result(status, &e))
}

// LoadOptions are the options of Load, LoadPrefix and LoadCache.
type LoadOptions struct {
	Verify   bool // verify the whole file now, not each page at its first use
	Progress ProgressFunc
}

func (o *LoadOptions) control(c *call) *C.kv_control {
	return c.control(flag(o.Verify, C.KV_VERIFY))
}

// Load makes a session from a cache file by mapping it. Header and tables are verified now, each
// page at its first use. Both options may be nil. Precision, Window and chat format come from the
// file. The file may be replaced or removed afterwards. It must not be truncated or written in
// place.
// ErrNotFound, ErrNotACache, ErrVersion and ErrModelMismatch (both IsStale), ErrCorrupt,
// ErrContextFull, ErrLimit, ErrCancelled, ErrIO, ErrPermission, ErrNoMemory; ErrBadArgument (a
// full-precision file with a MemoryLimit).
func (m *Model) Load(ctx context.Context, path string, options *SessionOptions,
	load *LoadOptions) (*Session, error) {
	return m.LoadPrefix(ctx, path, 0, options, load)
}

// LoadPrefix makes a session from the first tokens of a cache file, as if no more had been
// prefilled; 0: as Load. It prefills the newest of them again, at most a window and a page, where
// the file has them as int8 pages only.
// ErrBadArgument (the file has fewer tokens), and the errors of Load.
func (m *Model) LoadPrefix(ctx context.Context, path string, tokens int, options *SessionOptions,
	load *LoadOptions) (s *Session, err error) {
	defer raise(&err)
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	if load == nil {
		load = &LoadOptions{}
	}
	var a arguments
	defer a.free()
	file, count := a.path("the path", path), a.u64("tokens", int64(tokens))
	return m.makeSession(ctx, options, load.Progress, &a,
		func(s *Session, o *C.kv_session_options, c *call) C.kv_status {
			if count == 0 {
				return C.kv_load(m.ptr, file, o, load.control(c), &s.ptr, &c.e)
			}
			return C.kv_load_prefix(m.ptr, file, count, o, load.control(c), &s.ptr, &c.e)
		})
}

// makeSession makes a session by a long call. m has been entered.
func (m *Model) makeSession(ctx context.Context, options *SessionOptions, progress ProgressFunc,
	a *arguments, make func(s *Session, o *C.kv_session_options, c *call) C.kv_status) (
	*Session, error) {
	s := &Session{}
	o, err := s.options(options, a)
	if err != nil {
		return nil, err
	}
	c, err := begin(ctx, nil, progress)
	if err != nil {
		s.forget()
		return nil, err
	}
	status := make(s, o, c)
	s.inherit(&m.handle)
	return s.adopt(m.ptr, c.end(&s.handle, status))
}
