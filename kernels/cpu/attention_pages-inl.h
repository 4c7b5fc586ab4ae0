// Attention over int8 pages: scores, weights and values by integer dot products.
//
// A tile has 128 tokens (K and V fit L1 for dim <= 128) and is computed four rows at a time. It is
// assembled from the quads with at least one selected token, so other quads of a page cost nothing.
//   scores   s[t] = (K[t] . q) * k_scale[t] * q_scale + bias of its page. A vector of keys has the
//            four tokens of one quad (a token per lane), with as many dimensions of each as fit.
//            The sums of several quads are folded into a vector of scores
//   weights  p[t] = exp(s[t] - m),  w[t] = p[t] * v_scale[t],  W[t] = round(w[t] * 16383 / max w):
//            14 bits in two parts of 7
//   output   o = o * exp(m_old - m) + (sum_t W[t] * V[t]) * max w / 16383
// The integer sums cannot overflow: 128 tokens * 16383 * 127 < 2^31. The computation of a row does
// not depend on its neighbours.
#pragma once

#include "attention_common.h"

namespace kvasir {
namespace {

constexpr uint32_t tile_tokens = 128;
constexpr float weight_steps = 16383.0f;  // 127 * 128 + 127
// A tile with only smaller weights is skipped: it does not change a sum of at least 1.
constexpr float smallest_weight = 1e-30f;

struct alignas(64) PageTile {
  float k_scale[tile_tokens];
  float v_scale[tile_tokens];
  float bias[tile_tokens];  // of the page; -inf for tokens that are not selected
  int32_t scores[max_rows][tile_tokens];
  uint8_t high[max_rows][tile_tokens];  // upper 7 bits of the weights
  uint8_t low[max_rows][tile_tokens];   // lower 7 bits
  float s[max_rows][tile_tokens];       // the scores as floats, then the weights
  float m[max_rows];                    // the new maximum
  float keep[block_floats];             // exp(m_old - m), the factor of the output so far
  float gain[max_rows];                 // weight per integer step
};

// Four tokens of a page.
struct Quad {
  // [dim / 4][4 tokens][4]; the values, [dim][4 tokens], are half a page further. In a latent page
  // the keys are the values.
  const int8_t* keys;
  const uint16_t* scales;  // of K; those of V are page_tokens further
  uint32_t tokens;         // bit t set: token t of the quad is selected
  float bias;              // of the page
};

constexpr uint32_t all_tokens = 15;  // of a quad
constexpr uint32_t tile_quads = tile_tokens / quad_tokens;
constexpr uint32_t line_bytes = 64;
// Quads per prefetch step of the products with values. With one quad per step, the variables of the
// step and the sums compete for registers.
constexpr uint32_t quads_a_step = 4;

// Iterates over the quads of a list of pages, tile by tile.
struct Quads {
  Quads(const PageRef* list, uint32_t n, const QueryRows& q)
      : pages(list), end(list + n), dim(q.dim), page_tokens(q.page_tokens()),
        whole(~uint64_t{0} >> (64 - page_tokens)) {
    begin_page();
  }

  // Writes up to a tile of quads and prefetches their scales. Returns their number.
  uint32_t next(Quad* quads) {
    uint32_t n = 0;
    for (taken = 0; pages != end; ++pages, begin_page()) {
      const PageRef& page = *pages;
      if (n == tile_quads) break;
      ++taken;
      // A whole page needs no search for its quads.
      if (left == whole && n + page_tokens / quad_tokens <= tile_quads) {
        for (uint32_t t = 0; t < page_tokens; t += quad_tokens)
          quads[n++] = {page.data + t * dim, page.scales + t, all_tokens, page.bias};
        for (uint32_t t = 0; t < 2 * page_tokens; t += line_bytes / sizeof *page.scales)
          __builtin_prefetch(page.scales + t);
        continue;
      }
      for (; left != 0; ++n) {
        if (n == tile_quads) return n;
        const uint32_t first =
            static_cast<uint32_t>(__builtin_ctzll(left)) / quad_tokens * quad_tokens;
        quads[n] = {page.data + first * dim, page.scales + first,
                    static_cast<uint32_t>(left >> first) & all_tokens, page.bias};
        __builtin_prefetch(quads[n].scales);
        __builtin_prefetch(quads[n].scales + page_tokens);
        left &= ~(uint64_t{all_tokens} << first);
      }
    }
    return n;
  }

  void begin_page() { left = pages != end ? pages->tokens & whole : 0; }

