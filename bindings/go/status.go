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

// Status is the kind of a failure. It is an error itself, for errors.Is.
type Status int32

// Numbers never change; a newer library may have more.
const (
	// ErrCancelled: a context was done, or a callback returned an error or panicked.
	ErrCancelled   Status = C.KV_CANCELLED
	ErrBadArgument Status = C.KV_BAD_ARGUMENT // a value out of range
	ErrBusy        Status = C.KV_BUSY         // another call on this handle is running
	// ErrBadState: not possible after the earlier calls. The message names what is possible.
	ErrBadState Status = C.KV_BAD_STATE
	ErrNoMemory Status = C.KV_NO_MEMORY
	// ErrLimit: a limit of the system or of the options, such as open files, threads or sizes.
	ErrLimit         Status = C.KV_LIMIT
	ErrIO            Status = C.KV_IO             // a read or write failed: Error.Errno
	ErrNoSpace       Status = C.KV_NO_SPACE       // disk full, quota or file size limit
	ErrNotFound      Status = C.KV_NOT_FOUND      // matches fs.ErrNotExist
	ErrPermission    Status = C.KV_PERMISSION     // matches fs.ErrPermission
	ErrNotACache     Status = C.KV_NOT_A_CACHE    // the file is not a cache file
	ErrVersion       Status = C.KV_VERSION        // a newer library wrote the file: stale
	ErrCorrupt       Status = C.KV_CORRUPT        // damaged data: Error.Offset
	ErrModelMismatch Status = C.KV_MODEL_MISMATCH // other model, format or instructions: stale
	ErrUnsupported   Status = C.KV_UNSUPPORTED    // valid, but this library lacks a feature
	ErrContextFull   Status = C.KV_CONTEXT_FULL   // the model's or the session's context is full
	ErrInternal      Status = C.KV_INTERNAL       // a bug in Kvasir
	ErrDevice        Status = C.KV_DEVICE         // a GPU failed: close its sessions and its model
)

// Error returns a short English text.
func (s Status) Error() string { return C.GoString(C.kv_status_text(C.kv_status(s))) }

// Is makes ErrNotFound and ErrPermission match the errors of package fs.
func (s Status) Is(target error) bool {
	return s == ErrNotFound && target == fs.ErrNotExist ||
		s == ErrPermission && target == fs.ErrPermission
}

// Stale reports whether the file belongs to another version or model and is not damaged. Delete it
// and prefill again.
func (s Status) Stale() bool { return C.kv_status_is_stale(C.kv_status(s)) != 0 }

// err returns nil for KV_OK.
func (s Status) err() error {
	if s == C.KV_OK {
		return nil
	}
	return s
}

// Error is a failure of the library.
type Error struct {
	Status  Status
	Errno   syscall.Errno // 0: none
	Offset  int64         // bytes from the start of a file; -1: none
	Message string        // one line: the subject, and what is unchanged

	causes []error // error of a callback or a context; fs.ErrClosed
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// Unwrap returns the status, the error of a callback or a context, and the system's error.
func (e *Error) Unwrap() []error {
	all := append([]error{e.Status}, e.causes...)
	if e.Errno != 0 {
		all = append(all, e.Errno)
	}
	return all
}

// IsStale reports whether err has a status that is [Status.Stale].
func IsStale(err error) bool {
	var status Status
	return errors.As(err, &status) && status.Stale()
}

// newError returns nil for KV_OK.
func newError(status C.kv_status, e *C.kv_error) error {
	if status == C.KV_OK {
		return nil
	}
	offset := int64(-1)
	if e.offset <= math.MaxInt64 {
		offset = int64(e.offset)
	}
	return &Error{
		Status:  Status(status),
		Errno:   syscall.Errno(e.sys_errno),
		Offset:  offset,
		Message: text(e.message[:]),
	}
}

// failure is an error that this package finds before it calls the library.
func failure(status Status, message string, causes ...error) *Error {
	return &Error{Status: status, Offset: -1, Message: message, causes: causes}
}

// endings returns the errors of a context that is done, otherwise none.
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
