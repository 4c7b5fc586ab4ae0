package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"runtime"
	"unsafe"
)

// Cache is the store without a model, for an engine that brings its own weights: keys and values of one sequence in the same pages, with the same
// strategies and in the same file as a session's. For each step of 1 to 4096 tokens (a chunk of the prompt, or one token of the answer), and in it for
// each layer: Update, then Attention. It serves one call at a time; a second concurrent one gets ErrBusy and changes nothing.
//
// Arrays are contiguous rows and are read and written where they are: keys and values [tokens][KVHeads][HeadDim], queries and what Attention
// writes [tokens][Heads][HeadDim]. Query heads h * Heads / KVHeads to (h + 1) * Heads / KVHeads - 1 belong to key/value head h.
type Cache struct {
	handle
	ptr   *C.kv_cache
	shape CacheShape
}

// CacheShape is what a cache is of.
type CacheShape struct {
	Layers    uint32 // 1 to 1024
	Heads     uint32 // query heads, 1 to 1024
	KVHeads   uint32 // a divisor of Heads
	HeadDim   uint32 // 1 to 256
	MaxTokens uint64 // that the sequence may hold, 1 to 2^30; memory is taken as it grows
	// The caller's name for what makes the keys, such as a hash of its weights; LoadCache compares it.
	Identity [32]byte
}

// CacheOptions are for OpenCache and LoadCache. The zero value is the default; those that SessionOptions has too mean the same.
type CacheOptions struct {
	Threads     uint32 // 0: as many as the process has processors; the caller's is one of them
	KVType      KVType
	Window      uint32 // newest tokens kept in full precision and always attended; 0: 64
	DenseLayers int    // layers that attend everything, the first ones; 0: the strategy's default, NoDenseLayers: none
	// What a step of one token reads; longer ones are exact. "" or "auto", "full", "window", "quest", "flat", "dipr", "bounded", "filter-layers"
	// (each filter layer is then attended before the layers up to the next one) or "infllm" (which needs the q of every update).
	Strategy       string
	BudgetTokens   uint64
	BudgetFraction float64
	SeparateHeads  bool
	FilterLayers   []uint32
	Alpha          float32
	Coverage       float32
	SelectTokens   uint32
	MemoryBudget   uint64 // a step for which it is too small is refused by Update, before anything of it is taken
	SpillFolder    string
}

// Numbers are the rows of an array that a Cache takes: Float32, Float16 or BFloat16. A slice is converted without a copy: kvasir.Float16(keys).
type Numbers interface{ rows() rows }

// Float32 are numbers of 32 bits.
type Float32 []float32

// Float16 are the bits of numbers of 16 as IEEE 754 has them.
type Float16 []uint16

// BFloat16 are the upper halves of the bits of a float32.
type BFloat16 []uint16

// rows are an array as C has it.
type rows struct {
	kind   C.uint32_t
	first  *C.uint8_t
	size   uintptr // bytes
	count  int
	tokens C.uint32_t // set by Cache.rows
}

func (n Float32) rows() rows  { return rowsOf(C.KV_F32, n) }
func (n Float16) rows() rows  { return rowsOf(C.KV_F16, n) }
func (n BFloat16) rows() rows { return rowsOf(C.KV_BF16, n) }

func rowsOf[T float32 | uint16](kind C.uint32_t, array []T) rows {
	return rows{kind: kind, first: (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(array))), size: uintptr(len(array)) * unsafe.Sizeof(T(0)), count: len(array)}
}

// rows checks the size of an array, as the library takes pointers alone. as: the array whose tokens and type it has to have; nil: its own.
func (c *Cache) rows(name string, array Numbers, heads uint32, as *rows) (r rows, err error) {
	if array == nil {
		return r, failure(ErrBadArgument, name+" is nil")
	}
	r = array.rows()
	row := int(heads) * int(c.shape.HeadDim) // at least 1: the cache was opened with it
	if r.count%row != 0 || r.count/row > math.MaxUint32 {
		return r, failure(ErrBadArgument, fmt.Sprintf("%s has %d numbers: a token has %d", name, r.count, row))
	}
	r.tokens = C.uint32_t(r.count / row)
	if as != nil && (r.tokens != as.tokens || r.kind != as.kind) {
		return r, failure(ErrBadArgument, fmt.Sprintf("%s has %d tokens and not %d, or numbers of another type", name, r.tokens, as.tokens))
	}
	return r, nil
}

// OpenCache makes an empty cache. options may be nil.
// ErrBadArgument (a shape or option out of its range), ErrNoMemory, ErrLimit (threads; MemoryBudget); ErrNotFound, ErrPermission, ErrNoSpace (SpillFolder).
func OpenCache(shape CacheShape, options *CacheOptions) (*Cache, error) {
	var memory memory
	defer memory.free()
	o, err := options.raw(&memory)
	if err != nil {
		return nil, err
	}
	c := &Cache{shape: shape}
	var e C.kv_error
	return c.adopt(newError(C.kv_cache_open(shape.raw(), o, &c.ptr, &e), &e))
}

