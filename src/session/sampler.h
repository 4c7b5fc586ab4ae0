// Logits to the next token.
//
// The order is: repetition penalty (CTRL, arXiv 1909.05858, equation 2), suppressed tokens,
// temperature, top-k, top-p (nucleus, arXiv 1904.09751), min-p (arXiv 2407.01082). Temperature 0
// takes the largest logit, the lowest id among equals. A draw depends only on seed, position in the
// sequence and logits. It is the same on every platform, and after a rewind.
#pragma once

#include <cstdint>
#include <span>

#include "base/memory.h"
#include "base/status.h"
#include "text/tokenizer.h"

namespace kvasir {

struct SamplingOptions {
  float temperature = 0;
  uint32_t top_k = 0;            // 0: off
  float top_p = 1;               // 1: off
  float min_p = 0;               // 0: off
  float repetition_penalty = 1;  // 1: off
  uint64_t seed = 0;
};

// Code::bad_argument names the option that is out of range.
Status check_sampling_options(const SamplingOptions& options);

// Returns Code::corrupt: a logit is NaN.
Status not_a_number();

class Sampler {
 public:
  // newest tokens of the sequence that the penalty covers
  static constexpr uint32_t penalty_tokens = 256;

  // suppressed: tokens that are never sampled; at least one other must exist. They must outlive the
  // sampler.
  explicit Sampler(const SamplingOptions& options, std::span<const Token> suppressed = {})
      : options_(options), suppressed_(suppressed) {}

  // logits: [vocabulary], overwritten and restored. recent: the whole sequence. Code::corrupt: a
  // logit is NaN (damaged weights). Throws std::bad_alloc.
  Status sample(std::span<float> logits, std::span<const Token> recent, Token* out);

 private:
  struct Candidate {
    float logit;  // relative to the largest, over the temperature
    Token token;
    double weight;  // e^logit
  };
  void replace(std::span<float> logits, Token token, float logit);
  void penalise(std::span<float> logits, std::span<const Token> recent);
  void suppress(std::span<float> logits);
  Token draw(std::span<const float> logits, float top, uint64_t position);
  bool has_top_k(std::span<const float> logits) const {
    return options_.top_k > 0 && options_.top_k < logits.size();
  }
  void add_candidate(Token token, float logit, float top);
  void sort_candidates(std::size_t first);
  void find_top_k(std::span<const float> logits, float top);
  void add_band(std::span<const float> logits, float top, uint32_t band);
  double keep(std::span<const float> logits, float top, double total, double enough);

  SamplingOptions options_;
  std::span<const Token> suppressed_;
  Array<Candidate> replaced_;    // tokens with their own logits
  Array<Candidate> candidates_;  // the likeliest first
};

}  // namespace kvasir
