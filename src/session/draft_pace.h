// Whether drafts pay: steps with drafts against steps of one token, by the clock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvasir {

// Steps of one token and steps with drafts alternate until there are four of each. Drafts go on
// while a step with drafts keeps more tokens than it takes steps of one token. A step of one token
// now and then keeps the comparison fresh. Where drafts do not pay, they pause for 64 steps, then
// for twice as many each time. Times are medians: another process may delay a step.
class DraftPace {
 public:
  // Whether the next step is to have drafts, if it can.
  bool tries() const;
  bool pauses() const { return pause_left_ > 0; }
  // After a step that kept `kept` tokens, of which `drafts` + 1 were computed.
  void note(uint32_t drafts, uint32_t kept, uint64_t ns);

  // Nanoseconds of a step; 0: none yet.
  uint64_t alone_ns() const;
  uint64_t drafted_ns() const;

 private:
  void decide();

  static constexpr std::size_t alone_kept = 8, drafted_kept = 24;  // newest steps of each kind
  std::array<uint64_t, alone_kept> alone_{};                       // nanoseconds
  std::array<uint64_t, drafted_kept> drafted_{};
  std::array<uint32_t, drafted_kept> tokens_{};  // that each of `drafted_` kept
  std::size_t alone_count_ = 0, drafted_count_ = 0;
  uint32_t max_drafts_ = 0;   // of a step
  uint32_t since_alone_ = 0;  // steps with drafts
  uint32_t pause_ = 64, pause_left_ = 0;
};

}  // namespace kvasir
