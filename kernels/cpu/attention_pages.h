// Attention over int8 pages: scores, weights and values all by integer dot products.
//
// 128 tokens at a time (a tile, whose K and V fit the first-level cache for dim <= 128), four rows at a time. A tile is put together from
// runs of 16 tokens, or a page's where it has fewer, of which at least one takes part: what a page has besides costs nothing.
//   scores   s[t] = (K[t] . q) * k_scale[t] * q_scale + bias of its page
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
  float bias[tile_tokens];  // the page's, or -inf for tokens that take no part
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

// Consecutive tokens of a page: 16, or the page's where it has fewer.
struct Run {
  const int8_t* keys;      // of the first token; the next four dimensions are page_tokens * 4 bytes further
  const int8_t* values;    // [tokens / 4][dim][4]
  const uint16_t* scales;  // of K; V's are page_tokens further
  uint32_t tokens;         // bit t set: token t of the run takes part
  float bias;              // the page's
};

constexpr uint32_t run_tokens(uint32_t page_tokens) { return smaller(page_tokens, 16); }
constexpr uint32_t most_runs = tile_tokens / 8;  // of a tile

// The runs of a list of pages, a tile's at a time.
struct Runs {
  const PageRef* pages;
  uint32_t n_pages, dim, page_tokens;
  uint32_t page = 0, token = 0;  // where the next run may be

  // Up to a tile of them. Returns how many.
  uint32_t next(Run* runs) {
    const uint32_t size = run_tokens(page_tokens), most = tile_tokens / size;
    uint32_t n = 0;
    while (page < n_pages && n < most) {
      const PageRef& p = pages[page];
      const auto bits = static_cast<uint32_t>(p.tokens >> token & ((1u << size) - 1));
      if (bits != 0) {
        runs[n++] = {p.data + token * 4, p.data + page_bytes / 2 + std::size_t{token} * dim, p.scales + token, bits, p.bias};
      }
      token += size;
      if (token == page_tokens) token = 0, ++page;
    }
    return n;
  }
};

// The next tile's runs, asked from memory a few lines at each step of this tile's products: pages are chosen all over memory, so
// the processor cannot guess them. A step goes round several runs, so that address translations and memory banks work together.
struct RunsAhead {
  static constexpr uint32_t line = 64;  // bytes

  RunsAhead(const Run* next_runs, uint32_t n, uint32_t dim, uint32_t page_tokens, uint32_t lines)
      : runs(next_runs), count(n), lines_a_step(lines), key_stride(larger(line, page_tokens * 4)),
        key_lines(page_bytes / 2 / key_stride), end(n == 0 ? 0 : key_lines + run_tokens(page_tokens) * dim / line) {
    for (uint32_t i = 0; i < n; ++i) {
      __builtin_prefetch(runs[i].scales);
      __builtin_prefetch(runs[i].scales + page_tokens);
    }
  }

  void step() {
    if (at >= end) return;
    for (uint32_t i = 0; i < lines_a_step; ++i) {
      const Run& run = runs[next];
      __builtin_prefetch(at < key_lines ? run.keys + at * key_stride : run.values + (at - key_lines) * line);
      if (++next == count) {
        next = 0;
        if (++at == end) return;
      }
    }
  }

  const Run* runs;
  uint32_t count;
  uint32_t lines_a_step;  // 1, 2 or 4
  uint32_t key_stride, key_lines;
  uint32_t end;           // lines of each run
  uint32_t next = 0, at = 0;
};

