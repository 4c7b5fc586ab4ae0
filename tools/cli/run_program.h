// Runs another program to its end.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace tool {

constexpr std::size_t max_program_megabytes = 64;  // of output and errors

struct ProgramResult {
  int code = 0;
  int signal = 0;              // that ended it; 0: none
  std::string output, errors;  // standard output and standard error
  bool is_too_long = false;    // it was ended because it printed more than max_program_megabytes
};

// command: the program, a path or a name in PATH, and its arguments. Polls `stopped`: once that is
// true, the program is ended. Programs that it started are not waited for. Returns false with errno
// where it cannot be run; ENOTSUP on Windows.
bool run_program(const std::vector<std::string>& command, const std::function<bool()>& stopped,
                 ProgramResult* out);

}  // namespace tool
