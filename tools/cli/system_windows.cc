#include "system.h"

#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <shellapi.h>
#include <windows.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

namespace tool::system {
namespace {

HANDLE handle(Stream stream) {
  return GetStdHandle(stream == Stream::input    ? STD_INPUT_HANDLE
                      : stream == Stream::output ? STD_OUTPUT_HANDLE
                                                 : STD_ERROR_HANDLE);
}

bool fail(DWORD error) {
  switch (error) {
    case ERROR_FILE_NOT_FOUND:
    case ERROR_PATH_NOT_FOUND:
      errno = ENOENT;
      break;
    case ERROR_ACCESS_DENIED:
    case ERROR_SHARING_VIOLATION:
      errno = EACCES;
      break;
    case ERROR_DISK_FULL:
    case ERROR_HANDLE_DISK_FULL:
      errno = ENOSPC;
      break;
    case ERROR_BROKEN_PIPE:
    case ERROR_NO_DATA:
    case ERROR_PIPE_NOT_CONNECTED:
      errno = EPIPE;
      break;
    case ERROR_OPERATION_ABORTED:
      errno = EINTR;
      break;
    default:
      errno = EIO;
      break;
  }
  return false;
}

std::wstring wide(std::string_view text) {
  std::wstring out(text.size(), L'\0');  // of UTF-16 there are never more units
  out.resize(static_cast<std::size_t>(
      std::max(0, MultiByteToWideChar(CP_UTF8, 0, text.data(), static_cast<int>(text.size()),
                                      out.data(), static_cast<int>(out.size())))));
  return out;
}

std::string narrow(std::wstring_view text) {
  std::string out(text.size() * 3, '\0');
  out.resize(static_cast<std::size_t>(std::max(
      0, WideCharToMultiByte(CP_UTF8, 0, text.data(), static_cast<int>(text.size()), out.data(),
                             static_cast<int>(out.size()), nullptr, nullptr))));
  return out;
}

// The console shows UTF-16 whatever code page it was set to.
bool write_console(HANDLE console, std::string_view text) {
  for (std::wstring left = wide(text); !left.empty();) {
    DWORD written = 0;
    if (!WriteConsoleW(console, left.data(),
                       static_cast<DWORD>(std::min<std::size_t>(left.size(), 8192)), &written,
                       nullptr) ||
        written == 0)
      return fail(GetLastError());
    left.erase(0, written);
  }
  return true;
}

// A line of the console. Ctrl-Z at its beginning is the end of the input.
ptrdiff_t read_console(HANDLE console, char* data, std::size_t size) {
  static std::string pending;
  if (pending.empty()) {
    wchar_t line[1024];
    DWORD units = 0;
    SetLastError(0);
    if (!ReadConsoleW(console, line, 1024, &units, nullptr)) return fail(GetLastError()) - 1;
    // Ctrl-C
    if (units == 0 && GetLastError() == ERROR_OPERATION_ABORTED)
      return fail(ERROR_OPERATION_ABORTED) - 1;
    if (units == 0 || line[0] == L'\x1A') return 0;
    pending = narrow({line, units});
  }
  const std::size_t part = std::min(size, pending.size());
  pending.copy(data, part);
  pending.erase(0, part);
  return static_cast<ptrdiff_t>(part);
}

ptrdiff_t read_from(HANDLE from, void* data, std::size_t size) {
  DWORD n = 0;
  if (ReadFile(from, data, static_cast<DWORD>(std::min<std::size_t>(size, 1 << 20)), &n, nullptr))
    return n;
  return GetLastError() == ERROR_BROKEN_PIPE || GetLastError() == ERROR_HANDLE_EOF
             ? 0
             : fail(GetLastError()) - 1;
}

HANDLE open(const std::string& path, DWORD access, DWORD how, DWORD flags) {
  return CreateFileW(tool::system::path(path).c_str(), access,
                     FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr, how, flags,
                     nullptr);
}

}  // namespace

std::vector<std::string> begin(int count, char** values) {
  int wide_count = 0;
  wchar_t** wide_values = CommandLineToArgvW(GetCommandLineW(), &wide_count);
  if (!wide_values) return {values, values + count};
  std::vector<std::string> arguments;
  for (int i = 0; i < wide_count; ++i) arguments.push_back(narrow(wide_values[i]));
  LocalFree(wide_values);
  return arguments;
}

bool is_terminal(Stream stream) {
  DWORD mode = 0;
  return GetConsoleMode(handle(stream), &mode) != 0;
}

bool write(Stream stream, std::string_view text) {
  if (is_terminal(stream)) return write_console(handle(stream), text);
  while (!text.empty()) {
    DWORD written = 0;
    if (!WriteFile(handle(stream), text.data(),
                   static_cast<DWORD>(std::min<std::size_t>(text.size(), 1 << 20)), &written,
                   nullptr))
      return fail(GetLastError());
    if (written == 0) return fail(ERROR_DISK_FULL);
    text.remove_prefix(written);
  }
  return true;
}

ptrdiff_t read(void* data, std::size_t size) {
  return is_terminal(Stream::input)
             ? read_console(handle(Stream::input), static_cast<char*>(data), size)
             : read_from(handle(Stream::input), data, size);
}

bool read_file(const std::string& path, std::string* text) {
  const HANDLE file = open(path, GENERIC_READ, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL);
  if (file == INVALID_HANDLE_VALUE) return fail(GetLastError());
  std::vector<char> buffer(1 << 16);
  ptrdiff_t size = 0;
  while ((size = read_from(file, buffer.data(), buffer.size())) > 0 &&
         text->size() <= max_text_bytes)
    text->append(buffer.data(), static_cast<std::size_t>(size));
  CloseHandle(file);
  if (size > 0) errno = EFBIG;
  return size == 0;
}

ptrdiff_t append(const std::string& path, std::string_view text) {
  // with this right alone every write is at the end
  const HANDLE file = open(path, FILE_APPEND_DATA, OPEN_ALWAYS, FILE_ATTRIBUTE_NORMAL);
  if (file == INVALID_HANDLE_VALUE) return fail(GetLastError()) - 1;
  DWORD written = 0;
  const bool good =
      WriteFile(file, text.data(), static_cast<DWORD>(text.size()), &written, nullptr) ||
      fail(GetLastError());
  CloseHandle(file);
  return good ? static_cast<ptrdiff_t>(written) : -1;
}

bool is_disk_full(int error) { return error == ENOSPC; }

bool may_write_in(const std::string& folder) {
  const HANDLE handle = open(folder, FILE_ADD_FILE, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS);
  if (handle == INVALID_HANDLE_VALUE) return fail(GetLastError());
  CloseHandle(handle);
  return true;
}

bool terminal_understands_drawing() {
  DWORD mode = 0;
  return GetConsoleMode(handle(Stream::error), &mode) &&
         SetConsoleMode(handle(Stream::error), mode | ENABLE_VIRTUAL_TERMINAL_PROCESSING);
}

bool terminal_shows_utf8() { return true; }

int terminal_columns() {
  CONSOLE_SCREEN_BUFFER_INFO info;
  return GetConsoleScreenBufferInfo(handle(Stream::error), &info)
             ? info.srWindow.Right - info.srWindow.Left + 1
             : 0;
}

std::string program_path() {
  std::wstring path(32768, L'\0');
  path.resize(GetModuleFileNameW(nullptr, path.data(), static_cast<DWORD>(path.size())));
  return narrow(path);
}

std::string cache_folder() {
  const wchar_t* const local = _wgetenv(L"LOCALAPPDATA");
  return local != nullptr && *local != 0 ? narrow(local) + "/kvasir" : "";
}

uint64_t process_number() { return GetCurrentProcessId(); }
bool local_time(std::time_t time, std::tm* out) { return localtime_s(out, &time) == 0; }

}  // namespace tool::system
