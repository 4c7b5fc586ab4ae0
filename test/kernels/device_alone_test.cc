// Operations of a GPU on up to max_alone tokens that are to have the bits of one token alone.
// Without a GPU the cases pass and say so.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device_values.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// A matrix on the device with a bias.
struct LaidOut {
  LaidOut(const Type& t, uint32_t rows, uint32_t cols, uint32_t count, Random& random)
      : w(t, rows, cols, random), memory(ops().matrix_bytes(t.type, rows, cols)),
        host_bias(normals(rows, random)), host_scales(normals(count, random)),
        bias(host_bias.data(), rows),
        scales(host_scales.data(), count), matrix{t.type, rows, cols, memory.data(), 0.7f} {
    Memory<std::byte> file(w.view.data, w.bytes.size());
    OK(ops().lay_out(stream(), matrix, file.data(), 0, rows));
    OK(ops().wait(stream()));
  }
  Weights w;
  Memory<std::byte> memory;
  std::vector<float> host_bias, host_scales;
  Memory<float> bias, scales;
  DeviceMatrix matrix;
};

std::unique_ptr<DeviceInputs> rounded_inputs(uint32_t n, uint32_t cols, bool quantised,
                                             Random& random) {
  auto x = std::make_unique<DeviceInputs>(n, cols, random);
  Found found;
  if (quantised) OK(ops().quantize(stream(), x->view, found.check(1)));
  return x;
}

bool same_bits(const float* a, const float* b, std::size_t n) {
  return std::memcmp(a, b, n * sizeof(float)) == 0;
}

// Products of two matrices with n inputs at once, and with each alone.
void check_alone(const Type& t, uint32_t rows, uint32_t cols, uint32_t n, Random& random) {
  CAPTURE(std::string(t.name));
  CAPTURE(rows);
  CAPTURE(cols);
  CAPTURE(n);
  const bool quantised = t.block != 1;
  LaidOut one(t, rows, cols, 1, random), other(t, rows + 5, cols, 1, random);
  const auto x = rounded_inputs(n, cols, quantised, random);
  for (const bool add : {false, true}) {
    std::vector<std::vector<float>> made;
    for (const bool alone : {false, true}) {
      const std::vector<float> before(std::size_t{n} * (2 * rows + 5), 0.25f);
      Memory<float> y(before.data(), before.size());
      float* const second = y.data() + std::size_t{n} * rows;
      DeviceActivations all = x->view;
      all.alone = true;
      if (alone) {
        const std::vector<DeviceProduct> products = {{one.matrix, one.bias.data(), y.data()},
                                                     {other.matrix, nullptr, second}};
        OK(ops().matmul(stream(), products, all, add));
      }
      for (uint32_t i = 0; !alone && i < n; ++i) {
        const std::vector<DeviceProduct> products = {
            {one.matrix, one.bias.data(), y.data() + std::size_t{i} * rows},
            {other.matrix, nullptr, second + std::size_t{i} * (rows + 5)}};
        OK(ops().matmul(stream(), products, input_of(all, i), add));
      }
      const Guarded<float>& out = y.get();
      made.emplace_back(out.data(), out.data() + before.size());
    }
    CHECK(same_bits(made[0].data(), made[1].data(), made[0].size()));
    CHECK(std::all_of(made[0].begin(), made[0].end(), [](float v) { return std::isfinite(v); }));
  }
}

}  // namespace

TEST_CASE("a device's products with up to eight inputs have the bits of those with each alone") {
  if (!stream()) return;
  Random random(21);
  for (const Type& t : types)
    for (uint32_t n = 2; n <= max_alone; ++n) {
      const uint32_t step = t.block == 1 ? 32 : t.block;
      check_alone(t, 1 + random.below(200), step * (1 + random.below(t.block == 256 ? 5 : 40)), n,
                  random);
      check_alone(t, 33, 2048 + step, n, random);
      if (t.block == 1) check_alone(t, 7, 45, n, random);  // no vector loads
    }
}

