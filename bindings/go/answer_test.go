package kvasir_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"kvasir"
)

func TestTheFactIsAnswered(t *testing.T) {
	session := load(t, nil)
	var pieces []string
	answer, err := session.Generate(ctx, question, nil, func(text string) error {
		expect(t, utf8.ValidString(text), "%q is no whole text", text)
		pieces = append(pieces, text)
		return nil
	})
	check(t, err)
	whole := strings.Join(pieces, "")
	expect(t, strings.Contains(whole, "4821907"), "a wrong answer: %q", whole)
	expect(t, len(pieces) > 3, "the answer came in %d pieces", len(pieces))
	expect(t, answer.StopReason == kvasir.StopEndOfTurn && answer.StopReason.String() == "end of turn", "it stopped by %v", answer.StopReason)
	expect(t, answer.QuestionTokens > 5 && answer.AnswerTokens >= uint64(len(pieces)), "%+v", answer)
	expect(t, answer.FirstToken > 0 && answer.Total > answer.FirstToken && answer.TokensPresent > 0, "%+v", answer)
	expect(t, ask(t, session) == whole, "a second answer is another one")
}

func TestAnAnswerTellsWhereItLooked(t *testing.T) {
	session := load(t, nil)
	_, err := session.Trace()
	expect(t, errors.Is(err, kvasir.ErrBadState), "%v", err)
	_, err = session.Generate(ctx, question, &kvasir.GenerateOptions{Trace: true}, nil)
	check(t, err)
	spans, err := session.Trace()
	check(t, err)
	expect(t, len(spans) > 0 && spans[0].Share > 0, "%v", spans)
	tokens, err := session.Tokens()
	check(t, err)
	model := open(t)
	text, err := model.Detokenize(tokens[spans[0].FirstToken:spans[0].FirstToken+spans[0].Tokens], 0)
	check(t, err)
	expect(t, strings.Contains(text, "482"), "it looked at %q", text)
}

func TestTheCommandLineAnswersAlike(t *testing.T) {
	if toolPath == "" {
		t.Skip("KVASIR_TOOL names no command line")
	}
	out, err := exec.Command(toolPath, "ask", "-m", modelPath, "-c", saved, question).Output()
	check(t, err)
	answer := ask(t, load(t, nil))
	expect(t, answer != "" && strings.HasSuffix(string(out), "?\n"+answer+"\n"), "%q is not %q", out, answer)
}

func TestTheCProgramAnswersAlike(t *testing.T) {
	program := filepath.Join(t.TempDir(), "ask")
	flags, err := exec.Command("pkg-config", "--cflags", "--libs", "kvasir").Output()
	check(t, err)
	out, err := exec.Command("cc", append([]string{"-o", program, "../../examples/ask.c"}, strings.Fields(string(flags))...)...).CombinedOutput()
	expect(t, err == nil, "%v: %s", err, out)
	out, err = exec.Command(program, modelPath, "nothing.txt", saved, question).Output()
	check(t, err)
	answer := ask(t, load(t, nil))
	expect(t, answer != "" && string(out) == answer+"\n", "%q is not %q", out, answer)
}

func TestStreamGoesOnAsGenerateDoes(t *testing.T) {
	model := open(t)
	session, err := model.Load(ctx, saved, nil, nil)
	check(t, err)
	defer session.Close()
	want := ask(t, session)
	turn := "<|im_end|>\n<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n"
	tokens, err := model.Tokenize(turn, kvasir.TokenizeSpecial)
	check(t, err)
	model.Close() // the session has what it needs
	before, err := session.Tokens()
	check(t, err)
	done, err := session.PrefillTokens(ctx, tokens, nil)
	check(t, err)
	expect(t, done == uint64(len(tokens)), "%d of %d tokens", done, len(tokens))
	var got strings.Builder
	for text, err := range session.Stream(ctx, nil) {
		check(t, err)
		got.WriteString(text)
		expect(t, got.Len() < 1000, "the turn does not end: %q", got.String())
	}
	expect(t, got.String() == want, "%q, where Generate says %q", got.String(), want)

	// Breaking off leaves what was made, and the session usable within the loop.
	check(t, session.Rewind(uint64(len(before)+len(tokens))))
	for _, err := range session.Stream(ctx, nil) {
		check(t, err)
		_, err := session.Stats()
		check(t, err)
		break
	}
	after, err := session.Tokens()
	check(t, err)
	expect(t, len(after) == len(before)+len(tokens)+1, "%d tokens after one", len(after))

	token, end, err := session.Next(ctx, &kvasir.Sampling{Temperature: 1, Seed: 3})
	check(t, err)
	after, err = session.Tokens()
	check(t, err)
	expect(t, after[len(after)-1] == token && !end, "token %d is not in the sequence", token)
}

