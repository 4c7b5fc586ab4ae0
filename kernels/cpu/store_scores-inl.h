// The selectors' scans over the summaries of an extent: integer dot products of columns interleaved
// by four, 16 at a time.
#pragma once

#include "attention_common.h"

namespace kvasir {
namespace {

constexpr uint32_t columns = 16;
static_assert(columns == tile_blocks);

// out[r * stride + c] = scale[c] * q_scale[r] * sum over quads and i of data[quad][c][i] * q[r][4 *
// quad + i], for R rows, 16 columns. data: int8 [quads][16][4]; q: int8 [R][4 * quads]; scale: f32
// [16]. ahead: as many bytes of the next call, prefetched.
template <class Isa, uint32_t R>
void score_columns(const int8_t* data, const int8_t* scale, const int8_t* ahead, uint32_t quads,
                   const int8_t* q, const int32_t* starts, const float* q_scale, float* out,
                   std::size_t stride) {
  constexpr uint32_t C = columns / Isa::lanes;
  typename Isa::I acc[R][C];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::iset(starts[r]);
  }
  for (uint32_t quad = 0; quad < quads; ++quad, data += columns * 4, ahead += columns * 4) {
    __builtin_prefetch(ahead, 0, 2);
    typename Isa::K k[C];
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) k[c] = Isa::keys(data + c * Isa::lanes * 4);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
      const auto q4 = Isa::four(load_four(q + (r * std::size_t{quads} + quad) * 4));
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::dot_keys(acc[r][c], k[c], q4);
    }
  }
  float scales[columns];
  std::memcpy(scales, scale, sizeof scales);
#pragma GCC unroll 8
  for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) {
      const auto unit = Isa::mul(Isa::load(scales + c * Isa::lanes), Isa::set(q_scale[r]));
      Isa::store(out + r * stride + c * Isa::lanes, Isa::mul(Isa::to_float(acc[r][c]), unit));
    }
  }
}

template <class Isa>
void score_bounds(const PageShape& shape, const QueryRows& rows, const int8_t* bounds,
                  const int8_t* next, float* scores, std::size_t stride) {
  const uint32_t tiles = extent_pages * (shape.page_tokens / shape.block_tokens) / tile_blocks,
                 quads = 2 * shape.dim / 4;
  const std::size_t tile_bytes = std::size_t{quads} * 4 * columns;
  by_row_blocks<Isa::scan_rows>(rows.rows, [&](uint32_t row, uint32_t n) {
    const int8_t* block = rows.split + std::size_t{row} * quads * 4;
    int32_t starts[Isa::scan_rows];
    key_offsets<Isa>(block, n, quads * 4, starts);
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const int8_t* data = bounds + tile * tile_bytes;
      const int8_t* ahead = next && row == 0 ? next + tile * tile_bytes : data;
      const int8_t* scales = bounds + tiles * tile_bytes + tile * columns * sizeof(float);
      float* out = scores + row * stride + tile * columns;
      with_count<Isa::scan_rows>(n, [&](auto count) {
        score_columns<Isa, count.value>(data, scales, ahead, quads, block, starts, rows.scale + row,
                                        out, stride);
      });
    }
  });
}

// e^-24 of the largest: a million such scores do not change a float.
constexpr float no_share = 24.0f;

// scores[i] <- e^(scores[i] - the largest); returns the factor that makes shares of them.
template <class Isa>
float exponentials(float* scores, uint32_t n, float m, float l) {
  const uint32_t whole = n / Isa::lanes * Isa::lanes;
  auto best = Isa::set(m);
  for (uint32_t i = 0; i < whole; i += Isa::lanes) best = Isa::max(best, Isa::load(scores + i));
  float largest = Isa::largest(best);
  for (uint32_t i = whole; i < n; ++i) largest = scores[i] > largest ? scores[i] : largest;
  if (largest == minus_infinity) {
    std::memset(scores, 0, n * sizeof(float));
    return 0;
  }
  float rest[Isa::lanes];  // the last scores, padded with scores without a share
  for (uint32_t i = 0; i < Isa::lanes; ++i)
    rest[i] = whole + i < n ? scores[whole + i] : minus_infinity;
  const auto shift = Isa::set(largest);
  auto total = Isa::set(0);
  const float smallest = largest - no_share;
  for (uint32_t i = 0; i < whole; i += Isa::lanes) {
    if (!Isa::at_least(scores + i, smallest)) {
      Isa::store(scores + i, Isa::set(0));
      continue;
    }
    const auto e = exp_negative<Isa>(Isa::sub(Isa::load(scores + i), shift));
    total = Isa::add(total, e);
    Isa::store(scores + i, e);
  }
  const auto last = exp_negative<Isa>(Isa::sub(Isa::load(rest), shift));
  Isa::store(rest, last);
  for (uint32_t i = whole; i < n; ++i) scores[i] = rest[i - whole];
  const float others = l > 0 ? l * exp_negative_one<Isa>(m - largest) : 0;
  return 1 / (Isa::sum(Isa::add(total, last)) + others);
}

template <class Isa>
void attention_shares(float* scores, uint32_t rows, std::size_t stride, uint32_t n, const float* m,
                      const float* l) {
  const uint32_t whole = n / Isa::lanes * Isa::lanes;
  // Of the first row, to which the others are added.
  float scale = exponentials<Isa>(scores, n, m[0], l[0]);
  for (uint32_t r = 1; r < rows; ++r, scale = 1) {
    float* row = scores + r * stride;
    const float row_scale = exponentials<Isa>(row, n, m[r], l[r]);
    const auto of_sum = Isa::set(scale), of_row = Isa::set(row_scale);
    for (uint32_t i = 0; i < whole; i += Isa::lanes)
      Isa::store(scores + i, Isa::add(Isa::mul(Isa::load(scores + i), of_sum),
                                      Isa::mul(Isa::load(row + i), of_row)));
    for (uint32_t i = whole; i < n; ++i) scores[i] = scores[i] * scale + row[i] * row_scale;
  }
  if (rows > 1) return;
  for (uint32_t i = 0; i < whole; i += Isa::lanes)
    Isa::store(scores + i, Isa::mul(Isa::load(scores + i), Isa::set(scale)));
  for (uint32_t i = whole; i < n; ++i) scores[i] *= scale;
}

}  // namespace
}  // namespace kvasir
