// Common code of the Windows files: paths in UTF-16, and system errors as errno.
#pragma once

#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "os/calls.h"

namespace kvasir::os {

// A path in UTF-16, absolute and of any length. Ordinary paths need no heap, so that a temporary
// file can be removed when memory is exhausted.
class WidePath {
 public:
  explicit WidePath(const std::string& path);
  WidePath(const WidePath&) = delete;
  WidePath& operator=(const WidePath&) = delete;
  bool good() const { return size_ > 0; }  // otherwise errno is set
  const wchar_t* c_str() const { return text_; }
  std::size_t size() const { return size_; }
  std::wstring folder() const;

 private:
  struct Units {
    wchar_t inside[512];
    std::unique_ptr<wchar_t[]> outside;
    wchar_t* reserve(std::size_t size) noexcept;  // null on failure
  };
  Units full_;
  const wchar_t* text_ = L"";
  std::size_t size_ = 0;
};

std::string narrow(std::wstring_view text);

// Whether a path is a symbolic link.
bool is_link(const std::string& path);

// Sets errno from a system error; returns -1.
int failing(DWORD error);
inline int failing() { return failing(GetLastError()); }

bool random_bits(uint64_t* out);

// Other processes may read, write, rename and remove our open files; locks protect them.
constexpr DWORD share_all = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;

// Closed at the end of its block.
class Handle {
 public:
  explicit Handle(HANDLE handle) : handle_(handle) {}
  ~Handle() {
    if (good()) CloseHandle(handle_);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  bool good() const { return handle_ != nullptr && handle_ != INVALID_HANDLE_VALUE; }
  operator HANDLE() const { return handle_; }

 private:
  HANDLE handle_;
};

}  // namespace kvasir::os
