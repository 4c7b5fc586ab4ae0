// States of recurrent layers for one Isa. A state is a matrix in panels of sixteen columns, so that
// a panel's rows are neighbours in memory and stay in the first cache for all tokens of a step.
// Columns are independent of each other: nothing is summed across lanes. A token reads and writes
// a panel row by row, whatever the number of tokens: a step's division changes no bit.
#pragma once

#include "matmul-inl.h"

namespace kvasir {
namespace {

template <class Isa>
struct StatePanel {
  using F = typename Isa::F;
  static constexpr uint32_t vectors = state_panel / Isa::lanes;
  static constexpr uint32_t rows = 4;  // summed side by side: additions wait for each other

  struct Columns {
    F v[vectors];
  };

  static Columns load(const float* p) {
    Columns c;
    for (uint32_t i = 0; i < vectors; ++i) c.v[i] = Isa::load(p + i * Isa::lanes);
    return c;
  }
  static void store(float* p, const Columns& c) {
    for (uint32_t i = 0; i < vectors; ++i) Isa::store(p + i * Isa::lanes, c.v[i]);
  }
  static void clear(Columns (&sum)[rows]) {
    for (Columns& each : sum)
      for (F& f : each.v) f = Isa::zero();
  }
  static Columns total(const Columns (&sum)[rows]) {
    Columns c;
    for (uint32_t i = 0; i < vectors; ++i)
      c.v[i] = Isa::add(Isa::add(sum[0].v[i], sum[1].v[i]), Isa::add(sum[2].v[i], sum[3].v[i]));
    return c;
  }

  // sum over rows of state[row] * k[row]
  static Columns product(const float* state, const float* k, uint32_t keys) {
    Columns sum[rows];
    clear(sum);
    const auto add = [&](uint32_t row, Columns& to) {
      const F key = Isa::broadcast(k + row);
      for (uint32_t i = 0; i < vectors; ++i)
        to.v[i] = Isa::fma(Isa::load(state + row * state_panel + i * Isa::lanes), key, to.v[i]);
    };
    uint32_t row = 0;
    for (; row + rows <= keys; row += rows)
      for (uint32_t r = 0; r < rows; ++r) add(row + r, sum[r]);
    for (; row < keys; ++row) add(row, sum[0]);
    return total(sum);
  }

  // to[row] = decay * from[row] + k[row] * change; returns the sum over rows of to[row] * q[row].
  static Columns update(const float* from, float* to, float decay, const Columns& change,
                        const float* k, const float* q, uint32_t keys) {
    Columns sum[rows];
    clear(sum);
    const F factor = Isa::broadcast(&decay);
    const auto step = [&](uint32_t row, Columns& out) {
      const F key = Isa::broadcast(k + row), query = Isa::broadcast(q + row);
      for (uint32_t i = 0; i < vectors; ++i) {
        const std::size_t at = row * state_panel + i * Isa::lanes;
        const F state = Isa::fma(change.v[i], key, Isa::mul(Isa::load(from + at), factor));
        Isa::store(to + at, state);
        out.v[i] = Isa::fma(state, query, out.v[i]);
      }
    };
    uint32_t row = 0;
    for (; row + rows <= keys; row += rows)
      for (uint32_t r = 0; r < rows; ++r) step(row + r, sum[r]);
    for (; row < keys; ++row) step(row, sum[0]);
    return total(sum);
  }
};

template <class Isa>
void advance_state(const StateStep& s, uint32_t panel_begin, uint32_t panel_end) {
  using Panel = StatePanel<Isa>;
  for (uint32_t p = panel_begin; p < panel_end; ++p) {
    const uint32_t column = p * state_panel,
                   columns = s.values - column < state_panel ? s.values - column : state_panel;
    const std::size_t at = std::size_t{p} * s.keys * state_panel;
    const float* from = s.from + at;
    float* to = s.to + at;
    for (std::size_t t = 0; t < s.n; ++t, from = to) {
      const float *k = s.k + t * s.key_stride, *q = s.q + t * s.key_stride;
      const float decay = s.decay[t * s.rate_stride], rate = s.rate[t * s.rate_stride];
      alignas(64) float part[state_panel] = {};
      std::memcpy(part, s.v + t * s.value_stride + column, columns * sizeof(float));
      typename Panel::Columns change = Panel::load(part);
      if (s.corrects) {
        const typename Panel::Columns known = Panel::product(from, k, s.keys);
        const float minus = -decay;
        for (uint32_t i = 0; i < Panel::vectors; ++i)
          change.v[i] = Isa::fma(known.v[i], Isa::broadcast(&minus), change.v[i]);
      }
      for (auto& f : change.v) f = Isa::mul(f, Isa::broadcast(&rate));
      Panel::store(part, Panel::update(from, to, decay, change, k, q, s.keys));
      std::memcpy(s.out + t * s.out_stride + column, part, columns * sizeof(float));
    }
  }
}

template <class Isa>
void fill_recurrent(Kernels& k) {
  k.advance_state = advance_state<Isa>;
}

}  // namespace
}  // namespace kvasir
