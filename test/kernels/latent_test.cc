// Pages of latent attention, whose values are their keys, in every instruction set.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "attention_inputs.h"
#include "reference/reference.h"

using namespace kvasir;
using test::Guarded;
using test::Queries;
using test::Random;
using test::ReferenceState;
using test::State;

namespace {

constexpr uint32_t latent_dims[] = {40, 64, 96, 288, 576};  // heads; padded: 64, 64, 128, 320, 576

// An extent whose pages were sealed from random keys.
struct LatentExtent {
  LatentExtent(const Kernels& k, uint32_t head_dim, uint64_t seed)
      : shape(PageShape::of(head_dim, true)), pages(shape.pages_size()),
        scales(shape.scales_bytes() / 2), bounds(shape.bounds_bytes()) {
    std::memset(pages.data(), 0, pages.size());
    std::memset(scales.data(), 0, scales.size() * 2);
    std::memset(bounds.data(), 0, bounds.size());
    Random random(seed);
    for (uint32_t p = 0; p < extent_pages; ++p) {
      Guarded<float> keys(std::size_t{shape.page_tokens} * shape.dim);
      for (std::size_t t = 0; t < shape.page_tokens; ++t) {
        const float size = std::exp(random.uniform(-3, 3));
        for (std::size_t d = 0; d < shape.dim; ++d)
          keys[t * shape.dim + d] = d < head_dim ? random.normal() * size : 0;
      }
      k.seal_page(shape, keys.data(), nullptr, p, pages.data(), scales.data(), bounds.data());
      CHECK(keys.guards_intact());
      given.emplace_back(keys.data(), keys.data() + keys.size());
    }
    CHECK(pages.guards_intact());
    CHECK(scales.guards_intact());
    CHECK(bounds.guards_intact());
  }
  PageRef page(uint32_t p) const {
    return {pages.data() + p * shape.page_size(), page_scales(p), ~uint64_t{0}};
  }
  const uint16_t* page_scales(uint32_t p) const {
    return scales.data() + std::size_t{p} * 2 * shape.page_tokens;
  }
  double key(uint32_t p, uint32_t t, uint32_t d) const {
    return reference::page_key(page(p).data, page_scales(p), shape.dim, t, d);
  }
  QueryRows latent(QueryRows q) const {
    q.latent = true;
    return q;
  }

  PageShape shape;
  Guarded<int8_t> pages;
  Guarded<uint16_t> scales;
  Guarded<int8_t> bounds;
  std::vector<std::vector<float>> given;  // [pages][tokens * dim]
};

}  // namespace

TEST_CASE("a latent page holds its keys within half a step, once, with one scale a token") {
  for (const Kernels* k : test::all_kernels()) {
    for (const uint32_t head_dim : latent_dims) {
      CAPTURE(std::string(k->name));
      CAPTURE(head_dim);
      const LatentExtent extent(*k, head_dim, head_dim),
          oracle(*test::all_kernels()[0], head_dim, head_dim);
      const PageShape& shape = extent.shape;
      REQUIRE(shape.page_size() == std::size_t{64} * shape.dim);
      CHECK(std::memcmp(extent.pages.data(), oracle.pages.data(), extent.pages.size()) == 0);
      CHECK(std::memcmp(extent.scales.data(), oracle.scales.data(), shape.scales_bytes()) == 0);
      CHECK(std::memcmp(extent.bounds.data(), oracle.bounds.data(), shape.bounds_bytes()) == 0);
      const uint32_t p = head_dim % extent_pages;
      bool near = true;
      for (uint32_t t = 0; t < shape.page_tokens; ++t) {
        const double scale = reference::from_bf16(extent.page_scales(p)[t]);
        CHECK(extent.page_scales(p)[t] == extent.page_scales(p)[shape.page_tokens + t]);
        for (uint32_t d = 0; d < shape.dim; ++d)
          near = near && std::fabs(extent.key(p, t, d) -
                                   double{extent.given[p][std::size_t{t} * shape.dim + d]}) <=
                             0.504 * scale;
      }
      CHECK(near);
      Guarded<float> keys(extent.given[p].size());
      k->unseal_page(shape, extent.page(p).data, extent.page_scales(p), keys.data(), nullptr);
      CHECK(keys.guards_intact());
      bool same = true;
      for (uint32_t t = 0; t < shape.page_tokens; ++t)
        for (uint32_t d = 0; d < shape.dim; ++d)
          same = same && double{keys[std::size_t{t} * shape.dim + d]} == extent.key(p, t, d);
      CHECK(same);
    }
  }
}

