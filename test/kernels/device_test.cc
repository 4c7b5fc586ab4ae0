// The operations of a GPU against the reference, on random shapes, with outputs that are poisoned.
// Without a GPU the cases pass and say so.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_values.h"
#include "reference/reference.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// A matrix on the device, perhaps with a bias, and what its products go to.
struct OneProduct {
  OneProduct(const test::Type& t, uint32_t rows, uint32_t cols, uint32_t n, Random& random)
      : type(t), w(t, rows, cols, random), laid_out(ops().matrix_bytes(t.type, rows, cols)),
        bias(rows), device_bias(rows), before(std::size_t{n} * rows), y(before.size()) {
    Memory<std::byte> file(w.view.data, w.bytes.size());
    const DeviceMatrix matrix{t.type, rows, cols, laid_out.data(), w.view.scale};
    const uint32_t half = rows / 2;  // in two pieces
    if (half) OK(ops().lay_out(stream(), matrix, file.data(), 0, half));
    OK(ops().lay_out(stream(), matrix, file.data() + half * w.view.row_bytes, half, rows - half));
    for (float& b : bias) b = random.normal();
    device_bias.put(bias.data());
    for (float& b : before) b = random.normal();
    with_bias = random.below(2) != 0;
    product = {matrix, with_bias ? device_bias.data() : nullptr, y.data()};
  }
  bool quantised() const { return type.block != 1; }
  void check(DeviceInputs& x, bool add, double error = 1e-6) {
    CHECK(product_error(w.view, x, quantised(), with_bias ? bias.data() : nullptr,
                        add ? before.data() : nullptr, y.get().data()) < error);
    laid_out.get();
  }
  const test::Type& type;
  Weights w;
  Memory<std::byte> laid_out;
  std::vector<float> bias;
  Memory<float> device_bias;
  std::vector<float> before;
  Memory<float> y;
  bool with_bias;
  DeviceProduct product;
};

// Of matrices of these types and rows, by one call; y is added to, or poisoned before.
void check_products(std::initializer_list<std::pair<const test::Type*, uint32_t>> matrices,
                    uint32_t n, uint32_t cols, bool add, Random& random) {
  CAPTURE(std::string(matrices.begin()->first->name));
  CAPTURE(n);
  CAPTURE(matrices.begin()->second);
  CAPTURE(cols);
  CAPTURE(add);
  std::vector<std::unique_ptr<OneProduct>> of;
  std::vector<DeviceProduct> products;
  bool quantised = false;
  for (const auto& [type, rows] : matrices) {
    of.push_back(std::make_unique<OneProduct>(*type, rows, cols, n, random));
    products.push_back(of.back()->product);
    quantised |= of.back()->quantised();
    if (add) of.back()->y.put(of.back()->before.data());
  }
  DeviceInputs x(n, cols, random);
  Found found;
  if (quantised) OK(ops().quantize(stream(), x.view, found.check(1)));
  OK(ops().matmul(stream(), products, x.view, add));
  for (const auto& one : of) one->check(x, add);
}

