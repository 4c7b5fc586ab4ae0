// Status, version, structs, cancel tokens, and helpers of the other entry points.
#include <cstdio>

#include "api/handles.h"
#include "backend/device.h"
#include "cachefile/format.h"
#include "cachefile/pack.h"

namespace kvasir::api {

static_assert(static_cast<int>(Code::device) == KV_DEVICE &&
              static_cast<int>(Code::not_a_cache) == KV_NOT_A_CACHE &&
              static_cast<int>(Code::context_full) == KV_CONTEXT_FULL &&
              static_cast<int>(Code::io) == KV_IO);

Status check_text(const char* text, std::size_t size, const char* name) {
  if (!text && size)
    return Status::error(Code::bad_argument, "%s is NULL and its size is %zu", name, size);
  return {};
}

Status check_flags(uint32_t flags, uint32_t known) {
  if (flags & ~known)
    return Status::error(Code::bad_argument, "flags has unknown bits: 0x%x", flags & ~known);
  return {};
}

Progress::Report Control::report(kv_phase phase) const {
  if (!progress) return {};
  return [fn = progress, user = user, phase](uint64_t done, uint64_t total) {
    return Call::run_callback("the progress callback",
                              [&] { return fn(phase, done, total, user); });
  };
}

Status read_control(const kv_control* in, uint32_t flags, Control* out) {
  kv_control c;
  RETURN_IF_ERROR(read_options(in, &c));
  if (c.flags & ~flags)
    return Status::error(Code::bad_argument, "control->flags has unknown bits: 0x%x",
                         c.flags & ~flags);
  *out = {c.cancel ? &c.cancel->flag : nullptr, c.flags, c.progress, c.user};
  return {};
}

std::string hexadecimal(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes)
    text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
  return text;
}

}  // namespace kvasir::api

using namespace kvasir;

extern "C" {

void kv_init(void* s, size_t size) {
  if (!s || size < sizeof(uint32_t)) return;
  const auto struct_size = static_cast<uint32_t>(size);
  std::memset(s, 0, size);
  std::memcpy(s, &struct_size, sizeof struct_size);
}

const char* kv_status_text(kv_status status) {
  static constexpr const char* texts[] = {"ok",
                                          "cancelled",
                                          "bad argument",
                                          "busy",
                                          "bad state",
                                          "out of memory",
                                          "limit reached",
                                          "input or output error",
                                          "no space left",
                                          "not found",
                                          "permission denied",
                                          "not a cache file",
                                          "other version",
                                          "corrupt",
                                          "cache of another model",
                                          "unsupported",
                                          "context full",
                                          "internal error",
                                          "the GPU failed"};
  return status >= 0 && status <= KV_DEVICE ? texts[status] : "unknown status";
}

int32_t kv_status_is_stale(kv_status status) {
  return status == KV_VERSION || status == KV_MODEL_MISMATCH;
}

uint32_t kv_version(void) { return KV_VERSION_NUMBER; }

const char* kv_build_info(void) {
  static const auto info = [] {
    std::array<char, 512> text{};
    std::snprintf(text.data(), text.size(),
                  "{\"version\":\"%d.%d.%d\",\"cache_format\":%u,\"compiler\":\"%s\",\"kernels\":"
                  "\"%s\",\"backends\":[\"cpu\"%s],"
                  "\"packed_format\":%u,\"zstd\":\"%s\"}",
                  KV_VERSION_NUMBER / 10000, KV_VERSION_NUMBER / 100 % 100, KV_VERSION_NUMBER % 100,
                  format::version,
#if defined(__clang__)
                  "clang " __clang_version__,
#else
                  "gcc " __VERSION__,
#endif
                  cpu_kernels().name, cuda_kernels() ? ",\"cuda\"" : "", packed::version,
                  zstd_version());
    return text;
  }();
  return info.data();
}

kv_status kv_cancel_create(kv_cancel** out, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    *out = new kv_cancel;
    return {};
  });
}

void kv_cancel_fire(kv_cancel* cancel) {
  if (cancel) cancel->flag.fire();
}

void kv_cancel_reset(kv_cancel* cancel) {
  if (cancel) cancel->flag.reset();
}

void kv_cancel_release(kv_cancel* cancel) { delete cancel; }

}  // extern "C"
