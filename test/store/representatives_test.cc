// Representative tokens against InfLLM's equations, and after forks, rewinds and saves of a store.
#include "store/representatives.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "pool.h"
#include "store/kv_store.h"

using namespace kvasir;
using kvasir::test::pool;

namespace {

constexpr uint32_t text_layers = 2, kv_heads = 2, group = 3, query_heads = kv_heads * group;

struct Text {
  uint32_t head_dim, tokens;
  std::vector<float> q[text_layers], k[text_layers];  // [tokens][heads or kv_heads][head_dim]
  Text(uint32_t d, uint32_t n, uint32_t seed) : head_dim(d), tokens(n) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (uint32_t l = 0; l < text_layers; ++l) {
      q[l].resize(std::size_t{n} * query_heads * d);
      k[l].resize(std::size_t{n} * kv_heads * d);
      for (float& x : q[l]) x = normal(random);
      for (float& x : k[l]) x = normal(random) + 2;  // so that centring matters
    }
  }
  StoreShape shape() const { return {text_layers, kv_heads, PageShape::of(head_dim)}; }
  // Reads tokens begin .. end - 1 into the store, in steps.
  void read(KvStore* store, uint32_t begin, uint32_t end, uint32_t step) const {
    for (uint32_t at = begin; at < end; at += step) {
      const uint32_t n = std::min(step, end - at);
      REQUIRE(store->prepare(n).ok());
      for (uint32_t l = 0; l < text_layers; ++l) {
        const float* keys = k[l].data() + std::size_t{at} * kv_heads * head_dim;
        store->write(l, n, keys, keys);
        store->observe(l, n, q[l].data() + std::size_t{at} * query_heads * head_dim, query_heads);
      }
      store->commit(n, cpu_kernels(), &pool());
    }
  }
  // 1/l sum over j of q_{m+j} . k_m, of the tokens that there are.
  double score(uint32_t l, uint32_t h, uint32_t m, uint32_t local) const {
    double sum = 0;
    for (uint32_t j = m + 1; j < tokens && j <= m + local; ++j)
      for (uint32_t r = 0; r < group; ++r)
        for (uint32_t d = 0; d < head_dim; ++d)
          sum += static_cast<double>(
                     q[l][(std::size_t{j} * query_heads + h * group + r) * head_dim + d]) *
                 static_cast<double>(k[l][(std::size_t{m} * kv_heads + h) * head_dim + d]);
    return sum / local;
  }
};

std::vector<float> key_of(const Representatives& r, uint32_t l, uint32_t h, uint32_t b,
                          uint32_t dim) {
  std::vector<float> out;
  for (uint32_t d = 0; d < dim; ++d)
    out.push_back(std::bit_cast<float>(uint32_t{r.key(l, h, b)[d]} << 16));
  return out;
}

std::vector<std::byte> bytes_of(const Representatives& r) {
  std::vector<std::byte> out;
  REQUIRE(r.write([&](const void* data, std::size_t size) {
             const auto* at = static_cast<const std::byte*>(data);
             out.insert(out.end(), at, at + size);
             return Status();
           }).ok());
  CHECK(out.size() == r.file_bytes());
  return out;
}

}  // namespace

TEST_CASE(
    "a block's key is the mean of the 4 tokens that the local tokens after them attend most, "
    "whatever the steps") {
  for (uint32_t head_dim : {40u, 128u, 256u, 512u})
    for (uint32_t window : {64u, 20u})
      for (uint32_t step : {1u, 50u, 700u}) {
        CAPTURE(head_dim);
        CAPTURE(window);
        CAPTURE(step);
        const Text text(head_dim, 700, head_dim);
        KvStore store(text.shape(), window);
        text.read(&store, 0, text.tokens, step);
        const Representatives& r = store.representatives();
        const PageShape& page = text.shape().page;
        REQUIRE(r.known());
        REQUIRE(r.blocks() == store.sealed_tokens() / 128);
        for (uint32_t l = 0; l < text_layers; ++l)
          for (uint32_t h = 0; h < kv_heads; ++h)
            for (uint32_t b = 0; b < r.blocks(); ++b) {
              std::vector<std::pair<double, uint32_t>> scores;
              for (uint32_t m = std::max(b * 128, page.page_tokens); m < (b + 1) * 128; ++m)
                scores.push_back({-text.score(l, h, m, window), m});
              std::sort(scores.begin(), scores.end());
              if (scores[4].first - scores[3].first < 1e-3) continue;  // rounding decides
              std::vector<double> mean(page.dim);
              for (uint32_t i = 0; i < 4; ++i) {
                Array<float> k(page.page_tokens * page.dim), v(k.size());
                const PageRef ref = store.pages().page(l, h, scores[i].second / page.page_tokens);
                cpu_kernels().unseal_page(page, ref.data, ref.scales, k.data(), v.data());
                for (uint32_t d = 0; d < page.dim; ++d)
                  mean[d] +=
                      static_cast<double>(k[scores[i].second % page.page_tokens * page.dim + d]) /
                      4;
              }
              const auto key = key_of(r, l, h, b, page.dim);
              for (uint32_t d = 0; d < page.dim; ++d)
                CHECK(std::fabs(static_cast<double>(key[d]) - mean[d]) <=
                      0.005 * std::fabs(mean[d]) + 1e-4);
            }
      }
}

