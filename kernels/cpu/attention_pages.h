// Attention over int8 pages: scores, weights and values all by integer dot products.
//
// 128 tokens at a time (a tile: 2 to 16 pages, whose K and V fit the first-level cache for dim <= 128), four rows at a time:
//   scores   s[t] = (K[t] . q) * k_scale[t] * q_scale
//   weights  p[t] = exp(s[t] - m),  w[t] = p[t] * v_scale[t],  W[t] = round(w[t] * 16383 / max w): 14 bits in two parts of 7
//   output   o = o * exp(m_old - m) + (sum_t W[t] * V[t]) * max w / 16383
// The integer sums cannot overflow: 128 tokens * 16383 * 127 < 2^31. Each row goes through the same steps in the same order
// whatever rows are its neighbours.
#pragma once

#include "attention_common.h"

namespace kvasir {
namespace {

constexpr uint32_t tile_tokens = 128;
constexpr float weight_steps = 16383.0f;    // 127 * 128 + 127
constexpr float smallest_weight = 1e-30f;   // a tile whose weights are all below adds nothing to a sum that is at least 1

struct alignas(64) PageTile {
  float k_scale[tile_tokens];
  float v_scale[tile_tokens];
  float bias[tile_tokens];  // 0, or -inf for tokens that take no part
  int32_t scores[most_rows][tile_tokens];
  uint8_t high[most_rows][tile_tokens];  // upper 7 bits of the weights
  uint8_t low[most_rows][tile_tokens];   // lower 7 bits
  float s[most_rows][tile_tokens];       // the scores as floats, then the weights
  float m[most_rows];                    // the new maximum
  float keep[block_floats];              // what is left of the output so far: exp(m_old - m)
  float gain[most_rows];                 // one step of the integer weights
  const int8_t* keys[tile_tokens];       // first K bytes of each vector of tokens
  const int8_t* second_keys[tile_tokens];  // of its second half, where a page has fewer tokens than a vector has lanes
};

// The next tile's pages, asked from memory a few lines at each step of this tile's products: pages are chosen all over memory, so
// the processor cannot guess them. A step goes round several pages, so that address translations and memory banks work together.
struct PagesAhead {
  static constexpr uint32_t line = 64;     // bytes
  static constexpr uint32_t streams = 16;  // of which a tile has as many as it has pages, but at least 4

  PagesAhead(const PageRef* pages, uint32_t n, uint32_t tile_pages, uint32_t lines)
      : count(larger(tile_pages, 4)), lines_a_step(lines), end(n == 0 ? 0 : page_bytes * tile_pages / count) {
    const uint32_t scale_bytes = tile_tokens / tile_pages * 2 * sizeof(uint16_t);
    for (uint32_t i = 0; i < count && n != 0; ++i) {  // with fewer pages than a tile's, the last one again
      const PageRef& page = pages[smaller(i % tile_pages, n - 1)];
      at[i] = page.data + i / tile_pages * end;
      const auto* scales = reinterpret_cast<const char*>(page.scales);
      for (uint32_t byte = 0; byte < scale_bytes; byte += line) __builtin_prefetch(scales + byte);
    }
  }

  void step() {
    if (offset >= end) return;
    __builtin_prefetch(at[next] + offset);
    if (lines_a_step > 1) __builtin_prefetch(at[next + 1] + offset);
    if (lines_a_step > 2) {
      __builtin_prefetch(at[next + 2] + offset);
      __builtin_prefetch(at[next + 3] + offset);
    }
    next += lines_a_step;
    if (next == count) {
      next = 0;
      offset += line;
    }
  }

