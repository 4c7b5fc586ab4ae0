// The system's limits, each in a process of its own: a full disk, no more address space, no more
// files. The code is right, existing files stay, and with room again every call succeeds.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <initializer_list>

#include "fault_count.h"
#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

constexpr int cannot = 77;  // the child's exit code where the system does not let the limit be set

// In the child, where doctest does not count.
void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  _exit(1);
}

void must_be(kv_status status, std::initializer_list<kv_status> allowed, const kv_error& error,
             const char* what) {
  for (kv_status s : allowed)
    if (status == s) return;
  std::fprintf(stderr, "%s: %s\n", what, error.message);
  _exit(1);
}

// False where it could not be tried.
bool in_child(const std::function<void()>& body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK((WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == cannot));
  return WEXITSTATUS(status) == 0;
}

// A disk of so many bytes that this process alone sees.
void mount_disk(const std::string& folder, uint64_t bytes) {
  const std::string size = "size=" + std::to_string(bytes);
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("tmpfs", folder.c_str(), "tmpfs", 0, size.c_str()) != 0)
    _exit(cannot);
}

// Takes room so that `left` bytes are free.
void fill(const std::string& path, uint64_t left) {
  std::filesystem::remove(path);
  const uint64_t free = std::filesystem::space(std::filesystem::path(path).parent_path()).available;
  const int fd = open(path.c_str(), O_CREAT | O_WRONLY, 0600);
  must(fd >= 0 && (free <= left || posix_fallocate(fd, 0, static_cast<off_t>(free - left)) == 0) &&
           close(fd) == 0,
       "a file that fills the disk");
}

kv_session* read_session(kv_model* model, std::size_t tokens, const kv_session_options& options) {
  kv_session* session = nullptr;
  const std::vector<int32_t> some = some_tokens(tokens);
  must(kv_session_open(model, &options, &session, nullptr) == KV_OK, "a session");
  must(kv_prefill_tokens(session, some.data(), some.size(), nullptr, nullptr, nullptr) == KV_OK,
       "reading");
  return session;
}

uint64_t tokens_of(const std::string& path) {
  kv_file_info info{};
  info.struct_size = sizeof info;
  must(kv_file_verify(path.c_str(), nullptr, nullptr) == KV_OK &&
           kv_file_inspect(path.c_str(), &info, nullptr) == KV_OK,
       "a whole file");
  return info.tokens;
}

std::size_t entries(const std::string& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

// What a session that reads so many tokens needs, as the messages of refusals say.
uint64_t min_budget(const std::vector<int32_t>& tokens) {
  kv_session_options o = small_options();
  o.memory_limit = 1000;
  kv_session* none = nullptr;
  kv_error refused{};
  const auto needed = [&] {
    const std::string message = refused.message, take = "alone take ";
    REQUIRE(message.find(take) != std::string::npos);
    return std::stoull(message.substr(message.find(take) + take.size()));
  };
  REQUIRE(kv_session_open(tiny_model(), &o, &none, &refused) == KV_LIMIT);
  o.memory_limit = needed();
  REQUIRE(kv_prefill_tokens(open_session(tiny_model(), o).get(), tokens.data(), tokens.size(),
                            nullptr, nullptr, &refused) == KV_LIMIT);
  return needed();
}

// Prefills a text into a library, on a disk with or without room for it.
void read_into_library(const std::string& folder, kv_model* model, bool room) {
  kv_library* library = nullptr;
  kv_error error{};
  must_be(kv_library_open(folder.c_str(), nullptr, &library, &error), {KV_OK}, error,
          "a library on a full disk");
  const kv_session_options options = small_options();
  kv_library_session_options o;
  kv_init(&o, sizeof o);
  o.session = &options;
  o.name = "text";
  const std::string text(300, 'a');
  kv_session* session = nullptr;
  kv_library_result result{};
  result.struct_size = sizeof result;
  must_be(kv_library_session(library, model, text.data(), text.size(), &o, nullptr, &session,
                             &result, &error),
          {KV_OK}, error, "a document's session");
  must(result.saved ? room : result.save_status == KV_NO_SPACE,
       "a save that says that there is no room");
  must(ask(session, "q", 2).status == KV_OK, "a session whose document is not saved answers");
  kv_session_close(session);
  if (result.saved) must(kv_library_remove(library, "text", &error) == KV_OK, "removing");
  kv_library_close(library);
}

}  // namespace