// LoadCache makes a cache over a saved one, mapped. Both options may be nil. Window and KVType are the file's.
// ErrModelMismatch (another shape, though heads are not compared, or another identity; a session's file), otherwise errors as of Model.Load.
func LoadCache(ctx context.Context, path string, shape CacheShape, options *CacheOptions, load *LoadOptions) (cache *Cache, err error) {
	defer raise(&err)
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
	o, err := options.raw(&memory)
	if err != nil {
		return nil, err
	}
	c, err := begin(ctx, nil, load.Progress)
	if err != nil {
		return nil, err
	}
	cache = &Cache{shape: shape}
	status := C.kv_cache_load(shape.raw(), file, o, c.options(flags), &cache.ptr, &c.e)
	return cache.adopt(c.end(&cache.handle, status))
}

// adopt makes c.ptr usable, unless err says why not; then it is released.
func (c *Cache) adopt(err error) (*Cache, error) {
	if err != nil {
		C.kv_cache_close(c.ptr)
		return nil, err
	}
	ptr := c.ptr
	c.opened("cache", func() { C.kv_cache_close(ptr) })
	runtime.SetFinalizer(c, (*Cache).Close)
	return c, nil
}

// Close releases the cache when the call that runs on it has returned. What it shares with forks and sessions stays with them.
func (c *Cache) Close() error { return c.close() }

// Update takes one layer's keys (after RoPE) and values of the step's tokens, and, for the strategy "infllm", its queries after RoPE; q may be nil. The
// first update after a complete step begins a step, which is complete when every layer has had its update; the order of layers is free.
// ErrBadArgument (layer, sizes; a number that is not finite), ErrBadState (the layer has been updated; another number of tokens than the step has),
// ErrContextFull, ErrLimit (MemoryBudget: the message says the least), ErrNoMemory, ErrCorrupt, ErrNoSpace, ErrIO, ErrBusy: the cache is as it was, but that
// with the last five an update that was to begin a step may have ended the attention of the complete one.
func (c *Cache) Update(layer uint32, k, v, q Numbers) error {
	if err := c.enter(); err != nil {
		return err
	}
	defer c.leave()
	keys, err := c.rows("k", k, c.shape.KVHeads, nil)
	if err != nil {
		return err
	}
	values, err := c.rows("v", v, c.shape.KVHeads, &keys)
	if err != nil {
		return err
	}
	var queries rows
	if q != nil {
		if queries, err = c.rows("q", q, c.shape.Heads, &keys); err != nil {
			return err
		}
	}
	return c.do(func(e *C.kv_error) C.kv_status {
		return C.kvasir_go_cache_update(c.ptr, C.uint32_t(layer), keys.kind, keys.first, values.first, queries.first, keys.tokens, e)
	})
}

// AttentionOptions are for Attention.
type AttentionOptions struct {
	Scale   float32 // of q . k; 0: 1 / sqrt(HeadDim)
	Softcap float32 // scores become Softcap * tanh(score / Softcap); strategies choose by the scores before that; 0: as they are
}

// Attention writes to out what the step's queries attend in one layer, causally, over all tokens so far. The layer has had its Update in this step. A
// complete step can be attended until another begins, or Truncate, Fork or Save is called. options may be nil.
// ErrBadArgument, ErrBadState (the layer has no update in this step; the step is over; the filter layer before it has not been attended), ErrCancelled,
// ErrNoMemory, ErrCorrupt, ErrIO, ErrBusy: the cache is as it was and out unchanged.
func (c *Cache) Attention(ctx context.Context, layer uint32, q, out Numbers, options *AttentionOptions) error {
	if err := c.enter(); err != nil {
		return err
	}
	defer c.leave()
	if options == nil {
		options = &AttentionOptions{}
	}
	from, err := c.rows("q", q, c.shape.Heads, nil)
	if err != nil {
		return err
	}
	to, err := c.rows("out", out, c.shape.Heads, &from)
	if err != nil {
		return err
	}
	if a, b := uintptr(unsafe.Pointer(from.first)), uintptr(unsafe.Pointer(to.first)); a < b+to.size && b < a+from.size {
		return failure(ErrBadArgument, "out shares memory with q")
	}
	o := defaults(func(o *C.kv_cache_attention_options, size C.size_t) { C.kv_cache_attention_options_init(o, size) })
	o.scale, o.softcap = C.float(options.Scale), C.float(options.Softcap)
	return c.long(ctx, nil, func(call *call) C.kv_status {
		o.cancel = call.cancel
		return C.kvasir_go_cache_attention(c.ptr, C.uint32_t(layer), from.kind, from.first, to.first, from.tokens, o, &call.e)
	})
}

// Truncate goes back to the first so many tokens, and drops a step that is not complete. ErrBadArgument when there are fewer.
func (c *Cache) Truncate(tokens uint64) error {
	return c.do(func(e *C.kv_error) C.kv_status { return C.kv_cache_truncate(c.ptr, C.uint64_t(tokens), e) })
}

