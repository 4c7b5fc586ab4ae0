// Attention over full-precision tokens: the window, the sinks, and the chunk of a prefill with
// itself.
//
// Works on 64 tokens at a time. K is transposed once per tile ([dim][64], so that one broadcast of
// a query's element serves every token) and then read by all rows, four at a time. The computation
// of a row does not depend on its neighbours.
#pragma once

#include "attention_common.h"

namespace kvasir {
namespace {

constexpr uint32_t rows_tile_tokens = 64;

struct alignas(64) RowsTile {
  float p[max_rows][rows_tile_tokens];  // scores, then exp(score - m)
  float m[max_rows];                    // the new maximum
  float keep[block_floats];             // exp(m_old - m)
  float* keys;                          // [dim][rows_tile_tokens]
};

// keys[d][t] = k[t][d] for n <= 64 tokens, padded to whole vectors by repeating the last token.
template <class Isa>
void transpose_keys(const float* k, uint32_t n, uint32_t dim, float* keys) {
  for (uint32_t t = 0; t < n; t += Isa::lanes) {
    const uint32_t valid = smaller(Isa::lanes, n - t);
    for (uint32_t d = 0; d < dim; d += Isa::lanes) {
      Isa::transpose(k + t * std::size_t{dim} + d, dim, valid, keys + d * rows_tile_tokens + t,
                     rows_tile_tokens);
    }
  }
}

// tile.p[r][t] = q[r] . k[t] for R rows and C vectors of tokens from vector v on.
template <class Isa, uint32_t R, uint32_t C>
void score_columns(const float* q, uint32_t dim, uint32_t v, RowsTile& tile) {
  typename Isa::F acc[R][C];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::set(0);
  }
  const float* keys = tile.keys + v * Isa::lanes;
  for (uint32_t d = 0; d < dim; ++d, keys += rows_tile_tokens) {
    typename Isa::F k[C];
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) k[c] = Isa::load(keys + c * Isa::lanes);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
      const auto element = Isa::set(q[r * std::size_t{dim} + d]);
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::fma(element, k[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) Isa::store(tile.p[r] + (v + c) * Isa::lanes, acc[r][c]);
  }
}

// tile.m[r] from row r's first `seen` scores; masks the others up to `tokens`; tile.keep[r] becomes
// m_old - m.
template <class Isa>
void find_maximum(uint32_t r, uint32_t seen, uint32_t tokens, float m, RowsTile& tile) {
  float* p = tile.p[r];
  auto best = Isa::set(m);
  uint32_t t = 0;
  for (; t + Isa::lanes <= seen; t += Isa::lanes) best = Isa::max(best, Isa::load(p + t));
  const auto none = Isa::set(minus_infinity);
  if (t < seen) {
    const auto left = Isa::set(static_cast<float>(seen - t));
    const auto s = Isa::select_less(Isa::iota(), left, Isa::load(p + t), none);
    Isa::store(p + t, s);
    best = Isa::max(best, s);
    t += Isa::lanes;
  }
  for (; t < tokens; t += Isa::lanes) Isa::store(p + t, none);
  tile.m[r] = Isa::largest(best);
  tile.keep[r] = tile.m[r] > m ? m - tile.m[r] : 0;
}

// Converts row r's scores to exp(score - m); updates m and l.
template <class Isa>
void weigh_row(uint32_t r, uint32_t tokens, RowsTile& tile, float* m, float* l) {
  float* p = tile.p[r];
  // A row that has attended nothing yet.
  const auto new_m = Isa::set(tile.m[r] > minus_infinity ? tile.m[r] : 0);
  auto total = Isa::set(0);
  for (uint32_t t = 0; t < tokens; t += Isa::lanes) {
    const auto e = exp_negative<Isa>(Isa::sub(Isa::load(p + t), new_m));
    total = Isa::add(total, e);
    Isa::store(p + t, e);
  }
  *l = *l * tile.keep[r] + Isa::sum(total);
  *m = tile.m[r];
}

// o[r] = o[r] * keep[r] + sum over n tokens of p[r][t] * v[t] for R rows and C vectors of
// dimensions from d on.
template <class Isa, uint32_t R, uint32_t C>
void add_row_values(const float* v, uint32_t n, uint32_t dim, uint32_t d, const RowsTile& tile,
                    float* o) {
  typename Isa::F acc[R][C];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < R; ++r) {
    const auto keep = Isa::set(tile.keep[r]);
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c)
      acc[r][c] = Isa::mul(Isa::load(o + r * std::size_t{dim} + d + c * Isa::lanes), keep);
  }
  v += d;
  for (uint32_t t = 0; t < n; ++t, v += dim) {
    typename Isa::F values[C];
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) values[c] = Isa::load(v + c * Isa::lanes);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
      const auto weight = Isa::set(tile.p[r][t]);
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::fma(weight, values[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c)
      Isa::store(o + r * std::size_t{dim} + d + c * Isa::lanes, acc[r][c]);
  }
}

