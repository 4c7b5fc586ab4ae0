// Which layers and experts go to which device, as data.
#include "model/device_plan.h"

#include <doctest/doctest.h>

using namespace kvasir;

namespace {

constexpr uint64_t workspace = 50, output = 30;

// Ten layers with experts, the first of which is dense.
std::vector<LayerSizes> mixture() {
  std::vector<LayerSizes> layers(10, {.base = 10, .experts = 100, .attention = 2});
  layers[0] = {.base = 20, .experts = 0, .attention = 2};
  return layers;
}

DevicePlan plan(std::vector<uint64_t> rooms) {
  return plan_devices(mixture(), output, workspace, rooms);
}

}  // namespace

TEST_CASE("all layers, experts and the output go to a device that has room for them") {
  constexpr uint64_t all = 20 + 9 * 110 + 10 * 2 + output + workspace;
  const DevicePlan whole = plan({all});
  CHECK(whole.complete);
  CHECK(whole.output);
  REQUIRE(whole.parts.size() == 1);
  CHECK(whole.parts[0].layers == 10);
  CHECK(whole.parts[0].experts == 10);
  const DevicePlan less = plan({all - 1});
  CHECK_FALSE(less.complete);
  CHECK(less.output);
  CHECK(less.parts[0].layers == 10);
  CHECK(less.parts[0].experts == 9);  // the experts of the last layer are the CPU's
}

TEST_CASE("with less memory fewer layers have experts on a device, and then it has fewer layers") {
  constexpr uint64_t layers = 20 + 9 * 10 + output, besides = 10 * 2 + workspace;
  for (uint32_t n = 1; n < 9; ++n) {
    CAPTURE(n);
    const DevicePlan p = plan({layers + besides + n * 100});
    CHECK(p.output);
    CHECK(p.parts[0].layers == 10);
    CHECK(p.parts[0].experts == 1 + n);  // the dense layer counts as one with experts
  }
  CHECK(plan({layers + besides - 1}).parts[0].experts == 0);
  CHECK(plan({layers}).parts[0].layers == 10);
  CHECK(plan({layers}).parts[0].experts == 0);
  CHECK(plan({layers}).output);
  CHECK_FALSE(plan({layers - 1}).output);
  CHECK(plan({layers - 1}).parts[0].layers == 10);
  const DevicePlan few = plan({20 + 3 * 10 + 5});
  CHECK(few.parts[0].layers == 4);
  CHECK(few.parts[0].experts == 0);
  CHECK_FALSE(few.output);
  CHECK(plan({19}).parts[0].layers == 0);
}

TEST_CASE("several devices share layers and experts, and each keeps its own workspace free") {
  const DevicePlan both = plan({700, 700});
  CHECK(both.complete);
  CHECK(both.parts[0].layers + both.parts[1].layers == 10);
  CHECK(both.parts[0].layers >= 4);
  CHECK(both.parts[1].layers >= 4);
  for (const DevicePlan::Part& part : both.parts) CHECK(part.experts == part.layers);
  const DevicePlan some = plan({300, 300});
  CHECK_FALSE(some.complete);
  CHECK(some.output);
  CHECK(some.parts[0].layers + some.parts[1].layers == 10);
  for (const DevicePlan::Part& part : some.parts) {
    CHECK(part.experts > 0);
    CHECK(part.experts < part.layers);
  }
  CHECK(plan({}).parts.empty());
}

TEST_CASE("a dense model is planned as before: nothing is kept free for experts") {
  const std::vector<LayerSizes> dense(4, {.base = 10, .experts = 0, .attention = 7});
  const std::vector<uint64_t> rooms = {40 + output};
  const DevicePlan p = plan_devices(dense, output, workspace, rooms);
  CHECK(p.complete);
  CHECK(p.parts[0].layers == 4);
}