// What was made of the numbers y, in floats and rounded as the CPU rounds those.
struct Made {
  Made(uint32_t n, uint32_t cols, bool with_f32, bool with_q)
      : f32(n * cols), q(n * cols), scale(n * cols / 32 + 1),
        sums(n * cols / 16 + 1), view{n, cols} {
    if (with_f32) view.f32 = f32.data();
    if (with_q) view.q = q.data(), view.scale = scale.data(), view.sums = sums.data();
  }
  // Each rounded number is as near to y as the scale allows, and a little for what y itself is
  // rounded by; what was not asked for is poisoned still.
  void check(const std::vector<double>& y) {
    const uint32_t size = view.n * view.cols;
    if (view.f32) CHECK(test::relative_error(f32.get().data(), y.data(), size) < 1e-6);
    else CHECK(std::isnan(f32.get()[0]));
    if (!view.q) {
      CHECK(q.get()[0] == -1);
      CHECK(std::isnan(scale.get()[0]));
      return;
    }
    bool near = true, right_sums = true, right_scales = true;
    for (uint32_t b = 0; b < size / 32; ++b) {
      double largest = 0;
      for (uint32_t i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(y[b * 32 + i]));
      right_scales &= std::fabs(double{scale.get()[b]} - largest / 127) <= 1e-6 * largest;
      for (uint32_t i = 0; i < 32; ++i)
        near &= std::fabs(double{scale.get()[b]} * q.get()[b * 32 + i] - y[b * 32 + i]) <=
                (0.5 / 127 + 1e-5) * largest;
    }
    for (uint32_t h = 0; h < size / 16; ++h) {
      int sum = 0;
      for (uint32_t i = 0; i < 16; ++i) sum += q.get()[h * 16 + i];
      right_sums &= sums.get()[h] == sum;
    }
    CHECK(right_scales);
    CHECK(near);
    CHECK(right_sums);
  }
  Memory<float> f32;
  Memory<int8_t> q;
  Memory<float> scale;
  Memory<int16_t> sums;
  DeviceActivations view;
};

}  // namespace

TEST_CASE("a device's products of every format agree with the reference on odd shapes") {
  if (!stream()) return;
  Random random(1);
  for (const test::Type& t : test::types) {
    const uint32_t step = t.block == 1 ? 32 : t.block;
    for (uint32_t n : {1u, 2u, 3u, 7u, 8u, 9u, 16u, 17u, 22u, 31u, 33u, 63u, 64u, 65u, 130u})
      check_products({{&t, 1 + random.below(200)}}, n,
                     step * (1 + random.below(t.block == 256 ? 5 : 40)), random.below(2) != 0,
                     random);
    check_products({{&t, 33}}, 1, 2048 + step, true, random);
    check_products({{&t, 9}}, 1, 8192 + step, false, random);
    check_products({{&t, 17}}, 17, 2048 + step, false, random);
  }
  check_products({{&type_of("Q8_0"), 300}}, 200, 320, true, random);
}

TEST_CASE("a device's products in half precision agree with the reference") {
  if (!stream()) return;
  Random random(8);
  constexpr uint32_t n = 520, max_cols = 1056;  // not a multiple of a tile
  const std::size_t bytes = ops().halves_bytes(gpu()->context, n, max_cols);
  if (bytes == 0) return;
  Memory<std::byte> halves(bytes);
  const auto check = [&](const test::Type& t, uint32_t cols) {
    CAPTURE(std::string(t.name));
    const bool add = random.below(2) != 0;
    OneProduct one(t, 3000, cols, n, random), other(t, 1500, cols, n, random);
    if (add) one.y.put(one.before.data()), other.y.put(other.before.data());
    DeviceInputs x(n, cols, random);
    x.view.halves = halves.data();
    Found found;
    OK(ops().quantize(stream(), x.view, found.check(1)));
    const std::vector<DeviceProduct> products = {one.product, other.product};
    OK(ops().matmul(stream(), products, x.view, add));
    one.check(x, add, 1e-3), other.check(x, add, 1e-3);
  };
  for (const test::Type& t : test::types)
    if (t.block != 1) check(t, t.block == 32 ? 96 : t.block);
  check(type_of("Q8_0"), max_cols);
}

TEST_CASE("a device's products by one call are of several matrices, of one type or not") {
  if (!stream()) return;
  Random random(4);
  for (const test::Type& t : test::types)
    for (uint32_t n : {1u, 2u, 20u, 64u})
      check_products(
          {{&t, 1 + random.below(150)}, {&t, 1 + random.below(9)}, {&t, 1 + random.below(80)}}, n,
          512, n % 20 != 0, random);
  const test::Type &q4 = type_of("Q4_K"), &q6 = type_of("Q6_K"), &half = type_of("F16"),
                   &q8 = type_of("Q8_0");
  for (uint32_t n : {1u, 5u}) {
    check_products({{&q4, 65}, {&q4, 5}, {&q6, 9}}, n, 768, false, random);
    check_products({{&q4, 65}, {&q6, 6}, {&q4, 9}}, n, 768, true, random);
    check_products({{&q8, 31}, {&half, 7}, {&q8, 12}}, n, 256, false, random);
    check_products({{&q8, 3}, {&q8, 131}, {&q8, 2}, {&q8, 70}}, n, 256, false, random);
  }
  for (uint32_t n : {70u, 250u})
    check_products({{&q8, 131}, {&q8, 64}, {&q8, 1}}, n, 96, true, random);
}

