// Sealing and the selector's scores of every instruction set against the double-precision
// reference.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "store_inputs.h"

using namespace kvasir;
using test::Extent;
using test::fill_extent;
using test::fill_random;
using test::Guarded;
using test::head_dims;
using test::Queries;
using test::Random;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

void seal(const Kernels& k, const Guarded<float>& keys, const Guarded<float>& values, uint32_t page,
          Extent& extent) {
  extent.seal(k, keys, values, page);
  CHECK(extent.guards_intact());
}

}  // namespace

TEST_CASE("a quantised query keeps within half a step and its split parts add up to it") {
  for (const Kernels* k : test::all_kernels()) {
    Random random(5);
    Queries q(*k, 7, 64, random, 1);
    for (std::size_t i = 0; i < q.f32.size(); ++i) {
      const std::size_t r = i / 64, d = i % 64;
      CHECK(std::fabs(q.f32[i] - static_cast<float>(q.q[i]) * q.scale[r]) <=
            static_cast<float>(test::query_tolerance) * q.scale[r]);
      CHECK(q.q[i] == q.split[r * 128 + d] + q.split[r * 128 + 64 + d]);
      CHECK(q.split[r * 128 + d] >= 0);
      CHECK(q.split[r * 128 + 64 + d] <= 0);
    }
    CHECK(q.q.guards_intact());
    CHECK(q.split.guards_intact());
    CHECK(q.scale.guards_intact());
  }
}

TEST_CASE("zeros, infinities and NaNs in a query become zeros, and null split is left alone") {
  for (const Kernels* k : test::all_kernels()) {
    Guarded<float> f32(64), scale(2);
    Guarded<int8_t> q(64);
    for (std::size_t i = 0; i < 64; ++i) f32[i] = 0;
    f32[32] = not_a_number;
    f32[33] = infinity;
    f32[34] = -infinity;
    f32[35] = 2;
    k->quantize_queries(f32.data(), 2, 32, q.data(), nullptr, scale.data());
    for (std::size_t i = 0; i < 64; ++i) CHECK(q[i] == (i == 35 ? 127 : 0));
    CHECK(scale[0] == 0);
    CHECK(scale[1] == 2.0f / 127);
  }
}

TEST_CASE("sealed tokens keep within half a step of what was given, padding stays zero") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t head_dim : head_dims) {
      Random random(head_dim);
      Extent extent(head_dim);
      const PageShape& shape = extent.shape;
      Guarded<float> keys(page_bytes / 2), values(page_bytes / 2);
      fill_random(shape, random, keys);
      fill_random(shape, random, values);
      seal(*k, keys, values, 3, extent);
      double worst = 0;
      int min_peak = 127;
      for (uint32_t t = 0; t < shape.page_tokens; ++t) {
        const double k_step = reference::from_bf16(extent.page_scales(3)[t]);
        const double v_step = reference::from_bf16(extent.page_scales(3)[shape.page_tokens + t]);
        double peak = 0;
        for (uint32_t d = 0; d < shape.dim; ++d) {
          const std::size_t i = std::size_t{t} * shape.dim + d;
          worst = std::max(worst, std::fabs(extent.key(3, t, d) - double{keys[i]}) / k_step);
          worst = std::max(worst, std::fabs(extent.value(3, t, d) - double{values[i]}) / v_step);
          peak = std::max(peak, std::fabs(extent.key(3, t, d)) / k_step);
          if (d >= head_dim) CHECK(extent.key(3, t, d) == 0);
        }
        min_peak = std::min(min_peak, static_cast<int>(peak));
      }
      CAPTURE(k->name);
      CAPTURE(head_dim);
      CHECK(worst <= 0.50001);
      CHECK(min_peak == 127);
    }
  }
}

