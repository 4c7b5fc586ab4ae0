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

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

// TestCyclesLeaveNothing opens, asks and closes, in every way a call can end. Run it with -cycles
// 4000 for the long form.
func TestCyclesLeaveNothing(t *testing.T) {
	if watched {
		t.Skip("memory of the race detector or of AddressSanitizer grows")
	}
	// Each thread that calls the library has memory in the allocators, and Go changes threads.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	settle(t)
	before, after := least(t, max(*cycles/2, 1)), least(t, max(*cycles/2, 1))
	t.Logf("%+v in the first half of %d cycles, %+v in the second", before, *cycles, after)
	expect(t, after.files == before.files, "%d open files became %d", before.files, after.files)
	expect(t, after.mappings <= before.mappings+16, "%d mappings became %d", before.mappings,
		after.mappings) // of Go's heap
	expect(t, after.heap < before.heap+1<<20, "%d bytes of Go's heap became %d", before.heap,
		after.heap)
	grown := after.resident - before.resident
	// What threads that end leave in the allocator is taken up again every few hundred cycles, 15
	// MB by then: few cycles only have to settle.
	expect(t, *cycles < 1000 || grown < 16<<20, "resident memory grew by %d bytes",
		grown) // in 4,000 cycles a leak of 8 kB each is as much
}

// settle runs until cycles take no more memory: what leaks goes on growing by as much in every
// round.
func settle(t *testing.T) {
	// Cycles, rounds, bytes: a leak of 105 kB per cycle never settles.
	const round, most, growth = 20, 20, 2 << 20
	before, quiet := least(t, round), 0
	for range most {
		after := least(t, round)
		if after.resident >= before.resident+growth {
			quiet = 0
		} else if quiet++; quiet == 2 {
			return
		}
		before = after
	}
	t.Fatalf("resident memory did not settle in %d cycles: it is %d bytes now", round*most,
		before.resident)
}

// least is what the process has after so many more cycles, and of resident memory the least after
// any: allocators' caches come and go by some MB.
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
	model, err := kvasir.Open(modelPath, &kvasir.ModelOptions{Log: func(kvasir.LogLevel,
		string) {
	}})
	check(t, err)
	options := &kvasir.SessionOptions{Decode: strategy(t, "quest"), Instructions: "",
		Log: func(kvasir.LogLevel, string) {}}
	session, err := model.Load(ctx, saved, options, nil)
	check(t, err)
	stopping, cancel := context.WithCancel(ctx)
	_, err = session.Ask(stopping, question, &kvasir.GenerateOptions{MaxTokens: 2,
		Stop: []string{"x", "y"}})
	check(t, err)
	fork, err := session.Fork()
	check(t, err)
	_, err = fork.Generate(stopping, question, nil, func(string) error { return errEnough })
	expect(t, errors.Is(err, errEnough), "%v", err)
	for range fork.Stream(stopping, question, nil) {
		break
	}
	recovered(func() {
		fork.Generate(stopping, question, nil,
			func(string) error { panic("a panic") })
	})
	_, err = fork.Generate(stopping, question, nil, func(string) error { cancel(); return nil })
	expect(t, err == nil || errors.Is(err, context.Canceled), "%v", err)
	_, err = model.Load(ctx, saved, options, &kvasir.LoadOptions{Verify: true,
		Progress: func(kvasir.Phase, int64, int64) error { return errEnough }})
	expect(t, errors.Is(err, errEnough), "%v", err)
	_, err = model.Load(stopping, saved, options, nil)
	expect(t, errors.Is(err, context.Canceled), "%v", err)
	_, err = model.Load(ctx, modelPath, options, nil)
	expect(t, errors.Is(err, kvasir.ErrNotACache), "%v", err)
	_, err = kvasir.Open(saved, &kvasir.ModelOptions{ChatFormat: "raw",
		Log: func(kvasir.LogLevel, string) {}})
	expect(t, errors.Is(err, kvasir.ErrUnsupported), "%v", err)
	cache, err := kvasir.OpenCache(shape, &kvasir.CacheOptions{
		Decode: strategy(t, "filter-layers", kvasir.FilterLayers(0, 1))})
	check(t, err)
	rows := make(kvasir.Float32, 100*shape.KVHeads*shape.HeadDim)
	check(t, cache.Update(0, rows, rows, nil))
	check(t, cache.Update(1, rows, rows, nil))
	forked, err := cache.Fork(ctx)
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
	return held{pages * int64(os.Getpagesize()), memory.HeapAlloc, len(files),
		bytes.Count(mappings, []byte("\n"))}
}
