// Which layers filter: the choice against trying all of them. And sums of comparisons.
#include "filter_choice.h"

#include <doctest/doctest.h>

#include <random>

#include "comparison.h"

using namespace tool;

namespace {

// What a choice costs, by the rule itself.
FilterChoice by_rule(const std::vector<std::vector<double>>& covered,
                     const std::vector<uint32_t>& filters) {
  FilterChoice choice{filters, 0, 0};
  for (uint32_t l = 0; l < covered.size(); ++l) {
    uint32_t chooser = UINT32_MAX;
    bool dense = l <= filters.front();
    for (const uint32_t f : filters) {
      if (f <= l) chooser = f;
      dense = dense || f == l || f + 1 == l;
    }
    if (dense) ++choice.dense;
    else choice.lost += 1 - covered[chooser][l];
  }
  return choice;
}

}  // namespace

TEST_CASE("filter layers that are chosen lose least of all that are allowed") {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> share(0, 1);
  for (uint32_t layers : {1u, 2u, 5u, 10u}) {
    std::vector<std::vector<double>> covered(layers, std::vector<double>(layers));
    for (auto& row : covered)
      for (double& x : row) x = share(random);
    for (uint32_t count = 1; count <= std::min(layers, 4u); ++count)
      for (uint32_t max_dense = 0; max_dense <= layers; ++max_dense) {
        CAPTURE(layers);
        CAPTURE(count);
        CAPTURE(max_dense);
        double least = 1e9;
        for (uint32_t bits = 1; bits < 1u << layers; ++bits) {
          std::vector<uint32_t> filters;
          for (uint32_t l = 0; l < layers; ++l)
            if (bits >> l & 1) filters.push_back(l);
          if (filters.size() != count) continue;
          const FilterChoice one = by_rule(covered, filters);
          if (one.dense <= max_dense) least = std::min(least, one.lost);
        }
        const FilterChoice found = choose_filters(covered, count, max_dense);
        CHECK(found.filters.empty() == (least == 1e9));
        if (found.filters.empty()) continue;
        const FilterChoice rule = by_rule(covered, found.filters);
        CHECK(found.filters.size() == count);
        CHECK(rule.dense == found.dense);
        CHECK(rule.dense <= max_dense);
        CHECK(rule.lost == doctest::Approx(found.lost));
        CHECK(found.lost == doctest::Approx(least));
      }
  }
}

TEST_CASE("comparisons of several answers are summed by how much each was") {
  const auto stats = [](uint64_t queries, double mass, double least, uint64_t steps,
                        double covered) {
    const Json head = {{"queries", queries},    {"mass", mass},         {"min_mass", least},
                       {"error", 0.1},          {"largest_error", 0.5}, {"recall", 1.0},
                       {"min_recall", 1.0},     {"tokens", 7.0},        {"mass_estimated", 0.5},
                       {"estimate_error", 0.25}};
    return Json{{"last_keys_scanned", 10},
                {"last_summary_bytes", 20},
                {"compared",
                 {{"layers", Json::array({Json::array({head})})},
                  {"covered_steps", steps},
                  {"covered", Json::array({Json::array({covered})})}}}};
  };
  ComparisonSums sums;
  sums.add(stats(1, 0.5, 0.5, 1, 1.0));
  sums.add(stats(3, 0.9, 0.2, 3, 0.0));
  sums.add(Json{
      {"last_keys_scanned", 0},
      {"last_summary_bytes", 0},
      {"compared", {{"layers", Json::array()}, {"covered_steps", 0}, {"covered", Json::array()}}}});
  const Json all = sums.all().json();
  CHECK(all["queries"] == 4);
  CHECK(all["mass"].get<double>() == doctest::Approx(0.8));
  CHECK(all["min_mass"] == 0.2);
  CHECK(all["largest_error"] == 0.5);
  CHECK(all["mass_estimated"].get<double>() == doctest::Approx(0.5));
  CHECK(sums.keys_scanned() == 20);
  CHECK(sums.covered()[0][0] == doctest::Approx(0.25));
}