TEST_CASE("sealing an unsealed page gives the same bytes") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t head_dim : head_dims) {
      Random random(head_dim + 1000);
      Extent first(head_dim), second(head_dim);
      fill_extent(*k, random, first);
      Guarded<float> keys(page_bytes / 2), values(page_bytes / 2);
      for (uint32_t p = 0; p < extent_pages; ++p) {
        k->unseal_page(first.shape, first.page(p), first.page_scales(p), keys.data(),
                       values.data());
        CHECK(keys.guards_intact());
        CHECK(values.guards_intact());
        bool same = true;
        for (uint32_t i = 0; i < page_bytes / 2; ++i) {
          const uint32_t t = i / first.shape.dim, d = i % first.shape.dim;
          same = same && double{keys[i]} == first.key(p, t, d) &&
                 double{values[i]} == first.value(p, t, d);
        }
        CHECK(same);
        Guarded<float> alone(page_bytes / 2);
        k->unseal_page(first.shape, first.page(p), first.page_scales(p), alone.data(), nullptr);
        CHECK(std::memcmp(keys.data(), alone.data(), page_bytes / 2 * sizeof(float)) == 0);
        seal(*k, keys, values, p, second);
      }
      CHECK(first == second);
    }
  }
}

TEST_CASE("every scale that bf16 has survives sealing twice") {
  const Kernels& k = cpu_kernels();
  Extent first(256), second(256);
  Guarded<float> keys(page_bytes / 2), values(page_bytes / 2), back(page_bytes / 2),
      back_values(page_bytes / 2);
  bool same = true;
  // the magnitudes of two octaves, 16 steps a bf16
  for (uint32_t bits = 0; bits < 512 * 16; bits += 8) {
    for (uint32_t t = 0; t < 8; ++t) {
      const uint32_t word = 0x3f800000u + (bits + t) * 0x1000u;
      float magnitude;
      std::memcpy(&magnitude, &word, sizeof magnitude);
      for (uint32_t d = 0; d < 256; ++d)
        keys[t * 256 + d] = values[t * 256 + d] = magnitude * (static_cast<float>(d) / 255 * 2 - 1);
    }
    seal(k, keys, values, 0, first);
    k.unseal_page(first.shape, first.page(0), first.page_scales(0), back.data(),
                  back_values.data());
    seal(k, back, back_values, 0, second);
    same = same && first == second;
  }
  CHECK(same);
}

TEST_CASE("all instruction sets seal and unseal the same bytes") {
  for (uint32_t head_dim : head_dims) {
    Random random(head_dim);
    Extent want(head_dim);
    fill_extent(*cpu_kernels_by_name("scalar"), random, want);
    for (const Kernels* k : test::all_kernels()) {
      Random again(head_dim);
      Extent got(head_dim);
      fill_extent(*k, again, got);
      CAPTURE(k->name);
      CAPTURE(head_dim);
      CHECK(std::memcmp(got.pages.data(), want.pages.data(), got.pages.size()) == 0);
      CHECK(std::memcmp(got.scales.data(), want.scales.data(), got.scales.size() * 2) == 0);
      CHECK(std::memcmp(got.bounds.data(), want.bounds.data(), got.bounds.size()) == 0);
    }
  }
}

TEST_CASE("tokens that are zero, tiny or not numbers seal to zeros with scale 0") {
  for (const Kernels* k : test::all_kernels()) {
    Extent extent(64);
    Guarded<float> keys(page_bytes / 2), values(page_bytes / 2);
    for (uint32_t i = 0; i < page_bytes / 2; ++i) {
      const uint32_t t = i / 64;
      keys[i] = t == 0   ? not_a_number
                : t == 1 ? (i % 2 ? infinity : -infinity)
                : t == 2 ? 1e-40f
                         : 0.0f;
      values[i] = keys[i];
    }
    keys[5] = 1.0f;  // next to the NaNs
    values[64] = 3e38f;
    seal(*k, keys, values, 0, extent);
    for (uint32_t t = 0; t < 32; ++t) {
      for (uint32_t d = 0; d < 64; ++d) {
        if (t != 0 || d != 5) CHECK(extent.key(0, t, d) == 0);
        if (t != 1 || d != 0) CHECK(extent.value(0, t, d) == 0);
      }
      CHECK((extent.page_scales(0)[t] == 0) == (t != 0));
      CHECK((extent.page_scales(0)[32 + t] == 0) == (t != 1));
    }
    CHECK(extent.key(0, 0, 5) == doctest::Approx(1).epsilon(0.004));
    CHECK(extent.value(0, 1, 0) == doctest::Approx(3e38).epsilon(0.004));
    for (uint32_t d = 0; d < 64; ++d)
      CHECK(std::isfinite(reference::block_bound(extent.shape, extent.bounds.data(), 0, d)));
  }
}

