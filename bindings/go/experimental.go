package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"fmt"
	"unsafe"
)

// This file binds kvasir_experimental.h. Its names and behaviour may change or disappear in any
// version.

// Experimental parameters.
const (
	ParamSearchBreadth  Param = C.KV_PARAM_SEARCH_BREADTH
	ParamHeadGraphs     Param = C.KV_PARAM_HEAD_GRAPHS
	ParamBudgetSchedule Param = C.KV_PARAM_BUDGET_SCHEDULE
	ParamFilterWindow   Param = C.KV_PARAM_FILTER_WINDOW
)

// SearchBreadth sets the tokens that a search keeps, at least 64, or the clusters that "ivf" reads.
// For "hnsw", "ood", "dipr-graph" and "ivf". Experimental.
func SearchBreadth(tokens int) Setting {
	return Setting{param: ParamSearchBreadth, value: float64(tokens)}
}

// HeadGraphs sets whether each query head has its own graph. By default the heads of a group have
// one graph. For "ood" and "dipr-graph". Experimental.
func HeadGraphs(on bool) Setting { return Setting{param: ParamHeadGraphs, value: number(on)} }

// BudgetSchedule is how a budget is spread over the layers that select. The mean stays the same.
// Experimental.
type BudgetSchedule uint32

const (
	BudgetUniform BudgetSchedule = C.KV_BUDGET_UNIFORM // the same in all layers (default)
	BudgetLinear  BudgetSchedule = C.KV_BUDGET_LINEAR  // from 3/2 of the mean to 1/2
	BudgetPyramid BudgetSchedule = C.KV_BUDGET_PYRAMID // from 39/20 to 1/20 (PyramidKV)
)

// Setting makes the setting of a strategy whose layers each have a budget.
func (s BudgetSchedule) Setting() Setting {
	return Setting{param: ParamBudgetSchedule, value: float64(s)}
}

// FilterWindow is the set of queries whose attention a filter layer selects by. Experimental.
type FilterWindow uint32

const (
	FilterLast        FilterWindow = C.KV_FILTER_LAST        // the newest (default)
	FilterExponential FilterWindow = C.KV_FILTER_EXPONENTIAL // newest 16; weights 1, 1/2, 1/4, ...
	FilterUniform     FilterWindow = C.KV_FILTER_UNIFORM     // newest 16 with equal weights
)

// Setting makes the setting of a "filter-layers" strategy.
func (w FilterWindow) Setting() Setting {
	return Setting{param: ParamFilterWindow, value: float64(w)}
}

// Measure selects what [Session.Measure] measures. Experimental.
type Measure uint32

const (
	MeasureCompare Measure = C.KV_MEASURE_COMPARE // compare each decoded token with exact attention
	MeasureLayers  Measure = C.KV_MEASURE_LAYERS  // also compare the layers with each other
	MeasureCertify Measure = C.KV_MEASURE_CERTIFY // bound the attention that was read from below
)

// Measure measures all decode from now on; 0 stops it. It costs as much as full attention.
// [Session.StatsJSON] has the results of the last answer. Experimental.
// ErrBadArgument, ErrNoMemory, ErrBusy.
func (s *Session) Measure(what Measure) error {
	return s.do(func(e *C.kv_error) C.kv_status {
		return C.kv_session_measure(s.ptr, C.uint32_t(what), e)
	})
}

// PrefillLogits appends tokens as PrefillTokens does. logits, [len(tokens)][ModelInfo.Vocabulary],
// receives the logits at each token. After a failure whole chunks stay, as [Session.Tokens] shows,
// and the logits of the others are not written. progress may be nil. Experimental.
func (s *Session) PrefillLogits(ctx context.Context, tokens []int32, logits []float32,
	progress ProgressFunc) (err error) {
	defer raise(&err)
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	info := sized[C.kv_model_info]()
	var e C.kv_error
	if err := s.result(C.kv_model_get_info(s.model, info, &e), &e); err != nil {
		return err
	}
	want := uint64(len(tokens)) * uint64(info.vocabulary)
	if uint64(len(logits)) != want {
		return failure(ErrBadArgument, fmt.Sprintf(
			"logits has %d elements and needs %d; the sequence is unchanged", len(logits), want))
	}
	ids, count := idsOf(tokens)
	to := (*C.float)(unsafe.SliceData(logits))
	return s.long(ctx, progress, func(c *call) C.kv_status {
		return C.kv_prefill_logits(s.ptr, ids, count, to, c.control(0), &c.e)
	})
}
