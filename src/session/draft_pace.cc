#include "session/draft_pace.h"

#include <algorithm>
#include <bit>

namespace kvasir {

constexpr uint32_t alone_every = 32;    // at least one step of one token in so many and one
constexpr std::size_t enough = 5;       // costs of a size: before, others follow each step
constexpr uint32_t first_drafts = 2;    // while no cost is known
constexpr double min_slope = 0.02;      // of a token more
constexpr double earned = 0.01;         // credit for a step of one token
constexpr double max_credit = 4;        // steps
constexpr double min_gain = 1.05;       // that is expected of a step with drafts
constexpr double decay = 0.9;           // of what was accepted, a step
constexpr uint32_t forgets_after = 64;  // steps without drafts

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

// Of a few costs the lowest: what is tried again is learned. Of one, its mean with what is
// expected, by the next smaller size that has several, or by a larger one.
double StepCosts::slope_of(std::size_t size) const {
  const Slopes& own = slopes_[size];
  std::array<double, Slopes::kept> values{};
  for (std::size_t i = 0; i < own.count; ++i)
    values[i] = own.newest[(own.next + Slopes::kept - 1 - i) % Slopes::kept];
  if (own.count >= enough) return middle_of(values, own.count);
  double expected = expected_;
  for (std::size_t i = sizes; i-- > 0;)
    if (i != size && slopes_[i].count >= enough && (i < size || expected == expected_)) {
      expected = slope_of(i);
      if (i < size) break;
    }
  if (own.count > 1)
    return *std::min_element(values.begin(),
                             values.begin() + static_cast<std::ptrdiff_t>(own.count));
  return own.count == 1 ? (values[0] + expected) / 2 : expected;
}

double StepCosts::of(uint32_t tokens) const {
  return 1 + std::max(slope_of(size_of(tokens)), min_slope) * (std::max(tokens, 1u) - 1);
}

std::size_t StepCosts::known(uint32_t tokens) const { return slopes_[size_of(tokens)].count; }

bool StepCosts::empty() const {
  return std::all_of(slopes_.begin(), slopes_.end(), [](const Slopes& s) { return s.count == 0; });
}

void StepCosts::forget_oldest() {
  for (Slopes& s : slopes_) s.count -= std::min<std::size_t>(s.count, 1);
}

// What is expected before anything is known weighs as much as three drafts.
std::array<DraftPace::Accepted, DraftPace::kinds> DraftPace::expected_accepted() {
  constexpr std::array<double, kinds> shares = {0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 0.92, 0.6};
  std::array<Accepted, kinds> out{};
  for (std::size_t i = 0; i < kinds; ++i) out[i] = {3 * shares[i], 3};
  return out;
}

std::size_t DraftPace::kind_of(const Offer& offer) {
  if (offer.source == DraftSource::layer) return kinds - 1;
  std::size_t kind = 0;
  for (const uint32_t longer : {2u, 3u, 4u, 6u, 10u, 18u}) kind += offer.match > longer;
  return kind;
}

// The number of drafts by which a token takes the least time.
DraftPace::Choice DraftPace::choose(const Offer& offer) const {
  const BySource& source = by_[index_of(offer.source)];
  const Accepted& a = accepted_[kind_of(offer)];
  const double share = a.accepted / a.decided;
  Choice best{0, min_gain};
  double kept = 1, next = 1;
  const uint32_t most = source.costs.empty() ? std::min(offer.most, first_drafts) : offer.most;
  for (uint32_t drafts = 1; drafts <= most; ++drafts) {
    next *= share, kept += next;
    const double cost = source.costs.of(drafts + 1);
    if (cost - 1 <= source.credit && kept / cost > best.gain) best = {drafts, kept / cost};
  }
  return best;
}

bool DraftPace::measures(DraftSource source) const {
  const bool begins = by_[index_of(source)].costs.known(last_.drafts + 1) < enough;
  return since_alone_ >= (begins ? 1 : alone_every);
}

void DraftPace::note_accepted(const Offer& offer, uint32_t accepted, uint32_t drafts) {
  Accepted& a = accepted_[kind_of(offer)];
  a.accepted = decay * a.accepted + accepted;
  a.decided = decay * a.decided + std::min(accepted + 1, drafts);
}

// The cost of a step with drafts next to one of one token.
static double cost_of(uint64_t drafted_ns, uint64_t alone_ns) {
  return static_cast<double>(std::max<uint64_t>(drafted_ns, 1)) /
         static_cast<double>(std::max<uint64_t>(alone_ns, 1));
}

void DraftPace::note(const Step& step) {
  const bool follows = has_last_ && (last_.drafts == 0) != (step.drafts == 0);
  const Step last = std::exchange(last_, step);
  has_last_ = true;
  if (step.drafts == 0) {
    if (follows)
      by_[index_of(last.offer.source)].costs.note(last.drafts + 1, cost_of(last.ns, step.ns));
    return note_alone(step.ns);
  }
  BySource& source = by_[index_of(step.offer.source)];
  if (follows) source.costs.note(step.drafts + 1, cost_of(step.ns, last.ns));
  note_accepted(step.offer, step.kept - 1, step.drafts);
  source.credit =
      std::min(source.credit + step.kept - source.costs.of(step.drafts + 1), max_credit);
  source.idle = 0;
  ++since_alone_;
  drafted_[drafted_count_++ % drafted_kept] = step.ns;
}

// What was found long ago counts less: a source that does not draft learns nothing of its costs.
void DraftPace::note_alone(uint64_t ns) {
  alone_[alone_count_++ % alone_kept] = ns;
  since_alone_ = 0;
  const std::array<Accepted, kinds> expected = expected_accepted();
  for (std::size_t i = 0; i < draft_sources; ++i) {
    BySource& source = by_[i];
    source.credit = std::min(source.credit + earned, max_credit);
    if (++source.idle % forgets_after != 0) continue;
    source.costs.forget_oldest();
    Accepted& layer = accepted_[kinds - 1];
    if (i == index_of(DraftSource::layer))
      layer = {(layer.accepted + expected.back().accepted) / 2,
               (layer.decided + expected.back().decided) / 2};
  }
}

uint64_t DraftPace::alone_ns() const {
  return middle_of(alone_, std::min(alone_count_, alone_kept));
}
uint64_t DraftPace::drafted_ns() const {
  return middle_of(drafted_, std::min(drafted_count_, drafted_kept));
}

}  // namespace kvasir