TEST_CASE("bounds enclose every token of a block, tightly") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t head_dim : head_dims) {
      Random random(head_dim + 7);
      Extent extent(head_dim);
      const PageShape& shape = extent.shape;
      fill_extent(*k, random, extent);
      bool encloses = true, tight = true;
      for (uint32_t b = 0; b < shape.extent_blocks(); ++b) {
        const uint32_t p = b / shape.page_blocks(),
                       first = b % shape.page_blocks() * shape.block_tokens;
        double magnitude = 0;
        for (uint32_t t = first; t < first + shape.block_tokens; ++t) {
          for (uint32_t d = 0; d < shape.dim; ++d)
            magnitude = std::max(magnitude, std::fabs(extent.key(p, t, d)));
        }
        for (uint32_t d = 0; d < shape.dim; ++d) {
          double high = -1e300, low = 1e300;
          for (uint32_t t = first; t < first + shape.block_tokens; ++t) {
            high = std::max(high, extent.key(p, t, d));
            low = std::min(low, extent.key(p, t, d));
          }
          const double upper = reference::block_bound(shape, extent.bounds.data(), b, d);
          const double lower =
              reference::block_bound(shape, extent.bounds.data(), b, shape.dim + d);
          encloses = encloses && upper >= high && lower <= low;
          tight = tight && upper - high < magnitude / 127 * 1.0001 &&
                  low - lower < magnitude / 127 * 1.0001;
        }
      }
      CAPTURE(k->name);
      CAPTURE(head_dim);
      CHECK(encloses);
      CHECK(tight);
    }
  }
}

TEST_CASE("a block's score bounds the score of each of its tokens") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t head_dim : head_dims) {
      Random random(head_dim + 31);
      Extent extent(head_dim);
      const PageShape& shape = extent.shape;
      fill_extent(*k, random, extent);
      const uint32_t rows = 3, blocks = shape.extent_blocks();
      Queries q(*k, rows, shape.dim, random, 1);
      Guarded<float> scores(std::size_t{rows} * blocks);
      k->score_bounds(shape, q.view, extent.bounds.data(), nullptr, scores.data(), blocks);
      bool bounds = true;
      for (uint32_t r = 0; r < rows; ++r) {
        for (uint32_t p = 0; p < extent_pages; ++p) {
          for (uint32_t t = 0; t < shape.page_tokens; ++t) {
            double score = 0;
            for (uint32_t d = 0; d < shape.dim; ++d)
              score += q.q[r * shape.dim + d] * extent.key(p, t, d);
            score *= double{q.scale[r]};
            const float bound =
                scores[r * blocks + p * shape.page_blocks() + t / shape.block_tokens];
            // two float products are rounded
            bounds = bounds && double{bound} >= score - 3e-7 * std::fabs(score);
          }
        }
      }
      CAPTURE(k->name);
      CAPTURE(head_dim);
      CHECK(bounds);
    }
  }
}

TEST_CASE("scores of bounds are the reference's, for any rows and stride") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t head_dim : {32u, 64u, 128u, 256u}) {
      Random random(head_dim + 3);
      Extent extent(head_dim);
      const PageShape& shape = extent.shape;
      fill_extent(*k, random, extent);
      for (uint32_t rows = 1; rows <= 9; ++rows) {
        Queries q(*k, rows, shape.dim, random, 1);
        const uint32_t blocks = shape.extent_blocks(), stride = blocks + 3;
        Guarded<float> scores(std::size_t{rows - 1} * stride + blocks);
        k->score_bounds(shape, q.view, extent.bounds.data(),
                        rows % 2 ? extent.bounds.data() : nullptr, scores.data(), stride);
        CHECK(scores.guards_intact());
        std::vector<double> want(std::size_t{rows} * stride);
        reference::score_bounds(shape, q.view, extent.bounds.data(), want.data(), stride);
        CAPTURE(k->name);
        CAPTURE(head_dim);
        for (std::size_t r = 0; r < rows; ++r)  // integer sums: only the scales are rounded
          CHECK(test::relative_error(scores.data() + r * stride, want.data() + r * stride, blocks) <
                test::summary_score_tolerance);
      }
    }
  }
}

