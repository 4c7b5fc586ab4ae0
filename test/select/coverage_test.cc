// How many blocks a coverage takes, against the definition.
#include <algorithm>
#include <numeric>

#include "helpers.h"
#include "select/blocks.h"

using namespace kvasir;
using test::Asked;
using test::random_store;

TEST_CASE("a coverage takes the fewest best blocks whose shares leave no more unread than it allows, within a quarter and four times the budget") {
  const PageStore store = random_store(64, 40, 2, 64);
  const Asked asked(store, 1, 3, 5);
  std::mt19937 random(3);
  std::exponential_distribution<float> exponential;
  for (uint32_t heads : {1u, 3u})
    for (float coverage : {0.1f, 0.5f, 0.9f, 0.999f})
      for (uint64_t budget : {16u, 160u, 4000u}) {
        SelectorQuery query = asked.query(budget, true);
        query.coverage = coverage;
        const BlockRange range{16, 2, 80, 80};
        SelectorScratch scratch;
        std::vector<float> shares(78);
        for (float& s : shares) s = std::pow(exponential(random), 4.0f);
        const float sum = std::accumulate(shares.begin(), shares.end(), 0.0f);
        for (float& s : shares) s *= 0.8f * static_cast<float>(heads) / sum;  // sinks and window have the rest
        scratch.scores.assign(2, 100.0f);
        scratch.scores.insert(scratch.scores.end(), shares.begin(), shares.end());
        Selection out;
        begin_selection(1, &out);
        cover_list(query, range, 0, heads, &scratch, &out);
        const auto count = static_cast<uint32_t>(out.tokens / 16);
        double read = 0;
        for (std::size_t i = 0; i < out.lists[0].size(); ++i)
          for (uint32_t half : {0u, 1u})
            if (out.lists[0][i].tokens >> 16 * half & 1) read += static_cast<double>(shares[out.page_numbers[0][i] * 2 + half - 2]);

        std::sort(shares.rbegin(), shares.rend());
        const auto unread = [&](uint32_t n) { return std::accumulate(shares.begin() + n, shares.end(), 0.0); };
        const auto allowed = (1 - static_cast<double>(coverage)) * heads;
        const auto least = static_cast<uint32_t>(std::min<uint64_t>(78, (budget / 4 + 15) / 16)), most = static_cast<uint32_t>(std::min<uint64_t>(78, (budget * 4 + 15) / 16));
        CAPTURE(count);
        CHECK(count >= least);
        CHECK(count <= most);
        if (count < most) CHECK(unread(count) <= allowed + 1e-5);
        CHECK(read == doctest::Approx(unread(0) - unread(count)));
        if (count > least) CHECK(unread(count - 1) > allowed - 1e-5);
      }
}
