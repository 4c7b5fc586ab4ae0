// A memory budget of the store without a model: pages that do not fit are in files, and nothing
// else changes.
#include <atomic>
#include <cerrno>
#include <cstring>

#include "cache_helpers.h"
#include "failing_allocations.h"
#include "os/os.h"
#include "resident.h"
#include "store/kv_store.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

// tokens; slabs are full every 512, read() makes steps of so many
constexpr uint32_t long_text = 3000, max_step = 64;

const Text& text() {
  static const Text its(small, long_text + 600);
  return its;
}

uint64_t min_bytes(uint64_t tokens, uint32_t step, bool representatives = false) {
  kvasir::KvStore store({small.layers, small.kv_heads, kvasir::PageShape::of(small.head_dim)}, 64);
  if (!representatives) store.drop_representatives();
  REQUIRE(store.set_budget({0, "", step}, 0).ok());
  return store.min_bytes(tokens);
}

uint64_t tight_budget(bool representatives = false) {
  return min_bytes(long_text + 600, max_step, representatives) + (96 << 10);
}

kv_cache_options within(const char* strategy, uint64_t memory, const std::string& folder) {
  kv_cache_options o = options_of(strategy, std::strcmp(strategy, "full") == 0 ? 0 : 256);
  o.memory_limit = memory;
  o.spill_directory = folder.c_str();
  return o;
}

// What a refusal says that it takes.
uint64_t needed(const kv_error& refused) {
  const std::string message = refused.message, take = "alone take ";
  REQUIRE(message.find("memory_limit") != std::string::npos);
  REQUIRE(message.find(take) != std::string::npos);
  return std::stoull(message.substr(message.find(take) + take.size()));
}

Cache load(const std::string& path, const kv_cache_options& options) {
  kv_cache* cache = nullptr;
  REQUIRE_OK(kv_cache_load(&small, path.c_str(), &options, nullptr, &cache, error));
  return Cache(cache);
}

Cache fork(kv_cache* from) {
  kv_cache* cache = nullptr;
  REQUIRE_OK(kv_cache_fork(from, nullptr, &cache, error));
  return Cache(cache);
}

// A chunk, which is exact, and steps of one token, by the strategy.
std::vector<std::vector<Floats>> go_on(kv_cache* cache, std::size_t at) {
  std::vector<std::vector<Floats>> out{step(cache, text(), at, 40, nullptr, true)};
  for (std::size_t i = 0; i < 12; ++i)
    out.push_back(step(cache, text(), at + 40 + i, 1, nullptr, true));
  return out;
}

std::atomic<int> writes_left;
int full_disk(const char* operation, const char* path) {
  if (std::strcmp(operation, "write") != 0 || !std::strstr(path, "kvasir-spill")) return 0;
  return writes_left.fetch_sub(1) > 0 ? 0 : ENOSPC;
}

int unreadable(const char* operation, const char* path) {
  return std::strcmp(operation, "read") == 0 && std::strstr(path, "kvasir-spill") ? EIO : 0;
}

}  // namespace

TEST_CASE(
    "a cache within a memory budget attends as one without does, saved, loaded, copied and cut "
    "back too") {
  TempFolder folder;
  for (const char* strategy : {"full", "quest", "bounded", "flat", "infllm", "filter-layers"}) {
    CAPTURE(std::string(strategy));
    const uint64_t budget = tight_budget(std::strcmp(strategy, "infllm") == 0);
    const Cache plain = open_cache(small, within(strategy, 0, folder.path())),
                cache = open_cache(small, within(strategy, budget, folder.path()));
    for (std::size_t at = 0; at < long_text; at += max_step) {
      const auto n = static_cast<uint32_t>(std::min<std::size_t>(max_step, long_text - at));
      const auto wanted = step(plain.get(), text(), at, n, nullptr, true),
                 got = step(cache.get(), text(), at, n, nullptr, true);
      REQUIRE(got == wanted);
      REQUIRE(stats_of(cache.get()).private_bytes <= budget);
    }
    CHECK(stats_of(cache.get()).memory_limit == budget);
    CHECK(stats_of(cache.get()).spilled_bytes >= 4 * 256 << 10);
    CHECK(stats_of(plain.get()).spilled_bytes == 0);
    CHECK(stats_of(plain.get()).private_bytes > budget);
    // the file has no name where there are files without one
    CHECK(folder.entries() == (on_windows ? 1 : 0));
    CHECK(resident_of(folder.path()) < 64 << 10);
    const Cache copy = fork(cache.get());
    const auto wanted = go_on(fork(plain.get()).get(), long_text);
    CHECK(go_on(copy.get(), long_text) == wanted);
    CHECK(stats_of(copy.get()).private_bytes <= budget);
    REQUIRE_OK(kv_cache_save(plain.get(), folder.file("plain.kv").c_str(), nullptr, error));
    REQUIRE_OK(kv_cache_save(cache.get(), folder.file("spilled.kv").c_str(), nullptr, error));
    CHECK(read_file(folder.file("spilled.kv")) == read_file(folder.file("plain.kv")));
    const Cache mapped = load(folder.file("spilled.kv"), within(strategy, budget, folder.path()));
    CHECK(go_on(mapped.get(), long_text) == wanted);
    CHECK(stats_of(mapped.get()).private_bytes <= budget);
    for (kv_cache* c : {plain.get(), cache.get()}) {
      REQUIRE_OK(kv_cache_truncate(c, 2000, error));
      read(c, text(), 2000, 2900, true);
    }
    CHECK(go_on(cache.get(), 2900) == go_on(plain.get(), 2900));
    CHECK(stats_of(cache.get()).private_bytes <= budget);
    std::filesystem::remove(folder.file("plain.kv"));
    std::filesystem::remove(folder.file("spilled.kv"));
  }
}

