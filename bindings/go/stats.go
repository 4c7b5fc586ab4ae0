package kvasir

// #include "bridge.h"
import "C"

import (
	"encoding/json"
	"time"
)

// GPUFlags is the work of a GPU in a session. With several GPUs a bit is set only if it holds for
// all.
type GPUFlags uint32

const (
	GPUOutput     GPUFlags = C.KV_GPU_OUTPUT      // computes the output layer
	GPUAttends    GPUFlags = C.KV_GPU_ATTENDS     // attends alone in its layers
	GPUCoexecutes GPUFlags = C.KV_GPU_COEXECUTES  // CPU and GPU attend each layer together
	GPUReadsPages GPUFlags = C.KV_GPU_READS_PAGES // reads pinned host memory; no staging by the CPU
)

// SessionStats is the state of a session and its last decode (Generate, Next or Score).
type SessionStats struct {
	Threads           int
	Tokens            int // of the sequence
	Context           int // maximum tokens
	SealedTokens      int // in pages
	PageTokens        int // tokens per page
	SinkTokens        int // first tokens, always attended
	WindowTokens      int // newest tokens, not sealed
	PrefillChunk      int // tokens per prefill step
	KVBytesPerToken   int64
	PrivateBytes      int64 // of the KV cache and what is stored with it, in host memory
	MappedBytes       int64 // in the loaded file
	SpilledBytes      int64 // in the spill file
	MemoryLimit       int64 // bytes; 0: none
	PrefillTokens     int   // appended by Prefill in this session
	PrefillTime       time.Duration
	SparseTokens      int           // up to the last one of a sparse prefill; 0: all are exact
	LoadTime          time.Duration // 0: not loaded
	BudgetTokens      int           // mean per layer and head
	IndexTokens       int           // in the strategy's index; 0: none
	IndexBytes        int64
	IndexTime         time.Duration // of the last build in this session
	LastSteps         int           // tokens decoded by the last decode
	LastDecodeTime    time.Duration
	LastTokensRead    int64 // as Answer.TokensRead
	LastTokensPresent int64 // as Answer.TokensPresent
	LastPagesTouched  int64
	LastMassRead      float64 // estimated share of attention that was read, 0 to 1; -1: unknown
	GPULayers         int     // layers on GPUs
	GPUFlags          GPUFlags
	GPUWeightBytes    int64
	GPUBytes          int64  // in use on all GPUs, weights included
	GPUMemoryLimit    int64  // bytes that they may use
	DecodeStrategy    string // chosen for the next token; "auto" is resolved
	ChatFormat        string // of the turns
	Device            string // "cpu", "cuda:0", "cuda:0,cuda:1", truncated
	PrefilledAgain    int    // tokens prefilled again, after a rewind or for a prefix
	WindowsBytes      int64  // of layers with a sliding window, in memory and in the loaded file
	LastDrafted       int    // tokens that were drafted for the last answer
	LastAccepted      int    // those of them that the answer has
	LastLookedUp      int    // those of LastDrafted from the sequence's own text
	// LastLookupAccepted are those of LastLookedUp that the answer has.
	LastLookupAccepted int
}

