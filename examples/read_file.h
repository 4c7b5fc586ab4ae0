/* A text file in memory, for the examples. Nothing of Kvasir. */
#ifndef READ_FILE_H
#define READ_FILE_H

#include <stdio.h>
#include <stdlib.h>

/* Returns the whole file, *size bytes, which the caller frees. NULL, with a line on standard error,
 * if it cannot be read. */
static char* read_file(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  char* text = NULL;
  size_t capacity = 0, used = 0;
  while (file && used == capacity) {
    char* larger = realloc(text, capacity = capacity ? 2 * capacity : 65536);
    if (!larger) break;
    text = larger;
    used += fread(text + used, 1, capacity - used, file);
  }
  if (!file || ferror(file) || used == capacity) {
    fprintf(stderr, "cannot read %s\n", path);
    free(text);
    text = NULL;
  }
  if (file) fclose(file);
  *size = used;
  return text;
}

#endif
