package kvasir

// #include "bridge.h"
import "C"

import (
	"math"
	"strconv"
	"strings"
)

// KVType says how keys and values are kept.
type KVType uint32

const (
	KVInt8 KVType = C.KV_KV_INT8 // int8 pages behind a full-precision window
	KVF32  KVType = C.KV_KV_F32  // everything in full precision and attended in full: the reference; 7 times the memory
)

// FilterWindow says what a filter layer chooses by: the share of attention that tokens get of some queries.
type FilterWindow uint32

const (
	FilterLast        FilterWindow = C.KV_FILTER_LAST        // the newest query
	FilterExponential FilterWindow = C.KV_FILTER_EXPONENTIAL // the newest 16, each counting twice as much as the one before it
	FilterUniform     FilterWindow = C.KV_FILTER_UNIFORM     // the newest 16 alike
)

// BudgetSchedule says how a budget is spread over the layers that choose. Its mean is the same.
type BudgetSchedule uint32

const (
	BudgetUniform BudgetSchedule = C.KV_BUDGET_UNIFORM // the same in all
	BudgetLinear  BudgetSchedule = C.KV_BUDGET_LINEAR  // from 3/2 of the mean in the first layer to 1/2 in the last
	BudgetPyramid BudgetSchedule = C.KV_BUDGET_PYRAMID // from 39/20 to 1/20
)

// NoDenseLayers is for the option DenseLayers.
const NoDenseLayers = -1

// SessionOptions are for everything that makes a session. The zero value is the default.
type SessionOptions struct {
	Threads      uint32 // 0: as many as the process has processors; the caller's is one of them
	Context      uint64 // tokens the sequence may hold; 0: what the model was trained for. More is refused
	KVType       KVType
	Window       uint32 // newest tokens kept in full precision and always attended; 0: 64
	PrefillChunk uint32 // tokens read together, 1 to 4096; 0: chosen
	// Layers that attend everything; 0: the strategy's default, NoDenseLayers: none.
	DenseLayers int
	// What decode reads: "" or "auto", or a name that Strategies lists. "auto" is "full" up to 4096 sealed tokens, then "bounded".
	Strategy       string
	BudgetTokens   uint64  // tokens a layer and head may read besides sinks and window, on average over layers; 0: use the fraction
	BudgetFraction float64 // of the sealed tokens, 0 to 1; 0: the strategy's default
	SeparateHeads  bool    // each query head of a group chooses for itself; false: together
	Alpha          float32 // "dipr", "dipr-graph": read tokens with at least this part of the largest one's attention; 0: 0.012
	Log            LogFunc // nil: silent
	// "filter-layers": which layers choose for those after them, numbered from 0, ascending; nil: some, spread evenly.
	FilterLayers []uint32
	FilterWindow FilterWindow
	// For measurement, at the cost of full attention. 1: Stats compares what was read with exact attention ("compared");
	// 2: also how alike the layers are ("covered"); 0: neither.
	Compare      uint32
	SelectTokens uint32 // "quest": neighbouring tokens chosen together, a multiple of 16 up to 1024; 0: 16
	Certify      bool   // each decoded token gets a certificate of how much of its attention was read at least: Stats
	// How documents are read behind their first 4096 tokens: "" or "full": exactly; "bounded", "quest", "flat", "filter-layers" or "window":
	// sparsely, several times faster where the text is long.
	PrefillStrategy       string
	PrefillBudgetFraction float64 // chosen of the tokens before, 0 to 1; 0: 0.1; at least 2048 in any case
	PrefillExactTokens    uint64  // of each Prefill the last so many tokens are read exactly all the same
	// "bounded": read as many tokens as keep the standard error of the sampled attention below 1 - Coverage, 0 to less than 1; 0: 0.96 with the
	// default budget, else what the budget says.
	Coverage float32
	// "hnsw", "ood", "dipr-graph": the tokens a search keeps at a time, at least 64; "ivf": the clusters it reads. 0: as the budget needs.
	SearchBreadth  uint32
	BudgetSchedule BudgetSchedule // other than uniform it is refused for "auto" and strategies without a budget or that spread it
	HeadGraphs     bool           // "ood", "dipr-graph": each query head has its own graph; false: those of a group share one
	// Bytes of memory that keys, values and all that is kept with them may take; 0: no limit. Pages beyond it are written to a file
	// without a name in SpillFolder, or stay in the file that was loaded; answers are the same, bit for bit. What has to fit in any case is
	// refused with ErrLimit before anything is read.
	MemoryBudget uint64
	SpillFolder  string // on a local disk; "": /var/tmp
}