// Matrices of so many rows that a block has few of them, more, or most: what each block has depends
// on how many a device runs at a time.
TEST_CASE("how many inputs a device's product has does not change a bit of any output") {
  if (!stream()) return;
  DeviceInfo info;
  OK(ops().describe(gpu()->context, &info));
  Random random(7);
  constexpr uint32_t most = 300;
#ifdef KVASIR_EMULATED_DEVICE  // the CPU has a way of its own for two
  constexpr uint32_t fewer[] = {22, 64, 65};
#else
  constexpr uint32_t fewer[] = {2, 22, 64, 65};
#endif
  for (const test::Type& t : test::types) {
    if (t.block == 1) continue;
    CAPTURE(std::string(t.name));
    for (const uint32_t rows :
         {45u, 20 * info.multiprocessors + 9, 129 * info.multiprocessors + 3}) {
      CAPTURE(rows);
      const uint32_t cols = 2048 + t.block;
      DeviceInputs x(most, cols, random);
      Found found;
      OK(ops().quantize(stream(), x.view, found.check(1)));
      OneProduct all(t, rows, cols, most, random);
      OK(ops().matmul(stream(), {&all.product, 1}, x.view, false));
      const Guarded<float>& expected = all.y.get();
      for (const uint32_t n : fewer) {
        CAPTURE(n);
        Memory<float> y(std::size_t{n} * rows);
        DeviceActivations some = x.view;
        some.n = n;
        const DeviceProduct product{all.product.w, all.product.bias, y.data()};
        OK(ops().matmul(stream(), {&product, 1}, some, false));
        CHECK(std::equal(y.get().data(), y.get().data() + y.size(), expected.data()));
      }
    }
  }
}

