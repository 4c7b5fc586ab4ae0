// check-kernels: matrix products, their inputs' quantisation and dequantised rows; elementwise
// operations.
#include <memory>

#include "check_kernels.h"
#include "matmul_inputs.h"

namespace kvasir::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

void fill(Guarded<float>& a, Random& random, float scale = 1) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = random.normal() * scale;
}

struct Quantize {
  Quantize(Random& random, bool random_shape)
      : n(random_shape ? 1 + random.below(9) : 16),
        cols(random_shape ? 32 * (1 + random.below(40)) : 4096), x(std::size_t{n} * cols),
        q(x.size()), scale(x.size() / 32), sums(x.size() / 16) {
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = random.normal() * std::ldexp(1.0f, static_cast<int>(i / 32 % 40) - 20);
  }
  void call(const Kernels& k) {
    k.quantize(x.data(), n, cols, q.data(), scale.data(), sums.data());
  }
  double error() const {
    const uint32_t differences =
        quantize_differences(x.data(), x.size(), q.data(), scale.data(), sums.data());
    return guarded(differences, q, scale, sums);
  }
  static constexpr double tolerance = 0;  // values that differ
  uint32_t n, cols;
  Guarded<float> x;
  Guarded<int8_t> q;
  Guarded<float> scale;
  Guarded<int16_t> sums;
};

// One to eight inputs, or more, which take another way.
struct Product {
  static constexpr std::size_t gap = 3;  // floats after a row of y, which stay poisoned
  Product(Random& random, bool random_shape, const Type* type, bool many)
      : w(*type, random_shape ? 1 + random.below(80) : 512,
          random_shape ? type->block * (1 + random.below(type->block == 256 ? 3 : 20)) : 2048,
          random, random_shape ? random.below(2) * 3 : 0),
        x(scalar(), (many ? 9 : 1) + random.below(random_shape ? 8 : 1), w.view.cols, random),
        stride(w.view.rows + gap), y(x.view.n * stride), quantised(type->block != 1) {}
  void call(const Kernels& k) {
    const std::size_t bytes = k.matmul_scratch(w.view.type, x.view.method);
    if (!scratch || scratch->size() != bytes) scratch = std::make_unique<Guarded<std::byte>>(bytes);
    Activations in = x.view;
    const bool few = in.n > 1 && method_of(in.n) == ProductMethod::few;
    const std::size_t size = few && quantised ? k.lane_bytes(in.n, in.cols) : 0;
    if (size > 0) {
      if (!lanes || lanes->size() != size) lanes = std::make_unique<Guarded<std::byte>>(size);
      k.to_lanes(in, 0, in.n, lanes->data());
      in.lanes = lanes->data();
    }
    k.matmul(w.view, in, y.data(), stride, 0, w.view.rows, scratch->data());
  }
  double error() const {
    for (std::size_t i = 0; i < x.view.n; ++i) {
      for (std::size_t g = w.view.rows; g < stride; ++g)
        if (!std::isnan(y[i * stride + g])) return infinity;
    }
    return guarded(product_error(w.view, x.view, y.data(), stride), y, *scratch);
  }
  static constexpr double tolerance = product_tolerance;
  Weights w;
  Inputs x;
  std::size_t stride;
  Guarded<float> y;
  bool quantised;
  std::unique_ptr<Guarded<std::byte>> scratch, lanes;  // exactly what the table asks for
};

struct DequantizeRow {
  DequantizeRow(Random& random, bool random_shape, const Type* type)
      : w(*type, 3, type->block * (random_shape ? 1 + random.below(16) : 4096 / type->block),
          random, random_shape),
        row(random.below(3)), out(w.view.cols) {}
  void call(const Kernels& k) { k.dequantize_row(w.view, row, out.data()); }
  double error() const {
    std::vector<double> expected(w.view.cols);
    reference::dequantize_row(w.view, row, expected.data());
    uint32_t different = 0;
    for (uint32_t c = 0; c < w.view.cols; ++c)
      different += out[c] != static_cast<float>(expected[c]);
    return guarded(different, out);
  }
  static constexpr double tolerance = 0;  // values that differ
  Weights w;
  uint32_t row;
  Guarded<float> out;
};

struct RmsNorm {
  RmsNorm(Random& random, bool random_shape)
      : n(1 + random.below(4)), cols(random_shape ? 1 + random.below(4200) : 4096),
        x(std::size_t{n} * cols), weight(cols), y(x.size()) {
    fill(x, random, 10);
    fill(weight, random);
  }
  void call(const Kernels& k) { k.rms_norm(x.data(), weight.data(), 1e-5f, n, cols, y.data()); }
  double error() const {
    std::vector<double> expected(x.size());
    reference::rms_norm(x.data(), weight.data(), 1e-5f, n, cols, expected.data());
    return guarded(relative_error(y.data(), expected.data(), y.size()), y);
  }
  static constexpr double tolerance = elementwise_tolerance;
  uint32_t n, cols;
  Guarded<float> x, weight, y;
};

struct LayerNorm {
  LayerNorm(Random& random, bool random_shape, bool has_bias)
      : n(1 + random.below(4)), cols(random_shape ? 2 + random.below(4200) : 4096),
        x(std::size_t{n} * cols), weight(cols), bias(has_bias ? cols : 0), y(x.size()) {
    fill(x, random, 10);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += 3;
    fill(weight, random);
    fill(bias, random);
  }
  const float* bias_or_null() const { return bias.size() ? bias.data() : nullptr; }
  void call(const Kernels& k) {
    k.layer_norm(x.data(), weight.data(), bias_or_null(), 1e-5f, n, cols, y.data());
  }
  double error() const {
    std::vector<double> expected(x.size());
    reference::layer_norm(x.data(), weight.data(), bias_or_null(), 1e-5f, n, cols, expected.data());
    return guarded(relative_error(y.data(), expected.data(), y.size()), y);
  }
  static constexpr double tolerance = elementwise_tolerance;
  uint32_t n, cols;
  Guarded<float> x, weight, bias, y;
};

