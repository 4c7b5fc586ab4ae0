// What stands behind the public handles, and the one place where exceptions and Status values
// become codes.
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

// Runs f, which returns a Status, as a call of the host's. No exception escapes: nothing in the
// library throws what is no std::exception, and what unwinds a thread that ends in a callback is
// none and passes.
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

// A handle's end, which may wait for threads and close files.
template <class Handle>
void close(Handle* handle) {
  const Call call;
  delete handle;
}

// One call at a time on a handle, of which `name` is what the caller knows it by.
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

// Into a caller's option struct of so many bytes, which another header may have made shorter or
// longer.
template <class Options>
void write_defaults(const Options& defaults, Options* out, std::size_t size) {
  if (!out || size < sizeof(uint32_t)) return;
  const std::size_t known = std::min(size, sizeof(Options));
  std::memcpy(out, &defaults, known);
  if (size > known) std::memset(reinterpret_cast<char*>(out) + known, 0, size - known);
  const auto struct_size = static_cast<uint32_t>(size);
  std::memcpy(out, &struct_size, sizeof struct_size);
}

// The caller's options over the defaults: shorter structs of older headers and longer ones with
// zeros are accepted.
template <class Options>
Status read_options(const Options* in, void (*init)(Options*, std::size_t), Options* out) {
  init(out, sizeof *out);
  if (!in) return {};
  const std::size_t size = in->struct_size;
  if (size < sizeof(uint32_t))
    return Status::error(Code::bad_argument,
                         "an option struct's struct_size is %zu: call its init function", size);
  if (size > 65536)
    return Status::error(Code::bad_argument, "an option struct's struct_size is %zu: too large",
                         size);
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

// Whether a caller's result struct can be filled.
template <class Result>
Status check_result(const Result* out, const char* name) {
  if (!out) return Status::error(Code::bad_argument, "%s is NULL", name);
  const std::size_t size = out->struct_size;
  if (size < 2 * sizeof(uint32_t))
    return Status::error(Code::bad_argument, "%s->struct_size is %zu: set it to the struct's size",
                         name, size);
  return {};
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

// Writes as much of a result as fits and always its whole size.
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

inline const Cancel* flag_of(const kv_cancel* cancel) { return cancel ? &cancel->flag : nullptr; }
std::string hexadecimal(std::span<const uint8_t> bytes);
LogFn log_function(kv_log_fn fn, void* user);
Status check_text(const char* text, std::size_t size, const char* name);
Status check_flags(uint32_t flags, uint32_t known);
Progress::Report progress_report(kv_progress_fn fn, void* user, kv_phase phase);

// Into a field of a struct. Names stay as they are: they are used to ask for what they name.
template <std::size_t N>
void copy_text(char (&to)[N], std::string_view from) {
  std::size_t n = std::min(from.size(), N - 1);
  // whole characters
  while (n > 0 && n < from.size() && (static_cast<unsigned char>(from[n]) & 0xC0) == 0x80) --n;
  std::memcpy(to, from.data(), n);
  std::memset(to + n, 0, N - n);
}

// The same of text from a file for people to read: printable, whatever the file has.
template <std::size_t N>
void copy_shown(char (&to)[N], std::string_view from) {
  std::memset(to, 0, N);
  quote_head(from, "", to, N);
}

}  // namespace kvasir::api
