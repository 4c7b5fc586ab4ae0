// Attention through a window, and scores without a value, against softmax in double precision over
// the keys and values as they were given.
#include "attention/attention.h"
#include "pool.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace kvasir;
using kvasir::test::pool;

namespace {

std::vector<float> normals(std::size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(n);
  for (float& x : out) x = normal(random);
  return out;
}

struct Case {
  HeadShape heads;
  uint64_t window = 0;  // 0: all
  bool chunked = false;
  bool full_precision = false;
  bool sink_logits = false;
  float cap = 0;

  std::string text() const {
    return "head_dim " + std::to_string(heads.head_dim) + ", window " + std::to_string(window) +
           (chunked ? ", chunked" : "") + (full_precision ? ", full precision" : "") +
           (sink_logits ? ", sinks" : "") + (cap > 0 ? ", capped" : "");
  }
};

// A sequence of one layer: its keys have a common part, which the store centres.
struct Sequence {
  Case c;
  uint32_t tokens;
  std::vector<float> k, v, q, sinks;

  Sequence(const Case& of, uint32_t n)
      : c(of), tokens(n), k(normals(n * c.heads.kv_width(), 1)),
        v(normals(n * c.heads.kv_width(), 2)), q(normals(n * c.heads.q_width(), 3)),
        sinks(normals(c.heads.heads, 4)) {
    for (std::size_t i = 0; i < k.size(); ++i) k[i] += i % 3 == 0 ? 2.0f : -0.5f;
    for (float& s : sinks) s = 2 * s + 3;
  }

  StoreShape shape() const {
    return {1, c.heads.kv_heads, PageShape::of(c.heads.head_dim), c.window};
  }
  KvStore store() const { return KvStore(shape(), c.full_precision ? KvStore::keep_all : 40); }

  // Runs the next n tokens; their outputs from `first` on.
  std::vector<float> run(KvStore* store, uint32_t n, uint32_t threads, uint32_t first = 0) const {
    const uint64_t at = store->tokens();
    const CancelLatch never(nullptr);
    const Plan plan;
    Attention attention(c.heads, store->shape().page, cpu_kernels(), &pool(threads));
    attention.set_softcap(c.cap);
    REQUIRE(store->prepare(n, KvStore::Overlap::nothing, &pool(threads)).ok());
    store->write(0, n, k.data() + at * c.heads.kv_width(), v.data() + at * c.heads.kv_width());
    std::vector<float> out(n * c.heads.q_width());
    const AttentionRequest request{.first = first,
                                   .tokens = n,
                                   .q = q.data() + at * c.heads.q_width(),
                                   .store = *store,
                                   .plan = plan,
                                   .sink_logits = c.sink_logits ? sinks.data() : nullptr,
                                   .window = {c.window, c.chunked},
                                   .cancel = never};
    const Status s = c.window > 0 ? attention.run_windowed(request, out.data())
                                  : attention.run(request, out.data(), nullptr);
    REQUIRE_MESSAGE(s.ok(), s.message());
    store->commit(n, cpu_kernels(), &pool(threads));
    return {out.begin() + first * c.heads.q_width(), out.end()};
  }

  bool sees(uint64_t query, uint64_t key) const {
    if (key > query) return false;
    if (c.window == 0) return true;
    return c.chunked ? key >= query / c.window * c.window : query - key < c.window;
  }

