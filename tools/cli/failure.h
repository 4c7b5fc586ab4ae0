// Failures of commands: an exit code, one line for people, and the library's error for programs.
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
  exit_file = 3,       // missing, not permitted, damaged, of another kind
  exit_stale = 4,      // a cache file of another model or version
  exit_resources = 5,  // memory, disk space, a GPU, a limit of the system
  exit_cancelled = 130,
  exit_pipe = 141,  // the reader of the output is gone; nothing is printed
};

class Failure : public std::exception {
 public:
  Failure(int exit_code, std::string message)
      : exit_code_(exit_code), message_(std::move(message)) {}
  // The library's message, with advice on what to do.
  Failure(const kv_error& error, const std::string& advice);

  const char* what() const noexcept override { return message_.c_str(); }
  int exit_code() const { return exit_code_; }
  const kv_error& library_error() const { return error_; }  // status 0: not of the library
  void reword(std::string message) { message_ = std::move(message); }

 private:
  int exit_code_;
  std::string message_;
  kv_error error_{};
};

int exit_code_for(kv_status status);

// Throws a Failure unless status is KV_OK. Without `advice`, general advice for the status.
void check(kv_status status, const kv_error& error, const std::string& advice = {});

// The same for a call on a cache file. Recognises a packed file.
void check_cache(kv_status status, const kv_error& error, const std::string& path);

}  // namespace tool
