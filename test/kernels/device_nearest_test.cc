// A GPU's search for nearest keys against all scores, sorted. The scores have the same bits as
// those of the CPU's kernels, so there is one right answer.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include "backend/kernels.h"
#include "backend/page.h"
#include "device_support.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint32_t unwritten = ~0u;

struct Keys {
  Keys(uint32_t r, uint32_t n, uint32_t d)
      : rows(r), items(n), dim(d), queries(std::size_t{r} * d), keys(std::size_t{n} * d),
        query_scale(r), key_scale(n) {}
  uint32_t rows, items, dim;
  std::vector<int8_t> queries, keys;
  std::vector<float> query_scale, key_scale;
};

// Bytes up to `largest`; scales as pages have them, sixteen bits, some of them 0.
Keys random_keys(uint32_t rows, uint32_t items, uint32_t dim, Random& random,
                 uint32_t largest = 127) {
  Keys k(rows, items, dim);
  const auto byte = [&] {
    return static_cast<int8_t>(static_cast<int>(random.below(2 * largest + 1)) -
                               static_cast<int>(largest));
  };
  for (int8_t& b : k.queries) b = byte();
  for (int8_t& b : k.keys) b = byte();
  for (float& f : k.query_scale)
    f = random.below(40) == 0 ? 0 : 0.001f + 0.01f * std::fabs(random.normal());
  for (float& f : k.key_scale)
    f = random.below(40) == 0
            ? 0
            : std::bit_cast<float>(
                  std::bit_cast<uint32_t>(0.001f + 0.01f * std::fabs(random.normal())) &
                  0xffff0000u);
  return k;
}

float score(const Keys& k, uint32_t row, uint32_t item) {
  int32_t product = 0;
  for (uint32_t d = 0; d < k.dim; ++d)
    product += k.queries[std::size_t{row} * k.dim + d] * k.keys[std::size_t{item} * k.dim + d];
  return static_cast<float>(product) * (k.key_scale[item] * k.query_scale[row]);
}

