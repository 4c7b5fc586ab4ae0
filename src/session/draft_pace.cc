#include "session/draft_pace.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <utility>

namespace kvasir {

constexpr uint32_t alone_every = 32;   // at least one step of one token in so many and one
constexpr std::size_t few_costs = 2;   // of a size: before, a step of one token follows each step
constexpr std::size_t enough = 5;      // costs of a size: before, one follows every fourth step
constexpr double min_slope = 0.02;     // of a token more
constexpr double larger_size = 0.75;   // a slope that was not noted, of that of a smaller size
constexpr double earned = 0.006;       // credit for a step of one token
constexpr double earned_right = 0.3;   // for one whose first draft would have been right
constexpr double earned_layer = 0.07;  // for one without a draft of a layer that is mostly right
constexpr double saved = 0.5;          // of what the layer gains
constexpr double max_savings = 1.5;    // steps
constexpr double max_credit = 4;       // steps
constexpr double allowed = 0.005, allowed_of_gain = 0.5;  // for the layer's first draft
constexpr double always_allowed = 0.5, max_owed = 100;
constexpr double min_gain = 1.05;        // that is expected of a step with drafts
constexpr double decay = 0.95;           // of what was accepted, a draft
constexpr double expected_weight = 3;    // drafts that count as much as what is expected of all
constexpr double rate_decay = 0.97;      // of tokens and times, a step
constexpr double rate_weight = 5;        // steps that a session begins with
constexpr uint32_t forgets_after = 128;  // steps without drafts

template <std::size_t n, class T>
static T middle_of(std::array<T, n> values, std::size_t count) {
  if (count == 0) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((count - 1) / 2);
  std::nth_element(values.begin(), middle, values.begin() + static_cast<std::ptrdiff_t>(count));
  return *middle;
}

static std::size_t size_of(uint32_t tokens) {
  const auto bits = static_cast<std::size_t>(std::bit_width(std::max(tokens, 2u) - 1));
  return std::min<std::size_t>(bits, 4) - 1;
}

void StepCosts::note(uint32_t tokens, double cost) {
  Slopes& s = slopes_[size_of(tokens)];
  s.newest[s.next] = (cost - 1) / std::max(tokens - 1, 1u);
  s.next = (s.next + 1) % Slopes::kept;
  s.count = std::min(s.count + 1, Slopes::kept);
}

// Of two costs the lower one: what is tried again is learned. Of one, a mean with what is expected,
// or the latter if that is lower: a first step may load what later ones have.
double StepCosts::slope_of(std::size_t size) const {
  const Slopes& own = slopes_[size];
  std::array<double, Slopes::kept> values{};
  for (std::size_t i = 0; i < own.count; ++i)
    values[i] = own.newest[(own.next + Slopes::kept - 1 - i) % Slopes::kept];
  if (own.count > 1) return middle_of(values, own.count);
  double expected = expected_;
  const auto is_known = [&](std::size_t i) { return slopes_[i].count > 1; };
  std::size_t other = size;
  while (other > 0 && !is_known(other)) --other;
  if (is_known(other)) {
    expected = larger_size * slope_of(other);
  } else {
    while (++other < sizes && !is_known(other)) {
    }
    if (other < sizes) expected = std::min(expected, slope_of(other));
  }
  return own.count == 1 ? std::min((2 * values[0] + expected) / 3, expected) : expected;
}

double StepCosts::of(uint32_t tokens) const {
  return 1 + std::max(slope_of(size_of(tokens)), min_slope) * (std::max(tokens, 1u) - 1);
}

std::size_t StepCosts::known(uint32_t tokens) const { return slopes_[size_of(tokens)].count; }

void StepCosts::forget_oldest() {
  for (Slopes& s : slopes_) s.count -= std::min<std::size_t>(s.count, 1);
}

std::array<DraftPace::Accepted, DraftPace::kinds> DraftPace::expected_accepted() {
  constexpr std::array<double, kinds> shares = {
      0.2, 0.4,  0.3,  0.5,  0.4,  0.6,  0.55, 0.7,  // matches of 2 to 6 tokens
      0.7, 0.85, 0.85, 0.92, 0.92, 0.95,             // of 7, 11, 19 tokens and more
      0.6, 0.6};                                     // the layer's first drafts, its later ones
  std::array<Accepted, kinds> out{};
  for (std::size_t i = 0; i < kinds; ++i) out[i] = {expected_weight * shares[i], expected_weight};
  return out;
}

// A match is longer by the drafts that were right.
std::size_t DraftPace::kind_of(const Offer& offer, uint32_t i) const {
  if (offer.source == DraftSource::layer) return 2 * matches + (i > 0 ? 1 : 0);
  std::size_t kind = 0;
  for (const uint32_t longer : {2u, 3u, 4u, 6u, 10u, 18u}) kind += offer.match + i > longer;
  return 2 * kind + (i > 0 || right_[index_of(offer.source)] ? 1 : 0);
}

// The number of drafts with most tokens for its time. What that time is worth is how fast newest
// steps are: after a quote it may pay to have no drafts until the next one begins.
DraftPace::Choice DraftPace::choose(const Offer& offer) const {
  if (offer.source == DraftSource::layer && !layer_begun_ &&
      layer_begins_ > std::max(layer_allowance_, always_allowed))
    return {};
  const BySource& source = by_[index_of(offer.source)];
  const double credit = offer.source == DraftSource::layer ? std::max(credit_, savings_) : credit_;
  const double rate = std::max((kept_ + rate_weight) / (time_ + rate_weight), 1.0);
  Choice best;
  double kept = 1, next = 1;
  for (uint32_t drafts = 1; drafts <= offer.most; ++drafts) {
    const Accepted& a = accepted_[kind_of(offer, drafts - 1)];
    next *= a.accepted / a.decided, kept += next;
    const double cost = source.costs.of(drafts + 1), gain = kept - 1 - rate * (cost - 1);
    if (cost - 1 <= credit && kept > min_gain * cost && gain > best.gain) best = {drafts, gain};
  }
  return best;
}

bool DraftPace::measures(DraftSource source) const {
  const std::size_t known = by_[index_of(source)].costs.known(last_.drafts + 1);
  return since_alone_ >= (known < few_costs ? 1 : known < enough ? 4 : alone_every);
}

void DraftPace::note_accepted(const Offer& offer, uint32_t accepted, uint32_t drafts) {
  for (uint32_t i = 0; i < std::min(accepted + 1, drafts); ++i) {
    Accepted& a = accepted_[kind_of(offer, i)];
    a.accepted = decay * a.accepted + (i < accepted ? 1 : 0);
    a.decided = decay * a.decided + 1;
  }
  right_[index_of(offer.source)] = accepted >= drafts;
}

// Of a step with drafts.
void DraftPace::note_gain(const Step& step, double cost) {
  const double gain = step.kept - cost;
  credit_ = std::min(credit_ + gain, max_credit);
  if (step.offer.source != DraftSource::layer) return;
  savings_ = std::clamp(savings_ + (gain > 0 ? saved * gain : gain), -max_savings, max_savings);
}

void DraftPace::note_passed(const Offer& offer, bool accepted) {
  note_accepted(offer, accepted, 1);
  if (accepted) credit_ = std::min(credit_ + earned_right, max_credit);
}

// The cost of a step with drafts next to one of one token.
static double cost_of(uint64_t drafted_ns, uint64_t alone_ns) {
  return static_cast<double>(std::max<uint64_t>(drafted_ns, 1)) /
         static_cast<double>(std::max<uint64_t>(alone_ns, 1));
}

// Such a step says nothing of the next ones.
void DraftPace::note_longer(const Step& step) {
  if (step.drafts == 0) return;
  const double cost = by_[index_of(step.offer.source)].costs.of(step.drafts + 1),
               longer = std::max(cost_of(step.ns, alone_ns()) - cost, 0.0);
  note_accepted(step.offer, step.kept - 1, step.drafts);
  note_gain(step, cost);
  if (alone_count_ == 0) return;  // nothing to compare it with
  if (step.offer.source == DraftSource::layer && !layer_begun_) {
    layer_begins_ = longer;
    layer_allowance_ = std::max(layer_allowance_ - longer, -max_owed);
  } else {
    credit_ = std::max(credit_ - longer, -max_credit);
  }
}

void DraftPace::note(const Step& step) {
  const bool by_layer = step.drafts > 0 && step.offer.source == DraftSource::layer;
  if (step.records || (by_layer && !layer_begun_)) {
    note_longer(step);
    layer_begun_ |= by_layer, layer_drafts_ |= by_layer;
    has_last_ = false;
    return;
  }
  const bool follows = has_last_ && (last_.drafts == 0) != (step.drafts == 0);
  const Step last = std::exchange(last_, step);
  has_last_ = true;
  if (step.drafts == 0) {
    if (follows)
      by_[index_of(last.offer.source)].costs.note(last.drafts + 1, cost_of(last.ns, step.ns));
    return note_alone(step.ns);
  }
  BySource& source = by_[index_of(step.offer.source)];
  double cost = source.costs.of(step.drafts + 1);
  if (follows) {
    const double measured = cost_of(step.ns, last.ns);
    source.costs.note(step.drafts + 1, measured);
    cost = std::clamp(measured, 1.0, 2 * cost - 1);
  }
  note_accepted(step.offer, step.kept - 1, step.drafts);
  note_gain(step, cost);
  if (by_layer) layer_allowance_ += allowed_of_gain * std::max(step.kept - cost, 0.0);
  layer_allowance_ = std::min(layer_allowance_, max_owed);
  note_rate(step.kept, source.costs.of(step.drafts + 1));
  source.idle = 0;
  ++since_alone_;
  drafted_[drafted_count_++ % drafted_kept] = step.ns;
}

void DraftPace::note_rate(double kept, double time) {
  kept_ = rate_decay * kept_ + kept;
  time_ = rate_decay * time_ + time;
}

// What was found long ago counts less: a source that does not draft learns nothing of its costs.
void DraftPace::note_alone(uint64_t ns) {
  alone_[alone_count_++ % alone_kept] = ns;
  since_alone_ = 0;
  const Accepted& layer = accepted_[kind_of({DraftSource::layer, 1, 0}, 0)];
  const double right = layer_drafts_ ? std::max(layer.accepted / layer.decided - 0.5, 0.0) : 0;
  credit_ = std::min(credit_ + earned + earned_layer * right, max_credit);
  layer_allowance_ = std::min(layer_allowance_ + allowed, max_owed);
  note_rate(1, 1);
  const std::array<Accepted, kinds> expected = expected_accepted();
  for (std::size_t i = 0; i < draft_sources; ++i) {
    if (++by_[i].idle % forgets_after != 0) continue;
    by_[i].costs.forget_oldest();
    if (i != index_of(DraftSource::layer)) continue;
    for (std::size_t kind = 2 * matches; kind < kinds; ++kind) {
      Accepted& a = accepted_[kind];
      a = {(a.accepted + expected[kind].accepted) / 2, (a.decided + expected[kind].decided) / 2};
    }
  }
}

struct DraftPace::Shared {
  std::mutex mutex;
  bool any = false;
  DraftPace newest{nullptr};
};

DraftPace::DraftPace() : shared_(std::make_shared<Shared>()) {}

void DraftPace::begin_fork(const DraftPace& of) {
  *this = of;
  layer_begun_ = false;
}

void DraftPace::begin_answer() {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    if (shared_->any) {
      const auto shared = shared_;
      const bool begun = layer_begun_;
      *this = shared->newest;
      shared_ = shared, layer_begun_ = begun;
    }
  }
  credit_ = std::min(credit_, first_credit);
  right_ = {};
  kept_ = time_ = 0;
  has_last_ = false, since_alone_ = 0;
}

void DraftPace::end_answer() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  const auto shared = shared_;
  shared->any = true, shared->newest = *this;
  shared->newest.shared_.reset();  // it would keep itself
}

uint64_t DraftPace::alone_ns() const {
  return middle_of(alone_, std::min(alone_count_, alone_kept));
}
uint64_t DraftPace::drafted_ns() const {
  return middle_of(drafted_, std::min(drafted_count_, drafted_kept));
}

}  // namespace kvasir
