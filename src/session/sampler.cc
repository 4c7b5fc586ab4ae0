#include "session/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

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

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// Loops use lanes so that compilers vectorise them: a vocabulary has a hundred thousand entries.
constexpr std::size_t lanes = 16, piece = 64 * lanes;

// The index of the first largest element; x.size() where one is NaN.
std::size_t place_of_largest(std::span<const float> x) {
  std::size_t best_piece = 0, i = 0;
  float best = -infinity;
  uint32_t nan[lanes] = {};
  for (; i + piece <= x.size(); i += piece) {
    float largest[lanes];
    std::fill_n(largest, lanes, best);
    for (std::size_t at = i; at < i + piece; at += lanes)
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        const float value = x[at + lane];
        largest[lane] = value > largest[lane] ? value : largest[lane];
        nan[lane] |= static_cast<uint32_t>(value != value);
      }
    if (const float score = *std::max_element(largest, largest + lanes); score > best)
      best = score, best_piece = i;
  }
  if (std::any_of(nan, nan + lanes, [](uint32_t found) { return found != 0; })) return x.size();
  const auto begin = x.begin();
  const auto rest = begin + static_cast<std::ptrdiff_t>(i);
  if (std::any_of(rest, x.end(), [](float value) { return std::isnan(value); })) return x.size();
  const auto first = begin + static_cast<std::ptrdiff_t>(best_piece),
             end = begin + static_cast<std::ptrdiff_t>(std::min(x.size(), best_piece + piece));
  const auto found = std::max_element(first, end), last = std::max_element(rest, x.end());
  return static_cast<std::size_t>((last != x.end() && *last > *found ? last : found) - begin);
}

// out = e^x for x <= 0, within 2^-51; below -700 that of -700. The same on every platform, unlike
// std::exp.
constexpr double least_exponent = -700;
template <std::size_t N>
void find_exponentials(const double (&x)[N], double (&out)[N]) {
  constexpr double log2_e = 0x1.71547652b82fep0, ln2_high = 0x1.62e42feep-1,
                   ln2_low = 0x1.a39ef35793c76p-33;
  constexpr double to_integer = 0x1.8p52;  // a sum with it has an integer in its low bits
  // 1 / k!, k = 12 .. 0
  constexpr double terms[] = {1.0 / 479001600,
                              1.0 / 39916800,
                              1.0 / 3628800,
                              1.0 / 362880,
                              1.0 / 40320,
                              1.0 / 5040,
                              1.0 / 720,
                              1.0 / 120,
                              1.0 / 24,
                              1.0 / 6,
                              0.5,
                              1.0,
                              1.0};
  double power[N], rest[N], sum[N] = {};
  for (std::size_t i = 0; i < N; ++i) {
    const double bounded = x[i] > least_exponent ? x[i] : least_exponent,
                 shifted = bounded * log2_e + to_integer, n = shifted - to_integer;
    power[i] = std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) + 1023) << 52);  // 2^n
    rest[i] = bounded - n * ln2_high - n * ln2_low;
  }
  for (const double term : terms)
    for (std::size_t i = 0; i < N; ++i) sum[i] = sum[i] * rest[i] + term;
  for (std::size_t i = 0; i < N; ++i) out[i] = sum[i] * power[i];
}

double exponential(double x) {
  const double in[1] = {x};
  double out[1];
  find_exponentials(in, out);
  return out[0];
}

// Relative to the largest before the division: a tiny temperature then yields 0 and -infinity,
// never NaN. So does an infinite logit.
float tempered(float logit, float top, float temperature) {
  return logit == top ? 0 : (logit - top) / temperature;
}

// The sum of e^x over all tempered logits x.
double sum_of_weights(std::span<const float> logits, float top, float temperature) {
  constexpr std::size_t doubles = 8;
  double sums[doubles] = {}, x[doubles], weights[doubles];
  std::size_t i = 0;
  for (; i + doubles <= logits.size(); i += doubles) {
    for (std::size_t lane = 0; lane < doubles; ++lane)
      x[lane] = static_cast<double>(tempered(logits[i + lane], top, temperature));
    find_exponentials(x, weights);
    for (std::size_t lane = 0; lane < doubles; ++lane) sums[lane] += weights[lane];
  }
  for (; i < logits.size(); ++i)
    sums[0] += exponential(static_cast<double>(tempered(logits[i], top, temperature)));
  return std::accumulate(sums, sums + doubles, 0.0);
}

