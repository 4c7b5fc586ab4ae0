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

  // logits: [vocabulary], overwritten. recent: the whole sequence. Code::corrupt: a logit is NaN
  // (damaged weights).
  Status sample(std::span<float> logits, std::span<const Token> recent, Token* out);

 private:
  struct Candidate {
    float logit;
    Token token;
  };
  void penalise(std::span<float> logits, std::span<const Token> recent) const;
  Token draw(std::span<const float> logits, uint64_t position);

  SamplingOptions options_;
  std::span<const Token> suppressed_;
  Array<Candidate> candidates_;
  Array<double> weights_;
};

}  // namespace kvasir
