// check-kernels: recurrent layers.
#include "check_kernels.h"
#include "recurrent_inputs.h"
#include "reference/reference.h"
#include "tolerances.h"

namespace kvasir::test {
namespace {

struct SigmoidGate {
  SigmoidGate(Random& random, bool random_shape)
      : n(random_shape ? 1 + random.below(3000) : 4096), x(n), gate(n), y(n), expected(n) {
    fill_normal(x, random), fill_normal(gate, random, 5);
    reference::sigmoid_gate(x.data(), gate.data(), n, expected.data());
  }
  void call(const Kernels& k) {
    std::memcpy(y.data(), x.data(), n * sizeof(float));
    k.sigmoid_gate(y.data(), gate.data(), n);
  }
  double error() const { return guarded(relative_error(y.data(), expected.data(), n), y); }
  static constexpr double tolerance = elementwise_tolerance;
  std::size_t n;
  Guarded<float> x, gate, y;
  std::vector<double> expected;
};

struct Convolve {
  Convolve(Random& random, bool random_shape)
      : in(random, random_shape ? 1 + random.below(20) : 64,
           random_shape ? 2 + random.below(max_taps - 1) : 4,
           random_shape ? 1 + random.below(300) : 256, true),
        expected(in.y.size()) {
    reference::convolve(in.c, expected.data());
  }
  void call(const Kernels& k) { k.convolve(in.c, 0, in.c.channels); }
  double error() const {
    return guarded(relative_error(in.y.data(), expected.data(), in.y.size()), in.y, in.to);
  }
  static constexpr double tolerance = 2 * elementwise_tolerance;
  ConvolutionInputs in;
  std::vector<double> expected;
};

struct AdvanceState {
  AdvanceState(Random& random, bool random_shape, bool corrects, uint32_t n)
      : in(random, random_shape ? 1 + random.below(40) : n,
           random_shape ? 1 + random.below(150) : usual_dim,
           random_shape ? 1 + random.below(150) : usual_dim, corrects),
        state(std::size_t{in.s.keys} * in.s.values), out(in.out.size()) {
    reference::advance_state(in.s, state.data(), out.data());
  }
  void call(const Kernels& k) { k.advance_state(in.s, 0, in.panels()); }
  double error() const {
    double off = 0, norm = 0;
    const auto compare = [&](float got, double expected) {
      off += std::pow(double{got} - expected, 2), norm += std::pow(expected, 2);
    };
    for (std::size_t r = 0; r < in.s.keys; ++r)
      for (std::size_t c = 0; c < in.s.values; ++c)
        compare(in.at(r, c), state[r * in.s.values + c]);
    for (std::size_t t = 0; t < in.s.n; ++t)
      for (std::size_t c = 0; c < in.s.values; ++c)
        compare(in.out[t * in.s.out_stride + c], out[t * in.s.out_stride + c]);
    return guarded(std::sqrt(off / norm), in.to, in.out);
  }
  static constexpr double tolerance = state_tolerance;
  StateInputs in;
  std::vector<double> state, out;
};

}  // namespace

void check_sigmoid_gate(Check& check) { check.run<SigmoidGate>(""); }
void check_convolve(Check& check) { check.run<Convolve>(""); }
void check_advance_state(Check& check) {
  check.run<AdvanceState>("delta 1", true, 1u);
  check.run<AdvanceState>("delta 64", true, 64u);
  check.run<AdvanceState>("mamba 1", false, 1u);
  check.run<AdvanceState>("mamba 64", false, 64u);
}

}  // namespace kvasir::test
