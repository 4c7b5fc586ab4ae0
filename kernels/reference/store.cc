// The store's operations in scalar double precision. Deliberately repeats the layouts of
// backend/page.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "reference.h"

namespace kvasir::reference {

static double read_float(const int8_t* at) {
  float x;
  std::memcpy(&x, at, sizeof x);
  return double{x};
}

double block_bound(const PageShape& shape, const int8_t* bounds, uint32_t block, uint32_t channel) {
  const uint32_t tile = block / 16, lane = block % 16, row = channel / 4;
  const std::size_t tile_bytes = std::size_t{2} * shape.dim * 16,
                    tiles = shape.extent_blocks() / 16;
  return bounds[tile * tile_bytes + row * 64 + lane * 4 + channel % 4] *
         read_float(bounds + tiles * tile_bytes + block * 4);
}

void score_bounds(const PageShape& shape, const QueryRows& q, const int8_t* bounds, double* scores,
                  std::size_t stride) {
  for (std::size_t r = 0; r < q.rows; ++r) {
    for (uint32_t b = 0; b < shape.extent_blocks(); ++b) {
      double sum = 0;
      for (uint32_t c = 0; c < 2 * shape.dim; ++c)
        sum += q.split[r * 2 * shape.dim + c] * block_bound(shape, bounds, b, c);
      scores[r * stride + b] = sum * double{q.scale[r]};
    }
  }
}

double sketch_value(const PageShape& shape, const int8_t* sketch, uint32_t quad, uint32_t token,
                    uint32_t channel) {
  const uint32_t groups = shape.sketch_dim() / 8, tiles = shape.extent_tokens() / 64;
  const std::size_t tile_bytes = std::size_t{4} * groups * 64;
  const auto byte =
      static_cast<uint8_t>(sketch[quad / 16 * tile_bytes + (token * groups + channel / 8) * 64 +
                                  quad % 16 * 4 + channel % 4]);
  const int value = (channel % 8 < 4 ? byte & 15 : byte >> 4) - 8;
  uint16_t scale;
  std::memcpy(&scale, sketch + tiles * tile_bytes + quad * 2, 2);
  return value * from_bf16(scale);
}

void multiply(const float* a, std::size_t row, std::size_t step, uint32_t rows, const float* b,
              std::size_t b_stride, uint32_t cols, uint32_t n, double* out,
              std::size_t out_stride) {
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t c = 0; c < cols; ++c) {
      double sum = 0;
      for (uint32_t k = 0; k < n; ++k)
        sum += double{a[r * row + k * step]} * double{b[k * b_stride + c]};
      out[r * out_stride + c] = sum;
    }
}

void score_sketch(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale,
                  const int8_t* sketch, double* scores, std::size_t stride) {
  const uint32_t n = shape.sketch_dim();
  for (std::size_t r = 0; r < rows; ++r) {
    for (uint32_t b = 0; b < shape.extent_tokens() / 4; ++b) {
      double best = -HUGE_VAL;
      for (uint32_t t = 0; t < 4; ++t) {
        double sum = 0;
        for (uint32_t c = 0; c < n; ++c) sum += q[r * n + c] * sketch_value(shape, sketch, b, t, c);
        best = std::max(best, sum);
      }
      scores[r * stride + b] = best * double{q_scale[r]};
    }
  }
}

void attention_shares(const float* scores, uint32_t n, float m, float l, double* shares) {
  double largest = double{m};
  for (uint32_t i = 0; i < n; ++i) largest = std::max(largest, double{scores[i]});
  if (largest == -HUGE_VAL) return std::fill_n(shares, n, 0.0), void();
  double total = double{l} > 0 ? double{l} * std::exp(double{m} - largest) : 0;
  for (uint32_t i = 0; i < n; ++i) total += shares[i] = std::exp(double{scores[i]} - largest);
  for (uint32_t i = 0; i < n; ++i) shares[i] /= total;
}

double sample_random(uint32_t number, uint32_t seed) {
  uint32_t x = number * 0x9e3779b1u + seed;
  x ^= x >> 16, x *= 0x85ebca6bu;
  x ^= x >> 13, x *= 0xc2b2ae35u;
  x ^= x >> 16;
  return std::ldexp((x >> 8) + 0.5, -24);
}

uint32_t top_k(const float* scores, uint32_t n, uint32_t k, uint32_t* out) {
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  order.resize(std::min(k, n));
  std::sort(order.begin(), order.end());
  std::copy(order.begin(), order.end(), out);
  return static_cast<uint32_t>(order.size());
}

}  // namespace kvasir::reference
