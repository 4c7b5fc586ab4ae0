#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <vector>

#include "run_program.h"

extern char** environ;

namespace tool {
namespace {

// Both ends are closed in programs that are started.
class Pipe {
 public:
  Pipe() {
    if (pipe(ends_) != 0) {
      error_ = errno;
      ends_[0] = ends_[1] = -1;
      return;
    }
    for (const int end : ends_) fcntl(end, F_SETFD, FD_CLOEXEC);
  }
  ~Pipe() { close_read(), close_write(); }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  int error() const { return error_; }
  int read_end() const { return ends_[0]; }
  int write_end() const { return ends_[1]; }
  void close_read() { close_end(&ends_[0]); }
  void close_write() { close_end(&ends_[1]); }

 private:
  static void close_end(int* end) {
    if (*end >= 0) close(*end);
    *end = -1;
  }
  int ends_[2];
  int error_ = 0;
};

// Kvasir ignores SIGPIPE; the program does not inherit that.
int start(const std::vector<std::string>& command, const Pipe& output, const Pipe& errors,
          pid_t* process) {
  std::vector<char*> arguments;
  for (const std::string& each : command) arguments.push_back(const_cast<char*>(each.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  if (const int error = posix_spawn_file_actions_init(&actions)) return error;
  if (const int error = posix_spawnattr_init(&attributes)) {
    posix_spawn_file_actions_destroy(&actions);
    return error;
  }
  sigset_t usual;
  sigemptyset(&usual);
  sigaddset(&usual, SIGPIPE);
  posix_spawnattr_setsigdefault(&attributes, &usual);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output.write_end(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors.write_end(), STDERR_FILENO);
  const int error =
      posix_spawnp(process, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return error;
}

// Appends what there is; closes the pipe at its end.
void read_some(Pipe* pipe, std::string* text) {
  char buffer[1 << 16];
  const ssize_t size = read(pipe->read_end(), buffer, sizeof buffer);
  if (size > 0) text->append(buffer, static_cast<std::size_t>(size));
  else if (size == 0 || errno != EINTR) pipe->close_read();
}

// Reads what the program prints until it has ended, and ends it where it must stop. Returns its
// status. A program that it started may hold the pipes open: they need not end.
int wait_for(pid_t process, Pipe* output, Pipe* errors, const std::function<bool()>& stopped,
             ProgramResult* out) {
  constexpr int poll_milliseconds = 50;
  int status = 0;
  bool ended = false, stop = false;
  while (!ended || output->read_end() >= 0 || errors->read_end() >= 0) {
    pollfd ends[2] = {{output->read_end(), POLLIN, 0}, {errors->read_end(), POLLIN, 0}};
    const int ready = poll(ends, 2, ended ? 0 : poll_milliseconds);
    if (ready > 0 && ends[0].revents != 0) read_some(output, &out->output);
    if (ready > 0 && ends[1].revents != 0) read_some(errors, &out->errors);
    if (ended && (ready == 0 || stop)) break;
    out->is_too_long = (out->output.size() + out->errors.size()) >> 20 >= max_program_megabytes;
    stop = out->is_too_long || stopped();
    if (ended) continue;
    if (stop) kill(process, SIGKILL);
    const pid_t found = waitpid(process, &status, WNOHANG);
    ended = found == process || (found < 0 && errno != EINTR);
  }
  return status;
}

}  // namespace

bool run_program(const std::vector<std::string>& command, const std::function<bool()>& stopped,
                 ProgramResult* out) {
  Pipe output, errors;
  pid_t process = 0;
  int error = output.error() ? output.error() : errors.error();
  if (error == 0) error = start(command, output, errors, &process);
  if (error != 0) return errno = error, false;
  output.close_write(), errors.close_write();
  const int status = wait_for(process, &output, &errors, stopped, out);
  if (WIFSIGNALED(status)) out->signal = WTERMSIG(status);
  else out->code = WEXITSTATUS(status);
  return true;
}

}  // namespace tool
