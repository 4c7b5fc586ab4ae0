#include "session/draft_pace.h"

#include <algorithm>
#include <cmath>

namespace kvasir {

// Answers have about ten tokens: few steps decide.
constexpr std::size_t min_steps = 4;
constexpr uint32_t first_pause = 64, max_pause = 4096, alone_every = 32;

template <std::size_t n>
static uint64_t median(std::array<uint64_t, n> values, std::size_t count) {
  count = std::min(count, n);
  if (count == 0) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((count - 1) / 2);
  std::nth_element(values.begin(), middle, values.begin() + static_cast<std::ptrdiff_t>(count));
  return *middle;
}

bool DraftPace::tries() const {
  if (pause_left_ > 0) return false;
  if (alone_count_ < min_steps) return drafted_count_ < alone_count_;
  return since_alone_ < alone_every;
}

void DraftPace::note(uint32_t drafts, uint32_t kept, uint64_t ns) {
  if (drafts == 0) {
    alone_[alone_count_++ % alone_kept] = ns;
    since_alone_ = 0;
    if (pause_left_ > 0 && --pause_left_ == 0) drafted_count_ = 0;
    return;
  }
  drafted_[drafted_count_ % drafted_kept] = ns;
  tokens_[drafted_count_++ % drafted_kept] = kept;
  max_drafts_ = std::max(max_drafts_, drafts);
  ++since_alone_;
  decide();
}

// The mean of few steps is uncertain. Drafts go on where they would pay at its upper bound.
void DraftPace::decide() {
  if (alone_count_ < min_steps || drafted_count_ < min_steps) return;
  const std::size_t n = std::min(drafted_count_, drafted_kept);
  double kept = 0;
  for (std::size_t i = 0; i < n; ++i) kept += tokens_[i];
  kept /= static_cast<double>(n);
  const double doubt = n < drafted_kept ? 0.5 * max_drafts_ / std::sqrt(static_cast<double>(n)) : 0;
  const auto alone = static_cast<double>(alone_ns()), drafted = static_cast<double>(drafted_ns());
  const double most = std::min(kept + doubt, 1.0 + max_drafts_);
  if (most * std::max(alone, 1.0) > std::max(drafted, 1.0)) {
    if (n == drafted_kept) pause_ = first_pause;
    return;
  }
  pause_left_ = pause_;
  pause_ = std::min(2 * pause_, max_pause);
}

uint64_t DraftPace::alone_ns() const { return median(alone_, alone_count_); }
uint64_t DraftPace::drafted_ns() const { return median(drafted_, drafted_count_); }

}  // namespace kvasir
