// The methods that the engine's products take.
#include "engine/cpu_products.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "pool.h"

using namespace kvasir;

namespace {

constexpr uint32_t rows = 300, cols = 288, block_bytes = 34;  // Q8_0: a half, then 32 bytes

Array<float> numbers(std::size_t n) {
  Array<float> out(n);
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<float>(i * 7919 % 1000) * 0.002f - 1;
  return out;
}

// By one call of the kernel, without the engine.
Array<float> multiplied(const WeightView& w, const Array<float>& x, uint32_t n,
                        ProductMethod method) {
  const Kernels& k = cpu_kernels();
  Array<int8_t> q(x.size());
  Array<float> scale(x.size() / 32), y(std::size_t{n} * rows);
  Array<int16_t> sums(x.size() / 16);
  k.quantize(x.data(), n, cols, q.data(), scale.data(), sums.data());
  Activations in{n, cols, x.data(), q.data(), scale.data(), sums.data(), method};
  Array<std::byte> tiles(k.tile_bytes(n, cols)), scratch(k.matmul_scratch(w.type, method));
  for (uint32_t i = 0; i < n && !tiles.empty(); i += 16)
    k.to_tiles(in, i, std::min(n - i, 16u), tiles.data());
  if (method == ProductMethod::tiles) in.tiles = tiles.data();
  k.matmul(w, in, y.data(), rows, 0, rows, scratch.data());
  return y;
}

}  // namespace

TEST_CASE("nine inputs or more are multiplied by tiles where the CPU has them, in any tasks") {
  Array<std::byte> bytes(std::size_t{rows} * cols / 32 * block_bytes);
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(i % block_bytes < 2 ? 0x2c : i * 37 % 251);
  Linear linear;
  linear.w = {bytes.data(), TensorType::q8_0, rows, cols, cols / 32 * block_bytes};
  const ProductMethod many =
      cpu_kernels().tile_bytes(16, cols) > 0 ? ProductMethod::tiles : ProductMethod::many;
  constexpr uint32_t most = 1100;
  const CancelLatch never(nullptr);
  for (const uint32_t threads : {1u, 3u}) {
    CpuProducts products(&test::pool(threads));
    products.consider(linear.w);
    products.allocate();
    products.resize(most, cols);
    for (const uint32_t n : {1u, 8u, 9u, 17u, 512u, 600u, most}) {
      CAPTURE(threads);
      CAPTURE(n);
      const Array<float> x = numbers(std::size_t{n} * cols);
      Array<float> y(std::size_t{n} * rows);
      for (const bool open : {false, true}) {
        products.begin(never, open ? ProductMethod::few : ProductMethod::by_count);
        products.multiply(x.data(), n, cols, {{&linear, y.data()}});
        const auto expected = multiplied(linear.w, x, n, open || n < 9 ? ProductMethod::few : many);
        CHECK(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) == 0);
        if (n > max_lane_inputs) break;  // open steps have few
      }
    }
  }
}
