package kvasir_test

import (
	"errors"
	"io/fs"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

var shape = kvasir.CacheShape{
	Layers: 2, Heads: 4, KVHeads: 2, HeadDim: 8, MaxTokens: 1000, Identity: [32]byte{7, 31: 9},
}

// numbers are rows of random numbers between -1 and 1.
func numbers(tokens, heads int, seed uint64) []float32 {
	random := rand.New(rand.NewPCG(seed, 0))
	all := make([]float32, tokens*heads*shape.HeadDim)
	for i := range all {
		all[i] = 2*random.Float32() - 1
	}
	return all
}

// filled is a cache with one step of 20 tokens, and that step.
func filled(t *testing.T, options *kvasir.CacheOptions) (cache *kvasir.Cache, k, v, q []float32) {
	t.Helper()
	cache, err := kvasir.OpenCache(shape, options)
	check(t, err)
	t.Cleanup(func() { cache.Close() })
	k, v, q = numbers(20, shape.KVHeads, 1), numbers(20, shape.KVHeads, 2),
		numbers(20, shape.Heads, 3)
	for layer := range shape.Layers {
		check(t, cache.Update(layer, kvasir.Float32(k), kvasir.Float32(v), kvasir.Float32(q)))
	}
	return cache, k, v, q
}

// attended is the attention of a query head of the last token, by definition.
func attended(k, v, q []float32, head int, scale float64) []float32 {
	dim, row := shape.HeadDim, int(shape.KVHeads*shape.HeadDim)
	q = q[len(q)-(shape.Heads-head)*dim:][:dim]
	at := head * shape.KVHeads / shape.Heads * dim
	var sum float64
	out := make([]float64, dim)
	for ; at < len(k); at += row {
		var score float64
		for i := range dim {
			score += float64(q[i]) * float64(k[at+i])
		}
		weight := math.Exp(score * scale)
		sum += weight
		for i := range dim {
			out[i] += weight * float64(v[at+i])
		}
	}
	result := make([]float32, dim)
	for i := range dim {
		result[i] = float32(out[i] / sum)
	}
	return result
}

func TestAttentionOfACacheIsAttention(t *testing.T) {
	cache, k, v, q := filled(t, &kvasir.CacheOptions{Threads: 1, Decode: strategy(t, "full")})
	for _, scale := range []float64{0, 2} {
		out := make([]float32, len(q))
		check(t, cache.Attention(ctx, 1, kvasir.Float32(q), kvasir.Float32(out),
			&kvasir.AttentionOptions{Scale: float32(scale)}))
		if scale == 0 {
			scale = 1 / math.Sqrt(float64(shape.HeadDim))
		}
		for head := range shape.Heads {
			want := attended(k, v, q, head, scale)
			for i, got := range out[len(out)-(shape.Heads-head)*len(want):][:len(want)] {
				expect(t, math.Abs(float64(got-want[i])) < 1e-4, "head %d: %g, not %g", head, got,
					want[i])
			}
		}
	}
	softer, plain := make([]float32, len(q)), make([]float32, len(q))
	check(t, cache.Attention(ctx, 1, kvasir.Float32(q), kvasir.Float32(plain), nil))
	check(t, cache.Attention(ctx, 1, kvasir.Float32(q), kvasir.Float32(softer),
		&kvasir.AttentionOptions{Softcap: 0.5}))
	expect(t, !slices.Equal(plain, softer), "softcap changes nothing")
	stats, err := cache.Stats()
	check(t, err)
	expect(t, stats.Tokens == 20 && stats.DecodeStrategy == "full", "%+v", stats)
}

func TestACacheTakesNumbersOf16Bits(t *testing.T) {
	cache, err := kvasir.OpenCache(shape, nil)
	check(t, err)
	defer cache.Close()
	upper := func(from []float32) (bits kvasir.BFloat16) {
		for _, number := range from {
			bits = append(bits, uint16(math.Float32bits(number)>>16))
		}
		return bits
	}
	ones := slices.Repeat(kvasir.Float16{0x3C00}, int(shape.Heads*shape.HeadDim))
	k, v, q := upper(numbers(1, shape.KVHeads, 1)), upper(numbers(1, shape.KVHeads, 2)),
		upper(numbers(1, shape.Heads, 3))
	check(t, cache.Update(0, k, v, nil))
	check(t, cache.Update(1, ones[:len(k)], ones[:len(k)], nil))
	out := make(kvasir.BFloat16, len(q))
	check(t, cache.Attention(ctx, 0, q, out, nil))
	expect(t, slices.Equal(out[:shape.HeadDim], v[:shape.HeadDim]),
		"one token does not get all attention: %v, %v", out, v)
	halves := make(kvasir.Float16, len(ones))
	check(t, cache.Attention(ctx, 1, ones, halves, nil))
	expect(t, slices.Equal(halves, ones), "%v", halves)
}

// Arrays within something that has Go's pointers are taken too.
func TestACacheTakesArraysWhereverTheyAre(t *testing.T) {
	cache, err := kvasir.OpenCache(shape, nil)
	check(t, err)
	defer cache.Close()
	engine := &struct {
		name    *string
		k, v, q [32]float32
		out     [32]float32
	}{name: new(string)}
	copy(engine.v[:], numbers(1, shape.KVHeads, 5))
	for layer := range shape.Layers {
		check(t, cache.Update(layer, kvasir.Float32(engine.k[:16]), kvasir.Float32(engine.v[:16]),
			kvasir.Float32(engine.q[:])))
	}
	check(t, cache.Attention(ctx, 0, kvasir.Float32(engine.q[:]), kvasir.Float32(engine.out[:]),
		nil))
	expect(t, slices.Equal(engine.out[:8], engine.v[:8]), "%v", engine.out)
}

func TestACacheIsSavedLoadedForkedAndCut(t *testing.T) {
	options := &kvasir.CacheOptions{Decode: strategy(t, "full")}
	cache, _, _, q := filled(t, options)
	path := filepath.Join(t.TempDir(), "a.kv")
	phases := map[kvasir.Phase]bool{}
	progress := func(phase kvasir.Phase, _, _ int64) error { phases[phase] = true; return nil }
	check(t, cache.Save(ctx, path, progress))
	loaded, err := kvasir.LoadCache(ctx, path, shape, options,
		&kvasir.LoadOptions{Verify: true, Progress: progress})
	check(t, err)
	defer loaded.Close()
	expect(t, phases[kvasir.PhaseSave] && phases[kvasir.PhaseVerify], "%v", phases)
	fork, err := loaded.Fork(ctx)
	check(t, err)
	defer fork.Close()
	k, v := kvasir.Float32(numbers(1, shape.KVHeads, 8)),
		kvasir.Float32(numbers(1, shape.KVHeads, 9))
	var outs [3][]float32
	for i, c := range []*kvasir.Cache{cache, loaded, fork} {
		check(t, c.Update(0, k, v, nil))
		outs[i] = make([]float32, shape.Heads*shape.HeadDim)
		check(t, c.Attention(ctx, 0, kvasir.Float32(q[:len(outs[i])]), kvasir.Float32(outs[i]),
			nil))
		expect(t, slices.Equal(outs[i], outs[0]), "%d: %v, %v", i, outs[i], outs[0])
		_, err := c.Fork(ctx)
		refused(t, err, kvasir.ErrBadState, "step")
		refused(t, c.Save(ctx, path+"2", nil), kvasir.ErrBadState, "step")
	}
	check(t, loaded.Close()) // the fork has what it needs
	check(t, fork.Truncate(5))
	refused(t, fork.Truncate(6), kvasir.ErrBadArgument, "")
	stats, err := fork.Stats()
	check(t, err)
	expect(t, stats.Tokens == 5, "%+v", stats)

	other := shape
	other.Identity[0]++
	_, err = kvasir.LoadCache(ctx, path, other, nil, nil)
	refused(t, err, kvasir.ErrModelMismatch, path)
	expect(t, kvasir.IsStale(err), "%v is not stale", err)
	_, err = kvasir.LoadCache(ctx, saved, shape, nil, nil)
	refused(t, err, kvasir.ErrModelMismatch, saved)
	_, err = open(t).Load(ctx, path, nil, nil)
	refused(t, err, kvasir.ErrModelMismatch, path)
	_, err = kvasir.LoadCache(ctx, path, shape, nil, &kvasir.LoadOptions{Verify: true,
		Progress: func(kvasir.Phase, int64, int64) error { return errEnough }})
	expect(t, errors.Is(err, errEnough) && errors.Is(err, kvasir.ErrCancelled), "%v", err)
	value := recovered(func() {
		fork.Save(ctx, path,
			func(kvasir.Phase, int64, int64) error { panic("saving") })
	})
	expect(t, value == "saving", "%v", value)
}

// Wrong sizes never reach the library, which takes pointers alone.
func TestArraysThatDoNotFitACacheAreRefused(t *testing.T) {
	cache, keys, values, queries := filled(t, nil)
	k, v, q := kvasir.Float32(keys), kvasir.Float32(values), kvasir.Float32(queries)
	halves := make(kvasir.Float16, len(k))
	infinite := slices.Repeat(kvasir.Float32{float32(math.Inf(1))}, 16)
	out := slices.Repeat(kvasir.Float32{5}, len(q))
	for words, err := range map[string]error{
		"k is nil":                  cache.Update(0, nil, v, nil),
		"v is nil":                  cache.Update(0, k, nil, nil),
		"k has 319 numbers":         cache.Update(0, k[1:], v, nil),
		"v has 19 tokens":           cache.Update(0, k, v[16:], nil),
		"another type":              cache.Update(0, k, halves, nil),
		"q has 1 tokens":            cache.Update(0, k, v, q[:32]),
		"tokens":                    cache.Update(0, kvasir.Float32{}, kvasir.Float32{}, nil),
		"layer":                     cache.Update(2, k, v, nil),
		"NaN":                       cache.Update(0, infinite, infinite, nil),
		"q is nil":                  cache.Attention(ctx, 0, nil, out, nil),
		"out is nil":                cache.Attention(ctx, 0, q, nil, nil),
		"out has 19 tokens":         cache.Attention(ctx, 0, q, out[32:], nil),
		"q has 31 numbers":          cache.Attention(ctx, 0, q[:31], out, nil),
		"out has 20 tokens, not 20": cache.Attention(ctx, 0, q, make(kvasir.BFloat16, len(q)), nil),
		"overlap":                   cache.Attention(ctx, 0, q, q, nil),
		"scale": cache.Attention(ctx, 0, q, out,
			&kvasir.AttentionOptions{Scale: float32(math.NaN())}),
		"softcap": cache.Attention(ctx, 0, q, out,
			&kvasir.AttentionOptions{Softcap: -1}),
	} {
		refused(t, err, kvasir.ErrBadArgument, words)
	}
	expect(t, out[0] == 5 && out[len(out)-1] == 5, "a refused call wrote to out")
	check(t, cache.Attention(ctx, 0, q, out, nil)) // the step is still there
	check(t, cache.Update(0, k[:16], v[:16], nil))
	refused(t, cache.Update(0, k[:16], v[:16], nil), kvasir.ErrBadState, "layer 0")
	refused(t, cache.Update(1, k[:32], v[:32], nil), kvasir.ErrBadState, "1")
}

// Each option and each part of a shape arrives: a value out of its range is refused by a message
// that names it, or by what it leads to.
func TestOptionsOfACacheArrive(t *testing.T) {
	for words, options := range map[string]kvasir.CacheOptions{
		"threads":      {Threads: 1 << 30},
		"precision":    {Precision: 7},
		"window":       {Window: 1 << 31},
		"snapkv":       {Decode: strategy(t, "snapkv")},
		"99":           {Decode: strategy(t, "filter-layers", kvasir.FilterLayers(0, 99))},
		"memory_limit": {Precision: kvasir.PrecisionF32, MemoryLimit: 1 << 30},
		"no-folder":    {MemoryLimit: 1 << 30, SpillDirectory: "no-folder"},
	} {
		cache, err := kvasir.OpenCache(shape, &options)
		if err == nil {
			cache.Close()
		}
		expect(t, err != nil && strings.Contains(err.Error(), words), "%s: %v", words, err)
	}
	for words, change := range map[string]func(*kvasir.CacheShape){
		"layers":     func(s *kvasir.CacheShape) { s.Layers = 0 },
		"heads":      func(s *kvasir.CacheShape) { s.Heads = 1 << 20 },
		"kv_heads":   func(s *kvasir.CacheShape) { s.KVHeads = 3 },
		"head_dim":   func(s *kvasir.CacheShape) { s.HeadDim = 513 },
		"max_tokens": func(s *kvasir.CacheShape) { s.MaxTokens = 1 << 40 },
	} {
		other := shape
		change(&other)
		_, err := kvasir.OpenCache(other, nil)
		refused(t, err, kvasir.ErrBadArgument, words)
	}
	cache, _, _, _ := filled(t, &kvasir.CacheOptions{Decode: strategy(t, "quest",
		kvasir.BudgetTokens(160), kvasir.ShareHeads(false), kvasir.DenseLayers(0))})
	stats, err := cache.Stats()
	check(t, err)
	expect(t, stats.BudgetTokens == 160 && stats.DecodeStrategy == "quest", "%+v", stats)
}

// Keys that another engine has put into a cache are the model's or are refused.
func TestASessionFromACacheComparesKeys(t *testing.T) {
	model := open(t)
	info, err := model.Info()
	check(t, err)
	tokens, err := model.Tokenize("Some text of a document.", kvasir.TokenizeDocument)
	check(t, err)
	of := kvasir.CacheShape{Layers: info.Layers, Heads: info.Heads, KVHeads: info.KVHeads,
		HeadDim: info.HeadDim, MaxTokens: 1000}
	cache, err := kvasir.OpenCache(of, nil)
	check(t, err)
	defer cache.Close()
	rows := make(kvasir.Float32, len(tokens)*info.KVHeads*info.HeadDim)
	for i := range rows {
		rows[i] = float32(i%7) - 3
	}
	for layer := range info.Layers {
		check(t, cache.Update(layer, rows, rows, nil))
	}
	from := &kvasir.FromCacheOptions{Document: true}
	_, err = model.SessionFromCache(ctx, cache, tokens, nil, from)
	refused(t, err, kvasir.ErrModelMismatch, "other weights, tokens or positions")
	_, err = model.SessionFromCache(ctx, cache, tokens[1:], nil, from)
	refused(t, err, kvasir.ErrBadArgument, "")
	phases := map[kvasir.Phase]bool{}
	from.Progress = func(phase kvasir.Phase, _, _ int64) error { phases[phase] = true; return nil }
	_, err = model.SessionFromCache(ctx, cache, tokens, nil, from)
	expect(t, err != nil && phases[kvasir.PhasePrefill], "%v, %v", err, phases)
}

// A second concurrent call gets ErrBusy; Close waits for the one that runs.
func TestACacheServesOneCallAtATime(t *testing.T) {
	cache, _, _, q := filled(t, nil)
	var group sync.WaitGroup
	for i := range 8 {
		group.Add(1)
		go func() {
			defer group.Done()
			for round := range 200 {
				out := make(kvasir.Float32, len(q))
				err := cache.Attention(ctx, i%2, kvasir.Float32(q), out, nil)
				if err != nil && !errors.Is(err, kvasir.ErrBusy) && !errors.Is(err, fs.ErrClosed) {
					t.Error(err)
				}
				if i == 7 && round == 199 {
					cache.Close()
				}
			}
		}()
	}
	group.Wait()
	_, err := cache.Stats()
	expect(t, errors.Is(err, fs.ErrClosed) && err.Error() == "the cache is closed", "%v", err)
}
