// Drafts by lookup: the longest match, of several the newest, whatever the text.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "session/lookup.h"

using namespace kvasir;

namespace {

// As find_newest(), place by place.
LookupMatch reference(std::vector<Token> tokens, Token next) {
  tokens.push_back(next);
  LookupMatch best;
  const std::size_t end = tokens.size() - 1;
  for (std::size_t i = end; i-- > 0;) {
    uint32_t length = 0;
    while (length <= i && length < LookupMatch::max_length &&
           tokens[i - length] == tokens[end - length])
      ++length;
    if (length >= LookupMatch::min_length && length > best.length) best = {length, i + 1};
  }
  return best;
}

std::vector<Token> drafted(const std::vector<Token>& tokens, Token next, uint32_t count) {
  const LookupMatch match = find_newest(tokens, next);
  REQUIRE(match.found());
  Array<Token> out;
  append_lookup(tokens, next, match, count, &out);
  return {out.begin(), out.end()};
}

}  // namespace

TEST_CASE("a lookup finds the longest match, and of several the newest") {
  uint32_t state = 7;
  const auto random = [&](uint32_t n) {
    state = state * 1664525 + 1013904223;
    return static_cast<Token>((state >> 16) % n);
  };
  std::size_t found = 0;
  for (uint32_t round = 0; round < 3000; ++round) {
    std::vector<Token> tokens(static_cast<std::size_t>(random(400)));
    const uint32_t vocabulary = round % 3 == 0 ? 2 : round % 3 == 1 ? 5 : 40;
    for (Token& t : tokens) t = random(vocabulary);
    const Token next = random(vocabulary);
    const LookupMatch match = find_newest(tokens, next), expected = reference(tokens, next);
    CHECK(match.length == expected.length);
    CHECK(match.end == expected.end);
    found += match.found();
  }
  CHECK(found > 1000);
}

TEST_CASE("drafts are what followed a match, and a repetition goes on") {
  CHECK(drafted({1, 2, 3, 4, 5, 9, 1, 2}, 3, 4) == std::vector<Token>{4, 5, 9, 1});
  CHECK(drafted({1, 2, 3, 1, 2}, 3, 8) == std::vector<Token>{1, 2, 3, 1, 2, 3, 1, 2});
  CHECK(drafted({7, 7}, 7, 3) == std::vector<Token>{7, 7, 7});
  CHECK(!find_newest({}, 1).found());
  CHECK(!find_newest(std::vector<Token>{1}, 1).found());
  CHECK(!find_newest(std::vector<Token>{1, 2, 3}, 4).found());
}

TEST_CASE("a text made to be slow takes at most 20 times as long as any other") {
  // Runs one token shorter than a match may be, everywhere.
  std::vector<Token> tokens;
  for (Token i = 0; i < 1'000'000; ++i) tokens.push_back(i % 31 == 30 ? 2 + i : 1);
  tokens.resize(tokens.size() / 31 * 31);
  tokens.insert(tokens.end(), 29, 1);
  std::vector<Token> distinct(tokens.size());
  std::iota(distinct.begin(), distinct.end(), 0);
  const auto least_of_five = [](const std::vector<Token>& text) {
    double least = HUGE_VAL;
    for (int i = 0; i < 5; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      const bool found = find_newest(text, 1).found();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      CHECK(found == (text.back() == 1));
      least = std::min(least, seconds.count());
    }
    return least;
  };
  CHECK(least_of_five(tokens) < 20 * least_of_five(distinct));
}