// options are a session's for C: NULL for nil. Their log is held by the session, their strings by memory.
func (s *Session) options(from *SessionOptions, memory *memory) (*C.kv_session_options, error) {
	if memory.err != nil {
		return nil, memory.err
	}
	if from == nil {
		return nil, nil
	}
	o := defaults(func(o *C.kv_session_options, size C.size_t) { C.kv_session_options_init(o, size) })
	if err := setDenseLayers(&o.dense_layers, from.DenseLayers); err != nil {
		return nil, err
	}
	o.threads = C.uint32_t(from.Threads)
	o.context = C.uint64_t(from.Context)
	o.kv_type = C.uint32_t(from.KVType)
	o.window = C.uint32_t(from.Window)
	o.prefill_chunk = C.uint32_t(from.PrefillChunk)
	o.strategy = memory.option("strategy", from.Strategy)
	o.budget_tokens = C.uint64_t(from.BudgetTokens)
	o.budget_fraction = C.double(from.BudgetFraction)
	o.share_heads = flag(!from.SeparateHeads)
	o.alpha = C.float(from.Alpha)
	o.filter_layers = memory.layers(from.FilterLayers)
	o.filter_window = C.uint32_t(from.FilterWindow)
	o.compare = C.uint32_t(from.Compare)
	o.select_tokens = C.uint32_t(from.SelectTokens)
	o.certify = flag(from.Certify)
	o.prefill_strategy = memory.option("prefill strategy", from.PrefillStrategy)
	o.prefill_budget_fraction = C.double(from.PrefillBudgetFraction)
	o.prefill_exact_tokens = C.uint64_t(from.PrefillExactTokens)
	o.coverage = C.float(from.Coverage)
	o.search_breadth = C.uint32_t(from.SearchBreadth)
	o.budget_schedule = C.uint32_t(from.BudgetSchedule)
	o.head_graphs = flag(from.HeadGraphs)
	o.memory_budget = C.uint64_t(from.MemoryBudget)
	o.spill_folder = memory.option("spill folder", from.SpillFolder)
	if memory.err != nil {
		return nil, memory.err
	}
	var err error
	o.log, o.log_user, err = s.newLogger(from.Log)
	return o, err
}

// setDenseLayers leaves the strategy's default where from is 0.
func setDenseLayers(to *C.uint32_t, from int) error {
	switch {
	case int64(from) >= math.MaxUint32:
		return failure(ErrBadArgument, "DenseLayers is "+strconv.Itoa(from)+": no model has so many layers")
	case from > 0:
		*to = C.uint32_t(from)
	case from < 0:
		*to = 0
	}
	return nil
}

// layers are the numbers of filter layers as C has them, NULL when there are none.
func (m *memory) layers(numbers []uint32) *C.char {
	names := make([]string, len(numbers))
	for i, number := range numbers {
		names[i] = strconv.FormatUint(uint64(number), 10)
	}
	return m.option("filter layers", strings.Join(names, ","))
}

func flag(on bool) C.uint32_t {
	if on {
		return 1
	}
	return 0
}

// Sampling says how a token is chosen. The zero value is greedy: the likeliest one.
type Sampling struct {
	Temperature       float32 // 0: greedy
	TopK              uint32  // 0: off
	TopP              float32 // 0 or 1: off
	MinP              float32 // 0: off
	RepetitionPenalty float32 // 0 or 1: off; over the last 256 tokens
	Seed              uint64  // the same seed and input give the same answer
}

func (s *Sampling) options() *C.kv_generate_options {
	o := defaults(func(o *C.kv_generate_options, size C.size_t) { C.kv_generate_options_init(o, size) })
	o.temperature = C.float(s.Temperature)
	o.top_k = C.uint32_t(s.TopK)
	if s.TopP != 0 {
		o.top_p = C.float(s.TopP)
	}
	o.min_p = C.float(s.MinP)
	if s.RepetitionPenalty != 0 {
		o.repetition_penalty = C.float(s.RepetitionPenalty)
	}
	o.seed = C.uint64_t(s.Seed)
	return o
}
