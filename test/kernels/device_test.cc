// The operations of a GPU against the reference, on random shapes, with outputs that are poisoned. Without a GPU they say so and pass.
#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "device_support.h"
#include "reference/reference.h"
#include "weights.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

struct Inputs {
  Inputs(uint32_t n, uint32_t cols, Random& random)
      : host(std::size_t{n} * cols), x(host.size()), q(host.size()), scale(ceil(32)), sums(ceil(16)), view{n, cols, x.data(), q.data(), scale.data(), sums.data()} {
    const float mean = random.uniform(-1, 1);
    for (float& v : host) v = mean + random.normal();
    x.put(host.data());
  }
  std::size_t ceil(std::size_t of) const { return (host.size() + of - 1) / of; }
  std::vector<float> host;
  Memory<float> x;
  Memory<int8_t> q;
  Memory<float> scale;
  Memory<int16_t> sums;
  DeviceActivations view;
};

// The reference's product of the very inputs that the device rounded; errors relative to the sums of magnitudes.
double product_error(const WeightView& w, Inputs& x, bool quantised, const float* bias, const float* y, std::size_t stride) {
  const Activations view{x.view.n, w.cols, x.host.data(), quantised ? x.q.get().data() : nullptr, quantised ? x.scale.get().data() : nullptr,
                         quantised ? x.sums.get().data() : nullptr};
  std::vector<double> expected(std::size_t{x.view.n} * w.rows), weights(w.cols);
  reference::matmul(w, view, expected.data(), w.rows);
  double worst = 0;
  for (uint32_t r = 0; r < w.rows; ++r) {
    reference::dequantize_row(w, r, weights.data());
    for (std::size_t i = 0; i < x.view.n; ++i) {
      double magnitude = 1e-30 + (bias ? std::fabs(double{bias[r]}) : 0.0);
      for (uint32_t c = 0; c < w.cols; ++c) magnitude += std::fabs(weights[c] * double{x.host[i * w.cols + c]});
      const double wanted = expected[i * w.rows + r] + (bias ? double{bias[r]} : 0.0);
      const double error = std::fabs(double{y[i * stride + r]} - wanted) / magnitude;
      worst = error <= worst ? worst : error;  // a not-a-number wins
    }
  }
  return worst;
}

void check_product(const test::Type& t, uint32_t n, uint32_t rows, uint32_t cols, bool with_bias, Random& random) {
  CAPTURE(std::string(t.name));
  CAPTURE(n);
  CAPTURE(rows);
  CAPTURE(cols);
  Weights w(t, rows, cols, random);
  Memory<std::byte> file(w.view.data, w.bytes.size()), laid_out(ops().matrix_bytes(t.type, rows, cols));
  const DeviceMatrix matrix{t.type, rows, cols, laid_out.data()};
  const uint32_t half = rows / 2;  // in two pieces
  if (half) OK(ops().lay_out(stream(), matrix, file.data(), 0, half));
  OK(ops().lay_out(stream(), matrix, file.data() + half * w.view.row_bytes, half, rows - half));
  Inputs x(n, cols, random);
  if (t.block != 1) OK(ops().quantize(stream(), x.view));
  std::vector<float> bias(rows);
  for (float& b : bias) b = random.normal();
  Memory<float> device_bias(bias.data(), rows);
  constexpr std::size_t gap = 3;
  Memory<float> y(n * (rows + gap));
  OK(ops().matmul(stream(), matrix, x.view, with_bias ? device_bias.data() : nullptr, y.data(), rows + gap));
  const Guarded<float>& got = y.get();
  CHECK(product_error(w.view, x, t.block != 1, with_bias ? bias.data() : nullptr, got.data(), rows + gap) < 1e-6);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t g = 0; g < gap; ++g) CHECK(std::isnan(got[i * (rows + gap) + rows + g]));
  laid_out.get();
}

}  // namespace

TEST_CASE("a device's products of every format agree with the reference on odd shapes") {
  if (!stream()) return;
  Random random(1);
  for (const test::Type& t : test::types) {
    const uint32_t step = t.block == 1 ? 32 : t.block;
    for (uint32_t n : {1u, 2u, 7u, 8u, 23u, 64u, 65u, 130u})
      check_product(t, n, 1 + random.below(200), step * (1 + random.below(t.block == 256 ? 5 : 40)), random.below(2) != 0, random);
    check_product(t, 1, 33, 2048 + step, true, random);
    check_product(t, 17, 129, 2048 + step, false, random);
  }
}

TEST_CASE("a device rounds inputs as the processor does") {
  if (!stream()) return;
  Random random(2);
  Inputs x(5, 320, random);
  x.host[7] = NAN;
  for (int i = 32; i < 64; ++i) x.host[static_cast<std::size_t>(i)] = 0;
  for (int i = 64; i < 96; ++i) x.host[static_cast<std::size_t>(i)] *= 1e-38f;
  for (int i = 96; i < 128; ++i) x.host[static_cast<std::size_t>(i)] = i % 2 ? 0.5f : 127.0f;  // ties
  x.x.put(x.host.data());
  OK(ops().quantize(stream(), x.view));
  Guarded<int8_t> q(x.host.size());
  Guarded<float> scale(x.host.size() / 32);
  Guarded<int16_t> sums(x.host.size() / 16);
  cpu_kernels().quantize(x.host.data(), 5, 320, q.data(), scale.data(), sums.data());
  x.q.get(), x.scale.get(), x.sums.get();
  for (std::size_t i = 32; i < q.size(); ++i) CHECK(x.q.get()[i] == q[i]);
  for (std::size_t i = 1; i < scale.size(); ++i) CHECK(x.scale.get()[i] == scale[i]);
  for (std::size_t i = 2; i < sums.size(); ++i) CHECK(x.sums.get()[i] == sums[i]);
  CHECK(x.q.get()[7] == -127);
}

