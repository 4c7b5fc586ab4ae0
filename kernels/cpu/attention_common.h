// The vector type of the attention and store kernels, and the code they share.
//
// The algorithms are templates over an Isa: a struct of thin wrappers around one instruction set.
// Each attention_<isa>.cc defines its Isa in an anonymous namespace, so that nothing compiled with
// wider flags has a name that the linker could share.
//
//   lanes                      32-bit lanes of a vector: 16, 8, 4 or 1
//   row_block                  query rows that share one pass over keys
//   scan_rows                  query rows that share one pass over summaries
//   key_columns                vectors of keys per vector of a query, so that accumulators fit the
//                              registers: 2 or 4
//   row_columns                vectors per broadcast: 2 or 4
//   key_offset                 added to every key byte by dot_keys: 128 where the instruction takes
//                              unsigned bytes, else 0
//   F, I                       vectors of float and int32;  B: 4 * lanes bytes;  K: the same,
//                              prepared for dot_keys
//   set, load, store           any alignment;  iset, iload, istore for int32
//   add, sub, mul, max, fma    fma(a, b, c) = a * b + c, rounded once where the set has an
//                              instruction; max of a NaN and a number may be either
//   residue(a, b, x)           a * b - x, whose sign is exact
//   sum, largest               over the lanes, in a fixed order
//   ceil, to_float, to_int     to_int rounds to nearest, ties to even
//   round(x)                   to the nearest integer
//   scale_by_pow2(p, n)        p * 2^n for integers n <= 0; may be 0 where that is no normal
//                              number, and is 0 for n <= -150
//   finite_or_zero(x)          0 where x is infinite or NaN
//   select_less(a, b, x, y)    x where a < b, else y
//   iota                       0, 1, 2 ...
//   keys(p)                    4 * lanes bytes of K at p
//   dot_keys(acc, k, q)        acc += sum of four (k + key_offset) * q products per lane;  four(x):
//                              four int8, in one int32, in every lane of a B
//   fold(i[max(lanes / 4, 1)]) for lanes / 4 vectors the sums of every fourth lane: [vector][4];
//   the
//                              identity for fewer lanes
//   nibbles(p, low, high), N   4 * lanes bytes at p as their lower and upper halves, 0 to 15
//   dot_nibbles(acc, n, q)     acc += sum of four n * q products per lane; q: four int8 in every
//                              lane;  imax(a, b): the maximum per lane
//   sum_bytes(p, n)            the sum of n int8, n a multiple of 32; only where key_offset is not
//                              0
//   bytes(p), W                4 * lanes bytes of V; W: an accumulator of weights in two 7-bit
//                              parts times V
//   key_bytes(k, d)            `lanes` dimensions of a quad's keys k, from d on, in the order of V
//   W::add(high, low, v)       high, low: four parts in one int32;  W::total(): 128 * high products
//                              + low products
//   store_bytes(p, i)          lanes int32, saturated to int8
//   store_weights(h, l, i[4])  4 * lanes values of 14 bits as their upper and lower 7 bits
//   transpose(...)             a square of lanes x lanes floats
//   at_least(p, threshold)     bit i set where the float p[i] >= threshold
//   count_at_least(c, p, t)    c + 1 in the lanes where p[i] >= t;  isum: over the lanes
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fill-inl.h"

