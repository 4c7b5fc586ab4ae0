// Sketches of keys: made when a page is sealed or the sketch is built, scanned by the selector; and what stands for pages that are not read.
#pragma once

#include "attention_common.h"
#include "store_scores.h"
#include "store_seal.h"

namespace kvasir {
namespace {

constexpr uint32_t most_sketch_dim = 96;  // of head_dim 256
constexpr float sketch_steps = 7.0f;      // 4 bits: -7 .. 7, stored + 8
constexpr int32_t sketch_offset = 8;

// x[t][c] = sum over d of K[t][d] * k_scale[t] * basis[d][c] for the tokens of a quad that begins at token `first` of the page.
// A vector of channels at a time, whose sums stay in registers.
template <class Isa>
void project_quad(const PageShape& shape, const float* basis, const int8_t* data, const uint16_t* scales, uint32_t first, float* x) {
  const uint32_t n = shape.sketch_dim(), dim = shape.dim;
  alignas(64) float keys[quad_tokens * max_head_dim];
  for (uint32_t d = 0; d < dim; d += 4)
    for (uint32_t t = 0; t < quad_tokens; ++t)
      for (uint32_t i = 0; i < 4; ++i) keys[t * dim + d + i] = static_cast<float>(data[first * dim + (d + t) * 4 + i]);
  for (uint32_t begin = 0; begin < n; begin += Isa::lanes) {
    const uint32_t c = smaller(begin, n - Isa::lanes);  // the last ones may be found twice
    typename Isa::F sums[quad_tokens] = {Isa::set(0), Isa::set(0), Isa::set(0), Isa::set(0)};
    for (uint32_t d = 0; d < dim; ++d) {
      const auto of = Isa::load(basis + d * n + c);
#pragma GCC unroll 4
      for (uint32_t t = 0; t < quad_tokens; ++t) sums[t] = Isa::add(sums[t], Isa::mul(Isa::set(keys[t * dim + d]), of));
    }
#pragma GCC unroll 4
    for (uint32_t t = 0; t < quad_tokens; ++t) Isa::store(x + t * n + c, Isa::mul(sums[t], Isa::set(from_bf16(scales[first + t]))));
  }
}

template <class Isa>
void seal_sketch(const PageShape& shape, const float* basis, const int8_t* data, const uint16_t* scales, uint32_t page,
                 int8_t* sketch) {
  const uint32_t n = shape.sketch_dim(), groups = n / 8;
  const std::size_t tile_bytes = std::size_t{quad_tokens} * groups * tile_blocks * 4;
  alignas(64) float x[quad_tokens * most_sketch_dim];
  for (uint32_t i = 0; i < shape.page_quads(); ++i) {
    project_quad<Isa>(shape, basis, data, scales, i * quad_tokens, x);
    float largest = 0;
    for (uint32_t c = 0; c < quad_tokens * n; ++c) {
      const float a = x[c] < 0 ? -x[c] : x[c];
      largest = a <= largest ? largest : a;  // a not-a-number too, which makes it none
    }
    const bool none = !(largest > tiny_magnitude && largest <= 1e30f);
    const uint16_t scale = none ? uint16_t{0} : bf16_upwards(largest / sketch_steps);
    const float inverse = none ? 0 : 1 / from_bf16(scale);
    const uint32_t quad = page * shape.page_quads() + i, tile = quad / tile_blocks, lane = quad % tile_blocks;
    std::memcpy(sketch + shape.quad_tiles() * tile_bytes + quad * sizeof scale, &scale, sizeof scale);
    for (uint32_t t = 0; t < quad_tokens; ++t) {
      const auto level = [&](uint32_t c) {
        const float v = none ? 0 : x[t * n + c] * inverse;
        return static_cast<uint32_t>(static_cast<int32_t>(v + (v < 0 ? -0.5f : 0.5f)) + sketch_offset);
      };
      for (uint32_t g = 0; g < groups; ++g) {
        int8_t* to = sketch + tile * tile_bytes + (t * groups + g) * tile_blocks * 4 + lane * 4;
        for (uint32_t j = 0; j < 4; ++j) to[j] = static_cast<int8_t>(level(8 * g + j) | level(8 * g + 4 + j) << 4);
      }
    }
  }
}

// For R rows and tiles of 16 quads: the largest of the tokens' integer scores, times the scales. G: sketch_dim / 8.
// q: [R][G][2] in every lane, so that a product reads its query from memory.
template <class Isa, uint32_t R, uint32_t G>
void score_sketch_tiles(uint32_t tiles, const int8_t* data, const int8_t* scale, const int8_t* ahead, const typename Isa::I* q, const int32_t* starts,
                        const float* q_scale, float* out, std::size_t stride) {
  typename Isa::I start[R];
  typename Isa::F unit[R];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < R; ++r) start[r] = Isa::iset(starts[r]), unit[r] = Isa::set(q_scale[r]);
  for (uint32_t tile = 0; tile < tiles; ++tile, out += tile_blocks) {
    uint16_t halves[tile_blocks];
    std::memcpy(halves, scale + tile * sizeof halves, sizeof halves);
    float scales[tile_blocks];
    for (uint32_t i = 0; i < tile_blocks; ++i) scales[i] = from_bf16(halves[i]);
    for (uint32_t lane = 0; lane < tile_blocks; lane += Isa::lanes) {
      typename Isa::I best[R];
#pragma GCC unroll 8
      for (uint32_t r = 0; r < R; ++r) best[r] = Isa::iset(INT32_MIN);
      const int8_t* from = data + lane * 4;
#pragma GCC unroll 1
      for (uint32_t t = 0; t < quad_tokens; ++t) {  // unrolled it would be no faster, and large
        typename Isa::I acc[R];
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; ++r) acc[r] = start[r];
#pragma GCC unroll 12
        for (uint32_t g = 0; g < G; ++g, from += tile_blocks * 4) {
          if (lane == 0) __builtin_prefetch(ahead + (from - data), 0, 2);
          typename Isa::N low, high;
          Isa::nibbles(from, low, high);
#pragma GCC unroll 8
          for (uint32_t r = 0; r < R; ++r) {
            acc[r] = Isa::dot_nibbles(acc[r], low, q[(r * G + g) * 2]);
            acc[r] = Isa::dot_nibbles(acc[r], high, q[(r * G + g) * 2 + 1]);
          }
        }
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; ++r) best[r] = Isa::imax(best[r], acc[r]);
      }
      const auto step = Isa::load(scales + lane);
#pragma GCC unroll 8
      for (uint32_t r = 0; r < R; ++r) Isa::store(out + r * stride + lane, Isa::mul(Isa::to_float(best[r]), Isa::mul(step, unit[r])));
    }
    data += std::size_t{quad_tokens} * G * tile_blocks * 4;
    ahead += std::size_t{quad_tokens} * G * tile_blocks * 4;
  }
}