TEST_CASE("a device's products of experts in order have the bits of those of each token") {
  if (!stream()) return;
  Random random(22);
  constexpr uint32_t experts = 7, used = 3, rows = 37;
  for (const Type& t : types)
    for (uint32_t n = 2; n <= max_alone; ++n)
      for (const bool same_input : {false, true}) {
        CAPTURE(std::string(t.name));
        CAPTURE(n);
        CAPTURE(same_input);
        const bool quantised = t.block != 1;
        const uint32_t cols = t.block == 1 ? 64 : 2 * t.block, of_token = same_input ? 1 : used;
        LaidOut m(t, experts * rows, cols, experts, random);
        const auto x = rounded_inputs(n * of_token, cols, quantised, random);
        std::vector<DeviceChoice> choices;
        for (uint32_t i = 0; i < n; ++i)
          for (uint32_t c = 0, first = random.below(experts); c < used; ++c)
            choices.push_back({(first + c) % experts, random.uniform(0, 1)});
        Memory<DeviceChoice> chosen(choices.data(), choices.size());
        const std::size_t size = std::size_t{used} * rows;
        Memory<float> y(n * size), each(n * size);
        OK(ops().multiply_experts(
            stream(),
            std::vector<DeviceExpertProduct>{{m.matrix, m.bias.data(), m.scales.data(), y.data()}},
            {n, used, experts, chosen.data()}, x->view));
        for (uint32_t i = 0; i < n; ++i) {
          DeviceActivations own = x->view;
          const std::size_t at = std::size_t{i} * of_token * cols;
          own.n = of_token, own.f32 += at, own.q += at, own.scale += at / 32, own.sums += at / 16;
          OK(ops().multiply_experts(
              stream(),
              std::vector<DeviceExpertProduct>{
                  {m.matrix, m.bias.data(), m.scales.data(), each.data() + i * size}},
              {1, used, experts, chosen.data() + i * used}, own));
        }
        CHECK(same_bits(y.get().data(), each.get().data(), n * size));
        CHECK(std::isfinite(each.got()[0]));
        // their sums too
        Memory<float> sum(n * rows), sums(n * rows);
        DeviceExpertSum how{.rows = y.data(), .factor = 1.5f};
        OK(ops().sum_experts(stream(), {n, used, experts, chosen.data()}, how,
                             {n, rows, sum.data()}));
        for (uint32_t i = 0; i < n; ++i) {
          how.rows = y.data() + i * size;
          OK(ops().sum_experts(stream(), {1, used, experts, chosen.data() + i * used}, how,
                               {1, rows, sums.data() + i * rows}));
        }
        CHECK(same_bits(sum.get().data(), sums.get().data(), n * rows));
      }
}

TEST_CASE("a token's norms, gates and choice of experts do not depend on the tokens with it") {
  if (!stream()) return;
  Random random(23);
  constexpr uint32_t n = max_alone;
  for (const uint32_t cols : {64u, 1024u, 5120u}) {
    CAPTURE(cols);
    DeviceInputs x(n, cols, random), gates(n, cols, random), weight(1, cols, random);
    Found found;
    const auto both = [&](auto&& run) {
      Memory<float> all(std::size_t{n} * cols), each(all.size());
      run(x.view, gates.view, DeviceActivations{n, cols, all.data()});
      for (uint32_t i = 0; i < n; ++i)
        run(input_of(x.view, i), input_of(gates.view, i),
            DeviceActivations{1, cols, each.data() + std::size_t{i} * cols});
      CHECK(same_bits(all.get().data(), each.get().data(), all.size()));
    };
    both([&](const auto& in, const auto&, const auto& out) {
      OK(ops().rms_norm(stream(), in.f32, weight.x.data(), 1e-6f, found.check(1), out));
    });
    both([&](const auto& in, const auto&, const auto& out) {
      OK(ops().layer_norm(stream(), in.f32, weight.x.data(), nullptr, 1e-6f, found.check(1), out));
    });
    both([&](const auto& in, const auto& by, const auto& out) {
      OK(ops().activate(stream(), Activation::silu, in.f32, by.f32, found.check(1), out));
    });
  }
  constexpr uint32_t experts = 40, used = 5;
  const std::vector<float> logits = normals(n * experts, random);
  Memory<float> given(logits.data(), logits.size());
  Memory<DeviceChoice> all(n * used), each(n * used);
  Found found;
  const DeviceRouting r{experts, used, 1, 1, Gating::softmax, true, false, 1, nullptr};
  OK(ops().route(stream(), r, given.data(), found.check(1), {n, used, experts, all.data()}));
  for (uint32_t i = 0; i < n; ++i)
    OK(ops().route(stream(), r, given.data() + i * experts, found.check(1),
                   {1, used, experts, each.data() + i * used}));
  all.get(), each.get();
  for (uint32_t i = 0; i < n * used; ++i) {
    CHECK(all.got()[i].expert == each.got()[i].expert);
    CHECK(all.got()[i].weight == each.got()[i].weight);
  }
}

