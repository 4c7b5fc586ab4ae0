// Whether drafts pay, and how many, for given times and given numbers of accepted drafts.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>

#include "session/draft_pace.h"

using namespace kvasir;

namespace {

struct Steps {
  uint32_t drafted = 0, alone = 0, drafts = 0, accepted = 0, tokens = 0;
  double time = 0;  // in steps of one token

  double gain() const { return tokens / time; }
};

struct Machine {
  double slope = 0.1;  // of a step's time, a token more
  double share = 1;    // of drafts that are accepted, each with this probability
  double noise = 0;    // relative, of a step
  uint64_t alone_ns = 1'000'000;
  DraftPace::Offer offer = {DraftSource::lookup, 15, 32};
  uint32_t state = 1;
  // In place of `share`: all drafts within quotes of so many tokens, and none between them.
  uint32_t quote = 0, gap = 0;
  bool match_says = false;  // the match is as long as the quote so far
  double second = 0;        // more, of any step with drafts
  uint32_t at = 0;          // tokens so far
  // Steps that the first one with a draft of the layer takes more; and of a GPU, the third one of
  // each number of drafts, which records.
  double begins = 0, recording = 0;
  bool begun = false;
  std::array<uint32_t, 16> uses{};

  double random() {
    state = state * 1664525 + 1013904223;
    return (state >> 8) / double{1 << 24};
  }
  bool is_right(uint32_t place) {
    return quote > 0 ? place % (quote + gap) >= gap : random() < share;
  }
  DraftPace::Offer next_offer() const {
    if (!match_says) return offer;
    const uint32_t place = at % (quote + gap), quoted = place - std::min(place, gap);
    return {offer.source, offer.most, std::clamp(quoted, 2u, 32u)};
  }
  double cost(uint32_t drafts) const { return 1 + slope * drafts + (drafts > 0 ? second : 0); }
};

Steps run(DraftPace* pace, uint32_t steps, Machine* m, uint32_t tokens = UINT32_MAX) {
  Steps out;
  for (uint32_t i = 0; i < steps && out.tokens < tokens; ++i) {
    const DraftPace::Offer offer = m->next_offer();
    const uint32_t n = pace->measures(offer.source) ? 0 : pace->choose(offer).drafts;
    uint32_t kept = 1;
    while (kept <= n && m->is_right(m->at + kept - 1)) ++kept;
    const bool begins =
                   n > 0 && offer.source == DraftSource::layer && !std::exchange(m->begun, true),
               records = n > 0 && m->recording > 0 && ++m->uses[n] == 3;
    const double time = m->cost(n) * (1 + m->noise * m->random()) + (begins ? m->begins : 0) +
                        (records ? m->recording : 0);
    ++(n > 0 ? out.drafted : out.alone);
    out.drafts += n, out.accepted += kept - 1, out.tokens += kept, out.time += time;
    if (n == 0 && offer.source == DraftSource::lookup) pace->note_passed(offer, m->is_right(m->at));
    pace->note(
        {offer, n, kept, static_cast<uint64_t>(time * static_cast<double>(m->alone_ns)), records});
    m->at += kept;
  }
  return out;
}

constexpr DraftPace::Offer layer = {DraftSource::layer, 3, 0};

}  // namespace

TEST_CASE("drafts that are never accepted take a hundredth of the time") {
  for (const double slope : {0.05, 0.2, 0.6, 2.0})
    for (const DraftPace::Offer& offer :
         {layer, DraftPace::Offer{DraftSource::lookup, 15, 32}, {DraftSource::lookup, 15, 2}}) {
      CAPTURE(slope);
      CAPTURE(offer.match);
      DraftPace pace;
      Machine m{.slope = slope, .share = 0, .offer = offer};
      CHECK(run(&pace, 300, &m).time <= 300 * 1.02);
      const Steps later = run(&pace, 3000, &m);
      CHECK(later.time < 3000 * 1.012);
      CHECK(later.drafted < 300);
    }
}

TEST_CASE("drafts that are never accepted take a fiftieth of the time of short answers too") {
  for (const double slope : {0.05, 0.1, 0.25, 0.4})
    for (const DraftPace::Offer& offer : {layer, DraftPace::Offer{DraftSource::lookup, 15, 32}}) {
      CAPTURE(slope);
      DraftPace pace;
      Machine m{.slope = slope, .share = 0, .offer = offer};
      for (int answer = 0; answer < 20; ++answer) {
        CAPTURE(answer);
        pace.begin_answer();
        CHECK(run(&pace, 37, &m).time <= 37 * 1.02);
      }
      // What earlier answers have gained is not spent by a later one, but for the layer's savings.
      m.share = 1;
      run(&pace, 200, &m);
      m.share = 0;
      double time = 0;
      for (int answer = 0; answer < 4; ++answer) {
        pace.begin_answer();
        time += run(&pace, 37, &m).time;
        CHECK(time <= (answer + 1) * 37 * 1.02 + (offer.source == DraftSource::layer ? 1.5 : 0));
      }
    }
}

