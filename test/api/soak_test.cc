// Models and sessions opened and closed many times in one process: descriptors, threads and memory
// do not grow.
#include <unistd.h>

#include <fstream>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

std::size_t threads() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

uint64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  uint64_t size = 0, resident = 0;
  in >> size >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// Of models and cache files; an allocator's own come and go.
std::size_t mapped_files() {
  std::ifstream in("/proc/self/maps");
  std::size_t lines = 0;
  for (std::string line; std::getline(in, line);)
    lines += line.find(".gguf") != std::string::npos || line.find(".kv") != std::string::npos;
  return lines;
}

void live(const std::string& path) {
  const Model model = open_model(tiny_path);
  const Session session = open_session(model.get());
  read_tokens(session.get(), some_tokens(400));
  const Session other = fork(session.get());
  CHECK(ask(other.get(), "a question", 4, KV_KEEP_TURN).status == KV_OK);
  save(other.get(), path);
  const Session loaded = load(model.get(), path);
  CHECK(ask(loaded.get(), "another", 4).status == KV_OK);
  const Session of_loaded = fork(loaded.get());
  CHECK(kv_session_rewind(of_loaded.get(), 150, nullptr) == KV_OK);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t slack = uint64_t{512} << 20;  // freed blocks are kept apart for a while
constexpr int lives = 40;
#else
constexpr uint64_t slack = uint64_t{8} << 20;
constexpr int lives = 200;
#endif

}  // namespace

TEST_CASE("many lives leave no thread, descriptor, mapping or memory behind" *
          doctest::test_suite("slow")) {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  for (int i = 0; i < 20; ++i) live(path);
  const std::size_t threads_before = threads(), descriptors_before = open_descriptors(),
                    mapped_before = mapped_files();
  const uint64_t memory_before = resident_bytes();
  for (int i = 0; i < lives; ++i) live(path);
  CHECK(threads() == threads_before);
  CHECK(open_descriptors() == descriptors_before);
  CHECK(mapped_files() == mapped_before);
  CHECK(resident_bytes() <= memory_before + slack);
  CHECK(folder.entries() == 1);
}
