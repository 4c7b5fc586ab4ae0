// Sketches of keys: computed when a page is sealed or the sketch is built, scanned by selectors.
#pragma once

#include "attention_common.h"
#include "store_scores-inl.h"
#include "store_seal-inl.h"

namespace kvasir {
namespace {

constexpr uint32_t max_sketch_dim = PageShape::of(max_latent_dim, true).sketch_dim();
constexpr float sketch_steps = 7.0f;  // 4 bits: -7 .. 7, stored + 8
constexpr int32_t sketch_offset = 8;

// R rows of V vectors of sums, out[r][c] = end(r, sum over k of a(k)[r * row] * b[k][c]), in
// registers. a(k): the factor of the first row.
template <class Isa, uint32_t R, uint32_t V, class A, class End>
void sum_products(A&& a, std::size_t row, const float* b, std::size_t b_stride, uint32_t n,
                  float* out, std::size_t out_stride, End&& end) {
  typename Isa::F sums[R][V];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (uint32_t v = 0; v < V; ++v) sums[r][v] = Isa::set(0);
#pragma GCC unroll 1
  for (uint32_t k = 0; k < n; ++k, b += b_stride) {
    const float* factors = a(k);
    typename Isa::F x[V];
#pragma GCC unroll 3
    for (uint32_t v = 0; v < V; ++v) x[v] = Isa::load(b + v * Isa::lanes);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
      const auto factor = Isa::set(factors[r * row]);
#pragma GCC unroll 3
      for (uint32_t v = 0; v < V; ++v) sums[r][v] = Isa::fma(factor, x[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (uint32_t r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (uint32_t v = 0; v < V; ++v)
      Isa::store(out + r * out_stride + v * Isa::lanes, end(r, sums[r][v]));
}

// Vectors per row, for quad_tokens rows: they fit the instruction set with the fewest registers.
template <class Isa>
constexpr uint32_t product_vectors = Isa::lanes > 1 ? 3 : 1;
// Rows that share one pass over the second matrix, whose rows may come from the L2 cache.
template <class Isa>
constexpr uint32_t product_rows = Isa::lanes == 16 ? 8 : 4;

// Calls f(Count<vectors>(), first column) over n columns. Some columns may be computed twice, where
// n is no multiple of the lanes.
template <class Isa, class F>
void by_columns(uint32_t n, F&& f) {
  for (uint32_t c = 0; c < n;) {
    const uint32_t first = smaller(c, n - Isa::lanes),
                   vectors = smaller(product_vectors<Isa>, (n - first) / Isa::lanes);
    with_count<product_vectors<Isa>>(vectors, [&](auto count) { f(count, first); });
    c = first + vectors * Isa::lanes;
  }
}

template <class Isa>
void multiply(const float* a, std::size_t row, std::size_t step, uint32_t rows, const float* b,
              std::size_t b_stride, uint32_t cols, uint32_t n, float* out, std::size_t out_stride) {
  const auto same = [](uint32_t, typename Isa::F x) { return x; };
  by_columns<Isa>(cols, [&](auto vectors, uint32_t c) {
    uint32_t r = 0;
    for (; r + product_rows<Isa> <= rows; r += product_rows<Isa>)
      sum_products<Isa, product_rows<Isa>, vectors.value>(
          [=](uint32_t k) { return a + r * row + k * step; }, row, b + c, b_stride, n,
          out + r * out_stride + c, out_stride, same);
    for (; r < rows; ++r)
      sum_products<Isa, 1, vectors.value>([=](uint32_t k) { return a + r * row + k * step; }, row,
                                          b + c, b_stride, n, out + r * out_stride + c, out_stride,
                                          same);
  });
}

// x[t][c] = sum over d of K[t][d] * k_scale[t] * basis[d][c] for the tokens of a quad; NaNs and
// infinities count as zero.
template <class Isa>
void project_quad(const PageShape& shape, const float* basis, const int8_t* data,
                  const uint16_t* scales, float* x) {
  const uint32_t n = shape.sketch_dim(), dim = shape.dim;
  alignas(64) float keys[quad_tokens * max_dim];  // in the order of the page
  for (uint32_t i = 0; i < quad_tokens * dim; ++i) keys[i] = static_cast<float>(data[i]);
  by_columns<Isa>(n, [&](auto vectors, uint32_t c) {
    sum_products<Isa, quad_tokens, vectors.value>(
        [&](uint32_t d) { return keys + (d / 4 * PageShape::key_stride + d % 4); }, 4, basis + c, n,
        dim, x + c, n,
        [=](uint32_t r, typename Isa::F sum) {
          return Isa::finite_or_zero(Isa::mul(sum, Isa::set(from_bf16(scales[r]))));
        });
  });
}

template <class Isa>
void seal_sketch(const PageShape& shape, const float* basis, const int8_t* data,
                 const uint16_t* scales, uint32_t page, int8_t* sketch) {
  const uint32_t n = shape.sketch_dim(), groups = n / 8;
  const std::size_t tile_bytes = std::size_t{quad_tokens} * groups * tile_blocks * 4;
  for (uint32_t i = 0; i < shape.page_quads(); ++i) {
    alignas(64) float quad_values[quad_tokens * max_sketch_dim];  // [4 tokens][sketch_dim]
    project_quad<Isa>(shape, basis, data + i * quad_tokens * shape.dim, scales + i * quad_tokens,
                      quad_values);
    const float largest = largest_magnitude<Isa>(quad_values, quad_tokens * n);
    const bool none = !(largest > tiny_magnitude && largest <= 1e30f);
    const uint16_t scale = none ? uint16_t{0} : bf16_upwards(largest / sketch_steps);
    const auto inverse = Isa::set(none ? 0 : 1 / from_bf16(scale));
    alignas(64) int8_t levels[quad_tokens * max_sketch_dim];
    for (uint32_t c = 0; c < quad_tokens * n; c += Isa::lanes)
      Isa::store_bytes(levels + c, Isa::to_int(Isa::mul(Isa::load(quad_values + c), inverse)));
    const uint32_t quad = page * shape.page_quads() + i, tile = quad / tile_blocks,
                   lane = quad % tile_blocks;
    std::memcpy(sketch + shape.quad_tiles() * tile_bytes + quad * sizeof scale, &scale,
                sizeof scale);
    int8_t* to = sketch + tile * tile_bytes + lane * 4;
    for (uint32_t g = 0; g < quad_tokens * groups; ++g, to += tile_blocks * 4) {
      // Adding 8 to a 4-bit value flips its upper bit.
      constexpr uint32_t halves = 0x0f0f0f0f, offsets = 0x88888888;
      const uint32_t low = static_cast<uint32_t>(load_four(levels + 8 * g)) & halves,
                     high = static_cast<uint32_t>(load_four(levels + 8 * g + 4)) & halves;
      const uint32_t both = (low | high << 4) ^ offsets;
      std::memcpy(to, &both, sizeof both);
    }
  }
}

// For R rows and tiles of 16 quads: the largest of the tokens' integer scores, times the scales. G:
// sketch_dim / 8. q: [R][G][2] in every lane, so that a product reads its query from memory.
template <class Isa, uint32_t R, uint32_t G>
void score_sketch_tiles(uint32_t tiles, const int8_t* data, const int8_t* scale,
                        const int8_t* ahead, const typename Isa::I* q, const int32_t* starts,
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
      for (uint32_t t = 0; t < quad_tokens; ++t) {  // unrolling would be large and no faster
        typename Isa::I acc[R];
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; ++r) acc[r] = start[r];
        const typename Isa::I* queries = q;
        // For a large q the compiler would load all of it before the loop, onto the stack.
        if constexpr (R * G * 2 > 48) __asm__ volatile("" : "+r"(queries));
#pragma GCC unroll 12
        for (uint32_t g = 0; g < G; ++g, from += tile_blocks * 4) {
          if (lane == 0) __builtin_prefetch(ahead + (from - data), 0, 2);
          typename Isa::N low, high;
          Isa::nibbles(from, low, high);
#pragma GCC unroll 8
          for (uint32_t r = 0; r < R; ++r) {
            acc[r] = Isa::dot_nibbles(acc[r], low, queries[(r * G + g) * 2]);
            acc[r] = Isa::dot_nibbles(acc[r], high, queries[(r * G + g) * 2 + 1]);
          }
        }
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; ++r) best[r] = Isa::imax(best[r], acc[r]);
      }
      const auto step = Isa::load(scales + lane);
#pragma GCC unroll 8
      for (uint32_t r = 0; r < R; ++r)
        Isa::store(out + r * stride + lane,
                   Isa::mul(Isa::to_float(best[r]), Isa::mul(step, unit[r])));
    }
    data += std::size_t{quad_tokens} * G * tile_blocks * 4;
    ahead += std::size_t{quad_tokens} * G * tile_blocks * 4;
  }
}

template <class Isa, uint32_t G>
[[gnu::noinline]] void score_sketch_of(const PageShape& shape, uint32_t rows, const int8_t* q,
                                       const float* q_scale, const int8_t* sketch,
                                       const int8_t* next, float* scores, std::size_t stride) {
  constexpr uint32_t n = 8 * G;
  const uint32_t tiles = shape.quad_tiles();
  const std::size_t tile_bytes = std::size_t{quad_tokens} * G * tile_blocks * 4;
  by_row_blocks<Isa::scan_rows>(rows, [&](uint32_t row, uint32_t count) {
    typename Isa::I block[Isa::scan_rows * G * 2];  // up to 24 KiB
    int32_t starts[Isa::scan_rows];
    for (uint32_t r = 0; r < count; ++r) {
      const int8_t* of_row = q + (std::size_t{row} + r) * n;
      starts[r] = 0;
      for (uint32_t c = 0; c < n; ++c) starts[r] -= sketch_offset * of_row[c];
      for (uint32_t c = 0; c < n; c += 4) block[(r * n + c) / 4] = Isa::iset(load_four(of_row + c));
    }
    with_count<Isa::scan_rows>(count, [&](auto n_rows) {
      score_sketch_tiles<Isa, n_rows.value, G>(tiles, sketch, sketch + tiles * tile_bytes,
                                               next && row == 0 ? next : sketch, block, starts,
                                               q_scale + row, scores + row * stride, stride);
    });
  });
}

template <class Isa>
void score_sketch(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale,
                  const int8_t* sketch, const int8_t* next, float* scores, std::size_t stride) {
  switch (shape.sketch_dim() / 8) {  // one case per padded dim
    case 2:
      return score_sketch_of<Isa, 2>(shape, rows, q, q_scale, sketch, next, scores, stride);
    case 3:
      return score_sketch_of<Isa, 3>(shape, rows, q, q_scale, sketch, next, scores, stride);
    case 6:
      return score_sketch_of<Isa, 6>(shape, rows, q, q_scale, sketch, next, scores, stride);
    case 12:
      return score_sketch_of<Isa, 12>(shape, rows, q, q_scale, sketch, next, scores, stride);
    case 24:
      return score_sketch_of<Isa, 24>(shape, rows, q, q_scale, sketch, next, scores, stride);
  }
}

template <class Isa>
void raise_by_sketch(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale,
                     const int8_t* sketch, const int8_t* next, uint32_t first, uint32_t end,
                     float* scores, std::size_t stride) {
  constexpr uint32_t most = extent_pages * PageShape::of(1).page_tokens / quad_tokens;
  const uint32_t quads = shape.extent_quads(), n = shape.sketch_dim(),
                 tiles = (end + tile_blocks - 1) / tile_blocks;
  by_row_blocks<Isa::scan_rows>(rows, [&](uint32_t row, uint32_t count) {
    float of_quads[Isa::scan_rows * most];
    score_sketch<Isa>(shape, count, q + std::size_t{row} * n, q_scale + row, sketch,
                      row == 0 ? next : nullptr, of_quads, quads);
    for (uint32_t r = 0; r < count; ++r) {
      float* const from = of_quads + r * quads;
      for (uint32_t i = 0; i < first; ++i) from[i] = minus_infinity;
      for (uint32_t i = end; i < tiles * tile_blocks; ++i) from[i] = minus_infinity;
      float* const to = scores + (std::size_t{row} + r) * stride;
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        auto best = Isa::set(to[tile]);
        for (uint32_t i = 0; i < tile_blocks; i += Isa::lanes)
          best = Isa::max(best, Isa::load(from + tile * tile_blocks + i));
        to[tile] = Isa::largest(best);
      }
    }
  });
}

}  // namespace
}  // namespace kvasir