TEST_CASE("drafts that pay follow one another, and a step in 33 keeps the comparison fresh") {
  DraftPace pace;
  Machine m{.slope = 0.1, .share = 0.98};
  run(&pace, 40, &m);
  const Steps steps = run(&pace, 330, &m);
  CHECK(steps.alone >= 9);
  CHECK(steps.alone <= 11);
  CHECK(steps.drafts > 12 * steps.drafted);
  CHECK(steps.gain() > 3.5);
  DraftPace by_layer;
  m.offer = layer, m.slope = 0.3, m.share = 0.8;
  run(&by_layer, 100, &m);
  CHECK(run(&by_layer, 330, &m).alone <= 33);
}

TEST_CASE("the number of drafts follows what a token costs and how many are accepted") {
  const auto drafts_of = [](double slope, double share) {
    DraftPace pace;
    Machine m{.slope = slope, .share = share};
    run(&pace, 200, &m);
    const Steps steps = run(&pace, 1000, &m);
    CHECK(steps.gain() > 0.98);
    return static_cast<double>(steps.drafts) / std::max(steps.drafted, 1u);
  };
  CHECK(drafts_of(0.5, 0.95) < 8);
  CHECK(drafts_of(0.05, 0.95) > 12);
  CHECK(drafts_of(0.2, 0.5) < 4);
}

TEST_CASE("slow steps of many tokens are no reason not to try a few") {
  StepCosts costs(0.35);
  for (int i = 0; i < 2; ++i) costs.note(4, 1 + 3 * 0.9);
  CHECK(costs.of(4) == doctest::Approx(3.7));
  CHECK(costs.of(2) == doctest::Approx(1.35));
  for (int i = 0; i < 9; ++i) costs.note(4, 1.3);
  CHECK(costs.of(2) == doctest::Approx(1.1));
}

TEST_CASE("several drafts are tried where one gains less than they do") {
  // One draft gains 1.5 / 1.5 and is not worth it, three gain 1.875 / 1.6.
  DraftPace pace;
  Machine m{.slope = 0.05, .share = 0.5, .second = 0.45};
  run(&pace, 300, &m);
  const Steps steps = run(&pace, 2000, &m);
  CHECK(steps.drafts >= 2 * steps.drafted);
  CHECK(steps.gain() > 1.12);
}

TEST_CASE("quotes are drafted in full, and what lies between them is not") {
  for (const bool match_says : {false, true})
    for (const uint32_t gap : {3u, 48u})
      for (const double slope : {0.1, 0.25}) {
        CAPTURE(match_says);
        CAPTURE(gap);
        CAPTURE(slope);
        DraftPace pace;
        Machine m{.slope = slope, .quote = 48, .gap = gap, .match_says = match_says};
        run(&pace, 3000, &m, 200);
        const Steps steps = run(&pace, 3000, &m, 1000);
        if (gap == 3) CHECK(steps.gain() > (slope < 0.2 ? 3.2 : 2.2));
        else CHECK(steps.gain() > (slope < 0.2 ? 1.5 : 1.35));
        CHECK(steps.accepted > 0.65 * steps.drafts);
      }
}

TEST_CASE("a quote is drafted a few steps after its begin, however many drafts were wrong before") {
  DraftPace pace;
  Machine m{.slope = 0.25, .share = 0};
  run(&pace, 300, &m);
  m.share = 1;
  CHECK(run(&pace, 100, &m, 48).time < 30);
}

TEST_CASE("a long match begins with more drafts than a short one") {
  DraftPace pace;
  Machine m{.slope = 0.1};
  CHECK(pace.choose({DraftSource::lookup, 15, 32}).drafts > 0);
  CHECK(pace.choose({DraftSource::lookup, 15, 2}).drafts == 0);
  m.share = 0.9, m.offer.match = 5;
  run(&pace, 30, &m);
  CHECK(pace.choose({DraftSource::lookup, 15, 32}).drafts >
        pace.choose({DraftSource::lookup, 15, 3}).drafts);
}

