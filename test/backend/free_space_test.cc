// FreeSpace against a map of every byte.
#include "backend/free_space.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

using kvasir::FreeSpace;

TEST_CASE(
    "parts of a piece of memory do not overlap, are found as long as one is large enough, and "
    "become one again") {
  constexpr std::size_t unit = FreeSpace::alignment, units = 64;
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    FreeSpace space(units * unit);
    std::vector<bool> taken(units);
    std::vector<std::pair<std::size_t, std::size_t>> parts;
    const auto largest = [&] {
      std::size_t most = 0, run = 0;
      for (const bool is_taken : taken) run = is_taken ? 0 : run + 1, most = std::max(most, run);
      return most;
    };
    for (int step = 0; step < 200; ++step) {
      if (parts.empty() || random() % 2) {
        const std::size_t wanted = 1 + random() % 20;
        std::size_t at = 0;
        const bool found = space.take(wanted * unit, &at);
        CHECK(found == (wanted <= largest()));
        if (!found) continue;
        REQUIRE((at % unit == 0 && at / unit + wanted <= units));
        for (std::size_t i = at / unit; i < at / unit + wanted; ++i) {
          REQUIRE_FALSE(taken[i]);
          taken[i] = true;
        }
        parts.emplace_back(at, wanted);
      } else {
        const std::size_t i = random() % parts.size();
        const auto [at, size] = parts[i];
        space.give(at, size * unit);
        for (std::size_t u = at / unit; u < at / unit + size; ++u) taken[u] = false;
        parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    for (const auto& [at, size] : parts) space.give(at, size * unit);
    CHECK(space.whole(units * unit));
  }
  std::size_t at = 0;
  CHECK_FALSE(FreeSpace().take(unit, &at));
}
