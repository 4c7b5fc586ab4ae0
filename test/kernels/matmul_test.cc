// Matrix products, their inputs' quantisation and dequantised rows, of every instruction set
// against the reference.
#include <doctest/doctest.h>

#include <memory>
#include <string>

#include "matmul_inputs.h"
#include "multiply.h"

using namespace kvasir;
using test::Guarded;
using test::Inputs;
using test::Random;
using test::Type;
using test::types;
using test::Weights;

namespace {

// Constant weights and inputs of one magnitude make offset and product cancel to a few per cent:
// errors of sums show tenfold.
constexpr double cancelling_tolerance = 5e-5;

void check_product(const Kernels& k, const Type& t, uint32_t n, uint32_t rows, uint32_t cols,
                   Random& random) {
  CAPTURE(std::string(k.name));
  CAPTURE(std::string(t.name));
  CAPTURE(n);
  CAPTURE(rows);
  CAPTURE(cols);
  Weights w(t, rows, cols, random, random.below(2) * 3);
  Inputs x(k, n, cols, random);
  constexpr std::size_t gap = 3;
  const auto y = test::multiply(k, w.view, x.view, k.matmul_rows * (1 + random.below(3)), gap);
  CHECK(test::product_error(w.view, x.view, y->data(), rows + gap) < test::product_tolerance);
}

}  // namespace

TEST_CASE("products of every format agree with the reference on odd shapes") {
  Random random(1);
  for (const Kernels* k : test::all_kernels()) {
    for (const Type& t : types) {
      const uint32_t step = t.block == 1 ? 1 : t.block;
      for (uint32_t n : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 10u, 11u, 12u, 13u, 14u, 23u}) {
        check_product(*k, t, n, 1 + random.below(80),
                      step * (1 + random.below(t.block == 256 ? 3 : 20)), random);
      }
      check_product(*k, t, 1, 33, 2048 + step, random);
      check_product(*k, t, 17, 33, 2048 + step, random);
    }
  }
}

