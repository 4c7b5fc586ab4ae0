package kvasir_test

import (
	"encoding/json"
	"errors"
	"testing"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

func TestStatsHaveTheStrategy(t *testing.T) {
	quest := strategy(t, "quest", kvasir.BudgetTokens(64), kvasir.DenseLayers(0))
	session := load(t, &kvasir.SessionOptions{Decode: quest, Threads: 1})
	stats := func() kvasir.SessionStats {
		stats, err := session.Stats()
		check(t, err)
		return stats
	}
	check(t, session.Prepare(ctx, nil))
	ask(t, session)
	s := stats()
	expect(t, s.DecodeStrategy == "quest" && s.BudgetTokens == 64 && s.Threads == 1, "%+v", s)
	expect(t, s.LastSteps > 0 && s.LastDecodeTime > 0 && s.LastTokensRead > 0, "%+v", s)
	expect(t, s.LastTokensRead < s.LastTokensPresent && s.LastPagesTouched > 0, "%+v", s)
	expect(t, s.Tokens > 400 && s.SealedTokens > 0 && s.PageTokens > 0 && s.SinkTokens > 0, "%+v",
		s)
	expect(t, s.WindowTokens > 0 && s.PrefillChunk > 0 && s.KVBytesPerToken > 2560, "%+v", s)
	expect(t, s.MappedBytes > 0 && s.LoadTime > 0 && s.ChatFormat == "chatml", "%+v", s)
	expect(t, s.Device == "cpu" && s.GPULayers == 0 && s.GPUFlags == 0, "%+v", s)
	check(t, session.SetStrategy(strategy(t, "full")))
	ask(t, session)
	s = stats()
	expect(t, s.DecodeStrategy == "full" && s.LastTokensRead == s.LastTokensPresent, "%+v", s)
	check(t, session.SetStrategy(nil))
	expect(t, stats().DecodeStrategy == "full", "%+v", stats()) // "auto" of a short document
}

func TestOptionsOfASessionAreInItsStats(t *testing.T) {
	session := load(t, &kvasir.SessionOptions{
		Decode: strategy(t, "ood", kvasir.BudgetTokens(100), kvasir.DenseLayers(1),
			kvasir.ShareHeads(false), kvasir.SearchBreadth(70), kvasir.BudgetLinear.Setting()),
		Context:        5000,
		MemoryLimit:    1 << 30,
		SpillDirectory: t.TempDir(),
		Threads:        1,
	})
	check(t, session.Measure(kvasir.MeasureCompare|kvasir.MeasureCertify))
	refused(t, session.Measure(1<<20), kvasir.ErrBadArgument, "")
	ask(t, session)
	stats, err := session.Stats()
	check(t, err)
	expect(t, stats.BudgetTokens == 100 && stats.Context == 5000 && stats.Threads == 1, "%+v",
		stats)
	expect(t, stats.MemoryLimit == 1<<30, "%+v", stats)
	text, err := session.StatsJSON()
	check(t, err)
	var values map[string]any
	check(t, json.Unmarshal(text, &values))
	dense, _ := values["dense_layers"].([]any)
	expect(t, len(dense) == 1 && values["share_heads"] == false, "%s", text)
	expect(t, values["search_breadth"] == 70.0 && values["budget_schedule"] == "linear", "%s", text)
	certificate, _ := values["last_certificate"].(float64)
	expect(t, certificate > 0 && values["compared"] != nil, "%s", text)
}

func TestStrategiesAreListed(t *testing.T) {
	list, err := kvasir.Strategies()
	check(t, err)
	names := map[string]kvasir.StrategyInfo{}
	for _, s := range list {
		names[s.Name] = s
		made := strategy(t, s.Name)
		expect(t, made.Name() == s.Name, "%s", made.Name())
	}
	expect(t, len(names) == len(list) && len(list) >= 10, "%v", list)
	quest, ood := names["quest"], names["ood"]
	expect(t, quest.Prefill && quest.Cache && !quest.Index && !quest.Experimental, "%+v", quest)
	expect(t, quest.BudgetFloor == 512 && ood.Index && !ood.Prefill, "%+v, %+v", quest, ood)
	expect(t, names["full"].BudgetFloor == 0 && names["infllm"].Experimental, "%+v", names)
}

func TestAStrategyHasItsParameters(t *testing.T) {
	quest := strategy(t, "quest", kvasir.BudgetTokens(64), kvasir.ShareHeads(false))
	for param, want := range map[kvasir.Param]float64{
		kvasir.ParamBudgetTokens: 64,
		kvasir.ParamShareHeads:   0,
		kvasir.ParamDenseLayers:  2,
	} {
		value, err := quest.Get(param)
		check(t, err)
		expect(t, value == want, "%d is %g, not %g", param, value, want)
	}
	_, err := quest.Get(kvasir.ParamAlpha)
	refused(t, err, kvasir.ErrBadArgument, "quest")
	for name, settings := range map[string][]kvasir.Setting{
		"no-such":       nil,
		"full":          {kvasir.BudgetTokens(64)},
		"quest":         {kvasir.BudgetFraction(2)},
		"flat":          {kvasir.BudgetTokens(-1)},
		"dipr":          {kvasir.Alpha(2)},
		"bounded":       {kvasir.Coverage(2)},
		"filter-layers": {kvasir.FilterLayers(5, 2)},
		"window":        {kvasir.HeadGraphs(true)},
		"hnsw":          {kvasir.SelectTokens(32)},
		"dipr-graph":    {kvasir.FilterLayers(1)},
	} {
		_, err := kvasir.NewStrategy(name, settings...)
		expect(t, errors.Is(err, kvasir.ErrBadArgument), "%s: %v", name, err)
	}
	strategy(t, "filter-layers", kvasir.FilterUniform.Setting(), kvasir.FilterLayers(1, 4))
	strategy(t, "bounded", kvasir.ExactTokens(100), kvasir.BudgetFraction(0.2))
	_, err = kvasir.NewStrategy("filter-layers", kvasir.FilterLayers(-1))
	if err == nil { // the model decides
		_, err = open(t).NewSession(&kvasir.SessionOptions{
			Decode: strategy(t, "filter-layers", kvasir.FilterLayers(-1))})
	}
	refused(t, err, kvasir.ErrBadArgument, "")
}

func TestSparsePrefillHasAStrategy(t *testing.T) {
	session, err := open(t).NewSession(&kvasir.SessionOptions{
		Prefill: strategy(t, "bounded", kvasir.BudgetFraction(0.2))})
	check(t, err)
	defer session.Close()
	_, err = session.Prefill(ctx, document, nil)
	check(t, err)
	stats, err := session.Stats()
	check(t, err)
	expect(t, stats.SparseTokens == 0 && stats.PrefillTokens > 400, "%+v", stats) // short: exact
}
