#include <fcntl.h>
#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "system.h"

namespace tool::system {

static int descriptor(Stream stream) {
  return stream == Stream::input    ? STDIN_FILENO
         : stream == Stream::output ? STDOUT_FILENO
                                    : STDERR_FILENO;
}

std::vector<std::string> begin(int count, char** values) {
  std::signal(SIGPIPE, SIG_IGN);
  return {values, values + count};
}

bool is_terminal(Stream stream) { return isatty(descriptor(stream)) == 1; }

bool write(Stream stream, std::string_view text) {
  while (!text.empty()) {
    const ssize_t size = ::write(descriptor(stream), text.data(), text.size());
    if (size >= 0) {
      text.remove_prefix(static_cast<std::size_t>(size));
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

ptrdiff_t read(void* data, std::size_t size) { return ::read(STDIN_FILENO, data, size); }

bool read_file(const std::string& path, std::string* text) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  std::vector<char> buffer(1 << 16);
  ssize_t size = 0;
  while ((size = ::read(file, buffer.data(), buffer.size())) > 0 && text->size() <= max_text_bytes)
    text->append(buffer.data(), static_cast<std::size_t>(size));
  const int error = size > 0 ? EFBIG : errno;
  ::close(file);
  errno = error;
  return size == 0;
}

ptrdiff_t append(const std::string& path, std::string_view text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) return -1;
  const ssize_t written = ::write(file, text.data(), text.size());
  const int error = errno;
  ::close(file);
  errno = error;
  return written;
}

bool is_disk_full(int error) { return error == ENOSPC || error == EDQUOT; }

bool may_write_in(const std::string& folder) { return access(folder.c_str(), W_OK | X_OK) == 0; }

std::string cache_folder() {
  const char *caches = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  std::string parent;
  if (caches != nullptr && *caches == '/') parent = caches;
#ifdef __APPLE__
  else if (home != nullptr && *home == '/') parent = std::string(home) + "/Library/Caches";
#else
  else if (home != nullptr && *home == '/') parent = std::string(home) + "/.cache";
#endif
  std::error_code failed;
  if (!parent.empty()) std::filesystem::create_directories(parent, failed);
  return parent.empty() || failed ? "" : parent + "/kvasir";
}

bool terminal_understands_drawing() {
  const char* kind = std::getenv("TERM");
  return is_terminal(Stream::error) && kind != nullptr && std::strcmp(kind, "dumb") != 0;
}

bool terminal_shows_utf8() {
  std::setlocale(LC_CTYPE, "");
  return std::strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

int terminal_columns() {
  winsize size = {};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

std::string program_path() { return "/proc/self/exe"; }
uint64_t process_number() { return static_cast<uint64_t>(getpid()); }
bool local_time(std::time_t time, std::tm* out) { return localtime_r(&time, out) != nullptr; }

}  // namespace tool::system