TEST_CASE("the way a product is cut into tasks does not change a bit") {
  Random random(2);
  for (const Kernels* k : test::all_kernels()) {
    for (const Type& t : types) {
      CAPTURE(std::string(k->name));
      CAPTURE(std::string(t.name));
      for (uint32_t n : {1u, 3u, 19u}) {
        Weights w(t, 5 * k->matmul_rows + 7, 512, random);
        Inputs x(*k, n, 512, random);
        const auto whole = test::multiply(*k, w.view, x.view, w.view.rows);
        const auto cut = test::multiply(*k, w.view, x.view, k->matmul_rows);
        CHECK(std::memcmp(whole->data(), cut->data(), whole->size() * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("a named method computes an input the same, however many others there are") {
  Random random(5);
  constexpr uint32_t n = 21, rows = 70, cols = 512 + 256;
  for (const Kernels* k : test::all_kernels()) {
    for (const Type& t : types) {
      CAPTURE(std::string(k->name));
      CAPTURE(std::string(t.name));
      Weights w(t, rows, cols, random);
      Inputs x(*k, n, cols, random);
      const auto all = [&](ProductMethod method) {
        x.view.method = method;
        return test::multiply(*k, w.view, x.view, rows);
      };
      const auto few = all(ProductMethod::few), many = all(ProductMethod::many),
                 by_count = all(ProductMethod::by_count);
      CHECK(std::memcmp(by_count->data(), many->data(), n * rows * sizeof(float)) == 0);
      for (const auto& [method, expected] :
           {std::pair{ProductMethod::few, &few}, std::pair{ProductMethod::many, &many}}) {
        x.view.method = method;
        for (const auto& [first, count] :
             {std::pair{4u, 1u}, std::pair{7u, 3u}, std::pair{2u, 17u}}) {
          const auto some =
              test::multiply(*k, w.view, rows_of(x.view, first, count), k->matmul_rows);
          CHECK(std::memcmp(some->data(), (*expected)->data() + first * rows,
                            count * rows * sizeof(float)) == 0);
        }
      }
      x.view.method = ProductMethod::by_count;
      const auto eight = test::multiply(*k, w.view, rows_of(x.view, 0, 8), rows);
      CHECK(std::memcmp(eight->data(), few->data(), 8 * rows * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("inputs in the order of lanes give the bits of each input alone") {
  Random random(8);
  for (const Kernels* k : test::all_kernels()) {
    for (const Type& t : types) {
      CAPTURE(std::string(k->name));
      CAPTURE(std::string(t.name));
      for (const uint32_t n : {3u, 4u, 7u, max_lane_inputs}) {
        const uint32_t rows = 1 + random.below(70), cols = t.block == 256 ? 768 : 704;
        if (t.block == 1 || k->lane_bytes(n, cols) == 0) continue;
        Weights w(t, rows, cols, random, random.below(2) * 3);
        Inputs x(*k, n, cols, random);
        x.view.method = ProductMethod::few;
        Guarded<std::byte> lanes(k->lane_bytes(n, cols));
        k->to_lanes(x.view, 0, 1, lanes.data());
        k->to_lanes(x.view, 1, n - 1, lanes.data());
        CHECK(lanes.guards_intact());
        Activations all = x.view;
        all.lanes = lanes.data();
        const auto y = test::multiply(*k, w.view, all, k->matmul_rows);
        for (uint32_t i = 0; i < n; ++i) {
          const auto alone = test::multiply(*k, w.view, rows_of(all, i, 1), k->matmul_rows);
          CHECK(std::memcmp(y->data() + i * rows, alone->data(), rows * sizeof(float)) == 0);
        }
      }
    }
  }
}

TEST_CASE("tables with fused products give the same bits for many inputs") {
  Random random(6);
  for (const Type& t : types) {
    CAPTURE(std::string(t.name));
    for (uint32_t n : {9u, 31u}) {
      Weights w(t, 70, t.block == 1 ? 77 : 768, random, random.below(2) * 3);
      Inputs x(*cpu_kernels_by_name("scalar"), n, w.view.cols, random);
      std::unique_ptr<Guarded<float>> first;
      for (const Kernels* k : test::all_kernels()) {
        if (k->name == std::string("scalar")) continue;  // rounds products before it adds them
        CAPTURE(std::string(k->name));
        auto y = test::multiply(*k, w.view, x.view, k->matmul_rows);
        if (first) CHECK(std::memcmp(first->data(), y->data(), y->size() * sizeof(float)) == 0);
        else first = std::move(y);
      }
    }
  }
}

TEST_CASE("AVX-VNNI gives the bits of AVX2 for few inputs") {
  const Kernels* avx2 = cpu_kernels_by_name("avx2");
  Random random(7);
  for (const Kernels* k : test::all_kernels()) {
    if (std::string(k->name).rfind("avxvnni", 0) != 0) continue;
    for (const Type& t : types) {
      CAPTURE(std::string(t.name));
      for (uint32_t n : {1u, 3u, 8u}) {
        Weights w(t, 40, t.block == 1 ? 77 : 768, random);
        Inputs x(*k, n, w.view.cols, random);
        const auto y = test::multiply(*k, w.view, x.view, k->matmul_rows),
                   expected = test::multiply(*avx2, w.view, x.view, avx2->matmul_rows);
        CHECK(std::memcmp(expected->data(), y->data(), y->size() * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("extreme quants do not overflow the integer sums") {
  Random random(3);
  for (const Kernels* k : test::all_kernels()) {
    for (const Type& t : types) {
      if (t.block == 1) continue;
      CAPTURE(std::string(k->name));
      CAPTURE(std::string(t.name));
      for (int pattern : {0x00, 0x7f, 0x80, 0xff}) {
        for (uint32_t n : {1u, 16u}) {
          Weights w(t, 35, 512, random);
          std::fill(w.bytes.begin(), w.bytes.end(), static_cast<uint8_t>(pattern));
          for (std::size_t b = 0; b < w.bytes.size(); b += t.bytes)
            Weights::put_numbers(t, w.bytes.data() + b, random);
          Inputs x(*k, n, 512, random);
          for (std::size_t i = 0; i < x.x.size(); ++i) x.x[i] = random.below(8) ? 1.0f : -1.0f;
          k->quantize(x.x.data(), n, 512, x.q.data(), x.scale.data(), x.sums.data());
          const auto y = test::multiply(*k, w.view, x.view, k->matmul_rows);
          std::vector<double> expected(y->size());
          reference::matmul(w.view, x.view, expected.data(), 35);
          CHECK(test::relative_error(y->data(), expected.data(), expected.size()) <
                cancelling_tolerance);
          if (k->lane_bytes(n, 512) == 0) continue;
          Guarded<std::byte> lanes(k->lane_bytes(n, 512));
          k->to_lanes(x.view, 0, n, lanes.data());
          x.view.method = ProductMethod::few, x.view.lanes = lanes.data();
          const auto few = test::multiply(*k, w.view, x.view, k->matmul_rows);
          CHECK(test::relative_error(few->data(), expected.data(), expected.size()) <
                cancelling_tolerance);
        }
      }
    }
  }
}

TEST_CASE("dequantised rows are the exact value, rounded once") {
  Random random(4);
  for (const Kernels* k : test::all_kernels()) {
    for (const Type& t : types) {
      CAPTURE(std::string(k->name));
      CAPTURE(std::string(t.name));
      const uint32_t cols = t.block * (t.block == 256 ? 3 : t.block == 32 ? 13 : 77);
      Weights w(t, 3, cols, random, 1);
      std::vector<double> expected(cols);
      for (uint32_t r = 0; r < 3; ++r) {
        Guarded<float> out(cols);
        k->dequantize_row(w.view, r, out.data());
        CHECK(out.guards_intact());
        reference::dequantize_row(w.view, r, expected.data());
        uint32_t different = 0;
        for (uint32_t c = 0; c < cols; ++c) different += out[c] != static_cast<float>(expected[c]);
        CHECK(different == 0);
      }
    }
  }
}

// Sums of weights of fixed bytes, each times 1 + its index modulo 31: gguf-py 0.19.0, dequantize().
TEST_CASE("the reference decodes blocks to the numbers of an independent decoder") {
  constexpr struct {
    const char* name;
    double sum;
  } decoded[] = {{"Q8_0", 1264.091309},    {"Q4_0", -220.9460449},   {"Q4_1", 7001.290283},
                 {"Q5_0", 168.5588379},    {"Q5_1", 13420.62268},    {"Q2_K", 2503.788574},
                 {"Q3_K", 678.0344238},    {"Q4_K", 162267.5742},    {"Q5_K", 343804.1429},
                 {"Q6_K", -38441.8125},    {"IQ4_NL", -1962.220825}, {"IQ4_XS", 12913.64648},
                 {"MXFP4", -79.25},        {"NVFP4", -52170.9375},   {"IQ3_S", -8788.453857},
                 {"IQ3_XXS", 2489.84198},  {"IQ2_S", 2504.688354},   {"IQ2_XS", -2589.805069},
                 {"IQ2_XXS", 1372.514832}, {"IQ1_S", -1.899536133},  {"IQ1_M", -359.7871399},
                 {"TQ1_0", 2.69934082},    {"TQ2_0", 447.6906738}};
  constexpr uint32_t cols = 512;
  uint32_t checked = 0;
  for (const Type& t : types) {
    for (const auto& [name, sum] : decoded) {
      if (std::string(name) != t.name) continue;
      CAPTURE(std::string(name));
      std::vector<uint8_t> bytes(cols / t.block * t.bytes);
      for (std::size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<uint8_t>(i * i * 31 + i * 7 + i / 8 * 5 + 13);
      for (std::size_t b = 0; b < bytes.size(); b += t.bytes) {
        for (uint32_t at : t.halves) bytes[b + at] = 0x66, bytes[b + at + 1] = 0x2e;  // 0.1
        if (t.type == TensorType::mxfp4) bytes[b] = 125;
        for (std::size_t i = 0; t.type == TensorType::iq1_m && i < 4; ++i) {
          uint8_t& top = bytes[b + 49 + 2 * i];
          top = static_cast<uint8_t>((top & 15) | (0x2e66 >> 4 * i & 15) << 4);
        }
      }
      std::vector<double> weights(cols);
      reference::dequantize_row(
          {reinterpret_cast<const std::byte*>(bytes.data()), t.type, 1, cols, bytes.size()}, 0,
          weights.data());
      double total = 0, magnitude = 0;
      for (uint32_t i = 0; i < cols; ++i) {
        total += weights[i] * (1 + i % 31);
        magnitude += std::fabs(weights[i] * (1 + i % 31));
      }
      CHECK(std::fabs(total - sum) < 1e-6 * magnitude);
      ++checked;
    }
  }
  CHECK(checked == std::size(decoded));
}

TEST_CASE("quantised inputs are the nearest steps of the block's largest magnitude") {
  Random random(5);
  constexpr uint32_t n = 3, cols = 416;
  for (const Kernels* k : test::all_kernels()) {
    CAPTURE(std::string(k->name));
    Guarded<float> x(n * cols), scale(n * cols / 32);
    Guarded<int8_t> q(n * cols);
    Guarded<int16_t> sums(n * cols / 16);
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = random.normal() * std::ldexp(1.0f, static_cast<int>(i / 32) - 20);
    for (std::size_t i = 0; i < 32; ++i) x[64 + i] = 0;
    for (std::size_t i = 0; i < 32; ++i) x[96 + i] = i % 2 ? 1e-40f : -1e-40f;
    k->quantize(x.data(), n, cols, q.data(), scale.data(), sums.data());
    CHECK(q.guards_intact());
    CHECK(scale.guards_intact());
    CHECK(sums.guards_intact());
    CHECK(test::quantize_differences(x.data(), x.size(), q.data(), scale.data(), sums.data()) == 0);
  }
}

TEST_CASE("inputs that are not numbers stay within the quants' range") {
  for (const Kernels* k : test::all_kernels()) {
    CAPTURE(std::string(k->name));
    float x[32], scale;
    int8_t q[32];
    int16_t sums[2];
    for (int i = 0; i < 32; ++i) x[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -1.0f;
    k->quantize(x, 1, 32, q, &scale, sums);
    for (int8_t v : q) CHECK(v >= -127);
  }
}
