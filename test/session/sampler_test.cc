#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "session/sampler.h"

using namespace kvasir;

namespace {

Token draw(std::vector<float> logits, const SamplingOptions& options,
           std::vector<Token> recent = {}) {
  Token out = -1;
  REQUIRE(Sampler(options).sample(logits, recent, &out).ok());
  return out;
}

// How often each token comes in n draws at different positions.
std::vector<double> shares(const std::vector<float>& logits, const SamplingOptions& options,
                           int n = 20000) {
  std::vector<double> out(logits.size());
  std::vector<Token> recent;
  for (int i = 0; i < n; ++i, recent.push_back(0))
    out[static_cast<std::size_t>(draw(logits, options, recent))] += 1.0 / n;
  return out;
}

}  // namespace

TEST_CASE("greedy takes the largest and the lowest id among equals") {
  CHECK(draw({1, 3, 2}, {}) == 1);
  CHECK(draw({3, 3, 3}, {}) == 0);
}

TEST_CASE("suppressed tokens are never sampled, greedily or by chance") {
  const std::vector<Token> suppressed = {1, 3};
  const auto sampled = [&](const SamplingOptions& options, std::vector<Token> recent) {
    std::vector<float> logits = {1, 9, 2, 9};
    Token out = -1;
    REQUIRE(Sampler(options, suppressed).sample(logits, recent, &out).ok());
    return out;
  };
  CHECK(sampled({}, {}) == 2);
  SamplingOptions o;
  o.temperature = 2;
  o.repetition_penalty = 1.5f;
  std::vector<Token> recent;
  for (int i = 0; i < 2000; ++i, recent.push_back(i % 4)) {
    const Token token = sampled(o, recent);
    CHECK((token == 0 || token == 2));
  }
}

TEST_CASE("draws follow the softmax of the tempered logits") {
  SamplingOptions o;
  o.temperature = 0.5f;
  const auto share = shares({0, 1, 2}, o, 40000);
  const double total = 1 + std::exp(2.0) + std::exp(4.0);
  CHECK(share[0] == doctest::Approx(1 / total).epsilon(0.15));
  CHECK(share[1] == doctest::Approx(std::exp(2.0) / total).epsilon(0.05));
  CHECK(share[2] == doctest::Approx(std::exp(4.0) / total).epsilon(0.02));
}

TEST_CASE("top-k, top-p and min-p each cut what they should") {
  SamplingOptions o;
  o.temperature = 1;
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f),
                                     std::log(0.05f)};
  o.top_k = 2;
  auto share = shares(logits, o, 4000);
  CHECK(share[2] + share[3] == 0);
  CHECK(share[0] == doctest::Approx(0.625).epsilon(0.05));
  o.top_k = 0, o.top_p = 0.7f;  // 0.5 is not enough, 0.8 is
  share = shares(logits, o, 4000);
  CHECK(share[1] > 0);
  CHECK(share[2] + share[3] == 0);
  o.top_p = 1, o.min_p = 0.2f;  // a fifth of the best: 0.1
  share = shares(logits, o, 4000);
  CHECK(share[2] > 0);
  CHECK(share[3] == 0);
}

TEST_CASE("a repeated token is less likely, once, whatever its sign") {
  SamplingOptions o;
  o.repetition_penalty = 2;
  CHECK(draw({3, 2, 0}, o, {0, 0, 0}) == 1);  // 3 / 2 < 2, and not 3 / 8
  CHECK(draw({-1, -1.5f, -9}, o, {0}) == 1);  // -1 * 2 < -1.5
  std::vector<Token> long_ago(300, 1);
  long_ago[0] = 0;
  CHECK(draw({3, 2, 0}, o, long_ago) == 0);  // only the newest tokens count
}

TEST_CASE("the same seed and position draw the same token, another seed another sequence") {
  SamplingOptions a, b;
  a.temperature = b.temperature = 1;
  b.seed = 1;
  const std::vector<float> flat(50, 0.0f);
  int same = 0;
  std::vector<Token> recent;
  for (int i = 0; i < 200; ++i, recent.push_back(0)) {
    CHECK(draw(flat, a, recent) == draw(flat, a, recent));
    same += draw(flat, a, recent) == draw(flat, b, recent);
  }
  CHECK(same < 30);
}

