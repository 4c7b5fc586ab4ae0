// The tiles that a GPU chooses for sparse prefill, and their attention, against double precision.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <numeric>

#include "prefill_text.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// The scores of a query row of a KV head for the keys that it sees.
std::vector<double> scores_of(const PrefillText& t, uint32_t head, uint32_t row) {
  const PrefillShape& s = t.s;
  const uint32_t token = row / s.group, seen = t.before + token + 1;
  const float* q =
      t.q.data() +
      ((std::size_t{token} * s.kv_heads + head) * s.group + row % s.group) * s.head_dim;
  std::vector<double> scores(seen);
  for (uint32_t i = 0; i < seen; ++i) {
    const float* key = t.keys.data() + (std::size_t{head} * t.all + i) * t.page.dim;
    scores[i] = std::inner_product(q, q + s.head_dim, key, 0.0) /
                std::sqrt(static_cast<double>(s.head_dim));
  }
  return scores;
}

// Numbers as the choice reads them: bytes times a 127th of `largest`.
void round_to_bytes(float* x, std::size_t n, float largest) {
  for (std::size_t i = 0; i < n; ++i)
    x[i] = largest > 0 ? std::nearbyint(x[i] * (127 / largest)) * (largest / 127) : 0.0f;
}
float largest_of(const float* x, std::size_t n) {
  float largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

// The text with the queries and keys that the choice reads. Keys of a page are at most 127 times
// their scale.
PrefillText rounded(const PrefillText& t) {
  PrefillText r = t;
  const uint32_t dim = t.page.dim, page_tokens = t.page.page_tokens;
  for (std::size_t at = 0; at < r.q.size(); at += t.s.head_dim)
    round_to_bytes(r.q.data() + at, t.s.head_dim, largest_of(r.q.data() + at, t.s.head_dim));
  for (uint32_t head = 0; head < t.s.kv_heads; ++head)
    for (uint32_t first = 0; first < t.all; first += tile_scale_keys) {
      float* keys = r.keys.data() + (std::size_t{head} * t.all + first) * dim;
      const uint32_t count = std::min(tile_scale_keys, t.all - first);
      float largest = 0;
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t token = first + i, page = token / page_tokens;
        if (page == 0 || page >= t.s.pages) {
          largest = std::max(largest, largest_of(keys + std::size_t{i} * dim, dim));
          continue;
        }
        const std::size_t extent = std::size_t{page / extent_pages} * t.s.kv_heads + head,
                          at = extent * extent_pages + page % extent_pages;
        const uint32_t scale = t.scales[at * 2 * page_tokens + token % page_tokens];
        largest = std::max(largest, 127 * std::bit_cast<float>(scale << 16));
      }
      round_to_bytes(keys, std::size_t{count} * dim, largest);
    }
  return r;
}

// What a block's choosing rows attend of the tiles before `near`, without the first one.
std::vector<double> shares_of(const PrefillText& t, uint32_t head, uint32_t block, uint32_t near) {
  std::vector<double> shares(near - 1);
  for (uint32_t i = 0; i < choosing_rows(t.s.group); ++i) {
    const uint32_t row = choosing_row(block * choosing_rows(t.s.group) + i, t.s.group);
    if (row / t.s.group >= t.s.n) continue;
    const std::vector<double> scores = scores_of(t, head, row);
    const double most = *std::max_element(scores.begin(), scores.end());
    std::vector<double> best((scores.size() / prefill_keys + 1) * prefill_tile_groups);  // e^score
    for (uint32_t k = 0; k < scores.size(); ++k) {
      double& x = best[k / prefill_keys * prefill_tile_groups + tile_group_of(k % prefill_keys)];
      x = std::max(x, std::exp(scores[k] - most));
    }
    const double sum = std::accumulate(best.begin(), best.end(), 0.0);
    for (uint32_t g = prefill_tile_groups; g < near * prefill_tile_groups; ++g)
      shares[g / prefill_tile_groups - 1] += best[g] / sum;
  }
  const double least = 0.1 * std::accumulate(shares.begin(), shares.end(), 0.0) / (near - 1);
  for (double& x : shares) x = std::max(x, least);
  return shares;
}

