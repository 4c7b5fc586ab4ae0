package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"unsafe"
)

// Cache is a KV cache for an engine that brings its own weights: the same int8 pages behind a
// full-precision window, the same strategies and the same file as those of a session. For each step
// of 1 to 4096 tokens (a chunk of the prompt, or one token of the answer) and each layer: Update,
// then Attention. A cache serves one call at a time; a second concurrent call is ErrBusy and
// changes nothing.
//
// Arrays are contiguous rows, which are not copied: keys and values [tokens][KVHeads][HeadDim],
// queries and the output of Attention [tokens][Heads][HeadDim]. KV head h serves the query heads
// h * Heads / KVHeads up to (h + 1) * Heads / KVHeads - 1.
type Cache struct {
	handle
	ptr   *C.kv_cache
	shape CacheShape
}

// CacheShape is the shape of a cache.
type CacheShape struct {
	Layers    int // 1 to 1024
	Heads     int // query heads, 1 to 1024
	KVHeads   int // a divisor of Heads
	HeadDim   int // 1 to 512
	MaxTokens int // 1 to 2^30; memory grows with the sequence
	// Identity is the caller's name of what makes the keys, such as a hash of its weights.
	// LoadCache compares it.
	Identity [32]byte
}

// CacheOptions are the options of OpenCache and LoadCache. The zero value is the default. Fields
// that SessionOptions has too mean the same.
type CacheOptions struct {
	Threads   int
	Window    int
	Precision Precision
	// Decode is the strategy of steps of one token; longer steps are exact. nil: "auto". Strategies
	// lists those that a cache takes. With "filter-layers", a filter layer must be attended before
	// the layers up to the next one. "infllm" needs q in each Update.
	Decode         *Strategy
	MemoryLimit    int64 // Update refuses a step that does not fit, before any change
	SpillDirectory string
}

// Numbers are the rows of an array: Float32, Float16 or BFloat16. A conversion copies nothing:
// kvasir.Float16(keys).
type Numbers interface{ rows() rows }

// Float32 are numbers of 32 bits.
type Float32 []float32

// Float16 are the bits of IEEE 754 numbers of 16 bits.
type Float16 []uint16

// BFloat16 are the upper halves of the bits of a float32.
type BFloat16 []uint16

// rows are an array in C.
type rows struct {
	kind   C.uint32_t // kv_number_type
	first  *C.uint8_t
	size   uintptr // bytes
	count  int     // elements
	tokens C.uint32_t
}

func (n Float32) rows() rows  { return rowsOf(C.KV_F32, n) }
func (n Float16) rows() rows  { return rowsOf(C.KV_F16, n) }
func (n BFloat16) rows() rows { return rowsOf(C.KV_BF16, n) }

func rowsOf[T float32 | uint16](kind C.uint32_t, array []T) rows {
	return rows{
		kind:  kind,
		first: (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(array))),
		size:  uintptr(len(array)) * unsafe.Sizeof(T(0)),
		count: len(array),
	}
}

// rows checks the size of an array, since the library takes bare pointers. With a reference, the
// array must have its tokens and its type.
func (c *Cache) rows(name string, array Numbers, heads int, reference *rows) (r rows, err error) {
	if array == nil {
		return r, failure(ErrBadArgument, name+" is nil")
	}
	r = array.rows()
	row := heads * c.shape.HeadDim // at least 1: kv_cache_open checked the shape
	if r.count%row != 0 || r.count/row > math.MaxUint32 {
		return r, failure(ErrBadArgument,
			fmt.Sprintf("%s has %d numbers: a token has %d", name, r.count, row))
	}
	r.tokens = C.uint32_t(r.count / row)
	if reference != nil && (r.tokens != reference.tokens || r.kind != reference.kind) {
		return r, failure(ErrBadArgument, fmt.Sprintf(
			"%s has %d tokens, not %d, or another type", name, r.tokens, reference.tokens))
	}
	return r, nil
}

// OpenCache makes an empty cache. options may be nil.
// ErrBadArgument (shape, options), ErrNoMemory, ErrLimit (threads; MemoryLimit); ErrNotFound,
// ErrPermission, ErrNoSpace (SpillDirectory).
func OpenCache(shape CacheShape, options *CacheOptions) (*Cache, error) {
	var a arguments
	defer a.free()
	raw, o := shape.raw(&a), options.raw(&a)
	if a.err != nil {
		return nil, a.err
	}
	c := &Cache{shape: shape}
	var e C.kv_error
	return c.adopt(newError(C.kv_cache_open(raw, o, &c.ptr, &e), &e))
}