// The scales and masks of n runs, padded with tokens that take no part to a multiple of what the kernels handle at once.
// Returns the padded number of tokens.
template <class Isa>
uint32_t load_tile(const Run* runs, uint32_t n, uint32_t page_tokens, PageTile& tile) {
  const uint32_t size = run_tokens(page_tokens);
  for (uint32_t p = 0; p < n; ++p) {
    const uint16_t* scales = runs[p].scales;
    const uint32_t base = p * size;
    for (uint32_t t = 0; t < size; t += 8) {  // a constant 8: vectors without a loop's beginning and end
      for (uint32_t i = t; i < t + 8; ++i) tile.k_scale[base + i] = from_bf16(scales[i]);
      for (uint32_t i = t; i < t + 8; ++i) tile.v_scale[base + i] = from_bf16(scales[page_tokens + i]);
      for (uint32_t i = t; i < t + 8; ++i) tile.bias[base + i] = runs[p].bias;
      if ((runs[p].tokens >> t & 0xff) == 0xff) continue;
      for (uint32_t i = t; i < t + 8; ++i) tile.bias[base + i] = runs[p].tokens >> i & 1 ? runs[p].bias : minus_infinity;
    }
  }
  const uint32_t tokens = n * size;
  const auto padded = static_cast<uint32_t>(round_up(tokens, 4 * Isa::lanes));
  for (uint32_t t = tokens; t < padded; ++t) {
    tile.k_scale[t] = tile.v_scale[t] = 0;
    tile.bias[t] = minus_infinity;
  }
  for (uint32_t v = 0, run = 0, t = 0; v < padded / Isa::lanes; ++v) {  // padding reads the last run again
    tile.keys[v] = runs[smaller(run, n - 1)].keys + t * 4;
    tile.second_keys[v] = runs[smaller(run + 1, n - 1)].keys;
    for (t += Isa::lanes; t >= size; t -= size) ++run;
  }
  return padded;
}