TEST_CASE("a device rounds inputs as the CPU does") {
  if (!stream()) return;
  Random random(2);
  DeviceInputs x(5, 320, random);
  x.host[7] = NAN;
  for (int i = 32; i < 64; ++i) x.host[static_cast<std::size_t>(i)] = 0;
  for (int i = 64; i < 96; ++i) x.host[static_cast<std::size_t>(i)] *= 1e-38f;
  // ties
  for (int i = 96; i < 128; ++i) x.host[static_cast<std::size_t>(i)] = i % 2 ? 0.5f : 127.0f;
  x.x.put(x.host.data());
  Found found;
  OK(ops().quantize(stream(), x.view, found.check(3)));
  CHECK(found.get() == 3);
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

TEST_CASE("a device's norms and gates agree with the reference, in floats and rounded") {
  if (!stream()) return;
  Random random(3);
  for (const uint32_t cols : {32u, 99u, 100u, 160u, 2080u, 4096u, 8192u, 12320u}) {
    CAPTURE(cols);
    constexpr uint32_t n = 3;
    const std::vector<float> x = normals(n * cols, random), weight = normals(cols, random),
                             up = normals(n * cols, random), bias = normals(cols, random);
    Memory<float> dx(x.data(), x.size()), dw(weight.data(), cols), dup(up.data(), up.size()),
        db(bias.data(), cols);
    std::vector<double> normed(x.size()), centred(x.size()), gated(x.size());
    reference::rms_norm(x.data(), weight.data(), 1e-5f, n, cols, normed.data());
    reference::layer_norm(x.data(), weight.data(), bias.data(), 1e-5f, n, cols, centred.data());
    reference::activate(Activation::silu, x.data(), up.data(), x.size(), gated.data());
    for (const auto& [with_f32, with_q] :
         {std::pair(true, false), std::pair(true, true), std::pair(false, true)}) {
      if (with_q && cols % 32 != 0) continue;
      Found found;
      Made norm(n, cols, with_f32, with_q), gate(n, cols, with_f32, with_q),
          layer(n, cols, with_f32, with_q);
      OK(ops().rms_norm(stream(), dx.data(), dw.data(), 1e-5f, found.check(1), norm.view));
      OK(ops().layer_norm(stream(), dx.data(), dw.data(), db.data(), 1e-5f, found.check(1),
                          layer.view));
      OK(ops().activate(stream(), Activation::silu, dx.data(), dup.data(), found.check(1),
                        gate.view));
      norm.check(normed);
      layer.check(centred);
      gate.check(gated);
      CHECK(found.get() == no_mark);
    }
    Found found;
    std::vector<double> sums(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) sums[i] = static_cast<double>(up[i]) + normed[i];
    const DeviceActivations sum{n, cols, dup.data()};
    OK(ops().add_rms_norm(stream(), dx.data(), dw.data(), 1e-5f, found.check(1), sum));
    CHECK(test::relative_error(dup.get().data(), sums.data(), x.size()) < 1e-6);
    dup.put(up.data());
    // in place
    OK(ops().activate(stream(), Activation::silu, dx.data(), dup.data(), found.check(1),
                      {n, cols, dx.data()}));
    CHECK(test::relative_error(dx.get().data(), gated.data(), x.size()) < 1e-6);
    dx.put(x.data());
    OK(ops().rms_norm(stream(), dx.data(), dw.data(), 1e-5f, found.check(1), {n, cols, dx.data()}));
    CHECK(test::relative_error(dx.get().data(), normed.data(), x.size()) < 1e-6);
    dx.put(x.data());
    reference::layer_norm(x.data(), weight.data(), nullptr, 1e-5f, n, cols, centred.data());
    OK(ops().layer_norm(stream(), dx.data(), dw.data(), nullptr, 1e-5f, found.check(1),
                        {n, cols, dx.data()}));
    CHECK(test::relative_error(dx.get().data(), centred.data(), x.size()) < 1e-6);
  }
}

TEST_CASE("a device scales any number of floats") {
  if (!stream()) return;
  Random random(10);
  for (const uint32_t n : {1u, 3u, 1024u, 5003u}) {
    std::vector<float> x = normals(n, random);
    Memory<float> dx(x.data(), n);
    OK(ops().scale(stream(), dx.data(), n, 0.7f));
    for (float& v : x) v *= 0.7f;
    CHECK(std::equal(x.begin(), x.end(), dx.get().data()));
  }
}

TEST_CASE("a device finds the first of the largest numbers, unless one is NaN or infinity") {
  if (!stream()) return;
  Random random(12);
  Memory<DeviceLargest> found(largest_parts);
  for (const uint32_t n : {1u, 3u, 1024u, 5003u, 248320u}) {
    std::vector<float> x = normals(n, random);
    const auto largest = [&] {
      Memory<float> dx(x.data(), n);
      OK(ops().find_largest(stream(), dx.data(), 1, n, found.data()));
      return largest_of(found.get().data());
    };
    const auto index = static_cast<uint32_t>(std::max_element(x.begin(), x.end()) - x.begin());
    CHECK(largest().index == index);
    CHECK(largest().value == x[index]);
    x[n - 1] = x[n / 2] = x[n / 3] = 9;
    CHECK(largest().index == n / 3);
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      x[n / 2] = bad;
      CHECK(largest().index == no_largest);
    }
  }
}

