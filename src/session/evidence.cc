#include "session/evidence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace kvasir {
namespace {

constexpr float written = 4;  // weight of c

typedef float Lanes __attribute__((vector_size(16)));

// e[b] += max(0, s[b] - mean)^2. Explicit vectors, because compilers see no loop without a branch.
void add_above(std::span<const float> scores, float mean, float* e) {
  constexpr std::size_t lanes = sizeof(Lanes) / sizeof(float);
  const Lanes zero = {};
  std::size_t b = 0;
  for (; b + lanes <= scores.size(); b += lanes) {
    Lanes s, sum;
    std::memcpy(&s, scores.data() + b, sizeof s);
    std::memcpy(&sum, e + b, sizeof sum);
    s -= mean;
    s = s > zero ? s : zero;
    sum += s * s;
    std::memcpy(e + b, &sum, sizeof sum);
  }
  for (; b < scores.size(); ++b) {
    const float above = std::max(0.0f, scores[b] - mean);
    e[b] += above * above;
  }
}

}  // namespace

Evidence::Evidence(const DocumentScores& scores, std::span<const uint32_t> blocks, ThreadPool* pool)
    : scores_(scores), pool_(pool), variances_(blocks.size()) {
  for (uint32_t count : blocks) blocks_.emplace_back(count);
}

void Evidence::add(std::size_t rows) {
  const std::size_t n = scores_.left.size();
  sums_.assign(rows, 0);
  for (std::size_t i = 0; i < n; ++i) {
    const RowFacts* const facts = scores_.facts_of(i, rows);
    double& variance = variances_[scores_.left[i]];
    for (std::size_t r = 0; r < rows; ++r)
      sums_[r] += facts[r].best, variance += static_cast<double>(facts[r].variance);
  }
  const float others = static_cast<float>(std::max<std::size_t>(n - 1, 1));
  pool_->run(static_cast<uint32_t>(n), [&](uint32_t i, uint32_t) {
    std::vector<float>& e = blocks_[scores_.left[i]];
    const RowFacts* const facts = scores_.facts_of(i, rows);
    for (std::size_t r = 0; r < rows; ++r) {
      const float mean = (sums_[r] - facts[r].best) / others;
      if (!std::isfinite(mean) || !(facts[r].best > mean)) continue;  // no block is above
      add_above({scores_.of_document[i] + r * e.size(), e.size()}, mean, e.data());
    }
  });
}

Evidence::Best Evidence::of(std::size_t document, std::span<const float> overlap) const {
  Best out;
  const std::vector<float>& e = blocks_[document];
  const double all = std::accumulate(variances_.begin(), variances_.end(), 0.0);
  const auto unit = static_cast<float>(all / static_cast<double>(variances_.size()));
  for (uint32_t b = 0; b < e.size() && unit > 0; ++b) {
    const float weight = 1 + written * overlap[b],
                found =
                    (e[b] + (b + 1 < e.size() ? e[b + 1] : 0)) * weight * weight * weight / unit;
    if (found > out.evidence) out = {found, b};
  }
  return out;
}

}  // namespace kvasir
