package kvasir_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

// Prefill a document once, save its KV cache, and query it.
func Example() {
	model, err := kvasir.Open(modelPath, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	folder, err := os.MkdirTemp("", "kvasir")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	cache := filepath.Join(folder, "gate.kv")

	// The first time.
	session, err := model.NewSession(nil)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	if _, err := session.Prefill(ctx, document, nil); err != nil {
		log.Fatal(err)
	}
	if err := session.Save(ctx, cache, nil); err != nil {
		log.Fatal(err)
	}
	session.Close()

	// Every later time.
	session, err = model.Load(ctx, cache, nil, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	answer, err := session.Ask(ctx, "What is the access code of the north gate?", nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(answer)
	// Output: The access code of the north gate is 4821907.
}

// A callback receives the answer and stops it.
func ExampleSession_Generate() {
	model, err := kvasir.Open(modelPath, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	session, err := model.Load(context.Background(), saved, nil, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	enough := errors.New("enough")
	words := 0
	_, err = session.Generate(context.Background(), "What is the access code of the north gate?",
		nil, func(text string) error {
			fmt.Print(text)
			if words += strings.Count(text, " "); words == 3 {
				return enough
			}
			return nil
		})
	fmt.Println()
	fmt.Println(errors.Is(err, kvasir.ErrCancelled), errors.Is(err, enough))
	// Output:
	// The access code of
	// true true
}

// A loop over an answer.
func ExampleSession_Stream() {
	model, err := kvasir.Open(modelPath, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	ctx := context.Background()
	session, err := model.Load(ctx, saved, nil, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	for text, err := range session.Stream(ctx, "What is the access code of the north gate?", nil) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(text)
	}
	// Output: The access code of the north gate is 4821907.
}

// A raw continuation, token by token.
func ExampleSession_Continuation() {
	model, err := kvasir.Open(modelPath, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	session, err := model.NewSession(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	tokens, err := model.Tokenize("<|im_start|>system\n"+document+"<|im_end|>\n"+
		"<|im_start|>user\nWhat is the access code of the north gate?<|im_end|>\n"+
		"<|im_start|>assistant\nThe access code of the north gate is", kvasir.TokenizeSpecial)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	if _, err := session.PrefillTokens(ctx, tokens, nil); err != nil {
		log.Fatal(err)
	}
	for text, err := range session.Continuation(ctx, nil) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(text)
	}
	// Output: 4821907.
}

// Strategies decide how much of the KV cache an answer reads.
func ExampleNewStrategy() {
	quest, err := kvasir.NewStrategy("quest", kvasir.BudgetTokens(1024), kvasir.DenseLayers(1))
	if err != nil {
		log.Fatal(err)
	}
	options := &kvasir.SessionOptions{Decode: quest}
	fmt.Println(options.Decode.Name())
	_, err = kvasir.NewStrategy("full", kvasir.BudgetTokens(1024))
	fmt.Println(errors.Is(err, kvasir.ErrBadArgument))
	// Output:
	// quest
	// true
}

// errors.Is finds the status and the errors of package fs.
func ExampleError() {
	_, err := kvasir.Open("no-such.gguf", nil)
	fmt.Println(errors.Is(err, kvasir.ErrNotFound), errors.Is(err, os.ErrNotExist))
	var failure *kvasir.Error
	if errors.As(err, &failure) {
		fmt.Println(failure.Status, failure.Errno)
	}
	// Output:
	// true true
	// not found no such file or directory
}
