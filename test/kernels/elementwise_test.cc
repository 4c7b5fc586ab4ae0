// The elementwise operations of every instruction set against the reference.
#include <doctest/doctest.h>

#include <string>

#include "reference/reference.h"
#include "support.h"
#include "tolerances.h"

using namespace kvasir;
using test::Guarded;
using test::Random;

namespace {

void fill(Guarded<float>& a, Random& random, float scale = 1) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = random.normal() * scale;
}

bool same_bits(const Guarded<float>& a, const Guarded<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("rms_norm agrees with the reference, also in place") {
  Random random(11);
  for (uint32_t cols : {1u, 15u, 16u, 17u, 33u, 384u, 1000u, 4096u}) {
    for (const Kernels* k : test::all_kernels()) {
      CAPTURE(std::string(k->name));
      CAPTURE(cols);
      constexpr uint32_t n = 3;
      Guarded<float> x(n * cols), weight(cols), y(n * cols);
      fill(x, random, 10);
      fill(weight, random);
      std::vector<double> expected(n * cols);
      reference::rms_norm(x.data(), weight.data(), 1e-5f, n, cols, expected.data());
      k->rms_norm(x.data(), weight.data(), 1e-5f, n, cols, y.data());
      CHECK(y.guards_intact());
      CHECK(test::relative_error(y.data(), expected.data(), n * cols) <
            test::elementwise_tolerance);
      k->rms_norm(x.data(), weight.data(), 1e-5f, n, cols, x.data());
      CHECK(same_bits(x, y));
    }
  }
}

TEST_CASE("rms_norm of zeros is zero") {
  for (const Kernels* k : test::all_kernels()) {
    float x[32] = {}, weight[32] = {};
    k->rms_norm(x, weight, 1e-6f, 1, 32, x);
    for (float v : x) CHECK(v == 0);
  }
}

TEST_CASE("rope rotates the pairs of its layout and nothing else") {
  Random random(12);
  for (const Kernels* k : test::all_kernels()) {
    for (const bool neox : {false, true}) {
      for (uint32_t rotary : {2u, 6u, 32u, 50u, 64u, 128u}) {
        CAPTURE(std::string(k->name));
        CAPTURE(neox);
        CAPTURE(rotary);
        const uint32_t heads = 5, stride = rotary + 7;
        Guarded<float> x(heads * stride), cos(rotary / 2), sin(rotary / 2);
        fill(x, random);
        for (uint32_t i = 0; i < rotary / 2; ++i) {
          const float angle = random.uniform(-4, 4);
          cos[i] = std::cos(angle);
          sin[i] = std::sin(angle);
        }
        std::vector<double> expected(x.data(), x.data() + x.size());
        const std::vector<float> before(x.data(), x.data() + x.size());
        reference::rope(expected.data(), heads, stride, rotary, cos.data(), sin.data(), neox);
        k->rope(x.data(), heads, stride, rotary, cos.data(), sin.data(), neox);
        CHECK(x.guards_intact());
        CHECK(test::relative_error(x.data(), expected.data(), x.size()) <
              test::elementwise_tolerance);
        for (uint32_t h = 0; h < heads; ++h) {
          for (uint32_t i = rotary; i < stride; ++i)
            CHECK(x[h * stride + i] == before[h * stride + i]);
        }
      }
    }
  }
}

TEST_CASE(
    "silu is right to a few units in the last place over the whole range of its exponential") {
  constexpr std::size_t n = 40001;
  for (const Kernels* k : test::all_kernels()) {
    CAPTURE(std::string(k->name));
    Guarded<float> gate(n), up(n);
    std::vector<double> expected(n);
    for (std::size_t i = 0; i < n; ++i) {
      gate[i] = (static_cast<float>(i) - 20000) * 0.00425f;  // -85 .. 85
      up[i] = 1 + static_cast<float>(i % 7) * 0.25f;
    }
    reference::activate(Activation::silu, gate.data(), up.data(), n, expected.data());
    k->activate(Activation::silu, gate.data(), up.data(), n);
    CHECK(gate.guards_intact());
    double worst = 0;
    for (std::size_t i = 0; i < n; ++i) {
      if (expected[i] == 0) continue;
      const double error = std::fabs(double{gate[i]} / expected[i] - 1);
      worst = error <= worst ? worst : error;
    }
    CHECK(worst < test::activation_tolerance);
  }
}

TEST_CASE("silu of huge gates saturates and does not turn into not-a-number") {
  for (const Kernels* k : test::all_kernels()) {
    CAPTURE(std::string(k->name));
    const float values[] = {-3e38f, -1e30f, -1000, -104,  -89, -88,   88,    89,
                            104,    1000,   1e30f, 3e38f, 0,   -0.0f, 1e-40f};
    Guarded<float> gate(std::size(values)), up(std::size(values));
    for (std::size_t i = 0; i < std::size(values); ++i) gate[i] = values[i], up[i] = 1;
    k->activate(Activation::silu, gate.data(), up.data(), std::size(values));
    for (std::size_t i = 0; i < std::size(values); ++i) {
      CAPTURE(values[i]);
      if (values[i] > 80) CHECK(gate[i] == values[i]);
      else if (values[i] < -80) CHECK(std::fabs(gate[i]) <= std::fabs(values[i]) * 1e-37f);
      else CHECK(std::fabs(gate[i]) <= 1e-40f);
    }
    gate[0] = NAN;
    k->activate(Activation::silu, gate.data(), up.data(), 1);
    CHECK(std::isnan(gate[0]));
  }
}

TEST_CASE("layer_norm and rms_norm without weights agree with the reference") {
  Random random(15);
  for (uint32_t cols : {2u, 15u, 16u, 17u, 384u, 1000u}) {
    for (const Kernels* k : test::all_kernels()) {
      CAPTURE(std::string(k->name));
      CAPTURE(cols);
      constexpr uint32_t n = 3;
      Guarded<float> x(n * cols), weight(cols), bias(cols), y(n * cols), ones(cols);
      fill(x, random, 10), fill(weight, random), fill(bias, random);
      for (uint32_t c = 0; c < cols; ++c) ones[c] = 1;
      std::vector<double> expected(n * cols);
      for (const float* b : {static_cast<const float*>(bias.data()), (const float*)nullptr}) {
        reference::layer_norm(x.data(), weight.data(), b, 1e-5f, n, cols, expected.data());
        k->layer_norm(x.data(), weight.data(), b, 1e-5f, n, cols, y.data());
        CHECK(y.guards_intact());
        // few numbers lie near their mean: the difference has fewer digits
        CHECK(test::relative_error(y.data(), expected.data(), n * cols) <
              2 * test::elementwise_tolerance);
      }
      reference::rms_norm(x.data(), ones.data(), 1e-5f, n, cols, expected.data());
      k->rms_norm(x.data(), nullptr, 1e-5f, n, cols, y.data());
      CHECK(test::relative_error(y.data(), expected.data(), n * cols) <
            test::elementwise_tolerance);
    }
  }
}

TEST_CASE("every activation agrees with the reference, with up and without") {
  Random random(16);
  constexpr std::size_t n = 1003;
  for (const Kernels* k : test::all_kernels()) {
    for (const Activation f :
         {Activation::silu, Activation::gelu, Activation::relu_squared, Activation::clamped_silu}) {
      CAPTURE(std::string(k->name));
      CAPTURE(static_cast<int>(f));
      Guarded<float> x(n), up(n), y(n);
      fill(x, random, 6), fill(up, random, 6);
      std::vector<double> expected(n);
      for (const bool gated : {true, false}) {
        if (!gated && f == Activation::clamped_silu) continue;
        const float* with = gated ? up.data() : nullptr;
        reference::activate(f, x.data(), with, n, expected.data());
        std::memcpy(y.data(), x.data(), n * sizeof(float));
        k->activate(f, y.data(), with, n);
        CHECK(y.guards_intact());
        CHECK(test::relative_error(y.data(), expected.data(), n) < test::elementwise_tolerance);
      }
      y[0] = NAN, up[0] = 1;
      k->activate(f, y.data(), up.data(), 1);
      CHECK((std::isnan(y[0]) || f == Activation::clamped_silu));
    }
  }
}

TEST_CASE("softcap bounds its input and keeps small numbers") {
  for (const Kernels* k : test::all_kernels()) {
    CAPTURE(std::string(k->name));
    float x[] = {0, 1e-3f, -1, 29, 60, -1e30f};
    k->softcap(x, 30, std::size(x));
    CHECK(x[0] == 0);
    CHECK(std::fabs(x[1] - 1e-3f) < 4e-6f);
    CHECK(std::fabs(x[2] - 30 * std::tanh(-1.0f / 30)) < 4e-6f);
    CHECK(std::fabs(x[3] - 30 * std::tanh(29.0f / 30)) < 1e-5f);
    CHECK(std::fabs(x[4] - 30 * std::tanh(2.0f)) < 1e-5f);
    CHECK(x[5] == -30);
  }
}

TEST_CASE("add adds every element once") {
  Random random(13);
  for (std::size_t n : {std::size_t{1}, std::size_t{31}, std::size_t{1027}}) {
    for (const Kernels* k : test::all_kernels()) {
      Guarded<float> x(n), y(n);
      fill(x, random);
      fill(y, random);
      const std::vector<float> before(x.data(), x.data() + n);
      k->add(x.data(), y.data(), n);
      CHECK(x.guards_intact());
      for (std::size_t i = 0; i < n; ++i) REQUIRE(x[i] == before[i] + y[i]);
    }
  }
}

TEST_CASE("elementwise operations give the same bits on every instruction set") {
  Random random(14);
  constexpr uint32_t n = 777;
  Guarded<float> x(n), y(n), weight(n);
  fill(x, random, 3);
  fill(y, random);
  fill(weight, random);
  std::vector<float> first;
  for (const Kernels* k : test::all_kernels()) {
    Guarded<float> a(n);
    k->rms_norm(x.data(), weight.data(), 1e-5f, 1, n, a.data());
    k->activate(Activation::silu, a.data(), y.data(), n);
    k->rope(a.data(), 1, n, 700, weight.data(), y.data(), true);
    if (first.empty()) first.assign(a.data(), a.data() + n);
    CHECK(std::memcmp(first.data(), a.data(), n * sizeof(float)) == 0);
  }
}