// Fork makes a second cache that begins as an exact copy, pages shared, with the same options. ErrBadState while a step is not complete.
func (c *Cache) Fork() (*Cache, error) {
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	fork := &Cache{shape: c.shape}
	var e C.kv_error
	return fork.adopt(newError(C.kv_cache_fork(c.ptr, nil, &fork.ptr, &e), &e))
}

// Save writes the cache to a file, atomically, as Session.Save does. progress may be nil. ErrBadState while a step is not complete.
func (c *Cache) Save(ctx context.Context, path string, progress ProgressFunc) error {
	var memory memory
	defer memory.free()
	file := memory.path("path", path)
	if memory.err != nil {
		return memory.err
	}
	return c.long(ctx, progress, func(call *call) C.kv_status { return C.kv_cache_save(c.ptr, file, call.options(0), &call.e) })
}

// Stats is JSON: tokens (of complete steps), pages, window, strategy and budget, tokens read and present of all attention so far, bytes of memory.
func (c *Cache) Stats() (json.RawMessage, error) {
	return c.statistics(func(to *C.char, capacity C.size_t, size *C.size_t, e *C.kv_error) C.kv_status {
		return C.kv_cache_stats(c.ptr, to, capacity, size, e)
	})
}

// FromCacheOptions are for SessionFromCache.
type FromCacheOptions struct {
	Document bool // the tokens are what Tokenize makes with TokenizeDocument; false: the session is as after PrefillTokens
	Progress ProgressFunc
}

// SessionFromCache makes a session over what is in a cache: a document that another engine has read, also on another machine (Cache.Save, LoadCache), is
// asked by this model. tokens are the cache's, as many as it holds. Keys are those of the model's own file, after RoPE: in files of the
// architecture "llama" two halves that engines of other formats rotate are interleaved (channel i of half h is channel 2 i + h). Pages are shared with
// the cache, which stays as it is. The newest tokens, at most a window and a page, are read again and compared with what the cache has. Window and KVType
// are the cache's. Both options may be nil.
// ErrBadArgument (another number of tokens), ErrBadState (a step is not complete), ErrModelMismatch (other weights, positions or order of channels),
// ErrContextFull, ErrCancelled, ErrLimit (MemoryBudget), ErrCorrupt, ErrNoMemory, ErrBusy: the cache is as it was.
func (m *Model) SessionFromCache(ctx context.Context, cache *Cache, tokens []int32, options *SessionOptions, from *FromCacheOptions) (s *Session, err error) {
	defer raise(&err)
	if cache == nil {
		return nil, failure(ErrBadArgument, "the cache is nil")
	}
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	if err := cache.enter(); err != nil {
		return nil, err
	}
	defer cache.leave()
	if from == nil {
		from = &FromCacheOptions{}
	}
	flags := C.uint32_t(0)
	if from.Document {
		flags = C.KV_TOKENIZE_DOCUMENT
	}
	var memory memory
	defer memory.free()
	return m.makeSession(ctx, options, from.Progress, &memory, func(s *Session, o *C.kv_session_options, c *call) C.kv_status {
		ids := (*C.int32_t)(unsafe.SliceData(tokens))
		return C.kv_session_from_cache(m.ptr, cache.ptr, ids, C.size_t(len(tokens)), o, c.options(flags), &s.ptr, &c.e)
	})
}

func (s CacheShape) raw() *C.kv_cache_shape {
	raw := &C.kv_cache_shape{struct_size: C.sizeof_kv_cache_shape, layers: C.uint32_t(s.Layers), heads: C.uint32_t(s.Heads),
		kv_heads: C.uint32_t(s.KVHeads), head_dim: C.uint32_t(s.HeadDim), max_tokens: C.uint64_t(s.MaxTokens)}
	for i, b := range s.Identity {
		raw.identity[i] = C.uint8_t(b)
	}
	return raw
}

// raw are the options for C: NULL for nil. Their strings are held by memory.
func (from *CacheOptions) raw(memory *memory) (*C.kv_cache_options, error) {
	if from == nil {
		return nil, memory.err
	}
	o := defaults(func(o *C.kv_cache_options, size C.size_t) { C.kv_cache_options_init(o, size) })
	if err := setDenseLayers(&o.dense_layers, from.DenseLayers); err != nil {
		return nil, err
	}
	o.threads = C.uint32_t(from.Threads)
	o.kv_type = C.uint32_t(from.KVType)
	o.window = C.uint32_t(from.Window)
	o.strategy = memory.option("strategy", from.Strategy)
	o.budget_tokens = C.uint64_t(from.BudgetTokens)
	o.budget_fraction = C.double(from.BudgetFraction)
	o.share_heads = flag(!from.SeparateHeads)
	o.filter_layers = memory.layers(from.FilterLayers)
	o.alpha = C.float(from.Alpha)
	o.coverage = C.float(from.Coverage)
	o.select_tokens = C.uint32_t(from.SelectTokens)
	o.memory_budget = C.uint64_t(from.MemoryBudget)
	o.spill_folder = memory.option("spill folder", from.SpillFolder)
	return o, memory.err
}