// Random number, uniform in [0, 1): SplitMix64 of seed and position.
double uniform(uint64_t seed, uint64_t position) {
  uint64_t x = seed + (position + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

// Candidates are searched and sorted in bands of so many tempered logits, the likeliest first: a
// draw rarely needs the second. The last band has all others.
constexpr float band_width = 4;
constexpr uint32_t bands = 12;

}  // namespace

void Sampler::replace(std::span<float> logits, Token token, float logit) {
  float& place = logits[static_cast<std::size_t>(token)];
  replaced_.push_back({place, token, 0});
  place = logit;
}

// Penalises each token of the window once, however often it occurs.
void Sampler::penalise(std::span<float> logits, std::span<const Token> recent) {
  if (options_.repetition_penalty == 1) return;
  const auto window = recent.last(std::min<std::size_t>(recent.size(), penalty_tokens));
  for (std::size_t i = 0; i < window.size(); ++i) {
    if (std::find(window.begin(), window.begin() + static_cast<std::ptrdiff_t>(i), window[i]) !=
        window.begin() + static_cast<std::ptrdiff_t>(i))
      continue;
    const float logit = logits[static_cast<std::size_t>(window[i])];
    replace(logits, window[i],
            logit > 0 ? logit / options_.repetition_penalty : logit * options_.repetition_penalty);
  }
}

// A NaN stays, so that it is found.
void Sampler::suppress(std::span<float> logits) {
  for (const Token token : suppressed_)
    if (!std::isnan(logits[static_cast<std::size_t>(token)])) replace(logits, token, -infinity);
}

Status Sampler::sample(std::span<float> logits, std::span<const Token> recent, Token* out) {
  replaced_.clear();
  replaced_.reserve(penalty_tokens + suppressed_.size());
  penalise(logits, recent);
  suppress(logits);
  const struct Restore {
    std::span<float> logits;
    const Array<Candidate>& replaced;
    ~Restore() {
      for (std::size_t i = replaced.size(); i-- > 0;)
        logits[static_cast<std::size_t>(replaced[i].token)] = replaced[i].logit;
    }
  } restore{logits, replaced_};
  const std::size_t largest = place_of_largest(logits);
  if (largest == logits.size()) return not_a_number();
  *out = options_.temperature == 0 ? static_cast<Token>(largest)
                                   : draw(logits, logits[largest], recent.size());
  return {};
}

void Sampler::add_candidate(Token token, float logit, float top) {
  const float x = tempered(logit, top, options_.temperature);
  candidates_.push_back({x, token, exponential(static_cast<double>(x))});
}

static constexpr auto is_likelier = [](const auto& a, const auto& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
};

void Sampler::sort_candidates(std::size_t first) {
  std::sort(candidates_.begin() + static_cast<std::ptrdiff_t>(first), candidates_.end(),
            is_likelier);
}

void Sampler::find_top_k(std::span<const float> logits, float top) {
  constexpr std::size_t spare = 1024;    // candidates beyond k before the least are dropped
  const std::size_t k = options_.top_k;  // fewer than the logits
  const auto drop = [&] {
    const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(k);
    std::nth_element(candidates_.begin(), end - 1, candidates_.end(), is_likelier);
    candidates_.erase(end, candidates_.end());
  };
  float least = -infinity;  // of k candidates; later ones of the same logit are less likely
  bool full = false;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (full && logits[i] <= least) continue;
    add_candidate(static_cast<Token>(i), logits[i], top);
    if (candidates_.size() < 2 * k + spare) continue;
    drop();
    full = true;
    least = logits[static_cast<std::size_t>(candidates_.back().token)];
  }
  if (candidates_.size() > k) drop();
  sort_candidates(0);
}

void Sampler::add_band(std::span<const float> logits, float top, uint32_t band) {
  const auto bound = [&](uint32_t b) {
    return top - options_.temperature * band_width * static_cast<float>(b);
  };
  const std::size_t first = candidates_.size();
  const float least = band + 1 == bands ? -infinity : bound(band + 1), most = bound(band);
  for (std::size_t i = 0; i < logits.size(); ++i)
    if (logits[i] >= least && (band == 0 || logits[i] < most))
      add_candidate(static_cast<Token>(i), logits[i], top);
  sort_candidates(first);
}

// Drops the candidates that top-p and min-p exclude, and returns the sum of the weights of others.
// total: of all weights. enough: stops beyond this sum.
double Sampler::keep(std::span<const float> logits, float top, double total, double enough) {
  const auto top_p = static_cast<double>(options_.top_p),
             min_p = static_cast<double>(options_.min_p);
  constexpr double nothing = 1e-300;  // a weight beyond the least exponent
  double kept = 0;
  std::size_t n = 0;
  for (uint32_t band = 0; band < bands; ++band) {
    if (!has_top_k(logits)) add_band(logits, top, band);
    for (; n < candidates_.size(); ++n) {
      const double weight = candidates_[n].weight;
      if (n > 0 && ((top_p < 1 && kept >= top_p * total) || weight < min_p || weight < nothing ||
                    kept > enough)) {
        candidates_.resize(n);
        return kept;
      }
      kept += weight;
    }
    if (has_top_k(logits)) break;
  }
  return kept;
}

Token Sampler::draw(std::span<const float> logits, float top, uint64_t position) {
  candidates_.clear();
  const double part = uniform(options_.seed, position);
  const bool takes_all = options_.top_p == 1 && options_.min_p == 0;
  double total = 0;
  if (has_top_k(logits)) {
    find_top_k(logits, top);
    for (const Candidate& c : candidates_) total += c.weight;
  } else if (options_.top_p < 1 || takes_all) {
    total = sum_of_weights(logits, top, options_.temperature);
  }
  const double enough = takes_all ? part * total : std::numeric_limits<double>::infinity(),
               kept = keep(logits, top, total, enough);
  double at = takes_all ? enough : part * kept;
  for (std::size_t i = 0; i + 1 < candidates_.size(); ++i)
    if ((at -= candidates_[i].weight) < 0) return candidates_[i].token;
  return candidates_.back().token;
}

}  // namespace kvasir
