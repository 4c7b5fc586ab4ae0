// A second user on the machine, who looks at the folders of a host all the time, can open nothing
// that the library makes there: no spill file, no cache, no packed document, no temporary file, no
// lock. Root starts it and becomes the second user in a child; otherwise it is skipped. The
// argument is the number of rounds.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "host.h"
#include "os/os.h"
#include "temp_folder.h"

using namespace host;

namespace {

struct Seen {
  std::atomic<uint64_t> rounds, names, opened, controls;
  char first[256];  // of what was opened
};

constexpr const char* control = "control";  // a file that the second user may read

// Opens what it can, of all that is in the folder and of what the host has open.
void look(const std::string& folder, pid_t who, Seen* seen) {
  std::error_code ignored;
  std::vector<std::string> paths;
  for (std::filesystem::recursive_directory_iterator it(folder, ignored), end; it != end;
       it.increment(ignored))
    paths.push_back(it->path());
  for (int fd = 3; fd < 40; ++fd)
    paths.push_back("/proc/" + std::to_string(who) + "/fd/" + std::to_string(fd));
  for (const std::string& path : paths) {
    ++seen->names;
    for (int how : {O_RDONLY, O_WRONLY}) {
      const int file = open(path.c_str(), how | O_CLOEXEC | O_NONBLOCK);
      struct stat info;
      const bool is_file = file >= 0 && fstat(file, &info) == 0 && S_ISREG(info.st_mode);
      if (file >= 0) close(file);
      if (!is_file) continue;
      if (path.ends_with(control)) {
        ++seen->controls;
      } else if (seen->opened++ == 0) {
        std::snprintf(seen->first, sizeof seen->first, "%s", path.c_str());
      }
    }
  }
  ++seen->rounds;
}

// The next file without a name is made as on a file system that has none.
int without_nameless_files(const char* operation, const char* path) {
  const std::string_view of(path);
  return std::string_view(operation) == "open" && of.ends_with("/kvasir-spill") ? EOPNOTSUPP : 0;
}

uint64_t min_budget(kv_model* model, kv_session_options o, const std::vector<int32_t>& tokens) {
  kv_session* session = nullptr;
  kv_error error{};
  uint64_t bytes = 0;
  for (o.memory_limit = 1 << 20; bytes == 0; o.memory_limit += 1 << 18) {
    if (kv_session_open(model, &o, &session, &error) != KV_OK) continue;
    if (kv_prefill_tokens(session, tokens.data(), tokens.size(), nullptr, nullptr, &error) == KV_OK)
      bytes = o.memory_limit;
    kv_session_close(session);
  }
  return bytes;
}

void work(kv_model* model, kv_session_options o, const std::vector<int32_t>& tokens,
          const std::string& folder) {
  kv_error error{};
  kv_session* session = nullptr;
  require_status(kv_session_open(model, &o, &session, &error), KV_OK, error, "a session");
  require_status(kv_prefill_tokens(session, tokens.data(), tokens.size(), nullptr, nullptr, &error),
                 KV_OK, error, "reading");
  const std::string path = folder + "/a.kv", packed = folder + "/a.kvz", back = folder + "/b.kv";
  require_status(kv_save(session, path.c_str(), nullptr, &error), KV_OK, error, "saving");
  require_status(kv_pack(path.c_str(), packed.c_str(), 0, nullptr, &error), KV_OK, error,
                 "packing");
  require_status(kv_unpack(packed.c_str(), back.c_str(), nullptr, &error), KV_OK, error,
                 "unpacking");
  kv_session_close(session);
  kv_library* library = nullptr;
  require_status(kv_library_open((folder + "/library").c_str(), nullptr, &library, &error), KV_OK,
                 error, "a library");
  kv_library_session_options how;
  kv_init(&how, sizeof how);
  how.name = "text";
  const std::string text(600, 'x');
  require_status(kv_library_session(library, model, text.data(), text.size(), &how, nullptr,
                                    &session, nullptr, &error),
                 KV_OK, error, "a document");
  kv_session_close(session);
  require_status(kv_library_remove(library, "text", &error), KV_OK, error, "removing");
  kv_library_close(library);
  for (const std::string& made : {path, packed, back}) std::filesystem::remove(made);
}

}  // namespace

int main(int count, char** values) {
  if (geteuid() != 0) return skipped;
  const int rounds = count > 1 ? std::atoi(values[1]) : 10;
  umask(0);  // the worst that a host can do
  TempFolder temporary;
  const std::string folder = temporary.file("shared");
  require(mkdir(folder.c_str(), 0777) == 0 && chmod(temporary.path().c_str(), 0755) == 0 &&
              chmod(folder.c_str(), 01777) == 0,
          "a shared folder");
  write_file(folder + "/" + control, {1});
  auto* seen = static_cast<Seen*>(
      mmap(nullptr, sizeof(Seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  require(seen != MAP_FAILED, "shared memory");
  const pid_t parent = getpid(), child = fork();
  if (child == 0) {
    become_nobody();
    for (;;) look(folder, parent, seen);
  }
  kv_model* model = nullptr;
  kv_error error{};
  require_status(kv_open(FIXTURES "/models/llama-q8_0.gguf", nullptr, nullptr, &model, &error),
                 KV_OK, error, "a model");
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.threads = 1;
  o.spill_directory = folder.c_str();
  const std::vector<int32_t> tokens = some_tokens(2500);
  o.memory_limit = min_budget(model, o, tokens);
  for (int i = 0; i < rounds || seen->rounds < 10; ++i) {
    kvasir::os::fault = i % 2 ? without_nameless_files : nullptr;
    work(model, o, tokens, folder);
  }
  kvasir::os::fault = nullptr;
  kv_close(model);
  kill(child, SIGKILL);
  require(waitpid(child, nullptr, 0) == child, "the second user");
  std::printf(
      "looked %llu times, at %llu names, opened the control %llu times and others %llu times\n",
      static_cast<unsigned long long>(seen->rounds), static_cast<unsigned long long>(seen->names),
      static_cast<unsigned long long>(seen->controls),
      static_cast<unsigned long long>(seen->opened));
  std::fflush(stdout);
  require(seen->controls > 0, "what may be opened is opened");
  if (seen->opened > 0) std::fprintf(stderr, "opened first: %s\n", seen->first);
  require(seen->opened == 0, "another user opened what the library made");
  return 0;
}