func TestStreamEndsWithTheError(t *testing.T) {
	count := 0
	for text, err := range empty(t).Stream(ctx, nil) {
		count++
		expect(t, text == "" && err != nil && strings.Contains(err.Error(), "the sequence is empty"), "%q, %v", text, err)
	}
	expect(t, count == 1, "%d times", count)
}

func TestOptionsOfAnAnswer(t *testing.T) {
	session := load(t, nil)
	whole := ask(t, session)

	var text strings.Builder
	add := func(s string) error { text.WriteString(s); return nil }
	answer, err := session.Generate(ctx, question, &kvasir.GenerateOptions{MaxTokens: 3}, add)
	check(t, err)
	expect(t, answer.AnswerTokens == 3 && answer.StopReason == kvasir.StopMaxTokens, "%+v", answer)

	text.Reset()
	answer, err = session.Generate(ctx, question, &kvasir.GenerateOptions{Stop: []string{"nowhere to be seen", "4821"}}, add)
	check(t, err)
	expect(t, text.String() == whole[:strings.Index(whole, "4821")] && answer.StopReason == kvasir.StopString, "%q: %+v", text.String(), answer)

	hot := func(seed uint64) string {
		answer, err := session.Ask(ctx, question, &kvasir.GenerateOptions{MaxTokens: 12,
			Sampling: kvasir.Sampling{Temperature: 20, TopK: 500, TopP: 0.999, MinP: 0.00001, RepetitionPenalty: 1.5, Seed: seed}})
		check(t, err)
		return answer
	}
	expect(t, hot(1) == hot(1) && hot(1) != hot(2), "the seed does not decide: %q, %q, %q", hot(1), hot(1), hot(2))

	plain, err := session.Generate(ctx, "<|im_end|>", nil, nil)
	check(t, err)
	special, err := session.Generate(ctx, "<|im_end|>", &kvasir.GenerateOptions{Special: true}, nil)
	check(t, err)
	expect(t, special.QuestionTokens < plain.QuestionTokens, "%d and %d tokens", special.QuestionTokens, plain.QuestionTokens)

	before, err := session.Tokens()
	check(t, err)
	_, err = session.Ask(ctx, question, &kvasir.GenerateOptions{Keep: true})
	check(t, err)
	after, err := session.Tokens()
	check(t, err)
	expect(t, len(after) > len(before) && slices.Equal(after[:len(before)], before), "the turn was not kept")
	check(t, session.Rewind(uint64(len(before))))
	again, err := session.Tokens()
	check(t, err)
	expect(t, slices.Equal(again, before), "Rewind went elsewhere")
}

func TestAForkIsItsOwnSequence(t *testing.T) {
	session := load(t, nil)
	want := ask(t, session)
	fork, err := session.Fork()
	check(t, err)
	defer fork.Close()
	_, err = fork.PrefillTokens(ctx, []int32{5, 6, 7}, nil)
	check(t, err)
	mine, err := session.Tokens()
	check(t, err)
	its, err := fork.Tokens()
	check(t, err)
	expect(t, len(its) == len(mine)+3, "%d and %d tokens", len(its), len(mine))
	check(t, session.Close())
	check(t, fork.Rewind(uint64(len(mine))))
	expect(t, ask(t, fork) == want, "the fork answers otherwise")
}