TEST_CASE("a device's activations agree with the reference, with a gate and without") {
  if (!stream()) return;
  Random random(8);
  for (const uint32_t cols : {32u, 99u, 4128u}) {
    constexpr uint32_t n = 2;
    std::vector<float> gate = normals(n * cols, random), up = normals(n * cols, random);
    for (float& x : gate) x *= 4;  // some are clamped
    for (float& x : up) x *= 4;
    Memory<float> dgate(gate.data(), gate.size()), dup(up.data(), up.size());
    for (const Activation f :
         {Activation::silu, Activation::gelu, Activation::relu_squared, Activation::clamped_silu}) {
      for (const bool gated : {true, false}) {
        if (!gated && f == Activation::clamped_silu) continue;
        CAPTURE(static_cast<int>(f));
        std::vector<double> expected(gate.size());
        reference::activate(f, gate.data(), gated ? up.data() : nullptr, gate.size(),
                            expected.data());
        Found found;
        Made made(n, cols, true, cols % 32 == 0);
        OK(ops().activate(stream(), f, dgate.data(), gated ? dup.data() : nullptr, found.check(1),
                          made.view));
        made.check(expected);
        CHECK(found.get() == no_mark);
      }
    }
  }
}

TEST_CASE(
    "a device rotates queries and keys, after the norms of their heads where there are some") {
  if (!stream()) return;
  Random random(5);
  for (const bool neox : {false, true}) {
    for (const auto& [dim, rotary] : {std::pair(64u, 32u), std::pair(64u, 48u), std::pair(64u, 64u),
                                      std::pair(256u, 256u), std::pair(6u, 4u)}) {
      for (const bool with_norms : {false, true}) {
        constexpr uint32_t n = 3, heads = 5, kv_heads = 2;
        const std::size_t q_size = n * heads * dim, k_size = n * kv_heads * dim, half = rotary / 2;
        const std::vector<float> x = normals(q_size + 2 * k_size, random),
                                 q_norm = normals(dim, random), k_norm = normals(dim, random);
        std::vector<float> cos(n * half), sin(n * half);
        for (std::size_t i = 0; i < cos.size(); ++i) {
          const float angle = random.uniform(0, 6);
          cos[i] = std::cos(angle), sin[i] = std::sin(angle);
        }
        Memory<float> dx(x.data(), x.size()), dq(q_norm.data(), dim), dk(k_norm.data(), dim),
            dc(cos.data(), cos.size()), ds(sin.data(), sin.size());
        Found found;
        DeviceHeads h{.n = n,
                      .heads = heads,
                      .kv_heads = kv_heads,
                      .head_dim = dim,
                      .qkv = dx.data(),
                      .epsilon = 1e-5f,
                      .rotary_dim = rotary,
                      .neox = neox,
                      .cos = dc.data(),
                      .sin = ds.data()};
        if (with_norms) h.norm = DeviceHeadNorm::rms, h.q_norm = dq.data(), h.k_norm = dk.data();
        OK(ops().rotate(stream(), h, found.check(1)));
        std::vector<double> expected(x.begin(), x.end());
        if (with_norms)
          reference::rms_norm(x.data(), q_norm.data(), 1e-5f, n * heads, dim, expected.data());
        if (with_norms)
          reference::rms_norm(x.data() + q_size, k_norm.data(), 1e-5f, n * kv_heads, dim,
                              expected.data() + q_size);
        for (uint32_t t = 0; t < n; ++t) {
          reference::rope(expected.data() + t * heads * dim, heads, dim, rotary,
                          cos.data() + t * half, sin.data() + t * half, neox);
          reference::rope(expected.data() + q_size + t * kv_heads * dim, kv_heads, dim, rotary,
                          cos.data() + t * half, sin.data() + t * half, neox);
        }
        CHECK(test::relative_error(dx.get().data(), expected.data(), x.size()) < 1e-6);
        CHECK(found.get() == no_mark);
      }
    }
  }
}