TEST_CASE("a cache's budget of the least that is asked for is kept, in steps of any size") {
  TempFolder folder;
  for (uint32_t step_tokens : {1u, 100u, 1500u}) {
    CAPTURE(step_tokens);
    const kv_cache_options o = within("bounded", min_bytes(long_text, step_tokens), folder.path());
    const Cache cache = open_cache(small, o),
                less = open_cache(small, within("bounded", o.memory_limit - 1, folder.path()));
    kv_error refused{};
    // the first one counts for good
    for (uint32_t at = 0, n = step_tokens; at < long_text; at += n, n = std::min(n, 50u)) {
      step(cache.get(), text(), at, n, nullptr, true);
      REQUIRE(stats_of(cache.get()).private_bytes <= o.memory_limit);
      for (uint32_t l = 0; l < small.layers && refused.status == KV_OK; ++l)
        (void)kv_cache_update(less.get(), l, KV_F32, text().key(l, at), text().value(l, at),
                              text().query(l, at), n, &refused);
    }
    CHECK(refused.status == KV_LIMIT);
    CHECK(needed(refused) == o.memory_limit);
  }
}

TEST_CASE(
    "a cache's budget that cannot be kept is refused, and what was complete can still be "
    "attended") {
  TempFolder folder;
  const std::string path = folder.path(), nowhere = folder.file("nowhere"),
                    exact_path = folder.file("exact.kv"), long_path = folder.file("long.kv");
  kv_cache* none = nullptr;
  kv_error refused{};
  kv_cache_options o = within("full", 1000, path);
  CHECK(kv_cache_open(&small, &o, &none, &refused) == KV_LIMIT);
  CHECK(needed(refused) == min_bytes(0, 1));
  o.memory_limit = needed(refused);
  open_cache(small, o);

  o.memory_limit = min_bytes(200, 64);
  const Cache cache = open_cache(small, o);
  read(cache.get(), text(), 0, 136);
  const auto last = step(cache.get(), text(), 136, 60);
  const auto update = [&](uint32_t n) {
    return kv_cache_update(cache.get(), 0, KV_F32, text().key(0, 196), text().value(0, 196),
                           nullptr, n, &refused);
  };
  CHECK(update(2000) == KV_LIMIT);
  CHECK(needed(refused) == min_bytes(2196, 2000));
  Floats again(60 * text().row());
  REQUIRE_OK(kv_cache_attention(cache.get(), 1, KV_F32, text().query(1, 136), again.data(), 60,
                                nullptr, nullptr, error));
  CHECK(again == last[1]);
  step(cache.get(), text(), 196, 4);  // a large step that was refused does not count
  CHECK(stats_of(cache.get()).tokens == 200);

  o.memory_limit = 100 << 20;
  o.spill_directory = nowhere.c_str();
  CHECK(kv_cache_open(&small, &o, &none, nullptr) == KV_NOT_FOUND);
  o.spill_directory = path.c_str();
  o.precision = KV_PRECISION_F32;
  CHECK(kv_cache_open(&small, &o, &none, nullptr) == KV_BAD_ARGUMENT);
  o.memory_limit = 0;
  const Cache exact = open_cache(small, o);
  step(exact.get(), text(), 0, 200);
  REQUIRE_OK(kv_cache_save(exact.get(), exact_path.c_str(), nullptr, error));
  o = within("full", 100 << 20, path);
  CHECK(kv_cache_load(&small, exact_path.c_str(), &o, nullptr, &none, &refused) == KV_BAD_ARGUMENT);
  CHECK(std::string(refused.message).find("exact.kv") != std::string::npos);
  const Cache plain = open_cache(small, within("full", 0, path));
  read(plain.get(), text(), 0, long_text);
  REQUIRE_OK(kv_cache_save(plain.get(), long_path.c_str(), nullptr, error));
  o.memory_limit = min_bytes(1000, 1);
  CHECK(kv_cache_load(&small, long_path.c_str(), &o, nullptr, &none, &refused) == KV_LIMIT);
  CHECK(needed(refused) >= min_bytes(long_text, 1));
  CHECK(!none);
}

