// What the command line asks of the operating system beside the library: standard streams, files as
// scripts meet them, the terminal. Two implementations, system_posix.cc and system_windows.cc, each
// with an Interrupt of its own (interrupt.h). Texts and paths are UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tool::system {

// Only so is a text UTF-8 to std::filesystem on every system.
inline std::filesystem::path path(const std::string& text) {
  return std::u8string(text.begin(), text.end());
}
inline std::string text(const std::filesystem::path& path) {
  const std::u8string units = path.u8string();
  return {units.begin(), units.end()};
}

// The first call of main(): failed writes are met as such, the arguments as UTF-8.
std::vector<std::string> begin(int count, char** values);

enum class Stream { input, output, error };
bool is_terminal(Stream stream);
// all of it; false with errno, EPIPE where nobody reads any more
bool write(Stream stream, std::string_view text);
// of standard input; 0 at its end, -1 with errno, EINTR at a Ctrl-C
ptrdiff_t read(void* data, std::size_t size);
bool read_file(const std::string& path,
               std::string* text);  // false with errno; EFBIG for more than max_text
constexpr std::size_t max_text =
    std::size_t{1} << 32;  // bytes: more than any context holds. A device may have no end
// by one write; bytes written, or -1 with errno
ptrdiff_t append(const std::string& path, std::string_view text);
bool is_disk_full(int error);
bool may_write_in(const std::string& folder);  // false with errno

bool terminal_understands_drawing();  // that of standard error: colours aside, "erase this line"
bool terminal_shows_utf8();
int terminal_columns();               // that of standard error; 0 where it does not say
constexpr const char* end_of_input =  // what a person types
#ifdef _WIN32
    "Ctrl-Z and Enter";
#else
    "Ctrl-D";
#endif

// A folder of this program's for what can be made again, whose parents are there; "" where the user
// has none.
std::string cache_folder();
std::string program_path();
uint64_t process_number();
bool local_time(std::time_t time, std::tm* out);

}  // namespace tool::system