// LoadCache makes a cache from a file by mapping it. Both options may be nil. Window and Precision
// come from the file.
// ErrModelMismatch (another shape or identity, but query heads are not compared; a session's file),
// ErrBadArgument (a full-precision file with a MemoryLimit), and the errors of Model.Load and
// OpenCache.
func LoadCache(ctx context.Context, path string, shape CacheShape, options *CacheOptions,
	load *LoadOptions) (cache *Cache, err error) {
	defer raise(&err)
	if load == nil {
		load = &LoadOptions{}
	}
	var a arguments
	defer a.free()
	file, raw, o := a.path("the path", path), shape.raw(&a), options.raw(&a)
	if a.err != nil {
		return nil, a.err
	}
	c, err := begin(ctx, nil, load.Progress)
	if err != nil {
		return nil, err
	}
	cache = &Cache{shape: shape}
	status := C.kv_cache_load(raw, file, o, load.control(c), &cache.ptr, &c.e)
	return cache.adopt(c.end(&cache.handle, status))
}

// adopt makes c.ptr usable. With an error it releases it.
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

// Close releases the cache after the running call on it has returned. Forks and sessions keep the
// pages that they share with it.
func (c *Cache) Close() error { return c.close() }

// Update adds one layer's keys (after RoPE) and values of the step's tokens. q, the step's queries
// after RoPE, is for "infllm"; otherwise it may be nil. The first update after a complete step
// begins a step. A step is complete when every layer has its update, in any order.
// ErrBadArgument (layer, sizes; NaN, infinity, or a magnitude over 1e30), ErrBadState (the layer
// has its update; the step has another number of tokens), ErrContextFull, ErrLimit (MemoryLimit;
// the message has the minimum), ErrBusy. ErrNoMemory, ErrCorrupt, ErrNoSpace, ErrIO: the cache is
// as before, but an update that begins a step may have ended the attention of the complete one.
func (c *Cache) Update(layer int, k, v, q Numbers) error {
	if err := c.enter(); err != nil {
		return err
	}
	defer c.leave()
	var a arguments
	index := a.u32("the layer", layer)
	if a.err != nil {
		return a.err
	}
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
		return C.kvasir_go_cache_update(c.ptr, index, keys.kind, keys.first, values.first,
			queries.first, keys.tokens, e)
	})
}

// AttentionOptions are the options of Attention.
type AttentionOptions struct {
	Scale float32 // of q . k; 0: 1 / sqrt(HeadDim)
	// Softcap makes scores Softcap * tanh(score / Softcap), in slower code. Strategies select by
	// the scores before. 0: off.
	Softcap float32
}

// Attention writes the attention of the step's queries in one layer to out. Query i sees the tokens
// before the step and those of the step up to its own. The layer must have its Update. A complete
// step can be attended until the next one begins, or until Truncate, Fork or Save. options may be
// nil.
// ErrBadArgument, ErrBadState (no update of this layer in the step; the step is over; its filter
// layer has not been attended), ErrCancelled, ErrNoMemory, ErrCorrupt, ErrIO, ErrBusy: cache and
// out are unchanged.
func (c *Cache) Attention(ctx context.Context, layer int, q, out Numbers,
	options *AttentionOptions) error {
	if err := c.enter(); err != nil {
		return err
	}
	defer c.leave()
	if options == nil {
		options = &AttentionOptions{}
	}
	var a arguments
	index := a.u32("the layer", layer)
	if a.err != nil {
		return a.err
	}
	from, err := c.rows("q", q, c.shape.Heads, nil)
	if err != nil {
		return err
	}
	to, err := c.rows("out", out, c.shape.Heads, &from)
	if err != nil {
		return err
	}
	if overlap(&from, &to) {
		return failure(ErrBadArgument, "q and out overlap in memory")
	}
	o := sized[C.kv_cache_attention_options]()
	o.scale, o.softcap = C.float(options.Scale), C.float(options.Softcap)
	return c.long(ctx, nil, func(call *call) C.kv_status {
		return C.kvasir_go_cache_attention(c.ptr, index, from.kind, from.first, to.first,
			from.tokens, o, call.control(0), &call.e)
	})
}

func overlap(a, b *rows) bool {
	first, second := uintptr(unsafe.Pointer(a.first)), uintptr(unsafe.Pointer(b.first))
	return first < second+b.size && second < first+a.size
}

