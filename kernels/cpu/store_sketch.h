// Sketches of keys: made when a page is sealed or the sketch is built, scanned by the selector; and what stands for pages that are not read.
#pragma once

#include "attention_common.h"
#include "store_scores.h"

namespace kvasir {
namespace {

constexpr uint32_t most_sketch_dim = 96;  // of head_dim 256
constexpr float sketch_steps = 7.0f;      // 4 bits: -7 .. 7, stored + 8
constexpr int32_t sketch_offset = 8;
constexpr float faint = 16.0f;            // e^-16 = 1e-7

// x[t][c] = sum over d of K[t][d] * k_scale[t] * basis[d][c] for the tokens of a block that begins at token `first` of the page.
template <class Isa>
void project_keys(const PageShape& shape, const float* basis, const int8_t* data, const uint16_t* scales, uint32_t first, float* x) {
  const uint32_t tokens = shape.page_tokens, n = shape.sketch_dim();
  for (uint32_t t = 0; t < shape.block_tokens; ++t) {
    float* row = x + t * n;
    std::memset(row, 0, n * sizeof(float));
    for (uint32_t d = 0; d < shape.dim; ++d) {
      const auto k = static_cast<float>(data[(d / 4 * tokens + first + t) * 4 + d % 4]);
      for (uint32_t c = 0; c < n; c += 8) {  // a constant 8: vectors without a loop's beginning and end
        for (uint32_t i = c; i < c + 8; ++i) row[i] += k * basis[d * n + i];
      }
    }
    const float scale = from_bf16(scales[first + t]);
    for (uint32_t c = 0; c < n; ++c) row[c] *= scale;
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

// For R rows and 16 blocks: the largest of the tokens' integer scores, times the scales.
template <class Isa, uint32_t R>
void score_sketch_tile(const int8_t* data, const int8_t* scale, const int8_t* ahead, uint32_t tokens, uint32_t groups, const int8_t* q, const int32_t* starts,
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
      for (uint32_t g = 0; g < groups; ++g, from += tile_blocks * 4) {
        if (lane == 0) __builtin_prefetch(ahead + (from - data), 0, 2);
        typename Isa::N low, high;
        Isa::nibbles(from, low, high);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; ++r) {
          const int8_t* query = q + (r * std::size_t{groups} + g) * 8;
          acc[r] = Isa::dot_nibbles(acc[r], low, load_four(query));
          acc[r] = Isa::dot_nibbles(acc[r], high, load_four(query + 4));
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

template <class Isa>
void score_sketch(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale, const int8_t* sketch,
                  const int8_t* next, float* scores, std::size_t stride) {
  const uint32_t n = shape.sketch_dim(), groups = n / 8, tokens = shape.block_tokens;
  const uint32_t tiles = extent_pages * (shape.page_tokens / tokens) / tile_blocks;
  const std::size_t tile_bytes = std::size_t{tokens} * groups * tile_blocks * 4;
  for (uint32_t row = 0; row < rows; row += Isa::scan_rows) {
    const uint32_t count = smaller(Isa::scan_rows, rows - row);
    const int8_t* block = q + std::size_t{row} * n;
    int32_t starts[Isa::scan_rows];
    for (uint32_t r = 0; r < count; ++r) {
      starts[r] = 0;
      for (uint32_t c = 0; c < n; ++c) starts[r] -= sketch_offset * block[r * n + c];
    }
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const int8_t* data = sketch + tile * tile_bytes;
      const int8_t* ahead = next && row == 0 ? next + tile * tile_bytes : data;
      const int8_t* scales = sketch + tiles * tile_bytes + tile * tile_blocks * sizeof(float);
      float* out = scores + row * stride + tile * tile_blocks;
      with_count<Isa::scan_rows>(count, [&](auto n_rows) {
        score_sketch_tile<Isa, n_rows.value>(data, scales, ahead, tokens, groups, block, starts, q_scale + row, out, stride);
      });
    }
  }
}

// o[r] += sum over pages of weights[r][p] * V[p] for R rows.
template <class Isa, uint32_t R>
void add_mean_values(const int8_t* values, uint32_t dim, const float (*weights)[extent_pages], float* o) {
  for (uint32_t d = 0; d < dim; d += Isa::lanes) {
    typename Isa::F acc[R];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) acc[r] = Isa::load(o + r * std::size_t{dim} + d);
    for (uint32_t p = 0; p < extent_pages; ++p) {
      const auto v = Isa::load_bytes(values + p * std::size_t{dim} + d);
#pragma GCC unroll 8
      for (uint32_t r = 0; r < R; ++r) acc[r] = Isa::fma(Isa::set(weights[r][p]), v, acc[r]);
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) Isa::store(o + r * std::size_t{dim} + d, acc[r]);
  }
}

template <class Isa>
void attend_means(const PageShape& shape, const QueryRows& q, const int8_t* means, const int8_t* next, uint32_t pages,
                  AttentionState state) {
  if (pages == 0) return;
  const uint32_t dim = shape.dim;
  if (next) {
    for (uint32_t at = 0; at < 2 * dim * extent_pages; at += 64) __builtin_prefetch(next + at, 0, 2);
  }
  const int8_t* values = means + std::size_t{dim} * extent_pages;
  alignas(64) float value_scales[extent_pages], counts[extent_pages];  // log of the tokens that a page stands for, -inf for none
  std::memcpy(value_scales, means + (std::size_t{2} * dim + sizeof(float)) * extent_pages, sizeof value_scales);
  float log_tokens = 0;  // page_tokens is a power of two
  for (uint32_t t = shape.page_tokens; t > 1; t /= 2) log_tokens += 0.693147181f;
  for (uint32_t p = 0; p < extent_pages; ++p) counts[p] = pages >> p & 1 ? log_tokens : minus_infinity;
  alignas(64) float s[Isa::scan_rows][extent_pages];
  for (uint32_t row = 0; row < q.rows; row += Isa::scan_rows) {
    const uint32_t n = smaller(Isa::scan_rows, q.rows - row);
    const QueryRows some = {n, dim, q.f32 + std::size_t{row} * dim, q.q + std::size_t{row} * dim, nullptr, q.scale + row};
    score_means<Isa>(shape, some, means, s[0], extent_pages);
    bool seen = false;
    for (uint32_t r = 0; r < n; ++r) {
      auto best = Isa::set(minus_infinity);
      for (uint32_t p = 0; p < extent_pages; p += Isa::lanes) {
        const auto x = Isa::add(Isa::load(s[r] + p), Isa::load(counts + p));
        Isa::store(s[r] + p, x);
        best = Isa::max(best, x);
      }
      const float most = Isa::largest(best);
      float& m = state.m[row + r];
      if (most < m - faint) {
        std::memset(s[r], 0, sizeof s[r]);
        continue;
      }
      seen = true;
      if (most > m) {
        const auto keep = Isa::set(exp_negative_one<Isa>(m - most));
        float* o = state.o + (std::size_t{row} + r) * dim;
        for (uint32_t d = 0; d < dim; d += Isa::lanes) Isa::store(o + d, Isa::mul(Isa::load(o + d), keep));
        state.l[row + r] *= exp_negative_one<Isa>(m - most);
        m = most;
      }
      auto total = Isa::set(0);
      for (uint32_t p = 0; p < extent_pages; p += Isa::lanes) {
        const auto e = exp_negative<Isa>(Isa::sub(Isa::load(s[r] + p), Isa::set(m)));
        total = Isa::add(total, e);
        Isa::store(s[r] + p, Isa::mul(e, Isa::load(value_scales + p)));
      }
      state.l[row + r] += Isa::sum(total);
    }
    if (!seen) continue;
    with_count<Isa::scan_rows>(n, [&](auto count) {
      add_mean_values<Isa, count.value>(values, dim, s, state.o + std::size_t{row} * dim);
    });
  }
}

}  // namespace
}  // namespace kvasir
