/* What Go cannot write in Go: C functions to be given as callbacks, and memory of C in which they find the Go value they are for. */
#ifndef KVASIR_GO_BRIDGE_H
#define KVASIR_GO_BRIDGE_H

#include <kvasir.h>
#include <stdlib.h>

/* kv_text_fn, kv_progress_fn and kv_log_fn; user is what kvasir_go_user made. */
int32_t kvasir_go_text(const char* text, size_t size, void* user);
int32_t kvasir_go_progress(int32_t phase, uint64_t done, uint64_t total, void* user);
void kvasir_go_log(int32_t level, const char* message, void* user);

/* Memory that holds a cgo.Handle, to be released with free; NULL when there is none. A handle is a number: in a pointer that Go's
 * collector looks at it would be taken for an address. */
void* kvasir_go_user(uintptr_t handle);

/* kv_library_session with options->session as given: Go may not put a pointer to its own memory into memory that C reads. */
kv_status kvasir_go_library_session(kv_library* library, kv_model* model, const char* text,
                                    size_t size, const kv_library_session_options* options,
                                    const kv_session_options* session, kv_session** out,
                                    kv_library_result* result, kv_error* error);

/* kv_cache_update and kv_cache_attention with arrays of bytes: of a void * Go looks for pointers in all of the variable that the array is a part of, and
 * refuses one with any. */
kv_status kvasir_go_cache_update(kv_cache* cache, uint32_t layer, uint32_t type, const uint8_t* k,
                                 const uint8_t* v, const uint8_t* q, uint32_t tokens,
                                 kv_error* error);
kv_status kvasir_go_cache_attention(kv_cache* cache, uint32_t layer, uint32_t type,
                                    const uint8_t* q, uint8_t* out, uint32_t tokens,
                                    const kv_cache_attention_options* options, kv_error* error);

/* The calling thread, as the callbacks tell it to Go. */
uintptr_t kvasir_go_thread(void);

#endif