// Many rows have a kernel of their own, which has fewer threads for each.
TEST_CASE("norms of many tokens have the bits of norms of few") {
  if (!stream()) return;
  Random random(29);
  constexpr uint32_t n = 1024, few = 16;
  for (const uint32_t cols : {99u, 160u, 2560u, 4096u, 4128u}) {
    CAPTURE(cols);
    const bool rounds = cols % 32 == 0;
    const std::size_t size = std::size_t{n} * cols, units = rounds ? size / 32 : 1;
    DeviceInputs x(n, cols, random), weight(1, cols, random);
    const std::vector<float> before = normals(size, random);
    Memory<float> all(size), each(size);
    Memory<int8_t> q(size), each_q(size);
    Memory<float> scale(units), each_scale(units);
    Memory<int16_t> sums(2 * units), each_sums(2 * units);
    DeviceActivations out{n, cols, all.data()}, parts{n, cols, each.data()};
    if (rounds) {
      out.q = q.data(), out.scale = scale.data(), out.sums = sums.data();
      parts.q = each_q.data(), parts.scale = each_scale.data(), parts.sums = each_sums.data();
    }
    Found found;
    for (const auto norm : {ops().rms_norm, ops().add_rms_norm}) {
      all.put(before.data()), each.put(before.data());
      OK(norm(stream(), x.view.f32, weight.x.data(), 1e-6f, found.check(1), out));
      for (uint32_t i = 0; i < n; i += few)
        OK(norm(stream(), part_of(x.view, i, few).f32, weight.x.data(), 1e-6f, found.check(1),
                part_of(parts, i, few)));
      CHECK(same_bits(all.get().data(), each.get().data(), size));
      if (!rounds) continue;
      CHECK(std::memcmp(q.get().data(), each_q.get().data(), size) == 0);
      CHECK(same_bits(scale.get().data(), each_scale.get().data(), units));
      CHECK(std::memcmp(sums.get().data(), each_sums.get().data(), 2 * units * sizeof(int16_t)) ==
            0);
    }
    CHECK(found.get() == no_mark);
    all.put(before.data());
    x.host[size - 1] = 1e31f, x.x.put(x.host.data());
    OK(ops().rms_norm(stream(), x.view.f32, weight.x.data(), 1e-6f, found.check(7), out));
    CHECK(found.get() == 7);
  }
}

TEST_CASE("a device finds the largest number of each row") {
  if (!stream()) return;
  Random random(13);
  constexpr uint32_t rows = 4;
  Memory<DeviceLargest> found(rows * largest_parts);
  for (const uint32_t n : {1u, 1023u, 5003u}) {
    std::vector<float> x = normals(std::size_t{rows} * n, random);
    x[2 * std::size_t{n}] = NAN;
    Memory<float> dx(x.data(), x.size());
    OK(ops().find_largest(stream(), dx.data(), rows, n, found.data()));
    for (uint32_t i = 0; i < rows; ++i) {
      const auto row = x.begin() + static_cast<std::ptrdiff_t>(i * n);
      const auto index = static_cast<uint32_t>(std::max_element(row, row + n) - row);
      CHECK(largest_of(&found.get()[i * largest_parts]).index == (i == 2 ? no_largest : index));
    }
  }
}
