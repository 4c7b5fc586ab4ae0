#include "bridge.h"

#include <pthread.h>

#include "_cgo_export.h"

uintptr_t kvasir_go_thread(void) { return (uintptr_t)pthread_self(); }

void* kvasir_go_user(uintptr_t handle) {
  uintptr_t* user = malloc(sizeof *user);
  if (user) *user = handle;
  return user;
}

int32_t kvasir_go_text(const char* text, size_t size, void* user) {
  return kvasirGoText((char*)text, size, *(uintptr_t*)user, kvasir_go_thread());
}

int32_t kvasir_go_thinking(const char* text, size_t size, void* user) {
  return kvasirGoThinking((char*)text, size, *(uintptr_t*)user, kvasir_go_thread());
}

int32_t kvasir_go_progress(int32_t phase, uint64_t done, uint64_t total, void* user) {
  return kvasirGoProgress(phase, done, total, *(uintptr_t*)user, kvasir_go_thread());
}

void kvasir_go_log(int32_t level, const char* message, void* user) {
  kvasirGoLog(level, (char*)message, *(uintptr_t*)user, kvasir_go_thread());
}

kv_status kvasir_go_library_session(kv_library* library, kv_model* model, const char* text,
                                    size_t size, const kv_library_session_options* options,
                                    const kv_session_options* session, const kv_control* control,
                                    kv_session** out, kv_library_result* result, kv_error* error) {
  kv_library_session_options complete = *options;
  complete.session = session;
  return kv_library_session(library, model, text, size, &complete, control, out, result, error);
}

kv_status kvasir_go_compose(kv_library* library, kv_model* model, char** names, size_t count,
                            uint32_t max_documents, const kv_session_options* session,
                            const kv_control* control, kv_session** out, kv_error* error) {
  const char* const* list = (const char* const*)names;
  kv_compose_options options;
  kv_init(&options, sizeof options);
  options.max_documents = max_documents;
  options.session = session;
  return library ? kv_library_compose(library, model, list, count, &options, control, out, error)
                 : kv_session_compose(model, list, count, &options, control, out, error);
}

kv_status kvasir_go_set_documents(kv_session* session, char** paths, size_t count,
                                  const kv_control* control, kv_error* error) {
  return kv_session_set_documents(session, (const char* const*)paths, count, control, error);
}

kv_status kvasir_go_cache_update(kv_cache* cache, uint32_t layer, uint32_t type, const uint8_t* k,
                                 const uint8_t* v, const uint8_t* q, uint32_t tokens,
                                 kv_error* error) {
  return kv_cache_update(cache, layer, type, k, v, q, tokens, error);
}

kv_status kvasir_go_cache_attention(kv_cache* cache, uint32_t layer, uint32_t type,
                                    const uint8_t* q, uint8_t* out, uint32_t tokens,
                                    const kv_cache_attention_options* options,
                                    const kv_control* control, kv_error* error) {
  return kv_cache_attention(cache, layer, type, q, out, tokens, options, control, error);
}
