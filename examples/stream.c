/* Prefills a document with progress on standard error and streams an answer. Ctrl-C stops either,
 * from another thread.
 *
 *     stream MODEL.gguf DOCUMENT.txt "Question?"
 *
 * A stopped prefill keeps its complete chunks, and the question is answered from these. A stopped
 * answer ends the program. A program with windows fires the token when a button is pressed. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvasir.h"
#include "read_file.h"

/* The other thread: each Ctrl-C stops the call that is running, within 100 ms. */
static void* wait_for_interrupts(void* cancel) {
  sigset_t interrupt;
  int number;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  while (sigwait(&interrupt, &number) == 0) kv_cancel_fire(cancel);
  return NULL;
}

static int32_t print_progress(int32_t phase, uint64_t done, uint64_t total, void* user) {
  (void)user;
  if (phase == KV_PHASE_PREFILL)
    fprintf(stderr, "\rprefill: %llu of %llu tokens", (unsigned long long)done,
            (unsigned long long)total);
  return 0;
}

static int32_t print_text(const char* text, size_t size, void* user) {
  (void)user;
  return fwrite(text, 1, size, stdout) == size && fflush(stdout) == 0 ? 0 : 1;
}

static kv_status prefill_document(kv_session* session, const char* path, kv_cancel* cancel,
                                  kv_error* error) {
  kv_control control;
  kv_status status;
  uint64_t tokens = 0, bytes = 0;
  size_t size = 0;
  char* text = read_file(path, &size);
  if (!text) {
    error->status = KV_IO;
    snprintf(error->message, sizeof error->message, "no text was prefilled");
    return KV_IO;
  }
  kv_init(&control, sizeof control);
  control.cancel = cancel;
  control.progress = print_progress;
  status = kv_prefill(session, text, size, &control, &tokens, &bytes, error);
  fputc('\n', stderr);
  if (status == KV_CANCELLED) {
    fprintf(stderr, "%s: kept %llu tokens, %llu of %llu bytes\n", kv_status_text(status),
            (unsigned long long)tokens, (unsigned long long)bytes, (unsigned long long)size);
    kv_cancel_reset(cancel); /* for the answer */
    status = KV_OK;
  }
  free(text);
  return status;
}

static kv_status prefill_and_answer(char** values, kv_cancel* cancel, kv_error* error) {
  kv_model* model = NULL;
  kv_session* session = NULL;
  kv_control control;
  kv_status status = kv_open(values[1], NULL, NULL, &model, error);
  if (status == KV_OK) status = kv_session_open(model, NULL, &session, error);
  if (status == KV_OK) status = prefill_document(session, values[2], cancel, error);
  if (status == KV_OK) {
    kv_init(&control, sizeof control);
    control.cancel = cancel;
    status = kv_generate(session, values[3], strlen(values[3]), NULL, &control, print_text, NULL,
                         NULL, error);
    putchar('\n');
  }
  kv_session_close(session);
  kv_close(model);
  return status;
}

int main(int count, char** values) {
  kv_cancel* cancel = NULL;
  kv_error error;
  kv_status status;
  pthread_t waiting;
  sigset_t interrupt;
  if (count != 4) {
    fprintf(stderr, "usage: %s MODEL.gguf DOCUMENT.txt QUESTION\n", values[0]);
    return 2;
  }
  /* Blocked in every thread, also those of the library: only sigwait receives the signal. */
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt, NULL);
  status = kv_cancel_create(&cancel, &error);
  if (status == KV_OK) {
    if (pthread_create(&waiting, NULL, wait_for_interrupts, cancel) != 0) {
      fputs("no thread to wait for Ctrl-C\n", stderr);
      kv_cancel_release(cancel);
      return 1;
    }
    status = prefill_and_answer(values, cancel, &error);
    pthread_cancel(waiting); /* it ends in sigwait */
    pthread_join(waiting, NULL);
  }
  if (status != KV_OK) fprintf(stderr, "%s: %s\n", kv_status_text(status), error.message);
  kv_cancel_release(cancel);
  return status == KV_OK ? 0 : 1;
}
