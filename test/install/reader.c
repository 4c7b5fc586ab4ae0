/* A C program that finds the library by pkg-config or CMake: opens a model and counts tokens. */
#include <kvasir.h>
#include <stdio.h>

int main(int count, char** values) {
  static const char text[] = "It is a capital mistake to theorise before one has data.";
  kv_model* model = NULL;
  kv_error error;
  size_t tokens = 0;
  kv_status status = kv_open(count == 2 ? values[1] : "", NULL, NULL, &model, &error);
  if (status == KV_OK)
    kv_tokenize(model, text, sizeof text - 1, 0, NULL, NULL, 0, &tokens,
                NULL); /* KV_LIMIT: the capacity is 0 */
  kv_close(model);
  if (status != KV_OK) fprintf(stderr, "%s\n", error.message);
  printf("%u: %u tokens\n", (unsigned)kv_version(), (unsigned)tokens);
  return status == KV_OK && tokens > 5 && tokens < sizeof text && kv_version() == KV_VERSION_NUMBER
             ? 0
             : 1;
}