TEST_CASE("attention shares are the softmax with others, summed over rows") {
  for (const Kernels* k : test::all_kernels()) {
    Random random(12);
    for (uint32_t i = 0; i < 200; ++i) {
      const uint32_t n = i < 20 ? i : random.below(3000), rows = 1 + i % 5,
                     stride = n + random.below(9);
      const float spread = i % 3 == 0 ? 40.0f : 3.0f;
      Guarded<float> scores(std::size_t{rows - 1} * stride + n);
      for (std::size_t j = 0; j < scores.size(); ++j)
        scores[j] = i % 4 == 1 && random.below(3) == 0 ? -infinity : spread * random.normal();
      // a row without any
      if (i % 7 == 3 && rows > 1) std::fill_n(scores.data() + stride, n, -infinity);
      std::vector<float> m(rows), l(rows);
      for (uint32_t r = 0; r < rows; ++r) {
        const bool none = (i + r) % 5 == 2;
        m[r] = none ? -infinity : spread * random.normal(),
        l[r] = none ? 0.0f : random.uniform(1, 90);
      }
      std::vector<double> want(n), of_row(n);
      for (uint32_t r = 0; r < rows; ++r) {
        reference::attention_shares(scores.data() + std::size_t{r} * stride, n, m[r], l[r],
                                    of_row.data());
        for (uint32_t j = 0; j < n; ++j) want[j] += of_row[j];
      }
      k->attention_shares(scores.data(), rows, stride, n, m.data(), l.data());
      CAPTURE(k->name);
      CAPTURE(n);
      CHECK(scores.guards_intact());
      double difference = 0;  // of shares of one whole a row
      for (uint32_t j = 0; j < n; ++j)
        difference += std::abs(static_cast<double>(scores[j]) - want[j]);
      CHECK(difference < test::shares_tolerance * rows);
    }
    Guarded<float> none(37);
    for (uint32_t j = 0; j < 37; ++j) none[j] = -infinity;
    const float m = -infinity, l = 0;
    k->attention_shares(none.data(), 1, 37, 37, &m, &l);
    for (uint32_t j = 0; j < 37; ++j) CHECK(none[j] == 0);
  }
}

TEST_CASE(
    "products of matrices are the reference's, for either order of the first and any strides") {
  for (const Kernels* k : test::all_kernels()) {
    Random random(83);
    for (const uint32_t cols : {16u, 17u, 24u, 32u, 47u, 64u, 96u, 131u, 256u})
      for (const bool transposed : {false, true}) {
        const uint32_t rows = 1 + random.below(41), n = random.below(40),
                       stride = cols + random.below(9), out_stride = cols + random.below(9);
        const std::size_t row = transposed ? 1 : n + random.below(9),
                          step = transposed ? rows + random.below(9) : 1;
        Guarded<float> a(rows * row + n * step), b(std::size_t{n} * stride + 1),
            out(std::size_t{rows} * out_stride);
        for (std::size_t i = 0; i < a.size(); ++i) a[i] = random.normal();
        for (std::size_t i = 0; i < b.size(); ++i) b[i] = random.normal();
        for (std::size_t i = 0; i < out.size(); ++i) out[i] = 77;
        std::vector<double> want(out.size(), 77);
        k->multiply(a.data(), row, step, rows, b.data(), stride, cols, n, out.data(), out_stride);
        reference::multiply(a.data(), row, step, rows, b.data(), stride, cols, n, want.data(),
                            out_stride);
        double worst = 0;
        for (std::size_t i = 0; i < out.size(); ++i)
          worst = std::max(worst, std::fabs(double{out[i]} - want[i]));
        CAPTURE(k->name);
        CAPTURE(cols);
        CHECK(worst <= test::multiply_tolerance);
        CHECK(out.guards_intact());
      }
  }
}