// At which `count` tiles are expected; 0: all of them.
double threshold_of(const std::vector<double>& shares, uint32_t count) {
  if (shares.size() <= count) return 0;
  double low = 0, high = 1e6;
  for (int i = 0; i < 200; ++i) {
    const double middle = (low + high) / 2;
    double expected = 0;
    for (const double x : shares) expected += std::min(1.0, x / middle);
    (expected > count ? low : high) = middle;
  }
  return low;
}

// The list of a block: every tile as the sampling rule has it, unless it is within the error of
// float sums.
void check_list(const PrefillText& t, const Tiles& tiles, uint32_t head, uint32_t block) {
  const std::size_t at = std::size_t{head} * tiles.blocks + block;
  const uint32_t* list = tiles.lists.data() + at * tiles.room;
  const float* biases = tiles.biases.data() + at * tiles.room;
  const uint32_t count = tiles.counts[at];
  REQUIRE(count >= 1);
  REQUIRE(count <= tiles.near);
  CHECK(list[0] == 0);
  CHECK(biases[0] == 0);
  const std::vector<double> shares = shares_of(t, head, block, tiles.near);
  const double threshold = block < tiles.exact ? 0 : threshold_of(shares, tiles.chosen);
  uint32_t next = 1;
  for (uint32_t tile = 1; tile < tiles.near; ++tile) {
    const bool taken = next < count && list[next] == tile;
    const auto share = static_cast<float>(shares[tile - 1]);
    const uint32_t seed = tiles.seed + head * 0x85ebca6bu + block * 0xc2b2ae3du;
    uint32_t number = 0;
    const auto is_taken_at = [&](double t) {
      return cpu_kernels().sample(&share, 1, tile, seed, static_cast<float>(t), &number) == 1;
    };
    const bool sure = is_taken_at(threshold * 1.06), never = !is_taken_at(threshold * 0.94);
    CAPTURE(tile);
    if (sure) CHECK(taken);
    if (never) CHECK(!taken);
    if (!taken) continue;
    const double weight = std::max(0.0, std::log2(threshold / double{share}));
    CHECK(std::fabs(double{biases[next]} - weight) < 0.1);
    ++next;
  }
  CHECK(next == count);
}

// The attention of a row over the tiles of its block's list and all keys from `near` on.
void check_row(const PrefillText& t, const Tiles& tiles, uint32_t head, uint32_t row,
               const Attended& attended) {
  const PrefillShape& s = t.s;
  const std::size_t list = std::size_t{head} * tiles.blocks + row / prefill_rows;
  std::vector<double> scores = scores_of(t, head, row), all(scores.size(), -HUGE_VAL);
  for (uint32_t i = 0; i < tiles.counts[list]; ++i)
    for (uint32_t k = 0; k < prefill_keys; ++k) {
      const uint32_t key = tiles.lists[list * tiles.room + i] * prefill_keys + k;
      all[key] = scores[key] + double{tiles.biases[list * tiles.room + i]} * std::log(2.0);
    }
  for (std::size_t key = std::size_t{tiles.near} * prefill_keys; key < all.size(); ++key)
    all[key] = scores[key];
  const double most = *std::max_element(all.begin(), all.end());
  std::vector<double> out(s.head_dim);
  double sum = 0;
  for (std::size_t key = 0; key < all.size(); ++key) {
    const double p = std::exp(all[key] - most);
    const float* value = t.values.data() + (std::size_t{head} * t.all + key) * t.page.dim;
    sum += p;
    for (uint32_t d = 0; d < s.head_dim; ++d) out[d] += p * double{value[d]};
  }
  const std::size_t at = (std::size_t{row / s.group} * s.kv_heads + head) * s.group + row % s.group;
  double norm = 0, difference = 0;
  for (uint32_t d = 0; d < s.head_dim; ++d) {
    const double e = out[d] / sum, x = double{attended.out[at * s.head_dim + d]} - e;
    norm += e * e, difference += x * x;
  }
  CHECK(std::sqrt(difference / norm) < 3e-2);
  CHECK(std::fabs(double{attended.lse[at]} - (most + std::log(sum))) < 3e-2);
}

