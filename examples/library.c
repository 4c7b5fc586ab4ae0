/* A folder of documents, each prefilled once: opens a text in it, lists and removes documents.
 *
 *     library FOLDER ask MODEL.gguf DOCUMENT.txt "Question?"
 *     library FOLDER list
 *     library FOLDER remove NAME
 *
 * The folder is all that is stored: a text is found by its tokens. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvasir.h"
#include "read_file.h"

static int32_t print_text(const char* text, size_t size, void* user) {
  (void)user;
  return fwrite(text, 1, size, stdout) == size && fflush(stdout) == 0 ? 0 : 1;
}

/* Prefills the part of the text that the library does not have, saves it there, and answers. */
static kv_status ask(kv_library* library, const char* model_path, const char* text, size_t size,
                     const char* question, kv_error* error) {
  kv_model* model = NULL;
  kv_session* session = NULL;
  kv_library_result result;
  kv_status status = kv_open(model_path, NULL, NULL, &model, error);
  kv_init(&result, sizeof result);
  if (status == KV_OK)
    status = kv_library_session(library, model, text, size, NULL, NULL, &session, &result, error);
  if (status == KV_OK) {
    fprintf(stderr, "%llu of %llu tokens found, in %s\n", (unsigned long long)result.tokens_found,
            (unsigned long long)result.tokens, result.name);
    if (result.save_status != KV_OK)
      fprintf(stderr, "not saved: %s\n", kv_status_text(result.save_status));
    status =
        kv_generate(session, question, strlen(question), NULL, NULL, print_text, NULL, NULL, error);
    putchar('\n');
  }
  kv_session_close(session);
  kv_close(model);
  return status;
}

static kv_status ask_about_file(kv_library* library, char** values, kv_error* error) {
  size_t size = 0;
  char* text = read_file(values[1], &size);
  kv_status status = KV_IO;
  if (text) {
    status = ask(library, values[0], text, size, values[2], error);
  } else {
    error->status = KV_IO;
    snprintf(error->message, sizeof error->message, "cannot read the document");
  }
  free(text);
  return status;
}

static kv_status list(kv_library* library, kv_error* error) {
  kv_library_document document;
  kv_status status;
  uint32_t i = 0;
  kv_init(&document, sizeof document);
  while ((status = kv_library_list(library, i++, &document, error)) == KV_OK)
    printf("%s\t%llu tokens\t%llu bytes\t%s\n", document.name, (unsigned long long)document.tokens,
           (unsigned long long)document.file_bytes,
           document.status == KV_OK ? document.model_name : kv_status_text(document.status));
  return status == KV_NOT_FOUND ? KV_OK : status; /* the end of the list */
}

int main(int count, char** values) {
  kv_library* library = NULL;
  kv_error error;
  kv_status status;
  const char* what = count > 2 ? values[2] : "";
  const int asks = count == 6 && strcmp(what, "ask") == 0;
  const int removes = count == 4 && strcmp(what, "remove") == 0;
  if (!asks && !removes && !(count == 3 && strcmp(what, "list") == 0)) {
    fprintf(stderr, "usage: %s FOLDER ask MODEL.gguf DOCUMENT.txt QUESTION | list | remove NAME\n",
            values[0]);
    return 2;
  }
  status = kv_library_open(values[1], NULL, &library, &error);
  if (status == KV_OK) {
    if (asks) status = ask_about_file(library, values + 3, &error);
    else status = removes ? kv_library_remove(library, values[3], &error) : list(library, &error);
  }
  if (status != KV_OK) fprintf(stderr, "%s: %s\n", kv_status_text(status), error.message);
  kv_library_close(library);
  return status == KV_OK ? 0 : 1;
}