TEST_CASE("a sketch holds the projected keys within half a step, and nothing outside its blocks") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t head_dim : head_dims) {
      Random random(head_dim + 71);
      Extent extent(head_dim);
      const PageShape& shape = extent.shape;
      fill_extent(*k, random, extent);
      const uint32_t n = shape.sketch_dim();
      Guarded<float> basis(std::size_t{shape.dim} * n);
      for (std::size_t i = 0; i < basis.size(); ++i)
        basis[i] = random.normal() / std::sqrt(static_cast<float>(shape.dim));
      Guarded<int8_t> sketch(shape.sketch_bytes());
      std::memset(sketch.data(), 0, sketch.size());
      const uint32_t sealed = 11;  // the last pages are not
      for (uint32_t p = 0; p < sealed; ++p)
        k->seal_sketch(shape, basis.data(), extent.pages.data() + p * page_bytes,
                       extent.scales.data() + p * 2 * shape.page_tokens, p, sketch.data());
      CHECK(sketch.guards_intact());
      bool within = true, clean = true;
      for (uint32_t quad = 0; quad < shape.extent_quads(); ++quad) {
        const uint32_t p = quad / shape.page_quads();
        if (p < sealed) {
          within = within &&
                   test::sketch_error(extent, basis, sketch.data(), p, quad % shape.page_quads()) <=
                       test::sketch_tolerance;
          continue;
        }
        for (uint32_t t = 0; t < quad_tokens; ++t)
          for (uint32_t c = 0; c < n; ++c)
            clean = clean && reference::sketch_value(shape, sketch.data(), quad, t, c) == 0;
      }
      CAPTURE(k->name);
      CAPTURE(head_dim);
      CHECK(within);
      CHECK(clean);
    }
  }
}

TEST_CASE("keys that are no numbers, and those of no size, leave a sketch without steps") {
  for (const Kernels* k : test::all_kernels()) {
    const PageShape shape = PageShape::of(128);
    Guarded<int8_t> page(page_bytes), sketch(shape.sketch_bytes());
    Guarded<float> basis(std::size_t{shape.dim} * shape.sketch_dim());
    Guarded<uint16_t> scales(std::size_t{2} * shape.page_tokens);
    for (std::size_t i = 0; i < basis.size(); ++i) basis[i] = 1;
    std::memset(page.data(), 3, page.size());
    // no number, infinities, 0 and next to it
    for (const uint16_t scale : std::initializer_list<uint16_t>{0x7fc0, 0x7f80, 0xff80, 0, 1}) {
      for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = scale;
      std::memset(sketch.data(), 0, sketch.size());
      k->seal_sketch(shape, basis.data(), page.data(), scales.data(), 0, sketch.data());
      for (uint32_t quad = 0; quad < shape.page_quads(); ++quad)
        for (uint32_t c = 0; c < shape.sketch_dim(); ++c)
          CHECK(reference::sketch_value(shape, sketch.data(), quad, 1, c) == 0);
    }
  }
}

TEST_CASE("scores of a sketch are the reference's, for any rows and stride") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t head_dim : {32u, 64u, 128u, 256u}) {
      Random random(head_dim + 5);
      const PageShape shape = PageShape::of(head_dim);
      const uint32_t n = shape.sketch_dim(), quads = shape.extent_quads(), stride = quads + 5;
      Guarded<int8_t> sketch(shape.sketch_bytes());
      test::fill_sketch(shape, random, sketch);
      for (uint32_t rows = 1; rows <= 40; rows += rows < 9 ? 1 : 7) {
        Guarded<int8_t> q(std::size_t{rows} * n);
        Guarded<float> q_scale(rows), scores(std::size_t{rows - 1} * stride + quads);
        for (std::size_t i = 0; i < q.size(); ++i)
          q[i] = static_cast<int8_t>(static_cast<int>(random.below(255)) - 127);
        for (uint32_t r = 0; r < rows; ++r) q_scale[r] = random.uniform(0, 1);
        k->score_sketch(shape, rows, q.data(), q_scale.data(), sketch.data(),
                        rows % 2 ? sketch.data() : nullptr, scores.data(), stride);
        std::vector<double> want(std::size_t{rows} * stride);
        reference::score_sketch(shape, rows, q.data(), q_scale.data(), sketch.data(), want.data(),
                                stride);
        CAPTURE(k->name);
        CAPTURE(head_dim);
        CHECK(scores.guards_intact());
        for (std::size_t r = 0; r < rows; ++r)
          CHECK(test::relative_error(scores.data() + r * stride, want.data() + r * stride, quads) <
                test::summary_score_tolerance);
      }
    }
  }
}

