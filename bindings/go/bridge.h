/* C parts of the Go binding: callbacks as C functions, and C memory that refers to their Go values.
 */
#ifndef KVASIR_GO_BRIDGE_H
#define KVASIR_GO_BRIDGE_H

#include <kvasir.h>
#include <kvasir_experimental.h>
#include <stdlib.h>

/* kv_text_fn, kv_progress_fn and kv_log_fn. `user` comes from kvasir_go_user. */
int32_t kvasir_go_text(const char* text, size_t size, void* user);
int32_t kvasir_go_thinking(const char* text, size_t size, void* user);
int32_t kvasir_go_progress(int32_t phase, uint64_t done, uint64_t total, void* user);
void kvasir_go_log(int32_t level, const char* message, void* user);

/* Allocates memory that holds a cgo.Handle; the caller releases it with free. NULL: no memory. A
 * handle is an integer. Go's garbage collector would take it for an address in a pointer. */
void* kvasir_go_user(uintptr_t handle);

/* Calls kv_library_session with options->session = session. Go may not store a pointer to its own
 * memory in memory that C reads. */
kv_status kvasir_go_library_session(kv_library* library, kv_model* model, const char* text,
                                    size_t size, const kv_library_session_options* options,
                                    const kv_session_options* session, const kv_control* control,
                                    kv_session** out, kv_library_result* result, kv_error* error);

/* kv_library_compose, or kv_session_compose where library is NULL. */
kv_status kvasir_go_compose(kv_library* library, kv_model* model, char** names, size_t count,
                            uint32_t max_documents, const kv_session_options* session,
                            const kv_control* control, kv_session** out, kv_error* error);
kv_status kvasir_go_set_documents(kv_session* session, char** paths, size_t count,
                                  const kv_control* control, kv_error* error);
/* kv_cache_update and kv_cache_attention with arrays of bytes. For a void *, Go looks for pointers
 * in the whole variable that contains the array, and refuses a variable with pointers. */
kv_status kvasir_go_cache_update(kv_cache* cache, uint32_t layer, uint32_t type, const uint8_t* k,
                                 const uint8_t* v, const uint8_t* q, uint32_t tokens,
                                 kv_error* error);
kv_status kvasir_go_cache_attention(kv_cache* cache, uint32_t layer, uint32_t type,
                                    const uint8_t* q, uint8_t* out, uint32_t tokens,
                                    const kv_cache_attention_options* options,
                                    const kv_control* control, kv_error* error);

/* Identifies the calling thread. */
uintptr_t kvasir_go_thread(void);

#endif