TEST_CASE("drafts stop when fewer are accepted, and when steps with them become slower") {
  DraftPace pace;
  Machine m{.slope = 0.2, .share = 0.95};
  run(&pace, 200, &m);
  m.share = 0;
  CHECK(run(&pace, 20, &m).drafted <= 4);
  CHECK(run(&pace, 100, &m).time < 103);
  DraftPace slower;
  m.share = 0.7, m.offer = layer;
  run(&slower, 200, &m);
  m.slope = 1.5;
  run(&slower, 250, &m);
  CHECK(run(&slower, 500, &m).gain() > 0.98);
}

TEST_CASE("what a source would have had right is learned without a draft") {
  const DraftPace::Offer pairs = {DraftSource::lookup, 15, 2};
  DraftPace pace;
  CHECK(pace.choose(pairs).drafts == 0);
  for (int i = 0; i < 20; ++i) pace.note_passed(pairs, true);
  CHECK(pace.choose(pairs).drafts > 0);
  for (int i = 0; i < 20; ++i) pace.note_passed(pairs, false);
  CHECK(pace.choose(pairs).drafts == 0);
}

TEST_CASE("a machine that other processes disturb does not stop drafts that pay") {
  Steps all;
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    DraftPace pace;
    // 1.3 tokens in the time of one, steps that take up to twice as long, and slow minutes.
    Machine m{.slope = 0.3, .share = 0.8, .noise = 1, .offer = layer, .state = seed};
    for (uint32_t minute = 0; minute < 20; ++minute) {
      m.alone_ns = minute % 3 == 1 ? 3'000'000 : 1'000'000;
      const Steps steps = run(&pace, 40, &m);
      all.drafted += steps.drafted, all.alone += steps.alone;
    }
  }
  CHECK(all.drafted > 4 * all.alone);
}

TEST_CASE("a clock that stands still is no reason to stop drafts that are accepted") {
  DraftPace pace;
  Machine m{.share = 0.9, .alone_ns = 0};
  CHECK(run(&pace, 300, &m).drafted > 250);
  m.share = 0;
  CHECK(run(&pace, 300, &m).drafted < 100);
}

namespace {

// Answers of so many tokens, each by a fork of a session that has a document.
Steps ask_forks(uint32_t forks, uint32_t tokens, const Machine& machine) {
  DraftPace document;
  Steps all;
  for (uint32_t i = 0; i < forks; ++i) {
    DraftPace pace;
    pace.begin_fork(document);
    pace.begin_answer();
    Machine m = machine;
    m.state += i;
    const Steps steps = run(&pace, tokens, &m, tokens);
    pace.end_answer();
    all.drafted += steps.drafted, all.tokens += steps.tokens, all.time += steps.time;
  }
  return all;
}

}  // namespace

TEST_CASE("what one fork has found of drafts, the next ones know") {
  for (const DraftPace::Offer& offer : {layer, DraftPace::Offer{DraftSource::lookup, 15, 32}}) {
    // Each of them would try for itself, and lose a third of a step of ten.
    const Steps wrong = ask_forks(200, 10, {.slope = 0.4, .share = 0, .offer = offer});
    CHECK(wrong.time < 1.015 * wrong.tokens);
    const Steps right = ask_forks(200, 10, {.share = 0.95, .offer = offer});
    CHECK(right.gain() > 1.4);
  }
  // A draft of a layer may cost most of a step: short answers begin with them all the same.
  const Machine small{.slope = 0.6, .share = 0.93, .offer = layer};
  CHECK(ask_forks(200, 10, small).gain() > 1.1);
}

TEST_CASE("forks do not begin with drafts of a layer where that takes more than drafts gain") {
  for (const double begins : {1.0, 5.0, 36.0})
    for (const double share : {0.0, 0.5, 0.9}) {
      CAPTURE(begins);
      CAPTURE(share);
      const Machine m{.slope = 0.3, .share = share, .offer = layer, .begins = begins};
      const Steps forks = ask_forks(300, 10, m);
      CHECK(forks.time < 1.02 * forks.tokens + begins);
      // A long answer pays for it.
      Machine one = m;
      DraftPace pace;
      const Steps answer = run(&pace, 2000, &one);
      if (share == 0.9) CHECK(answer.gain() > 1.3);
    }
}

TEST_CASE("what graphs take to be recorded counts against drafts, and stops them for a while") {
  for (const double recording : {1.0, 10.0, 100.0}) {
    CAPTURE(recording);
    DraftPace pace;
    Machine m{.share = 0.9, .recording = recording};
    const Steps first = run(&pace, 40, &m), later = run(&pace, 300, &m);
    CHECK(first.alone > 2);
    CHECK(later.tokens > 3 * 300);
  }
}