  const int8_t* at[streams];
  uint32_t count;
  uint32_t lines_a_step;  // 1, 2 or 4
  uint32_t end;           // bytes of each stream
  uint32_t next = 0, offset = 0;
};

// The scales and masks of n pages, padded with tokens that take no part to a multiple of what the kernels handle at once.
// Returns the padded number of tokens.
template <class Isa>
uint32_t load_tile(const PageRef* pages, uint32_t n, uint32_t page_tokens, PageTile& tile) {
  for (uint32_t p = 0; p < n; ++p) {
    const uint16_t* scales = pages[p].scales;
    const uint32_t base = p * page_tokens;
    for (uint32_t t = 0; t < page_tokens; t += 8) {  // a constant 8: vectors without a loop's beginning and end
      for (uint32_t i = t; i < t + 8; ++i) tile.k_scale[base + i] = from_bf16(scales[i]);
      for (uint32_t i = t; i < t + 8; ++i) tile.v_scale[base + i] = from_bf16(scales[page_tokens + i]);
      for (uint32_t i = t; i < t + 8; ++i) tile.bias[base + i] = 0;
      if ((pages[p].tokens >> t & 0xff) == 0xff) continue;
      for (uint32_t i = t; i < t + 8; ++i) tile.bias[base + i] = pages[p].tokens >> i & 1 ? 0 : minus_infinity;
    }
  }
  const uint32_t tokens = n * page_tokens;
  const auto padded = static_cast<uint32_t>(round_up(tokens, 4 * Isa::lanes));
  for (uint32_t t = tokens; t < padded; ++t) {
    tile.k_scale[t] = tile.v_scale[t] = 0;
    tile.bias[t] = minus_infinity;
  }
  for (uint32_t v = 0, page = 0, t = 0; v < padded / Isa::lanes; ++v) {  // padding reads the last page again
    tile.keys[v] = pages[smaller(page, n - 1)].data + t * 4;
    tile.second_keys[v] = pages[smaller(page + 1, n - 1)].data;
    for (t += Isa::lanes; t >= page_tokens; t -= page_tokens) ++page;
  }
  return padded;
}

// tile.scores[r][t] = K[t] . q[r] for R rows. start: what cancels key_offset.
template <class Isa, uint32_t R, bool Halves>
void score_tile(const int8_t* q, uint32_t dim, uint32_t page_tokens, const int32_t* start, uint32_t tokens, PageTile& tile,
                PagesAhead& ahead) {
  constexpr uint32_t C = Isa::key_columns;
  for (uint32_t v = 0; v < tokens / Isa::lanes; v += C) {
    typename Isa::I acc[R][C];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::iset(start[r]);
    }
    for (std::size_t d = 0; d < dim; d += 4) {
      ahead.step();
      typename Isa::K k[C];
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) {
        if constexpr (Halves) {
          k[c] = Isa::keys_halves(tile.keys[v + c] + d * page_tokens, tile.second_keys[v + c] + d * page_tokens);
        } else {
          k[c] = Isa::keys(tile.keys[v + c] + d * page_tokens);
        }
      }
#pragma GCC unroll 8
      for (uint32_t r = 0; r < R; ++r) {
        const int32_t q4 = load_four(q + r * std::size_t{dim} + d);
#pragma GCC unroll 4
        for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::dot_keys(acc[r][c], k[c], q4);
      }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) Isa::istore(tile.scores[r] + (v + c) * Isa::lanes, acc[r][c]);
    }
  }
}

// tile.s[r] and tile.m[r] from the integer scores of row r; tile.keep[r] becomes m_old - m.
template <class Isa>
void scale_scores(uint32_t r, float q_scale, float m, uint32_t tokens, PageTile& tile) {
  auto best = Isa::set(m);
  const auto row_scale = Isa::set(q_scale);
  for (uint32_t t = 0; t < tokens; t += Isa::lanes) {
    const auto scale = Isa::mul(Isa::load(tile.k_scale + t), row_scale);
    const auto s = Isa::fma(Isa::to_float(Isa::iload(tile.scores[r] + t)), scale, Isa::load(tile.bias + t));
    Isa::store(tile.s[r] + t, s);
    best = Isa::max(best, s);
  }
  tile.m[r] = Isa::largest(best);
  tile.keep[r] = tile.m[r] > m ? m - tile.m[r] : 0;
}

