// Whether drafts pay, and how many: by the clock, and by how often drafts are accepted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvasir {

enum class DraftSource : uint8_t { lookup, layer };  // session/lookup.h, the MTP layer
constexpr std::size_t draft_sources = 2;

// What a step of several tokens takes, in steps of one token: 1 + slope * (tokens - 1). Slopes are
// kept by size, and each is the median of the newest ones: another process may delay a step.
class StepCosts {
 public:
  explicit StepCosts(double expected) : expected_(expected) {}

  void note(uint32_t tokens, double cost);
  double of(uint32_t tokens) const;
  std::size_t known(uint32_t tokens) const;  // costs of steps of this size
  bool empty() const;
  void forget_oldest();  // of each size

 private:
  static constexpr std::size_t sizes = 4;  // 2, 3 to 4, 5 to 8, 9 and more tokens
  struct Slopes {
    static constexpr std::size_t kept = 9;
    std::array<double, kept> newest{};
    std::size_t count = 0, next = 0;
  };
  double slope_of(std::size_t size) const;

  std::array<Slopes, sizes> slopes_;
  double expected_;  // a slope where none was noted
};

// A step with drafts is compared with its neighbours of one token: what makes the machine slow for
// a while makes both slow. A source of drafts has a credit, in steps of one token. A step with
// drafts takes what it costs from it and adds the tokens that it keeps. A step is drafted where it
// is expected to pay, and where the credit covers its loss. A step of one token adds a hundredth.
// So drafts that are never accepted cost a hundredth of the time, and what a session began with.
class DraftPace {
 public:
  // What a source has for the next step: at most so many drafts. match: LookupMatch::length.
  struct Offer {
    DraftSource source = DraftSource::lookup;
    uint32_t most = 0, match = 0;
  };
  struct Choice {
    uint32_t drafts = 0;  // 0: none
    double gain = 1;      // tokens in the time of a step of one
  };
  struct Step {
    Offer offer;          // if it had drafts
    uint32_t drafts = 0;  // 0: a step of one token
    uint32_t kept = 1;    // tokens
    uint64_t ns = 0;
  };

  Choice choose(const Offer& offer) const;
  // Whether the next step is to have one token, as a measure.
  bool measures(DraftSource source) const;
  void note(const Step& step);
  // After a step of one token: whether the first draft of an offer would have been accepted.
  void note_passed(const Offer& offer, bool accepted) { note_accepted(offer, accepted, 1); }

  // Medians of the newest steps in nanoseconds; 0: none yet.
  uint64_t alone_ns() const;
  uint64_t drafted_ns() const;
  double credit(DraftSource source) const { return by_[index_of(source)].credit; }

 private:
  // Of drafts after matches of similar lengths; older ones weigh less.
  struct Accepted {
    double accepted, decided;
  };
  static constexpr std::size_t kinds = 8;  // seven of matches, and the layer's
  struct BySource {
    StepCosts costs;
    double credit;
    uint32_t idle = 0;  // steps of one token since its last draft
  };
  static std::size_t index_of(DraftSource source) { return static_cast<std::size_t>(source); }
  static std::size_t kind_of(const Offer& offer);
  void note_accepted(const Offer& offer, uint32_t accepted, uint32_t drafts);
  void note_alone(uint64_t ns);

  std::array<BySource, draft_sources> by_ = {BySource{StepCosts(0.25), 1},
                                             BySource{StepCosts(0.35), 3}};
  std::array<Accepted, kinds> accepted_ = expected_accepted();
  static std::array<Accepted, kinds> expected_accepted();

  Step last_;  // the newest step
  bool has_last_ = false;
  uint32_t since_alone_ = 0;                                       // steps with drafts
  static constexpr std::size_t alone_kept = 8, drafted_kept = 24;  // newest steps of each kind
  std::array<uint64_t, alone_kept> alone_{};                       // nanoseconds
  std::array<uint64_t, drafted_kept> drafted_{};
  std::size_t alone_count_ = 0, drafted_count_ = 0;
};

}  // namespace kvasir