namespace kvasir {
namespace {

constexpr uint32_t max_rows = 6;       // the largest row_block
constexpr uint32_t block_floats = 16;  // one float per row, in whole vectors
// Query rows that share one pass over int8 values: two accumulators each.
constexpr uint32_t value_rows = 2;
constexpr float minus_infinity = -__builtin_inff();

constexpr uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
constexpr uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
constexpr std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// A compile-time number as an argument.
template <uint32_t N>
struct Count {
  static constexpr uint32_t value = N;
};

// Calls f(Count<n>()) for the n in 1 .. Most that is given at run time.
template <uint32_t Most, class F>
void with_count(uint32_t n, F&& f) {
  if constexpr (Most > 1) {
    if (n < Most) return with_count<Most - 1>(n, f);
  }
  f(Count<Most>());
}

// Calls f(first, count) for all rows, at most Most at a time and in parts as equal as possible.
template <uint32_t Most, class F>
void by_row_blocks(uint32_t rows, F&& f) {
  const uint32_t blocks = (rows + Most - 1) / Most;
  for (uint32_t b = 0; b < blocks; ++b) {
    const auto first = static_cast<uint32_t>(uint64_t{rows} * b / blocks),
               end = static_cast<uint32_t>(uint64_t{rows} * (b + 1) / blocks);
    f(first, end - first);
  }
}

inline float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

inline int32_t load_four(const void* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// e^x for x <= 0, relative error under 2e-7 where the result is above 1e-37; e^-inf = 0. The
// polynomial is the degree-6 minimax of 2^f on [-1/2, 1/2], with the constant term fixed at 1 so
// that e^0 is exact.
template <class Isa>
typename Isa::F exp_negative(typename Isa::F x) {
  x = Isa::max(x, Isa::set(-110.0f));  // 2^-159 is 0 as a float
  const auto n = Isa::round(Isa::mul(x, Isa::set(1.44269502f)));
  auto f = Isa::fma(x, Isa::set(1.44269502f), Isa::sub(Isa::set(0), n));
  f = Isa::fma(x, Isa::set(1.92596303e-8f), f);
  auto p = Isa::set(1.53458124e-4f);
  p = Isa::fma(p, f, Isa::set(1.33999309e-3f));
  p = Isa::fma(p, f, Isa::set(9.61848907e-3f));
  p = Isa::fma(p, f, Isa::set(5.55032864e-2f));
  p = Isa::fma(p, f, Isa::set(2.40226462e-1f));
  p = Isa::fma(p, f, Isa::set(6.93147182e-1f));
  p = Isa::fma(p, f, Isa::set(1.0f));
  return Isa::scale_by_pow2(p, n);
}

template <class Isa>
float exp_negative_one(float x) {
  float lanes[Isa::lanes];
  Isa::store(lanes, exp_negative<Isa>(Isa::set(x)));
  return lanes[0];
}

// x[i] = e^x[i] for n <= max_rows numbers in an array of block_floats; the others must not be NaN.
template <class Isa>
void exp_negative_all(float* x, uint32_t n) {
  for (uint32_t i = 0; i < n; i += Isa::lanes)
    Isa::store(x + i, exp_negative<Isa>(Isa::load(x + i)));
}

template <class Isa>
typename Isa::F absolute(typename Isa::F x) {
  return Isa::max(x, Isa::sub(Isa::set(0), x));
}

// starts[r] = -key_offset * sum of the n bytes of q[r]: the initial value of a sum of products,
// which cancels the offset.
template <class Isa>
void key_offsets(const int8_t* q, uint32_t rows, uint32_t n, int32_t* starts) {
  for (uint32_t r = 0; r < rows; ++r) {
    starts[r] = 0;
    if constexpr (Isa::key_offset != 0)
      starts[r] = -Isa::key_offset * Isa::sum_bytes(q + r * std::size_t{n}, n);
  }
}

// The largest magnitude of n floats; infinities and NaNs count as 0. n: a multiple of 32.
template <class Isa>
float largest_magnitude(const float* x, uint32_t n) {
  auto best = Isa::set(0);
  for (uint32_t i = 0; i < n; i += Isa::lanes) {
    best = Isa::max(best, absolute<Isa>(Isa::finite_or_zero(Isa::load(x + i))));
  }
  return Isa::largest(best);
}

// Magnitudes below this become 0: the inverse of their scale would overflow.
constexpr float tiny_magnitude = 1e-30f;

}  // namespace
}  // namespace kvasir