  const PageRef *pages, *end;
  uint32_t dim, page_tokens;
  uint32_t taken = 0;        // pages in the last tile
  uint64_t whole, left = 0;  // masks: all tokens of a page; tokens left in the current page
};

// Prefetches the quads of the next tile, a few cache lines at each step of this tile's products.
// The CPU does not prefetch selected pages, because they are scattered over memory.
//
// Successive lines come from different pages, so that address translations and memory banks work in
// parallel. The lines of one page are taken in order. A stretch stands for a page: it has the mean
// number of quads per page, so it is a page if all pages have the same number.
//
// For whole pages the lines per step are rounded down. Measured on Zen 5 over random pages of
// 256 MB: a faster rate fills the queue of misses and is slower. The CPU prefetches the last lines
// at no cost. For parts of pages it cannot, so the lines per step are rounded up.
struct QuadsAhead {
  // Prefetches n quads of `pages` pages in `steps` steps.
  QuadsAhead(const Quad* next_quads, uint32_t n, uint32_t pages, const QueryRows& q, uint32_t steps)
      : quads(next_quads), count(n), half(q.dim * quad_tokens), end(half), latent(q.latent) {
    if (n == 0) return;
    stretch = (n + pages - 1) / pages;
    const uint32_t lines = (latent ? 1 : 2) * n * half / line_bytes;
    lines_a_step = stretch * quad_tokens == q.page_tokens() ? larger(1, lines / steps)
                                                            : (lines + steps - 1) / steps;
  }

  void step(uint32_t steps = 1) {
    for (uint32_t i = 0; i < lines_a_step * steps; ++i) {
      __builtin_prefetch(quads[next].keys + at);
      if ((next += stretch) < count) continue;
      if ((at += line_bytes) == end) {
        at = end - half;
        if (++first == stretch) {
          first = 0;
          if (latent || end > half) lines_a_step = 0;  // all lines were prefetched
          at = page_bytes / 2;
          end = at + half;
        }
      }
      next = first;
    }
  }

  const Quad* quads;
  uint32_t count;
  uint32_t lines_a_step = 0, stretch = 0;  // stretch: quads of a stretch
  // half: bytes of a quad's keys, as of its values. end: offset at which the current keys or values
  // of a quad end.
  uint32_t half, end;
  bool latent;
  // The round over the stretches takes quad `first` of each, at byte `at` of the quad.
  uint32_t first = 0;
  uint32_t next = 0, at = 0;  // next: quad whose line is next
};

// Queries in the layout of the products with quads: every four dimensions are repeated for each
// token of a vector of keys.
template <class Isa>
struct QuadQueries {
  // Tokens per vector of keys.
  static constexpr uint32_t tokens = smaller(Isa::lanes, quad_tokens);
  // Vectors of sums that fold into one vector of scores.
  static constexpr uint32_t vectors = Isa::lanes / tokens;
  // Dimensions of each token in a vector of keys.
  static constexpr uint32_t dims = 4 * vectors;

  // scratch: 64-byte aligned.
  QuadQueries(const QueryRows& from, std::byte* scratch) : row_bytes(from.dim * tokens) {
    auto* to = reinterpret_cast<int8_t*>(scratch);
    auto* sums = reinterpret_cast<int32_t*>(scratch + from.rows * std::size_t{row_bytes});
    q = to;
    starts = sums;
    key_offsets<Isa>(from.q, from.rows, from.dim, sums);
    // Each of the vectors starts with a part of the offset; key_offset is a multiple of `vectors`.
    for (uint32_t r = 0; r < from.rows; ++r) sums[r] /= static_cast<int32_t>(vectors);
    for (std::size_t i = 0; i < from.rows * std::size_t{from.dim}; i += 4)
      for (uint32_t t = 0; t < tokens; ++t, to += 4) std::memcpy(to, from.q + i, 4);
  }
  static std::size_t scratch_bytes(uint32_t rows, uint32_t dim) {
    return rows * (std::size_t{dim} * tokens + sizeof(int32_t));
  }

