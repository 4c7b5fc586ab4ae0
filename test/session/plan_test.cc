// Plans from options, length and measurements.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>

#include "select/plan.h"

using namespace kvasir;

namespace {

SelectOptions options(const char* strategy) {
  SelectOptions o;
  o.strategy = strategy;
  return o;
}

}  // namespace

TEST_CASE("auto attends everything in a short context and chooses in a long one, and says why") {
  const Plan small = make_plan(options("auto"), 4096, 10, {}),
             large = make_plan(options("auto"), 4097, 10, {});
  CHECK(small.strategy->name == "full");
  CHECK(small.dense_layers == 10);
  CHECK(large.strategy->name == "bounded");
  CHECK(std::string(small.why) != large.why);
}

TEST_CASE("budgets are a count, a fraction, or the strategy's own with its floor") {
  SelectOptions o = options("quest");
  CHECK(make_plan(o, 100000, 10, {}).budget_tokens == 2000);
  CHECK(make_plan(o, 10000, 10, {}).budget_tokens == 512);
  o.budget_fraction = 0.02;  // asked for: no floor
  CHECK(make_plan(o, 10000, 10, {}).budget_tokens == 200);
  o.budget_fraction = 0;
  o.budget_tokens = 77;
  CHECK(make_plan(o, 10000, 10, {}).budget_tokens == 77);
}

TEST_CASE("prefill has one default budget, whatever its strategy has in decode") {
  for (const StrategyInfo& info : all_strategies()) {
    if (!info.has(StrategyInfo::reads_blocks)) continue;
    ReadOptions o;
    o.strategy = info.name;
    const uint64_t budget = make_read_plan(o, 100000, 10).budget_tokens;
    o.budget_fraction = 0.1;  // as kvasir.h says
    CHECK(budget == make_read_plan(o, 100000, 10).budget_tokens);
    CHECK(budget == 10000);
  }
}

TEST_CASE(
    "the layers with the largest measured errors are dense, the first ones where nothing was "
    "measured") {
  const float errors[] = {0.03f, 0.03f, 0.01f, 0.2f, 0.3f, 0.1f};
  SelectOptions o = options("quest");
  const Plan measured = make_plan(o, 10000, 6, errors), first = make_plan(o, 10000, 6, {});
  for (uint32_t l = 0; l < 6; ++l) {
    CHECK(measured.is_dense(l) == (l == 3 || l == 4));
    CHECK(first.is_dense(l) == (l < 2));
  }
  o.dense_layers = 0;
  for (uint32_t l = 0; l < 6; ++l) CHECK(!make_plan(o, 10000, 6, errors).is_dense(l));
  o.dense_layers = 100;
  for (uint32_t l = 0; l < 6; ++l) CHECK(make_plan(o, 10000, 6, errors).is_dense(l));
}

TEST_CASE("unknown strategies and budgets out of range are refused") {
  CHECK(!check_select_options(options("best"), 10, 16).ok());
  SelectOptions o = options("quest");
  for (double bad : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    o.budget_fraction = bad;
    CHECK(!check_select_options(o, 10, 16).ok());
  }
  o.budget_fraction = 0.1;
  o.budget_tokens = 5;
  CHECK(!check_select_options(o, 10, 16).ok());
}

TEST_CASE(
    "bounded covers attention by itself where no budget is asked for, or as asked, and reads an "
    "asked budget as it is") {
  SelectOptions o = options("bounded");
  CHECK(make_plan(o, 100000, 10, {}).coverage == 0.96f);
  CHECK(make_plan(options("auto"), 100000, 10, {}).coverage == 0.96f);
  CHECK(make_plan(options("quest"), 100000, 10, {}).coverage == 0);
  o.budget_tokens = 500;
  CHECK(make_plan(o, 100000, 10, {}).coverage == 0);
  o.coverage = 0.5f;
  CHECK(make_plan(o, 100000, 10, {}).coverage == 0.5f);
  o.budget_tokens = 0;
  CHECK(make_plan(o, 100000, 10, {}).coverage == 0.5f);
}

TEST_CASE(
    "bounded gives layers budget in proportion to their errors, within a quarter and four times "
    "the mean") {
  const float errors[] = {0.02f, 0.02f, 0.001f, 0.2f, 0.9f, 0.06f};
  SelectOptions o = options("bounded");
  o.budget_tokens = 1000;
  const Plan plan = make_plan(o, 100000, 6, errors);
  CHECK(plan.dense_layers == 0);
  uint64_t sum = 0;
  for (uint32_t l = 0; l < 6; ++l) {
    CHECK(plan.budget(l) >= 200);
    sum += plan.budget(l);
    for (uint32_t k = 0; k < 6; ++k)
      if (errors[l] > errors[k]) CHECK(plan.budget(l) >= plan.budget(k));
  }
  CHECK(plan.budget(4) > 3 * plan.budget(3));
  CHECK(sum >= 6000);
  CHECK(sum <= 6006);
  for (uint32_t l = 0; l < 6; ++l) CHECK(make_plan(o, 500, 6, errors).budget(l) <= 500);
  for (uint32_t l = 0; l < 6; ++l) CHECK(make_plan(o, 100000, 6, {}).budget(l) == 1000);
}

TEST_CASE(
    "alpha becomes a range below the largest score, for the strategy that asks for it, and is "
    "refused out of range") {
  SelectOptions o = options("dipr");
  CHECK(make_plan(o, 100000, 6, {}).range == doctest::Approx(-std::log(0.012)));
  o.alpha = 0.5f;
  CHECK(make_plan(o, 100000, 6, {}).range == doctest::Approx(std::log(2.0)));
  CHECK(std::isinf(make_plan(options("flat"), 100000, 6, {}).range));
  for (float bad : {-0.1f, 1.1f, std::numeric_limits<float>::quiet_NaN()}) {
    o.alpha = bad;
    CHECK(!check_select_options(o, 6, 16).ok());
  }
}

