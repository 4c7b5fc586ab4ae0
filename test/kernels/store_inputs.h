// Inputs and tolerances of the tests of the store's kernels.
#pragma once

#include <algorithm>

#include "attention_inputs.h"
#include "reference/reference.h"
#include "support.h"

namespace kvasir::test {

// The arrays of one extent, zeroed as the store allocates them.
struct Extent {
  explicit Extent(uint32_t head_dim)
      : shape(PageShape::of(head_dim)), pages(PageShape::pages_bytes()),
        scales(shape.scales_bytes() / 2), bounds(shape.bounds_bytes()) {
    std::memset(pages.data(), 0, pages.size());
    std::memset(scales.data(), 0, scales.size() * 2);
    std::memset(bounds.data(), 0, bounds.size());
  }
  void seal(const Kernels& k, const Guarded<float>& keys, const Guarded<float>& values,
            uint32_t page) {
    k.seal_page(shape, keys.data(), values.data(), page, pages.data(), scales.data(),
                bounds.data());
  }
  bool guards_intact() const {
    return pages.guards_intact() && scales.guards_intact() && bounds.guards_intact();
  }
  const int8_t* page(uint32_t p) const { return pages.data() + std::size_t{p} * page_bytes; }
  const uint16_t* page_scales(uint32_t p) const {
    return scales.data() + std::size_t{p} * 2 * shape.page_tokens;
  }
  double key(uint32_t p, uint32_t t, uint32_t d) const {
    return reference::page_key(page(p), page_scales(p), shape.dim, t, d);
  }
  double value(uint32_t p, uint32_t t, uint32_t d) const {
    return reference::page_value(page(p), page_scales(p), shape.dim, t, d);
  }
  bool operator==(const Extent& b) const {
    return std::memcmp(pages.data(), b.pages.data(), pages.size()) == 0 &&
           std::memcmp(scales.data(), b.scales.data(), scales.size() * 2) == 0 &&
           std::memcmp(bounds.data(), b.bounds.data(), bounds.size()) == 0;
  }

  PageShape shape;
  Guarded<int8_t> pages;
  Guarded<uint16_t> scales;
  Guarded<int8_t> bounds;
};

// [page_tokens][dim], each token of another size; channels from head_dim on are 0.
inline void fill_random(const PageShape& shape, Random& random, Guarded<float>& x) {
  for (std::size_t t = 0; t < shape.page_tokens; ++t) {
    const float size = std::exp(random.uniform(-3, 3));
    for (std::size_t d = 0; d < shape.dim; ++d)
      x[t * shape.dim + d] = d < shape.head_dim ? random.normal() * size : 0;
  }
}

// All 16 pages from one seed.
inline void fill_extent(const Kernels& k, Random& random, Extent& extent) {
  Guarded<float> keys(page_bytes / 2), values(page_bytes / 2);
  for (uint32_t p = 0; p < extent_pages; ++p) {
    fill_random(extent.shape, random, keys);
    fill_random(extent.shape, random, values);
    extent.seal(k, keys, values, p);
  }
}

inline constexpr uint32_t head_dims[] = {1, 32, 48, 64, 80, 96, 128, 200, 256, 300, 512};

// The largest error of a quad's sketch against the projected keys, in steps of a seventh of its
// largest value. basis: [dim][sketch_dim].
inline double sketch_error(const Extent& extent, const Guarded<float>& basis, const int8_t* sketch,
                           uint32_t page, uint32_t quad) {
  const PageShape& shape = extent.shape;
  const uint32_t n = shape.sketch_dim();
  std::vector<double> want(std::size_t{quad_tokens} * n);
  double largest = 0, worst = 0;
  for (std::size_t t = 0; t < quad_tokens; ++t) {
    for (uint32_t c = 0; c < n; ++c) {
      double x = 0;
      for (uint32_t d = 0; d < shape.dim; ++d)
        x += extent.key(page, quad * quad_tokens + static_cast<uint32_t>(t), d) *
             double{basis[std::size_t{d} * n + c]};
      want[t * n + c] = x;
      largest = std::max(largest, std::fabs(x));
    }
  }
  for (uint32_t t = 0; t < quad_tokens; ++t) {
    for (uint32_t c = 0; c < n; ++c) {
      const double value =
          reference::sketch_value(shape, sketch, page * shape.page_quads() + quad, t, c);
      worst = std::max(worst, std::fabs(value - want[std::size_t{t} * n + c]));
    }
  }
  return largest > 0 ? worst / (largest / 7) : worst;
}

// A sketch of random values with scales up to 2.
inline void fill_sketch(const PageShape& shape, Random& random, Guarded<int8_t>& sketch) {
  for (std::size_t i = 0; i < sketch.size(); ++i)
    sketch[i] = static_cast<int8_t>((1 + random.below(15)) | (1 + random.below(15)) << 4);
  const uint32_t quads = shape.extent_quads();
  auto* scales = reinterpret_cast<uint16_t*>(sketch.data() + sketch.size() -
                                             std::size_t{quads} * sizeof(uint16_t));
  for (uint32_t i = 0; i < quads; ++i) scales[i] = static_cast<uint16_t>(random.below(0x4000));
}

// The sums of shares below a threshold, in double precision.
inline ShareSums share_sums(const float* shares, uint32_t n, float threshold) {
  ShareSums sums{};
  for (uint32_t i = 0; i < n; ++i) {
    const double share{shares[i]};
    if (shares[i] < threshold) sums.below += share, sums.squares += share * share;
    sums.at_least += shares[i] >= threshold;
  }
  return sums;
}

// How many of n shares are in `taken` and should not be, or the reverse, or are out of order. Ties
// within 1e-6 of the threshold may go either way.
inline uint32_t wrong_samples(const float* shares, uint32_t n, uint32_t first, uint32_t seed,
                              float threshold, const uint32_t* taken, uint32_t count) {
  uint32_t at = 0, wrong = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const double share{shares[i]}, priority = share / reference::sample_random(first + i, seed);
    const bool is_taken = at < count && taken[at] == i;
    at += is_taken;
    if (std::isnan(share) ? is_taken
                          : std::fabs(priority - double{threshold}) > 1e-6 * priority &&
                                is_taken != (priority >= double{threshold}))
      ++wrong;
  }
  return wrong + (at != count);
}

}  // namespace kvasir::test
