// A host that is interrupted by signals all the time, with and without SA_RESTART: every call ends
// with the same result, and no handler runs on a thread of the library.
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <fstream>

#include "host.h"
#include "temp_folder.h"

namespace {

std::atomic<int> handled{0}, elsewhere{0};
std::atomic<bool> storm{true};
pid_t main_thread = 0, storm_thread_id = 0;

pid_t this_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

void on_signal(int) {
  const int error = errno;
  ++handled;
  if (this_thread() != main_thread && this_thread() != storm_thread_id) ++elsewhere;
  errno = error;
}

// To the thread that calls, and to the process: any thread that does not block it may get the
// latter.
void* interrupt(void* to) {
  storm_thread_id = this_thread();
  while (storm) {
    pthread_kill(*static_cast<pthread_t*>(to), SIGUSR1);
    kill(getpid(), SIGUSR2);
    usleep(50);
  }
  return nullptr;
}

// Of each thread but the host's two: what it blocks, from its status.
void require_blocked() {
  DIR* const tasks = opendir("/proc/self/task");
  host::require(tasks != nullptr, "/proc/self/task");
  int others = 0;
  while (const dirent* entry = readdir(tasks)) {
    const int id = std::atoi(entry->d_name);
    if (id == 0 || id == main_thread || id == storm_thread_id) continue;
    std::ifstream in("/proc/self/task/" + std::string(entry->d_name) + "/status");
    for (std::string line; std::getline(in, line);) {
      if (line.rfind("SigBlk:", 0) != 0) continue;
      const unsigned long long blocked = std::strtoull(line.c_str() + 7, nullptr, 16);
      for (const int signal :
           {SIGUSR1, SIGUSR2, SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGCHLD, SIGPIPE, SIGIO, SIGWINCH})
        host::require((blocked >> (signal - 1) & 1) != 0, "the library's threads block signals");
      ++others;
    }
  }
  closedir(tasks);
  host::require(others > 0, "the library has threads");
}

struct Result {
  std::string answer, loaded;
  std::vector<uint8_t> file, unpacked;
  bool operator==(const Result&) const = default;
};

Result work(kv_model* model, const TempFolder& folder) {
  const std::string path = folder.file("a.kv"), packed = folder.file("a.kvz"),
                    again = folder.file("b.kv");
  kv_error error{};
  Result result;
  kv_session_options o = host::session_options();
  o.threads = 3;
  kv_session *session = host::open_session(model, o), *loaded = nullptr;
  host::read(session, 700);
  result.answer = host::ask(session);
  require_blocked();
  host::require_ok(kv_save(session, path.c_str(), nullptr, &error), error, "kv_save");
  kv_control call;
  kv_init(&call, sizeof call);
  call.flags = KV_VERIFY;
  host::require_ok(kv_load(model, path.c_str(), nullptr, &call, &loaded, &error), error, "kv_load");
  result.loaded = host::ask(loaded);
  host::require_ok(kv_pack(path.c_str(), packed.c_str(), 0, nullptr, &error), error, "kv_pack");
  host::require_ok(kv_unpack(packed.c_str(), again.c_str(), nullptr, &error), error, "kv_unpack");
  kv_library* library = nullptr;
  kv_session* of_library = nullptr;
  host::require_ok(kv_library_open(folder.file("library").c_str(), nullptr, &library, &error),
                   error, "kv_library_open");
  host::require_ok(kv_library_session(library, model, "a text of some words", 20, nullptr, nullptr,
                                      &of_library, nullptr, &error),
                   error, "kv_library_session");
  kv_session_close(of_library), kv_library_close(library), kv_session_close(loaded),
      kv_session_close(session);
  result.file = read_file(path), result.unpacked = read_file(again);
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const TempFolder folder;
  main_thread = this_thread();
  kv_model* const model = host::open_model();
  storm_thread_id = main_thread;
  const Result expected = work(model, folder);
  host::require(expected.unpacked == expected.file, "a document is unpacked as it was");
  for (const int flags : {0, SA_RESTART}) {
    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags = flags;
    sigaction(SIGUSR1, &action, nullptr), sigaction(SIGUSR2, &action, nullptr);
    handled = 0;
    storm = true;
    pthread_t self = pthread_self(), thread;
    storm_thread_id = 0;
    host::require(pthread_create(&thread, nullptr, interrupt, &self) == 0, "a thread");
    while (handled == 0 || storm_thread_id == 0) usleep(100);
    for (int i = 0; i < host::times(argc, argv, 2); ++i)
      host::require(work(model, folder) == expected, "interrupted, the work is the same");
    storm = false;
    pthread_join(thread, nullptr);
    host::require(handled > 20, "the calls were interrupted");
    host::require(elsewhere == 0, "no handler ran on a thread of the library's");
  }
  kv_close(model);
  return 0;
}