func TestTokensAndTextAreEachOther(t *testing.T) {
	model := open(t)
	for _, text := range []string{"", "a", "Grüße, 世界 \U0001F600", "a\x00b", "\xff\xfe", strings.Repeat("many words ", 3000)} {
		tokens, err := model.Tokenize(text, 0)
		check(t, err)
		back, err := model.Detokenize(tokens, 0)
		check(t, err)
		expect(t, back == text, "%.40q became %.40q", text, back)
	}
	special, err := model.Tokenize("<|im_end|>", kvasir.TokenizeSpecial|kvasir.TokenizeBOS)
	check(t, err)
	expect(t, slices.Equal(special, []int32{2}), "%v", special)
	hidden, err := model.Detokenize(special, 0)
	check(t, err)
	shown, err := model.Detokenize(special, kvasir.TokenizeSpecial)
	check(t, err)
	expect(t, hidden == "" && shown == "<|im_end|>", "%q, %q", hidden, shown)
}

func TestScoresAndLogitsAgree(t *testing.T) {
	session := empty(t)
	model := open(t)
	info, err := model.Info()
	check(t, err)
	tokens, err := model.Tokenize("She had never seen the garden before", 0)
	check(t, err)
	logits := make([]float32, len(tokens)*int(info.Vocabulary))
	check(t, session.PrefillLogits(ctx, tokens, logits, nil))
	last := logits[len(logits)-int(info.Vocabulary):]
	best := int32(0)
	for i, x := range last {
		if x > last[best] {
			best = int32(i)
		}
	}
	logarithms, err := session.Score(ctx, []int32{best, 7}, nil)
	check(t, err)
	sum := 0.0
	for _, x := range last {
		sum += math.Exp(float64(x - last[best]))
	}
	expect(t, len(logarithms) == 2 && math.Abs(float64(logarithms[0])+math.Log(sum)) < 1e-3, "%v, not %v", logarithms, -math.Log(sum))
	expect(t, logarithms[1] < 0, "%v", logarithms)
	token, _, err := session.Next(ctx, nil)
	check(t, err)
	expect(t, token == best, "the next token is %d, not %d", token, best)
}

func TestStatsTellOfTheStrategy(t *testing.T) {
	session := load(t, &kvasir.SessionOptions{Strategy: "quest", BudgetTokens: 64, DenseLayers: kvasir.NoDenseLayers, Threads: 1})
	strategy := func() string {
		stats, err := session.Stats()
		check(t, err)
		var values map[string]any
		check(t, json.Unmarshal(stats, &values))
		text := string(stats)
		expect(t, strings.HasSuffix(text, "}"), "%q", text)
		return values["strategy_planned"].(string)
	}
	check(t, session.Prepare(ctx, nil))
	ask(t, session)
	expect(t, strategy() == "quest", "%s", strategy())
	check(t, session.SetStrategy("full", 0, 0))
	ask(t, session)
	expect(t, strategy() == "full", "%s", strategy())
}

func TestOptionsOfASessionAreInItsStats(t *testing.T) {
	session := load(t, &kvasir.SessionOptions{Strategy: "ood", BudgetTokens: 100, DenseLayers: 1, SeparateHeads: true, Certify: true, Compare: 1,
		SearchBreadth: 70, BudgetSchedule: kvasir.BudgetLinear, Context: 5000, MemoryBudget: 1 << 30, SpillFolder: t.TempDir(), Threads: 1})
	ask(t, session)
	bytes, err := session.Stats()
	check(t, err)
	var stats map[string]any
	check(t, json.Unmarshal(bytes, &stats))
	expect(t, stats["budget_tokens"] == 100.0 && len(stats["dense_layers"].([]any)) == 1 && stats["share_heads"] == false && stats["search_breadth"] == 70.0 &&
		stats["budget_schedule"] == "linear" && stats["context"] == 5000.0 && stats["memory_budget"] == float64(1<<30) && stats["threads"] == 1.0 &&
		stats["last_certificate"].(float64) > 0 && stats["compared"] != nil, "%s", bytes)
}

func TestStrategiesAreListed(t *testing.T) {
	all, err := kvasir.Strategies()
	check(t, err)
	names := map[string]kvasir.Strategy{}
	for _, s := range all {
		names[s.Name] = s
	}
	expect(t, len(names) == len(all) && len(all) >= 12, "%v", all)
	quest := names["quest"]
	expect(t, quest.DenseLayers == 2 && quest.TakesBudget && quest.TakesSelect && quest.BudgetFraction == 0.02 && quest.BudgetFloor > 0, "%+v", quest)
	expect(t, names["full"].DenseLayers == -1 && !names["full"].TakesBudget, "%+v", names["full"])
	expect(t, names["bounded"].TakesCoverage && names["ood"].TakesHeadGraphs, "%+v", names)
}

