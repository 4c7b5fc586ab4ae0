package kvasir

// #include "bridge.h"
import "C"

import (
	"runtime/cgo"
	"sync/atomic"
	"unsafe"
)

// LogLevel is the importance of a line of the log.
type LogLevel int32

const (
	LogWarning LogLevel = C.KV_LOG_WARNING
	LogInfo    LogLevel = C.KV_LOG_INFO
)

// String returns the level's name.
func (l LogLevel) String() string { return name(l, "LogLevel", logLevelNames) }

var logLevelNames = map[LogLevel]string{LogWarning: "warning", LogInfo: "info"}

// LogFunc receives one line without a newline. Goroutines that call the library call it, several at
// once.
type LogFunc func(level LogLevel, message string)

// logger is a LogFunc that C can call. It lives as long as a handle that was opened with it, or a
// handle made from such a handle.
type logger struct {
	log      LogFunc
	handle   cgo.Handle
	user     unsafe.Pointer // C memory
	holders  atomic.Int32
	panicked atomic.Pointer[panicked] // the first panic, until a call takes it
}

// newLogger returns the log fields of an option struct, and adds the logger to those of h. A nil
// function yields nil fields.
func (h *handle) newLogger(log LogFunc) (C.kv_log_fn, unsafe.Pointer, error) {
	if log == nil {
		return nil, nil, nil
	}
	l := &logger{log: log}
	l.handle = cgo.NewHandle(l)
	if l.user = C.kvasir_go_user(C.uintptr_t(l.handle)); l.user == nil {
		l.handle.Delete()
		return nil, nil, failure(ErrNoMemory, "no memory for a log function")
	}
	l.holders.Store(1)
	h.logs = append(h.logs, l)
	return C.kv_log_fn(C.kvasir_go_log), l.user, nil
}

// inherit adds the loggers of the parents, which calls on this handle may use. Each parent has a
// running call.
func (h *handle) inherit(parents ...*handle) {
	for _, parent := range parents {
		for _, l := range parent.logs {
			l.holders.Add(1)
			h.logs = append(h.logs, l)
		}
	}
}

func (l *logger) drop() {
	if l.holders.Add(-1) == 0 {
		l.handle.Delete()
		C.free(l.user)
	}
}

//export kvasirGoLog
func kvasirGoLog(level C.int32_t, message *C.char, user, thread C.uintptr_t) {
	l := cgo.Handle(user).Value().(*logger)
	callbacks.begin(thread)
	defer callbacks.end(thread)
	defer func() {
		if value := recover(); value != nil {
			l.panicked.CompareAndSwap(nil, &panicked{value})
		}
	}()
	l.log(LogLevel(level), C.GoString(message))
}
