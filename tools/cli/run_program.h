// Runs another program to its end.
#pragma once

#include <string>
#include <vector>

namespace tool {

struct ProgramResult {
  int code = 0;
  int signal = 0;              // that ended it; 0: none
  std::string output, errors;  // standard output and standard error
};

// command: the program, a path or a name in PATH, and its arguments. False with errno where it
// cannot be run; ENOTSUP on Windows. Ctrl-C reaches it as well.
bool run_program(const std::vector<std::string>& command, ProgramResult* out);

}  // namespace tool