// tile.scores[r][t] = K[t] . q[r] for R rows. start: what cancels key_offset.
template <class Isa, uint32_t R, bool Halves>
void score_tile(const int8_t* q, uint32_t dim, uint32_t page_tokens, const int32_t* start, uint32_t tokens, PageTile& tile,
                RunsAhead& ahead) {
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
void add_values(const Run* runs, uint32_t n, uint32_t dim, uint32_t page_tokens, uint32_t first, const PageTile& tile,
                RunsAhead& ahead, float* o) {
  for (uint32_t d = 0; d < dim; d += D * Isa::lanes) {
    typename Isa::W acc[R][D] = {};
    for (uint32_t p = 0; p < n; ++p) {
      const int8_t* v = runs[p].values + d * 4;
      const uint32_t base = p * run_tokens(page_tokens);
      for (uint32_t t = 0; t < run_tokens(page_tokens); t += 4, v += std::size_t{dim} * 4) {
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
                RunsAhead& ahead) {
  if constexpr (Isa::lanes == 16) {
    if (page_tokens < Isa::lanes) return score_tile<Isa, R, true>(q, dim, page_tokens, start, tokens, tile, ahead);
  }
  score_tile<Isa, R, false>(q, dim, page_tokens, start, tokens, tile, ahead);
}

template <class Isa>
void add_values(uint32_t rows, const Run* runs, uint32_t n, uint32_t dim, uint32_t page_tokens, uint32_t first,
                const PageTile& tile, RunsAhead& ahead, float* o) {
  constexpr uint32_t narrow = smaller(4, 32 / Isa::lanes), wide = smaller(4, 64 / Isa::lanes);
  if (rows == 1) {
    if (dim == 32) return add_values<Isa, 1, narrow>(runs, n, dim, page_tokens, first, tile, ahead, o);
    return add_values<Isa, 1, wide>(runs, n, dim, page_tokens, first, tile, ahead, o);
  }
  if (dim == 32) return add_values<Isa, value_rows, narrow>(runs, n, dim, page_tokens, first, tile, ahead, o);
  add_values<Isa, value_rows, wide>(runs, n, dim, page_tokens, first, tile, ahead, o);
}

// How many lines of the next tile to ask for at a step (1, 2 or 4): its share, rounded down. Measured on Zen 5 over random pages of
// 256 MB: asking faster than that fills the queue of misses and is slower, leaving the last lines to the processor's own guesses is not.
template <class Isa>
uint32_t lines_a_step(uint32_t rows, uint32_t dim) {
  const uint32_t key_steps = (rows + Isa::row_block - 1) / Isa::row_block * (tile_tokens / (Isa::key_columns * Isa::lanes)) * (dim / 4);
  const uint32_t value_steps = (rows + value_rows - 1) / value_rows * (tile_tokens / 4) * (dim / smaller(4 * Isa::lanes, dim));
  const uint32_t lines = tile_tokens * 2 * dim / RunsAhead::line, steps = key_steps + value_steps;
  return 4 * steps <= lines ? 4 : 2 * steps <= lines ? 2 : 1;
}

template <class Isa>
void attend_pages(const QueryRows& q, const PageRef* pages, uint32_t n_pages, AttentionState state, std::byte* scratch) {
  const uint32_t dim = q.dim, page_tokens = page_bytes / 2 / dim;
  auto& tile = *reinterpret_cast<PageTile*>(scratch);
  std::memset(tile.keep, 0, sizeof tile.keep);
  auto* starts = reinterpret_cast<int32_t*>(scratch + sizeof(PageTile));  // [rows]
  key_offsets<Isa>(q.q, q.rows, dim, starts);
  const uint32_t lines = lines_a_step<Isa>(q.rows, dim), blocks = (q.rows + Isa::row_block - 1) / Isa::row_block;
  Runs all{pages, n_pages, dim, page_tokens};
  Run buffers[2][most_runs];
  uint32_t n = all.next(buffers[0]), n_next = 0;
  for (uint32_t which = 0; n > 0; n = n_next, which ^= 1) {
    const Run* runs = buffers[which];
    n_next = all.next(buffers[which ^ 1]);
    const uint32_t tokens = load_tile<Isa>(runs, n, page_tokens, tile);
    RunsAhead ahead(buffers[which ^ 1], n_next, dim, page_tokens, lines);
    for (uint32_t row = 0, left = blocks; left > 0; --left) {
      const uint32_t rows = (q.rows - row + left - 1) / left;  // blocks of nearly equal size
      with_count<Isa::row_block>(rows, [&](auto count) {
        score_rows<Isa, count.value>(q.q + row * std::size_t{dim}, dim, page_tokens, starts + row, tokens, tile, ahead);
      });
      weigh_tile<Isa>(rows, q.scale + row, tokens, tile, state.m + row, state.l + row);
      float* o = state.o + row * std::size_t{dim};
      for (uint32_t r = 0; r < rows; r += value_rows) {
        add_values<Isa>(smaller(value_rows, rows - r), runs, n, dim, page_tokens, r, tile, ahead, o + r * std::size_t{dim});
      }
      row += rows;
    }
  }
}

template <class Isa>
void score_tokens(const QueryRows& q, const PageRef* pages, uint32_t n_pages, float* scores, std::size_t stride, std::byte* scratch) {
  const uint32_t dim = q.dim, page_tokens = page_bytes / 2 / dim, size = run_tokens(page_tokens);
  auto& tile = *reinterpret_cast<PageTile*>(scratch);
  auto* starts = reinterpret_cast<int32_t*>(scratch + sizeof(PageTile));  // [rows]
  key_offsets<Isa>(q.q, q.rows, dim, starts);
  Run runs[most_runs];
  RunsAhead none(runs, 0, dim, page_tokens, 1);
  for (uint32_t first = 0; first < n_pages * page_tokens; first += tile_tokens) {
    const uint32_t given = smaller(tile_tokens, n_pages * page_tokens - first);
    for (uint32_t t = 0; t < given; t += size) {  // those of which no token takes part too: every score has its place
      const PageRef& p = pages[(first + t) / page_tokens];
      const uint32_t token = (first + t) % page_tokens;
      runs[t / size] = {p.data + token * 4, nullptr, p.scales + token, static_cast<uint32_t>(p.tokens >> token & ((1u << size) - 1)), p.bias};
    }
    const uint32_t tokens = load_tile<Isa>(runs, given / size, page_tokens, tile);
    for (uint32_t row = 0; row < q.rows; row += Isa::row_block) {
      const uint32_t rows = smaller(Isa::row_block, q.rows - row);
      with_count<Isa::row_block>(rows, [&](auto count) {
        score_rows<Isa, count.value>(q.q + row * std::size_t{dim}, dim, page_tokens, starts + row, tokens, tile, none);
      });
      for (uint32_t r = 0; r < rows; ++r) {
        scale_scores<Isa>(r, q.scale[row + r], minus_infinity, tokens, tile);
        std::memcpy(scores + (row + r) * stride + first, tile.s[r], given * sizeof(float));
      }
    }
  }
}

}  // namespace
}  // namespace kvasir
