// Scores of sketches by AMX: products of 16 query rows and 16 quads in one instruction. Integer
// sums are exact, so scores have the bits of AVX-512.
#include "attention_amx-inl.h"

namespace kvasir {
namespace {

decltype(Kernels::score_sketch) sketch_without_tiles = nullptr;  // of AVX-512

// The 4-bit numbers of a tile as bytes, -8 to 7: a vector has four channels of each quad.
template <uint32_t Groups>
void unpack(const int8_t* from, const int8_t* ahead, int8_t* to) {
  const __m512i mask = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(8);
  for (uint32_t i = 0; i < quad_tokens * Groups; ++i, from += 64, ahead += 64, to += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
    const __m512i x = _mm512_loadu_si512(from), low = _mm512_and_si512(x, mask),
                  high = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
    _mm512_store_si512(to, _mm512_sub_epi8(low, offset));
    _mm512_store_si512(to + 64, _mm512_sub_epi8(high, offset));
  }
}

// The scales of a tile's quads.
__m512 steps_of(const int8_t* scales) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// The largest product of each quad with row r.
__m512 best_of_tokens(const int32_t* products, uint32_t r) {
  const auto at = [&](uint32_t token) {
    return _mm512_load_si512(products + (token * tile_rows + r) * tile_columns);
  };
  return _mm512_cvtepi32_ps(
      _mm512_max_epi32(_mm512_max_epi32(at(0), at(1)), _mm512_max_epi32(at(2), at(3))));
}

// Lane r: the largest score of row r in a tile, of the quads in `mask`.
__m512 best_of_tile(const int32_t* products, const int8_t* scales, __mmask16 mask,
                    const float* unit) {
  const __m512 step = steps_of(scales), none = _mm512_set1_ps(minus_infinity);
  __m512 x[tile_rows];
#pragma GCC unroll 16
  for (uint32_t r = 0; r < tile_rows; ++r)
    x[r] = _mm512_mask_mul_ps(none, mask, best_of_tokens(products, r),
                              _mm512_mul_ps(step, _mm512_set1_ps(unit[r])));
  return largest_lanes(x);
}

// Raises out[r * stride + i] to lane r of best[i], of `rows` rows and `tiles` <= 4 tiles.
void raise(const __m512* best, uint32_t rows, uint32_t tiles, float* out, std::size_t stride) {
  const __m512 a = _mm512_unpacklo_ps(best[0], best[2]), b = _mm512_unpackhi_ps(best[0], best[2]),
               c = _mm512_unpacklo_ps(best[1], best[3]), d = _mm512_unpackhi_ps(best[1], best[3]);
  alignas(64) __m512 of_rows[4] = {_mm512_unpacklo_ps(a, c), _mm512_unpackhi_ps(a, c),
                                   _mm512_unpacklo_ps(b, d), _mm512_unpackhi_ps(b, d)};
  const auto mask = static_cast<__mmask8>((1u << tiles) - 1);
  for (uint32_t r = 0; r < rows; ++r, out += stride) {
    // row 4 i + j is in quarter i of vector j
    const float* row = reinterpret_cast<const float*>(&of_rows[r % 4]) + r / 4 * 4;
    const __m128 known = _mm_maskz_loadu_ps(mask, out);
    _mm_mask_storeu_ps(out, mask, _mm_max_ps(known, _mm_load_ps(row)));
  }
}

// The bits of the quads of a tile from `first` on and before `end`.
__mmask16 quads_of(uint32_t tile, uint32_t first, uint32_t end) {
  const auto before = [tile](uint32_t quad) {
    const uint32_t at = tile * tile_columns;
    return quad <= at ? 0u : (1u << smaller(quad - at, tile_columns)) - 1;
  };
  return static_cast<__mmask16>(before(end) & ~before(first));
}

template <uint32_t Groups>
void raise_by_sketch_of(const PageShape& shape, uint32_t rows, const int8_t* q,
                        const float* q_scale, const int8_t* sketch, const int8_t* next,
                        uint32_t first, uint32_t end, float* scores, std::size_t stride) {
  constexpr std::size_t tile_bytes = std::size_t{quad_tokens} * Groups * 64;
  constexpr uint32_t together = Groups > 6 ? 24 / Groups : 4;  // tiles, on the caller's stack
  const uint32_t tiles = (end + tile_columns - 1) / tile_columns;
  const int8_t* const scales = sketch + shape.quad_tiles() * tile_bytes;
  alignas(64) int8_t unpacked[together][2 * tile_bytes];
  alignas(64) int32_t products[2][quad_tokens * tile_rows * tile_columns];
  alignas(64) int8_t last[tile_rows * Groups * 8] = {};
  static_assert(sizeof unpacked + sizeof products + sizeof last < 24 << 10);
  configure<Groups>();
  for (uint32_t tile = 0; tile < tiles; tile += together) {
    const uint32_t n = smaller(together, tiles - tile);
    for (uint32_t i = 0; i < n; ++i)
      unpack<Groups>(sketch + (tile + i) * tile_bytes,
                     (next ? next : sketch) + (tile + i) * tile_bytes, unpacked[i]);
    for (uint32_t row = 0; row < rows; row += tile_rows) {
      const uint32_t count = smaller(tile_rows, rows - row);
      const int8_t* of_rows = q + std::size_t{row} * Groups * 8;
      if (count < tile_rows) std::memcpy(last, of_rows, count * Groups * 8), of_rows = last;
      float unit[tile_rows] = {};
      std::memcpy(unit, q_scale + row, count * sizeof(float));
      __m512 best[4] = {};  // as raise() reads them
      multiply_tile<Groups>(of_rows, unpacked[0], products[0]);
      for (uint32_t i = 0; i < n; ++i) {
        // The next tile's products are under way while this one's are compared.
        if (i + 1 < n) multiply_tile<Groups>(of_rows, unpacked[i + 1], products[(i + 1) % 2]);
        best[i] =
            best_of_tile(products[i % 2], scales + (tile + i) * tile_columns * sizeof(uint16_t),
                         quads_of(tile + i, first, end), unit);
      }
      raise(best, count, n, scores + std::size_t{row} * stride + tile, stride);
    }
  }
  _tile_release();
}

void raise_by_sketch(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale,
                     const int8_t* sketch, const int8_t* next, uint32_t first, uint32_t end,
                     float* scores, std::size_t stride) {
  const auto call = [&](auto groups) {
    raise_by_sketch_of<groups.value>(shape, rows, q, q_scale, sketch, next, first, end, scores,
                                     stride);
  };
  for_groups<2, 3, 6, 12, 24>(shape.sketch_dim(), call);  // of all padded dims
}

template <uint32_t Groups>
void score_sketch_of(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale,
                     const int8_t* sketch, const int8_t* next, float* scores, std::size_t stride) {
  constexpr std::size_t tile_bytes = std::size_t{quad_tokens} * Groups * 64, row = Groups * 8;
  const uint32_t tiles = shape.quad_tiles(), whole = rows / tile_rows * tile_rows;
  const int8_t* const scales = sketch + tiles * tile_bytes;
  alignas(64) int8_t unpacked[2 * tile_bytes];
  alignas(64) int32_t products[2][quad_tokens * tile_rows * tile_columns];
  alignas(64) int8_t last[tile_rows * row] = {};
  std::memcpy(last, q + whole * row, (rows - whole) * row);
  configure<Groups>();
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    unpack<Groups>(sketch + tile * tile_bytes, (next ? next : sketch) + tile * tile_bytes,
                   unpacked);
    const __m512 step = steps_of(scales + tile * tile_columns * sizeof(uint16_t));
    const auto multiply = [&](uint32_t first) {
      multiply_tile<Groups>(first < whole ? q + first * row : last, unpacked,
                            products[first / tile_rows % 2]);
    };
    multiply(0);
    for (uint32_t first = 0; first < rows; first += tile_rows) {
      // The next rows' products are under way while these are compared.
      if (first + tile_rows < rows) multiply(first + tile_rows);
      const uint32_t end = smaller(first + tile_rows, rows);
      float* to = scores + first * stride + tile * tile_columns;
      for (uint32_t r = first; r < end; ++r, to += stride)
        _mm512_storeu_ps(
            to, _mm512_mul_ps(best_of_tokens(products[first / tile_rows % 2], r % tile_rows),
                              _mm512_mul_ps(step, _mm512_set1_ps(q_scale[r]))));
    }
  }
  _tile_release();
}

void score_sketch(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale,
                  const int8_t* sketch, const int8_t* next, float* scores, std::size_t stride) {
  const auto call = [&](auto groups) {
    score_sketch_of<groups.value>(shape, rows, q, q_scale, sketch, next, scores, stride);
  };
  if (rows < fewest_rows || !for_groups<2, 3, 6, 12, 24>(shape.sketch_dim(), call))
    sketch_without_tiles(shape, rows, q, q_scale, sketch, next, scores, stride);
}

}  // namespace

void fill_attention_amx(Kernels& k) {
  fill_attention_avx512(k);
  sketch_without_tiles = k.score_sketch;
  k.score_sketch = score_sketch;
  k.raise_by_sketch = raise_by_sketch;
  fill_attention_amx_pages(k);
}

}  // namespace kvasir
