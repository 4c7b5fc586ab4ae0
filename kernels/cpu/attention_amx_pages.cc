// Scores and attention of int8 pages by AMX. Integer sums are exact, so results have the bits of
// AVX-512.
#include "attention_amx-inl.h"
#include "attention_avx512-inl.h"
#include "attention_pages-inl.h"

namespace kvasir {
namespace {

// Those of AVX-512.
decltype(Kernels::raise_by_pages) raise_without_tiles = nullptr;
decltype(Kernels::attend_pages) attend_without_tiles = nullptr;
decltype(Kernels::attend_scratch) scratch_without_tiles = nullptr;

// for_groups() of the head sizes that have tiles, those of most models.
template <class F>
bool for_tiles(uint32_t dim, F&& f) {
  return for_groups<8, 16, 32>(dim, f);
}

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

// The rows behind the last whole tile of rows, and zeros.
template <uint32_t Groups>
struct LastRows {
  static constexpr uint32_t dim = Groups * 8;
  alignas(64) int8_t q[tile_rows * dim] = {};

  LastRows(const QueryRows& from, uint32_t whole) {
    std::memcpy(q, from.q + std::size_t{whole} * dim, (from.rows - whole) * std::size_t{dim});
  }
};

template <uint32_t Groups>
struct Raised {
  Block<Groups> block;
  alignas(64) int32_t products[2][4 * tile_rows * tile_columns];
};

template <uint32_t Groups>
void raise_by_pages_of(const QueryRows& q, const PageRef* pages, uint32_t n_pages,
                       uint32_t block_pages, float* scores, std::size_t stride,
                       std::byte* scratch) {
  constexpr uint32_t dim = Groups * 8;
  const uint32_t page_tokens = q.page_tokens(), whole = q.rows / tile_rows * tile_rows;
  auto& [block, products] = *reinterpret_cast<Raised<Groups>*>(scratch);
  const LastRows<Groups> last(q, whole);
  configure<Groups>();
  for (uint32_t first = 0; first < n_pages; first += block_pages, ++scores) {
    const uint32_t n = smaller(block_pages, n_pages - first);
    const bool more = first + 2 * block_pages <= n_pages;
    block.load(pages + first, n, page_tokens, more ? pages + first + block_pages : nullptr);
    const auto multiply = [&](uint32_t row) {
      multiply_tile<Groups>(row < whole ? q.q + std::size_t{row} * dim : last.q, block.keys,
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
    raise_by_pages_of<groups.value>(q, pages, n_pages, block_pages, scores, stride, scratch);
  };
  if (q.latent || !for_tiles(q.dim, call))
    raise_without_tiles(q, pages, n_pages, block_pages, scores, stride, scratch);
}

// ---- attention over pages

// A tile of up to 128 tokens, as attend_pages() of attention_pages-inl.h has it: up to 82 KiB.
template <uint32_t Groups>
struct Attended {
  static constexpr uint32_t dim = Groups * 8, half_tokens = 64,
                            half_sums = 4 * tile_rows * tile_columns;
  alignas(64) int8_t keys[tile_tokens * dim];    // [16 tokens][dim / 4][16][4]
  alignas(64) int8_t values[tile_tokens * dim];  // [dim / 16][quads][16][4]
  alignas(64) int32_t scores[2 * half_sums];     // [16 tokens][row][16]
  alignas(64) int32_t products[half_sums];       // [high, low][16 dimensions][row][16]
  alignas(64) uint8_t high[tile_rows * tile_tokens], low[tile_rows * tile_tokens];
  float keep[tile_rows], gain[tile_rows];
  uint32_t tokens;

  // Rows that no query has weigh nothing.
  void clear() {
    std::memset(high, 0, sizeof high);
    std::memset(low, 0, sizeof low);
  }

  void load(const Quad* quads, uint32_t padded_tokens) {
    tokens = padded_tokens;
    const uint32_t n = tokens / quad_tokens;
    for (uint32_t p = 0; p < n; p += 4) {
      const int8_t* const of[4] = {quads[p].keys, quads[p + 1].keys, quads[p + 2].keys,
                                   quads[p + 3].keys};
      for (uint32_t d = 0; d < dim; d += 16)
        transpose(of, std::size_t{d} * quad_tokens, keys + p * quad_tokens * dim + d * 16);
    }
    for (uint32_t p = 0; p < n; ++p) {
      const int8_t* from = quads[p].keys + page_bytes / 2;
      for (uint32_t d = 0; d < dim / 16; ++d, from += 64)
        _mm512_store_si512(values + (d * n + p) * 64, _mm512_loadu_si512(from));
    }
  }

  // The weights of `rows` rows from `first` on, by those of attention_pages-inl.h.
  void weigh(uint32_t first, uint32_t rows, const float* q_scale, PageTile& tile, float* m,
             float* l) {
    for (uint32_t r = 0; r < rows; ++r)
      for (uint32_t t = 0; t < tokens; t += tile_columns)
        _mm512_store_si512(tile.scores[r] + t,
                           _mm512_load_si512(scores + t * tile_rows + (first + r) * tile_columns));
    weigh_tile<Avx512>(rows, q_scale, tokens, tile, m, l);
    for (uint32_t r = 0; r < rows; ++r) {
      std::memcpy(high + (first + r) * tile_tokens, tile.high[r], tile_tokens);
      std::memcpy(low + (first + r) * tile_tokens, tile.low[r], tile_tokens);
      keep[first + r] = tile.keep[r], gain[first + r] = tile.gain[r];
    }
  }

  // Products with the values of dimensions d to d + 31.
  void multiply_values(uint32_t d) {
    const uint32_t n = tokens / quad_tokens;
    __asm__ volatile("" : : "r"(this) : "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t t = 0; t < tokens; t += half_tokens) {
      const int8_t* const from = values + (d / 16 * n + t / quad_tokens) * 64;
      _tile_loadd(5, high + t, tile_tokens);
      _tile_loadd(4, from, 64);
      _tile_dpbusd(0, 5, 4);
      _tile_loadd(6, from + n * 64, 64);
      _tile_dpbusd(1, 5, 6);
      _tile_loadd(7, low + t, tile_tokens);
      _tile_dpbusd(2, 7, 4);
      _tile_dpbusd(3, 7, 6);
    }
    _tile_stored(0, products, 64);
    _tile_stored(1, products + half_sums / 4, 64);
    _tile_stored(2, products + half_sums / 2, 64);
    _tile_stored(3, products + half_sums / 4 * 3, 64);
    __asm__ volatile("" : : : "memory");
  }

  // o: dimension d of the first of `rows` rows.
  void add_products(uint32_t rows, float* o) const {
    for (uint32_t r = 0; r < rows; ++r, o += dim) {
      const __m512 kept = _mm512_set1_ps(keep[r]), step = _mm512_set1_ps(gain[r]);
      for (uint32_t i = 0; i < 2; ++i) {
        const int32_t* const from = products + (i * tile_rows + r) * tile_columns;
        const __m512i total = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(from), 7),
                                               _mm512_load_si512(from + half_sums / 2));
        float* const to = o + i * tile_columns;
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), step,
                                             _mm512_mul_ps(_mm512_loadu_ps(to), kept)));
      }
    }
  }
};

