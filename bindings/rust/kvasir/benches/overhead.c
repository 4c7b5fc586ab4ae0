/* The C side of overhead.rs: overhead MODEL.gguf DOCUMENT.kv QUESTION TOKENS. For each input line
 * it answers once and prints the nanoseconds of CPU time and the tokens. */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvasir.h"

static int32_t count_text(const char* text, size_t size, void* user) {
  (void)text;
  *(size_t*)user += size;
  return 0;
}

static uint64_t cpu_time(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int main(int count, char** values) {
  kv_model* model = NULL;
  kv_session* session = NULL;
  kv_session_options session_options;
  kv_generate_options options;
  kv_error error;
  kv_status status;
  char line[16];
  if (count != 5) return 2;
  kv_init(&session_options, sizeof session_options);
  session_options.threads = 1;
  kv_init(&options, sizeof options);
  options.max_tokens = (uint32_t)atoi(values[4]);
  options.temperature = 4.0f;
  options.seed = 1;
  status = kv_open(values[1], NULL, NULL, &model, &error);
  if (status == KV_OK) status = kv_load(model, values[2], &session_options, NULL, &session, &error);
  while (status == KV_OK && fgets(line, sizeof line, stdin)) {
    kv_answer answer;
    size_t bytes = 0;
    const uint64_t begin = cpu_time();
    kv_init(&answer, sizeof answer);
    status = kv_generate(session, values[3], strlen(values[3]), &options, NULL, count_text, &bytes,
                         &answer, &error);
    if (status != KV_OK) break;
    printf("%llu %llu\n", (unsigned long long)(cpu_time() - begin),
           (unsigned long long)answer.answer_tokens);
    fflush(stdout);
  }
  if (status != KV_OK) fprintf(stderr, "%s\n", error.message);
  kv_session_close(session);
  kv_close(model);
  return status != KV_OK;
}
