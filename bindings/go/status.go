package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"syscall"
)

// Status says what kind of failure an error is. It is an error itself, for errors.Is to look for.
type Status int32

// Numbers never change; a newer library may have more.
const (
	ErrCancelled     Status = C.KV_CANCELLED      // a context was done, or a callback returned an error or panicked
	ErrBadArgument   Status = C.KV_BAD_ARGUMENT   // a value out of its range
	ErrBusy          Status = C.KV_BUSY           // another call on this session is running
	ErrBadState      Status = C.KV_BAD_STATE      // the call does not fit what happened before; the message says what does
	ErrNoMemory      Status = C.KV_NO_MEMORY      // the handle is as it was
	ErrLimit         Status = C.KV_LIMIT          // a limit of the system or of the options: open files, threads, sizes
	ErrIO            Status = C.KV_IO             // reading or writing failed; Error.Errno says how
	ErrNoSpace       Status = C.KV_NO_SPACE       // disk full, quota or file size limit
	ErrNotFound      Status = C.KV_NOT_FOUND      // also fs.ErrNotExist
	ErrPermission    Status = C.KV_PERMISSION     // also fs.ErrPermission
	ErrNotACache     Status = C.KV_NOT_A_CACHE    // the file is something else
	ErrVersion       Status = C.KV_VERSION        // written by a newer library: stale
	ErrCorrupt       Status = C.KV_CORRUPT        // damaged; Error.Offset says where
	ErrModelMismatch Status = C.KV_MODEL_MISMATCH // a cache of another model: stale
	ErrUnsupported   Status = C.KV_UNSUPPORTED    // a good file with something this library does not do; the message names it
	ErrContextFull   Status = C.KV_CONTEXT_FULL   // the model's or the session's context length is reached
	ErrInternal      Status = C.KV_INTERNAL       // a bug in Kvasir
	ErrDevice        Status = C.KV_DEVICE         // a GPU failed or was lost: close the sessions and the model that use it
)

// Error is the status's short English text.
func (s Status) Error() string { return C.GoString(C.kv_status_text(C.kv_status(s))) }

// Is makes ErrNotFound and ErrPermission what package fs calls them.
func (s Status) Is(target error) bool {
	return s == ErrNotFound && target == fs.ErrNotExist || s == ErrPermission && target == fs.ErrPermission
}

// err is nil for KV_OK.
func (s Status) err() error {
	if s == C.KV_OK {
		return nil
	}
	return s
}

// Stale is true when a cache was refused because it is of another version or model: delete it and read the document again, nothing is
// broken.
func (s Status) Stale() bool { return C.kv_status_is_stale(C.kv_status(s)) != 0 }

// Error is a failure of the library.
type Error struct {
	Status  Status
	Errno   syscall.Errno // 0 when none
	Offset  int64         // in a file, bytes; -1 when none
	Message string        // one line that names the subject and says what stayed unchanged

	causes []error // what a callback returned, the context's error, fs.ErrClosed
}

// Error is the library's message.
func (e *Error) Error() string { return e.Message }

// Unwrap gives the status, the system's error, and what ended the call: a callback's or the context's error.
func (e *Error) Unwrap() []error {
	all := append([]error{e.Status}, e.causes...)
	if e.Errno != 0 {
		all = append(all, e.Errno)
	}
	return all
}

// IsStale is true for an error of a status that is [Status.Stale].
func IsStale(err error) bool {
	var status Status
	return errors.As(err, &status) && status.Stale()
}

// newError is nil when the status is KV_OK.
func newError(status C.kv_status, e *C.kv_error) error {
	if status == C.KV_OK {
		return nil
	}
	offset := int64(-1)
	if e.offset <= math.MaxInt64 {
		offset = int64(e.offset)
	}
	return &Error{Status: Status(status), Errno: syscall.Errno(e.sys_errno), Offset: offset, Message: text(e.message[:])}
}

// failure is an error that this package finds before the library is called.
func failure(status Status, message string, causes ...error) *Error {
	return &Error{Status: status, Offset: -1, Message: message, causes: causes}
}

// endings are the errors of a context that is done; of one that is not, none.
func endings(ctx context.Context) []error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != err {
		return []error{err, cause}
	}
	return []error{err}
}
