// The operations of recurrent layers on every instruction set against the reference.
#include <doctest/doctest.h>

#include <string>

#include "recurrent_inputs.h"
#include "reference/reference.h"
#include "tolerances.h"

using namespace kvasir;
using test::ConvolutionInputs;
using test::Guarded;
using test::Random;
using test::StateInputs;

namespace {

// Relative L2 error of the state and of the outputs after n tokens.
void check_state(const StateInputs& in) {
  const std::size_t keys = in.s.keys, values = in.s.values;
  std::vector<double> state(keys * values), out(in.out.size());
  reference::advance_state(in.s, state.data(), out.data());
  double off = 0, norm = 0;
  const auto compare = [&](double got, double expected) {
    off += std::pow(got - expected, 2), norm += std::pow(expected, 2);
  };
  for (std::size_t r = 0; r < keys; ++r)
    for (std::size_t c = 0; c < values; ++c) compare(double{in.at(r, c)}, state[r * values + c]);
  CHECK(std::sqrt(off / norm) < test::state_tolerance);
  off = norm = 0;
  for (std::size_t t = 0; t < in.s.n; ++t)
    for (std::size_t c = 0; c < values; ++c)
      compare(double{in.out[t * in.s.out_stride + c]}, out[t * in.s.out_stride + c]);
  CHECK(std::sqrt(off / norm) < test::state_tolerance);
}

}  // namespace

TEST_CASE("sigmoid_gate agrees with the reference and keeps NaN") {
  Random random(31);
  constexpr std::size_t n = 1003;
  for (const Kernels* k : test::all_kernels()) {
    CAPTURE(std::string(k->name));
    Guarded<float> x(n), gate(n);
    test::fill_normal(x, random, 3), test::fill_normal(gate, random, 9);
    std::vector<double> expected(n);
    reference::sigmoid_gate(x.data(), gate.data(), n, expected.data());
    k->sigmoid_gate(x.data(), gate.data(), n);
    CHECK(x.guards_intact());
    CHECK(test::relative_error(x.data(), expected.data(), n) < test::elementwise_tolerance);
    gate[0] = NAN;
    k->sigmoid_gate(x.data(), gate.data(), 1);
    CHECK(std::isnan(x[0]));
  }
}

TEST_CASE("a convolution agrees with the reference and keeps its newest inputs") {
  Random random(32);
  for (const Kernels* k : test::all_kernels())
    for (const uint32_t taps : {2u, 3u, 4u, max_taps})
      for (const uint32_t n : {1u, 2u, 3u, 40u})
        for (const bool biased : {false, true}) {
          CAPTURE(std::string(k->name));
          CAPTURE(taps);
          CAPTURE(n);
          constexpr uint32_t channels = 147;
          ConvolutionInputs in(random, n, taps, channels, biased);
          std::vector<double> expected(in.y.size());
          reference::convolve(in.c, expected.data());
          k->convolve(in.c, 0, 64);
          k->convolve(in.c, 64, channels);
          CHECK(in.intact());
          CHECK(test::relative_error(in.y.data(), expected.data(), in.y.size()) <
                2 * test::elementwise_tolerance);
          for (uint32_t t = 0; t + 1 < taps; ++t)
            for (uint32_t c = 0; c < channels; ++c) {
              const uint32_t at = n + t;  // among the state's inputs and the step's
              REQUIRE(in.to[t * channels + c] == (at < taps - 1
                                                      ? in.from[at * channels + c]
                                                      : in.x[(at - taps + 1) * channels + c]));
            }
        }
}

TEST_CASE("a state agrees with the reference, with the delta rule and without") {
  Random random(33);
  for (const Kernels* k : test::all_kernels())
    for (const bool corrects : {false, true})
      for (const auto& [keys, values] :
           {std::pair(128u, 128u), std::pair(16u, 32u), std::pair(7u, 21u), std::pair(1u, 33u),
            std::pair(256u, 64u), std::pair(66u, 17u)})
        for (const uint32_t n : {1u, 70u}) {
          CAPTURE(std::string(k->name));
          CAPTURE(keys);
          CAPTURE(values);
          CAPTURE(n);
          StateInputs in(random, n, keys, values, corrects);
          for (uint32_t p = 0; p < in.panels(); ++p) k->advance_state(in.s, p, p + 1);
          CHECK(in.intact());
          check_state(in);
        }
}

TEST_CASE("a state's bits do not depend on how its tokens are divided into steps") {
  Random random(34);
  for (const Kernels* k : test::all_kernels())
    for (const bool corrects : {false, true}) {
      CAPTURE(std::string(k->name));
      constexpr uint32_t n = 50, keys = 24, values = 40;
      StateInputs in(random, n, keys, values, corrects);
      k->advance_state(in.s, 0, in.panels());
      const std::vector<float> state(in.to.data(), in.to.data() + in.to.size()),
          out(in.out.data(), in.out.data() + in.out.size());
      Guarded<float> other(in.to.size());
      for (const uint32_t step : {1u, 3u, 49u}) {
        StateStep part = in.s;
        for (uint32_t at = 0; at < n; at += part.n) {
          part.n = std::min(step, n - at);
          part.k = in.k.data() + at * part.key_stride, part.q = in.q.data() + at * part.key_stride;
          part.v = in.v.data() + at * part.value_stride;
          part.decay = in.decay.data() + at * part.rate_stride;
          part.rate = in.rate.data() + at * part.rate_stride;
          part.out = in.out.data() + at * part.out_stride;
          part.from = at == 0 ? in.from.data() : other.data(), part.to = other.data();
          k->advance_state(part, 0, in.panels());
        }
        CHECK(std::memcmp(state.data(), other.data(), state.size() * sizeof(float)) == 0);
        for (uint32_t t = 0; t < n; ++t)
          REQUIRE(std::memcmp(&out[t * in.s.out_stride], &in.out[t * in.s.out_stride],
                              values * sizeof(float)) == 0);
      }
    }
}

TEST_CASE("NaN and infinity in a state or a token reach the last token's output") {
  Random random(35);
  for (const Kernels* k : test::all_kernels())
    for (const bool corrects : {false, true})
      for (const float bad : {NAN, INFINITY}) {
        CAPTURE(std::string(k->name));
        StateInputs in(random, 3, 16, 16, corrects);
        in.v[4] = bad;
        k->advance_state(in.s, 0, in.panels());
        const float last = in.out[2 * in.s.out_stride + 4];
        CHECK_FALSE(std::isfinite(last));
      }
}
