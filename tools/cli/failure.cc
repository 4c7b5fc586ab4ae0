#include "failure.h"

#include "handles.h"

namespace tool {
namespace {

const char* usual_advice(kv_status status) {
  switch (status) {
    case KV_NO_SPACE:
      return "make room on that disk or choose another folder";
    case KV_DEVICE:
      return "run the command without --device";
    case KV_NO_MEMORY:
      return "close other programs or choose a smaller model";
    case KV_INTERNAL:
      return "this is a bug in Kvasir: please report it";
    default:
      return "";
  }
}

std::string line_for(const kv_error& error, const std::string& advice) {
  std::string line = error.message[0] != '\0' ? error.message : kv_status_text(error.status);
  const std::string what = advice.empty() ? usual_advice(error.status) : advice;
  return what.empty() ? line : line + "; " + what;
}

}  // namespace

Failure::Failure(const kv_error& error, const std::string& advice)
    : exit_code_(exit_code_for(error.status)), message_(line_for(error, advice)), error_(error) {}

int exit_code_for(kv_status status) {
  switch (status) {
    case KV_OK:
      return exit_ok;
    case KV_BAD_ARGUMENT:
      return exit_usage;
    case KV_IO:
    case KV_NOT_FOUND:
    case KV_PERMISSION:
    case KV_NOT_A_CACHE:
    case KV_CORRUPT:
    case KV_UNSUPPORTED:
      return exit_file;
    case KV_VERSION:
    case KV_MODEL_MISMATCH:
      return exit_stale;
    case KV_NO_MEMORY:
    case KV_NO_SPACE:
    case KV_LIMIT:
    case KV_DEVICE:
      return exit_resources;
    case KV_CANCELLED:
      return exit_cancelled;
    default:
      return exit_failure;
  }
}

void check(kv_status status, const kv_error& error, const std::string& advice) {
  if (status != KV_OK) throw Failure(error, advice);
}

void check_cache(kv_status status, const kv_error& error, const std::string& path) {
  if (status == KV_OK) return;
  Failure failure(error, "");
  kv_packed_info info = initialised<kv_packed_info>();
  if (status == KV_NOT_A_CACHE && kv_packed_inspect(path.c_str(), &info, nullptr) == KV_OK)
    failure.reword(path + " is a packed file: `kvasir unpack` restores the cache file");
  throw failure;
}

}  // namespace tool