func TestVersionsAndModels(t *testing.T) {
	expect(t, kvasir.Version() == kvasir.HeaderVersion, "%d, %d", kvasir.Version(), kvasir.HeaderVersion)
	expect(t, json.Valid([]byte(kvasir.BuildInfo())), "%s", kvasir.BuildInfo())
	model := open(t)
	info, err := model.Info()
	check(t, err)
	same, err := kvasir.InspectModel(modelPath)
	check(t, err)
	expect(t, info == same, "%+v is not %+v", info, same)
	expect(t, info.Layers == 10 && info.Width == 384 && info.Heads == 6 && info.KVHeads == 2 && info.HeadDim == 64 && info.FeedForward == 1024 &&
		info.Vocabulary == 6144 && info.Context == 131072 && info.Parameters > 18e6 && info.WeightBytes > 18e6 && info.KVBytesPerToken > 2560 &&
		info.Architecture == "llama" && info.Name != "" && strings.Contains(info.Weights, "Q8_0") && info.Tokenizer != "" &&
		info.ChatFormat == "chatml" && len(info.Fingerprint) == 64, "%+v", info)
	raw, err := kvasir.Open(modelPath, &kvasir.ModelOptions{ChatFormat: "raw", Device: "cpu", HashFolder: t.TempDir() + "/hashes"})
	check(t, err)
	defer raw.Close()
	check(t, raw.Hash(context.Background(), nil))
	hashed, err := raw.Info()
	check(t, err)
	expect(t, len(hashed.Hash) == 32, "%+v", hashed)
	info, err = raw.Info()
	check(t, err)
	expect(t, info.ChatFormat == "raw", "%s", info.ChatFormat)
}

func TestFilesAreInspectedPackedAndRestored(t *testing.T) {
	folder := t.TempDir()
	packed, back := filepath.Join(folder, "a.kvz"), filepath.Join(folder, "a.kv")
	info, err := kvasir.InspectFile(saved)
	check(t, err)
	bytes, err := os.ReadFile(saved)
	check(t, err)
	expect(t, info.FileBytes == uint64(len(bytes)) && info.Tokens > 400 && info.SealedTokens > 0 && info.KVBytes > 0 && info.Layers == 10 && info.KVHeads == 2 &&
		info.HeadDim == 64 && info.KVType == kvasir.KVInt8 && info.ModelName != "" && info.FormatVersion > 0, "%+v", info)
	var phases []kvasir.Phase
	progress := func(phase kvasir.Phase, done, total uint64) error { phases = append(phases, phase); return nil }
	check(t, kvasir.VerifyFile(ctx, saved, progress))
	check(t, kvasir.Pack(ctx, saved, packed, &kvasir.PackOptions{Level: 3, Progress: progress}))
	its, err := kvasir.InspectPacked(packed)
	check(t, err)
	expect(t, its.DocumentBytes == info.FileBytes && its.Tokens == info.Tokens && its.Level == 3 && its.FileBytes < info.FileBytes && its.Layers == 10 &&
		its.KVHeads == 2 && its.HeadDim == 64 && its.ModelName == info.ModelName && its.PackedVersion > 0 && its.FormatVersion == info.FormatVersion, "%+v", its)
	check(t, kvasir.Unpack(ctx, packed, back, progress))
	restored, err := os.ReadFile(back)
	check(t, err)
	expect(t, slices.Equal(restored, bytes), "other bytes came back")
	phases = slices.Compact(phases)
	expect(t, slices.Equal(phases, []kvasir.Phase{kvasir.PhaseVerify, kvasir.PhasePack, kvasir.PhaseUnpack}), "%v", phases)
}

func TestAPrefixIsTheBeginning(t *testing.T) {
	model := open(t)
	whole, err := model.Load(ctx, saved, nil, &kvasir.LoadOptions{Verify: true})
	check(t, err)
	defer whole.Close()
	part, err := model.LoadPrefix(ctx, saved, 100, nil, nil)
	check(t, err)
	defer part.Close()
	all, err := whole.Tokens()
	check(t, err)
	first, err := part.Tokens()
	check(t, err)
	expect(t, slices.Equal(first, all[:100]), "%d tokens", len(first))
}