template <class Isa, uint32_t G>
void score_sketch_of(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale, const int8_t* sketch, const int8_t* next,
                     float* scores, std::size_t stride) {
  constexpr uint32_t n = 8 * G;
  const uint32_t tiles = shape.quad_tiles();
  const std::size_t tile_bytes = std::size_t{quad_tokens} * G * tile_blocks * 4;
  by_row_blocks<Isa::scan_rows>(rows, [&](uint32_t row, uint32_t count) {
    typename Isa::I block[Isa::scan_rows * G * 2];
    int32_t starts[Isa::scan_rows];
    for (uint32_t r = 0; r < count; ++r) {
      const int8_t* of_row = q + (std::size_t{row} + r) * n;
      starts[r] = 0;
      for (uint32_t c = 0; c < n; ++c) starts[r] -= sketch_offset * of_row[c];
      for (uint32_t c = 0; c < n; c += 4) block[(r * n + c) / 4] = Isa::iset(load_four(of_row + c));
    }
    with_count<Isa::scan_rows>(count, [&](auto n_rows) {
      score_sketch_tiles<Isa, n_rows.value, G>(tiles, sketch, sketch + tiles * tile_bytes, next && row == 0 ? next : sketch, block, starts, q_scale + row,
                                               scores + row * stride, stride);
    });
  });
}

template <class Isa>
void score_sketch(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale, const int8_t* sketch,
                  const int8_t* next, float* scores, std::size_t stride) {
  switch (shape.sketch_dim() / 8) {  // one for each dim that pages have
    case 2: return score_sketch_of<Isa, 2>(shape, rows, q, q_scale, sketch, next, scores, stride);
    case 3: return score_sketch_of<Isa, 3>(shape, rows, q, q_scale, sketch, next, scores, stride);
    case 6: return score_sketch_of<Isa, 6>(shape, rows, q, q_scale, sketch, next, scores, stride);
    case 12: return score_sketch_of<Isa, 12>(shape, rows, q, q_scale, sketch, next, scores, stride);
  }
}

}  // namespace
}  // namespace kvasir
