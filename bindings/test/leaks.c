/* Opening, asking and closing again and again takes no more memory and leaves no file open, here in C as in each binding's own test:
 * leaks MODEL.gguf DOCUMENT.kv [CYCLES]. The document is made where it is not there. */
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
enum {
  MOST_GROWTH =
      6 << 20 /* bytes: what allocators keep for a while; a leak of 7 kB a cycle is more in 1,000 */
};

static int32_t keep(const char* part, size_t size, void* user) {
  strncat(user, part, size < 255 - strlen(user) ? size : 255 - strlen(user));
  return 0;
}

static int32_t stop(const char* part, size_t size, void* user) {
  (void)part, (void)size, (void)user;
  return 1;
}

static int read_document(const char* model_path, const char* path) {
  kv_model* model = NULL;
  kv_session* session = NULL;
  int good = kv_open(model_path, NULL, &model, NULL) == KV_OK &&
             kv_session_open(model, NULL, &session, NULL) == KV_OK &&
             kv_prefill(session, text, sizeof text - 1, NULL, NULL, NULL, NULL) == KV_OK &&
             kv_save(session, path, NULL, NULL) == KV_OK;
  kv_session_close(session);
  kv_close(model);
  return good;
}

/* Also the ways that end early. */
static int cycle(const char* model_path, const char* path) {
  char answer[256] = "";
  kv_model* model = NULL;
  kv_session *session = NULL, *fork = NULL, *none = NULL;
  kv_error error;
  int good = kv_open(model_path, NULL, &model, &error) == KV_OK &&
             kv_load(model, path, NULL, NULL, &session, &error) == KV_OK &&
             kv_generate(session, question, sizeof question - 1, NULL, keep, answer, NULL,
                         &error) == KV_OK &&
             strstr(answer, code) && kv_fork(session, &fork, &error) == KV_OK &&
             kv_generate(fork, question, sizeof question - 1, NULL, stop, NULL, NULL, &error) ==
                 KV_CANCELLED &&
             kv_load(model, model_path, NULL, NULL, &none, &error) == KV_NOT_A_CACHE &&
             kv_open(path, NULL, &model, &error) == KV_UNSUPPORTED;
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
  if (!read_document(values[1], values[2])) return puts("the document could not be read"), 1;
  for (i = 1; i <= cycles; ++i) {
    if (!cycle(values[1], values[2])) return printf("cycle %d failed\n", i), 1;
    /* What allocators keep comes and goes: the least of a time tells. The first tenth fills their caches. */
    now = resident();
    if (i == cycles / 10) files = open_files();
    if (i > cycles / 10 && i <= cycles / 5 && (before == 0 || now < before)) before = now;
    if (i > cycles - cycles / 10 && (after == 0 || now < after)) after = now;
  }
  printf(
      "%d cycles: at least %ld bytes resident after the first tenth, %ld in the last; %d and %d "
      "open files\n",
      cycles, before, after, files, open_files());
  return after - before > MOST_GROWTH || open_files() != files;
}
