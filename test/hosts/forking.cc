// A host that forks with sessions open and in the middle of calls: children that exec get no
// descriptor of the library's, those that end leave the parent's files and sessions as they were.
#include <dirent.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "host.h"
#include "temp_folder.h"

namespace {

const char* program = nullptr;

// In the child after exec: the standard streams and the folder that is being listed.
int count_descriptors() {
  DIR* const folder = opendir("/proc/self/fd");
  if (!folder) return 77;
  int bad = 0;
  while (const dirent* entry = readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    if (entry->d_name[0] == '.' || fd <= 2 || fd == dirfd(folder)) continue;
    char path[64], target[512] = {};
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, target, sizeof target - 1) < 0) continue;
    if (std::strstr(target, "kvasir") || std::strstr(target, ".gguf") ||
        std::strstr(target, ".kv")) {
      std::fprintf(stderr, "inherited: %s\n", target);
      ++bad;
    }
  }
  closedir(folder);
  return bad != 0;
}

void in_child(bool execs) {
  const pid_t child = fork();
  host::require(child >= 0, "fork");
  if (child == 0) {
    if (!execs) _exit(0);
    execl(program, program, "child", static_cast<char*>(nullptr));
    _exit(2);
  }
  int status = 0;
  host::require(
      waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
      "the child has nothing of the library's open");
}

struct Forks {
  int calls = 0;
};

int32_t on_progress(int32_t, uint64_t, uint64_t, void* user) {
  in_child(static_cast<Forks*>(user)->calls++ % 2 == 0);
  return 0;
}

int32_t on_text(const char*, std::size_t, void* user) { return on_progress(0, 0, 0, user); }

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "child") == 0) return count_descriptors();
  program = argv[0];
  const TempFolder folder;
  const std::string path = folder.file("a.kv"), packed = folder.file("a.kvz"),
                    spill = folder.path();
  kv_error error{};
  Forks forks;
  kv_control call;
  kv_init(&call, sizeof call);
  call.progress = on_progress;
  call.user = &forks;
  kv_model* const model = host::open_model();
  kv_session_options o = host::session_options();
  o.spill_directory = spill.c_str();
  o.memory_limit = 4 << 20;
  kv_session *session = host::open_session(model, o), *loaded = nullptr;
  host::read(session, 700, &call);
  const std::string expected = host::ask(session);
  kv_generate_options g = host::generate_options();
  host::require_ok(kv_generate(session, "a", 1, &g, nullptr, on_text, &forks, nullptr, &error),
                   error, "kv_generate");
  host::require_ok(kv_save(session, path.c_str(), &call, &error), error, "kv_save");
  call.flags = KV_VERIFY;
  host::require_ok(kv_load(model, path.c_str(), nullptr, &call, &loaded, &error), error, "kv_load");
  call.flags = 0;
  host::require_ok(kv_pack(path.c_str(), packed.c_str(), 0, &call, &error), error, "kv_pack");
  host::require_ok(kv_unpack(packed.c_str(), path.c_str(), &call, &error), error, "kv_unpack");
  kv_library* library = nullptr;
  host::require_ok(kv_library_open(folder.file("library").c_str(), nullptr, &library, &error),
                   error, "kv_library_open");
  kv_session* of_library = nullptr;
  host::require_ok(kv_library_session(library, model, "a text of some words", 20, nullptr, &call,
                                      &of_library, nullptr, &error),
                   error, "kv_library_session");
  in_child(true), in_child(false);
  host::require(forks.calls > 8, "children were made in the middle of calls");
  host::require(host::ask(session) == expected, "the parent's session is as it was");
  kv_session_close(of_library), kv_library_close(library), kv_session_close(loaded),
      kv_session_close(session), kv_close(model);
  return 0;
}