TEST_CASE("attention over latent pages takes their keys for values") {
  for (const Kernels* k : test::all_kernels()) {
    for (const uint32_t head_dim : latent_dims) {
      const LatentExtent extent(*k, head_dim, head_dim + 7);
      const uint32_t dim = extent.shape.dim;
      for (uint32_t i = 0; i < 8; ++i) {
        CAPTURE(std::string(k->name));
        CAPTURE(head_dim);
        CAPTURE(i);
        Random random(head_dim * 100 + i);
        const uint32_t rows = 1 + random.below(i < 6 ? 9 : 40), n = 1 + random.below(12);
        const Queries q(*k, rows, dim, random,
                        random.uniform(0.01f, 0.5f) / std::sqrt(static_cast<float>(dim)));
        const QueryRows view = extent.latent(q.view);
        std::vector<PageRef> pages;
        for (uint32_t p = 0; p < n; ++p) {
          pages.push_back(extent.page(p));
          if (i % 3 == 1) pages[p].tokens = random.next() | uint64_t{1} << random.below(64);
          if (i % 3 == 2) pages[p].tokens = uint64_t{15} << 4 * random.below(16);
          if (i % 2 == 1) pages[p].bias = random.uniform(0, 6);
        }
        State state(rows, dim);
        Guarded<std::byte> scratch(k->attend_scratch(rows, dim));
        k->attend_pages(view, pages.data(), n, state.view(), scratch.data());
        CHECK(scratch.guards_intact());
        CHECK(state.guards_intact());
        ReferenceState want(rows, dim);
        reference::attend_pages(view, pages.data(), n, want.o.data(), want.m.data(), want.l.data());
        // twice the usual, because the sizes of values differ by up to 400
        CHECK(test::worst_row(state, want) < 2 * test::pages_tolerance);
        CHECK(test::relative_error(state.m.data(), want.m.data(), rows) < 1e-6);
        CHECK(test::relative_error(state.l.data(), want.l.data(), rows) < 3e-6);

        const std::size_t stride = std::size_t{n} * extent.shape.page_tokens;
        Guarded<float> scores(rows * stride);
        std::vector<double> right(rows * stride);
        k->score_tokens(view, pages.data(), n, scores.data(), stride, scratch.data());
        reference::score_tokens(view, pages.data(), n, right.data(), stride);
        CHECK(scores.guards_intact());
        bool good = true;
        for (std::size_t s = 0; s < right.size(); ++s)
          good = good && (double{scores[s]} == right[s] ||
                          std::fabs(double{scores[s]} - right[s]) <=
                              test::token_score_tolerance * 100 * (1 + std::fabs(right[s])));
        CHECK(good);
      }
    }
  }
}

TEST_CASE("bounds and sketches of latent pages are those of their keys") {
  for (const Kernels* k : test::all_kernels()) {
    for (const uint32_t head_dim : latent_dims) {
      CAPTURE(std::string(k->name));
      CAPTURE(head_dim);
      const LatentExtent extent(*k, head_dim, head_dim + 3);
      const PageShape& shape = extent.shape;
      Random random(head_dim);
      const uint32_t rows = 3, blocks = shape.extent_blocks();
      REQUIRE(blocks == 64);
      const Queries q(*k, rows, shape.dim, random, 1);
      Guarded<float> bounds(rows * blocks);
      k->score_bounds(shape, q.view, extent.bounds.data(), nullptr, bounds.data(), blocks);
      CHECK(bounds.guards_intact());
      Guarded<std::byte> scratch(k->attend_scratch(rows, shape.dim));
      Guarded<float> scores(rows * std::size_t{shape.page_tokens});
      bool bounded = true;
      for (uint32_t p = 0; p < extent_pages; ++p) {
        const PageRef page = extent.page(p);
        k->score_tokens(extent.latent(q.view), &page, 1, scores.data(), shape.page_tokens,
                        scratch.data());
        for (std::size_t r = 0; r < rows; ++r)
          for (std::size_t t = 0; t < shape.page_tokens; ++t) {
            const float bound = bounds[r * blocks + p * shape.page_blocks() + t / 16];
            bounded = bounded &&
                      scores[r * shape.page_tokens + t] <= bound + 1e-5f * (1 + std::fabs(bound));
          }
      }
      CHECK(bounded);

      const uint32_t n = shape.sketch_dim(), p = 5;
      Guarded<float> basis(std::size_t{shape.dim} * n);
      for (std::size_t i = 0; i < basis.size(); ++i)
        basis[i] = random.normal() / std::sqrt(static_cast<float>(shape.dim));
      Guarded<int8_t> sketch(shape.sketch_bytes());
      std::memset(sketch.data(), 0, sketch.size());
      k->seal_sketch(shape, basis.data(), extent.page(p).data, extent.page_scales(p), p,
                     sketch.data());
      CHECK(sketch.guards_intact());
      double worst = 0;  // in steps of a seventh of a quad's largest value
      for (uint32_t quad = 0; quad < shape.page_quads(); ++quad) {
        std::vector<double> want(quad_tokens * n);
        double largest = 0, error = 0;
        for (uint32_t t = 0; t < quad_tokens; ++t)
          for (uint32_t c = 0; c < n; ++c) {
            double& x = want[std::size_t{t} * n + c];
            for (uint32_t d = 0; d < shape.dim; ++d)
              x += extent.key(p, quad * quad_tokens + t, d) * double{basis[std::size_t{d} * n + c]};
            largest = std::max(largest, std::fabs(x));
          }
        for (uint32_t t = 0; t < quad_tokens; ++t)
          for (uint32_t c = 0; c < n; ++c)
            error = std::max(
                error, std::fabs(want[std::size_t{t} * n + c] -
                                 reference::sketch_value(shape, sketch.data(),
                                                         p * shape.page_quads() + quad, t, c)));
        worst = std::max(worst, error / (largest / 7));
      }
      CHECK(worst < test::sketch_tolerance);
    }
  }
}
