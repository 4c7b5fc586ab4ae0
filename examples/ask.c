/* The smallest complete program: prefills a document once, saves its KV cache, answers a question.
 *
 *     ask MODEL.gguf DOCUMENT.txt CACHE.kv "Question?"
 *
 * The first run prefills the document, which takes a while; the next ones map the cache file. An
 * application also makes sure that the file is of this document, for example by a name that has the
 * checksum of the document. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvasir.h"
#include "read_file.h"

static int32_t print_progress(int32_t phase, uint64_t done, uint64_t total, void* user) {
  (void)user;
  if (phase == KV_PHASE_PREFILL && total > 0)
    fprintf(stderr, "\rprefill: %3d%%", (int)(100 * done / total));
  return 0; /* anything else would stop the prefill */
}

static int32_t print_text(const char* text, size_t size, void* user) {
  (void)user;
  fwrite(text, 1, size, stdout);
  fflush(stdout);
  return 0;
}

/* Prefills the document in a new session and saves that. */
static kv_status prefill_document(kv_model* model, const char* path, const char* cache,
                                  kv_session** out, kv_error* error) {
  kv_control control;
  kv_session* session = NULL;
  kv_status status;
  size_t size = 0;
  char* text = read_file(path, &size);
  if (!text) {
    error->status = KV_IO;
    snprintf(error->message, sizeof error->message, "cannot read %.300s", path);
    return KV_IO;
  }
  kv_init(&control, sizeof control);
  control.progress = print_progress;
  status = kv_session_open(model, NULL, &session, error);
  if (status == KV_OK) status = kv_prefill(session, text, size, &control, NULL, NULL, error);
  fputc('\n', stderr);
  if (status == KV_OK) status = kv_save(session, cache, NULL, error);
  free(text);
  if (status == KV_OK) {
    *out = session;
  } else {
    kv_session_close(session);
  }
  return status;
}

int main(int count, char** values) {
  kv_model* model = NULL;
  kv_session* session = NULL;
  kv_error error;
  kv_status status;
  if (count != 5) {
    fprintf(stderr, "usage: %s MODEL.gguf DOCUMENT.txt CACHE.kv QUESTION\n", values[0]);
    return 2;
  }
  status = kv_open(values[1], NULL, NULL, &model, &error);
  if (status == KV_OK) {
    status = kv_load(model, values[3], NULL, NULL, &session, &error);
    /* Without a file the document is prefilled. A file of another model or version
     * (kv_status_is_stale) stays: it may be another document's. A program with a directory of its
     * own prefills the document again. */
    if (status == KV_NOT_FOUND)
      status = prefill_document(model, values[2], values[3], &session, &error);
  }
  if (status == KV_OK)
    status = kv_generate(session, values[4], strlen(values[4]), NULL, NULL, print_text, NULL, NULL,
                         &error);
  if (status == KV_OK) {
    putchar('\n');
  } else {
    fprintf(stderr, "%s: %s\n", kv_status_text(status), error.message);
  }
  kv_session_close(session);
  kv_close(model);
  return status == KV_OK ? 0 : 1;
}
