// Whether drafts pay, and how many: by the clock, and by how often drafts are accepted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvasir {

enum class DraftSource : uint8_t { lookup, layer };  // session/lookup.h, the MTP layer
constexpr std::size_t draft_sources = 2;

// What a step of several tokens takes, in steps of one token: 1 + slope * (tokens - 1). Slopes are
// kept by size, and each is the median of the newest ones: another process may delay a step. A size
// that was not tried is expected to take less a token than a smaller one: weights are read once.
// Slow steps of a larger size say little of it.
class StepCosts {
 public:
  explicit StepCosts(double expected) : expected_(expected) {}

  void note(uint32_t tokens, double cost);
  double of(uint32_t tokens) const;
  std::size_t known(uint32_t tokens) const;  // costs of steps of this size
  void forget_oldest();                      // of each size

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
// a while makes both slow. Drafts have a credit, in steps of one token. A step with drafts takes
// what it costs from it and adds the tokens that it keeps. A step is drafted where it is expected
// to pay, and where the credit covers its loss. A step of one token adds little, and more where a
// draft would have been right. So drafts that are never accepted take a hundredth of the time, and
// first_credit of an answer: short answers have what earlier ones left. The layer has savings
// besides, half of what its drafts have gained, which short answers spend too.
//
// Some steps take longer once: the first ones that a GPU records a graph in, which count in full,
// and the MTP layer's first draft of a session, which may need a sketch and memory. It is left out
// where earlier ones have taken longer than the layer's allowance: a 200th of the time, and half of
// what its drafts have gained.
//
// What a session has found, its forks know, and it knows what they have found.
//
// Whether a draft is right depends on the length of its match, and on the draft before: answers
// quote in runs. So shares of right drafts are kept for those that follow a right one, and others.
class DraftPace {
 public:
  static constexpr double first_credit = 0.36;

  // What a source has for the next step: at most so many drafts. match: LookupMatch::length.
  struct Offer {
    DraftSource source = DraftSource::lookup;
    uint32_t most = 0, match = 0;
  };
  struct Choice {
    uint32_t drafts = 0;  // 0: none
    double gain = 0;      // expected tokens more than newest steps would keep in its time
  };
  struct Step {
    Offer offer;          // if it had drafts
    uint32_t drafts = 0;  // 0: a step of one token
    uint32_t kept = 1;    // tokens
    uint64_t ns = 0;
    bool records = false;  // it took longer than the next ones will
  };

  DraftPace();  // throws std::bad_alloc
  // Of a fork of the session that has `of`.
  void begin_fork(const DraftPace& of);
  void begin_answer();
  void end_answer();

  Choice choose(const Offer& offer) const;
  // Whether the next step is to have one token, as a measure.
  bool measures(DraftSource source) const;
  void note(const Step& step);
  // After a step of one token: whether the first draft of an offer would have been accepted.
  void note_passed(const Offer& offer, bool accepted);
  // The text has nothing to offer.
  void note_no_match() { right_[index_of(DraftSource::lookup)] = false; }

  // Medians of the newest steps in nanoseconds; 0: none yet.
  uint64_t alone_ns() const;
  uint64_t drafted_ns() const;
  double credit() const { return credit_; }

 private:
  explicit DraftPace(std::nullptr_t) {}  // of Shared
  // Of drafts with similar matches; older ones weigh less.
  struct Accepted {
    double accepted, decided;
  };
  static constexpr std::size_t matches = 7;  // kinds of them, by length
  // Each after a wrong draft and after a right one; the layer's first drafts of a step, and its
  // later ones.
  static constexpr std::size_t kinds = 2 * matches + 2;
  struct BySource {
    StepCosts costs;
    uint32_t idle = 0;  // steps of one token since its last draft
  };
  static std::size_t index_of(DraftSource source) { return static_cast<std::size_t>(source); }
  // Of draft i of a step, after drafts that were right.
  std::size_t kind_of(const Offer& offer, uint32_t i) const;
  void note_accepted(const Offer& offer, uint32_t accepted, uint32_t drafts);
  void note_alone(uint64_t ns);
  void note_rate(double kept, double time);
  void note_longer(const Step& step);
  void note_gain(const Step& step, double cost);

  std::array<BySource, draft_sources> by_ = {BySource{StepCosts(0.25)}, BySource{StepCosts(0.35)}};
  std::array<Accepted, kinds> accepted_ = expected_accepted();
  static std::array<Accepted, kinds> expected_accepted();
  std::array<bool, draft_sources> right_{};  // whether the newest draft was
  double credit_ = first_credit;
  double savings_ = 0;         // of the layer
  bool layer_drafts_ = false;  // it has drafted
  // What its first draft of a session takes longer, in steps of one token, and what that may be.
  double layer_begins_ = 0, layer_allowance_ = 0;
  bool layer_begun_ = false;  // in this session
  // Of the newest steps, older ones weigh less: tokens that they kept, and their time in steps of
  // one token.
  double kept_ = 0, time_ = 0;

  Step last_;  // the newest step
  bool has_last_ = false;
  uint32_t since_alone_ = 0;                                       // steps with drafts
  static constexpr std::size_t alone_kept = 8, drafted_kept = 24;  // newest steps of each kind
  std::array<uint64_t, alone_kept> alone_{};                       // nanoseconds
  std::array<uint64_t, drafted_kept> drafted_{};
  std::size_t alone_count_ = 0, drafted_count_ = 0;

  struct Shared;  // by a session and its forks
  std::shared_ptr<Shared> shared_;
};

}  // namespace kvasir
