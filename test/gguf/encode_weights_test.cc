// The encoders of the model writer, against the reference decoder.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "encode_weights.h"
#include "kernels/reference/reference.h"

namespace kvasir {
namespace {

// Relative error of random weights after encoding and decoding. What the formats can do for normal
// numbers; a wrong layout gives about 1.4.
TEST_CASE("encoded weights decode to themselves within the format's precision") {
  const struct {
    TensorType type;
    double most;
  } cases[] = {{TensorType::f32, 0},       {TensorType::f16, 3e-4},    {TensorType::bf16, 2e-3},
               {TensorType::q8_0, 6e-3},   {TensorType::q4_0, 9.5e-2}, {TensorType::q4_k, 9e-2},
               {TensorType::q6_k, 2.1e-2}, {TensorType::iq4_xs, 9e-2}, {TensorType::mxfp4, 1.2e-1},
               {TensorType::nvfp4, 1.3e-1}};
  constexpr uint32_t kCols = 4096;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> x(kCols);
  for (float& value : x) value = normal(random);
  std::fill_n(x.begin() + 512, 256, 0.0f);  // a block of zeros has no scale
  for (const auto& c : cases) {
    const TensorTypeInfo* info = tensor_type_info(c.type);
    CAPTURE(info->name);
    std::vector<std::byte> encoded(kCols / info->block_elements * info->block_bytes);
    encode_weights(c.type, x.data(), kCols, encoded.data());
    std::vector<double> decoded(kCols);
    reference::dequantize_row({encoded.data(), c.type, 1, kCols, encoded.size()}, 0,
                              decoded.data());
    double error = 0, norm = 0;
    for (uint32_t i = 0; i < kCols; ++i) {
      error += (decoded[i] - x[i]) * (decoded[i] - x[i]);
      norm += double{x[i]} * x[i];
    }
    CHECK(std::sqrt(error / norm) <= c.most);
    CHECK(
        std::all_of(decoded.begin() + 512, decoded.begin() + 768, [](double v) { return v == 0; }));
  }
}

TEST_CASE("random codes have the scale of the weights that they stand for") {
  constexpr uint32_t kCols = 16384;
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> x(kCols);
  for (float& value : x) value = normal(random);
  for (const TensorType type : {TensorType::iq3_s, TensorType::iq3_xxs, TensorType::iq2_s,
                                TensorType::iq2_xs, TensorType::iq2_xxs, TensorType::iq1_s,
                                TensorType::iq1_m, TensorType::tq1_0, TensorType::tq2_0}) {
    const TensorTypeInfo* info = tensor_type_info(type);
    CAPTURE(info->name);
    REQUIRE(can_encode(type));
    std::vector<std::byte> encoded(kCols / info->block_elements * info->block_bytes);
    encode_weights(type, x.data(), kCols, encoded.data());
    std::vector<double> decoded(kCols);
    reference::dequantize_row({encoded.data(), type, 1, kCols, encoded.size()}, 0, decoded.data());
    double squares = 0, sum = 0;
    for (const double v : decoded) squares += v * v, sum += v;
    CHECK(std::abs(std::sqrt(squares / kCols) - 0.02) < 0.002);
    CHECK(std::abs(sum / kCols) < 0.002);
  }
}

}  // namespace
}  // namespace kvasir