TEST_CASE("damaged weights are reported and wrong options are refused") {
  std::vector<float> logits = {1, std::numeric_limits<float>::quiet_NaN()};
  Token out = -1;
  CHECK(Sampler({}).sample(logits, {}, &out).code() == Code::corrupt);
  SamplingOptions o;
  for (float bad :
       {-1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    o = {};
    o.temperature = bad;
    CHECK(!check_sampling_options(o).ok());
    o = {};
    o.top_p = bad;
    CHECK(!check_sampling_options(o).ok());
    o = {};
    o.min_p = bad;
    CHECK(!check_sampling_options(o).ok());
    o = {};
    o.repetition_penalty = bad;
    CHECK(!check_sampling_options(o).ok());
  }
}

TEST_CASE(
    "of a vocabulary of any size the first of the likeliest tokens is taken, and a logit that is "
    "not a number is found") {
  uint64_t state = 7;
  const auto random = [&] {
    return state = state * 6364136223846793005u + 1442695040888963407u,
           static_cast<uint32_t>(state >> 33);
  };
  for (const std::size_t n : {1u, 15u, 16u, 1023u, 1024u, 1025u, 2047u, 2048u, 3000u, 4100u}) {
    CAPTURE(n);
    for (int round = 0; round < 40; ++round) {
      std::vector<float> logits(n);
      for (float& x : logits) x = static_cast<float>(random() % 50);  // many are alike
      if (round == 0)
        std::fill(logits.begin(), logits.end(), -std::numeric_limits<float>::infinity());
      if (round == 1) logits.back() = 100;
      if (round == 2) logits.front() = 100;
      const auto expected = std::max_element(logits.begin(), logits.end()) - logits.begin();
      Token token = -1;
      REQUIRE(Sampler({}).sample(logits, {}, &token).ok());
      CHECK(token == expected);
      logits[random() % n] = std::numeric_limits<float>::quiet_NaN();
      CHECK(Sampler({}).sample(logits, {}, &token).code() == Code::corrupt);
    }
  }
}

namespace {

// Draws as the definition says: sorts all tokens.
Token plain_draw(const std::vector<float>& logits, const SamplingOptions& o, double part) {
  struct Item {
    float logit;
    Token token;
  };
  std::vector<Item> items;
  const float top = *std::max_element(logits.begin(), logits.end());
  for (std::size_t i = 0; i < logits.size(); ++i)
    items.push_back({(logits[i] - top) / o.temperature, static_cast<Token>(i)});
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  });
  if (o.top_k && o.top_k < items.size()) items.resize(o.top_k);
  const auto weight = [&](std::size_t i) { return std::exp(static_cast<double>(items[i].logit)); };
  double total = 0, kept = 0;
  for (std::size_t i = 0; i < items.size(); ++i) total += weight(i);
  std::size_t n = 0;
  for (; n < items.size(); ++n) {
    const bool enough = o.top_p < 1 && kept >= static_cast<double>(o.top_p) * total;
    if (n > 0 && (enough || weight(n) < static_cast<double>(o.min_p))) break;
    kept += weight(n);
  }
  double at = part * kept;
  for (std::size_t i = 0; i + 1 < n; ++i)
    if ((at -= weight(i)) < 0) return items[i].token;
  return items[n - 1].token;
}

// The number that the sampler draws by at a position.
double part_at(uint64_t seed, uint64_t position) {
  uint64_t x = seed + (position + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

}  // namespace

TEST_CASE("a draw from a large vocabulary is that of all tokens sorted, and the logits stay") {
  std::vector<float> logits(50000);
  uint64_t state = 5;
  for (float& x : logits) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = std::round(static_cast<float>(state >> 40) * 0x1p-24f * 240) / 16;  // many are alike
  }
  for (std::size_t i = 0; i < 20; ++i) logits[i * 2003] += static_cast<float>(i);
  const std::vector<float> before = logits;
  const std::vector<Token> suppressed = {7, 11};
  for (const float temperature : {0.01f, 0.7f, 1.0f, 3.0f, 100.0f})
    for (const uint32_t top_k : {0u, 1u, 40u, 3000u, 50000u})
      for (const float top_p : {1.0f, 0.9f, 0.3f})
        for (const float min_p : {0.0f, 0.05f}) {
          SamplingOptions o;
          o.temperature = temperature, o.top_k = top_k, o.top_p = top_p, o.min_p = min_p;
          o.seed = top_k + 3;
          Sampler sampler(o, suppressed);
          std::vector<Token> recent;
          for (int i = 0; i < 6; ++i, recent.push_back(0)) {
            Token token = -1;
            REQUIRE(sampler.sample(logits, recent, &token).ok());
            std::vector<float> allowed = logits;
            for (const Token t : suppressed)
              allowed[static_cast<std::size_t>(t)] = -std::numeric_limits<float>::infinity();
            CAPTURE(temperature);
            CAPTURE(top_k);
            CAPTURE(top_p);
            CAPTURE(min_p);
            CHECK(token == plain_draw(allowed, o, part_at(o.seed, recent.size())));
            CHECK(logits == before);
          }
        }
}

TEST_CASE("an infinite logit is drawn") {
  SamplingOptions o;
  o.temperature = 1;
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(draw({1, infinity, 2}, o) == 1);
  CHECK(draw({-infinity, 3, -infinity}, o) == 1);
}
