// Hashes of a sequence's tokens, in memory and in a file that is read without being mapped.
#include <doctest/doctest.h>

#include <cstring>
#include <numeric>

#include "cache_samples.h"
#include "cachefile/cache_peek.h"
#include "cachefile/token_chain.h"
#include "replacing.h"
#include "temp_folder.h"

using namespace kvasir;

namespace {

std::vector<int32_t> numbers(std::size_t n) {
  std::vector<int32_t> out(n);
  std::iota(out.begin(), out.end(), 5);
  return out;
}

template <class T>
samples::Part part(format::SectionKind kind, const std::vector<T>& values) {
  samples::Part p{kind, 1, std::vector<uint8_t>(values.size() * sizeof(T))};
  if (!values.empty()) std::memcpy(p.bytes.data(), values.data(), p.bytes.size());
  return p;
}

}  // namespace

TEST_CASE(
    "a chain finds how many whole blocks two sequences have in common, and whether one is all of "
    "the other's beginning") {
  const auto tokens = numbers(1000);
  const TokenChain text = TokenChain::of(tokens, 7);
  CHECK(text.hashes.size() == 4);
  const auto common = [&](std::vector<int32_t> other, uint64_t key = 7) {
    return text.common(tokens, TokenChain::of(other, key), other.size());
  };
  for (std::size_t n : {1u, 255u, 256u, 257u, 511u, 512u, 1000u}) CHECK(common(numbers(n)) == n);
  CHECK(common(numbers(1001)) == 768);
  CHECK(common(numbers(2000)) == 768);
  CHECK(common(numbers(1000), 8) == 0);
  CHECK(common({}) == 0);
  for (std::size_t at : {0u, 255u, 256u, 700u, 767u, 768u, 999u}) {
    auto other = numbers(1000);
    ++other[at];
    CHECK(common(other) == at / 256 * 256);
  }
  auto other = numbers(300);
  ++other[299];
  CHECK(common(other) == 256);
  other = numbers(1000);
  std::swap_ranges(other.begin(), other.begin() + 256, other.begin() + 256);
  CHECK(common(other) == 0);  // blocks in another order
}

TEST_CASE("a file is looked into without being mapped, and nothing damaged is believed" *
          doctest::skip(!replaces_files_in_use())) {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const auto tokens = numbers(600);
  const TokenChain chain = TokenChain::of(tokens, 9);
  std::vector<uint64_t> words{chain.key};
  words.insert(words.end(), chain.hashes.begin(), chain.hashes.end());
  auto parts = samples::parts(3);
  parts.push_back(part(format::SectionKind::tokens, tokens));
  parts.push_back(part(format::SectionKind::chain, words));
  REQUIRE(samples::save(path, parts, tokens.size()).ok());
  uint64_t count = 0;
  const auto look = [&](TokenChain* hashes, Array<int32_t>* its) {
    CachePeek peek;
    if (Status s = CachePeek::open(path, &peek); !s.ok()) return s.code();
    if (Status s = peek.read_tokens(UINT64_MAX, its); !s.ok()) return s.code();
    return peek.read_chain(tokens.size(), hashes, &count).code();
  };
  TokenChain found;
  Array<int32_t> its;
  CHECK(look(&found, &its) == Code::ok);
  CHECK(found.key == 9);
  CHECK(found.hashes == chain.hashes);
  CHECK(std::equal(its.begin(), its.end(), tokens.begin(), tokens.end()));

  const auto whole = read_file(path);
  CachePeek peek;
  REQUIRE(CachePeek::open(path, &peek).ok());
  // no more than a text is compared with
  for (const std::size_t text :
       {std::size_t{0}, std::size_t{255}, std::size_t{256}, std::size_t{599}}) {
    TokenChain first;
    REQUIRE(peek.read_chain(text, &first, &count).ok());
    CHECK(count == tokens.size());
    REQUIRE(first.hashes.size() == text / TokenChain::block + 1);
    CHECK(std::equal(first.hashes.begin(), first.hashes.end(), chain.hashes.begin()));
    Array<int32_t> begin;
    REQUIRE(peek.read_tokens(text, &begin).ok());
    REQUIRE(begin.size() == text);
    CHECK(std::equal(begin.begin(), begin.end(), tokens.begin()));
  }
  for (std::size_t at = 0; at < whole.size(); at += at < 4096 ? 61 : 1777) {
    auto damaged = whole;
    damaged[at] ^= 1;
    write_file(path, damaged);
    TokenChain hashes;
    Array<int32_t> seen;
    const Code code = look(&hashes, &seen);
    CAPTURE(at);
    CHECK((code == Code::ok || code == Code::corrupt || code == Code::not_a_cache ||
           code == Code::version));
    if (code == Code::ok)
      CHECK((hashes.hashes == chain.hashes &&
             std::equal(seen.begin(), seen.end(), tokens.begin(), tokens.end())));
  }
  words.pop_back();  // intact, and of another number of tokens
  parts.back() = part(format::SectionKind::chain, words);
  REQUIRE(samples::save(path, parts, tokens.size()).ok());
  CHECK(look(&found, &its) == Code::corrupt);
  // what follows was made
  parts.push_back(part(format::SectionKind::read, std::vector<uint64_t>{512}));
  REQUIRE(samples::save(path, parts, tokens.size()).ok());
  CHECK(look(&found, &its) == Code::ok);
  CHECK(count == 512);
  parts.back() = part(format::SectionKind::read, std::vector<uint64_t>{tokens.size() + 1});
  REQUIRE(samples::save(path, parts, tokens.size()).ok());
  CHECK(look(&found, &its) == Code::corrupt);
  parts.pop_back();
  parts.pop_back();
  REQUIRE(samples::save(path, parts, tokens.size()).ok());
  CHECK(look(&found, &its) == Code::version);
}
