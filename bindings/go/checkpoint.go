package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"unsafe"
)

// StateLayout is the order of the numbers of a LayerState. Channels and heads have the order of the
// model file. Rows are the newest ones: as many as a query at the checkpoint sees besides itself,
// or more.
type StateLayout uint32

const (
	// StateKeys are keys of a sliding window, after RoPE: [rows][KV heads][head dim].
	StateKeys StateLayout = C.KV_STATE_KEYS
	// StateValues are values of a sliding window: [rows][KV heads][head dim].
	StateValues StateLayout = C.KV_STATE_VALUES
	// StateInputs are inputs of a convolution: [channels][taps - 1], the newest last.
	StateInputs StateLayout = C.KV_STATE_INPUTS
	// StateKeyValue are matrices of a gated delta net: [heads][key dim][value dim].
	StateKeyValue StateLayout = C.KV_STATE_KEY_VALUE
	// StateValueKey are matrices of Mamba-2: [heads][value dim][key dim].
	StateValueKey StateLayout = C.KV_STATE_VALUE_KEY
)

var layoutNames = map[StateLayout]string{
	StateKeys:     "keys",
	StateValues:   "values",
	StateInputs:   "inputs",
	StateKeyValue: "key-value matrices",
	StateValueKey: "value-key matrices",
}

// String returns the layout's name.
func (l StateLayout) String() string { return name(l, "StateLayout", layoutNames) }

// LayerState is one array of a Checkpoint. Its memory is Go's.
type LayerState struct {
	Layer   int // of the model, from 0
	Layout  StateLayout
	Numbers Numbers
}

// Checkpoint is what layers with a sliding window and recurrent layers keep after the first Tokens
// tokens of another engine's sequence. States are StateKeys and StateValues of each layer with a
// window, StateInputs of each recurrent layer, and its matrices if it has any; in any order.
type Checkpoint struct {
	Tokens int
	States []LayerState
}

// FromCheckpointOptions are the options of SessionFromCheckpoint.
type FromCheckpointOptions struct {
	// End is a checkpoint of all tokens, with which the call compares what it computed. Without it
	// nothing proves the states of layers behind the last one that attends to all tokens.
	End *Checkpoint
	// Document: as in FromCacheOptions.
	Document bool
	Progress ProgressFunc
}

// SessionFromCheckpoint makes a session as SessionFromCache does, of a model with sliding windows
// or recurrent layers. The cache has the layers that attend to all tokens, in their order. The
// model prefills the tokens from start on again, and compares the keys and values of the newest
// ones. Both options may be nil.
// ErrBadArgument also: a checkpoint whose layers, layouts or counts are not the model's, or with
// NaN, infinity or a magnitude over 1e30; start too near to the end; a model without such layers.
// Other errors: SessionFromCache.
func (m *Model) SessionFromCheckpoint(ctx context.Context, cache *Cache, tokens []int32,
	start *Checkpoint, options *SessionOptions, from *FromCheckpointOptions) (
	s *Session, err error) {
	defer raise(&err)
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	if cache == nil || start == nil {
		return nil, failure(ErrBadArgument, "the cache or the checkpoint is nil")
	}
	if err := cache.enter(); err != nil {
		return nil, err
	}
	defer cache.leave()
	if from == nil {
		from = &FromCheckpointOptions{}
	}
	flags := flag(from.Document, C.KV_TOKENIZE_DOCUMENT)
	ids, count := idsOf(tokens)
	var a arguments
	defer a.free()
	var pinner runtime.Pinner // C memory refers to the arrays
	defer pinner.Unpin()
	first, last := start.raw(&a, &pinner), from.End.raw(&a, &pinner)
	if a.err != nil {
		return nil, a.err
	}
	return m.makeSession(ctx, options, from.Progress, &a,
		func(s *Session, o *C.kv_session_options, c *call) C.kv_status {
			return C.kv_session_from_checkpoint(m.ptr, cache.ptr, first, last, ids, count, o,
				c.control(flags), &s.ptr, &c.e)
		})
}

// raw converts a checkpoint; nil to NULL.
func (k *Checkpoint) raw(a *arguments, pinner *runtime.Pinner) *C.kv_checkpoint {
	if k == nil {
		return nil
	}
	raw := sized[C.kv_checkpoint]()
	raw.tokens = a.u64("Tokens", int64(k.Tokens))
	raw.count = a.u32("the number of States", len(k.States))
	if len(k.States) == 0 {
		return raw
	}
	block := C.calloc(C.size_t(len(k.States)), C.size_t(unsafe.Sizeof(C.kv_layer_state{})))
	if block == nil {
		a.refuse(ErrNoMemory, "no memory for States")
		return raw
	}
	a.blocks = append(a.blocks, block)
	raw.states = (*C.kv_layer_state)(block)
	for i, state := range k.States {
		if state.Numbers == nil {
			a.refuse(ErrBadArgument, "States[%d].Numbers is nil", i)
			return raw
		}
		numbers, to := state.Numbers.rows(), &unsafe.Slice(raw.states, len(k.States))[i]
		to.layer, to.layout = a.u32("Layer", state.Layer), C.uint32_t(state.Layout)
		to._type, to.count = numbers.kind, C.uint64_t(numbers.count)
		if numbers.count > 0 {
			pinner.Pin(numbers.first)
			to.numbers = unsafe.Pointer(numbers.first)
		}
	}
	return raw
}
