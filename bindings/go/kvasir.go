// Package kvasir prefills a long document once with a local language model and saves its KV cache.
// The cache then answers any number of questions. The package wraps the C library of the same name,
// which pkg-config must find.
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
// The zero value of an option is the default, and so is nil for a pointer to options. Lengths are
// tokens, sizes are bytes. A number below zero is [ErrBadArgument].
//
// Text is UTF-8. Other bytes are tokenized as bytes. A path or name with a NUL byte is
// [ErrBadArgument].
//
// # Errors
//
// A failure of the library is an [*Error] with a message and a [Status]. errors.Is finds both:
//
//	if errors.Is(err, kvasir.ErrNotFound) || kvasir.IsStale(err) { ... } // prefill again
//
// The error of a call that a context ended matches context.Canceled or context.DeadlineExceeded
// too. The error of a call that a callback ended matches the callback's error. The error of a call
// on a closed handle matches fs.ErrClosed.
//
// # Contexts
//
// Every call that may take longer than 100 ms has a context, except [Model.Tokenize]. A call
// returns within 100 ms of CPU time after its context is done, and no work continues in the
// background. A context that is done before the call is [ErrCancelled] at once.
//
// # Goroutines
//
// Any number of goroutines may use a [Model] or a [Library]. A [Session] and a [Cache] serve one
// call at a time. A second concurrent call is [ErrBusy] and changes nothing.
//
// Callbacks run on the calling goroutine and never after the call has returned. A call on the
// callback's own handle is [ErrBusy]. A panic in a callback stops the call and continues in the
// caller after the library has returned. A callback must not call runtime.Goexit, nor
// testing.T.FailNow, which does: Go then ends the process. The body of a loop over [Session.Stream]
// is no callback and may do both.
//
// # Closing
//
// Handles may be closed in any order: a session keeps what it needs of its model. Close waits for
// calls of other goroutines on the handle. Cancel their contexts to shorten that. In a callback it
// is [ErrBusy] and changes nothing. Every later call is an error; a second Close does nothing.
//
// The garbage collector closes forgotten handles at some time. Do not rely on it: files and memory
// are large.
package kvasir

/*
#cgo pkg-config: kvasir
#include "bridge.h"
*/
import "C"

// HeaderVersion is the version of the C header at build time: major*10000 + minor*100 + patch.
const HeaderVersion = C.KV_VERSION_NUMBER

// Version returns the version of the loaded C library: major*10000 + minor*100 + patch.
func Version() int { return int(C.kv_version()) }

// BuildInfo returns JSON: version, cache format, compiler, kernels chosen for this CPU, backends of
// the build, and versions of third-party libraries.
func BuildInfo() string { return C.GoString(C.kv_build_info()) }
