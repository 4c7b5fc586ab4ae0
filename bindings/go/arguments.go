package kvasir

// #include "bridge.h"
import "C"

import (
	"fmt"
	"math"
	"strings"
	"unsafe"
)

// sized returns a cleared struct with its struct_size, as kv_init makes it.
func sized[T any]() *T {
	s := new(T)
	*(*C.uint32_t)(unsafe.Pointer(s)) = C.uint32_t(unsafe.Sizeof(*s))
	return s
}

// arguments converts the arguments of one call. It owns their C memory and keeps the first error.
type arguments struct {
	blocks     []unsafe.Pointer
	strategies []*C.kv_strategy
	err        error
}

func (a *arguments) free() {
	for _, block := range a.blocks {
		C.free(block)
	}
	for _, strategy := range a.strategies {
		C.kv_strategy_destroy(strategy)
	}
}

func (a *arguments) refuse(status Status, format string, values ...any) {
	if a.err == nil {
		a.err = failure(status, fmt.Sprintf(format, values...))
	}
}

// path converts a string, also an empty one.
func (a *arguments) path(name, value string) *C.char {
	if strings.IndexByte(value, 0) >= 0 {
		a.refuse(ErrBadArgument, "%s contains a NUL byte", name)
		return nil
	}
	text := C.CString(value)
	a.blocks = append(a.blocks, unsafe.Pointer(text))
	return text
}

// option converts a string to NULL if it is empty.
func (a *arguments) option(name, value string) *C.char {
	if value == "" {
		return nil
	}
	return a.path(name, value)
}

// array converts strings to an array and its length: NULL and 0 if there are none.
func (a *arguments) array(name string, values []string) (**C.char, C.uint32_t) {
	if len(values) == 0 {
		return nil, 0
	}
	count := a.u32(name, len(values))
	block := C.calloc(C.size_t(len(values)), C.size_t(unsafe.Sizeof((*C.char)(nil))))
	if block == nil {
		a.refuse(ErrNoMemory, "no memory for %s", name)
		return nil, 0
	}
	a.blocks = append(a.blocks, block)
	list := unsafe.Slice((**C.char)(block), len(values))
	for i, value := range values {
		list[i] = a.path(name, value)
	}
	return &list[0], count
}

// u32 converts a number of 0 to 2^32 - 1.
func (a *arguments) u32(name string, value int) C.uint32_t {
	if value < 0 || int64(value) > math.MaxUint32 {
		a.refuse(ErrBadArgument, "%s is %d: it must be 0 to %d", name, value,
			uint32(math.MaxUint32))
		return 0
	}
	return C.uint32_t(value)
}

// u64 converts a number of 0 or more.
func (a *arguments) u64(name string, value int64) C.uint64_t {
	if value < 0 {
		a.refuse(ErrBadArgument, "%s is %d: it must not be negative", name, value)
		return 0
	}
	return C.uint64_t(value)
}

// strategy converts a strategy to NULL if it is nil.
func (a *arguments) strategy(s *Strategy) *C.kv_strategy {
	if s == nil || a.err != nil {
		return nil
	}
	raw, err := s.create()
	if err != nil {
		a.err = err
		return nil
	}
	a.strategies = append(a.strategies, raw)
	return raw
}

func flag(on bool, bit C.uint32_t) C.uint32_t {
	if on {
		return bit
	}
	return 0
}

// text returns the string in a C array, up to its NUL.
func text(array []C.char) string {
	var b strings.Builder
	for _, c := range array {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}

// bytesOf returns the memory of a string for one call.
func bytesOf(s string) (*C.char, C.size_t) {
	if s == "" {
		return nil, 0
	}
	return (*C.char)(unsafe.Pointer(unsafe.StringData(s))), C.size_t(len(s))
}

// idsOf returns the memory of token ids for one call.
func idsOf(tokens []int32) (*C.int32_t, C.size_t) {
	return (*C.int32_t)(unsafe.SliceData(tokens)), C.size_t(len(tokens))
}

// all calls fill until its array has room for everything.
func all[T any](guess int, fill func(to *T, capacity C.size_t, count *C.size_t) C.kv_status) (
	[]T, C.kv_status) {
	for {
		var count C.size_t
		room := make([]T, guess)
		status := fill(unsafe.SliceData(room), C.size_t(guess), &count)
		if status == C.KV_LIMIT && count > C.size_t(guess) {
			guess = int(count)
			continue
		}
		if status != C.KV_OK {
			return nil, status
		}
		return room[:count], status
	}
}
