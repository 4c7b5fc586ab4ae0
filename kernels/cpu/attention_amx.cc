// Scores by AMX: products of 16 query rows and 16 quads of a sketch, or tokens of pages, in one
// instruction. Integer sums are exact, so scores have the bits of AVX-512.
#include <immintrin.h>

#include "attention_common.h"

namespace kvasir {
namespace {

constexpr uint32_t tile_rows = 16, tile_columns = tile_blocks;
constexpr uint32_t fewest_rows = 9;  // of score_sketch(): fewer are no slower without tiles
// Those of AVX-512.
decltype(Kernels::raise_by_pages) pages_without_tiles = nullptr;
decltype(Kernels::score_sketch) sketch_without_tiles = nullptr;

// The tile registers, whose names the compiler wants as numbers: 0 to 3 have sums, of the four
// tokens of 16 quads or of four times 16 tokens, 4 has their sketches or keys, 5 has queries.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Products of parts of up to 64 numbers of a sketch, `groups` groups of eight.
template <uint32_t Groups>
struct Parts {
  static constexpr uint32_t count = (Groups + 7) / 8, groups = Groups / count, bytes = groups * 8;
  static_assert(groups * count == Groups);
};

template <uint32_t Groups>
void configure() {
  TileConfig c;
  for (int i = 0; i < 4; ++i) c.rows[i] = tile_rows, c.row_bytes[i] = tile_columns * 4;
  c.rows[4] = Parts<Groups>::groups * 2, c.row_bytes[4] = tile_columns * 4;
  c.rows[5] = tile_rows, c.row_bytes[5] = Parts<Groups>::bytes;
  // GCC before 12.4 and 13.3 takes only its first 8 bytes as read.
  __asm__ volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}

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

// out: [token][row][quad] of a tile of quads and 16 query rows.
template <uint32_t Groups>
void multiply_tile(const int8_t* q, const int8_t* unpacked, int32_t* out) {
  using P = Parts<Groups>;
  constexpr std::size_t token = Groups * 128, token_sums = tile_rows * tile_columns;
  // GCC does not know that tile loads read memory.
  __asm__ volatile("" : : "r"(q), "r"(unpacked) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (uint32_t part = 0; part < P::count; ++part) {
    const int8_t* const sketch = unpacked + part * P::groups * 128;
    _tile_loadd(5, q + part * P::bytes, Groups * 8);
    _tile_loadd(4, sketch, 64);
    _tile_dpbssd(0, 5, 4);
    _tile_loadd(4, sketch + token, 64);
    _tile_dpbssd(1, 5, 4);
    _tile_loadd(4, sketch + 2 * token, 64);
    _tile_dpbssd(2, 5, 4);
    _tile_loadd(4, sketch + 3 * token, 64);
    _tile_dpbssd(3, 5, 4);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + token_sums, 64);
  _tile_stored(2, out + 2 * token_sums, 64);
  _tile_stored(3, out + 3 * token_sums, 64);
}

// The larger of neighbouring lanes, of 2 N vectors: N vectors.
template <uint32_t N, class Low, class High>
void fold(__m512* x, Low low, High high) {
#pragma GCC unroll 8
  for (uint32_t i = 0; i < N; ++i)
    x[i] = _mm512_max_ps(low(x[2 * i], x[2 * i + 1]), high(x[2 * i], x[2 * i + 1]));
}

// Lane r: the largest of the 16 lanes of x[r].
__m512 largest_lanes(__m512* x) {
  using V = __m512;
  fold<8>(
      x, [](V a, V b) { return _mm512_unpacklo_ps(a, b); },
      [](V a, V b) { return _mm512_unpackhi_ps(a, b); });
  fold<4>(
      x, [](V a, V b) { return _mm512_shuffle_ps(a, b, 0x44); },
      [](V a, V b) { return _mm512_shuffle_ps(a, b, 0xee); });
  fold<2>(
      x, [](V a, V b) { return _mm512_shuffle_f32x4(a, b, 0x88); },
      [](V a, V b) { return _mm512_shuffle_f32x4(a, b, 0xdd); });
  fold<1>(
      x, [](V a, V b) { return _mm512_shuffle_f32x4(a, b, 0x88); },
      [](V a, V b) { return _mm512_shuffle_f32x4(a, b, 0xdd); });
  return x[0];
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
  constexpr uint32_t together = 4;  // tiles
  const uint32_t tiles = (end + tile_columns - 1) / tile_columns;
  const int8_t* const scales = sketch + shape.quad_tiles() * tile_bytes;
  alignas(64) int8_t unpacked[together][2 * tile_bytes];
  alignas(64) int32_t products[2][quad_tokens * tile_rows * tile_columns];
  alignas(64) int8_t last[tile_rows * Groups * 8] = {};
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
      __m512 best[together] = {};
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
  switch (shape.sketch_dim() / 8) {  // one case per padded dim
    case 2:
      return call(Count<2>());
    case 3:
      return call(Count<3>());
    case 6:
      return call(Count<6>());
    case 12:
      return call(Count<12>());
    case 24:
      return call(Count<24>());
  }
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
        _mm512_storeu_ps(to, _mm512_mul_ps(best_of_tokens(products[first / tile_rows % 2],
                                                          r % tile_rows),
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
  if (rows < fewest_rows)
    return sketch_without_tiles(shape, rows, q, q_scale, sketch, next, scores, stride);
  switch (shape.sketch_dim() / 8) {  // one case per padded dim
    case 2:
      return call(Count<2>());
    case 3:
      return call(Count<3>());
    case 6:
      return call(Count<6>());
    case 12:
      return call(Count<12>());
    case 24:
      return call(Count<24>());
  }
}

// ---- pages

// Four rows of 16 tokens' keys from the same 16 dimensions of four quads.
void transpose(const int8_t* const (&quads)[4], std::size_t at, int8_t* to) {
  const __m512i a = _mm512_loadu_si512(quads[0] + at), b = _mm512_loadu_si512(quads[1] + at),
                c = _mm512_loadu_si512(quads[2] + at), d = _mm512_loadu_si512(quads[3] + at);
  const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44),
                ab2 = _mm512_shuffle_i32x4(a, b, 0xee), cd2 = _mm512_shuffle_i32x4(c, d, 0xee);
  _mm512_store_si512(to, _mm512_shuffle_i32x4(ab, cd, 0x88));
  _mm512_store_si512(to + 64, _mm512_shuffle_i32x4(ab, cd, 0xdd));
  _mm512_store_si512(to + 128, _mm512_shuffle_i32x4(ab2, cd2, 0x88));
  _mm512_store_si512(to + 192, _mm512_shuffle_i32x4(ab2, cd2, 0xdd));
}

// A block of up to 64 tokens: their keys as tiles, [16 tokens][dim / 4][16][4].
template <uint32_t Groups>
struct Block {
  static constexpr uint32_t most = 64, dim = Groups * 8;
  alignas(64) int8_t keys[most * dim];
  alignas(64) float scales[most], bias[most];  // -inf behind the last token

  // ahead: pages of the next block, or null.
  void load(const PageRef* pages, uint32_t n, uint32_t page_tokens, const PageRef* ahead) {
    const uint32_t tokens = n * page_tokens;
    const auto quad_at = [&](const PageRef* of, uint32_t token) {
      return of[token / page_tokens].data + token % page_tokens * dim;
    };
    for (uint32_t t = 0; t < tokens; t += 16) {
      const int8_t* quads[4];
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t token = t + i * quad_tokens;
        quads[i] = quad_at(pages, token < tokens ? token : t);
        const int8_t* const next = ahead && token < tokens ? quad_at(ahead, token) : quads[i];
        for (uint32_t d = 0; d < quad_tokens * dim; d += 64)
          _mm_prefetch(reinterpret_cast<const char*>(next + d), _MM_HINT_T0);
      }
      for (uint32_t d = 0; d < dim; d += 16)
        transpose(quads, std::size_t{d} * quad_tokens, keys + t * dim + d * 16);
    }
    for (uint32_t t = 0; t < most; ++t) {
      scales[t] = t < tokens ? from_bf16(pages[t / page_tokens].scales[t % page_tokens]) : 0;
      bias[t] = t < tokens ? 0 : minus_infinity;
    }
  }

  // Lane r: the largest score of row r.
  __m512 best(const int32_t* products, const float* unit) const {
    __m512 step[4], more[4];
    for (uint32_t i = 0; i < 4; ++i)
      step[i] = _mm512_load_ps(scales + i * 16), more[i] = _mm512_load_ps(bias + i * 16);
    __m512 x[tile_rows];
#pragma GCC unroll 16
    for (uint32_t r = 0; r < tile_rows; ++r) {
      const __m512 of_row = _mm512_set1_ps(unit[r]);
      const auto at = [&](uint32_t i) {
        const __m512i sum = _mm512_load_si512(products + (i * tile_rows + r) * tile_columns);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(step[i], of_row), more[i]);
      };
      x[r] = _mm512_max_ps(_mm512_max_ps(at(0), at(1)), _mm512_max_ps(at(2), at(3)));
    }
    return largest_lanes(x);
  }
};

template <uint32_t Groups>
void raise_by_pages_of(const QueryRows& q, const PageRef* pages, uint32_t n_pages,
                       uint32_t block_pages, float* scores, std::size_t stride) {
  constexpr uint32_t dim = Groups * 8;
  const uint32_t page_tokens = q.page_tokens(), whole = q.rows / tile_rows * tile_rows;
  Block<Groups> block;
  alignas(64) int32_t products[2][4 * tile_rows * tile_columns];
  alignas(64) int8_t last[tile_rows * dim] = {};
  std::memcpy(last, q.q + std::size_t{whole} * dim, (q.rows - whole) * std::size_t{dim});
  configure<Groups>();
  for (uint32_t first = 0; first < n_pages; first += block_pages, ++scores) {
    const uint32_t n = smaller(block_pages, n_pages - first);
    const bool more = first + 2 * block_pages <= n_pages;
    block.load(pages + first, n, page_tokens, more ? pages + first + block_pages : nullptr);
    const auto multiply = [&](uint32_t row) {
      multiply_tile<Groups>(row < whole ? q.q + std::size_t{row} * dim : last, block.keys,
                            products[row / tile_rows % 2]);
    };
    multiply(0);
    for (uint32_t row = 0; row < q.rows; row += tile_rows) {
      if (row + tile_rows < q.rows) multiply(row + tile_rows);
      const uint32_t count = smaller(tile_rows, q.rows - row);
      alignas(64) float unit[tile_rows] = {}, best[tile_rows];
      std::memcpy(unit, q.scale + row, count * sizeof(float));
      _mm512_store_ps(best, block.best(products[row / tile_rows % 2], unit));
      for (uint32_t r = 0; r < count; ++r) {
        float& to = scores[(row + r) * stride];
        to = best[r] > to ? best[r] : to;
      }
    }
  }
  _tile_release();
}

void raise_by_pages(const QueryRows& q, const PageRef* pages, uint32_t n_pages,
                    uint32_t block_pages, float* scores, std::size_t stride, std::byte* scratch) {
  const auto call = [&](auto groups) {
    raise_by_pages_of<groups.value>(q, pages, n_pages, block_pages, scores, stride);
  };
  switch (q.latent ? 0 : q.dim) {
    case 64:
      return call(Count<8>());
    case 128:
      return call(Count<16>());
    case 256:
      return call(Count<32>());
    default:  // of few models
      return pages_without_tiles(q, pages, n_pages, block_pages, scores, stride, scratch);
  }
}

}  // namespace

void fill_attention_amx(Kernels& k) {
  fill_attention_avx512(k);
  sketch_without_tiles = k.score_sketch;
  k.score_sketch = score_sketch;
  k.raise_by_sketch = raise_by_sketch;
  pages_without_tiles = k.raise_by_pages;
  k.raise_by_pages = raise_by_pages;
}

}  // namespace kvasir
