// Contents of the public handles, and the one place where exceptions and Status values become
// codes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>

#include "api/call.h"
#include "base/cancel.h"
#include "base/quoted.h"
#include "base/status.h"
#include "kvasir.h"
#include "model/model.h"
#include "session/external_store.h"
#include "session/session.h"

struct kv_cancel {
  kvasir::Cancel flag;
};

struct kv_model {
  std::atomic<uint32_t> references{1};
  std::shared_ptr<const kvasir::Model> model;
};

struct kv_cache {
  std::unique_ptr<kvasir::ExternalStore> cache;
  std::atomic<bool> busy{false};
};

struct kv_session {
  std::unique_ptr<kvasir::Session> session;
  std::atomic<bool> busy{false};
};

namespace kvasir::api {

// Runs f, which returns a Status, as one call of the host. No exception escapes: the library throws
// std::exception only. The unwinding of a thread that ends in a callback is none and passes.
template <class F>
kv_status guarded(kv_error* error, F&& f) {
  Call call;
  try {
    return call.finish(f(), error);
  } catch (const std::bad_alloc&) {
    return call.finish(Status::error(Code::no_memory, "out of memory; nothing was changed"), error);
  } catch (const std::exception& e) {
    return call.finish(Status::error(Code::internal, "unexpected: %s", e.what()), error);
  }
}

// Refuses a model without weights.
inline Status check_model(const kv_model* model) {
  if (!model) return Status::error(Code::bad_argument, "model is NULL");
  if (model->model->use() == ModelUse::run) return {};
  return Status::error(Code::bad_state,
                       "the model was opened with KV_VOCABULARY_ONLY: it has no weights");
}

// Destroys a handle, which may wait for threads and close files.
template <class Handle>
void close(Handle* handle) {
  const Call call;
  delete handle;
}

// Runs f unless another call on the handle is running. `name` is for messages.
template <class Handle, class F>
kv_status one_at_a_time(const Handle* handle, const char* name, kv_error* error, F&& f) {
  return guarded(error, [&]() -> Status {
    if (!handle) return Status::error(Code::bad_argument, "%s is NULL", name);
    auto& busy = const_cast<Handle*>(handle)->busy;
    if (busy.exchange(true, std::memory_order_acquire))
      return Status::error(Code::busy, "another call on this %s is running", name);
    struct Release {
      std::atomic<bool>& busy;
      ~Release() { busy.store(false, std::memory_order_release); }
    } release{busy};
    return f();
  });
}

template <class F>
kv_status exclusive(const kv_session* session, kv_error* error, F&& f) {
  return one_at_a_time(session, "session", error, [&] { return f(*session->session); });
}

template <class F>
kv_status exclusive(const kv_cache* cache, kv_error* error, F&& f) {
  return one_at_a_time(cache, "cache", error, [&] { return f(*cache->cache); });
}

// Sizes that structs of version 0.1 had, where the layout is another now; 0: it is the same. No
// struct of this version may grow to them.
template <class Struct>
constexpr std::size_t size_in_0_1 = 0;
template <>
constexpr std::size_t size_in_0_1<kv_model_options> = 64;
template <>
constexpr std::size_t size_in_0_1<kv_session_options> = 160;
template <>
constexpr std::size_t size_in_0_1<kv_generate_options> = 88;
template <>
constexpr std::size_t size_in_0_1<kv_library_session_options> = 48;
template <>
constexpr std::size_t size_in_0_1<kv_cache_options> = 88;
template <>
constexpr std::size_t size_in_0_1<kv_cache_attention_options> = 24;
template <>
constexpr std::size_t size_in_0_1<kv_strategy_info> = 72;

// A struct of version 0.1 has other fields at the same places: its size gives it away.
template <class Struct>
Status check_not_0_1(std::size_t size) {
  static_assert(size_in_0_1<Struct> != sizeof(Struct));
  if (size_in_0_1<Struct> == 0 || size != size_in_0_1<Struct>) return {};
  return Status::error(Code::bad_argument,
                       "struct_size is %zu: the struct is of version 0.1, which this library does "
                       "not accept; build the program with the header of version 0.2",
                       size);
}

// The caller's options over the defaults, which are all 0. Shorter structs of older headers and
// longer ones with zeros are accepted.
template <class Options>
Status read_options(const Options* in, Options* out) {
  *out = {};
  out->struct_size = sizeof(Options);
  if (!in) return {};
  const std::size_t size = in->struct_size;
  if (size < sizeof(uint32_t))
    return Status::error(Code::bad_argument, "an option struct's struct_size is %zu: call kv_init",
                         size);
  if (size > 65536)
    return Status::error(Code::bad_argument, "an option struct's struct_size is %zu: too large",
                         size);
  RETURN_IF_ERROR(check_not_0_1<Options>(size));
  // no header had one, and a pointer that is cut leads anywhere
  if (size < sizeof(Options) && size % alignof(Options))
    return Status::error(Code::bad_argument,
                         "an option struct's struct_size is %zu: it ends within a field", size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(in);
  for (std::size_t i = sizeof(Options); i < size; ++i)
    if (bytes[i])
      return Status::error(
          Code::bad_argument,
          "an option struct of a newer header sets what this library does not know");
  std::memcpy(out, in, std::min(size, sizeof(Options)));
  out->struct_size = sizeof(Options);
  return {};
}

// Checks that a caller's result struct can be filled.
template <class Result>
Status check_result(const Result* out, const char* name) {
  if (!out) return Status::error(Code::bad_argument, "%s is NULL", name);
  const std::size_t size = out->struct_size;
  if (size < 2 * sizeof(uint32_t))
    return Status::error(Code::bad_argument, "%s->struct_size is %zu: call kv_init", name, size);
  return check_not_0_1<Result>(size);
}

// Fills a caller's result struct as far as its struct_size goes.
template <class Result>
Status write_result(const Result& result, Result* out, const char* name) {
  if (Status s = check_result(out, name); !s.ok()) return s;
  std::memcpy(reinterpret_cast<char*>(out) + sizeof(uint32_t),
              reinterpret_cast<const char*>(&result) + sizeof(uint32_t),
              std::min<std::size_t>(out->struct_size, sizeof(Result)) - sizeof(uint32_t));
  return {};
}

Status session_options(const kv_session_options* in, SessionOptions* out);

// Writes as much of a result as fits, and its whole size.
template <class T>
Status write_array(const T* from, std::size_t n, T* to, std::size_t capacity, std::size_t* count) {
  if (!count) return Status::error(Code::bad_argument, "the place for the size is NULL");
  if (!to && capacity)
    return Status::error(Code::bad_argument, "the output is NULL and its capacity is %zu",
                         capacity);
  *count = n;
  std::copy_n(from, std::min(n, capacity), to);
  if (capacity < n)
    return Status::error(Code::limit, "the capacity is %zu where %zu are needed", capacity, n);
  return {};
}

// The caller's kv_control of one call.
struct Control {
  const Cancel* cancel = nullptr;
  uint32_t flags = 0;
  kv_progress_fn progress = nullptr;
  void* user = nullptr;

  bool has(uint32_t flag) const { return flags & flag; }
  Progress::Report report(kv_phase phase) const;
};
// Code::bad_argument for a flag that is not among `flags`.
Status read_control(const kv_control* in, uint32_t flags, Control* out);
std::string hexadecimal(std::span<const uint8_t> bytes);
LogFn log_function(kv_log_fn fn, void* user);
Status check_text(const char* text, std::size_t size, const char* name);
Status check_flags(uint32_t flags, uint32_t known);

// Copies a name into a field of a struct, unchanged: callers pass it back.
template <std::size_t N>
void copy_text(char (&to)[N], std::string_view from) {
  std::size_t n = std::min(from.size(), N - 1);
  // whole characters
  while (n > 0 && n < from.size() && (static_cast<unsigned char>(from[n]) & 0xC0) == 0x80) --n;
  std::memcpy(to, from.data(), n);
  std::memset(to + n, 0, N - n);
}

// Copies text of a file for people, printable whatever the file has.
template <std::size_t N>
void copy_shown(char (&to)[N], std::string_view from) {
  std::memset(to, 0, N);
  quote_head(from, "", to, N);
}

}  // namespace kvasir::api
