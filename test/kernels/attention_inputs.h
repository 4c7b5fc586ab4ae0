// Inputs, states and tolerances of the tests of attention kernels.
#pragma once

#include <algorithm>

#include "reference/reference.h"
#include "support.h"
#include "tolerances.h"

namespace kvasir::test {

inline constexpr uint32_t padded_dims[] = {32, 64, 128, 256, 512};

struct Queries {
  Queries(const Kernels& k, uint32_t rows, uint32_t dim, Random& random, float size)
      : f32(std::size_t{rows} * dim), q(std::size_t{rows} * dim),
        split(std::size_t{rows} * dim * 2), scale(rows) {
    for (std::size_t i = 0; i < f32.size(); ++i) f32[i] = random.normal() * size;
    k.quantize_queries(f32.data(), rows, dim, q.data(), split.data(), scale.data());
    view = {rows, dim, f32.data(), q.data(), split.data(), scale.data()};
  }
  Guarded<float> f32;
  Guarded<int8_t> q, split;
  Guarded<float> scale;
  QueryRows view;
};

struct State {
  State(uint32_t rows_, uint32_t dim_)
      : rows(rows_), dim(dim_), o(std::size_t{rows} * dim), m(rows), l(rows) {
    clear();
  }
  void clear() {
    for (std::size_t i = 0; i < o.size(); ++i) o[i] = 0;
    for (uint32_t r = 0; r < rows; ++r) {
      m[r] = -std::numeric_limits<float>::infinity();
      l[r] = 0;
    }
  }
  AttentionState view() { return {o.data(), m.data(), l.data()}; }
  bool guards_intact() const { return o.guards_intact() && m.guards_intact() && l.guards_intact(); }
  bool operator==(const State& b) const {
    return std::memcmp(o.data(), b.o.data(), o.size() * 4) == 0 &&
           std::memcmp(m.data(), b.m.data(), rows * 4) == 0 &&
           std::memcmp(l.data(), b.l.data(), rows * 4) == 0;
  }
  uint32_t rows, dim;
  Guarded<float> o, m, l;
};

struct ReferenceState {
  ReferenceState(uint32_t rows, uint32_t dim) : o(std::size_t{rows} * dim), m(rows), l(rows) {}
  std::vector<double> o, m, l;
};

// The largest relative error of a normalised row.
inline double worst_row(const State& a, const ReferenceState& b) {
  double worst = 0;
  for (std::size_t r = 0; r < a.rows; ++r) {
    std::vector<double> got(a.dim), want(a.dim);
    for (std::size_t d = 0; d < a.dim; ++d) {
      got[d] = a.l[r] > 0 ? double{a.o[r * a.dim + d]} / double{a.l[r]} : 0;
      want[d] = b.l[r] > 0 ? b.o[r * a.dim + d] / b.l[r] : 0;
    }
    worst = std::max(worst, test::relative_error(got.data(), want.data(), a.dim));
  }
  return worst;
}

// Random sealed pages: [n][4096] with scales [n][2][page_tokens].
struct Pages {
  Pages(uint32_t dim_, uint32_t n, Random& random)
      : dim(dim_), page_tokens(page_bytes / 2 / dim), data(std::size_t{n} * page_bytes),
        scales(std::size_t{n} * 2 * page_tokens) {
    const auto byte = [&] {
      return static_cast<int8_t>(static_cast<int>(random.below(255)) - 127);
    };
    for (uint32_t p = 0; p < n; ++p) {
      int8_t* page = data.data() + std::size_t{p} * page_bytes;
      // Values, and so errors, do not depend on the page's layout.
      for (uint32_t d = 0; d < dim; d += 4)
        for (uint32_t t = 0; t < page_tokens; ++t)
          for (uint32_t i = 0; i < 4; ++i)
            page[PageShape::of(dim).key_at(t) + d * quad_tokens + i] = byte();
      for (uint32_t i = page_bytes / 2; i < page_bytes; ++i) page[i] = byte();
    }
    for (std::size_t i = 0; i < scales.size(); ++i) {
      const float scale = random.uniform(0.2f, 1.0f) / 64.0f;
      uint32_t bits;
      std::memcpy(&bits, &scale, sizeof bits);
      scales[i] = static_cast<uint16_t>(bits >> 16);
    }
    for (uint32_t p = 0; p < n; ++p) {
      refs.push_back({data.data() + std::size_t{p} * page_bytes,
                      scales.data() + std::size_t{p} * 2 * page_tokens, all()});
    }
  }
  uint64_t all() const {
    return page_tokens == 64 ? ~uint64_t{0} : (uint64_t{1} << page_tokens) - 1;
  }
  uint32_t dim, page_tokens;
  Guarded<int8_t> data;
  Guarded<uint16_t> scales;
  std::vector<PageRef> refs;
};

}  // namespace kvasir::test
