// What the planner makes of options, length and measurements.
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
  const Plan small = make_plan(options("auto"), 4096, 10, {}), large = make_plan(options("auto"), 4097, 10, {});
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

TEST_CASE("the layers with the largest measured errors are dense, the first ones where nothing was measured") {
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
  CHECK(!check_select_options(options("best")).ok());
  SelectOptions o = options("quest");
  for (double bad : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    o.budget_fraction = bad;
    CHECK(!check_select_options(o).ok());
  }
  o.budget_fraction = 0.1;
  o.budget_tokens = 5;
  CHECK(!check_select_options(o).ok());
}

TEST_CASE("bounded gives layers budget in proportion to their errors, within a quarter and four times the mean") {
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

TEST_CASE("alpha becomes a range below the largest score, for the strategy that asks for it, and is refused out of range") {
  SelectOptions o = options("dipr");
  CHECK(make_plan(o, 100000, 6, {}).range == doctest::Approx(-std::log(0.012)));
  o.alpha = 0.5f;
  CHECK(make_plan(o, 100000, 6, {}).range == doctest::Approx(std::log(2.0)));
  CHECK(std::isinf(make_plan(options("flat"), 100000, 6, {}).range));
  for (float bad : {-0.1f, 1.1f, std::numeric_limits<float>::quiet_NaN()}) {
    o.alpha = bad;
    CHECK(!check_select_options(o).ok());
  }
}
