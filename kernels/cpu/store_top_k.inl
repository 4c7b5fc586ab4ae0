// The k largest of n scores: the k-th largest is found by counting the scores' upper bits, then one pass writes the indices.
//
// Scores become unsigned keys in the same order. A histogram of the keys' first 11 bits says in which bin the k-th largest lies;
// two more histograms, over that bin's keys alone, settle the other 21 bits.
#pragma once

#include "attention_common.inl"

namespace kvasir {
namespace {

// Larger floats give larger keys; -0 counts as 0.
inline uint32_t key_of(float score) {
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}

// Calls f(i) for each i in [0, n) with keys[i] >= threshold, ascending, until f returns false.
template <class Isa, class F>
void for_each_at_least(const uint32_t* keys, uint32_t n, uint32_t threshold, F&& f) {
  uint32_t i = 0;
  for (; i + Isa::lanes <= n; i += Isa::lanes) {
    for (uint32_t mask = Isa::at_least(keys + i, threshold); mask != 0; mask &= mask - 1) {
      if (!f(i + static_cast<uint32_t>(__builtin_ctz(mask)))) return;
    }
  }
  for (; i < n; ++i) {
    if (keys[i] >= threshold && !f(i)) return;
  }
}

// Where the rank-th largest (1 is the largest) of a histogram lies; rank becomes its rank within that bin.
inline uint32_t find_bin(const uint32_t* counts, uint32_t bins, uint32_t& rank) {
  uint32_t bin = bins - 1;
  for (; bin > 0 && counts[bin] < rank; --bin) rank -= counts[bin];
  return bin;
}

constexpr uint32_t top_bits = 11, middle_bits = 11, last_bits = 10;
constexpr uint32_t most_bins = 1u << 11;

// The rank-th largest of the keys in [low, low + (1 << (bits + shift))), as the lower end of its bin of 1 << shift keys.
template <class Isa>
uint32_t refine(const uint32_t* keys, uint32_t n, uint32_t low, uint32_t bits, uint32_t shift, uint32_t& rank) {
  const uint32_t bins = 1u << bits;
  uint32_t counts[most_bins];
  std::memset(counts, 0, bins * sizeof counts[0]);
  for_each_at_least<Isa>(keys, n, low, [&](uint32_t i) {
    const uint32_t bin = (keys[i] - low) >> shift;
    if (bin < bins) ++counts[bin];
    return true;
  });
  return low + (find_bin(counts, bins, rank) << shift);
}

// rank becomes how many of the equals of the rank-th largest belong to the rank largest.
template <class Isa>
uint32_t kth_largest(const uint32_t* keys, uint32_t n, uint32_t& rank) {
  uint32_t counts[2][most_bins] = {};  // two, so that neighbours in one bin do not wait for each other
  for (uint32_t i = 0; i < n; ++i) ++counts[i & 1][keys[i] >> (32 - top_bits)];
  for (uint32_t b = 0; b < most_bins; ++b) counts[0][b] += counts[1][b];
  uint32_t low = find_bin(counts[0], most_bins, rank) << (32 - top_bits);
  low = refine<Isa>(keys, n, low, middle_bits, last_bits, rank);
  return refine<Isa>(keys, n, low, last_bits, 0, rank);
}

template <class Isa>
uint32_t top_k(const float* scores, uint32_t n, uint32_t k, uint32_t* out, std::byte* scratch) {
  if (k >= n) {
    for (uint32_t i = 0; i < n; ++i) out[i] = i;
    return n;
  }
  if (k == 0) return 0;
  auto* keys = reinterpret_cast<uint32_t*>(scratch);
  for (uint32_t i = 0; i < n; ++i) keys[i] = key_of(scores[i]);
  uint32_t ties = k;  // how many scores equal to the k-th largest are wanted
  const uint32_t threshold = kth_largest<Isa>(keys, n, ties);
  uint32_t found = 0;
  for_each_at_least<Isa>(keys, n, threshold, [&](uint32_t i) {
    if (keys[i] == threshold) {
      if (ties == 0) return true;
      --ties;
    }
    out[found++] = i;
    return found < k;
  });
  return k;
}

}  // namespace
}  // namespace kvasir