// Stats returns the state of the session and its last decode. ErrNoMemory, ErrBusy.
func (s *Session) Stats() (SessionStats, error) {
	raw := sized[C.kv_session_stats]()
	err := s.do(func(e *C.kv_error) C.kv_status { return C.kv_session_get_stats(s.ptr, raw, e) })
	if err != nil {
		return SessionStats{}, err
	}
	return SessionStats{
		Threads:           int(raw.threads),
		Tokens:            int(raw.tokens),
		Context:           int(raw.context_tokens),
		SealedTokens:      int(raw.sealed_tokens),
		PageTokens:        int(raw.page_tokens),
		SinkTokens:        int(raw.sink_tokens),
		WindowTokens:      int(raw.window_tokens),
		PrefillChunk:      int(raw.prefill_chunk),
		KVBytesPerToken:   int64(raw.kv_bytes_per_token),
		PrivateBytes:      int64(raw.private_bytes),
		MappedBytes:       int64(raw.mapped_bytes),
		SpilledBytes:      int64(raw.spilled_bytes),
		MemoryLimit:       int64(raw.memory_limit),
		PrefillTokens:     int(raw.prefill_tokens),
		PrefillTime:       time.Duration(raw.prefill_ns),
		SparseTokens:      int(raw.sparse_tokens),
		LoadTime:          time.Duration(raw.load_ns),
		BudgetTokens:      int(raw.budget_tokens),
		IndexTokens:       int(raw.index_tokens),
		IndexBytes:        int64(raw.index_bytes),
		IndexTime:         time.Duration(raw.index_ns),
		LastSteps:         int(raw.last_steps),
		LastDecodeTime:    time.Duration(raw.last_decode_ns),
		LastTokensRead:    int64(raw.last_tokens_read),
		LastTokensPresent: int64(raw.last_tokens_present),
		LastPagesTouched:  int64(raw.last_pages_touched),
		LastMassRead:      float64(raw.last_mass_read),
		GPULayers:         int(raw.gpu_layers),
		GPUFlags:          GPUFlags(raw.gpu_flags),
		GPUWeightBytes:    int64(raw.gpu_weight_bytes),
		GPUBytes:          int64(raw.gpu_bytes),
		GPUMemoryLimit:    int64(raw.gpu_memory_limit),
		DecodeStrategy:    text(raw.decode_strategy[:]),
		ChatFormat:        text(raw.chat_format[:]),
		Device:            text(raw.device[:]),
		PrefilledAgain:    int(raw.prefilled_again),
		WindowsBytes:      int64(raw.windows_bytes),
		LastDrafted:       int(raw.last_drafted),
		LastAccepted:      int(raw.last_accepted),
		LastLookedUp:      int(raw.last_looked_up),

		LastLookupAccepted: int(raw.last_lookup_accepted),
	}, nil
}

// StatsJSON returns JSON for people: the fields of Stats, and why a strategy or device was chosen.
// docs/cli.md lists the keys; new ones may be added.
func (s *Session) StatsJSON() (json.RawMessage, error) {
	return s.json(func(to *C.char, capacity C.size_t, size *C.size_t, e *C.kv_error) C.kv_status {
		return C.kv_session_stats_json(s.ptr, to, capacity, size, e)
	})
}

// CacheStats is the state of a cache. The counts of attention are sums over all calls so far.
type CacheStats struct {
	Threads        int
	Tokens         int // of complete steps
	MaxTokens      int
	SealedTokens   int   // in pages
	PageTokens     int   // tokens per page
	SinkTokens     int   // first tokens, always attended
	WindowTokens   int   // newest tokens, not sealed
	StepTokens     int   // of the current step
	PrivateBytes   int64 // as in SessionStats
	MappedBytes    int64
	SpilledBytes   int64
	MemoryLimit    int64
	BudgetTokens   int   // mean per layer and head
	TokensRead     int64 // as Answer.TokensRead
	TokensPresent  int64
	PagesTouched   int64
	DecodeStrategy string // chosen for the next token; "auto" is resolved
}

// Stats returns the state of the cache. ErrBusy.
func (c *Cache) Stats() (CacheStats, error) {
	raw := sized[C.kv_cache_stats]()
	err := c.do(func(e *C.kv_error) C.kv_status { return C.kv_cache_get_stats(c.ptr, raw, e) })
	if err != nil {
		return CacheStats{}, err
	}
	return CacheStats{
		Threads:        int(raw.threads),
		Tokens:         int(raw.tokens),
		MaxTokens:      int(raw.max_tokens),
		SealedTokens:   int(raw.sealed_tokens),
		PageTokens:     int(raw.page_tokens),
		SinkTokens:     int(raw.sink_tokens),
		WindowTokens:   int(raw.window_tokens),
		StepTokens:     int(raw.step_tokens),
		PrivateBytes:   int64(raw.private_bytes),
		MappedBytes:    int64(raw.mapped_bytes),
		SpilledBytes:   int64(raw.spilled_bytes),
		MemoryLimit:    int64(raw.memory_limit),
		BudgetTokens:   int(raw.budget_tokens),
		TokensRead:     int64(raw.tokens_read),
		TokensPresent:  int64(raw.tokens_present),
		PagesTouched:   int64(raw.pages_touched),
		DecodeStrategy: text(raw.decode_strategy[:]),
	}, nil
}

// StatsJSON returns JSON for people, as [Session.StatsJSON] does.
func (c *Cache) StatsJSON() (json.RawMessage, error) {
	return c.json(func(to *C.char, capacity C.size_t, size *C.size_t, e *C.kv_error) C.kv_status {
		return C.kv_cache_stats_json(c.ptr, to, capacity, size, e)
	})
}
