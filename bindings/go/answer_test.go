package kvasir_test

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
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
	expect(t, answer.StopReason == kvasir.StopEndOfTurn &&
		answer.StopReason.String() == "end of turn", "it stopped by %v", answer.StopReason)
	expect(t, answer.QuestionTokens > 5 && answer.AnswerTokens >= len(pieces), "%+v", answer)
	expect(t, answer.FirstToken > 0 && answer.Total > answer.FirstToken && answer.TokensPresent > 0,
		"%+v", answer)
	expect(t, ask(t, session) == whole, "a second answer is another one")
}

func TestPassagesHaveTheTextThatTheAnswerAttended(t *testing.T) {
	session := load(t, nil)
	_, err := session.Passages()
	expect(t, errors.Is(err, kvasir.ErrBadState), "%v", err)
	_, err = session.Generate(ctx, question, &kvasir.GenerateOptions{TracePassages: true}, nil)
	check(t, err)
	passages, err := session.Passages()
	check(t, err)
	expect(t, len(passages) > 0, "no passages")
	first := passages[0]
	expect(t, first.Share > 0 && strings.Contains(first.Text, "482"), "%+v", first)
	expect(t, first.FirstByte >= 0 && first.Bytes >= len(first.Text), "%+v", first)
	bytes := document[first.FirstByte : first.FirstByte+first.Bytes]
	expect(t, bytes == first.Text, "%q is not %q", bytes, first.Text)
	tokens, err := session.Tokens()
	check(t, err)
	of := tokens[first.FirstToken : first.FirstToken+first.Tokens]
	text, err := open(t).Detokenize(of, 0)
	check(t, err)
	expect(t, text == first.Text, "%q is not %q", text, first.Text)
}

func TestTheCommandLineAnswersAlike(t *testing.T) {
	if toolPath == "" {
		t.Skip("KVASIR_TOOL names no command line")
	}
	out, err := exec.Command(toolPath, "ask", "-m", modelPath, "-c", saved, question).Output()
	check(t, err)
	answer := ask(t, load(t, nil))
	expect(t, answer != "" && strings.HasSuffix(string(out), "?\n"+answer+"\n"), "%q is not %q",
		out, answer)
}

func TestTheCProgramAnswersAlike(t *testing.T) {
	program := filepath.Join(t.TempDir(), "ask")
	flags, err := exec.Command("pkg-config", "--cflags", "--libs", "kvasir").Output()
	check(t, err)
	out, err := exec.Command("cc", append([]string{"-o", program, "../../examples/ask.c"},
		strings.Fields(string(flags))...)...).CombinedOutput()
	expect(t, err == nil, "%v: %s", err, out)
	out, err = exec.Command(program, modelPath, "nothing.txt", saved, question).Output()
	check(t, err)
	answer := ask(t, load(t, nil))
	expect(t, answer != "" && string(out) == answer+"\n", "%q is not %q", out, answer)
}

