// `quest` against its equations: bounds of blocks, of which several may be chosen together.
#include <algorithm>

#include "helpers.h"

using namespace kvasir;
using test::chosen_tokens;
using test::QueryCase;
using test::random_store;

namespace {

// Quest, algorithm 1: sum over channels of max(q * max, q * min), from the keys themselves, of the
// tokens begin .. end - 1.
double plain_bound(const QueryCase& given, uint32_t r, uint32_t begin, uint32_t end) {
  const PageShape& shape = given.store.shape().page;
  Array<float> k(shape.page_tokens * shape.dim), v(k.size());
  std::vector<double> lowest(shape.dim, 1e30), highest(shape.dim, -1e30);
  for (uint32_t t = begin; t < end; ++t) {  // whole blocks
    const PageRef ref = given.store.page(0, given.kv_head, t / shape.page_tokens);
    if (t == begin || t % shape.page_tokens == 0)
      cpu_kernels().unseal_page(shape, ref.data, ref.scales, k.data(), v.data());
    for (uint32_t d = 0; d < shape.dim; ++d) {
      const double x = static_cast<double>(k[t % shape.page_tokens * shape.dim + d]);
      lowest[d] = std::min(lowest[d], x);
      highest[d] = std::max(highest[d], x);
    }
  }
  double sum = 0;
  for (uint32_t d = 0; d < shape.dim; ++d) {
    const double q = given.q[r * shape.dim + d] * static_cast<double>(given.scale[r]);
    sum += std::max(q * lowest[d], q * highest[d]);
  }
  return sum;
}

struct Unit {
  uint32_t begin, end;  // tokens that may be chosen
  double bound;         // the largest of its blocks
  double looser;        // of all its tokens together, as the paper has it for a page of this size
};

std::vector<Unit> plain_units(const QueryCase& given, uint32_t r, uint32_t unit_tokens) {
  const uint32_t block = given.store.shape().page.block_tokens;
  std::vector<Unit> units;
  for (uint32_t begin = 0; begin < given.tokens(); begin += unit_tokens) {
    Unit u{std::max(begin, given.first()), std::min(begin + unit_tokens, given.tokens()), -1e30, 0};
    if (u.begin >= u.end) continue;
    for (uint32_t t = u.begin; t < u.end; t += block)
      u.bound = std::max(u.bound, plain_bound(given, r, t, t + block));
    u.looser = plain_bound(given, r, u.begin, u.end);
    units.push_back(u);
  }
  return units;
}

}  // namespace

TEST_CASE(
    "quest chooses whole units by the largest bound of their blocks, which is never looser than "
    "the paper's, at every granularity") {
  for (uint32_t head_dim : {32u, 48u, 128u, 256u}) {
    const PageStore store = random_store(head_dim, 37, 2, head_dim);
    const QueryCase given(store, 1, 2, 5);
    const auto selector = strategy_info("quest")->make();
    SelectorScratch scratch;
    Selection out;
    for (uint32_t unit : {0u, 16u, 32u, 48u, 64u, 128u}) {
      const uint32_t tokens = unit ? unit : store.shape().page.block_tokens;
      const std::vector<Unit> plain[] = {plain_units(given, 0, tokens),
                                         plain_units(given, 1, tokens)};
      for (uint64_t budget : {1u, 100u, 200u, 100000u}) {
        CAPTURE(head_dim);
        CAPTURE(unit);
        CAPTURE(budget);
        SelectorQuery query = given.query(budget, false);
        query.unit_tokens = unit;
        selector->select(query, &scratch, &out);
        uint64_t counted = 0;
        for (uint32_t r = 0; r < 2; ++r) {
          const auto chosen = chosen_tokens(out, r, store.shape().page);
          double lowest = 1e30, highest = -1e30;
          uint64_t units = 0, found = 0;
          for (const Unit& u : plain[r]) {
            CHECK(u.bound <= u.looser + 1e-9);
            const bool in = chosen.count(u.begin) != 0;
            const auto inside = static_cast<uint32_t>(
                std::distance(chosen.lower_bound(u.begin), chosen.lower_bound(u.end)));
            CHECK(inside == (in ? u.end - u.begin : 0));
            if (in) lowest = std::min(lowest, u.bound), ++units, found += u.end - u.begin;
            else highest = std::max(highest, u.bound);
          }
          CHECK(found == chosen.size());
          CHECK(units == std::min<uint64_t>(plain[r].size(), (budget + tokens - 1) / tokens));
          // bounds are kept in int8, rounded outwards
          CHECK(lowest >= highest - 0.02 * std::fabs(highest));
          counted += found;
        }
        CHECK(out.tokens == counted);
      }
    }
  }
}

TEST_CASE(
    "quest's heads share the units that have most of their attention when all tokens reach the "
    "bound") {
  const PageStore store = random_store(64, 37, 1, 3);
  const QueryCase given(store, 0, 3, 7);
  SelectorScratch scratch;
  Selection out;
  for (uint32_t unit : {16u, 32u, 64u}) {
    SelectorQuery query = given.query(160, true);
    query.unit_tokens = unit;
    strategy_info("quest")->make()->select(query, &scratch, &out);
    REQUIRE(out.lists.size() == 1);
    const auto chosen = chosen_tokens(out, 0, store.shape().page);
    Selection together;
    strategy_info("quest")->make()->select_for_rows(query, 2, &scratch, &together);
    CHECK(chosen_tokens(together, 0, store.shape().page) == chosen);
    std::vector<double> shares(plain_units(given, 0, unit).size());
    for (uint32_t r = 0; r < 3; ++r) {
      const auto units = plain_units(given, r, unit);
      double total = static_cast<double>(given.near_l[r]);
      for (const Unit& u : units)
        total += unit * std::exp(u.bound - static_cast<double>(given.near_m[r]));
      for (std::size_t i = 0; i < units.size(); ++i)
        shares[i] += unit * std::exp(units[i].bound - static_cast<double>(given.near_m[r])) / total;
    }
    double lowest = 1e30, highest = 0;
    const auto units = plain_units(given, 0, unit);
    for (std::size_t i = 0; i < units.size(); ++i) {
      if (chosen.count(units[i].begin)) lowest = std::min(lowest, shares[i]);
      else highest = std::max(highest, shares[i]);
    }
    CHECK(lowest >= 0.8 * highest);  // e^bound, of bounds in int8
  }
}
