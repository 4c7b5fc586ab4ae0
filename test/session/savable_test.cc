// A save refuses sections that a load would refuse, of every kind, and the existing file stays.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "session/saved_store.h"
#include "temp_folder.h"

using namespace kvasir;
using format::SectionKind;

namespace {

constexpr uint32_t tokens = 40;

// A store of one head with these first keys, all of it in its window.
KvStore store_of(float first_key, ThreadPool* pool) {
  const StoreShape shape{1, 1, PageShape::of(32)};
  KvStore store(shape, 1000);
  const std::vector<float> k(std::size_t{tokens} * 32, 1.0f);
  std::vector<float> odd = k;
  odd[0] = first_key;
  REQUIRE(store.prepare(tokens, KvStore::Overlap::nothing, pool).ok());
  store.write(0, tokens, odd.data(), k.data());
  store.observe(0, tokens, k.data(), 1);
  store.commit(tokens, cpu_kernels(), pool);
  return store;
}

SavedSequence state_of() {
  SavedSequence state;
  state.turn = 1;
  state.window_tokens = 1000;
  return state;
}

template <class T>
std::vector<std::byte> bytes_of(std::initializer_list<T> values) {
  std::vector<std::byte> out(values.size() * sizeof(T));
  std::memcpy(out.data(), std::data(values), out.size());
  return out;
}

// 16 bytes of section `observed` and a query.
std::vector<std::byte> observed_of(uint64_t end, uint64_t pages, float query) {
  std::vector<std::byte> out = bytes_of<uint64_t>({end, pages});
  const std::vector<std::byte> value = bytes_of<float>({query});
  out.insert(out.end(), value.begin(), value.end());
  return out;
}

}  // namespace

TEST_CASE("nothing is saved that cannot be loaded, and the file that is there stays") {
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  format::Identity identity;
  identity.vocabulary = 100;
  const KvStore good = store_of(1, pool.get());
  const auto save = [&](const KvStore& store, const SavedSequence& state, SectionKind kind,
                        const std::vector<std::byte>& bytes) {
    const SavedPart part{kind, bytes.data(), bytes.size()};
    return save_store(path, identity, {store}, state, {&part, 1}, nullptr, {});
  };
  const std::vector<std::byte> some_tokens = bytes_of<int32_t>({0, 1, 99});
  REQUIRE(save(good, state_of(), SectionKind::tokens, some_tokens).ok());
  const std::vector<uint8_t> before = read_file(path);
  const auto refused = [&](const Status& s, Code code, const char* section) {
    CHECK(s.code() == code);
    CHECK(std::string(s.message()).find(section) != std::string::npos);
    CHECK(read_file(path) == before);
    CHECK(folder.entries() == 1);
  };
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  for (const float wrong : {nan, infinity, -infinity}) {
    refused(save(store_of(wrong, pool.get()), state_of(), SectionKind::tokens, some_tokens),
            Code::corrupt, "window");
    for (const SectionKind kind : {SectionKind::logits, SectionKind::errors, SectionKind::queries})
      refused(save(good, state_of(), kind, bytes_of<float>({1, wrong, 2})), Code::corrupt,
              format::name_of(kind));
    refused(save(good, state_of(), SectionKind::observed, observed_of(tokens, 0, wrong)),
            Code::corrupt, "observed");
  }
  for (const int32_t wrong : {-1, 100, INT32_MAX})
    refused(save(good, state_of(), SectionKind::tokens, bytes_of<int32_t>({1, wrong})),
            Code::corrupt, "tokens");
  for (const SectionKind kind : {SectionKind::sparse, SectionKind::read})
    refused(save(good, state_of(), kind, bytes_of<uint64_t>({tokens + 1})), Code::corrupt,
            format::name_of(kind));
  refused(save(good, state_of(), SectionKind::observed, observed_of(tokens + 1, 0, 1)),
          Code::corrupt, "observed");
  refused(save(good, state_of(), SectionKind::observed, observed_of(tokens, 1, 1)), Code::corrupt,
          "observed");
  for (const std::vector<std::byte>& wrong :
       {bytes_of<uint64_t>({0, 2, 1}), bytes_of<uint64_t>({1, 2, 1, 2}),
        bytes_of<uint64_t>({2, 2, 1, 2}), bytes_of<uint64_t>({tokens, 2}),
        bytes_of<uint64_t>({0, UINT64_MAX, 1, 2}), bytes_of<uint64_t>({0, uint64_t{1} << 32}),
        std::vector<std::byte>((max_spelling_pairs + 1) * 16)})
    refused(save(good, state_of(), SectionKind::spelling, wrong), Code::corrupt, "spelling");

  SavedSequence state = state_of();
  state.turn = 4;
  refused(save(good, state, SectionKind::tokens, some_tokens), Code::internal, "turn");
  state = state_of(), state.document_tokens = tokens + 1;
  refused(save(good, state, SectionKind::tokens, some_tokens), Code::internal, "document tokens");
  state = state_of(), state.probed_pages = 1;
  refused(save(good, state, SectionKind::tokens, some_tokens), Code::internal, "measured pages");
}

TEST_CASE("scores of keys and queries that are as large as is allowed can be saved and loaded") {
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  const StoreShape shape{1, 1, PageShape::of(32)};
  KvStore store(shape, 1000);
  const std::vector<float> large(std::size_t{tokens} * 32, 9e29f);
  REQUIRE(store.prepare(tokens, KvStore::Overlap::nothing, pool.get()).ok());
  store.write(0, tokens, large.data(), large.data());
  store.observe(0, tokens, large.data(), 1);
  store.commit(tokens, cpu_kernels(), pool.get());
  CHECK(store.representatives().file_bytes() > 0);
  TempFolder folder;
  CHECK(save_store(folder.file("a.kv"), {}, {store}, state_of(), {}, nullptr, {}).ok());
}