TEST_CASE(
    "a full disk: saves, packing, libraries and spilling report it, and existing files stay") {
  TempFolder folder;
  uint64_t old_size = 0, size = 0;
  {
    TempFolder elsewhere;
    save(tiny_session(100).get(), elsewhere.file("a"));
    save(tiny_session(300).get(), elsewhere.file("b"));
    old_size = std::filesystem::file_size(elsewhere.file("a"));
    size = std::filesystem::file_size(elsewhere.file("b"));
  }
  const std::vector<int32_t> many = some_tokens(3800);
  const uint64_t budget = min_budget(many) + (64 << 10);
  int tried = 0;
  for (int part = 0; part <= 8; ++part) {
    CAPTURE(part);
    tried += in_child([&] {
      mount_disk(folder.path(), old_size + 8 * size);
      const std::string path = folder.file("a.kv"), packed = folder.file("a.kvz"),
                        filler = folder.file("filler");
      kv_session_options o = small_options();
      o.threads = 1;
      kv_model* model = nullptr;
      kv_error error{};
      must(kv_open(tiny_path, nullptr, nullptr, &model, nullptr) == KV_OK, "a model");
      kv_session *old = read_session(model, 100, o), *session = read_session(model, 300, o);
      must(kv_save(old, path.c_str(), nullptr, nullptr) == KV_OK, "room for the first document");
      fill(filler, size * static_cast<uint64_t>(part) / 7);
      const bool room = part > 7;
      kv_status s = kv_save(session, path.c_str(), nullptr, &error);
      must_be(s, {room ? KV_OK : KV_NO_SPACE}, error, "saving");
      must(tokens_of(path) == (s == KV_OK ? 300u : 100u), "the old document or the new one");
      must(entries(folder.path()) == 2, "nothing but the document");
      s = kv_pack(path.c_str(), packed.c_str(), 0, nullptr, &error);
      must_be(s, {part ? KV_OK : KV_NO_SPACE, KV_NO_SPACE}, error, "packing");
      must(entries(folder.path()) == (s == KV_OK ? 3u : 2u), "nothing but what was packed");
      if (s == KV_OK) {
        s = kv_unpack(packed.c_str(), folder.file("b.kv").c_str(), nullptr, &error);
        must_be(s, {KV_OK, KV_NO_SPACE}, error, "unpacking");
        must(entries(folder.path()) == (s == KV_OK ? 4u : 3u), "nothing but what was unpacked");
      }
      std::filesystem::create_directory(folder.file("library"));
      read_into_library(folder.file("library"), model, part > 0);
      o.memory_limit = budget;
      o.spill_directory = folder.path().c_str();
      kv_session* spilled = nullptr;
      must(kv_session_open(model, &o, &spilled, nullptr) == KV_OK, "a session with a budget");
      uint64_t done = 0;
      s = kv_prefill_tokens(spilled, many.data(), many.size(), nullptr, &done, &error);
      must_be(s, {part ? KV_OK : KV_NO_SPACE, KV_NO_SPACE}, error, "spilling");
      std::filesystem::remove(filler);  // room again
      if (s != KV_OK)
        must(kv_prefill_tokens(spilled, many.data() + done, 64, nullptr, nullptr, &error) == KV_OK,
             "going on");
      must_be(kv_save(session, path.c_str(), nullptr, &error), {KV_OK}, error, "saving with room");
      must(tokens_of(path) == 300, "the new document");
      kv_session_close(spilled);
      kv_session_close(session);
      kv_session_close(old);
      kv_close(model);
    });
  }
  count_faults("full disk", tried);
  if (!tried) MESSAGE("not tried: this system lets nobody mount a disk");
}