template <uint32_t Groups>
void attend_pages_of(const QueryRows& q, const PageRef* pages, uint32_t n_pages,
                     const AttentionState& state, std::byte* scratch) {
  constexpr uint32_t dim = Groups * 8, step_dims = 32;
  using Tile = Attended<Groups>;
  const uint32_t whole = q.rows / tile_rows * tile_rows,
                 steps = (q.rows + tile_rows - 1) / tile_rows * (dim / step_dims);
  auto& tile = *reinterpret_cast<PageTile*>(scratch);
  auto& attended = *reinterpret_cast<Tile*>(scratch + sizeof(PageTile));
  attended.clear();
  const LastRows<Groups> last(q, whole);
  std::memset(tile.keep, 0, sizeof tile.keep);
  configure<Groups>();
  Quads all(pages, n_pages, q);
  Quad buffers[2][tile_quads];
  uint32_t n = all.next(buffers[0]), n_next = 0;
  for (uint32_t which = 0; n > 0; n = n_next, which ^= 1) {
    n_next = all.next(buffers[which ^ 1]);
    attended.load(buffers[which], load_tile<Avx512>(buffers[which], n, all.page_tokens, tile));
    QuadsAhead ahead(buffers[which ^ 1], n_next, all.taken, q, steps);
    for (uint32_t row = 0; row < q.rows; row += tile_rows) {
      const uint32_t rows = smaller(tile_rows, q.rows - row);
      for (uint32_t t = 0; t < attended.tokens; t += Tile::half_tokens)
        multiply_tile<Groups>(row < whole ? q.q + std::size_t{row} * dim : last.q,
                              attended.keys + t * dim, attended.scores + t * tile_rows);
      for (uint32_t r = 0; r < rows; r += max_rows)
        attended.weigh(r, smaller(max_rows, rows - r), q.scale + row + r, tile, state.m + row + r,
                       state.l + row + r);
      for (uint32_t d = 0; d < dim; d += step_dims) {
        ahead.step();
        attended.multiply_values(d);
        attended.add_products(rows, state.o + std::size_t{row} * dim + d);
      }
    }
  }
  _tile_release();
}

void attend_pages(const QueryRows& q, const PageRef* pages, uint32_t n_pages, AttentionState state,
                  std::byte* scratch) {
  const auto call = [&](auto groups) {
    attend_pages_of<groups.value>(q, pages, n_pages, state, scratch);
  };
  if (q.latent || q.rows < fewest_rows || !for_tiles(q.dim, call))
    attend_without_tiles(q, pages, n_pages, state, scratch);
}

std::size_t attend_scratch(uint32_t rows, uint32_t dim) {
  std::size_t bytes = scratch_without_tiles(rows, dim);
  for_tiles(dim, [&](auto groups) {
    constexpr std::size_t attended = sizeof(PageTile) + sizeof(Attended<groups.value>);
    static_assert(sizeof(Raised<groups.value>) <= attended);
    if (bytes < attended) bytes = attended;
  });
  return bytes;
}

}  // namespace

void fill_attention_amx_pages(Kernels& k) {
  raise_without_tiles = k.raise_by_pages, attend_without_tiles = k.attend_pages;
  scratch_without_tiles = k.attend_scratch;
  k.raise_by_pages = raise_by_pages, k.attend_pages = attend_pages;
  k.attend_scratch = attend_scratch;
}

}  // namespace kvasir
