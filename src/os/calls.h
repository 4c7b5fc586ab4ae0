// Common code of this folder: system calls repeated after signals, and their failures as a Status.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include "os/os.h"

namespace kvasir::os {

inline int consult(const char* operation, const std::string& path) {
  const Fault hook = fault.load(std::memory_order_acquire);
  return hook ? hook(operation, path.c_str()) : 0;
}

// Repeats a system call while signals interrupt it. Returns its result, or -1 with errno.
template <class Call>
auto retried(const char* operation, const std::string& path, Call call) -> decltype(call()) {
  for (;;) {
    const int failure = consult(operation, path);
    decltype(call()) result = -1;
    if (failure > 0) {
      errno = failure;
    } else {
      result = call();
    }
    if (result >= 0 || errno != EINTR) return result;
  }
}

inline Code code_of(int error) {
  switch (error) {
    case ENOSPC:
#ifdef EDQUOT  // missing on Windows
    case EDQUOT:
#endif
    case EFBIG:
      return Code::no_space;
    case ENOENT:
    case ENOTDIR:
      return Code::not_found;
    case EACCES:
    case EPERM:
    case EROFS:
      return Code::permission;
    case ENOMEM:
      return Code::no_memory;
    case EMFILE:
    case ENFILE:
      return Code::limit;
    case EISDIR:
    case ENAMETOOLONG:
    case ELOOP:
#ifdef _WIN32  // a name with an invalid character
    case EILSEQ:
    case EINVAL:
#endif
      return Code::bad_argument;
    default:
      return Code::io;
  }
}

// The text of an error, possibly in the buffer.
#ifdef _WIN32
const char* error_text(int error, char* buffer, std::size_t size);
#elif defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 32)  // strerror_r would translate
inline const char* error_text(int error, char*, std::size_t) {
  const char* text = strerrordesc_np(error);
  return text ? text : "an error that the system has no words for";
}
#else
// strerror_r has two versions with different return types.
[[maybe_unused]] inline const char* chosen_text(const char* text, const char*) { return text; }
[[maybe_unused]] inline const char* chosen_text(int, const char* buffer) { return buffer; }
inline const char* error_text(int error, char* buffer, std::size_t size) {
  return chosen_text(strerror_r(error, buffer, size), buffer);
}
#endif

// The end of a path that is too long for a message, so that the reason after it survives.
inline const char* shown(const std::string& path) {
  constexpr std::size_t max_shown = 240;
  if (path.size() <= max_shown) return path.c_str();
  std::size_t begin = path.size() - max_shown;
  while (begin < path.size() && (static_cast<unsigned char>(path[begin]) & 0xC0) == 0x80) ++begin;
  return path.c_str() + begin;
}

// "cannot <action> <path>: <reason>", from errno.
inline Status failed(const char* action, const std::string& path, int error) {
  char buffer[128] = {};
  const char* reason = error_text(error, buffer, sizeof buffer);
  return Status::error(code_of(error), "cannot %s %s: %s", action, shown(path), reason)
      .with_errno(error);
}

// Offset of the last name in a path.
inline std::size_t name_begin(const std::string& path) {
#ifdef _WIN32
  const std::size_t separator = path.find_last_of("/\\:");
#else
  const std::size_t separator = path.rfind('/');
#endif
  return separator == std::string::npos ? 0 : separator + 1;
}

inline std::string folder_of(const std::string& path) {
  const std::size_t name = name_begin(path);
  return name == 0 ? "." : path.substr(0, name == 1 ? 1 : name - 1);
}

// "<target>.kvasir-<16 hexadecimal digits>.tmp", the name cut so that it still fits a folder entry.
std::string temporary_name(const std::string& target, uint64_t random);

// The error for anything but a plain file: reading a folder, a pipe or a device would fail late or
// block.
inline Status not_a_file(const std::string& path, bool folder) {
  const char* kind = folder ? "a folder" : "a pipe, a socket or a device";
  return Status::error(Code::bad_argument, "%s is %s, not a file", shown(path), kind)
      .with_errno(folder ? EISDIR : EINVAL);
}

}  // namespace kvasir::os
