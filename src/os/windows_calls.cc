#include <cerrno>
#include <iterator>
#include <new>

#include "os/windows_calls.h"

namespace kvasir::os {

namespace {

// Errors without an errno: the system's number above this base. Messages then have the number.
constexpr int unnamed_errors = 100'000;

constexpr std::size_t max_name = 255;  // UTF-16 units of one name
// Of a path without the long-path prefix; for folders the limit is 12 less than 260.
constexpr std::size_t max_ordinary = 240;
// Bytes: the system takes 32,767 UTF-16 units, of at most three bytes each.
constexpr std::size_t max_path = 32'700 * 3;

// ERROR_DISK_QUOTA_EXCEEDED, missing in MinGW's headers.
constexpr DWORD disk_quota_exceeded = 1295;

struct Meaning {
  DWORD error;
  int as_errno;
};

constexpr Meaning meanings[] = {
    {ERROR_FILE_NOT_FOUND, ENOENT},
    {ERROR_PATH_NOT_FOUND, ENOENT},
    {ERROR_INVALID_DRIVE, ENOENT},
    {ERROR_BAD_NETPATH, ENOENT},
    {ERROR_BAD_NET_NAME, ENOENT},
    {ERROR_DIRECTORY, ENOTDIR},
    {ERROR_INVALID_NAME, EINVAL},
    {ERROR_BAD_PATHNAME, EINVAL},
    {ERROR_ACCESS_DENIED, EACCES},
    {ERROR_DELETE_PENDING, EBUSY},
    {ERROR_SHARING_VIOLATION, EBUSY},
    {ERROR_LOCK_VIOLATION, EBUSY},
    {ERROR_USER_MAPPED_FILE, EBUSY},
    {ERROR_WRITE_PROTECT, EROFS},
    {ERROR_FILE_EXISTS, EEXIST},
    {ERROR_ALREADY_EXISTS, EEXIST},
    {ERROR_DISK_FULL, ENOSPC},
    {ERROR_HANDLE_DISK_FULL, ENOSPC},
    {disk_quota_exceeded, ENOSPC},
    {ERROR_FILE_TOO_LARGE, EFBIG},
    {ERROR_NOT_ENOUGH_MEMORY, ENOMEM},
    {ERROR_OUTOFMEMORY, ENOMEM},
    {ERROR_COMMITMENT_LIMIT, ENOMEM},
    {ERROR_NO_SYSTEM_RESOURCES, ENOMEM},
    {ERROR_NOT_ENOUGH_QUOTA, ENOMEM},
    {ERROR_TOO_MANY_OPEN_FILES, EMFILE},
    {ERROR_FILENAME_EXCED_RANGE, ENAMETOOLONG},
    {ERROR_CRC, EIO},
    {ERROR_IO_DEVICE, EIO},
    {ERROR_NOT_READY, EIO},
    {ERROR_NOT_SUPPORTED, EOPNOTSUPP},
    {ERROR_INVALID_FUNCTION, EOPNOTSUPP},
    {ERROR_INVALID_PARAMETER, EINVAL},
    {ERROR_INVALID_HANDLE, EBADF},
    {ERROR_CALL_NOT_IMPLEMENTED, ENOSYS},
};

}  // namespace

int failing(DWORD error) {
  errno = unnamed_errors + static_cast<int>(error);
  for (const Meaning& meaning : meanings)
    if (meaning.error == error) errno = meaning.as_errno;
  return -1;
}

const char* error_text(int error, char* buffer, std::size_t size) {
  if (error >= unnamed_errors) {
    std::snprintf(buffer, size, "Windows error %d", error - unnamed_errors);
    return buffer;
  }
  switch (error) {  // where the text of the C library is missing or misleading
    case EBUSY:
      return "In use, here or by another program";
    case EOPNOTSUPP:
      return "Operation not supported";
    case EOVERFLOW:
      return "Value too large";
    default:
      break;
  }
  return strerror_s(buffer, size, error) == 0 ? buffer : "Unknown error";
}

wchar_t* WidePath::Units::reserve(std::size_t size) noexcept {
  if (size <= std::size(inside)) return inside;
  outside.reset(new (std::nothrow) wchar_t[size]);
  return outside.get();
}

WidePath::WidePath(const std::string& path) {
  if (path.empty() || path.size() > max_path) {
    errno = path.empty() ? ENOENT : ENAMETOOLONG;
    return;
  }
  Units given;
  // UTF-16 never has more units than UTF-8 has bytes
  wchar_t* text = given.reserve(path.size() + 1);
  if (!text) {
    errno = ENOMEM;
    return;
  }
  const int bytes = static_cast<int>(path.size());
  const int units =
      MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path.data(), bytes, text, bytes);
  if (units <= 0) {
    errno = EILSEQ;
    return;
  }
  text[units] = L'\0';
  std::size_t name = 0;
  for (wchar_t* unit = text; unit < text + units; ++unit) {
    if (*unit == L'/') *unit = L'\\';
    name = *unit == L'\\' ? 0 : name + 1;
    if (name > max_name) {
      errno = ENAMETOOLONG;
      return;
    }
  }
  // A long path gets a prefix, after which the system does not interpret it: \\?\C:\...,
  // \\?\UNC\server\...
  constexpr std::size_t room = 8;
  const DWORD needed = GetFullPathNameW(text, 0, nullptr, nullptr);
  wchar_t* full = needed == 0 ? nullptr : full_.reserve(room + needed);
  const DWORD size = full ? GetFullPathNameW(text, needed, full + room, nullptr) : 0;
  if (size == 0 || size >= needed) {
    if (needed == 0 || full) (void)failing();
    else errno = ENOMEM;
    return;
  }
  full += room;
  size_ = size;
  const std::wstring_view absolute(full, size);
  const bool prefixed = absolute.starts_with(L"\\\\?\\") || absolute.starts_with(L"\\\\.\\");
  if (size > max_ordinary && !prefixed) {
    const bool server = absolute.starts_with(L"\\\\");
    const std::wstring_view prefix = server ? L"\\\\?\\UNC" : L"\\\\?\\";
    if (server) ++full, --size_;
    full -= prefix.size();
    prefix.copy(full, prefix.size());
    size_ += prefix.size();
  }
  text_ = full;
}

std::wstring WidePath::folder() const {
  const std::wstring_view whole(text_, size_);
  return std::wstring(whole.substr(0, whole.rfind(L'\\') + 1));
}

std::string narrow(std::wstring_view text) {
  if (text.empty()) return {};
  const int units = static_cast<int>(text.size());
  const int bytes =
      WideCharToMultiByte(CP_UTF8, 0, text.data(), units, nullptr, 0, nullptr, nullptr);
  std::string out(static_cast<std::size_t>(bytes), '\0');
  WideCharToMultiByte(CP_UTF8, 0, text.data(), units, out.data(), bytes, nullptr, nullptr);
  return out;
}

}  // namespace kvasir::os
