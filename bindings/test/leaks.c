/* Cycles of open, ask and close keep no memory and no file; each binding has the same test:
 * leaks MODEL.gguf DOCUMENT.kv [CYCLES]. It writes the document first. */
#define _DEFAULT_SOURCE
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvasir.h"

static const char text[] =
    "The tower has a gate. The access code of the north gate is 4821907. It is closed at night.";
static const char question[] = "What is the access code of the north gate?";
static const char code[] = "4821907";
/* Bytes that allocators keep; a leak of 7 kB a cycle is more in 1,000 cycles. */
enum { MAX_GROWTH = 6 << 20 };

static int32_t keep(const char* part, size_t size, void* user) {
  strncat(user, part, size < 255 - strlen(user) ? size : 255 - strlen(user));
  return 0;
}

static int32_t stop(const char* part, size_t size, void* user) {
  (void)part, (void)size, (void)user;
  return 1;
}

static int save_document(const char* model_path, const char* path) {
  kv_model* model = NULL;
  kv_session* session = NULL;
  int good = kv_open(model_path, NULL, NULL, &model, NULL) == KV_OK &&
             kv_session_open(model, NULL, &session, NULL) == KV_OK &&
             kv_prefill(session, text, sizeof text - 1, NULL, NULL, NULL, NULL) == KV_OK &&
             kv_save(session, path, NULL, NULL) == KV_OK;
  kv_session_close(session);
  kv_close(model);
  return good;
}

/* One question to a loaded document, and all ways that end early. */
static int cycle(const char* model_path, const char* path) {
  char answer[256] = "";
  kv_model* model = NULL;
  kv_session *session = NULL, *fork = NULL, *none = NULL;
  kv_strategy* strategy = NULL;
  kv_session_options options;
  kv_generate_options how;
  kv_error error;
  const size_t size = sizeof question - 1;
  int good;
  kv_init(&options, sizeof options);
  kv_init(&how, sizeof how);
  how.flags = KV_TRACE_PASSAGES;
  good = kv_strategy_create("bounded", &strategy, &error) == KV_OK &&
         kv_strategy_set(strategy, KV_PARAM_BUDGET_FRACTION, 0.05, &error) == KV_OK &&
         kv_strategy_set(strategy, KV_PARAM_ALPHA, 0.05, &error) == KV_BAD_ARGUMENT;
  options.decode = strategy;
  good = good && kv_open(model_path, NULL, NULL, &model, &error) == KV_OK &&
         kv_load(model, path, &options, NULL, &session, &error) == KV_OK &&
         kv_generate(session, question, size, &how, NULL, keep, answer, NULL, &error) == KV_OK &&
         strstr(answer, code) && kv_session_fork(session, &fork, &error) == KV_OK &&
         kv_generate(fork, question, size, NULL, NULL, stop, NULL, NULL, &error) == KV_CANCELLED &&
         kv_load(model, model_path, NULL, NULL, &none, &error) == KV_NOT_A_CACHE &&
         kv_open(path, NULL, NULL, &model, &error) == KV_UNSUPPORTED;
  kv_strategy_destroy(strategy);
  kv_session_close(fork);
  kv_close(model);
  kv_session_close(session);
  return good;
}

static long resident(void) {
  long size, pages = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%ld %ld", &size, &pages) != 2) pages = 0;
  if (file) fclose(file);
  return pages * sysconf(_SC_PAGESIZE);
}

static int open_files(void) {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (folder && readdir(folder)) ++count;
  if (folder) closedir(folder);
  return count;
}

int main(int count, char** values) {
  const int cycles = count > 3 ? atoi(values[3]) : 40;
  long before = 0, after = 0, now;
  int files = 0, i;
  if (count < 3 || cycles < 10) return 2;
  if (!save_document(values[1], values[2])) return puts("the document is not saved"), 1;
  for (i = 1; i <= cycles; ++i) {
    if (!cycle(values[1], values[2])) return printf("cycle %d failed\n", i), 1;
    /* Caches of allocators vary, so the minimum counts. The first tenth fills them. */
    now = resident();
    if (i == cycles / 10) files = open_files();
    if (i > cycles / 10 && i <= cycles / 5 && (before == 0 || now < before)) before = now;
    if (i > cycles - cycles / 10 && (after == 0 || now < after)) after = now;
  }
  printf(
      "%d cycles: at least %ld bytes resident after the first tenth, %ld in the last; %d and %d "
      "open files\n",
      cycles, before, after, files, open_files());
  return after - before > MAX_GROWTH || open_files() != files;
}
