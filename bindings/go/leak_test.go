package kvasir_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"testing"

	"kvasir"
)

// TestCyclesLeaveNothing opens, asks and closes, in every way a call can end. Run it with -cycles 1000 for the long form.
func TestCyclesLeaveNothing(t *testing.T) {
	if watched {
		t.Skip("memory of the race detector or of AddressSanitizer grows")
	}
	runtime.LockOSThread() // every thread that calls the library has memory of its own in the allocators, and Go changes threads
	defer runtime.UnlockOSThread()
	tenth := max(*cycles/10, 1)
	for range tenth {
		cycle(t)
	}
	before := least(t, tenth)
	for range *cycles - 3*tenth {
		cycle(t)
	}
	after := least(t, tenth)
	t.Logf("%d cycles: %+v after the first tenth, %+v in the last", *cycles, before, after)
	expect(t, after.files == before.files, "%d open files became %d", before.files, after.files)
	expect(t, after.mappings <= before.mappings+16, "%d mappings became %d", before.mappings, after.mappings) // of Go's heap
	expect(t, after.heap < before.heap+1<<20, "%d bytes of Go's heap became %d", before.heap, after.heap)
	grown := after.resident - before.resident
	expect(t, grown < 6<<20, "resident memory grew by %d bytes", grown) // what allocators keep for a while; a leak of 7 kB a cycle is more in 1,000
}

// least is what the process has after so many more cycles, and of resident memory the least after any: allocators' caches come and go by some MB.
func least(t *testing.T, cycles int) held {
	var all held
	for i := range cycles {
		cycle(t)
		one := now(t)
		if i > 0 {
			one.resident = min(one.resident, all.resident)
		}
		all = one
	}
	return all
}

func cycle(t *testing.T) {
	model, err := kvasir.Open(modelPath, &kvasir.ModelOptions{Log: func(kvasir.LogLevel, string) {}})
	check(t, err)
	options := &kvasir.SessionOptions{Strategy: "quest", FilterLayers: []uint32{1, 2}, Log: func(kvasir.LogLevel, string) {}}
	session, err := model.Load(ctx, saved, options, nil)
	check(t, err)
	stopping, cancel := context.WithCancel(ctx)
	_, err = session.Ask(stopping, question, &kvasir.GenerateOptions{MaxTokens: 2, Stop: []string{"x", "y"}})
	check(t, err)
	fork, err := session.Fork()
	check(t, err)
	_, err = fork.Generate(stopping, question, nil, func(string) error { return errEnough })
	expect(t, errors.Is(err, errEnough), "%v", err)
	recovered(func() { fork.Generate(stopping, question, nil, func(string) error { panic("a panic") }) })
	_, err = fork.Generate(stopping, question, nil, func(string) error { cancel(); return nil })
	expect(t, err == nil || errors.Is(err, context.Canceled), "%v", err)
	_, err = model.Load(ctx, saved, options, &kvasir.LoadOptions{Verify: true, Progress: func(kvasir.Phase, uint64, uint64) error { return errEnough }})
	expect(t, errors.Is(err, errEnough), "%v", err)
	_, err = model.Load(stopping, saved, options, nil)
	expect(t, errors.Is(err, context.Canceled), "%v", err)
	_, err = model.Load(ctx, modelPath, options, nil)
	expect(t, errors.Is(err, kvasir.ErrNotACache), "%v", err)
	_, err = kvasir.Open(saved, &kvasir.ModelOptions{ChatFormat: "raw", Log: func(kvasir.LogLevel, string) {}})
	expect(t, errors.Is(err, kvasir.ErrUnsupported), "%v", err)
	cache, err := kvasir.OpenCache(shape, &kvasir.CacheOptions{Strategy: "quest", FilterLayers: []uint32{0, 1}})
	check(t, err)
	rows := make(kvasir.Float32, 100*shape.KVHeads*shape.HeadDim)
	check(t, cache.Update(0, rows, rows, nil))
	check(t, cache.Update(1, rows, rows, nil))
	forked, err := cache.Fork()
	check(t, err)
	check(t, cache.Close())
	check(t, forked.Close())
	check(t, model.Close())
	check(t, fork.Close())
	check(t, session.Close())
}

// held is what the process has.
type held struct {
	resident int64 // bytes
	heap     uint64
	files    int
	mappings int
}

func now(t *testing.T) held {
	runtime.GC()
	debug.FreeOSMemory()
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skip("only Linux says what a process has")
	}
	pages, err := strconv.ParseInt(string(bytes.Fields(statm)[1]), 10, 64)
	check(t, err)
	files, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	mappings, err := os.ReadFile("/proc/self/maps")
	check(t, err)
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return held{pages * int64(os.Getpagesize()), memory.HeapAlloc, len(files), bytes.Count(mappings, []byte("\n"))}
}
