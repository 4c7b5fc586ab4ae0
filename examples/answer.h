/* An answer in memory, as the examples that compare or collect answers need it. */
#ifndef ANSWER_H
#define ANSWER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { ANSWER_BYTES = 4096 };

typedef struct answer {
  char text[ANSWER_BYTES]; /* terminated */
  size_t size;
} answer;

/* For kv_generate. user: an answer, empty at first. */
static int32_t keep_text(const char* text, size_t size, void* user) {
  answer* to = user;
  if (size >= sizeof to->text - to->size) return 1; /* no room: stops the answer */
  memcpy(to->text + to->size, text, size);
  to->text[to->size += size] = '\0';
  return 0;
}

#endif
