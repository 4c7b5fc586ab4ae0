// Frame of check-kernels: runs a case of a kernel on random shapes, compares it with its oracle and
// times it on a fixed shape.
#pragma once

#include <functional>
#include <string>

#include "support.h"

namespace kvasir::test {

// One table under check. Prints a line for each variant of an entry.
class Check {
 public:
  Check(const Kernels& table, const std::string& name, bool bench)
      : kernels(table), entry_(name), bench_(bench) {}

  // Checks cases of random shapes, then times one of a fixed shape. A Case has
  //   Case(Random&, bool random_shape, Args...)   random inputs, poisoned outputs
  //   void call(const Kernels&)   restores inputs that the kernel overwrites, calls the kernel
  //   double error() const        against the oracle; infinite where a guard was overwritten
  //   static constexpr double tolerance
  template <class Case, class... Args>
  void run(const std::string& variant, Args... args) {
    double error = 0;
    for (uint32_t round = 0; round < rounds; ++round) {
      Random random(round + 1);
      Case one(random, true, args...);
      one.call(kernels);
      const double e = one.error();
      error = e <= error ? error : e;  // a NaN wins
    }
    Random random(99);
    Case fixed(random, false, args...);
    report(variant, error, Case::tolerance, [&](const Kernels& k) { fixed.call(k); });
  }

  bool passed() const { return passed_; }

  const Kernels& kernels;

 private:
  static constexpr uint32_t rounds = 8;
  void report(const std::string& variant, double error, double tolerance,
              const std::function<void(const Kernels&)>& call);

  std::string entry_;
  bool bench_, passed_ = true;
};

constexpr uint32_t usual_dim = 128;

// Checks a case with heads of random sizes, timed with the usual one, and with the longest heads.
template <class Case>
void run_sizes(Check& check) {
  check.run<Case>("", usual_dim);
  check.run<Case>("512", max_head_dim);
}

// `error` where the guards of all arrays are intact, otherwise infinity.
template <class... Arrays>
double guarded(double error, const Arrays&... arrays) {
  return (arrays.guards_intact() && ...) ? error : std::numeric_limits<double>::infinity();
}

inline const Kernels& scalar() { return *cpu_kernels_by_name("scalar"); }

// The checks of the entries: check_matmul.cc, check_recurrent.cc, check_attention.cc,
// check_store.cc.
void check_quantize(Check&);
void check_matmul(Check&);
void check_dequantize_row(Check&);
void check_rms_norm(Check&);
void check_layer_norm(Check&);
void check_rope(Check&);
void check_activate(Check&);
void check_softcap(Check&);
void check_add(Check&);

void check_sigmoid_gate(Check&);
void check_convolve(Check&);
void check_advance_state(Check&);

void check_quantize_queries(Check&);
void check_attend_pages(Check&);
void check_score_tokens(Check&);
void check_raise_by_pages(Check&);
void check_score_keys(Check&);
void check_attend_rows(Check&);
void check_merge(Check&);
void check_finish(Check&);

void check_seal_page(Check&);
void check_unseal_page(Check&);
void check_score_bounds(Check&);
void check_multiply(Check&);
void check_seal_sketch(Check&);
void check_score_sketch(Check&);
void check_raise_by_sketch(Check&);
void check_attention_shares(Check&);
void check_sum_shares(Check&);
void check_sample(Check&);
void check_top_k(Check&);

}  // namespace kvasir::test
