// The sums of a trace, with numbers that are easy to check.
#include <cmath>

#include "attention/trace.h"
#include "helpers.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr float not_read = -INFINITY;

std::unique_ptr<ThreadPool> make_pool() {
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  return pool;
}

// Scores of the tokens from `first` on that give these shares, relative to a total of 3.
void add_shares(Trace* trace, uint32_t head, uint64_t first, const std::vector<float>& shares) {
  std::vector<float> scores;
  for (float s : shares) scores.push_back(s > 0 ? 3 + std::log(s) : not_read);
  trace->add(head, first, scores, 3);
}

}  // namespace

TEST_CASE("what another trace recorded can count elsewhere, within both") {
  const auto pool = make_pool();
  const float totals[] = {0};
  Trace of(1, 4, 16), to(1, 4, 32);
  of.begin_step(), of.begin_layer(), of.set_base(0, 3);
  add_shares(&of, 0, 4, {0.5f, 0, 0, 0, 0, 0, 0.25f, 0});
  of.end_layer(totals, pool.get()), of.commit();
  to.take(of, 4, 20, 4);
  const auto passages = to.passages();
  REQUIRE(passages.size() == 1);
  CHECK((passages[0].first == 20 && passages[0].tokens == 4 && passages[0].share > 0.99));
  to.take(of, 8, 12, 4);
  CHECK(to.passages().size() == 2);
  const double sum = to.sum();
  to.take(of, 64, 0, 8), to.take(of, 4, 64, 8);  // outside of one
  CHECK(to.sum() == sum);
}

TEST_CASE(
    "a block has the squares of its shares, over heads, layers and steps; neighbours are one "
    "passage") {
  const auto pool = make_pool();
  Trace trace(2, 4, 22);
  const float totals[] = {3, 3};
  for (int step = 0; step < 2; ++step) {
    trace.begin_step();
    for (int layer = 0; layer < 2; ++layer) {
      trace.begin_layer();
      trace.set_base(0, 3), trace.set_base(1, 3);
      // blocks 2 and 3: 0.5 and 0.2
      add_shares(&trace, 0, 8, {0.2f, 0.3f, 0, 0, 0.1f, 0.1f, 0, 0});
      // block 5, of which two tokens are the document's: 0.4
      add_shares(&trace, 1, 20, {0.2f, 0.2f, 0.2f, 0.2f});
      trace.end_layer(totals, pool.get());
    }
    trace.commit();
  }
  const auto passages = trace.passages();
  REQUIRE(passages.size() == 2);
  const double all = 0.25 + 0.04 + 0.16;
  CHECK(passages[0].first == 8);
  CHECK(passages[0].tokens == 8);
  CHECK(passages[0].share == doctest::Approx(0.29 / all).epsilon(1e-5));
  CHECK(passages[1].first == 20);
  CHECK(passages[1].tokens == 2);
  CHECK(passages[1].share == doctest::Approx(0.16 / all).epsilon(1e-5));
  CHECK(trace.steps() == 2);
}

TEST_CASE(
    "shares are of the total that was attended, whatever the base; a few first tokens do not "
    "count") {
  const auto pool = make_pool();
  Trace trace(2, 4, 64);
  trace.begin_step();
  trace.begin_layer();
  const float totals[] = {10, 4};
  const std::vector<float> sinks(4, 10.0f), some{8, not_read, not_read, not_read},
      others{2, not_read, not_read, not_read};
  trace.set_base(0, 8), trace.set_base(1, 2);
  trace.add(0, 0, sinks, 8);
  trace.add(0, 16, some, 8);    // e^-2 of the whole
  trace.add(1, 32, others, 2);  // likewise
  trace.end_layer(totals, pool.get());
  trace.commit();
  const auto passages = trace.passages();
  REQUIRE(passages.size() == 2);
  CHECK(passages[0].first == 16);
  CHECK(passages[0].share == doctest::Approx(0.5));
  CHECK(passages[1].first == 32);
}

TEST_CASE("a step that is not committed leaves nothing behind") {
  const auto pool = make_pool();
  const float total = 3;
  Trace trace(1, 4, 64);
  const auto step = [&](uint64_t first) {
    trace.begin_step();
    trace.begin_layer();
    trace.set_base(0, 3);
    add_shares(&trace, 0, first, {0.5f, 0, 0, 0});
    trace.end_layer(&total, pool.get());
  };
  step(16);
  CHECK(trace.passages().empty());
  step(32);
  trace.commit();
  const auto passages = trace.passages();
  REQUIRE(passages.size() == 1);
  CHECK(passages[0].first == 32);
  CHECK(passages[0].share == doctest::Approx(1));
}

TEST_CASE("what stands out is reported: nothing small next to the largest, at most 64 passages") {
  const auto pool = make_pool();
  const float total = 3;
  Trace trace(1, 4, 2048);
  trace.begin_step();
  trace.begin_layer();
  trace.set_base(0, 3);
  for (uint64_t block = 1; block < 200; block += 2)
    add_shares(&trace, 0, block * 4, {block == 9 ? 0.04f : 0.02f, 0, 0, 0});
  add_shares(&trace, 0, 1000, {0.008f, 0, 0, 0});  // a twenty-fifth of the largest
  trace.end_layer(&total, pool.get());
  trace.commit();
  const auto passages = trace.passages();
  REQUIRE(passages.size() == 64);
  CHECK(passages[0].first == 36);
  CHECK(passages[1].first == 4);  // alike: in their order
  CHECK(passages[2].first == 12);
  for (const auto& p : passages) CHECK(p.first != 1000);
  CHECK(Trace(1, 4, 0).passages().empty());
}
