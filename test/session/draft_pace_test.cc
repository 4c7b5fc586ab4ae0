// Whether drafts pay, for given times and given numbers of kept tokens.
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "session/draft_pace.h"

using kvasir::DraftPace;

namespace {

struct Steps {
  uint32_t drafted = 0, alone = 0;
};

// Steps of so many nanoseconds; those with drafts draft three tokens and keep `kept`.
Steps run(DraftPace* pace, uint32_t steps, uint64_t alone_ns, uint64_t drafted_ns, uint32_t kept) {
  Steps out;
  for (uint32_t i = 0; i < steps; ++i) {
    const bool drafts = pace->tries();
    ++(drafts ? out.drafted : out.alone);
    pace->note(drafts ? 3 : 0, drafts ? kept : 1, drafts ? drafted_ns : alone_ns);
  }
  return out;
}

}  // namespace

TEST_CASE("drafts that cost more than they can keep pause after four steps, then for longer") {
  DraftPace pace;
  CHECK(run(&pace, 8, 10, 41, 4).drafted == 4);
  CHECK(pace.pauses());
  CHECK(pace.alone_ns() == 10);
  CHECK(pace.drafted_ns() == 41);
  CHECK(run(&pace, 64, 10, 41, 4).drafted == 0);
  CHECK(!pace.pauses());
  CHECK(run(&pace, 4, 10, 41, 4).drafted == 4);
  CHECK(run(&pace, 128, 10, 41, 4).drafted == 0);
  CHECK(run(&pace, 4, 10, 41, 4).drafted == 4);
  // In the long run they cost little.
  CHECK(run(&pace, 20'000, 10, 41, 4).drafted < 60);
}

TEST_CASE("drafts that pay go on, and a step in 33 keeps the comparison fresh") {
  DraftPace pace;
  const Steps steps = run(&pace, 4 + 4 + 33 * 10, 10, 20, 3);
  CHECK(!pace.pauses());
  CHECK(steps.alone >= 4 + 9);
  CHECK(steps.alone <= 4 + 11);
}

TEST_CASE("drafts pause when fewer are kept, or when steps with them become slower") {
  DraftPace pace;
  run(&pace, 200, 10, 20, 3);
  CHECK(!pace.pauses());
  run(&pace, 30, 10, 20, 1);
  CHECK(pace.pauses());
  DraftPace slower;
  run(&slower, 200, 10, 20, 3);
  run(&slower, 30, 10, 35, 3);
  CHECK(slower.pauses());
}

TEST_CASE("few steps that keep nothing are not yet a reason to pause") {
  DraftPace pace;
  CHECK(run(&pace, 10, 10, 12, 1).drafted >= 5);
  CHECK(!pace.pauses());
  run(&pace, 40, 10, 12, 1);
  CHECK(pace.pauses());
}

TEST_CASE("single steps that another process delays decide nothing") {
  DraftPace pace;
  for (uint32_t i = 0; i < 400; ++i) {
    const bool drafts = pace.tries();
    const uint64_t delay = i % 5 == 0 ? 1000 : 0;
    pace.note(drafts ? 3 : 0, drafts ? 3 : 1, delay + (drafts ? 20 : 10));
    CHECK(!pace.pauses());
  }
}

TEST_CASE("a clock that stands still is no reason to stop drafts that are kept") {
  DraftPace pace;
  run(&pace, 100, 0, 0, 2);
  CHECK(!pace.pauses());
  run(&pace, 60, 0, 0, 1);
  CHECK(pace.pauses());
}