  uint32_t row_bytes;
  const int8_t* q;        // [rows][dim / 4][tokens][4]
  const int32_t* starts;  // [rows]
};

// Loads the scales and masks of n quads. Pads them with unselected tokens to a multiple of the
// kernels' step; the padding repeats the last quad. Returns the padded number of tokens.
template <class Isa>
uint32_t load_tile(Quad* quads, uint32_t n, uint32_t page_tokens, PageTile& tile) {
  for (uint32_t p = 0; p < n; ++p) {
    const Quad& quad = quads[p];
    const uint32_t base = p * quad_tokens;
    for (uint32_t i = 0; i < quad_tokens; ++i) tile.k_scale[base + i] = from_bf16(quad.scales[i]);
    for (uint32_t i = 0; i < quad_tokens; ++i)
      tile.v_scale[base + i] = from_bf16(quad.scales[page_tokens + i]);
    for (uint32_t i = 0; i < quad_tokens; ++i) tile.bias[base + i] = quad.bias;
    if (quad.tokens == all_tokens) continue;
    for (uint32_t i = 0; i < quad_tokens; ++i)
      tile.bias[base + i] = quad.tokens >> i & 1 ? quad.bias : minus_infinity;
  }
  const auto padded = static_cast<uint32_t>(round_up(n * quad_tokens, 4 * Isa::lanes));
  for (uint32_t t = n * quad_tokens; t < padded; ++t) {
    tile.k_scale[t] = tile.v_scale[t] = 0;
    tile.bias[t] = minus_infinity;
  }
  for (uint32_t p = n; p < padded / quad_tokens; ++p) quads[p] = quads[n - 1];
  return padded;
}

// Computes tile.scores[r][t] = K[t] . q[r] for R rows from `first` on.
template <class Isa, uint32_t R>
void score_tile(const QuadQueries<Isa>& queries, uint32_t first, uint32_t dim, const Quad* quads,
                uint32_t tokens, PageTile& tile, QuadsAhead& ahead) {
  using Q = QuadQueries<Isa>;
  constexpr uint32_t C = Isa::key_columns;
  const int8_t* q = queries.q + first * std::size_t{queries.row_bytes};
  const int32_t* start = queries.starts + first;
  for (uint32_t t = 0; t < tokens; t += C * Q::tokens) {
    const int8_t* keys[C];
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c)
      keys[c] =
          quads[(t + c * Q::tokens) / quad_tokens].keys + (t + c * Q::tokens) % quad_tokens * 4;
    typename Isa::I acc[R][C];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::iset(start[r]);
    }
    for (std::size_t d = 0; d < dim; d += Q::dims) {
      ahead.step();
      typename Isa::K k[C];
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) k[c] = Isa::keys(keys[c] + d * quad_tokens);
#pragma GCC unroll 8
      for (uint32_t r = 0; r < R; ++r) {
        const auto query = Isa::bytes(q + r * std::size_t{queries.row_bytes} + d * Q::tokens);
#pragma GCC unroll 4
        for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::dot_keys(acc[r][c], k[c], query);
      }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; c += Q::vectors)
        Isa::istore(tile.scores[r] + t + c * Q::tokens, Isa::fold(acc[r] + c));
    }
  }
}

// Computes tile.s[r] and tile.m[r] from the integer scores of row r. Sets tile.keep[r] = m_old - m.
template <class Isa>
void scale_scores(uint32_t r, float q_scale, float m, uint32_t tokens, PageTile& tile) {
  auto best = Isa::set(m);
  const auto row_scale = Isa::set(q_scale);
  for (uint32_t t = 0; t < tokens; t += Isa::lanes) {
    const auto scale = Isa::mul(Isa::load(tile.k_scale + t), row_scale);
    const auto s =
        Isa::fma(Isa::to_float(Isa::iload(tile.scores[r] + t)), scale, Isa::load(tile.bias + t));
    Isa::store(tile.s[r] + t, s);
    best = Isa::max(best, s);
  }
  tile.m[r] = Isa::largest(best);
  tile.keep[r] = tile.m[r] > m ? m - tile.m[r] : 0;
}

// Replaces the scores of row r in tile.s[r] by its weights. Sets tile.gain[r] to the largest
// weight. Updates m and l.
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
  tile.gain[r] = Isa::largest(largest);
}

// Rounds the weights of row r to integers. Sets tile.gain[r] to the weight of an integer step.
template <class Isa>
void round_weights(uint32_t r, uint32_t tokens, PageTile& tile) {
  const float largest_weight = tile.gain[r];
  const bool counts = largest_weight >= smallest_weight;
  // Integer steps per unit of weight.
  const auto steps = Isa::set(counts ? weight_steps / largest_weight : 0);
  tile.gain[r] = counts ? largest_weight / weight_steps : 0;
  for (uint32_t t = 0; t < tokens; t += 4 * Isa::lanes) {
    typename Isa::I w[4];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i)
      w[i] = Isa::to_int(Isa::mul(Isa::load(tile.s[r] + t + i * Isa::lanes), steps));
    Isa::store_weights(tile.high[r] + t, tile.low[r] + t, w);
  }
}

