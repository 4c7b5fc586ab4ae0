// Sketches of keys: made when a page is sealed or the sketch is built, scanned by the selector; and what stands for pages that are not read.
#pragma once

#include "attention_common.h"
#include "store_scores.h"

namespace kvasir {
namespace {

constexpr uint32_t most_sketch_dim = 96;  // of head_dim 256
constexpr float sketch_steps = 7.0f;      // 4 bits: -7 .. 7, stored + 8
constexpr int32_t sketch_offset = 8;

// x[t][c] = sum over d of K[t][d] * k_scale[t] * basis[d][c] for the tokens of a block that begins at token `first` of the page.
// Four tokens and a vector of channels at a time, whose sums stay in registers.
template <class Isa>
void project_keys(const PageShape& shape, const float* basis, const int8_t* data, const uint16_t* scales, uint32_t first, float* x) {
  constexpr uint32_t together = 4;
  const uint32_t n = shape.sketch_dim(), dim = shape.dim;
  alignas(64) float keys[together * max_head_dim];
  for (uint32_t at = 0; at < shape.block_tokens; at += together) {
    for (uint32_t d = 0; d < dim; d += 4)
      for (uint32_t t = 0; t < together; ++t)
        for (uint32_t i = 0; i < 4; ++i) keys[t * dim + d + i] = static_cast<float>(data[(first + at) * dim + (d + t) * 4 + i]);
    for (uint32_t begin = 0; begin < n; begin += Isa::lanes) {
      const uint32_t c = smaller(begin, n - Isa::lanes);  // the last ones may be found twice
      typename Isa::F sums[together] = {Isa::set(0), Isa::set(0), Isa::set(0), Isa::set(0)};
      for (uint32_t d = 0; d < dim; ++d) {
        const auto of = Isa::load(basis + d * n + c);
#pragma GCC unroll 4
        for (uint32_t t = 0; t < together; ++t) sums[t] = Isa::add(sums[t], Isa::mul(Isa::set(keys[t * dim + d]), of));
      }
#pragma GCC unroll 4
      for (uint32_t t = 0; t < together; ++t) Isa::store(x + (at + t) * n + c, Isa::mul(sums[t], Isa::set(from_bf16(scales[first + at + t]))));
    }
  }
}

template <class Isa>
void seal_sketch(const PageShape& shape, const float* basis, const int8_t* data, const uint16_t* scales, uint32_t page,
                 int8_t* sketch) {
  const uint32_t n = shape.sketch_dim(), groups = n / 8, block_tokens = shape.block_tokens;
  const uint32_t blocks = shape.page_tokens / block_tokens, tiles = extent_pages * blocks / tile_blocks;
  const std::size_t tile_bytes = std::size_t{block_tokens} * groups * tile_blocks * 4;
  alignas(64) float x[16 * most_sketch_dim];
  for (uint32_t b = 0; b < blocks; ++b) {
    project_keys<Isa>(shape, basis, data, scales, b * block_tokens, x);
    float largest = 0;
    for (uint32_t i = 0; i < block_tokens * n; ++i) {
      const float a = x[i] < 0 ? -x[i] : x[i];
      largest = a > largest ? a : largest;
    }
    const bool none = !(largest > tiny_magnitude) || largest > 1e30f;
    const float scale = none ? 0 : largest / sketch_steps, inverse = none ? 0 : sketch_steps / largest;
    const uint32_t block = page * blocks + b, tile = block / tile_blocks, lane = block % tile_blocks;
    std::memcpy(sketch + tiles * tile_bytes + block * sizeof scale, &scale, sizeof scale);
    for (uint32_t t = 0; t < block_tokens; ++t) {
      const auto level = [&](uint32_t c) {
        const float v = none ? 0 : x[t * n + c] * inverse;
        return static_cast<uint32_t>(static_cast<int32_t>(v + (v < 0 ? -0.5f : 0.5f)) + sketch_offset);
      };
      for (uint32_t g = 0; g < groups; ++g) {
        int8_t* to = sketch + tile * tile_bytes + (t * groups + g) * tile_blocks * 4 + lane * 4;
        for (uint32_t i = 0; i < 4; ++i) to[i] = static_cast<int8_t>(level(8 * g + i) | level(8 * g + 4 + i) << 4);
      }
    }
  }
}

// For R rows and 16 blocks: the largest of the tokens' integer scores, times the scales. G: sketch_dim / 8.
// q: [R][G][2] in every lane, so that a product reads its query from memory.
template <class Isa, uint32_t R, uint32_t G>
void score_sketch_tile(const int8_t* data, const int8_t* scale, const int8_t* ahead, uint32_t tokens, const typename Isa::I* q, const int32_t* starts,
                       const float* q_scale, float* out, std::size_t stride) {
  float scales[tile_blocks];
  std::memcpy(scales, scale, sizeof scales);
  for (uint32_t lane = 0; lane < tile_blocks; lane += Isa::lanes) {
    typename Isa::I best[R];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) best[r] = Isa::iset(INT32_MIN);
    const int8_t* from = data + lane * 4;
    for (uint32_t t = 0; t < tokens; ++t) {
      typename Isa::I acc[R];
#pragma GCC unroll 8
      for (uint32_t r = 0; r < R; ++r) acc[r] = Isa::iset(starts[r]);
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
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
      const auto unit = Isa::mul(Isa::load(scales + lane), Isa::set(q_scale[r]));
      Isa::store(out + r * stride + lane, Isa::mul(Isa::to_float(best[r]), unit));
    }
  }
}

template <class Isa, uint32_t G>
void score_sketch_of(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale, const int8_t* sketch, const int8_t* next,
                     float* scores, std::size_t stride) {
  constexpr uint32_t n = 8 * G;
  const uint32_t tokens = shape.block_tokens, tiles = shape.extent_tiles();
  const std::size_t tile_bytes = std::size_t{tokens} * G * tile_blocks * 4;
  by_row_blocks<Isa::scan_rows>(rows, [&](uint32_t row, uint32_t count) {
    typename Isa::I block[Isa::scan_rows * G * 2];
    int32_t starts[Isa::scan_rows];
    for (uint32_t r = 0; r < count; ++r) {
      const int8_t* of_row = q + (std::size_t{row} + r) * n;
      starts[r] = 0;
      for (uint32_t c = 0; c < n; ++c) starts[r] -= sketch_offset * of_row[c];
      for (uint32_t c = 0; c < n; c += 4) block[(r * n + c) / 4] = Isa::iset(load_four(of_row + c));
    }
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const int8_t* data = sketch + tile * tile_bytes;
      const int8_t* ahead = next && row == 0 ? next + tile * tile_bytes : data;
      const int8_t* scales = sketch + tiles * tile_bytes + tile * tile_blocks * sizeof(float);
      float* out = scores + row * stride + tile * tile_blocks;
      with_count<Isa::scan_rows>(count, [&](auto n_rows) {
        score_sketch_tile<Isa, n_rows.value, G>(data, scales, ahead, tokens, block, starts, q_scale + row, out, stride);
      });
    }
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
