/* Reads a document once, keeps what was read in a cache file, and answers a question about it: ask MODEL DOCUMENT CACHE QUESTION.
 * From the second run on the cache is mapped and the document is not looked at. */
#include <kvasir.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t print_text(const char *text, size_t size, void *user) {
  (void)user;
  return fwrite(text, 1, size, stdout) == size ? 0 : 1;
}

/* The whole file, to be freed by the caller; NULL when it cannot be read. */
static char *read_file(const char *path, size_t *size) {
  char *text = NULL;
  FILE *file = fopen(path, "rb");
  long end = -1;
  if (file && fseek(file, 0, SEEK_END) == 0) end = ftell(file);
  if (end >= 0 && fseek(file, 0, SEEK_SET) == 0) text = malloc((size_t)end + 1);
  *size = text ? fread(text, 1, (size_t)end, file) : 0;
  if (text && *size != (size_t)end) {
    free(text);
    text = NULL;
  }
  if (file) fclose(file);
  return text;
}

/* A session over the document's text, saved to the cache. */
static kv_status read_document(kv_model *model, const char *document, const char *cache, kv_session **session,
                               kv_error *error) {
  size_t size;
  kv_status status;
  char *text = read_file(document, &size);
  if (!text) {
    snprintf(error->message, sizeof error->message, "%s cannot be read", document);
    return KV_IO;
  }
  status = kv_session_open(model, NULL, session, error);
  if (status == KV_OK) status = kv_prefill(*session, text, size, NULL, NULL, NULL, error);
  if (status == KV_OK) status = kv_save(*session, cache, NULL, error);
  free(text);
  return status;
}

int main(int argc, char **argv) {
  kv_error error;
  kv_model *model = NULL;
  kv_session *session = NULL;
  kv_status status;
  if (argc != 5) {
    fprintf(stderr, "usage: ask MODEL DOCUMENT CACHE QUESTION\n");
    return 2;
  }
  status = kv_open(argv[1], NULL, &model, &error);
  if (status == KV_OK) {
    status = kv_load(model, argv[3], NULL, NULL, &session, &error);
    if (status == KV_NOT_FOUND || kv_status_is_stale(status))
      status = read_document(model, argv[2], argv[3], &session, &error);
  }
  if (status == KV_OK)
    status = kv_generate(session, argv[4], strlen(argv[4]), NULL, print_text, NULL, NULL, &error);
  if (status == KV_OK)
    printf("\n");
  else
    fprintf(stderr, "ask: %s\n", error.message);
  kv_session_close(session);
  kv_close(model);
  return status == KV_OK ? 0 : 1;
}