TEST_CASE(
    "a disk that fails is an error, and a cache that spills to it goes on when it is good again") {
  TempFolder folder;
  const Cache plain = open_cache(small, within("quest", 0, folder.path()));
  read(plain.get(), text(), 0, long_text);
  const auto wanted = go_on(plain.get(), long_text);
  for (int writes : {0, 1, 2}) {
    CAPTURE(writes);
    const Cache cache = open_cache(small, within("quest", tight_budget(), folder.path()));
    const auto update = [&](std::size_t at, uint32_t n, kv_error* error) {
      return kv_cache_update(cache.get(), 0, KV_F32, text().key(0, at), text().value(0, at),
                             nullptr, n, error);
    };
    writes_left = writes;
    bool failed = false;
    for (std::size_t at = 0; at < long_text;) {
      const auto n = static_cast<uint32_t>(std::min<std::size_t>(max_step, long_text - at));
      kv_error reply{};
      kvasir::os::fault = full_disk;
      const kv_status status = update(at, n, &reply);
      kvasir::os::fault = nullptr;
      CHECK((status == KV_OK || status == KV_NO_SPACE));
      if (status == KV_NO_SPACE) {
        CHECK(std::string(reply.message).find(folder.path()) != std::string::npos);
        CHECK(stats_of(cache.get()).tokens == at);
        CHECK(stats_of(cache.get()).step_tokens == 0);
        failed = true;
        writes_left = 1 << 20;
        continue;
      }
      REQUIRE_OK(kv_cache_update(cache.get(), 1, KV_F32, text().key(1, at), text().value(1, at),
                                 nullptr, n, error));
      at += n;
    }
    CHECK(failed);
    CHECK(go_on(cache.get(), long_text) == wanted);
  }

  const Cache cache = open_cache(small, within("quest", tight_budget(), folder.path()));
  read(cache.get(), text(), 0, long_text);
  step(cache.get(), text(), long_text, 40);
  for (uint32_t l = 0; l < small.layers; ++l)
    REQUIRE_OK(kv_cache_update(cache.get(), l, KV_F32, text().key(l, long_text + 40),
                               text().value(l, long_text + 40), nullptr, 1, error));
  for (uint32_t l = 0; l < small.layers; ++l) {
    Floats out(text().row(), 7.0f);
    kvasir::os::fault = unreadable;
    const kv_status status =
        kv_cache_attention(cache.get(), l, KV_F32, text().query(l, long_text + 40), out.data(), 1,
                           nullptr, nullptr, nullptr);
    kvasir::os::fault = nullptr;
    CHECK(status == KV_IO);
    CHECK(out == Floats(text().row(), 7.0f));
    REQUIRE_OK(kv_cache_attention(cache.get(), l, KV_F32, text().query(l, long_text + 40),
                                  out.data(), 1, nullptr, nullptr, error));
    CHECK(out == wanted[1][l]);
  }
}

TEST_CASE("a cache that finds no memory where it would spill loses nothing") {
  TempFolder folder;
  constexpr std::size_t length = 1400;
  const uint64_t budget = min_bytes(length + 100, 50) + (32 << 10);
  const Cache plain = open_cache(small, within("quest", 0, folder.path())),
              cache = open_cache(small, within("quest", budget, folder.path()));
  long failures = 0;
  for (std::size_t at = 0; at < length; at += 50) {
    step(plain.get(), text(), at, 50);
    for (uint32_t l = 0; l < small.layers; ++l) {
      kv_status status = KV_NO_MEMORY;
      for (long n = 0; status != KV_OK; ++n) {
        const FailingAllocations failing(n, true);
        status = kv_cache_update(cache.get(), l, KV_F32, text().key(l, at), text().value(l, at),
                                 nullptr, 50, nullptr);
        REQUIRE((status == KV_OK || (failing.reached() && status == KV_NO_MEMORY)));
        failures += status != KV_OK;
      }
    }
  }
  CHECK(failures > 10);
  CHECK(stats_of(cache.get()).spilled_bytes > 0);
  CHECK(stats_of(cache.get()).private_bytes <= budget);
  CHECK(go_on(cache.get(), length) == go_on(plain.get(), length));
}
