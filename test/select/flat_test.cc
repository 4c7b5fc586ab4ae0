// `flat` and `dipr` over an exact scan, against their equations.
#include <algorithm>

#include "helpers.h"

using namespace kvasir;
using test::chosen_tokens;
using test::QueryCase;
using test::random_store;

namespace {

// No token that was left out counts more than one that was chosen, beyond what rounding makes of
// it.
template <class F>
void check_best(const QueryCase& given, const std::set<uint32_t>& chosen, double rounding,
                F&& counts) {
  double lowest = 1e300, highest = -1e300;
  for (uint32_t t = given.first(); t < given.tokens(); ++t) {
    if (chosen.count(t)) {
      lowest = std::min(lowest, counts(t));
    } else {
      highest = std::max(highest, counts(t));
    }
  }
  CHECK(lowest >= highest - 1e-5 * std::fabs(highest) - rounding);
}

}  // namespace

TEST_CASE(
    "flat chooses the tokens with the largest exact scores, or with the largest sum of shares") {
  for (uint32_t head_dim : {32u, 48u, 128u, 256u}) {
    const PageStore store = random_store(head_dim, 37, 2, head_dim);
    const QueryCase given(store, 1, 3, 5);
    const auto selector = strategy_info("flat")->make();
    SelectorScratch scratch;
    Selection out;
    for (uint64_t budget : {1u, 30u, 100u, 100000u}) {
      CAPTURE(head_dim);
      CAPTURE(budget);
      const std::size_t want = std::min<uint64_t>(budget, given.tokens() - given.first());
      selector->select(given.query(budget, false), &scratch, &out);
      REQUIRE(out.lists.size() == 3);
      CHECK(out.tokens == 3 * want);
      CHECK(out.summary_bytes == 36u * (2048 + 2 * store.shape().page.page_tokens));
      CHECK(out.keys_scanned == given.tokens() - given.first());
      for (uint32_t r = 0; r < 3; ++r) {
        const auto chosen = chosen_tokens(out, r, store.shape().page);
        CHECK(chosen.size() == want);
        CHECK(*chosen.begin() >= given.first());
        check_best(given, chosen, 0, [&](uint32_t t) { return given.score(r, t); });
      }
      selector->select(given.query(budget, true), &scratch, &out);
      REQUIRE(out.lists.size() == 1);
      const auto chosen = chosen_tokens(out, 0, store.shape().page);
      CHECK(chosen.size() == want);
      CHECK(out.tokens == want);
      const double no_share = 3 * std::exp(-24.0);  // attention_shares gives up below
      check_best(given, chosen, no_share, [&](uint32_t t) {
        return given.share(0, t) + given.share(1, t) + given.share(2, t);
      });
    }
  }
}

TEST_CASE(
    "rows that choose together do so by the sum of all their shares, however many are scored at a "
    "time") {
  const PageStore store = random_store(64, 37, 1, 4);
  const QueryCase given(store, 0, 40, 6);
  SelectorScratch scratch;
  Selection out;
  for (uint32_t at_a_time : {1u, 7u, 40u}) {
    CAPTURE(at_a_time);
    strategy_info("flat")->make()->select_for_rows(given.query(100, true), at_a_time, &scratch,
                                                   &out);
    REQUIRE(out.lists.size() == 1);
    CHECK(out.tokens == 100);
    CHECK(out.keys_scanned ==
          (given.tokens() - given.first()) * ((40 + at_a_time - 1) / at_a_time));
    check_best(given, chosen_tokens(out, 0, store.shape().page), 40 * std::exp(-24.0),
               [&](uint32_t t) {
                 double sum = 0;
                 for (uint32_t r = 0; r < 40; ++r) sum += given.share(r, t);
                 return sum;
               });
  }
}

TEST_CASE("a scan of nothing chooses nothing, whatever the scratch memory holds") {
  const PageStore store = random_store(64, 37, 1, 4);
  const QueryCase given(store, 0, 40, 6);
  SelectorScratch scratch;
  scratch.scores.assign(24000, 1.0f);
  Selection out;
  strategy_info("window")->make()->select_for_rows(given.query(100, true), 12, &scratch, &out);
  CHECK(scratch.sums.empty());
  CHECK(out.lists.at(0).empty());
  CHECK(out.tokens == 0);
}

TEST_CASE("flat chooses nothing where there is nothing behind the sinks") {
  for (uint32_t pages : {1u, 2u}) {
    const PageStore store = random_store(64, pages, 1, 3);
    const QueryCase given(store, 0, 2, 1);
    SelectorScratch scratch;
    Selection out;
    strategy_info("flat")->make()->select(given.query(10, true), &scratch, &out);
    CHECK(out.intact);
    CHECK(out.tokens == (pages == 1 ? 0 : 10));
    CHECK(out.lists.at(0).empty() == (pages == 1));
  }
}

TEST_CASE(
    "dipr chooses exactly the tokens that have alpha of the largest one's attention, up to the "
    "budget") {
  for (uint32_t head_dim : {32u, 48u, 128u}) {
    const PageStore store = random_store(head_dim, 37, 2, head_dim + 1);
    QueryCase given(store, 0, 3, 9);
    given.near_m[1] += 4;  // the window holds the largest one
    const auto selector = strategy_info("dipr")->make();
    SelectorScratch scratch;
    Selection out;
    for (float alpha : {0.7f, 0.05f, 0.001f}) {
      CAPTURE(head_dim);
      CAPTURE(alpha);
      const float range = -std::log(alpha);
      std::set<uint32_t> any;
      bool near = false;  // so near the range's end that rounding decides
      std::vector<std::set<uint32_t>> want(3);
      for (uint32_t r = 0; r < 3; ++r) {
        double largest = static_cast<double>(given.near_m[r]);
        for (uint32_t t = given.first(); t < given.tokens(); ++t)
          largest = std::max(largest, given.score(r, t));
        for (uint32_t t = given.first(); t < given.tokens(); ++t) {
          const double weight = std::exp(given.score(r, t) - largest);
          near = near ||
                 std::fabs(weight - static_cast<double>(alpha)) < 1e-5 * static_cast<double>(alpha);
          if (weight >= static_cast<double>(alpha)) want[r].insert(t), any.insert(t);
        }
      }
      REQUIRE_FALSE(near);
      SelectorQuery query = given.query(100000, false);
      query.range = range;
      selector->select(query, &scratch, &out);
      for (uint32_t r = 0; r < 3; ++r) CHECK(chosen_tokens(out, r, store.shape().page) == want[r]);
      query.share = true;
      selector->select(query, &scratch, &out);
      CHECK(chosen_tokens(out, 0, store.shape().page) == any);
      CHECK(out.tokens == any.size());

      query.budget_tokens = any.size() / 2 + 1;
      selector->select(query, &scratch, &out);
      const auto some = chosen_tokens(out, 0, store.shape().page);
      CHECK(some.size() == std::min<std::size_t>(any.size(), query.budget_tokens));
      CHECK(std::includes(any.begin(), any.end(), some.begin(), some.end()));
      query.share = false;
      query.budget_tokens = 2;
      selector->select(query, &scratch, &out);
      for (uint32_t r = 0; r < 3; ++r) {
        const auto best = chosen_tokens(out, r, store.shape().page);
        CHECK(best.size() == std::min<std::size_t>(want[r].size(), 2));
        CHECK(std::includes(want[r].begin(), want[r].end(), best.begin(), best.end()));
      }
    }
  }
}
