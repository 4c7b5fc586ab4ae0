// Errors travel through the library as values of this type.
//
// A good Status is one null pointer. A failed one has a code, the errno of the operating system, a
// file offset and a one-line message that names its subject and what is unchanged. Building one
// never throws: if the message cannot be allocated, the code survives. std::bad_alloc is the only
// exception that crosses layers; src/api turns it into KV_NO_MEMORY.
#pragma once

#include <cstdint>
#include <memory>

namespace kvasir {

// Same numbers as kv_status in include/kvasir.h; src/api asserts it.
enum class Code : int32_t {
  ok = 0,
  cancelled,
  bad_argument,
  busy,
  bad_state,
  no_memory,
  limit,
  io,
  no_space,
  not_found,
  permission,
  not_a_cache,
  version,
  corrupt,
  model_mismatch,
  unsupported,
  context_full,
  internal,
  device,
};

class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(Status&&) noexcept = default;
  Status& operator=(Status&&) noexcept = default;

  // printf-style. The message is one line of printable UTF-8 for any arguments (base/quoted.h). A
  // message of more than 383 bytes loses its middle.
  [[gnu::format(printf, 2, 3)]] static Status error(Code code, const char* format, ...) noexcept;

  // Adds the errno or the file offset (bytes) that the error belongs to.
  Status with_errno(int value) && noexcept;
  Status with_offset(uint64_t value) && noexcept;

  // A copy, for callers that report the failure of another call.
  Status copy() const noexcept;

  bool ok() const noexcept { return code_ == Code::ok; }
  Code code() const noexcept { return code_; }
  int sys_errno() const noexcept;
  uint64_t offset() const noexcept;      // UINT64_MAX when there is none
  const char* message() const noexcept;  // "" when good; never null

 private:
  struct Detail {
    int sys_errno = 0;
    uint64_t offset = UINT64_MAX;
    char message[384] = {};
  };
  Code code_ = Code::ok;
  std::unique_ptr<Detail> detail_;
};

}  // namespace kvasir

// Returns from the caller's function where a Status is an error.
#define KVASIR_CONCAT_(a, b) a##b
#define KVASIR_CONCAT(a, b) KVASIR_CONCAT_(a, b)
#define RETURN_IF_ERROR(expression)                                                      \
  do {                                                                                   \
    ::kvasir::Status KVASIR_CONCAT(status_, __LINE__) = (expression);                    \
    if (!KVASIR_CONCAT(status_, __LINE__).ok()) return KVASIR_CONCAT(status_, __LINE__); \
  } while (false)
