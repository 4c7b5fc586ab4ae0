// How a command of the tool fails: an exit code, one line for people, and the library's error for
// machines.
#pragma once

#include <stdexcept>
#include <string>

#include "kvasir.h"

namespace tool {

// Documented in `kvasir --help`.
enum ExitCode : int {
  exit_ok = 0,
  exit_failure = 1,
  exit_usage = 2,
  exit_file = 3,       // not found, not permitted, damaged, of another kind
  exit_stale = 4,      // a cache of another model or version
  exit_resources = 5,  // memory, disk space, a limit of the system
  exit_cancelled = 130,
  exit_pipe = 141,  // nobody reads the output any more; nothing is said about it
};

class Failure : public std::runtime_error {
 public:
  Failure(int exit_code, const std::string& message)
      : std::runtime_error(message), exit_code_(exit_code) {}
  Failure(const kv_error& error, const std::string& advice);

  int exit_code() const { return exit_code_; }
  const kv_error& library_error() const { return error_; }  // status 0: the tool's own failure

 private:
  int exit_code_;
  kv_error error_{};
};

int exit_code_for(kv_status status);

// Throws a Failure unless the status is good. `advice` says what to do; empty: what usually helps,
// if anything does.
void check(kv_status status, const kv_error& error, const std::string& advice = {});

}  // namespace tool