TEST_CASE("representatives of a fork are its own, and a step that is not committed leaves none") {
  const Text text(64, 600, 1), other(64, 600, 2);
  KvStore store(text.shape(), 64);
  text.read(&store, 0, 300, 37);
  KvStore fork(store);
  REQUIRE(store.prepare(100).ok());
  for (uint32_t l = 0; l < text_layers; ++l) {
    store.write(l, 100, other.k[l].data(), other.k[l].data());
    store.observe(l, 100, other.q[l].data(), query_heads);
  }
  CHECK(bytes_of(store.representatives()) == bytes_of(fork.representatives()));
  text.read(&store, 300, 600, 37);
  KvStore copy(fork);
  other.read(&fork, 300, 600, 37);
  text.read(&copy, 300, 600, 37);
  CHECK(bytes_of(store.representatives()) == bytes_of(copy.representatives()));
  CHECK(bytes_of(store.representatives()) != bytes_of(fork.representatives()));
}

TEST_CASE("a rewind removes the blocks of its tokens, and more prefill makes them again") {
  const Text text(64, 700, 4);
  for (uint32_t to : {0u, 1u, 100u, 128u, 255u, 256u, 400u, 512u, 640u, 699u}) {
    CAPTURE(to);
    KvStore store(text.shape(), 64);
    text.read(&store, 0, 700, 100);
    const uint32_t had = store.representatives().blocks();
    const auto before = key_of(store.representatives(), 1, 1, 0, 64);
    REQUIRE(store.rewind(to, cpu_kernels()).ok());
    CHECK(store.representatives().known());
    CHECK(store.representatives().blocks() == std::min(had, to / 128));
    if (to >= 128) CHECK(key_of(store.representatives(), 1, 1, 0, 64) == before);
    text.read(&store, to, 700, 100);
    CHECK(store.representatives().blocks() == had);
    if (to >= 256 || to == 0) CHECK(key_of(store.representatives(), 1, 1, 0, 64) == before);
  }
}

TEST_CASE("a step that is kept in part scores as the part alone, where its queries are alike") {
  Text text(64, 400, 5);
  for (auto& q : text.q)
    for (std::size_t i = std::size_t{301} * query_heads * 64; i < q.size(); ++i)
      q[i] = q[i - std::size_t{query_heads} * 64];
  for (uint32_t kept : {1u, 20u, 70u, 99u}) {
    CAPTURE(kept);
    KvStore store(text.shape(), 64), part(text.shape(), 64);
    text.read(&store, 0, 300, 100);
    text.read(&part, 0, 300, 100);
    text.read(&part, 300, 300 + kept, 100);
    REQUIRE(store.prepare(100).ok());
    for (uint32_t l = 0; l < text_layers; ++l) {
      const float* keys = text.k[l].data() + std::size_t{300} * kv_heads * 64;
      store.write(l, 100, keys, keys);
      store.observe(l, 100, text.q[l].data() + std::size_t{300} * query_heads * 64, query_heads);
    }
    store.keep_first(kept, 100);
    store.commit(kept, cpu_kernels(), &pool());
    const auto is = bytes_of(store.representatives()), must = bytes_of(part.representatives());
    REQUIRE(is.size() == must.size());
    const uint32_t undecided =
        (300 + kept - store.representatives().blocks() * 128) * text_layers * kv_heads;
    for (std::size_t at = is.size() - undecided * sizeof(float); at < is.size();
         at += sizeof(float)) {
      float x, y;
      std::memcpy(&x, &is[at], sizeof x);
      std::memcpy(&y, &must[at], sizeof y);
      CHECK(std::fabs(x - y) <= 1e-3f * (1 + std::fabs(y)));
    }
  }
}

TEST_CASE("a sequence that is never sealed keeps no representatives") {
  const Text text(64, 300, 1);
  KvStore store(text.shape(), KvStore::keep_all);
  text.read(&store, 0, 300, 100);
  CHECK_FALSE(store.representatives().known());
  CHECK(store.representatives().file_bytes() == 0);
}
