// The input of a network's last matrix in one operation, against products and their activation in
// two. Without a GPU the cases pass and say so.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "device_values.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr float gated_limit = 1e30f;

// A matrix on the device, and its bias.
struct GatedMatrix {
  GatedMatrix(const Type& t, uint32_t rows, uint32_t cols, Random& random)
      : w(t, rows, cols, random), memory(ops().matrix_bytes(t.type, rows, cols)),
        bias(normals(rows, random).data(), rows),
        kept(ops().kept_bytes(gpu()->context, view(t.type, rows, cols)) + 1) {
    Memory<std::byte> file(w.view.data, w.bytes.size());
    OK(ops().lay_out(stream(), view(t.type, rows, cols), file.data(), 0, rows));
    OK(ops().wait(stream()));
  }
  DeviceMatrix view(TensorType type, uint32_t rows, uint32_t cols) {
    return {type, rows, cols, memory.data(), 0.7f};
  }
  Weights w;
  Memory<std::byte> memory;
  Memory<float> bias;
  Memory<std::byte> kept;
};

// The inputs of a network, rounded, in memory that its rounded outputs have room in.
struct GatedRows {
  GatedRows(uint32_t n, uint32_t cols, uint32_t rows)
      : q(n * std::max(cols, rows)), scale(q.size() / 32), sums(q.size() / 16) {}
  DeviceActivations view(uint32_t n, uint32_t cols) {
    return {n, cols, nullptr, q.data(), scale.data(), sums.data()};
  }
  // Of the first `size` numbers.
  bool has(GatedRows& other, std::size_t size) {
    const auto same = [](const auto& a, const auto& b, std::size_t count) {
      return std::memcmp(a.data(), b.data(), count * sizeof *a.data()) == 0;
    };
    return same(q.get(), other.q.get(), size) && same(scale.get(), other.scale.get(), size / 32) &&
           same(sums.get(), other.sums.get(), size / 16);
  }
  Memory<int8_t> q;
  Memory<float> scale;
  Memory<int16_t> sums;
};

struct GatedCase {
  Activation f;
  uint32_t n, rows, cols, room;
  bool gated = true, in_halves = true, with_bias = false;
};

// The same network by both ways, three times: weights in half precision that stay are made by the
// first, and made again for what reads them otherwise.
void check_gated(const Type& t, const GatedCase& c, Random& random) {
  CAPTURE(std::string(t.name));
  CAPTURE(static_cast<int>(c.f));
  CAPTURE(c.n);
  CAPTURE(c.rows);
  CAPTURE(c.cols);
  CAPTURE(c.room);
  GatedMatrix gate(t, c.rows, c.cols, random), up(t, c.rows, c.cols, random);
  Memory<float> numbers(normals(c.n * c.cols, random).data(), c.n * c.cols);
  Memory<float> y(c.n * c.rows), y2(c.n * c.rows);
  Memory<float> part(c.room * c.rows), part2(c.room * c.rows);
  const std::size_t bytes = ops().halves_bytes(gpu()->context, c.n, std::max(c.cols, c.rows));
  Memory<std::byte> halves(bytes + 1);
  DeviceHalves kept[2] = {};
  const bool keeps = c.in_halves && ops().kept_bytes(gpu()->context, gate.view(t.type, 1, 32)) > 0;
  for (int i = 0; keeps && i < 2; ++i)
    kept[i].bytes = ops().kept_bytes(gpu()->context, gate.view(t.type, c.rows, c.cols));
  Memory<std::byte> memory(kept[0].bytes + kept[1].bytes + 1);
  kept[0].memory = memory.data(), kept[1].memory = memory.data() + kept[0].bytes;
  const auto products = [&](Memory<float>& a, Memory<float>& b) {
    DeviceProduct g{gate.view(t.type, c.rows, c.cols), c.with_bias ? gate.bias.data() : nullptr,
                    a.data(), keeps ? &kept[0] : nullptr},
        u{up.view(t.type, c.rows, c.cols), nullptr, b.data(), keeps ? &kept[1] : nullptr};
    return c.gated ? std::vector<DeviceProduct>{g, u} : std::vector<DeviceProduct>{g};
  };
  for (int time = 0; time < 3; ++time) {
    GatedRows expected(c.n, c.cols, c.rows), made(c.n, c.cols, c.rows);
    for (const bool at_once : {true, false}) {
      GatedRows& to = at_once ? made : expected;
      Found found;
      DeviceActivations x = to.view(c.n, c.cols);
      x.f32 = numbers.data();
      if (c.in_halves && bytes > 0) x.halves = halves.data();
      OK(ops().quantize(stream(), x, found.check(1)));
      x.f32 = nullptr;
      const DeviceActivations out = to.view(c.n, c.rows);
      const DeviceCheck check{gated_limit, 1, found.check(1).first};
      if (at_once) {
        OK(ops().multiply_gated(stream(), products(part, part2), c.room, x, c.f, check, out));
      } else {
        OK(ops().matmul(stream(), products(y, y2), x, false));
        OK(ops().activate(stream(), c.f, y.data(), c.gated ? y2.data() : nullptr, check, out));
      }
    }
    CHECK(made.has(expected, std::size_t{c.n} * c.rows));
  }
}

}  // namespace