// R rows against one tile of n tokens. seen[r]: how many of them row r attends.
template <class Isa, uint32_t R>
void attend_row_block(const float* q, const float* v, const uint32_t* seen, uint32_t dim,
                      RowsTile& tile, float* o, float* m, float* l) {
  constexpr uint32_t C = smaller(Isa::row_columns, rows_tile_tokens / Isa::lanes);
  constexpr uint32_t narrow = smaller(Isa::row_columns, 32 / Isa::lanes),
                     wide = smaller(Isa::row_columns, 64 / Isa::lanes);
  uint32_t max_seen = 0;
  for (uint32_t r = 0; r < R; ++r) max_seen = larger(max_seen, seen[r]);
  if (max_seen == 0) return;
  const auto tokens = static_cast<uint32_t>(round_up(max_seen, Isa::lanes));
  const uint32_t vectors = tokens / Isa::lanes;
  uint32_t vector = 0;
  for (; vector + C <= vectors; vector += C) score_columns<Isa, R, C>(q, dim, vector, tile);
  for (; vector < vectors; ++vector) score_columns<Isa, R, 1>(q, dim, vector, tile);
  for (uint32_t r = 0; r < R; ++r) find_maximum<Isa>(r, seen[r], tokens, m[r], tile);
  exp_negative_all<Isa>(tile.keep, R);
  for (uint32_t r = 0; r < R; ++r) weigh_row<Isa>(r, tokens, tile, m + r, l + r);
  if (dim == 32) {
    for (uint32_t d = 0; d < dim; d += narrow * Isa::lanes)
      add_row_values<Isa, R, narrow>(v, max_seen, dim, d, tile, o);
  } else {
    for (uint32_t d = 0; d < dim; d += wide * Isa::lanes)
      add_row_values<Isa, R, wide>(v, max_seen, dim, d, tile, o);
  }
}

template <class Isa>
void attend_rows(const QueryRows& q, const float* k, const float* v, uint32_t n,
                 const uint32_t* limit, AttentionState state, std::byte* scratch) {
  const std::size_t dim = q.dim;
  auto& tile = *reinterpret_cast<RowsTile*>(scratch);
  std::memset(tile.keep, 0, sizeof tile.keep);
  tile.keys = reinterpret_cast<float*>(scratch + sizeof(RowsTile));
  for (uint32_t base = 0; base < n; base += rows_tile_tokens) {
    const uint32_t tokens = smaller(rows_tile_tokens, n - base);
    transpose_keys<Isa>(k + base * dim, tokens, q.dim, tile.keys);
    for (uint32_t row = 0; row < q.rows; row += Isa::row_block) {
      const uint32_t rows = smaller(Isa::row_block, q.rows - row);
      uint32_t seen[max_rows];
      for (uint32_t r = 0; r < rows; ++r) {
        const uint32_t end = limit ? smaller(limit[row + r], n) : n;
        seen[r] = end > base ? smaller(end - base, tokens) : 0;
      }
      const float* q_rows = q.f32 + row * dim;
      float* o = state.o + row * dim;
      float *m = state.m + row, *l = state.l + row;
      with_count<Isa::row_block>(rows, [&](auto count) {
        attend_row_block<Isa, count.value>(q_rows, v + base * dim, seen, q.dim, tile, o, m, l);
      });
    }
  }
}

}  // namespace
}  // namespace kvasir
