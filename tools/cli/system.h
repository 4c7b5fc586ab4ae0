// The operating system for the command line: standard streams, files, the terminal. Implemented by
// system_posix.cc and system_windows.cc. Texts and paths are UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tool::system {

// std::filesystem takes char8_t as UTF-8 on every system.
inline std::filesystem::path path(const std::string& text) {
  return std::u8string(text.begin(), text.end());
}
inline std::string text(const std::filesystem::path& path) {
  const std::u8string units = path.u8string();
  return {units.begin(), units.end()};
}

// The first call of main(). Writes to a closed pipe then fail; returns the arguments as UTF-8.
std::vector<std::string> begin(int count, char** values);

enum class Stream { input, output, error };
bool is_terminal(Stream stream);
// Writes all of it; false with errno, EPIPE where the reader is gone.
bool write(Stream stream, std::string_view text);
// Reads standard input; 0 at its end, -1 with errno, EINTR at a Ctrl-C.
ptrdiff_t read(void* data, std::size_t size);
bool read_file(const std::string& path,
               std::string* text);  // false with errno; EFBIG for more than max_text_bytes
constexpr std::size_t max_text_bytes = std::size_t{1}
                                       << 32;  // more than any context; a device may have no end
// Appends with one write; bytes written, or -1 with errno.
ptrdiff_t append(const std::string& path, std::string_view text);
bool is_disk_full(int error);
bool may_write_in(const std::string& folder);  // false with errno

bool terminal_understands_drawing();  // standard error: can erase a line
bool terminal_shows_utf8();
int terminal_columns();               // standard error; 0: unknown
constexpr const char* end_of_input =  // as typed
#ifdef _WIN32
    "Ctrl-Z and Enter";
#else
    "Ctrl-D";
#endif

// This program's cache folder; its parents exist. "": the user has none.
std::string cache_folder();
std::string program_path();
uint64_t process_number();
bool local_time(std::time_t time, std::tm* out);

}  // namespace tool::system