TEST_CASE("filter layers, those before the first one and the one after each attend everything") {
  SelectOptions o = options("filter-layers");
  o.filter_layers = {2, 8, 18};
  o.dense_layers = 0;  // is not used
  const Plan plan = make_plan(o, 100000, 32, {});
  for (uint32_t l = 0; l < 32; ++l) {
    CAPTURE(l);
    CHECK(plan.is_filter(l) == (l == 2 || l == 8 || l == 18));
    CHECK(plan.is_dense(l) == (l <= 3 || l == 8 || l == 9 || l == 18 || l == 19));
  }
  CHECK(plan.dense_layers == 8);
  CHECK(std::string(plan.why) == "requested");
  CHECK(plan.budget(5) == 6700);
  o.filter_layers = {31};
  CHECK(make_plan(o, 100000, 32, {}).dense_layers == 32);
}

TEST_CASE(
    "filter layers that are not named are three, fewer in small models, and the plan says that "
    "they are not measured") {
  for (uint32_t layers = 1; layers <= 100; ++layers) {
    CAPTURE(layers);
    const Plan plan = make_plan(options("filter-layers"), 100000, layers, {});
    uint32_t count = 0;
    for (uint32_t l = 0; l < layers; ++l) count += plan.is_filter(l);
    CHECK(count == (layers < 16 ? 1 : layers < 24 ? 2 : 3));
    CHECK(plan.dense_layers <= std::max(3u, layers / 2));
    CHECK(std::string(plan.why).find("spread evenly") != std::string::npos);
  }
}

TEST_CASE("filter layers that the model does not have, or out of order, are refused") {
  SelectOptions o = options("filter-layers");
  o.filter_layers = {0, 9};
  CHECK(check_select_options(o, 10, 16).ok());
  for (const std::vector<uint32_t>& bad :
       {std::vector<uint32_t>{10}, {3, 3}, {4, 2}, {0, UINT32_MAX}}) {
    o.filter_layers = bad;
    CHECK(check_select_options(o, 10, 16).code() == Code::bad_argument);
  }
}

TEST_CASE("select_tokens is for quest alone, in whole blocks that have a bound") {
  SelectOptions o = options("quest");
  CHECK(make_plan(o, 100000, 6, {}).unit_tokens == 0);
  o.unit_tokens = 32;
  CHECK(check_select_options(o, 6, 16).ok());
  CHECK(make_plan(o, 100000, 6, {}).unit_tokens == 32);
  o.unit_tokens = 24;
  CHECK(check_select_options(o, 6, 16).code() == Code::bad_argument);
  CHECK(check_select_options(o, 6, 8).ok());
  o.unit_tokens = 2048;
  CHECK(check_select_options(o, 6, 16).code() == Code::bad_argument);
  o.unit_tokens = 32;
  for (const char* other : {"auto", "full", "window", "flat", "bounded", "filter-layers"}) {
    o.strategy = other;
    CHECK(check_select_options(o, 6, 16).code() == Code::bad_argument);
  }
}

TEST_CASE(
    "a schedule gives lower layers more and the mean is the budget: by even steps, to half of it "
    "or a twentieth") {
  for (uint32_t layers : {1u, 2u, 9u, 32u})
    for (uint64_t budget : {100u, 1000u, 1234u}) {
      SelectOptions o = options("flat");
      o.budget_tokens = budget;
      CHECK(make_plan(o, 100000, layers, {}).layer_budgets.empty());
      for (BudgetSchedule schedule : {BudgetSchedule::linear, BudgetSchedule::pyramid}) {
        o.schedule = schedule;
        const Plan plan = make_plan(o, 100000, layers, {});
        REQUIRE(plan.layer_budgets.size() == layers);
        // PyramidKV, section 3.2: k[m - 1] = mean / beta, k[0] = 2 mean - k[m - 1], the others
        // evenly between.
        const double mean = static_cast<double>(budget),
                     last = mean * (schedule == BudgetSchedule::linear ? 0.5 : 0.05),
                     first = 2 * mean - last;
        uint64_t sum = 0;
        for (uint32_t l = 0; l < layers; ++l) {
          const double want = layers > 1 ? first - (first - last) * l / (layers - 1) : mean;
          CHECK(std::fabs(static_cast<double>(plan.budget(l)) - want) <= 1);
          sum += plan.budget(l);
        }
        CHECK(sum == budget * layers);
        CHECK(make_plan(o, 50, layers, {}).budget(0) <= 50);
      }
    }
  SelectOptions dense = options("quest");
  dense.budget_tokens = 100;
  dense.schedule = BudgetSchedule::pyramid;
  const Plan plan = make_plan(dense, 100000, 6, {});  // the first two layers attend everything
  CHECK(plan.budget(2) == 195);
  CHECK(plan.budget(5) == 5);
}

TEST_CASE("a schedule is refused where there is no budget to spread, or the strategy spreads it") {
  for (const char* strategy : {"auto", "full", "window", "bounded", "filter-layers"}) {
    SelectOptions o = options(strategy);
    o.schedule = BudgetSchedule::pyramid;
    CHECK(check_select_options(o, 10, 16).code() == Code::bad_argument);
    o.schedule = BudgetSchedule::uniform;
    CHECK(check_select_options(o, 10, 16).ok());
  }
  for (const char* strategy : {"quest", "flat", "dipr", "hnsw", "ood", "dipr-graph", "ivf"}) {
    SelectOptions o = options(strategy);
    o.schedule = BudgetSchedule::linear;
    CHECK(check_select_options(o, 10, 16).ok());
  }
}