TEST_CASE("a device's elementwise operations agree with the reference") {
  if (!stream()) return;
  Random random(3);
  for (uint32_t cols : {32u, 100u, 4096u}) {
    std::vector<float> x(3 * cols), weight(cols), up(3 * cols);
    for (float& v : x) v = random.normal();
    for (float& v : weight) v = random.normal();
    for (float& v : up) v = random.normal();
    Memory<float> dx(x.data(), x.size()), dw(weight.data(), cols), y(x.size()), dup(up.data(), up.size());
    std::vector<double> expected(x.size());
    OK(ops().rms_norm(stream(), dx.data(), dw.data(), 1e-5f, 3, cols, y.data()));
    reference::rms_norm(x.data(), weight.data(), 1e-5f, 3, cols, expected.data());
    CHECK(test::relative_error(y.get().data(), expected.data(), x.size()) < 1e-6);
    OK(ops().rms_norm(stream(), dx.data(), dw.data(), 1e-5f, 3, cols, dx.data()));  // in place
    CHECK(test::relative_error(dx.get().data(), expected.data(), x.size()) < 1e-6);
    dx.put(x.data());
    OK(ops().swiglu(stream(), dx.data(), dup.data(), x.size()));
    reference::swiglu(x.data(), up.data(), x.size(), expected.data());
    CHECK(test::relative_error(dx.get().data(), expected.data(), x.size()) < 1e-6);
    dx.put(x.data());
    OK(ops().add(stream(), dx.data(), dup.data(), x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) CHECK(dx.get()[i] == x[i] + up[i]);
  }
  for (bool neox : {false, true}) {
    for (uint32_t rotary : {32u, 48u, 64u}) {
      constexpr uint32_t n = 3, heads = 5, dim = 64;
      std::vector<float> x(n * heads * dim), cos(n * rotary / 2), sin(n * rotary / 2);
      for (float& v : x) v = random.normal();
      for (std::size_t i = 0; i < cos.size(); ++i) {
        const float angle = random.uniform(0, 6);
        cos[i] = std::cos(angle), sin[i] = std::sin(angle);
      }
      Memory<float> dx(x.data(), x.size()), dc(cos.data(), cos.size()), ds(sin.data(), sin.size());
      OK(ops().rope(stream(), dx.data(), n, heads, dim, rotary, dc.data(), ds.data(), neox));
      std::vector<double> expected(x.begin(), x.end());
      for (uint32_t t = 0; t < n; ++t)
        reference::rope(expected.data() + t * heads * dim, heads, dim, rotary, cos.data() + t * rotary / 2, sin.data() + t * rotary / 2, neox);
      CHECK(test::relative_error(dx.get().data(), expected.data(), x.size()) < 1e-6);
    }
  }
}

TEST_CASE("a device finds the first layer with a number that is none") {
  if (!stream()) return;
  std::vector<float> x(100000, 1.0f);
  const uint32_t none = UINT32_MAX;
  Memory<float> dx(x.data(), x.size());
  Memory<uint32_t> first(&none, 1);
  const auto check = [&](float value, std::size_t at, uint32_t mark) {
    x[at] = value;
    dx.put(x.data());
    OK(ops().check(stream(), dx.data(), x.size(), 1e30f, mark, first.data()));
    x[at] = 1;
    return first.get()[0];
  };
  CHECK(check(1, 0, 1) == none);
  CHECK(check(NAN, 99999, 9) == 9);
  CHECK(check(INFINITY, 0, 12) == 9);
  CHECK(check(-2e30f, 5000, 4) == 4);
}

TEST_CASE("a device is opened twice and closed once") {
  if (!stream()) return;
  DeviceContext* another = nullptr;
  OK(ops().open(0, &another));
  DeviceInfo info;
  OK(ops().describe(another, &info));
  CHECK(info.bytes > info.free_bytes);
  CHECK(info.multiprocessors > 0);
  OK(ops().close(another));
  const float x = 3;  // the first one is as it was
  Memory<float> after(&x, 1);
  OK(ops().add(stream(), after.data(), after.data(), 1));
  CHECK(after.get()[0] == 6);
}

TEST_CASE("a device that has no memory left says so and goes on") {
  if (!stream()) return;
  void* memory = nullptr;
  const int error = ops().allocate(gpu()->context, std::size_t{1} << 50, &memory);
  CHECK(ops().is_out_of_memory(error));
  const float x = 1;
  Memory<float> after(&x, 1);
  OK(ops().add(stream(), after.data(), after.data(), 1));
  CHECK(after.get()[0] == 2);
}