TEST_CASE("the best score of a sketch's tile has the bits of the best of its quads") {
  for (const Kernels* k : test::all_kernels()) {
    CAPTURE(k->name);
    for (uint32_t head_dim : {32u, 64u, 128u, 256u, 512u}) {
      CAPTURE(head_dim);
      Random random(head_dim + 6);
      const PageShape shape = PageShape::of(head_dim);
      const uint32_t n = shape.sketch_dim(), quads = shape.extent_quads();
      Guarded<int8_t> sketch(shape.sketch_bytes());
      test::fill_sketch(shape, random, sketch);
      for (uint32_t rows : {1u, 15u, 16u, 33u})
        for (const auto& [first, end] : {std::pair{0u, quads}, {3u, quads - 1}, {0u, 1u}}) {
          const uint32_t tiles = (end + tile_blocks - 1) / tile_blocks, stride = tiles + 3;
          Guarded<int8_t> q(std::size_t{rows} * n);
          Guarded<float> q_scale(rows), found(std::size_t{rows - 1} * stride + tiles);
          std::vector<float> scores(std::size_t{rows} * quads), want(found.size(), -2.0f);
          for (std::size_t i = 0; i < q.size(); ++i)
            q[i] = static_cast<int8_t>(static_cast<int>(random.below(255)) - 127);
          for (uint32_t r = 0; r < rows; ++r) q_scale[r] = random.uniform(0, 1);
          k->score_sketch(shape, rows, q.data(), q_scale.data(), sketch.data(), nullptr,
                          scores.data(), quads);
          for (std::size_t r = 0; r < rows; ++r)
            for (uint32_t i = first; i < end; ++i)
              want[r * stride + i / tile_blocks] =
                  std::max(want[r * stride + i / tile_blocks], scores[r * quads + i]);
          std::fill_n(found.data(), found.size(), -2.0f);
          k->raise_by_sketch(shape, rows, q.data(), q_scale.data(), sketch.data(), nullptr, first,
                             end, found.data(), stride);
          CHECK(std::equal(want.begin(), want.end(), found.data()));
          CHECK(found.guards_intact());
        }
    }
  }
}

TEST_CASE(
    "samples are taken by their random numbers, which are evenly spread and not alike, and the "
    "sums of what is below are the reference's") {
  for (const Kernels* k : test::all_kernels()) {
    CAPTURE(k->name);
    for (uint32_t n : {1u, 15u, 33u, 64u, 10007u})
      for (uint32_t seed : {0u, 1u, 0x9e3779b1u, 0xffffffffu})
        for (float threshold : {0.0f, 1e-6f, 0.01f, 1.0f, 3e38f}) {
          Random random(seed + n);
          Guarded<float> shares(n);
          Guarded<uint32_t> taken(n);
          for (std::size_t i = 0; i < n; ++i)
            shares[i] = i % 5 == 0 ? 0.0f : std::exp(random.uniform(-30, 2));
          if (n > 40) shares[7] = shares[n - 1] = std::nanf("");
          const uint32_t count = k->sample(shares.data(), n, 77, seed, threshold, taken.data());
          CHECK(taken.guards_intact());
          REQUIRE(count <= n);
          const ShareSums sums = k->sum_shares(shares.data(), n, threshold);
          const ShareSums want = test::share_sums(shares.data(), n, threshold);
          CHECK(test::wrong_samples(shares.data(), n, 77, seed, threshold, taken.data(), count) ==
                0);
          CHECK(sums.at_least == want.at_least);
          CHECK(sums.below == doctest::Approx(want.below).epsilon(test::share_sums_tolerance));
          CHECK(sums.squares == doctest::Approx(want.squares).epsilon(test::share_sums_tolerance));
        }
  }
  constexpr uint32_t n = 10007;
  for (uint32_t seed : {0u, 1u, 0x9e3779b1u, 0xffffffffu}) {
    double sum = 0, product = 0, before = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const double u = reference::sample_random(77 + i, seed) - 0.5;
      CHECK(std::fabs(u) < 0.5);
      sum += u, product += u * before, before = u;
    }
    // Four standard deviations of n numbers evenly spread, and of products of neighbours that know
    // nothing of each other.
    CHECK(std::fabs(sum / n) < 4 * std::sqrt(1.0 / 12 / n));
    CHECK(std::fabs(product / n) < 4 / 12.0 / std::sqrt(n));
  }
}
