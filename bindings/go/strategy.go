package kvasir

// #include "bridge.h"
import "C"

import (
	"errors"
	"slices"
	"unsafe"
)

// Strategy decides which sealed pages attention reads. Sinks and window are always attended. A
// Strategy does not change. It serves any number of sessions and goroutines.
//
// A call that receives a strategy refuses a parameter that its use (decode, prefill, cache) does
// not have: [ErrBadArgument].
type Strategy struct {
	name     string
	settings []Setting
}

// Setting is a parameter of a strategy with its value, for [NewStrategy].
type Setting struct {
	param  Param
	value  float64
	layers []uint32 // of FilterLayers
}

// Param is a parameter of a strategy, for [Strategy.Get]. The function of the same name without
// Param makes its Setting, and describes it.
type Param uint32

const (
	ParamBudgetTokens   Param = C.KV_PARAM_BUDGET_TOKENS
	ParamBudgetFraction Param = C.KV_PARAM_BUDGET_FRACTION
	ParamDenseLayers    Param = C.KV_PARAM_DENSE_LAYERS
	ParamShareHeads     Param = C.KV_PARAM_SHARE_HEADS
	ParamAlpha          Param = C.KV_PARAM_ALPHA
	ParamCoverage       Param = C.KV_PARAM_COVERAGE
	ParamSelectTokens   Param = C.KV_PARAM_SELECT_TOKENS
	ParamExactTokens    Param = C.KV_PARAM_EXACT_TOKENS
	paramFilterLayers   Param = 1<<32 - 1 // kv_strategy_set_layers
)

// BudgetTokens sets the tokens per layer and head that decode selects, as a mean over layers: at
// least 1. It replaces BudgetFraction.
func BudgetTokens(tokens int) Setting {
	return Setting{param: ParamBudgetTokens, value: float64(tokens)}
}

// BudgetFraction sets the budget as a part of the sealed tokens: over 0, up to 1. It replaces
// BudgetTokens. Each strategy has a default with a minimum of tokens.
func BudgetFraction(fraction float64) Setting {
	return Setting{param: ParamBudgetFraction, value: fraction}
}

// DenseLayers sets the number of layers with full attention. Default: 2 for "quest", otherwise 0.
func DenseLayers(layers int) Setting {
	return Setting{param: ParamDenseLayers, value: float64(layers)}
}

// ShareHeads sets whether a group of query heads has one selection (the default) or one per head.
func ShareHeads(on bool) Setting { return Setting{param: ParamShareHeads, value: number(on)} }

// Alpha sets the smallest attention to read, as a part of the largest token's: over 0, up to 1.
// For "dipr" and "dipr-graph". Default: 0.012.
func Alpha(alpha float64) Setting { return Setting{param: ParamAlpha, value: alpha} }

// Coverage sets 1 minus the expected standard error of sampled attention: between 0 and 1. For
// "auto" and "bounded". Default: 0.96 with the default budget. With another budget the budget
// decides alone.
func Coverage(coverage float64) Setting { return Setting{param: ParamCoverage, value: coverage} }

// SelectTokens sets the number of neighbouring tokens that are selected together: a multiple of 16
// (of 8 for heads over 128, of 4 for heads over 256) up to 1024. For "quest". Default: 16 (8, 4).
func SelectTokens(tokens int) Setting {
	return Setting{param: ParamSelectTokens, value: float64(tokens)}
}

// ExactTokens sets the exact tokens at the end of each Prefill. For prefill only. Default: 0.
func ExactTokens(tokens int) Setting {
	return Setting{param: ParamExactTokens, value: float64(tokens)}
}

// FilterLayers sets the layers that select for those after them: from 0, ascending. For
// "filter-layers". None: the default, three layers spread evenly.
func FilterLayers(layers ...int) Setting {
	s := Setting{param: paramFilterLayers, layers: make([]uint32, len(layers))}
	for i, layer := range layers {
		if s.layers[i] = uint32(layer); int(s.layers[i]) != layer {
			s.layers[i] = 1<<32 - 1 // no model has such a layer: refused
		}
	}
	return s
}

func number(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// NewStrategy makes a strategy by its name: "auto", or a name that [Strategies] lists.
// ErrBadArgument: an unknown name, a parameter that the strategy does not have, or a value out of
// range.
func NewStrategy(name string, settings ...Setting) (*Strategy, error) {
	s := &Strategy{name: name, settings: slices.Clone(settings)}
	raw, err := s.create()
	C.kv_strategy_destroy(raw)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Name returns the strategy's name.
func (s *Strategy) Name() string { return s.name }

// Get returns the value of a parameter, or its default where it is not set. ErrBadArgument: the
// strategy does not have the parameter.
func (s *Strategy) Get(param Param) (float64, error) {
	raw, err := s.create()
	if err != nil {
		return 0, err
	}
	defer C.kv_strategy_destroy(raw)
	var value C.double
	var e C.kv_error
	err = newError(C.kv_strategy_get(raw, C.uint32_t(param), &value, &e), &e)
	return float64(value), err
}

// create makes the C strategy. The caller destroys it.
func (s *Strategy) create() (*C.kv_strategy, error) {
	var arguments arguments
	defer arguments.free()
	name := arguments.path("the strategy's name", s.name)
	if arguments.err != nil {
		return nil, arguments.err
	}
	var raw *C.kv_strategy
	var e C.kv_error
	if err := newError(C.kv_strategy_create(name, &raw, &e), &e); err != nil {
		return nil, err
	}
	for _, setting := range s.settings {
		if err := newError(setting.apply(raw, &e), &e); err != nil {
			C.kv_strategy_destroy(raw)
			return nil, err
		}
	}
	return raw, nil
}

func (s *Setting) apply(raw *C.kv_strategy, e *C.kv_error) C.kv_status {
	if s.param != paramFilterLayers {
		return C.kv_strategy_set(raw, C.uint32_t(s.param), C.double(s.value), e)
	}
	layers := (*C.uint32_t)(unsafe.SliceData(s.layers))
	return C.kv_strategy_set_layers(raw, layers, C.size_t(len(s.layers)), e)
}

// StrategyInfo describes a strategy of the library.
type StrategyInfo struct {
	Name         string
	Prefill      bool // SessionOptions.Prefill takes it
	Cache        bool // CacheOptions.Decode takes it
	Index        bool // it searches an index: Session.Prepare
	Experimental bool // it may disappear in any version
	BudgetFloor  int  // minimum tokens of the default BudgetFraction; 0: no budget
}

// Strategies lists all strategies of the library. "auto", a choice between two, is not listed.
func Strategies() ([]StrategyInfo, error) {
	var list []StrategyInfo
	for index := C.uint32_t(0); ; index++ {
		info := sized[C.kv_strategy_info]()
		var e C.kv_error
		err := newError(C.kv_strategy_list(index, info, &e), &e)
		if errors.Is(err, ErrNotFound) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		list = append(list, StrategyInfo{
			Name:         text(info.name[:]),
			Prefill:      info.flags&C.KV_STRATEGY_PREFILL != 0,
			Cache:        info.flags&C.KV_STRATEGY_CACHE != 0,
			Index:        info.flags&C.KV_STRATEGY_INDEX != 0,
			Experimental: info.flags&C.KV_STRATEGY_EXPERIMENTAL != 0,
			BudgetFloor:  int(info.budget_floor),
		})
	}
}