// The integer weights of row r from tile.s[r]; m and l take the tile in.
template <class Isa>
void weigh_scores(uint32_t r, uint32_t tokens, PageTile& tile, float* m, float* l) {
  const auto new_m = Isa::set(tile.m[r]);
  auto total = Isa::set(0), largest = Isa::set(0);
  for (uint32_t t = 0; t < tokens; t += Isa::lanes) {
    const auto p = exp_negative<Isa>(Isa::sub(Isa::load(tile.s[r] + t), new_m));
    const auto w = Isa::mul(p, Isa::load(tile.v_scale + t));
    total = Isa::add(total, p);
    largest = Isa::max(largest, w);
    Isa::store(tile.s[r] + t, w);
  }
  *l = *l * tile.keep[r] + Isa::sum(total);
  *m = tile.m[r];
  const float largest_weight = Isa::largest(largest);
  const bool counts = largest_weight >= smallest_weight;
  const auto steps = Isa::set(counts ? weight_steps / largest_weight : 0);  // integer steps a unit of weight
  tile.gain[r] = counts ? largest_weight / weight_steps : 0;
  for (uint32_t t = 0; t < tokens; t += 4 * Isa::lanes) {
    typename Isa::I w[4];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) w[i] = Isa::to_int(Isa::mul(Isa::load(tile.s[r] + t + i * Isa::lanes), steps));
    Isa::store_weights(tile.high[r] + t, tile.low[r] + t, w);
  }
}

// Scores of the row block become weights; m and l, of its first row, take them in.
template <class Isa>
void weigh_tile(uint32_t rows, const float* q_scale, uint32_t tokens, PageTile& tile, float* m, float* l) {
  for (uint32_t r = 0; r < rows; ++r) scale_scores<Isa>(r, q_scale[r], m[r], tokens, tile);
  exp_negative_all<Isa>(tile.keep, rows);
  for (uint32_t r = 0; r < rows; ++r) weigh_scores<Isa>(r, tokens, tile, m + r, l + r);
}

// o[r] = o[r] * keep[r] + gain[r] * sum over the tile of W * V, for R rows from `first` on, D vectors of dimensions at a time.
// o: the first row's.
template <class Isa, uint32_t R, uint32_t D>
void add_values(const PageRef* pages, uint32_t n, uint32_t dim, uint32_t page_tokens, uint32_t first, const PageTile& tile,
                PagesAhead& ahead, float* o) {
  for (uint32_t d = 0; d < dim; d += D * Isa::lanes) {
    typename Isa::W acc[R][D] = {};
    for (uint32_t p = 0; p < n; ++p) {
      const int8_t* v = pages[p].data + page_bytes / 2 + d * 4;
      const uint32_t base = p * page_tokens;
      for (uint32_t t = 0; t < page_tokens; t += 4, v += std::size_t{dim} * 4) {
        ahead.step();
        typename Isa::B values[D];
#pragma GCC unroll 4
        for (uint32_t c = 0; c < D; ++c) values[c] = Isa::bytes(v + c * Isa::lanes * 4);
#pragma GCC unroll 4
        for (uint32_t r = 0; r < R; ++r) {
          const int32_t high = load_four(tile.high[first + r] + base + t), low = load_four(tile.low[first + r] + base + t);
#pragma GCC unroll 4
          for (uint32_t c = 0; c < D; ++c) acc[r][c].add(high, low, values[c]);
        }
      }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
      const auto keep = Isa::set(tile.keep[first + r]), gain = Isa::set(tile.gain[first + r]);
      float* row = o + r * std::size_t{dim} + d;
#pragma GCC unroll 4
      for (uint32_t c = 0; c < D; ++c) {
        float* at = row + c * Isa::lanes;
        Isa::store(at, Isa::fma(Isa::to_float(acc[r][c].total()), gain, Isa::mul(Isa::load(at), keep)));
      }
    }
  }
}

template <class Isa, uint32_t R>
void score_rows(const int8_t* q, uint32_t dim, uint32_t page_tokens, const int32_t* start, uint32_t tokens, PageTile& tile,
                PagesAhead& ahead) {
  if constexpr (Isa::lanes == 16) {
    if (page_tokens < Isa::lanes) return score_tile<Isa, R, true>(q, dim, page_tokens, start, tokens, tile, ahead);
  }
  score_tile<Isa, R, false>(q, dim, page_tokens, start, tokens, tile, ahead);
}

