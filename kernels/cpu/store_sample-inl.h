// Samples of quads by their shares: the sums below a threshold, and the quads that it takes. See
// select/sampling.h.
#pragma once

#include "attention_common.h"

namespace kvasir {
namespace {

template <class Isa>
ShareSums sum_shares(const float* shares, uint32_t n, float threshold) {
  const uint32_t whole = n / (2 * Isa::lanes) * 2 * Isa::lanes;
  const auto t = Isa::set(threshold), none = Isa::set(0);
  // Two of each, so that an addition does not wait for the previous one.
  typename Isa::F below[2] = {none, none}, squares[2] = {none, none};
  typename Isa::I counts[2] = {Isa::iset(0), Isa::iset(0)};
  for (uint32_t i = 0; i < whole; i += 2 * Isa::lanes)
#pragma GCC unroll 2
    for (uint32_t j = 0; j < 2; ++j) {
      const float* at = shares + i + j * Isa::lanes;
      const auto share = Isa::load(at), x = Isa::select_less(share, t, share, none);
      below[j] = Isa::add(below[j], x);
      squares[j] = Isa::fma(x, x, squares[j]);
      counts[j] = Isa::count_at_least(counts[j], at, threshold);
    }
  ShareSums sums{double{Isa::sum(Isa::add(below[0], below[1]))},
                 double{Isa::sum(Isa::add(squares[0], squares[1]))},
                 Isa::isum(counts[0]) + Isa::isum(counts[1])};
  for (uint32_t i = whole; i < n; ++i) {
    if (shares[i] < threshold)
      sums.below += double{shares[i]}, sums.squares += double{shares[i]} * double{shares[i]};
    if (shares[i] >= threshold) ++sums.at_least;
  }
  return sums;
}

template <class Isa>
uint32_t sample(const float* shares, uint32_t n, uint32_t first, uint32_t seed, float threshold,
                uint32_t* out) {
  constexpr uint32_t pass_quads = 64;
  float above[pass_quads];  // a quad's share less the threshold times its random number
  uint32_t found = 0;
  for (uint32_t begin = 0; begin < n; begin += pass_quads) {
    const uint32_t count = smaller(pass_quads, n - begin);
    for (uint32_t i = 0; i < count; ++i) {  // for the compiler to vectorise
      uint32_t x = (first + begin + i) * 0x9e3779b1u + seed;
      x = (x ^ x >> 16) * 0x85ebca6bu;
      x = (x ^ x >> 13) * 0xc2b2ae35u;
      x ^= x >> 16;
      // At most 1 - 2^-25, which rounds to 1.
      const float u = (static_cast<float>(static_cast<int32_t>(x >> 8)) + 0.5f) * 0x1p-24f;
      above[i] = shares[begin + i] - threshold * u;
    }
    for (uint32_t i = count; i < pass_quads; ++i) above[i] = -1;
    for (uint32_t i = 0; i < pass_quads; i += Isa::lanes)
      for (uint32_t some = Isa::at_least(above + i, 0); some; some &= some - 1)
        out[found++] = begin + i + static_cast<uint32_t>(__builtin_ctz(some));
  }
  return found;
}

}  // namespace
}  // namespace kvasir
