package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"unsafe"
)

// Model is a model's weights (a mapped GGUF file), tokenizer and chat format. It does not change.
type Model struct {
	handle
	ptr *C.kv_model
}

// ModelOptions are for Open.
type ModelOptions struct {
	// "": recognised from the file's template, which is never executed; or one of "raw" "chatml" "llama3" "llama2" "mistral" "mistral-v3"
	// "mistral-tekken" "gemma" "phi" "phi4" "deepseek" "deepseek-v2" "zephyr".
	ChatFormat string
	// Where the weights are multiplied: "" or "cpu"; "cuda", "cuda:1", ...: an NVIDIA GPU, of as many layers as fit into its memory;
	// "cuda:0,cuda:1", "cuda:all": several, over which the layers are split; "auto": GPUs where there are any, otherwise the CPU.
	// But for that, ErrNotFound without such a GPU or a driver, ErrUnsupported where the library was built without CUDA.
	Device string
	// Bytes of each GPU's memory that the model and its sessions may take; 0: what is free.
	DeviceMemory uint64
	// A folder for the hashes of whole model files, made where there is none; "": nothing is hashed, read or written. A thread of low
	// priority computes the hash of a file that has none there.
	HashFolder string
	Log        LogFunc // nil: silent
}

// ModelInfo is what a model's file says of it.
type ModelInfo struct {
	Layers          uint32
	Width           uint32 // of the residual stream
	Heads           uint32
	KVHeads         uint32
	HeadDim         uint32
	FeedForward     uint32
	Vocabulary      uint32 // tokens
	Context         uint64 // tokens the model was trained for
	Parameters      uint64
	WeightBytes     uint64 // in the file
	KVBytesPerToken uint64 // in the store, scales and summaries included
	Architecture    string
	Name            string
	Weights         string // number formats, most used first: "Q4_K Q6_K F32"
	Tokenizer       string
	ChatFormat      string
	Fingerprint     string // of the weights: 64 hexadecimal digits; caches belong to it
	Hash            string // of the whole file: 32 hexadecimal digits; "" until it is known (ModelOptions.HashFolder, Model.Hash)
}

// Open maps a GGUF file and checks all of its metadata and tensor shapes; weights are read when they are used. The file must not be
// changed while the model or a session of it is open.
// ErrNotFound, ErrPermission, ErrIO; ErrCorrupt (damaged, contradictory); ErrUnsupported (not a GGUF; an architecture, weight type,
// tokenizer or feature that is not supported, named in the message); ErrLimit (open files; keys, tensors or tokens that are too many or too
// long, named too); ErrNoMemory; ErrDevice.
func Open(path string, options *ModelOptions) (m *Model, err error) {
	defer raise(&err)
	if options == nil {
		options = &ModelOptions{}
	}
	var memory memory
	defer memory.free()
	m = &Model{}
	o := defaults(func(o *C.kv_model_options, size C.size_t) { C.kv_model_options_init(o, size) })
	o.chat_format = memory.option("chat format", options.ChatFormat)
	o.device = memory.option("device", options.Device)
	o.device_memory = C.uint64_t(options.DeviceMemory)
	o.hash_folder = memory.option("hash folder", options.HashFolder)
	file := memory.path("path", path)
	if memory.err != nil {
		return nil, memory.err
	}
	if o.log, o.log_user, err = m.newLogger(options.Log); err != nil {
		return nil, err
	}
	var e C.kv_error
	if err := m.result(C.kv_open(file, o, &m.ptr, &e), &e); err != nil {
		C.kv_close(m.ptr)
		m.forget()
		return nil, err
	}
	ptr := m.ptr
	m.opened("model", func() { C.kv_close(ptr) })
	runtime.SetFinalizer(m, (*Model).Close)
	return m, nil
}

// Close releases the model when the calls that run on it have returned. Sessions of it stay usable.
func (m *Model) Close() error { return m.close() }

// Info tells what the model is.
func (m *Model) Info() (ModelInfo, error) {
	if err := m.enter(); err != nil {
		return ModelInfo{}, err
	}
	defer m.leave()
	info := C.kv_model_information{struct_size: C.sizeof_kv_model_information}
	var e C.kv_error
	err := m.result(C.kv_model_info(m.ptr, &info, &e), &e)
	return newModelInfo(&info), err
}

// Hash reads the whole file and computes its hash, unless it is known; Info then has it. progress may be nil.
// ErrCancelled, ErrIO, ErrCorrupt (the file was changed while it was open), ErrNoMemory: it stays unknown.
func (m *Model) Hash(ctx context.Context, progress ProgressFunc) error {
	return m.long(ctx, progress, func(c *call) C.kv_status { return C.kv_model_hash(m.ptr, c.options(0), &c.e) })
}

// InspectModel tells the same of a file, without opening it for use: it reads metadata and no weights. Errors as Open.
func InspectModel(path string) (ModelInfo, error) {
	var memory memory
	defer memory.free()
	file := memory.path("path", path)
	if memory.err != nil {
		return ModelInfo{}, memory.err
	}
	info := C.kv_model_information{struct_size: C.sizeof_kv_model_information}
	var e C.kv_error
	err := newError(C.kv_model_inspect(file, &info, &e), &e)
	return newModelInfo(&info), err
}

