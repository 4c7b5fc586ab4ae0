package kvasir_test

import (
	"math"
	"path/filepath"
	"testing"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

// A model of short convolutions, of which layer 2 attends: what another engine keeps of it is
// refused by name where it is wrong.
func TestSessionFromCheckpointRefusesWrongStates(t *testing.T) {
	path := filepath.Join(filepath.Dir(modelPath), "../test/fixtures/models/lfm2.gguf")
	model, err := kvasir.Open(path, nil)
	check(t, err)
	defer model.Close()
	shape := kvasir.CacheShape{Layers: 1, Heads: 4, KVHeads: 2, HeadDim: 16, MaxTokens: 1000}
	cache, err := kvasir.OpenCache(shape, nil)
	check(t, err)
	defer cache.Close()
	tokens := make([]int32, 40)
	rows := make(kvasir.Float32, len(tokens)*shape.KVHeads*shape.HeadDim)
	for i := range tokens {
		tokens[i] = int32(i*7%250 + 3)
	}
	for i := range rows {
		rows[i] = float32(i%7) - 3
	}
	check(t, cache.Update(0, rows, rows, nil))
	at := func(count int, numbers func() kvasir.Numbers) *kvasir.Checkpoint {
		checkpoint := &kvasir.Checkpoint{Tokens: count}
		for _, layer := range []int{0, 1, 3} {
			checkpoint.States = append(checkpoint.States, kvasir.LayerState{Layer: layer,
				Layout: kvasir.StateInputs, Numbers: numbers()})
		}
		return checkpoint
	}
	zeros := func() kvasir.Numbers { return make(kvasir.Float32, 128) }
	halves := func() kvasir.Numbers { return make(kvasir.Float16, 128) }
	phases := map[kvasir.Phase]bool{}
	options := &kvasir.FromCheckpointOptions{End: at(40, halves), Document: true,
		Progress: func(phase kvasir.Phase, _, _ int64) error { phases[phase] = true; return nil }}
	over := func(start *kvasir.Checkpoint, options *kvasir.FromCheckpointOptions) error {
		session, err := model.SessionFromCheckpoint(ctx, cache, tokens, start, nil, options)
		if err == nil {
			session.Close()
		}
		return err
	}
	refused(t, over(at(20, zeros), options), kvasir.ErrModelMismatch, "differ from the model's")
	expect(t, phases[kvasir.PhasePrefill], "%v", phases)
	refused(t, over(at(40, zeros), nil), kvasir.ErrBadArgument, "from->tokens is 40")
	refused(t, over(&kvasir.Checkpoint{Tokens: 20}, nil), kvasir.ErrBadArgument, "has no inputs")
	refused(t, over(nil, nil), kvasir.ErrBadArgument, "is nil")
	options.End = at(39, zeros)
	refused(t, over(at(20, zeros), options), kvasir.ErrBadArgument, "end->tokens is 39")
	for words, change := range map[string]func(*kvasir.LayerState){
		"count is 127":    func(s *kvasir.LayerState) { s.Numbers = kvasir.Float32{126: 0} },
		"numbers is NULL": func(s *kvasir.LayerState) { s.Numbers = kvasir.Float32{} },
		"is nil":          func(s *kvasir.LayerState) { s.Numbers = nil },
		"fewer layers":    func(s *kvasir.LayerState) { s.Layer = 99 },
		"Layer is -1":     func(s *kvasir.LayerState) { s.Layer = -1 },
		"has none":        func(s *kvasir.LayerState) { s.Layout = kvasir.StateKeyValue },
		"NaN, infinity": func(s *kvasir.LayerState) {
			s.Numbers = kvasir.Float32{5: float32(math.NaN()), 127: 0}
		},
	} {
		start := at(20, zeros)
		change(&start.States[0])
		refused(t, over(start, nil), kvasir.ErrBadArgument, words)
	}
	expect(t, kvasir.StateInputs.String() == "inputs", "%v", kvasir.StateInputs)
}
