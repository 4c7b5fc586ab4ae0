// Answers over a mapped cache file with a small page cache: the same bits.
#include <doctest/doctest.h>

#include <fstream>
#include <thread>

#include "cachefile/cache_file.h"
#include "helpers.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

SessionOptions quest(uint64_t budget, bool share) {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = "quest";
  o.select.budget_tokens = budget;
  o.select.dense_layers = 0;
  o.select.share_heads = share;
  return o;
}

const std::vector<Token>& mapped_text() {
  static const auto tokens = book_tokens(5000);
  return tokens;
}

}  // namespace

TEST_CASE("answers do not depend on how many chosen pages of a mapped file are kept") {
  TempFolder folder;
  auto in_memory = open_session(mini_model(), quest(512, true));
  read(in_memory.get(), mapped_text());
  REQUIRE(in_memory->save(folder.file("a.kv"), nullptr, {}).ok());
  for (bool share : {true, false}) {
    std::unique_ptr<Session> origin;
    REQUIRE(in_memory->fork(&origin).ok());
    REQUIRE(origin->set_select(quest(512, share).select).ok());
    const auto tokens = continue_with(origin.get(), 12);
    const auto logits = logits_after(origin.get(), tokens.back());
    for (uint64_t limit : {PageCache::by_itself, uint64_t{0}, uint64_t{100} * page_bytes}) {
      CAPTURE(limit);
      auto mapped = load_session(folder.file("a.kv"), quest(512, share));
      mapped->store().pages().set_cache_limit(limit);
      CHECK(continue_with(mapped.get(), 12) == tokens);
      const PageCache::Counts counts = mapped->store().pages().cache_counts();
      CHECK(counts.read > 0);
      CHECK(counts.kept <= limit / page_bytes);
      if (limit == PageCache::by_itself) CHECK(counts.found > counts.read);
      CHECK(logits_after(mapped.get(), tokens.back()) == logits);
    }
  }
}

TEST_CASE("forks of a loaded session answer at the same time from one cache") {
  TempFolder folder;
  auto in_memory = open_session(mini_model(), quest(512, true));
  read(in_memory.get(), mapped_text());
  REQUIRE(in_memory->save(folder.file("a.kv"), nullptr, {}).ok());
  const auto expected = continue_with(in_memory.get(), 10);
  auto mapped = load_session(folder.file("a.kv"), quest(512, true));
  mapped->store().pages().set_cache_limit(150 * page_bytes);
  std::vector<std::unique_ptr<Session>> forks(2);
  for (auto& fork : forks) REQUIRE(mapped->fork(&fork).ok());
  std::vector<std::vector<Token>> got(forks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < forks.size(); ++i)
    threads.emplace_back([&, i] { got[i] = continue_with(forks[i].get(), 10); });
  for (std::thread& t : threads) t.join();
  for (const auto& tokens : got) CHECK(tokens == expected);
  CHECK(mapped->store().pages().cache_counts().kept == 150);
}

TEST_CASE(
    "the tokens of a question read together what they choose, but where each one's own choice is "
    "looked at") {
  TempFolder folder;
  SessionOptions o = quest(256, true);
  o.select.strategy = "bounded";
  auto in_memory = open_session(mini_model(), o);
  read(in_memory.get(), mapped_text());
  REQUIRE(in_memory->prepare(nullptr, {}).ok());
  REQUIRE(in_memory->save(folder.file("a.kv"), nullptr, {}).ok());
  GenerateOptions options;
  options.max_tokens = 1;
  const auto pages_read = [&](bool certify) {
    auto mapped = load_session(folder.file("a.kv"), o);
    SelectOptions select = o.select;
    select.certify = certify;
    REQUIRE(mapped->set_select(select).ok());
    (void)ask(mapped.get(),
              "Who is the man that Mr. Holmes met at the opera in the evening, and what did he say "
              "of the photograph?",
              options);
    return mapped->store().pages().cache_counts().read +
           mapped->store().pages().cache_counts().found;
  };
  const uint64_t together = pages_read(false), alone = pages_read(true);
  CHECK(together > 0);
  CHECK(together * 5 < alone);
}

// The scales of a layer are read for all of a question's heads at once; of three extents, by one
// task.
TEST_CASE(
    "a question over a mapped file is that over memory, on any number of threads, and damaged "
    "scales are an error until they are whole again") {
  TempFolder folder;
  SessionOptions o = quest(256, true);
  o.select.strategy = "bounded";
  auto in_memory = open_session(mini_model(), o);
  read(in_memory.get(), mapped_text());
  REQUIRE(in_memory->prepare(nullptr, {}).ok());
  const std::string path = folder.file("a.kv");
  REQUIRE(in_memory->save(path, nullptr, {}).ok());
  GenerateOptions options;
  options.max_tokens = 8;
  const std::string question = "Who is the man that Mr. Holmes met at the opera in the evening?";
  const auto answer = ask(in_memory.get(), question, options);
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  const CacheFile::Section scales = *file->find(format::SectionKind::scales);
  const auto flip = [&] {  // a bit of every block
    std::fstream at(path, std::ios::in | std::ios::out | std::ios::binary);
    for (uint64_t offset = scales.offset; offset < scales.offset + scales.bytes;
         offset += format::block_bytes) {
      at.seekg(static_cast<std::streamoff>(offset));
      const int byte = at.get();
      at.seekp(static_cast<std::streamoff>(offset));
      at.put(static_cast<char>(byte ^ 4));
    }
  };
  for (uint32_t threads : {1u, 2u, 5u}) {
    o.threads = threads;
    auto mapped = load_session(path, o);
    CHECK(ask(mapped.get(), question, options) == answer);
    CHECK(ask(mapped.get(), question, options) == answer);
    auto again = load_session(path, o);
    flip();
    Answer unused;
    CHECK(again->generate(question, options, {}, &unused).code() == Code::corrupt);
    flip();
    CHECK(ask(again.get(), question, options) == answer);
  }
}