func newModelInfo(info *C.kv_model_information) ModelInfo {
	return ModelInfo{
		Layers:          uint32(info.layers),
		Width:           uint32(info.width),
		Heads:           uint32(info.heads),
		KVHeads:         uint32(info.kv_heads),
		HeadDim:         uint32(info.head_dim),
		FeedForward:     uint32(info.feed_forward),
		Vocabulary:      uint32(info.vocabulary),
		Context:         uint64(info.context),
		Parameters:      uint64(info.parameters),
		WeightBytes:     uint64(info.weight_bytes),
		KVBytesPerToken: uint64(info.kv_bytes_per_token),
		Architecture:    text(info.architecture[:]),
		Name:            text(info.name[:]),
		Weights:         text(info.weights[:]),
		Tokenizer:       text(info.tokenizer[:]),
		ChatFormat:      text(info.chat_format[:]),
		Fingerprint:     text(info.fingerprint[:]),
		Hash:            text(info.hash[:]),
	}
}

// TokenizeFlags are for Tokenize and Detokenize.
type TokenizeFlags uint32

const (
	TokenizeSpecial TokenizeFlags = C.KV_TOKENIZE_SPECIAL // text that spells a control token becomes that token (otherwise it is text), and back
	TokenizeBOS     TokenizeFlags = C.KV_TOKENIZE_BOS     // begin with the begin-of-text token, if the model wants one. Not for Detokenize
	// As Prefill reads the text into a new session, with the opening of the chat format's turn. Not for Detokenize
	TokenizeDocument TokenizeFlags = C.KV_TOKENIZE_DOCUMENT
)

// Tokenize returns the ids of the text's tokens. Its time is linear in the size.
func (m *Model) Tokenize(text string, flags TokenizeFlags) ([]int32, error) {
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	bytes, size := bytesOf(text)
	var e C.kv_error
	tokens, status := all(len(text)/2+16, func(to *int32, capacity C.size_t, count *C.size_t) C.kv_status {
		return C.kv_tokenize(m.ptr, bytes, size, C.uint32_t(flags), nil, (*C.int32_t)(to), capacity, count, &e)
	})
	return tokens, m.result(status, &e)
}

// Detokenize returns the text of tokens. Control tokens are left out unless TokenizeSpecial. Of a model with a SentencePiece tokenizer
// the text loses its first space, so that texts of parts do not add up to the text of the whole: Session.Stream takes care of that.
func (m *Model) Detokenize(tokens []int32, flags TokenizeFlags) (string, error) {
	if err := m.enter(); err != nil {
		return "", err
	}
	defer m.leave()
	var e C.kv_error
	text, status := detokenize(m.ptr, tokens, flags, 8*len(tokens)+16, &e)
	return string(text), m.result(status, &e)
}

func detokenize(model *C.kv_model, tokens []int32, flags TokenizeFlags, guess int, e *C.kv_error) ([]byte, C.kv_status) {
	return all(guess, func(to *byte, capacity C.size_t, size *C.size_t) C.kv_status {
		ids := (*C.int32_t)(unsafe.SliceData(tokens))
		return C.kv_detokenize(model, ids, C.size_t(len(tokens)), C.uint32_t(flags), (*C.char)(unsafe.Pointer(to)), capacity, size, e)
	})
}

// NewSession makes a session with an empty sequence. options may be nil.
// ErrBadArgument (an unknown strategy, ranges), ErrNoMemory, ErrLimit.
func (m *Model) NewSession(options *SessionOptions) (s *Session, err error) {
	defer raise(&err)
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	var memory memory
	defer memory.free()
	s = &Session{}
	o, err := s.options(options, &memory)
	if err != nil {
		return nil, err
	}
	var e C.kv_error
	status := C.kv_session_open(m.ptr, o, &s.ptr, &e)
	s.inherit(&m.handle)
	return s.adopt(m.ptr, s.result(status, &e))
}

// LoadOptions are for Load and LoadPrefix.
type LoadOptions struct {
	Verify   bool // check the whole file now, not each part when it is first used
	Progress ProgressFunc
}

// Load makes a session over a saved sequence, mapped: its pages are read when they are used, their checksums now. Both options may be nil. Window and KVType are the
// file's; one in full precision is refused with a MemoryBudget (ErrBadArgument). The file may be replaced or removed by name afterwards, but not
// cut or written in place.
// ErrNotFound, ErrNotACache, ErrVersion and ErrModelMismatch (both IsStale), ErrCorrupt, ErrContextFull, ErrLimit, ErrIO, ErrNoMemory.
func (m *Model) Load(ctx context.Context, path string, options *SessionOptions, load *LoadOptions) (*Session, error) {
	return m.LoadPrefix(ctx, path, 0, options, load)
}

// LoadPrefix is Load of the first so many tokens of the saved sequence alone (0: all), as if no more had been read. The newest of them, those that
// a window keeps in full precision, are read again, at most a window and a page, where the file has them as pages only.
// ErrBadArgument (the file has fewer), ErrCancelled, and as Load.
func (m *Model) LoadPrefix(ctx context.Context, path string, tokens uint64, options *SessionOptions, load *LoadOptions) (s *Session, err error) {
	defer raise(&err)
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	if load == nil {
		load = &LoadOptions{}
	}
	flags := C.uint32_t(0)
	if load.Verify {
		flags = C.KV_LOAD_VERIFY
	}
	var memory memory
	defer memory.free()
	file := memory.path("path", path)
	return m.makeSession(ctx, options, load.Progress, &memory, func(s *Session, o *C.kv_session_options, c *call) C.kv_status {
		return C.kv_load_prefix(m.ptr, file, C.uint64_t(tokens), o, c.options(flags), &s.ptr, &c.e)
	})
}

// makeSession makes a session by a call that takes long. m has been entered; memory holds what the call's strings are.
func (m *Model) makeSession(ctx context.Context, options *SessionOptions, progress ProgressFunc, memory *memory,
	make func(s *Session, o *C.kv_session_options, c *call) C.kv_status) (*Session, error) {
	s := &Session{}
	o, err := s.options(options, memory)
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
