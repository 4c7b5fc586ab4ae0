// Products by tiles of bf16 against exact sums of the rounded weights and inputs.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "matmul_inputs.h"
#include "multiply.h"

using namespace kvasir;

namespace {

// A float sum over all columns of products of bf16 numbers, relative to the sum of the magnitudes.
constexpr double sum_tolerance = 1e-6;

// The same against products that are not rounded: weight and input are, by at most 2^-9 each.
constexpr double rounded_tolerance = 1.01 / 256;

// x rounded to bf16, to nearest even.
double bf16(double x) {
  const float f = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  float rounded;
  std::memcpy(&rounded, &bits, sizeof rounded);
  return rounded;
}

struct Errors {
  double of_sums = 0, of_products = 0;  // the largest error of any output
};

// y: [n][rows + gap].
Errors errors_of(const WeightView& w, const Activations& x, const float* y, std::size_t gap) {
  Errors worst;
  const auto grow = [](double* to, double error) { *to = error <= *to ? *to : error; };  // NaN wins
  std::vector<double> row(w.cols), rounded(w.cols), in(std::size_t{x.n} * w.cols);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = bf16(x.f32[i]);
  for (uint32_t r = 0; r < w.rows; ++r) {
    reference::dequantize_row(w, r, row.data());
    std::transform(row.begin(), row.end(), rounded.begin(), bf16);
    for (std::size_t i = 0; i < x.n; ++i) {
      double sum = 0, exact = 0, magnitude = 1e-30;
      for (uint32_t c = 0; c < w.cols; ++c) {
        sum += rounded[c] * in[i * w.cols + c];
        exact += row[c] * double{x.f32[i * w.cols + c]};
        magnitude += std::fabs(row[c] * double{x.f32[i * w.cols + c]});
      }
      const double got = y[i * (w.rows + gap) + r];
      grow(&worst.of_sums, std::fabs(got - sum) / magnitude);
      grow(&worst.of_products, std::fabs(got - exact) / magnitude);
    }
  }
  return worst;
}

// Inputs with their tiles, made 16 at a time, the last ones first.
struct TiledInputs : test::Inputs {
  TiledInputs(const Kernels& k, uint32_t n, uint32_t cols, test::Random& random)
      : test::Inputs(k, n, cols, random), tiles(k.tile_bytes(n, cols)) {
    for (uint32_t i = (n - 1) / 16 * 16 + 16; i > 0; i -= 16)
      k.to_tiles(view, i - 16, std::min(n - (i - 16), 16u), tiles.data());
    CHECK(tiles.guards_intact());
    view.method = ProductMethod::tiles;
    view.tiles = tiles.data();
  }
  test::Guarded<std::byte> tiles;
};

bool same_bits(const test::Guarded<float>& a, const float* b) {
  return std::memcmp(a.data(), b, a.size() * sizeof(float)) == 0;
}

void check_tiles(const Kernels& k, const test::Type& t, uint32_t n, uint32_t rows, uint32_t cols,
                 test::Random& random) {
  CAPTURE(std::string(t.name));
  CAPTURE(n);
  CAPTURE(rows);
  CAPTURE(cols);
  const test::Weights w(t, rows, cols, random, random.below(2) * 3);
  const TiledInputs x(k, n, cols, random);
  constexpr std::size_t gap = 3;
  const auto y = test::multiply(k, w.view, x.view, rows, gap);
  const Errors errors = errors_of(w.view, x.view, y->data(), gap);
  CHECK(errors.of_sums < sum_tolerance);
  CHECK(errors.of_products < rounded_tolerance);
  CHECK(same_bits(*test::multiply(k, w.view, x.view, k.matmul_rows, gap), y->data()));
}

}  // namespace

TEST_CASE("tiles add up products of weights and inputs that are rounded to bf16") {
  test::Random random(9);
  for (const Kernels* k : test::all_kernels()) {
    if (k->tile_bytes(16, 256) == 0) continue;
    for (const test::Type& t : test::types) {
      if (t.block == 1) continue;
      for (const uint32_t n : {1u, 9u, 16u, 17u, 32u, 33u, 63u})
        check_tiles(*k, t, n, 1 + random.below(80),
                    t.block * (1 + random.below(t.block == 256 ? 3 : 20)), random);
    }
  }
}

TEST_CASE("products of several passes of tiles have the bits of each part alone") {
  test::Random random(10);
  const test::Type &q8_0 = test::type_of("Q8_0"), &q2_k = test::type_of("Q2_K");
  constexpr uint32_t n = 2 * tile_inputs + 76, rows = tile_pass_rows + 45, cols = 512 + 32;
  for (const Kernels* k : test::all_kernels()) {
    if (k->tile_bytes(16, 256) == 0) continue;
    check_tiles(*k, q8_0, n, rows, cols, random);
    check_tiles(*k, q2_k, 33, rows, 512, random);
    const test::Weights w(q8_0, rows, cols, random);
    const TiledInputs x(*k, n, cols, random);
    const auto all = test::multiply(*k, w.view, x.view, rows, 0);
    for (const auto& [first, count] :
         {std::pair{0u, tile_inputs}, std::pair{tile_inputs, tile_inputs + 76}}) {
      const auto some = test::multiply(*k, w.view, rows_of(x.view, first, count), rows, 0);
      CHECK(same_bits(*some, all->data() + first * rows));
    }
    // An input's outputs do not depend on its neighbours.
    test::Inputs one(*k, 1, cols, random);
    test::Guarded<std::byte> tiles(k->tile_bytes(1, cols));
    one.view.f32 = x.view.f32 + std::size_t{tile_inputs + 20} * cols;
    k->to_tiles(one.view, 0, 1, tiles.data());
    one.view.method = ProductMethod::tiles, one.view.tiles = tiles.data();
    const auto alone = test::multiply(*k, w.view, one.view, rows, 0);
    CHECK(same_bits(*alone, all->data() + std::size_t{tile_inputs + 20} * rows));
  }
}

TEST_CASE("float weights use `many` when tiles are asked for") {
  test::Random random(11);
  for (const Kernels* k : test::all_kernels()) {
    if (k->tile_bytes(16, 256) == 0) continue;
    for (const test::Type& t : test::types) {
      if (t.block != 1) continue;
      const test::Weights w(t, 35, 96, random);
      TiledInputs x(*k, 19, 96, random);
      const auto tiles = test::multiply(*k, w.view, x.view, w.view.rows, 0);
      x.view.method = ProductMethod::many;
      CHECK(same_bits(*test::multiply(*k, w.view, x.view, w.view.rows, 0), tiles->data()));
    }
  }
}