void check(const Keys& k, uint32_t wanted) {
  CAPTURE(k.rows);
  CAPTURE(k.items);
  CAPTURE(k.dim);
  CAPTURE(wanted);
  Memory<int8_t> queries(k.queries.data(), k.queries.size()), keys(k.keys.data(), k.keys.size());
  Memory<float> query_scale(k.query_scale.data(), k.rows), key_scale(k.key_scale.data(), k.items),
      best(std::size_t{k.rows} * nearest_groups(k.items));
  Memory<uint32_t> nearest(std::size_t{k.rows} * wanted);
  OK(ops().find_nearest(
      stream(), {k.rows, k.items, k.dim, wanted, queries.data(), query_scale.data(), keys.data(),
                 key_scale.data(), nearest_groups(k.items), best.data(), nearest.data()}));
  const Guarded<uint32_t>& its = nearest.get();
  best.get();  // guards
  std::vector<float> scores(k.items);
  std::vector<uint32_t> order(k.items);
  uint32_t wrong = 0;
  for (uint32_t r = 0; r < k.rows; ++r) {
    for (uint32_t i = 0; i < k.items; ++i) scores[i] = score(k, r, i);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
    for (uint32_t i = 0; i < wanted; ++i)
      wrong += its[std::size_t{r} * wanted + i] != (i < k.items ? order[i] : unwritten);
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE(
    "a device finds the nearest keys of queries, best first, of any number of either, and where "
    "there are fewer than are wanted") {
  if (!stream()) return;
  Random random(31);
  for (const uint32_t dim : nearest_dims) {
    for (const uint32_t items :
         {1u, 7u, 8u, 9u, 63u, 64u, 65u, 399u, 400u, 401u, 3199u, 3200u, 3201u, 6400u})
      check(random_keys(5, items, dim, random), 400);
    for (const uint32_t rows : {1u, 31u, 33u, 255u, 257u, 300u})
      check(random_keys(rows, 200 + random.below(300), dim, random), 1 + random.below(40));
    for (const uint32_t k : {1u, 2u, 100u, max_nearest - 1, max_nearest})
      check(random_keys(3, 5000 + random.below(9000), dim, random), k);
    check(random_keys(9, 40000, dim, random), 400);
  }
}

TEST_CASE(
    "of keys that are as near as others a device finds the lowest ones, also where more are alike "
    "than it looks at together") {
  if (!stream()) return;
  Random random(32);
  for (const uint32_t dim : nearest_dims)
    for (const uint32_t items : {500u, 5000u, 50000u}) {
      Keys few = random_keys(3, items, dim, random, 1);  // few different scores
      std::fill(few.key_scale.begin(), few.key_scale.end(), 0.25f);
      check(few, 400);
      std::fill(few.query_scale.begin(), few.query_scale.end(), 0.0f);  // one
      check(few, 400);
      Keys alike = random_keys(2, items, dim, random);  // every key many times
      for (uint32_t i = 50; i < items; ++i) {
        std::copy_n(alike.keys.begin() + i % 50 * dim, dim,
                    alike.keys.begin() + std::size_t{i} * dim);
        alike.key_scale[i] = alike.key_scale[i % 50];
      }
      check(alike, 300);
    }
}

TEST_CASE(
    "products at the ends of their range, negative scores and zeros of either sign are in the "
    "order of the floats") {
  if (!stream()) return;
  Random random(33);
  for (const uint32_t dim : nearest_dims) {
    Keys k = random_keys(2, 700, dim, random);
    std::fill(k.queries.begin(), k.queries.end(), int8_t{127});
    for (uint32_t i = 0; i < k.items; ++i) {
      if (i % 3 == 0)
        std::fill_n(k.keys.begin() + std::size_t{i} * dim, dim,
                    static_cast<int8_t>(i % 2 ? 127 : -128));
      k.key_scale[i] = i % 7 == 0 ? -0.0f : i % 5 == 0 ? -k.key_scale[i] : k.key_scale[i];
    }
    check(k, 500);
    for (int8_t& b : k.keys) b = static_cast<int8_t>(-std::abs(b / 2) - 1);
    for (float& f : k.key_scale) f = std::fabs(f);
    check(k, 500);
    for (float& f : k.key_scale) f = 1e9f;
    for (float& f : k.query_scale) f = 1e20f;
    check(k, 100);
  }
}

TEST_CASE("a device chooses by the scores that the CPU's kernels have of the same keys in pages") {
  if (!stream()) return;
  Random random(34);
  const Kernels& cpu = cpu_kernels();
  for (const uint32_t head_dim : nearest_dims) {
    const PageShape page = PageShape::of(head_dim);
    const uint32_t pages = 70, items = pages * page.page_tokens, rows = 6;
    Keys k = random_keys(rows, items, page.dim, random);
    Guarded<int8_t> data(std::size_t{pages} * page_bytes), q(k.queries.size());
    Guarded<float> scale(rows), scores(std::size_t{rows} * items);
    Guarded<std::byte> scratch(cpu.attend_scratch(rows, page.dim));
    std::vector<uint16_t> scales(std::size_t{pages} * 2 * page.page_tokens);
    std::vector<PageRef> refs;
    for (uint32_t p = 0; p < pages; ++p) {
      for (uint32_t t = 0; t < page.page_tokens; ++t) {
        const uint32_t i = p * page.page_tokens + t;
        for (uint32_t d = 0; d < page.dim; ++d)
          data[std::size_t{p} * page_bytes + page.key_at(t) + d / 4 * PageShape::key_stride +
               d % 4] = k.keys[std::size_t{i} * page.dim + d];
        scales[std::size_t{p} * 2 * page.page_tokens + t] =
            static_cast<uint16_t>(std::bit_cast<uint32_t>(k.key_scale[i]) >> 16);
      }
      refs.push_back({data.data() + std::size_t{p} * page_bytes,
                      scales.data() + std::size_t{p} * 2 * page.page_tokens,
                      ~uint64_t{0} >> (64 - page.page_tokens)});
    }
    std::copy(k.queries.begin(), k.queries.end(), q.data());
    std::copy(k.query_scale.begin(), k.query_scale.end(), scale.data());
    cpu.score_tokens({rows, page.dim, nullptr, q.data(), nullptr, scale.data()}, refs.data(), pages,
                     scores.data(), items, scratch.data());
    uint32_t different = 0;
    for (uint32_t r = 0; r < rows; ++r)
      for (uint32_t i = 0; i < items; ++i)
        different += scores[std::size_t{r} * items + i] != score(k, r, i);
    CHECK(different == 0);
    check(k, 400);
  }
}