// Every kind of norm, before or after the rotation, with weights of a head, of all heads or none.
TEST_CASE("a device normalises the heads of queries, keys and values, and scales queries") {
  if (!stream()) return;
  Random random(9);
  constexpr uint32_t n = 3, heads = 4, kv_heads = 2, rotary = 48, half = rotary / 2;
  for (const uint32_t dim : {64u, 80u, 256u}) {
    const std::size_t q_size = n * heads * dim, k_size = n * kv_heads * dim;
    const std::vector<float> x = normals(q_size + 2 * k_size, random),
                             q_norm = normals(heads * dim, random),
                             k_norm = normals(kv_heads * dim, random), factors = normals(n, random);
    std::vector<float> cos(n * half), sin(n * half);
    for (std::size_t i = 0; i < cos.size(); ++i) {
      const float angle = random.uniform(0, 6);
      cos[i] = 1.1f * std::cos(angle), sin[i] = 1.1f * std::sin(angle);
    }
    Memory<float> dq(q_norm.data(), q_norm.size()), dk(k_norm.data(), k_norm.size()),
        dc(cos.data(), cos.size()), ds(sin.data(), sin.size()), df(factors.data(), n);
    const std::vector<float> ones(dim, 1.0f);
    for (const DeviceHeadNorm norm :
         {DeviceHeadNorm::none, DeviceHeadNorm::rms, DeviceHeadNorm::layer}) {
      for (const uint32_t stride : {0u, dim}) {
        for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7}) {
          const bool after = flags & 1, weights = flags & 2, has_rope = flags & 4;
          if (norm == DeviceHeadNorm::layer && !weights) continue;  // it has some
          CAPTURE(static_cast<int>(norm));
          CAPTURE(flags);
          Memory<float> dx(x.data(), x.size());
          Found found;
          DeviceHeads h{.n = n,
                        .heads = heads,
                        .kv_heads = kv_heads,
                        .head_dim = dim,
                        .qkv = dx.data(),
                        .norm = norm,
                        .norm_after_rope = after,
                        .norm_v = after,
                        .norm_stride = stride,
                        .epsilon = 1e-5f,
                        .rotary_dim = has_rope ? rotary : 0,
                        .cos = dc.data(),
                        .sin = ds.data(),
                        .q_factor = 0.5f,
                        .q_factors = weights ? df.data() : nullptr};
          if (weights) h.q_norm = dq.data(), h.k_norm = dk.data();
          OK(ops().rotate(stream(), h, found.check(1)));
          std::vector<float> made = x;  // rounded between the operations, as on a device
          std::vector<double> expected(x.begin(), x.end()), row(dim);
          for (uint32_t i = 0; i < n * (heads + 2 * kv_heads); ++i) {
            const uint32_t of_q = n * heads, of_k = n * kv_heads;
            const bool is_q = i < of_q, is_v = i >= of_q + of_k;
            const uint32_t all = is_q ? heads : kv_heads, at = is_q ? i : (i - of_q) % of_k,
                           token = at / all;
            const auto normalise = [&](DeviceHeadNorm kind) {
              const float* own = weights && !is_v ? (is_q ? q_norm : k_norm).data() +
                                                        std::size_t{at % all} * stride
                                                  : ones.data();
              for (uint32_t d = 0; d < dim; ++d) made[d] = static_cast<float>(row[d]);
              if (kind == DeviceHeadNorm::rms)
                reference::rms_norm(made.data(), own, 1e-5f, 1, dim, row.data());
              if (kind == DeviceHeadNorm::layer)
                reference::layer_norm(made.data(), own, nullptr, 1e-5f, 1, dim, row.data());
            };
            std::copy_n(x.begin() + std::size_t{i} * dim, dim, row.begin());
            if (!is_v && !after) normalise(norm);
            if (!is_v && has_rope)
              reference::rope(row.data(), 1, dim, rotary, cos.data() + token * half,
                              sin.data() + token * half, false);
            if (!is_v && after) normalise(norm);
            if (is_v && h.norm_v) normalise(DeviceHeadNorm::rms);
            const double factor = is_q ? 0.5 * (weights ? double{factors[token]} : 1) : 1;
            for (uint32_t d = 0; d < dim; ++d) expected[i * dim + d] = row[d] * factor;
          }
          CHECK(test::relative_error(dx.get().data(), expected.data(), x.size()) < 2e-6);
          CHECK(found.get() == no_mark);
        }
      }
    }
  }
}

