/* A host that loads the library as a plugin, uses it and unloads it, TIMES times. Each time is in a
 * thread of its own, which then ends: unloading.c LIBRARY MODEL TIMES. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvasir.h"

static const char *library, *model_path;

static void require(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "broken: %s\n", what);
  exit(1);
}

static void* find(void* handle, const char* name) {
  void* const address = dlsym(handle, name);
  require(address != NULL, name);
  return address;
}

/* ISO C has no conversion from dlsym's pointer. */
#define FUNCTION(name)                \
  __typeof__(name)* name##_;          \
  {                                   \
    void* at = find(handle, #name);   \
    memcpy(&name##_, &at, sizeof at); \
  }

static void* live(void* unused) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  kv_model* model;
  kv_session *session, *fork;
  kv_generate_options options;
  kv_session_options how;
  kv_error error;
  require(handle != NULL, "dlopen");
  FUNCTION(kv_open)
  FUNCTION(kv_close)
  FUNCTION(kv_session_open)
  FUNCTION(kv_init)
  FUNCTION(kv_session_close)
  FUNCTION(kv_prefill)
  FUNCTION(kv_session_fork)
  FUNCTION(kv_generate)
  kv_init_(&how, sizeof how);
  how.threads = 3;
  kv_init_(&options, sizeof options);
  options.max_tokens = 4;
  require(kv_open_(model_path, NULL, NULL, &model, &error) == KV_OK, "kv_open");
  require(kv_session_open_(model, &how, &session, &error) == KV_OK, "kv_session_open");
  require(kv_prefill_(session, "hello world", 11, NULL, NULL, NULL, &error) == KV_OK, "kv_prefill");
  require(kv_session_fork_(session, &fork, &error) == KV_OK, "kv_session_fork");
  require(kv_generate_(fork, "a", 1, &options, NULL, NULL, NULL, NULL, &error) == KV_OK,
          "kv_generate");
  kv_session_close_(session);
  kv_session_close_(fork);
  kv_close_(model);
  require(dlclose(handle) == 0, "dlclose");
  return unused;
}

static int entries(const char* folder) {
  DIR* const open = opendir(folder);
  int count = 0;
  require(open != NULL, folder);
  while (readdir(open)) ++count;
  closedir(open);
  return count;
}

/* Mappings of files. Others an allocator keeps for its threads. */
static int mappings(void) {
  FILE* const maps = fopen("/proc/self/maps", "r");
  char line[4096];
  int count = 0;
  require(maps != NULL, "/proc/self/maps");
  while (fgets(line, sizeof line, maps)) count += strchr(line, '/') != NULL;
  fclose(maps);
  return count;
}

static long address_space(void) {
  FILE* const statm = fopen("/proc/self/statm", "r");
  long pages = 0;
  require(statm != NULL && fscanf(statm, "%ld", &pages) == 1, "/proc/self/statm");
  fclose(statm);
  return pages * sysconf(_SC_PAGESIZE);
}

/* A thread that was joined may stay in the list for a moment. */
static int has_threads(int count) {
  int tries;
  for (tries = 0; tries < 1000 && entries("/proc/self/task") != count; ++tries) usleep(1000);
  return tries < 1000;
}

int main(int argc, char** argv) {
  /* mimalloc reserves 32 MiB for a thread; how often it does depends on which threads meet. A leak
   * of one reservation in each life would be far more. */
  const long most = 256L << 20;
  int i, n, threads = 0, files = 0, maps = 0;
  long bytes = 0;
  require(argc == 4, "three arguments");
  /* The allocator reserves 64 MiB for a thread that waits for another one: not the library. */
  require(mallopt(M_ARENA_MAX, 1) == 1, "mallopt");
  library = argv[1], model_path = argv[2], n = atoi(argv[3]);
  threads = entries("/proc/self/task");
  for (i = 0; i < n; ++i) {
    pthread_t thread;
    require(pthread_create(&thread, NULL, live, NULL) == 0 && pthread_join(thread, NULL) == 0,
            "a thread");
    live(NULL);
    if (i == 4) files = entries("/proc/self/fd"), maps = mappings(), bytes = address_space();
  }
  require(has_threads(threads), "no thread is left behind");
  require(entries("/proc/self/fd") == files, "no descriptor is left behind");
  require(mappings() == maps, "no mapping of a file is left behind");
  printf("address space grew by %ld bytes\n", address_space() - bytes);
  require(address_space() - bytes < most, "address space does not grow with each life");
  return 0;
}