TEST_CASE(
    "no more files: the code is right, nothing is left, and with files again every call succeeds") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), other = folder.file("b.kv");
  save(tiny_session(300).get(), path);
  for (int more = 0; more < 6; ++more) {
    CAPTURE(more);
    count_faults("limit of the process");
    in_child([&] {
      kv_session_options o = small_options();
      kv_model *model = nullptr, *another = nullptr;
      must(kv_open(tiny_path, nullptr, nullptr, &model, nullptr) == KV_OK, "a model");
      kv_session *session = read_session(model, 200, o), *loaded = nullptr;
      kv_error error{};
      struct rlimit limit {};
      const int next = dup(STDERR_FILENO);  // those below it are taken
      must(next >= 0 && close(next) == 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0, "the limit");
      const rlim_t before = limit.rlim_cur;
      limit.rlim_cur = static_cast<rlim_t>(next + more);
      if (setrlimit(RLIMIT_NOFILE, &limit) != 0) _exit(cannot);
      must_be(kv_open(tiny_path, nullptr, nullptr, &another, &error), {KV_OK, KV_LIMIT}, error,
              "opening");
      must_be(kv_load(model, path.c_str(), &o, nullptr, &loaded, &error), {KV_OK, KV_LIMIT}, error,
              "loading");
      must_be(kv_save(session, other.c_str(), nullptr, &error), {more ? KV_OK : KV_LIMIT, KV_LIMIT},
              error, "saving");
      must_be(kv_pack(path.c_str(), (other + "z").c_str(), 0, nullptr, &error), {KV_OK, KV_LIMIT},
              error, "packing");
      kv_library* library = nullptr;
      must_be(kv_library_open(folder.path().c_str(), nullptr, &library, &error), {KV_OK, KV_LIMIT},
              error, "opening a library");
      kv_library_close(library);
      if (more == 0) must(!another && !loaded && !library, "no file, no handle");
      must(ask(session, "q", 2).status == KV_OK, "an answer needs no file");
      limit.rlim_cur = before;
      must(setrlimit(RLIMIT_NOFILE, &limit) == 0, "the limit as before");
      must(kv_save(session, other.c_str(), nullptr, nullptr) == KV_OK && tokens_of(other) == 200,
           "saving with files");
      kv_session_close(loaded);
      kv_session_close(session);
      kv_close(another);
      kv_close(model);
    });
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      CHECK(entry.path().extension() != ".tmp");
    std::filesystem::remove(other);
    std::filesystem::remove(other + "z");
  }
}

// which need address space of their own
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("no more address space: the code is right wherever it ends, and the process goes on") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), other = folder.file("b.kv");
  save(tiny_session(300).get(), path);
  for (uint64_t more = 0; more < 160; more += more < 24 ? 3 : 17) {
    CAPTURE(more);
    count_faults("limit of the process");
    in_child([&] {
      uint64_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      struct rlimit limit {};
      must(getrlimit(RLIMIT_AS, &limit) == 0, "the limit");
      const rlim_t before = limit.rlim_cur;
      limit.rlim_cur = pages * 4096 + (more << 20);
      if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(cannot);
      const kv_session_options o = small_options();
      // KV_LIMIT: a thread that does not start
      const std::initializer_list<kv_status> allowed = {KV_OK, KV_NO_MEMORY, KV_LIMIT};
      kv_model* model = nullptr;
      kv_session *session = nullptr, *loaded = nullptr;
      kv_error error{};
      const std::vector<int32_t> tokens = some_tokens(1500);
      uint64_t done = 0;
      const auto everything = [&] {
        must_be(kv_open(tiny_path, nullptr, nullptr, &model, &error), allowed, error, "opening");
        if (!model) return;
        must_be(kv_session_open(model, &o, &session, &error), allowed, error, "a session");
        must_be(kv_load(model, path.c_str(), &o, nullptr, &loaded, &error), allowed, error,
                "loading");
        if (loaded)
          must_be(ask(loaded, "q", 4).status, allowed, error, "an answer over a mapped document");
        if (!session) return;
        must_be(kv_prefill_tokens(session, tokens.data(), tokens.size(), nullptr, &done, &error),
                allowed, error, "reading");
        must_be(ask(session, "q", 4).status, allowed, error, "an answer");
        must_be(kv_save(session, other.c_str(), nullptr, &error), allowed, error, "saving");
      };
      everything();
      limit.rlim_cur = before;
      must(setrlimit(RLIMIT_AS, &limit) == 0, "the limit as before");
      if (session && done < tokens.size())
        must_be(kv_prefill_tokens(session, tokens.data() + done, tokens.size() - done, nullptr,
                                  nullptr, &error),
                {KV_OK}, error, "going on");
      kv_session_close(session);
      kv_session_close(loaded);
      kv_close(model);
      model = nullptr, session = loaded = nullptr, done = 0;
      everything();
      must(session && loaded && done == tokens.size() && tokens_of(other) >= tokens.size(),
           "everything with memory");
      kv_session_close(session);
      kv_session_close(loaded);
      kv_close(model);
    });
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      CHECK(entry.path().extension() != ".tmp");
  }
}
#endif
