/* Stops a prefill, saves it, and continues in another session. The answer is the same as after one
 * prefill.
 *
 *     resume MODEL.gguf DOCUMENT.txt CACHE.kv "Question?"
 *
 * An application saves when its window is closed, and continues when it is opened again. With the
 * cache file it stores the number of prefilled bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "answer.h"
#include "kvasir.h"
#include "read_file.h"

/* Stops after the first chunk, as if somebody closed the window. */
static int32_t stop_early(int32_t phase, uint64_t done, uint64_t total, void* user) {
  (void)total;
  (void)user;
  return phase == KV_PHASE_PREFILL && done > 0;
}

static kv_status ask(kv_session* session, const char* question, answer* to, kv_error* error) {
  to->text[to->size = 0] = '\0';
  return kv_generate(session, question, strlen(question), NULL, NULL, keep_text, to, NULL, error);
}

static kv_status prefill_at_once(kv_model* model, const char* text, size_t size,
                                 const char* question, answer* to, kv_error* error) {
  kv_session* session = NULL;
  kv_status status = kv_session_open(model, NULL, &session, error);
  if (status == KV_OK) status = kv_prefill(session, text, size, NULL, NULL, NULL, error);
  if (status == KV_OK) status = ask(session, question, to, error);
  kv_session_close(session);
  return status;
}

/* Prefills until it is stopped, and saves that: *bytes of the text. */
static kv_status prefill_a_part(kv_model* model, const char* text, size_t size, const char* cache,
                                uint64_t* bytes, kv_error* error) {
  kv_control control;
  kv_session* session = NULL;
  uint64_t tokens = 0;
  kv_status status = kv_session_open(model, NULL, &session, error);
  kv_init(&control, sizeof control);
  control.progress = stop_early;
  if (status == KV_OK) status = kv_prefill(session, text, size, &control, &tokens, bytes, error);
  if (status == KV_OK || status == KV_CANCELLED) { /* KV_OK: it ended before the stop */
    fprintf(stderr, "%s: %llu tokens, %llu of %llu bytes\n", kv_status_text(status),
            (unsigned long long)tokens, (unsigned long long)*bytes, (unsigned long long)size);
    status = kv_save(session, cache, NULL, error);
  }
  kv_session_close(session);
  return status;
}

/* Maps the saved part and prefills the text from there. */
static kv_status prefill_the_rest(kv_model* model, const char* text, size_t size, const char* cache,
                                  const char* question, answer* to, kv_error* error) {
  kv_session* session = NULL;
  uint64_t tokens = 0;
  kv_status status = kv_load(model, cache, NULL, NULL, &session, error);
  if (status == KV_OK) status = kv_prefill(session, text, size, NULL, &tokens, NULL, error);
  if (status == KV_OK) fprintf(stderr, "continued: %llu tokens\n", (unsigned long long)tokens);
  if (status == KV_OK) status = ask(session, question, to, error);
  kv_session_close(session);
  return status;
}

int main(int count, char** values) {
  static answer at_once, resumed;
  kv_model* model = NULL;
  kv_error error;
  kv_status status;
  uint64_t bytes = 0;
  size_t size = 0;
  char* text;
  FILE* file;
  if (count != 5) {
    fprintf(stderr, "usage: %s MODEL.gguf DOCUMENT.txt CACHE.kv QUESTION\n", values[0]);
    return 2;
  }
  file = fopen(values[3], "rb"); /* kv_save would replace it */
  if (file) {
    fclose(file);
    fprintf(stderr, "%s exists\n", values[3]);
    return 1;
  }
  text = read_file(values[2], &size);
  if (!text) return 1;
  status = kv_open(values[1], NULL, NULL, &model, &error);
  if (status == KV_OK) status = prefill_at_once(model, text, size, values[4], &at_once, &error);
  if (status == KV_OK) status = prefill_a_part(model, text, size, values[3], &bytes, &error);
  if (status == KV_OK)
    status =
        prefill_the_rest(model, text + bytes, size - bytes, values[3], values[4], &resumed, &error);
  kv_close(model);
  free(text);
  if (status != KV_OK) {
    fprintf(stderr, "%s: %s\n", kv_status_text(status), error.message);
    return 1;
  }
  puts(resumed.text);
  if (strcmp(at_once.text, resumed.text) == 0) return 0;
  fprintf(stderr, "after one prefill the answer is another: %s\n", at_once.text);
  return 1;
}
