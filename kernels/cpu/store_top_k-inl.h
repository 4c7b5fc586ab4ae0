// The k largest of n scores: finds a threshold that exactly k scores reach, or that equals the k-th
// largest, then writes the indices.
//
// Bisection over the floats in their order finds the threshold; each step counts the scores that
// reach the middle, in one pass of compares. To have few scores to count, candidates are chosen
// first. Scores are folded into groups, each represented by its maximum. At least k scores reach
// what k of these maxima reach, and not many more when there are several groups for each of the k.
#pragma once

#include "attention_common.h"

namespace kvasir {
namespace {

// Integers in the order of the floats: larger floats have larger ranks; -0 counts as 0.
inline uint32_t rank_of(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}

inline float float_of(uint32_t rank) {
  const uint32_t bits = rank & 0x80000000u ? rank ^ 0x80000000u : ~rank;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <class Isa>
uint32_t count_at_least(const float* x, uint32_t n, float threshold) {
  auto counts = Isa::iset(0);
  uint32_t i = 0;
  for (; i + Isa::lanes <= n; i += Isa::lanes)
    counts = Isa::count_at_least(counts, x + i, threshold);
  uint32_t count = Isa::isum(counts);
  for (; i < n; ++i) count += x[i] >= threshold ? 1 : 0;
  return count;
}

// Calls f(i) for each i in [0, n) with x[i] >= threshold, ascending, until f returns false.
template <class Isa, class F>
void for_each_at_least(const float* x, uint32_t n, float threshold, F&& f) {
  uint32_t i = 0;
  for (; i + Isa::lanes <= n; i += Isa::lanes) {
    for (uint32_t mask = Isa::at_least(x + i, threshold); mask != 0; mask &= mask - 1) {
      if (!f(i + static_cast<uint32_t>(__builtin_ctz(mask)))) return;
    }
  }
  for (; i < n; ++i) {
    if (x[i] >= threshold && !f(i)) return;
  }
}

struct Threshold {
  float value;
  uint32_t reached;  // number of scores that reach it
  uint32_t above;    // number of scores that exceed it, when `reached` is above the limit
};

// The largest threshold of the bisection that at least k of x reach, and at most `allowed` if ties
// permit; otherwise the k-th largest score. lowest: a threshold that at least k reach.
template <class Isa>
Threshold find_threshold(const float* x, uint32_t n, uint32_t k, uint32_t allowed, float lowest) {
  uint32_t low = rank_of(lowest), high = rank_of(__builtin_inff()) + 1;
  uint32_t reached = n, above = 0;
  while (reached > allowed && high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const uint32_t count = count_at_least<Isa>(x, n, float_of(middle));
    if (count >= k) {
      low = middle;
      reached = count;
    } else {
      high = middle;
      above = count;
    }
  }
  return {float_of(low), reached, above};
}

// Writes the candidates' scores and indices, at most n / 2 of each, to scratch. Returns their
// number; 0 when there are more.
template <class Isa>
uint32_t choose_candidates(const float* scores, uint32_t n, uint32_t k, float* values,
                           uint32_t* indices) {
  constexpr uint32_t fold = 8;  // vectors per group
  const uint32_t groups = n / (fold * Isa::lanes) * Isa::lanes;
  if (groups < 2 * k) return 0;
  for (uint32_t g = 0; g < groups; g += Isa::lanes) {
    auto largest = Isa::load(scores + g * fold);
#pragma GCC unroll 8
    for (uint32_t i = 1; i < fold; ++i)
      largest = Isa::max(largest, Isa::load(scores + g * fold + i * Isa::lanes));
    Isa::store(values + g, largest);
  }
  const float lowest = find_threshold<Isa>(values, groups, k, k + k / 8 + 4, minus_infinity).value;
  uint32_t found = 0;
  bool fits = true;
  for_each_at_least<Isa>(scores, n, lowest, [&](uint32_t i) {
    if (found == n / 2) return fits = false;
    values[found] = scores[i];
    indices[found++] = i;
    return true;
  });
  return fits ? found : 0;
}

template <class Isa>
uint32_t top_k(const float* scores, uint32_t n, uint32_t k, uint32_t* out, std::byte* scratch) {
  if (k >= n) {
    for (uint32_t i = 0; i < n; ++i) out[i] = i;
    return n;
  }
  if (k == 0) return 0;
  auto* values = reinterpret_cast<float*>(scratch);              // [n / 2]
  auto* indices = reinterpret_cast<uint32_t*>(scratch) + n / 2;  // [n / 2]
  uint32_t candidates = choose_candidates<Isa>(scores, n, k, values, indices);
  const bool mapped = candidates != 0;
  const float* x = mapped ? values : scores;
  if (!mapped) candidates = n;
  const Threshold threshold = find_threshold<Isa>(x, candidates, k, k, minus_infinity);
  // ties: how many scores equal to the threshold are taken, when too many reach it.
  uint32_t found = 0, ties = k - threshold.above;
  for_each_at_least<Isa>(x, candidates, threshold.value, [&](uint32_t i) {
    if (threshold.reached > k && x[i] == threshold.value) {
      if (ties == 0) return true;
      --ties;
    }
    out[found++] = mapped ? indices[i] : i;
    return found < k;
  });
  return found;  // k, unless a score was NaN
}

}  // namespace
}  // namespace kvasir