struct Rope {
  Rope(Random& random, bool random_shape, bool neox_)
      : neox(neox_), heads(random_shape ? 1 + random.below(9) : 32),
        rotary(random_shape ? 2 * (1 + random.below(64)) : 128), stride(rotary + random.below(9)),
        x(std::size_t{heads} * stride), y(x.size()), cos(rotary / 2), sin(rotary / 2) {
    fill(x, random);
    for (uint32_t i = 0; i < rotary / 2; ++i) {
      const float angle = random.uniform(-4, 4);
      cos[i] = std::cos(angle);
      sin[i] = std::sin(angle);
    }
  }
  void call(const Kernels& k) {
    std::memcpy(y.data(), x.data(), x.size() * sizeof(float));
    k.rope(y.data(), heads, stride, rotary, cos.data(), sin.data(), neox);
  }
  double error() const {
    std::vector<double> expected(x.data(), x.data() + x.size());
    reference::rope(expected.data(), heads, stride, rotary, cos.data(), sin.data(), neox);
    return guarded(relative_error(y.data(), expected.data(), y.size()), y);
  }
  static constexpr double tolerance = elementwise_tolerance;
  bool neox;
  uint32_t heads, rotary, stride;
  Guarded<float> x, y, cos, sin;
};

// Gates up to 85: the whole range of the exponential.
struct Activate {
  Activate(Random& random, bool random_shape, Activation function)
      : f(function), gate(random_shape ? 1 + random.below(5000) : 11008), up(gate.size()),
        y(gate.size()) {
    const float range = f == Activation::silu ? 85 : 8;
    for (std::size_t i = 0; i < gate.size(); ++i) {
      gate[i] = random.uniform(-range, range);
      up[i] = random.uniform(1, 3);
    }
  }
  void call(const Kernels& k) {
    std::memcpy(y.data(), gate.data(), y.size() * sizeof(float));
    k.activate(f, y.data(), up.data(), y.size());
  }
  double error() const {
    std::vector<double> expected(y.size());
    reference::activate(f, gate.data(), up.data(), y.size(), expected.data());
    if (f != Activation::silu)
      return guarded(relative_error(y.data(), expected.data(), y.size()), y);
    double worst = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const double e = expected[i] == 0 ? 0 : std::fabs(double{y[i]} / expected[i] - 1);
      worst = e <= worst ? worst : e;
    }
    return guarded(worst, y);
  }
  static constexpr double tolerance = activation_tolerance;
  Activation f;
  Guarded<float> gate, up, y;
};

struct Softcap {
  Softcap(Random& random, bool random_shape)
      : x(random_shape ? 1 + random.below(5000) : 32000), y(x.size()) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = random.uniform(-200, 200);
  }
  void call(const Kernels& k) {
    std::memcpy(y.data(), x.data(), x.size() * sizeof(float));
    k.softcap(y.data(), 30, y.size());
  }
  double error() const {
    std::vector<double> expected(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) expected[i] = 30 * std::tanh(double{x[i]} / 30);
    return guarded(relative_error(y.data(), expected.data(), y.size()), y);
  }
  static constexpr double tolerance = elementwise_tolerance;
  Guarded<float> x, y;
};

struct Add {
  Add(Random& random, bool random_shape)
      : x(random_shape ? 1 + random.below(5000) : 4096), y(x.size()), sum(x.size()) {
    fill(x, random);
    fill(y, random);
  }
  void call(const Kernels& k) {
    std::memcpy(sum.data(), x.data(), x.size() * sizeof(float));
    k.add(sum.data(), y.data(), x.size());
  }
  double error() const {
    uint32_t different = 0;
    for (std::size_t i = 0; i < x.size(); ++i) different += sum[i] != x[i] + y[i];
    return guarded(different, sum);
  }
  static constexpr double tolerance = 0;  // values that differ
  Guarded<float> x, y, sum;
};

}  // namespace

void check_quantize(Check& check) { check.run<Quantize>(""); }

void check_matmul(Check& check) {
  for (const Type& type : types) {
    check.run<Product>(std::string(type.name) + " few", &type, false);
    check.run<Product>(std::string(type.name) + " many", &type, true);
  }
}

void check_dequantize_row(Check& check) {
  for (const Type& type : types) check.run<DequantizeRow>(type.name, &type);
}

void check_rms_norm(Check& check) { check.run<RmsNorm>(""); }

void check_layer_norm(Check& check) {
  check.run<LayerNorm>("with bias", true);
  check.run<LayerNorm>("without bias", false);
}

void check_rope(Check& check) {
  check.run<Rope>("neox", true);
  check.run<Rope>("neighbours", false);
}

void check_activate(Check& check) {
  check.run<Activate>("silu", Activation::silu);
  check.run<Activate>("gelu", Activation::gelu);
  check.run<Activate>("relu_squared", Activation::relu_squared);
  check.run<Activate>("clamped_silu", Activation::clamped_silu);
}

void check_softcap(Check& check) { check.run<Softcap>(""); }

void check_add(Check& check) { check.run<Add>(""); }

}  // namespace kvasir::test
