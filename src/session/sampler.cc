#include "session/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/number_text.h"

namespace kvasir {

Status check_sampling_options(const SamplingOptions& o) {
  const auto bad = [](const char* name, float value, const char* range) {
    return Status::error(Code::bad_argument, "%s is %s: use %s", name, number_text(value).c_str(),
                         range);
  };
  if (!(o.temperature >= 0 && o.temperature <= 100))
    return bad("temperature", o.temperature, "0 to 100");
  if (!(o.top_p > 0 && o.top_p <= 1)) return bad("top_p", o.top_p, "more than 0, up to 1");
  if (!(o.min_p >= 0 && o.min_p < 1)) return bad("min_p", o.min_p, "0 up to, not including, 1");
  if (!(o.repetition_penalty >= 0.01f && o.repetition_penalty <= 100))
    return bad("repetition_penalty", o.repetition_penalty, "0.01 to 100");
  return {};
}

Status not_a_number() {
  return Status::error(Code::corrupt,
                       "a logit is NaN: the model file is damaged; verify it or download it again");
}

// Penalises each token of the window once, however often it occurs.
void Sampler::penalise(std::span<float> logits, std::span<const Token> recent) const {
  if (options_.repetition_penalty == 1) return;
  const auto window = recent.last(std::min<std::size_t>(recent.size(), penalty_tokens));
  for (std::size_t i = 0; i < window.size(); ++i) {
    if (std::find(window.begin(), window.begin() + static_cast<std::ptrdiff_t>(i), window[i]) !=
        window.begin() + static_cast<std::ptrdiff_t>(i))
      continue;
    float& logit = logits[static_cast<std::size_t>(window[i])];
    logit = logit > 0 ? logit / options_.repetition_penalty : logit * options_.repetition_penalty;
  }
}

namespace {

// Loops use lanes so that compilers vectorise them: a vocabulary has a hundred thousand entries.
constexpr std::size_t lanes = 16, piece = 64 * lanes;

bool has_nan(std::span<const float> x) {
  uint32_t found[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= x.size(); i += lanes)
    for (std::size_t lane = 0; lane < lanes; ++lane)
      found[lane] |= static_cast<uint32_t>(x[i + lane] != x[i + lane]);
  return std::any_of(found, found + lanes, [](uint32_t f) { return f != 0; }) ||
         std::any_of(x.begin() + static_cast<std::ptrdiff_t>(i), x.end(),
                     [](float f) { return std::isnan(f); });
}

// Index of the first largest element.
std::size_t place_of_largest(std::span<const float> x) {
  std::size_t best_piece = 0;
  float best = -std::numeric_limits<float>::infinity();
  for (std::size_t at = 0; at + piece <= x.size(); at += piece) {
    float largest[lanes];
    std::fill_n(largest, lanes, best);
    for (std::size_t i = at; i < at + piece; i += lanes)
      for (std::size_t lane = 0; lane < lanes; ++lane)
        largest[lane] = x[i + lane] > largest[lane] ? x[i + lane] : largest[lane];
    if (const float score = *std::max_element(largest, largest + lanes); score > best)
      best = score, best_piece = at;
  }
  const auto place = [&](std::size_t begin, std::size_t end) {
    return std::max_element(x.begin() + static_cast<std::ptrdiff_t>(begin),
                            x.begin() + static_cast<std::ptrdiff_t>(end)) -
           x.begin();
  };
  const auto whole = x.size() / piece * piece;
  const auto found =
      static_cast<std::size_t>(place(best_piece, std::min(x.size(), best_piece + piece)));
  if (whole == x.size()) return found;
  const auto last = static_cast<std::size_t>(place(whole, x.size()));
  return x[last] > x[found] ? last : found;
}

}  // namespace

Status Sampler::sample(std::span<float> logits, std::span<const Token> recent, Token* out) {
  if (has_nan(logits)) return not_a_number();
  penalise(logits, recent);
  for (const Token token : suppressed_)
    logits[static_cast<std::size_t>(token)] = -std::numeric_limits<float>::infinity();
  *out = options_.temperature == 0 ? static_cast<Token>(place_of_largest(logits))
                                   : draw(logits, recent.size());
  return {};
}

// Random number, uniform in [0, 1): SplitMix64 of seed and position.
static double uniform(uint64_t seed, uint64_t position) {
  uint64_t x = seed + (position + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

Token Sampler::draw(std::span<const float> logits, uint64_t position) {
  // Subtracts the largest logit before the division. A tiny temperature then yields 0 and
  // -infinity, never NaN.
  const float top = logits[place_of_largest(logits)];
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i)
    candidates_.push_back({(logits[i] - top) / options_.temperature, static_cast<Token>(i)});
  const auto larger = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  if (options_.top_k && options_.top_k < candidates_.size()) {
    const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(options_.top_k);
    std::nth_element(candidates_.begin(), end, candidates_.end(), larger);
    candidates_.erase(end, candidates_.end());
  }
  std::sort(candidates_.begin(), candidates_.end(), larger);
  weights_.clear();
  double total = 0;
  for (const Candidate& c : candidates_)
    total += weights_.emplace_back(std::exp(static_cast<double>(c.logit - candidates_[0].logit)));

  double kept = 0;
  std::size_t n = 0;
  for (; n < weights_.size(); ++n) {
    if (n > 0 && (kept >= static_cast<double>(options_.top_p) * total ||
                  weights_[n] < static_cast<double>(options_.min_p)))
      break;
    kept += weights_[n];
  }
  double at = uniform(options_.seed, position) * kept;
  for (std::size_t i = 0; i + 1 < n; ++i)
    if ((at -= weights_[i]) < 0) return candidates_[i].token;
  return candidates_[n - 1].token;
}

}  // namespace kvasir