// Truncate truncates the cache to its first tokens, and drops an incomplete step.
// ErrBadArgument (there are fewer), ErrCorrupt, ErrNoMemory, ErrBusy.
func (c *Cache) Truncate(tokens int) error {
	var a arguments
	count := a.u64("tokens", int64(tokens))
	if a.err != nil {
		return a.err
	}
	return c.do(func(e *C.kv_error) C.kv_status { return C.kv_cache_truncate(c.ptr, count, e) })
}

// Fork makes an exact copy with the same options. Both share the pages. Fork first builds a missing
// sketch.
// ErrBadState (the step is incomplete), ErrCancelled, ErrNoMemory, ErrLimit, ErrCorrupt, ErrBusy.
func (c *Cache) Fork(ctx context.Context) (*Cache, error) {
	fork := &Cache{shape: c.shape}
	err := c.long(ctx, nil, func(call *call) C.kv_status {
		return C.kv_cache_fork(c.ptr, call.control(0), &fork.ptr, &call.e)
	})
	return fork.adopt(err)
}

// Save writes the cache to a file, as Session.Save does. progress may be nil. ErrBadState (the step
// is incomplete), and the errors of Session.Save.
func (c *Cache) Save(ctx context.Context, path string, progress ProgressFunc) error {
	var a arguments
	defer a.free()
	file := a.path("the path", path)
	if a.err != nil {
		return a.err
	}
	return c.long(ctx, progress, func(call *call) C.kv_status {
		return C.kv_cache_save(c.ptr, file, call.control(0), &call.e)
	})
}

// FromCacheOptions are the options of SessionFromCache.
type FromCacheOptions struct {
	// Document: Tokenize made the tokens with TokenizeDocument. Questions then get the turns of the
	// chat format. Otherwise the session is as after PrefillTokens.
	Document bool
	Progress ProgressFunc
}

// SessionFromCache makes a session over a cache that another engine has filled, also on another
// machine (Cache.Save, LoadCache). tokens are all of the cache's. The session shares the pages; the
// cache stays as it is. Window and Precision are the cache's. Both options may be nil.
//
// Keys must be as the model's file makes them: after RoPE, with the file's channel order. GGUF
// files of the architecture "llama" interleave the halves that other formats rotate: channel i of
// half h is channel 2 i + h. The model prefills the newest tokens again, at most a window and a
// page, and compares the keys.
// ErrBadArgument (number of tokens), ErrBadState (the step is incomplete), ErrModelMismatch (other
// weights, positions or order), ErrContextFull, ErrCancelled, ErrLimit (MemoryLimit), ErrCorrupt,
// ErrNoMemory, ErrBusy.
func (m *Model) SessionFromCache(ctx context.Context, cache *Cache, tokens []int32,
	options *SessionOptions, from *FromCacheOptions) (s *Session, err error) {
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
	flags := flag(from.Document, C.KV_TOKENIZE_DOCUMENT)
	ids, count := idsOf(tokens)
	var a arguments
	defer a.free()
	return m.makeSession(ctx, options, from.Progress, &a,
		func(s *Session, o *C.kv_session_options, c *call) C.kv_status {
			return C.kv_session_from_cache(m.ptr, cache.ptr, ids, count, o, c.control(flags),
				&s.ptr,
				&c.e)
		})
}

func (s CacheShape) raw(a *arguments) *C.kv_cache_shape {
	raw := sized[C.kv_cache_shape]()
	raw.layers = a.u32("Layers", s.Layers)
	raw.heads = a.u32("Heads", s.Heads)
	raw.kv_heads = a.u32("KVHeads", s.KVHeads)
	raw.head_dim = a.u32("HeadDim", s.HeadDim)
	raw.max_tokens = a.u64("MaxTokens", int64(s.MaxTokens))
	for i, b := range s.Identity {
		raw.identity[i] = C.uint8_t(b)
	}
	return raw
}

// raw converts the options; nil to NULL.
func (from *CacheOptions) raw(a *arguments) *C.kv_cache_options {
	if from == nil {
		return nil
	}
	o := sized[C.kv_cache_options]()
	o.threads = a.u32("Threads", from.Threads)
	o.window_tokens = a.u32("Window", from.Window)
	o.precision = C.uint32_t(from.Precision)
	o.decode = a.strategy(from.Decode)
	o.memory_limit = a.u64("MemoryLimit", from.MemoryLimit)
	o.spill_directory = a.option("SpillDirectory", from.SpillDirectory)
	return o
}
