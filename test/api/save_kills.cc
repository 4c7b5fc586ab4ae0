// Processes killed at random moments of a save, of packing and of unpacking. The path then has the
// document from before or the new one, whole. The next process that opens the folder as a library
// removes all leftovers. The argument is the number of kills.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "fault_count.h"
#include "kvasir.h"
#include "temp_folder.h"

namespace {

constexpr uint64_t versions = 4;
constexpr std::size_t tokens_of_first = 300, tokens_more = 250;
enum Work : int { save, pack, unpack, works };

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::exit(1);
}

void require_ok(kv_status status, const kv_error& error) {
  if (status != KV_OK) std::fprintf(stderr, "%s\n", error.message);
  require(status == KV_OK, "a call that nothing keeps from succeeding");
}

// What a child is about to write and what it has written: number n is version n % versions.
struct Reply {
  std::atomic<uint64_t> started, finished;
};

class Documents {
 public:
  explicit Documents(kv_model* model) {
    kv_session_options o;
    kv_init(&o, sizeof o);
    o.threads = 1;  // children are copies of this process, which a pool's threads would not be in
    for (uint64_t v = 0; v < versions; ++v) {
      std::vector<int32_t> tokens;
      for (std::size_t i = 0; i < tokens_of_first + v * tokens_more; ++i)
        tokens.push_back(static_cast<int32_t>(3 + (i * i + v) % 250));
      kv_error error{};
      require_ok(kv_session_open(model, &o, &sessions_[v], &error), error);
      require_ok(
          kv_prefill_tokens(sessions_[v], tokens.data(), tokens.size(), nullptr, nullptr, &error),
          error);
      require_ok(kv_save(sessions_[v], saved(v).c_str(), nullptr, &error), error);
      require_ok(kv_pack(saved(v).c_str(), packed(v).c_str(), 0, nullptr, &error), error);
    }
  }
  ~Documents() {
    for (kv_session* session : sessions_) kv_session_close(session);
  }
  Documents(const Documents&) = delete;
  Documents& operator=(const Documents&) = delete;

  kv_status write(Work work, uint64_t v, const std::string& path, kv_error* error) const {
    if (work == save) return kv_save(sessions_[v], path.c_str(), nullptr, error);
    if (work == pack) return kv_pack(saved(v).c_str(), path.c_str(), 0, nullptr, error);
    return kv_unpack(packed(v).c_str(), path.c_str(), nullptr, error);
  }
  // Which version the file is, to the byte; `versions` when it is none.
  uint64_t version_of(Work work, const std::string& path) const {
    const std::vector<uint8_t> bytes = read_file(path);
    for (uint64_t v = 0; v < versions; ++v)
      if (bytes == read_file(work == pack ? packed(v) : saved(v))) return v;
    return versions;
  }

 private:
  std::string saved(uint64_t v) const { return folder_.file("v" + std::to_string(v) + ".kv"); }
  std::string packed(uint64_t v) const { return saved(v) + "z"; }

  TempFolder folder_;
  kv_session* sessions_[versions] = {};
};

[[noreturn]] void write_for_ever(const Documents& documents, Work work, const std::string& path,
                                 Reply* reply) {
  for (uint64_t n = reply->finished + 1;; ++n) {
    reply->started = n;
    if (documents.write(work, n % versions, path, nullptr) != KV_OK) _exit(1);
    reply->finished = n;
  }
}

// Lets a child write for so long. True when it was killed inside a call.
bool kill_one(const Documents& documents, Work work, const std::string& path, Reply* reply,
              useconds_t time) {
  const uint64_t before = reply->finished;
  const pid_t child = fork();
  require(child >= 0, "a process");
  if (child == 0) write_for_ever(documents, work, path, reply);
  while (reply->started == before && waitpid(child, nullptr, WNOHANG) == 0) usleep(50);
  usleep(time);
  kill(child, SIGKILL);
  count_faults("process killed");
  int status = 0;
  require(waitpid(child, &status, 0) == child && WIFSIGNALED(status),
          "a child writes until it is killed");
  const uint64_t started = reply->started, finished = reply->finished,
                 version = documents.version_of(work, path);
  require(version == finished % versions || version == started % versions,
          "the path has the document before or the one that was being written, whole");
  reply->started = reply->finished = version == started % versions ? started : finished;
  return started != finished;
}

std::size_t kill_many(const Documents& documents, Work work, int kills, Reply* reply,
                      std::mt19937* random) {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  kv_error error{};
  reply->started = reply->finished = 0;
  const auto begin = std::chrono::steady_clock::now();
  require_ok(documents.write(work, 0, path, &error), error);
  const auto whole = std::chrono::duration_cast<std::chrono::microseconds>(
                         std::chrono::steady_clock::now() - begin)
                         .count();
  std::size_t inside = 0;
  for (int i = 0; i < kills; ++i)
    inside += kill_one(documents, work, path, reply,
                       static_cast<useconds_t>((*random)() % static_cast<uint64_t>(3 * whole + 1)));
  kv_library* library = nullptr;
  require_ok(kv_library_open(folder.path().c_str(), nullptr, &library, &error), error);
  kv_library_close(library);
  require(folder.entries() <= 2, "the document and the library's lock are all that is left");
  return inside;
}

}  // namespace

int main(int argc, char** argv) {
  const int kills = argc == 2 ? std::atoi(argv[1]) : 0;
  require(kills > 0, "an argument, the number of kills");
  kv_model* model = nullptr;
  kv_error error{};
  require_ok(kv_open(FIXTURES "/models/llama-q8_0.gguf", nullptr, nullptr, &model, &error), error);
  void* const shared =
      mmap(nullptr, sizeof(Reply), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(shared != MAP_FAILED, "memory that children share");
  std::size_t inside = 0;
  {
    const Documents documents(model);
    std::mt19937 random(7);
    for (int work = save; work < works; ++work)
      inside +=
          kill_many(documents, static_cast<Work>(work), work == save ? kills : (kills + 3) / 4,
                    static_cast<Reply*>(shared), &random);
  }
  kv_close(model);
  std::printf("%zu kills inside a call\n", inside);
  require(inside > 0, "a kill inside a call");
  return 0;
}