TEST_CASE("a device's gated products have the bits of products and their activation") {
  if (!stream()) return;
  Random random(31);
  // many rows and inputs, not multiples of a tile
  constexpr uint32_t n = 520, rows = 3040;
  for (const Type& t : types) {
    if (t.block == 1) continue;
    const uint32_t cols = t.block == 32 ? 96 : t.block;
    check_gated(t, {Activation::silu, n, rows, cols, n, true, true, random.below(2) != 0}, random);
  }
  const Type &q8 = type_of("Q8_0"), &q4 = type_of("Q4_K");
  check_gated(q8, {Activation::gelu, n, rows, 1056, n}, random);
  check_gated(q4, {Activation::gelu, 1030, 1984, 768, n, true, true, true}, random);
  check_gated(q8, {Activation::clamped_silu, n, rows, 96, n}, random);
  check_gated(q8, {Activation::relu_squared, n, rows, 96, n, false}, random);
}

TEST_CASE("a device's gated products of parts take the place of their inputs") {
  if (!stream()) return;
  Random random(32);
  const Type& q8 = type_of("Q8_0");
  for (const bool gated : {true, false}) {
    check_gated(q8, {Activation::silu, 150, 192, 96, 150, gated, false}, random);
    check_gated(q8, {Activation::silu, 300, 192, 96, 128, gated, false}, random);
    check_gated(q8, {Activation::silu, 300, 96, 192, 128, gated, false}, random);
  }
}

TEST_CASE("a device's gated products report a number that is too large") {
  if (!stream()) return;
  Random random(33);
  constexpr uint32_t n = 520, rows = 3040, cols = 96;
  const Type& t = type_of("Q8_0");
  GatedMatrix gate(t, rows, cols, random), up(t, rows, cols, random);
  Memory<float> y(n * rows), y2(n * rows);
  Memory<std::byte> halves(ops().halves_bytes(gpu()->context, n, rows) + 1);
  DeviceInputs x(n, cols, random);
  x.view.halves = halves.data();
  GatedRows made(n, cols, rows);
  for (const float most : {gated_limit, 1e-3f}) {
    Found found;
    OK(ops().quantize(stream(), x.view, found.check(1)));
    const std::vector<DeviceProduct> products = {{gate.view(t.type, rows, cols), nullptr, y.data()},
                                                 {up.view(t.type, rows, cols), nullptr, y2.data()}};
    OK(ops().multiply_gated(stream(), products, n, x.view, Activation::silu,
                            {most, 1, found.check(1).first}, made.view(n, rows)));
    CHECK(found.get() == (most == gated_limit ? UINT32_MAX : 1));
  }
}
