// Attention over full-precision tokens: the window, the sinks, and the chunk of a prefill with itself.
//
// 64 tokens at a time: K is transposed once a tile ([dim][64], so that one broadcast of a query's element meets every token) and
// then read by all rows, four at a time. Each row goes through the same steps in the same order whatever rows are its neighbours.
#pragma once

#include "attention_common.inl"

namespace kvasir {
namespace {

constexpr uint32_t rows_tile_tokens = 64;

struct alignas(64) RowsTile {
  float p[row_block][rows_tile_tokens];  // scores, then exp(score - m)
  float keep[row_block];                 // exp(m_old - m)
  float* keys;                           // [dim][rows_tile_tokens]
};

// keys[d][t] = k[t][d] for n <= 64 tokens, padded to whole vectors by repeating the last token.
template <class Isa>
void transpose_keys(const float* k, uint32_t n, uint32_t dim, float* keys) {
  for (uint32_t t = 0; t < n; t += Isa::lanes) {
    const uint32_t valid = smaller(Isa::lanes, n - t);
    for (uint32_t d = 0; d < dim; d += Isa::lanes) {
      Isa::transpose(k + t * std::size_t{dim} + d, dim, valid, keys + d * rows_tile_tokens + t, rows_tile_tokens);
    }
  }
}

// tile.p[r][t] = q[r] . k[t] for R rows and C vectors of tokens from vector v on.
template <class Isa, uint32_t R, uint32_t C>
void score_columns(const float* q, uint32_t dim, uint32_t v, RowsTile& tile) {
  typename Isa::F acc[R][C];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::set(0);
  }
  const float* keys = tile.keys + v * Isa::lanes;
  for (uint32_t d = 0; d < dim; ++d, keys += rows_tile_tokens) {
    typename Isa::F k[C];
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) k[c] = Isa::load(keys + c * Isa::lanes);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < R; ++r) {
      const auto element = Isa::set(q[r * std::size_t{dim} + d]);
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::fma(element, k[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) Isa::store(tile.p[r] + (v + c) * Isa::lanes, acc[r][c]);
  }
}

// Row r's scores of its first `seen` tokens become exp(score - m), the others up to `tokens` 0; m and l take them in.
template <class Isa>
void weigh_row(uint32_t r, uint32_t seen, uint32_t tokens, RowsTile& tile, float* m, float* l) {
  float* p = tile.p[r];
  tile.keep[r] = 1;
  const auto limit = Isa::set(static_cast<float>(seen));
  auto best = Isa::set(minus_infinity);
  for (uint32_t t = 0; t < seen; t += Isa::lanes) {
    const auto index = Isa::add(Isa::set(static_cast<float>(t)), Isa::iota());
    const auto s = Isa::select_less(index, limit, Isa::load(p + t), Isa::set(minus_infinity));
    Isa::store(p + t, s);
    best = Isa::max(best, s);
  }
  const float tile_best = Isa::largest(best), new_m = tile_best > *m ? tile_best : *m;
  uint32_t t = 0;
  if (new_m > minus_infinity) {
    tile.keep[r] = exp_negative_one<Isa>(*m - new_m);
    auto total = Isa::set(0);
    for (; t < seen; t += Isa::lanes) {
      const auto e = exp_negative<Isa>(Isa::sub(Isa::load(p + t), Isa::set(new_m)));
      total = Isa::add(total, e);
      Isa::store(p + t, e);
    }
    *l = *l * tile.keep[r] + Isa::sum(total);
    *m = new_m;
  }
  for (; t < tokens; t += Isa::lanes) Isa::store(p + t, Isa::set(0));
}

// o[r] = o[r] * keep[r] + sum over n tokens of p[r][t] * v[t] for R rows and C vectors of dimensions from d on.
template <class Isa, uint32_t R, uint32_t C>
void add_row_values(const float* v, uint32_t n, uint32_t dim, uint32_t d, const RowsTile& tile, float* o) {
  typename Isa::F acc[R][C];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < R; ++r) {
    const auto keep = Isa::set(tile.keep[r]);
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::mul(Isa::load(o + r * std::size_t{dim} + d + c * Isa::lanes), keep);
  }
  v += d;
  for (uint32_t t = 0; t < n; ++t, v += dim) {
    typename Isa::F values[C];
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) values[c] = Isa::load(v + c * Isa::lanes);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < R; ++r) {
      const auto weight = Isa::set(tile.p[r][t]);
#pragma GCC unroll 4
      for (uint32_t c = 0; c < C; ++c) acc[r][c] = Isa::fma(weight, values[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (uint32_t r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < C; ++c) Isa::store(o + r * std::size_t{dim} + d + c * Isa::lanes, acc[r][c]);
  }
}

// R rows against one tile of n tokens. seen[r]: how many of them row r sees.
template <class Isa, uint32_t R>
void attend_row_block(const float* q, const float* v, const uint32_t* seen, uint32_t dim, RowsTile& tile, float* o, float* m,
                      float* l) {
  constexpr uint32_t C = smaller(Isa::row_columns, rows_tile_tokens / Isa::lanes);
  constexpr uint32_t narrow = smaller(Isa::row_columns, 32 / Isa::lanes), wide = smaller(Isa::row_columns, 64 / Isa::lanes);
  uint32_t most = 0;
  for (uint32_t r = 0; r < R; ++r) most = larger(most, seen[r]);
  if (most == 0) return;
  const auto tokens = static_cast<uint32_t>(round_up(most, Isa::lanes));
  for (uint32_t t = 0; t < tokens; t += C * Isa::lanes) score_columns<Isa, R, C>(q, dim, t / Isa::lanes, tile);
  for (uint32_t r = 0; r < R; ++r) weigh_row<Isa>(r, seen[r], tokens, tile, m + r, l + r);
  if (dim == 32) {
    for (uint32_t d = 0; d < dim; d += narrow * Isa::lanes) add_row_values<Isa, R, narrow>(v, most, dim, d, tile, o);
  } else {
    for (uint32_t d = 0; d < dim; d += wide * Isa::lanes) add_row_values<Isa, R, wide>(v, most, dim, d, tile, o);
  }
}

template <class Isa>
void attend_rows(const QueryRows& q, const float* k, const float* v, uint32_t n, const uint32_t* limit, AttentionState state,
                 std::byte* scratch) {
  const std::size_t dim = q.dim;
  auto& tile = *reinterpret_cast<RowsTile*>(scratch);
  tile.keys = reinterpret_cast<float*>(scratch + sizeof(RowsTile));
  for (uint32_t base = 0; base < n; base += rows_tile_tokens) {
    const uint32_t tokens = smaller(rows_tile_tokens, n - base);
    transpose_keys<Isa>(k + base * dim, tokens, q.dim, tile.keys);
    for (uint32_t row = 0; row < q.rows; row += row_block) {
      const uint32_t rows = smaller(row_block, q.rows - row);
      uint32_t seen[row_block];
      for (uint32_t r = 0; r < rows; ++r) {
        const uint32_t end = limit ? smaller(limit[row + r], n) : n;
        seen[r] = end > base ? smaller(end - base, tokens) : 0;
      }
      const float* q_rows = q.f32 + row * dim;
      float* o = state.o + row * dim;
      float *m = state.m + row, *l = state.l + row;
      switch (rows) {
        case 1: attend_row_block<Isa, 1>(q_rows, v + base * dim, seen, q.dim, tile, o, m, l); break;
        case 2: attend_row_block<Isa, 2>(q_rows, v + base * dim, seen, q.dim, tile, o, m, l); break;
        case 3: attend_row_block<Isa, 3>(q_rows, v + base * dim, seen, q.dim, tile, o, m, l); break;
        default: attend_row_block<Isa, 4>(q_rows, v + base * dim, seen, q.dim, tile, o, m, l); break;
      }
    }
  }
}

}  // namespace
}  // namespace kvasir
