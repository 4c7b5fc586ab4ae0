// Command overhead measures the CPU time per token of Go and of C. It decodes the same answers from
// the same cache file in one process, in C and in Go by turns. It counts the calling thread alone:
// not the thread on which Go's runtime watches long calls. It prints the medians of the times and
// of the ratios.
//
//	go run ./overhead MODEL.gguf DOCUMENT.kv
package main

/*
#cgo pkg-config: kvasir
#include <kvasir.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int32_t count_bytes(const char *text, size_t size, void *user) {
  (void)text;
  *(size_t *)user += size;
  return 0;
}

static const char question[] = "What is the access code of the north gate? Tell me "
                               "all that you know of it.";

static const char *question_text(void) { return question; }

// Nanoseconds per token of kv_generate with a cancel token; below 0: a failure.
static double generate(kv_session *session, uint32_t tokens) {
  kv_generate_options options;
  kv_answer answer = {.struct_size = sizeof answer};
  size_t bytes = 0;
  kv_control control;
  kv_init(&options, sizeof options);
  kv_init(&control, sizeof control);
  options.max_tokens = tokens;
  options.temperature = 4;  // warm: no end of turn comes early
  options.seed = 1;
  if (kv_cancel_create(&control.cancel, NULL) != KV_OK) return -1;
  double begin = now();
  kv_status status = kv_generate(session, question, sizeof question - 1, &options, &control,
                                 count_bytes, &bytes, &answer, NULL);
  double end = now();
  kv_cancel_release(control.cancel);
  if (status != KV_OK || answer.answer_tokens == 0) return -1;
  return (end - begin) / (double)answer.answer_tokens;
}

// Nanoseconds per token of kv_session_next and kv_detokenize.
static double next(kv_session *session, const kv_model *model, uint32_t tokens) {
  kv_generate_options options;
  kv_control control;
  kv_init(&options, sizeof options);
  kv_init(&control, sizeof control);
  options.temperature = 4;  // warm: no end of turn comes early
  options.seed = 1;
  if (kv_cancel_create(&control.cancel, NULL) != KV_OK) return -1;
  kv_status status = KV_OK;
  double begin = now();
  for (uint32_t i = 0; i < tokens && status == KV_OK; ++i) {
    int32_t token, end;
    char text[64];
    size_t size;
    status = kv_session_next(session, &options, &control, &token, &end, NULL);
    if (status == KV_OK)
      status = kv_detokenize(model, &token, 1, 0, text, sizeof text, &size, NULL);
  }
  double end = now();
  kv_cancel_release(control.cancel);
  return status == KV_OK ? (end - begin) / tokens : -1;
}
*/
import "C"

import (
	"context"
	"fmt"
	"log"
	"os"
	"runtime"
	"slices"
	"unsafe"

	kvasir "github.com/kvasir-project/kvasir/bindings/go"
)

const (
	tokens = 256
	rounds = 41
)

var sampling = kvasir.Sampling{Temperature: 4, Seed: 1}

func main() {
	runtime.LockOSThread()
	if len(os.Args) != 3 {
		log.Fatal("usage: overhead MODEL.gguf DOCUMENT.kv")
	}
	var options C.kv_session_options
	C.kv_init(unsafe.Pointer(&options), C.size_t(unsafe.Sizeof(options)))
	options.threads = 1
	var e C.kv_error
	var cModel *C.kv_model
	var cSession *C.kv_session
	modelPath, path := C.CString(os.Args[1]), C.CString(os.Args[2])
	defer C.free(unsafe.Pointer(modelPath))
	defer C.free(unsafe.Pointer(path))
	if C.kv_open(modelPath, nil, nil, &cModel, &e) != C.KV_OK ||
		C.kv_load(cModel, path, &options, nil, &cSession, &e) != C.KV_OK {
		log.Fatal(C.GoString(&e.message[0]))
	}
	defer C.kv_close(cModel)
	defer C.kv_session_close(cSession)
	model, err := kvasir.Open(os.Args[1], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	session, err := model.Load(context.Background(), os.Args[2], &kvasir.SessionOptions{Threads: 1},
		nil)
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	// An application's context can end too.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	compare("Generate",
		func() float64 { return float64(C.generate(cSession, tokens)) },
		func() float64 { return generate(ctx, session) })
	before, err := session.Tokens()
	if err != nil {
		log.Fatal(err)
	}
	made := 0 // with tokens that end a turn or have no text; the same each time
	inGo := func() float64 {
		defer session.Rewind(len(before))
		taken := continuation(ctx, session)
		all, err := session.Tokens()
		if err != nil {
			log.Fatal(err)
		}
		made = len(all) - len(before)
		return taken / float64(made)
	}
	inGo()
	compare("Continuation", func() float64 {
		defer C.kv_session_rewind(cSession, C.uint64_t(len(before)), nil)
		return float64(C.next(cSession, cModel, C.uint32_t(made)))
	}, inGo)
}

func generate(ctx context.Context, session *kvasir.Session) float64 {
	bytes := 0
	begin := C.now()
	options := &kvasir.GenerateOptions{MaxTokens: tokens, Sampling: sampling}
	question := C.GoString(C.question_text())
	answer, err := session.Generate(ctx, question, options, func(text string) error {
		bytes += len(text)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	return float64(C.now()-begin) / float64(answer.AnswerTokens)
}

// continuation decodes a number of pieces of text.
func continuation(ctx context.Context, session *kvasir.Session) float64 {
	count := 0
	begin := C.now()
	for count < tokens {
		for _, err := range session.Continuation(ctx, &sampling) {
			if err != nil {
				log.Fatal(err)
			}
			if count++; count == tokens {
				break
			}
		}
	}
	return float64(C.now() - begin)
}

// compare measures both by turns, alternating the first, and prints the medians.
func compare(name string, c, g func() float64) {
	var cs, gs, ratios []float64
	for i := range rounds + 1 {
		var inC, inGo float64
		if i%2 == 0 {
			inC = c()
			inGo = g()
		} else {
			inGo = g()
			inC = c()
		}
		if inC < 0 {
			log.Fatal("the C program failed")
		}
		if i > 0 {
			cs, gs, ratios = append(cs, inC), append(gs, inGo), append(ratios, inGo/inC)
		}
	}
	for _, values := range [][]float64{cs, gs, ratios} {
		slices.Sort(values)
	}
	fmt.Printf("%-12s C %.1f us per token, Go %.1f us, %+.2f%% (fastest %+.2f%%)\n", name,
		cs[rounds/2]/1e3, gs[rounds/2]/1e3, 100*(ratios[rounds/2]-1), 100*(gs[0]/cs[0]-1))
}