void check_tiles(const PrefillShape& shape, Tiles tiles, Random& random) {
  CAPTURE(shape.head_dim);
  CAPTURE(shape.group);
  const PrefillText t(shape, random), read = rounded(t);
  const Attended attended = attend(t, &tiles);
  for (uint32_t head = 0; head < shape.kv_heads; ++head) {
    for (uint32_t block = 0; block < tiles.blocks; ++block) check_list(read, tiles, head, block);
    for (uint32_t row = 0; row < shape.n * shape.group; row += 1 + row % 7)
      check_row(t, tiles, head, row, attended);
  }
}

uint32_t pages_of(uint32_t head_dim, uint32_t tokens) {
  return tokens / PageShape::of(head_dim).page_tokens;
}

}  // namespace

TEST_CASE(
    "rows that choose are of their block, of every whole token of a group, and of all heads") {
  for (uint32_t group = 1; group <= 16; ++group) {
    CAPTURE(group);
    constexpr uint32_t blocks = 12;
    const uint32_t rows = choosing_rows(group);
    REQUIRE(rows <= max_choosing_rows);
    std::vector<uint32_t> of_head(group), of_token(blocks * prefill_rows / group + 1);
    uint32_t before = 0;
    for (uint32_t i = 0; i < blocks * rows; ++i) {
      const uint32_t row = choosing_row(i, group);
      CHECK(row / prefill_rows == i / rows);
      if (i > 0) CHECK(row >= before);
      before = row;
      ++of_head[row % group], ++of_token[row / group];
    }
    const auto [least, most] = std::minmax_element(of_head.begin(), of_head.end());
    CHECK(*most <= *least * 3 / 2);
    for (uint32_t token = 0; group > 1 && token < of_token.size() - 1; ++token) {
      const bool is_whole =
          token * group / prefill_rows == (token * group + group - 1) / prefill_rows;
      if (is_whole) CHECK(of_token[token] >= 1);
    }
  }
}

TEST_CASE("a device samples tiles of a text by the shares that rows of a block have in them") {
  if (!stream()) return;
  Random random(31);
  for (const uint32_t head_dim : {64u, 80u, 128u, 256u})
    for (const uint32_t group : {1u, 3u, 4u, 6u}) {
      const uint32_t pages = pages_of(head_dim, 2100);
      check_tiles({head_dim, 2, group, pages, 70, 90}, {.chosen = 4, .near = 12}, random);
      check_tiles({head_dim, 3, group, pages, 3, 40},
                  {.chosen = 2, .near = 16, .heads = 2, .exact = 1}, random);
    }
  // keys that differ little, so that all shares are alike
  check_tiles({128, 1, 4, pages_of(128, 4000), 10, 64, 1e-3f}, {.chosen = 6, .near = 30}, random);
}

TEST_CASE("a device divides the tiles of a small step, and merges the parts") {
  if (!stream()) return;
  Random random(32);
  for (const uint32_t head_dim : {64u, 128u, 256u})
    check_tiles({head_dim, 1, 4, pages_of(head_dim, 9000), 70, 33, 1, 1, false, true},
                {.chosen = 40, .near = 60}, random);
}

TEST_CASE("a device attends all tiles where as many are chosen as there are") {
  if (!stream()) return;
  Random random(33);
  const PrefillText t({128, 2, 4, pages_of(128, 1500), 20, 50}, random);
  const Attended whole = attend(t);
  for (const uint32_t near : {0u, 1u, 9u}) {
    Tiles tiles{.chosen = near, .near = near};
    const Attended some = attend(t, &tiles);
    double worst = 0;
    for (std::size_t i = 0; i < whole.out.size(); ++i)
      worst = std::max(worst, std::fabs(double{some.out[i]} - double{whole.out[i]}));
    CHECK(worst < 1e-4);
  }
}
