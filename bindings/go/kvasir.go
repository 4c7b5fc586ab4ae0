// Package kvasir reads a long document once with a local language model, keeps what the model has read (its keys and values) in a
// file, and questions it from then on. It is the Go face of the C library of that name and needs it installed (pkg-config finds it).
//
//	model, err := kvasir.Open("model.gguf", nil)
//	session, err := model.NewSession(nil)
//	_, err = session.Prefill(ctx, text, nil)             // minutes, once
//	err = session.Save(ctx, "book.kv", nil)              // atomic, checksummed
//	session, err = model.Load(ctx, "book.kv", nil, nil)  // milliseconds, mapped
//	answer, err := session.Ask(ctx, "Who ...?", nil)
//
// # Options
//
// The zero value of an option, and nil for a pointer to options, is the default. Sizes are in bytes, lengths in tokens.
// Text is UTF-8; other bytes are accepted and tokenized as bytes. Paths and names may not contain a NUL byte: [ErrBadArgument].
//
// # Errors
//
// A failure of the library is an [*Error] with its message, whole, and its [Status], which errors.Is knows:
//
//	if errors.Is(err, kvasir.ErrNotFound) || kvasir.IsStale(err) { ... } // read the document again
//
// A call that a context ended also matches context.Canceled or context.DeadlineExceeded, one that a callback ended the callback's
// error, one on a closed handle fs.ErrClosed.
//
// # Contexts
//
// Calls that may take long have a context. When it is done the call stops within 100 ms, and it returns only when it has stopped:
// nothing goes on behind the caller's back. A context that is done before the call gives [ErrCancelled] at once.
//
// # Goroutines
//
// A [Model] and a [Library] may be used by any number of goroutines. A [Session] and a [Cache] serve one call at a time; a second
// concurrent one gets [ErrBusy] and changes nothing.
//
// Callbacks run on the calling goroutine, never after the call returned. They may not call what is calling them: [ErrBusy]. A panic
// in one stops the call and goes on from it, on the caller's goroutine, when the library has returned. They may not call
// runtime.Goexit, nor testing.T.FailNow, which does: Go ends the process.
//
// # Closing
//
// A Model, Session, Library or Cache is closed with Close, in any order: what a session needs of its model stays until the session is
// closed. Close waits for the calls that run on the handle in other goroutines, so that what it releases is released when it
// returns, and a deferred Close releases it in any case; to have it soon, cancel their contexts. From a callback, where
// it might wait for ever for its own call, it gives [ErrBusy] and changes nothing. Every later call gives an error, a second Close
// nothing. What is not closed is closed by the garbage collector at some time: do not count on it, files and memory are large.
package kvasir

/*
#cgo pkg-config: kvasir
#include "bridge.h"
*/
import "C"

import (
	"errors"
	"math"
)

// HeaderVersion is the version of the header that the package was built with: major*10000 + minor*100 + patch.
const HeaderVersion = C.KV_VERSION_NUMBER

// Version is the same of the library that was loaded.
func Version() uint32 { return uint32(C.kv_version()) }

// BuildInfo tells of the library in JSON: version, cache format, compiler, kernels that this processor gets, backends of the build,
// versions of third-party libraries.
func BuildInfo() string { return C.GoString(C.kv_build_info()) }

// Strategy is one way to choose what of a document is read for each token of an answer.
type Strategy struct {
	Name            string  // what SessionOptions.Strategy takes
	DenseLayers     int     // the default of that option; -1: all
	BudgetFraction  float64 // the default of that option
	BudgetFloor     uint64  // tokens that the default fraction is at least
	TakesBudget     bool    // false: reads the same whatever the budget
	TakesSelect     bool    // SessionOptions.SelectTokens is for it
	TakesCoverage   bool    // SessionOptions.Coverage is for it
	TakesHeadGraphs bool    // SessionOptions.HeadGraphs is for it
}

// Strategies lists all strategies of the library. "auto", the default, is not among them: it is a choice of one.
func Strategies() ([]Strategy, error) {
	var all []Strategy
	for index := C.uint32_t(0); ; index++ {
		info := C.kv_strategy_information{struct_size: C.sizeof_kv_strategy_information}
		var e C.kv_error
		err := newError(C.kv_strategy_info(index, &info, &e), &e)
		if errors.Is(err, ErrNotFound) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		dense := -1
		if info.dense_layers != math.MaxUint32 {
			dense = int(info.dense_layers)
		}
		all = append(all, Strategy{
			Name:            text(info.name[:]),
			DenseLayers:     dense,
			BudgetFraction:  float64(info.budget_fraction),
			BudgetFloor:     uint64(info.budget_floor),
			TakesBudget:     info.takes_budget != 0,
			TakesSelect:     info.takes_select_tokens != 0,
			TakesCoverage:   info.takes_coverage != 0,
			TakesHeadGraphs: info.takes_head_graphs != 0,
		})
	}
}
