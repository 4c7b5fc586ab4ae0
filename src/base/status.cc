#include "base/status.h"

#include <cstdarg>
#include <cstdio>
#include <new>

#include "base/quoted.h"

namespace kvasir {

// The longest path in a message before it is shortened, so that the reason after it survives.
static constexpr std::size_t longest_path = 4096;

Status Status::error(Code code, const char* format, ...) noexcept {
  Status s;
  s.code_ = code;
  s.detail_.reset(new (std::nothrow) Detail);
  if (s.detail_) {
    char text[longest_path + sizeof s.detail_->message];
    va_list args;
    va_start(args, format);
    if (std::vsnprintf(text, sizeof text, format, args) < 0) text[0] = 0;
    va_end(args);
    quote(text, s.detail_->message, sizeof s.detail_->message);
  }
  return s;
}

Status Status::with_errno(int value) && noexcept {
  if (detail_) detail_->sys_errno = value;
  return std::move(*this);
}

Status Status::with_offset(uint64_t value) && noexcept {
  if (detail_) detail_->offset = value;
  return std::move(*this);
}

Status Status::copy() const noexcept {
  Status s;
  s.code_ = code_;
  if (detail_) s.detail_.reset(new (std::nothrow) Detail(*detail_));
  return s;
}

int Status::sys_errno() const noexcept { return detail_ ? detail_->sys_errno : 0; }

uint64_t Status::offset() const noexcept { return detail_ ? detail_->offset : UINT64_MAX; }

const char* Status::message() const noexcept {
  if (ok()) return "";
  return detail_ ? detail_->message : "out of memory while describing an error";
}

}  // namespace kvasir
