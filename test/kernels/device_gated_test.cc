// The input of a network's last matrix in one operation, against products and their activation in
// two. Without a GPU the cases pass and say so.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
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
        bias(normals(rows, random).data(), rows) {
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
  bool gated = true, in_halves = true, with_bias = false, keeps = true;
};

// A network on the device, and what it is computed in. Weights in half precision may stay.
struct Network {
  Network(const Type& t, const GatedCase& of, Random& random)
      : c(of), type(t), gate(t, c.rows, c.cols, random), up(t, c.rows, c.cols, random),
        numbers(normals(c.n * c.cols, random).data(), c.n * c.cols),
        halves(ops().halves_bytes(gpu()->context, c.n, std::max(c.cols, c.rows)) + 1),
        kept_bytes(c.in_halves && c.keeps
                       ? ops().kept_bytes(gpu()->context, gate.view(t.type, c.rows, c.cols))
                       : 0),
        kept(2 * kept_bytes + 1) {
    states[0] = {kept.data(), kept_bytes}, states[1] = {kept.data() + kept_bytes, kept_bytes};
  }
  std::vector<DeviceProduct> products(float* y, float* y2) {
    DeviceProduct g{gate.view(type.type, c.rows, c.cols), c.with_bias ? gate.bias.data() : nullptr,
                    y, kept_bytes ? &states[0] : nullptr},
        u{up.view(type.type, c.rows, c.cols), nullptr, y2, kept_bytes ? &states[1] : nullptr};
    return c.gated ? std::vector<DeviceProduct>{g, u} : std::vector<DeviceProduct>{g};
  }
  // The inputs, rounded where outputs come.
  DeviceActivations rounded_inputs(GatedRows& to) {
    Found found;
    DeviceActivations x = to.view(c.n, c.cols);
    x.f32 = numbers.data();
    if (c.in_halves && halves.size() > 1) x.halves = halves.data();
    OK(ops().quantize(stream(), x, found.check(1)));
    x.f32 = nullptr;
    return x;
  }
  const GatedCase c;
  const Type& type;
  GatedMatrix gate, up;
  Memory<float> numbers;
  Memory<std::byte> halves;
  const std::size_t kept_bytes;
  Memory<std::byte> kept;
  DeviceHalves states[2];
};

// The same network by both ways, twice by each: the first makes weights in half precision that
// stay, the second reads them. writes_y: whether the products' floats are written.
void check_gated(const Type& t, const GatedCase& c, bool writes_y, Random& random) {
  CAPTURE(std::string(t.name));
  CAPTURE(static_cast<int>(c.f));
  CAPTURE(c.n);
  CAPTURE(c.rows);
  CAPTURE(c.cols);
  CAPTURE(c.room);
  Network network(t, c, random);
  std::unique_ptr<GatedRows> expected;
  for (const bool at_once : {false, true, true, false, false}) {
    auto made = std::make_unique<GatedRows>(c.n, c.cols, c.rows);
    const std::size_t room = std::size_t{at_once ? c.room : c.n} * c.rows;
    Memory<float> y(room), y2(room);
    Found found;
    const DeviceActivations x = network.rounded_inputs(*made), out = made->view(c.n, c.rows);
    const DeviceCheck check{gated_limit, 1, found.first.data()};
    if (at_once) {
      OK(ops().multiply_gated(stream(), network.products(y.data(), y2.data()), c.room, x, c.f,
                              check, out));
      CHECK(std::isnan(y.get()[0]) != writes_y);
    } else {
      OK(ops().matmul(stream(), network.products(y.data(), y2.data()), x, false));
      OK(ops().activate(stream(), c.f, y.data(), c.gated ? y2.data() : nullptr, check, out));
    }
    if (expected) CHECK(made->has(*expected, std::size_t{c.n} * c.rows));
    else expected = std::move(made);
  }
}

// Whether one kernel multiplies and activates.
bool has_one_kernel(uint32_t n, uint32_t cols) {
#ifdef KVASIR_EMULATED_DEVICE
  return n > n + cols;
#else
  return ops().halves_bytes(gpu()->context, n, cols) > 0;
#endif
}

}  // namespace

TEST_CASE("a device's gated products have the bits of products and their activation") {
  if (!stream()) return;
  Random random(31);
  // many rows and inputs, not multiples of a tile
  constexpr uint32_t n = 520, rows = 3040;
  const bool writes_y = !has_one_kernel(n, rows);
  for (const Type& t : types) {
    if (t.block == 1) continue;
    const uint32_t cols = t.block == 32 ? 96 : t.block;
    check_gated(t, {Activation::silu, n, rows, cols, n}, writes_y, random);
  }
  const Type &q8 = type_of("Q8_0"), &q4 = type_of("Q4_K");
  check_gated(q8, {Activation::gelu, n, rows, 1056, n}, writes_y, random);
  check_gated(q4, {Activation::gelu, 1030, 1984, 768, n}, writes_y, random);
  GatedCase parts{Activation::silu, n, 2112, 16384, n};  // more rows than are halves at a time
  parts.keeps = false;
  check_gated(q8, parts, writes_y, random);
  check_gated(q4, {Activation::silu, n, rows, 768, n, true, true, true}, true, random);
  check_gated(q8, {Activation::clamped_silu, n, rows, 96, n}, true, random);
  check_gated(q8, {Activation::relu_squared, n, rows, 96, n, false}, true, random);
}

TEST_CASE("a device's gated products of parts take the place of their inputs") {
  if (!stream()) return;
  Random random(32);
  const Type& q8 = type_of("Q8_0");
  for (const bool gated : {true, false}) {
    check_gated(q8, {Activation::silu, 150, 192, 96, 150, gated, false}, true, random);
    check_gated(q8, {Activation::silu, 300, 192, 96, 128, gated, false}, true, random);
    check_gated(q8, {Activation::silu, 300, 96, 192, 128, gated, false}, true, random);
  }
}

TEST_CASE("a device's gated products of parts may be the floats that they are made of") {
  if (!stream()) return;
  Random random(34);
  constexpr uint32_t n = 300, room = 128, rows = 192, cols = 96;
  const Type& t = type_of("Q8_0");
  GatedMatrix gate(t, rows, cols, random), up(t, rows, cols, random);
  DeviceInputs x(n, cols, random);
  Found found;
  OK(ops().quantize(stream(), x.view, found.check(1)));
  const auto products = [&](float* y, float* y2) {
    return std::vector<DeviceProduct>{{gate.view(t.type, rows, cols), nullptr, y},
                                      {up.view(t.type, rows, cols), nullptr, y2}};
  };
  Memory<float> made(n * rows), part(room * rows), expected(n * rows), other(n * rows);
  OK(ops().multiply_gated(stream(), products(made.data(), part.data()), room, x.view,
                          Activation::silu, found.check(1), {n, rows, made.data()}));
  OK(ops().matmul(stream(), products(expected.data(), other.data()), x.view, false));
  OK(ops().activate(stream(), Activation::silu, expected.data(), other.data(), found.check(1),
                    {n, rows, expected.data()}));
  CHECK(std::memcmp(made.get().data(), expected.get().data(), n * rows * sizeof(float)) == 0);
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
    CHECK(found.get() == (most == gated_limit ? no_mark : 1));
  }
}