// Converts the scores of a row block to weights. Updates m and l, [rows] of the block.
template <class Isa>
void weigh_tile(uint32_t rows, const float* q_scale, uint32_t tokens, PageTile& tile, float* m,
                float* l) {
  for (uint32_t r = 0; r < rows; ++r) scale_scores<Isa>(r, q_scale[r], m[r], tokens, tile);
  exp_negative_all<Isa>(tile.keep, rows);
  for (uint32_t r = 0; r < rows; ++r) weigh_scores<Isa>(r, tokens, tile, m + r, l + r);
  for (uint32_t r = 0; r < rows; ++r) round_weights<Isa>(r, tokens, tile);
}

// Computes o[r] = o[r] * keep[r] + gain[r] * (sum over the tile of W * V) for R rows from `first`
// on, D vectors of dimensions at a time. o: the output of row `first`.
template <class Isa, uint32_t R, uint32_t D, bool latent>
void add_values(const Quad* quads, uint32_t n, uint32_t dim, uint32_t first, const PageTile& tile,
                QuadsAhead& ahead, float* o) {
  for (uint32_t d = 0; d < dim; d += D * Isa::lanes) {
    typename Isa::W acc[R][D] = {};
    for (uint32_t p = 0; p < n;) {
      const uint32_t stop = smaller(n, p + quads_a_step);
      ahead.step(stop - p);
      for (; p < stop; ++p) {
        const int8_t* v = quads[p].keys + (latent ? 0 : page_bytes / 2);
        const uint32_t t = p * quad_tokens;
        typename Isa::B values[D];
#pragma GCC unroll 4
        for (uint32_t c = 0; c < D; ++c) {
          const uint32_t at = d + c * Isa::lanes;
          if constexpr (latent) values[c] = Isa::key_bytes(v, at);
          else values[c] = Isa::bytes(v + at * quad_tokens);
        }
#pragma GCC unroll 4
        for (uint32_t r = 0; r < R; ++r) {
          const int32_t high = load_four(tile.high[first + r] + t),
                        low = load_four(tile.low[first + r] + t);
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
        Isa::store(at,
                   Isa::fma(Isa::to_float(acc[r][c].total()), gain, Isa::mul(Isa::load(at), keep)));
      }
    }
  }
}

template <class Isa>
void add_values(uint32_t rows, const Quad* quads, uint32_t n, const QueryRows& q, uint32_t first,
                const PageTile& tile, QuadsAhead& ahead, float* o) {
  constexpr uint32_t narrow = smaller(4, 32 / Isa::lanes), wide = smaller(4, 64 / Isa::lanes);
  const uint32_t dim = q.dim;
  const auto add = [&](auto row_count) {
    constexpr uint32_t R = row_count.value;
    if (q.latent) return add_values<Isa, R, wide, true>(quads, n, dim, first, tile, ahead, o);
    if (dim == 32) return add_values<Isa, R, narrow, false>(quads, n, dim, first, tile, ahead, o);
    add_values<Isa, R, wide, false>(quads, n, dim, first, tile, ahead, o);
  };
  rows == 1 ? add(Count<1>()) : add(Count<value_rows>());
}

// Number of steps of a tile's products. Each step prefetches a part of the next tile.
template <class Isa>
uint32_t steps_a_tile(uint32_t rows, uint32_t dim) {
  using Q = QuadQueries<Isa>;
  const uint32_t key_steps = (rows + Isa::row_block - 1) / Isa::row_block *
                             (tile_tokens / (Isa::key_columns * Q::tokens)) * (dim / Q::dims);
  return key_steps +
         (rows + value_rows - 1) / value_rows * tile_quads * (dim / smaller(4 * Isa::lanes, dim));
}

template <class Isa>
void attend_pages(const QueryRows& q, const PageRef* pages, uint32_t n_pages, AttentionState state,
                  std::byte* scratch) {
  const uint32_t dim = q.dim;
  auto& tile = *reinterpret_cast<PageTile*>(scratch);
  std::memset(tile.keep, 0, sizeof tile.keep);
  const QuadQueries<Isa> queries(q, scratch + sizeof(PageTile));
  const uint32_t steps = steps_a_tile<Isa>(q.rows, dim),
                 blocks = (q.rows + Isa::row_block - 1) / Isa::row_block;
  Quads all(pages, n_pages, q);
  Quad buffers[2][tile_quads];
  uint32_t n = all.next(buffers[0]), n_next = 0;
  for (uint32_t which = 0; n > 0; n = n_next, which ^= 1) {
    Quad* quads = buffers[which];
    n_next = all.next(buffers[which ^ 1]);
    const uint32_t tokens = load_tile<Isa>(quads, n, all.page_tokens, tile);
    QuadsAhead ahead(buffers[which ^ 1], n_next, all.taken, q, steps);
    for (uint32_t row = 0, left = blocks; left > 0; --left) {
      const uint32_t rows = (q.rows - row + left - 1) / left;  // row blocks of nearly equal size
      with_count<Isa::row_block>(rows, [&](auto count) {
        score_tile<Isa, count.value>(queries, row, dim, quads, tokens, tile, ahead);
      });
      weigh_tile<Isa>(rows, q.scale + row, tokens, tile, state.m + row, state.l + row);
      float* o = state.o + row * std::size_t{dim};
      for (uint32_t r = 0; r < rows; r += value_rows)
        add_values<Isa>(smaller(value_rows, rows - r), quads, n, q, r, tile, ahead,
                        o + r * std::size_t{dim});
      row += rows;
    }
  }
}

// The scores of tokens, [rows][stride]; or raised, [rows] stride apart: the largest of a row.
struct ScoreRows {
  float* scores;
  std::size_t stride;
  bool raises;
};

template <class Isa>
[[gnu::noinline]] void score_pages(const QueryRows& q, const QuadQueries<Isa>& queries,
                                   const PageRef* pages, uint32_t n_pages, const ScoreRows& out,
                                   PageTile& tile) {
  const uint32_t dim = q.dim, page_tokens = q.page_tokens();
  Quad quads[tile_quads];
  QuadsAhead none(quads, 0, 0, q, 1);
  for (uint32_t first = 0; first < n_pages * page_tokens; first += tile_tokens) {
    const uint32_t given = smaller(tile_tokens, n_pages * page_tokens - first);
    // Includes quads without selected tokens: the position of a score is that of its token.
    for (uint32_t t = 0; t < given; t += quad_tokens) {
      const PageRef& p = pages[(first + t) / page_tokens];
      const uint32_t token = (first + t) % page_tokens;
      quads[t / quad_tokens] = {p.data + token * dim, p.scales + token,
                                static_cast<uint32_t>(p.tokens >> token) & all_tokens, p.bias};
    }
    const uint32_t tokens = load_tile<Isa>(quads, given / quad_tokens, page_tokens, tile);
    for (uint32_t row = 0; row < q.rows; row += Isa::row_block) {
      const uint32_t rows = smaller(Isa::row_block, q.rows - row);
      with_count<Isa::row_block>(rows, [&](auto count) {
        score_tile<Isa, count.value>(queries, row, dim, quads, tokens, tile, none);
      });
      for (uint32_t r = 0; r < rows; ++r) {
        scale_scores<Isa>(r, q.scale[row + r], minus_infinity, tokens, tile);
        float* const to = out.scores + (row + r) * out.stride;
        if (out.raises) *to = tile.m[r] > *to ? tile.m[r] : *to;
        else std::memcpy(to + first, tile.s[r], given * sizeof(float));
      }
    }
  }
}

template <class Isa>
void score_tokens(const QueryRows& q, const PageRef* pages, uint32_t n_pages, float* scores,
                  std::size_t stride, std::byte* scratch) {
  const QuadQueries<Isa> queries(q, scratch + sizeof(PageTile));
  score_pages<Isa>(q, queries, pages, n_pages, {scores, stride, false},
                   *reinterpret_cast<PageTile*>(scratch));
}

template <class Isa>
void raise_by_pages(const QueryRows& q, const PageRef* pages, uint32_t n_pages,
                    uint32_t block_pages, float* scores, std::size_t stride, std::byte* scratch) {
  const QuadQueries<Isa> queries(q, scratch + sizeof(PageTile));
  for (uint32_t first = 0; first < n_pages; first += block_pages, ++scores)
    score_pages<Isa>(q, queries, pages + first, smaller(block_pages, n_pages - first),
                     {scores, stride, true}, *reinterpret_cast<PageTile*>(scratch));
}

}  // namespace
}  // namespace kvasir