  std::vector<double> expected(uint64_t token) const {
    const uint32_t dim = c.heads.head_dim;
    std::vector<double> out(c.heads.q_width());
    for (uint32_t h = 0; h < c.heads.heads; ++h) {
      const uint32_t of = h / c.heads.group();
      double total = c.sink_logits ? std::exp(static_cast<double>(sinks[h])) : 0;
      for (uint64_t j = 0; j < tokens; ++j) {
        if (!sees(token, j)) continue;
        double score = 0;
        for (uint32_t d = 0; d < dim; ++d)
          score += static_cast<double>(q[token * c.heads.q_width() + h * dim + d]) *
                   static_cast<double>(k[j * c.heads.kv_width() + of * dim + d]);
        score /= std::sqrt(static_cast<double>(dim));
        const auto cap = static_cast<double>(c.cap);
        const double weight = std::exp(cap > 0 ? cap * std::tanh(score / cap) : score);
        total += weight;
        for (uint32_t d = 0; d < dim; ++d)
          out[h * dim + d] +=
              weight * static_cast<double>(v[j * c.heads.kv_width() + of * dim + d]);
      }
      for (uint32_t d = 0; d < dim; ++d) out[h * dim + d] /= total;
    }
    return out;
  }

  // Relative L2 difference of the outputs of tokens from `first` on.
  double error(const std::vector<float>& out, uint64_t first) const {
    double difference = 0, norm = 0;
    for (std::size_t t = 0; t * c.heads.q_width() < out.size(); ++t) {
      const std::vector<double> exact = expected(first + t);
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const double d = static_cast<double>(out[t * exact.size() + i]) - exact[i];
        difference += d * d, norm += exact[i] * exact[i];
      }
    }
    return std::sqrt(difference / norm);
  }
};

constexpr HeadShape wide = {1, 2, 1, 256}, middle = {1, 6, 2, 64}, odd = {1, 4, 2, 24};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const HeadShape& heads : {wide, middle, odd})
    for (const bool full_precision : {false, true})
      for (const uint64_t window : {24u, 200u})
        for (const bool chunked : {false, true})
          all.push_back({heads, window, chunked, full_precision, false, 0});
  for (const bool full_precision : {false, true}) {
    all.push_back({middle, 100, false, full_precision, true, 0});
    all.push_back({middle, 100, false, full_precision, false, 3});
    all.push_back({middle, 100, true, full_precision, true, 3});
  }
  return all;
}

}  // namespace

TEST_CASE("a query sees exactly the tokens of its window") {
  for (const Case& c : cases()) {
    CAPTURE(c.text());
    const Sequence s(c, 1500);
    KvStore store = s.store();
    // Off by one token, 24 tokens are wrong by a fifth, and 200 tokens by a fifteenth.
    const double most = c.full_precision ? 1e-5 : 0.03;
    for (const uint32_t n : {1u, 7u, 300u, 150u, 1u, 40u, 512u, 1u, 1u, 90u}) {
      const uint64_t first = store.tokens();
      const double error = s.error(s.run(&store, n, 2), first);
      CHECK_MESSAGE(error < most, "tokens from ", first, ": ", error);
    }
  }
}

TEST_CASE("a window has the same bits by any number of threads and in any block") {
  for (const Case& c : cases()) {
    CAPTURE(c.text());
    const Sequence s(c, 900);
    KvStore one = s.store(), two = s.store();
    for (const uint32_t n : {300u, 280u, 77u}) {
      KvStore last(one);
      const std::vector<float> out = s.run(&one, n, 1);
      CHECK(s.run(&two, n, 2) == out);
      const std::vector<float> tail = s.run(&last, n, 2, n - 5);
      CHECK(std::equal(tail.begin(), tail.end(),
                       out.end() - static_cast<std::ptrdiff_t>(tail.size())));
    }
  }
}

TEST_CASE("a score without a value takes its share of all tokens") {
  for (const float cap : {0.0f, 3.0f})
    for (const bool full_precision : {false, true}) {
      const Case c{middle, 0, false, full_precision, true, cap};
      CAPTURE(c.text());
      const Sequence s(c, 1000);
      KvStore store = s.store();
      for (const uint32_t n : {300u, 5u, 600u, 1u}) {
        const uint64_t first = store.tokens();
        const double error = s.error(s.run(&store, n, 2), first);
        CHECK_MESSAGE(error < (full_precision ? 1e-5 : 0.03), "tokens from ", first, ": ", error);
      }
    }
}