TEST_CASE("a device finds the first layer with NaN or infinity, in every array that it checks") {
  if (!stream()) return;
  constexpr uint32_t n = 3, heads = 4, kv_heads = 2, dim = 64, cols = (heads + 2 * kv_heads) * dim,
                     size = n * cols, half = 10;
  const std::vector<float> ones(size, 1.0f), huge(size, 1e6f);
  Memory<float> x(ones.data(), size), weight(ones.data(), cols), up(huge.data(), size);
  const std::vector<float> cos(n * half, 0.8f), sin(n * half, 0.6f);
  Memory<float> dc(cos.data(), cos.size()), ds(sin.data(), sin.size());
  Made made(n, cols, true, true);
  const DeviceHeads h{.n = n,
                      .heads = heads,
                      .kv_heads = kv_heads,
                      .head_dim = dim,
                      .qkv = x.data(),
                      .epsilon = 1e-5f,
                      .rotary_dim = 2 * half,
                      .neox = true,
                      .cos = dc.data(),
                      .sin = ds.data()};
  using Look = std::function<int(const DeviceCheck&)>;
  const std::pair<const char*, Look> looks[] = {
      {"quantize",
       [&](const DeviceCheck& c) {
         return ops().quantize(
             stream(), {n, cols, x.data(), made.q.data(), made.scale.data(), made.sums.data()}, c);
       }},
      {"only looks",
       [&](const DeviceCheck& c) {
         return ops().quantize(stream(), {n, cols, x.data()}, c);
       }},
      {"rms_norm",
       [&](const DeviceCheck& c) {
         return ops().rms_norm(stream(), x.data(), weight.data(), 1e-5f, c, made.view);
       }},
      {"add_rms_norm",
       [&](const DeviceCheck& c) {
         return ops().add_rms_norm(stream(), x.data(), weight.data(), 1e-5f, c,
                                   {n, cols, made.view.f32});
       }},
      {"layer_norm",
       [&](const DeviceCheck& c) {
         return ops().layer_norm(stream(), x.data(), weight.data(), nullptr, 1e-5f, c, made.view);
       }},
      {"activate",
       [&](const DeviceCheck& c) {
         return ops().activate(stream(), Activation::silu, x.data(), up.data(), c, made.view);
       }},
      {"rotate", [&](const DeviceCheck& c) { return ops().rotate(stream(), h, c); }}};
  for (const auto& [name, look] : looks) {
    CAPTURE(std::string(name));
    Found found;
    const auto mark_of = [&](float value, std::size_t at, uint32_t mark) {
      std::vector<float> its = ones;
      its[at] = value;
      x.put(its.data());
      OK(look(found.check(mark)));
      return found.get();
    };
    CHECK(mark_of(1e23f, size / 2, 12) == no_mark);
    CHECK(mark_of(NAN, size - 1, 12) == 12);
    CHECK(mark_of(INFINITY, 0, 11) == 11);
    CHECK(mark_of(std::string(name) == "activate" ? 2e24f : -2e30f, size / 2 + 7, 10) == 10);
    CHECK(mark_of(NAN, cols * 2 - 1, 11) == 10);
    for (uint32_t i = 0; i < 9; ++i) CHECK(mark_of(NAN, i * (size / 9) + i, 9 - i) == 9 - i);
  }
}

static void check_works() {
  Random random(6);
  check_products({{&type_of("F32"), 3}}, 1, 32, false, random);
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
  check_works();  // the first one is as it was
}

TEST_CASE("a device without free memory returns an error and goes on") {
  if (!stream()) return;
  void* memory = nullptr;
  const int error = ops().allocate(gpu()->context, std::size_t{1} << 50, &memory);
  CHECK(ops().is_out_of_memory(error));
  check_works();
}