func TestContinuationDecodesAsGenerateDoes(t *testing.T) {
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
	expect(t, done == len(tokens), "%d of %d tokens", done, len(tokens))
	var got strings.Builder
	for text, err := range session.Continuation(ctx, nil) {
		check(t, err)
		got.WriteString(text)
		expect(t, got.Len() < 1000, "the turn does not end: %q", got.String())
	}
	expect(t, got.String() == want, "%q, where Generate says %q", got.String(), want)

	// A break leaves the decoded tokens. The session is free in the body of the loop.
	check(t, session.Rewind(len(before)+len(tokens)))
	for _, err := range session.Continuation(ctx, nil) {
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

func TestLoopsEndWithTheError(t *testing.T) {
	session := empty(t)
	wrong := &kvasir.GenerateOptions{MaxTokens: -1}
	for status, loop := range map[kvasir.Status]iter.Seq2[string, error]{
		kvasir.ErrBadState:    session.Continuation(ctx, nil),
		kvasir.ErrBadArgument: session.Stream(ctx, question, wrong),
	} {
		count := 0
		for text, err := range loop {
			count++
			expect(t, text == "" && errors.Is(err, status), "%q, %v", text, err)
		}
		expect(t, count == 1, "%d times", count)
	}
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
	answer, err = session.Generate(ctx, question,
		&kvasir.GenerateOptions{Stop: []string{"nowhere to be seen", "4821"}}, add)
	check(t, err)
	expect(t, text.String() == whole[:strings.Index(whole, "4821")] &&
		answer.StopReason == kvasir.StopString, "%q: %+v", text.String(), answer)

	hot := func(seed uint64) string {
		answer, err := session.Ask(ctx, question, &kvasir.GenerateOptions{MaxTokens: 12,
			Sampling: kvasir.Sampling{Temperature: 20, TopK: 500, TopP: 0.999, MinP: 0.00001,
				RepetitionPenalty: 1.5, Seed: seed}})
		check(t, err)
		return answer
	}
	expect(t, hot(1) == hot(1) && hot(1) != hot(2), "the seed does not decide: %q, %q, %q", hot(1),
		hot(1), hot(2))

	plain, err := session.Generate(ctx, "<|im_end|>", nil, nil)
	check(t, err)
	special, err := session.Generate(ctx, "<|im_end|>", &kvasir.GenerateOptions{Special: true}, nil)
	check(t, err)
	expect(t, special.QuestionTokens < plain.QuestionTokens, "%d and %d tokens",
		special.QuestionTokens, plain.QuestionTokens)

	before, err := session.Tokens()
	check(t, err)
	_, err = session.Ask(ctx, question, &kvasir.GenerateOptions{KeepTurn: true})
	check(t, err)
	after, err := session.Tokens()
	check(t, err)
	expect(t, len(after) > len(before) && slices.Equal(after[:len(before)], before),
		"the turn was not kept")
	check(t, session.Rewind(len(before)))
	again, err := session.Tokens()
	check(t, err)
	expect(t, slices.Equal(again, before), "Rewind went elsewhere")
}

func TestAForkHasASequenceOfItsOwn(t *testing.T) {
	session := load(t, nil)
	want := ask(t, session)
	fork, err := session.Fork()
	check(t, err)
	defer fork.Close()
	_, err = fork.PrefillTokens(ctx, []int32{5, 6, 7}, nil)
	check(t, err)
	mine, err := session.Tokens()
	check(t, err)
	theirs, err := fork.Tokens()
	check(t, err)
	expect(t, len(theirs) == len(mine)+3, "%d and %d tokens", len(theirs), len(mine))
	check(t, session.Close())
	check(t, fork.Rewind(len(mine)))
	expect(t, ask(t, fork) == want, "the fork answers otherwise")
}

func TestTokensAndTextAreEachOther(t *testing.T) {
	model := open(t)
	for _, text := range []string{"", "a", "Grüße, 世界 \U0001F600", "a\x00b", "\xff\xfe",
		strings.Repeat("many words ", 3000)} {
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
	expect(t, len(logarithms) == 2 && math.Abs(float64(logarithms[0])+math.Log(sum)) < 1e-3,
		"%v, not %v", logarithms, -math.Log(sum))
	expect(t, logarithms[1] < 0, "%v", logarithms)
	token, _, err := session.Next(ctx, nil)
	check(t, err)
	expect(t, token == best, "the next token is %d, not %d", token, best)
}

// The model was not trained to think: a thought ends at its limit, or where the model ends a turn.
func TestAThoughtIsNoPartOfTheAnswer(t *testing.T) {
	turns := "<|im_start|>system\n{document}<|im_end|>\n{user}<|im_start|>user\n{question}" +
		"<|im_end|>\n<|im_start|>assistant\n<T>{thought}</T>\n{answer}<|im_end|>\n"
	model, err := kvasir.Open(modelPath, &kvasir.ModelOptions{ChatFormat: turns})
	check(t, err)
	defer model.Close()
	info, err := model.Info()
	check(t, err)
	expect(t, info.Thinks && info.ChatFormat == "custom", "%+v", info)
	session, err := model.NewSession(nil)
	check(t, err)
	defer session.Close()
	ctx := context.Background()
	_, err = session.Prefill(ctx, "The gate's code is 4711.", nil)
	check(t, err)
	var thought, text strings.Builder
	options := kvasir.GenerateOptions{MaxTokens: 4, Thinking: true, ThinkingTokens: 5,
		OnThinking: func(piece string) error { thought.WriteString(piece); return nil }}
	answer, err := session.Generate(ctx, "Which code?", &options, func(piece string) error {
		text.WriteString(piece)
		return nil
	})
	check(t, err)
	expect(t, answer.ThinkingTokens > 0 && answer.ThinkingTokens <= 5 && thought.Len() > 0 &&
		!strings.Contains(text.String(), thought.String()), "%+v %q %q", answer, &thought, &text)
	enough := errors.New("enough")
	options.OnThinking = func(string) error { return enough }
	_, err = session.Generate(ctx, "Which code?", &options, nil)
	expect(t, errors.Is(err, enough) && errors.Is(err, kvasir.ErrCancelled), "%v", err)
	_, err = load(t, nil).Ask(ctx, "Which code?", &options)
	expect(t, errors.Is(err, kvasir.ErrUnsupported), "%v", err)
}

func TestAVocabularyTokenizesWithoutWeights(t *testing.T) {
	vocabulary, err := kvasir.Open(modelPath, &kvasir.ModelOptions{VocabularyOnly: true})
	check(t, err)
	defer vocabulary.Close()
	tokens, err := vocabulary.Tokenize("Which code?", 0)
	check(t, err)
	same, err := open(t).Tokenize("Which code?", 0)
	check(t, err)
	expect(t, slices.Equal(tokens, same), "%v is not %v", tokens, same)
	_, err = vocabulary.NewSession(nil)
	expect(t, errors.Is(err, kvasir.ErrBadState), "%v", err)
}

func TestVersionsAndModels(t *testing.T) {
	expect(t, kvasir.Version() == kvasir.HeaderVersion, "%d, %d", kvasir.Version(),
		kvasir.HeaderVersion)
	expect(t, json.Valid([]byte(kvasir.BuildInfo())), "%s", kvasir.BuildInfo())
	model := open(t)
	info, err := model.Info()
	check(t, err)
	same, err := kvasir.InspectModel(modelPath)
	check(t, err)
	expect(t, info == same, "%+v is not %+v", info, same)
	expect(t, info.Layers == 10 && info.Width == 384 && info.Heads == 6 && info.KVHeads == 2 &&
		info.HeadDim == 64 && info.FeedForward == 1024 &&
		info.Vocabulary == 6144 && info.Context == 131072 && info.Parameters > 18e6 &&
		info.WeightBytes > 18e6 && info.KVBytesPerToken > 2560 &&
		info.Architecture == "llama" && info.Name != "" && strings.Contains(info.Weights, "Q8_0") &&
		info.Tokenizer != "" &&
		info.ChatFormat == "chatml" && len(info.Fingerprint) == 64, "%+v", info)
	raw, err := kvasir.Open(modelPath, &kvasir.ModelOptions{ChatFormat: "raw", Device: "cpu",
		HashDirectory: t.TempDir() + "/hashes"})
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
	expect(t, info.FileBytes == int64(len(bytes)) && info.Tokens > 400 && info.SealedTokens > 0 &&
		info.KVBytes > 0 && info.Layers == 10 && info.KVHeads == 2 &&
		info.HeadDim == 64 && info.Precision == kvasir.PrecisionInt8 && info.ModelName != "" &&
		info.FormatVersion > 0, "%+v", info)
	var phases []kvasir.Phase
	progress := func(phase kvasir.Phase, done,
		total int64) error {
		phases = append(phases, phase)
		return nil
	}
	check(t, kvasir.VerifyFile(ctx, saved, progress))
	check(t, kvasir.Pack(ctx, saved, packed, &kvasir.PackOptions{Level: 3, Progress: progress}))
	inside, err := kvasir.InspectPacked(packed)
	check(t, err)
	expect(t, inside.DocumentBytes == info.FileBytes && inside.Tokens == info.Tokens &&
		inside.Level == 3 && inside.FileBytes < info.FileBytes && inside.Layers == 10 &&
		inside.KVHeads == 2 && inside.HeadDim == 64 && inside.ModelName == info.ModelName &&
		inside.PackedVersion > 0 && inside.FormatVersion == info.FormatVersion, "%+v", inside)
	check(t, kvasir.Unpack(ctx, packed, back, progress))
	restored, err := os.ReadFile(back)
	check(t, err)
	expect(t, slices.Equal(restored, bytes), "other bytes came back")
	phases = slices.Compact(phases)
	expect(t, slices.Equal(phases, []kvasir.Phase{kvasir.PhaseVerify, kvasir.PhasePack,
		kvasir.PhaseUnpack}), "%v", phases)
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