template <class Isa>
void add_values(uint32_t rows, const PageRef* pages, uint32_t n, uint32_t dim, uint32_t page_tokens, uint32_t first,
                const PageTile& tile, PagesAhead& ahead, float* o) {
  constexpr uint32_t narrow = smaller(4, 32 / Isa::lanes), wide = smaller(4, 64 / Isa::lanes);
  if (rows == 1) {
    if (dim == 32) return add_values<Isa, 1, narrow>(pages, n, dim, page_tokens, first, tile, ahead, o);
    return add_values<Isa, 1, wide>(pages, n, dim, page_tokens, first, tile, ahead, o);
  }
  if (dim == 32) return add_values<Isa, value_rows, narrow>(pages, n, dim, page_tokens, first, tile, ahead, o);
  add_values<Isa, value_rows, wide>(pages, n, dim, page_tokens, first, tile, ahead, o);
}

// How many lines of the next tile to ask for at a step (1, 2 or 4): its share, rounded down. Measured on Zen 5 over random pages of
// 256 MB: asking faster than that fills the queue of misses and is slower, leaving the last lines to the processor's own guesses is not.
template <class Isa>
uint32_t lines_a_step(uint32_t rows, uint32_t dim) {
  const uint32_t key_steps = (rows + Isa::row_block - 1) / Isa::row_block * (tile_tokens / (Isa::key_columns * Isa::lanes)) * (dim / 4);
  const uint32_t value_steps = (rows + value_rows - 1) / value_rows * (tile_tokens / 4) * (dim / smaller(4 * Isa::lanes, dim));
  const uint32_t lines = tile_tokens * 2 * dim / PagesAhead::line, steps = key_steps + value_steps;
  return 4 * steps <= lines ? 4 : 2 * steps <= lines ? 2 : 1;
}

template <class Isa>
void attend_pages(const QueryRows& q, const PageRef* pages, uint32_t n_pages, AttentionState state, std::byte* scratch) {
  const uint32_t dim = q.dim, page_tokens = page_bytes / 2 / dim, tile_pages = tile_tokens / page_tokens;
  auto& tile = *reinterpret_cast<PageTile*>(scratch);
  std::memset(tile.keep, 0, sizeof tile.keep);
  auto* starts = reinterpret_cast<int32_t*>(scratch + sizeof(PageTile));  // [rows]
  key_offsets<Isa>(q.q, q.rows, dim, starts);
  const uint32_t lines = lines_a_step<Isa>(q.rows, dim), blocks = (q.rows + Isa::row_block - 1) / Isa::row_block;
  for (uint32_t page = 0; page < n_pages; page += tile_pages) {
    const uint32_t n = smaller(tile_pages, n_pages - page);
    const uint32_t tokens = load_tile<Isa>(pages + page, n, page_tokens, tile);
    PagesAhead ahead(pages + page + n, smaller(tile_pages, n_pages - page - n), tile_pages, lines);
    for (uint32_t row = 0, left = blocks; left > 0; --left) {
      const uint32_t rows = (q.rows - row + left - 1) / left;  // blocks of nearly equal size
      with_count<Isa::row_block>(rows, [&](auto count) {
        score_rows<Isa, count.value>(q.q + row * std::size_t{dim}, dim, page_tokens, starts + row, tokens, tile, ahead);
      });
      weigh_tile<Isa>(rows, q.scale + row, tokens, tile, state.m + row, state.l + row);
      float* o = state.o + row * std::size_t{dim};
      for (uint32_t r = 0; r < rows; r += value_rows) {
        add_values<Isa>(smaller(value_rows, rows - r), pages + page, n, dim, page_tokens, r, tile, ahead, o + r * std::size_t{dim});
      }
      row += rows;
    }
  }
}

}  // namespace
}  // namespace kvasir
