/* Several questions about one document, from two threads. Each has a fork of the mapped document;
 * the forks share its pages.
 *
 *     forks MODEL.gguf CACHE.kv "Question?" "Question?" ...
 *
 * `ask` or `kvasir prefill` makes the cache file. Answers are printed in the order of the
 * questions. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "answer.h"
#include "kvasir.h"

enum { THREADS = 2 };

/* Work of one thread. A session serves one call at a time, so each thread has its own. */
typedef struct work {
  kv_session* fork;
  char** questions;
  answer* answers;
  int first, count; /* questions first, first + THREADS, ... below count */
  kv_status status;
  kv_error error;
} work;

static void* answer_some(void* of) {
  work* mine = of;
  int i;
  /* Without KV_KEEP_TURN an answer leaves nothing in the sequence, so one fork serves all questions
   * of a thread. */
  for (i = mine->first; i < mine->count && mine->status == KV_OK; i += THREADS)
    mine->status = kv_generate(mine->fork, mine->questions[i], strlen(mine->questions[i]), NULL,
                               NULL, keep_text, &mine->answers[i], NULL, &mine->error);
  return NULL;
}

/* Loads the document, forks it for each thread, and waits for all of them. */
static kv_status answer_all(kv_model* model, const char* cache, char** questions, answer* answers,
                            int count, kv_error* error) {
  kv_session_options options;
  kv_session* document = NULL;
  pthread_t threads[THREADS];
  work works[THREADS];
  int i, started = 0;
  kv_status status;
  memset(works, 0, sizeof works);
  kv_init(&options, sizeof options);
  options.threads = 1; /* also of the forks: each computes in the thread that calls it */
  status = kv_load(model, cache, &options, NULL, &document, error);
  for (i = 0; i < THREADS && status == KV_OK; ++i)
    status = kv_session_fork(document, &works[i].fork, error);
  kv_session_close(document); /* the forks keep the pages */
  for (i = 0; i < THREADS && status == KV_OK; ++i) {
    works[i].questions = questions;
    works[i].answers = answers;
    works[i].first = i;
    works[i].count = count;
    if (pthread_create(&threads[i], NULL, answer_some, &works[i]) != 0) {
      error->status = status = KV_LIMIT;
      snprintf(error->message, sizeof error->message, "thread %d cannot be started", i + 1);
    } else {
      ++started;
    }
  }
  for (i = 0; i < THREADS; ++i) {
    if (i < started) pthread_join(threads[i], NULL);
    if (status == KV_OK && works[i].status != KV_OK) {
      status = works[i].status;
      *error = works[i].error;
    }
    kv_session_close(works[i].fork);
  }
  return status;
}

int main(int count, char** values) {
  kv_model* model = NULL;
  kv_error error;
  kv_status status;
  answer* answers;
  int i;
  if (count < 4) {
    fprintf(stderr, "usage: %s MODEL.gguf CACHE.kv QUESTION...\n", values[0]);
    return 2;
  }
  answers = calloc((size_t)(count - 3), sizeof *answers);
  if (!answers) return 1;
  status = kv_open(values[1], NULL, NULL, &model, &error);
  if (status == KV_OK)
    status = answer_all(model, values[2], values + 3, answers, count - 3, &error);
  for (i = 0; i < count - 3 && status == KV_OK; ++i) puts(answers[i].text);
  if (status != KV_OK) fprintf(stderr, "%s: %s\n", kv_status_text(status), error.message);
  kv_close(model);
  free(answers);
  return status == KV_OK ? 0 : 1;
}
