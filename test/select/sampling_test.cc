// Samples against the definition of select/sampling.h: their sums are right on average.
#include <algorithm>
#include <bit>
#include <numeric>

#include "helpers.h"
#include "select/sampling.h"

using namespace kvasir;
using test::QueryCase;
using test::random_store;

namespace {

constexpr uint32_t first = 8, end = 88, quads = end - first, page_quads = 8;

struct Chosen {
  std::vector<uint32_t> numbers;  // of quads, ascending
  std::vector<double> weights;
};

// From shares of quads 8 to 87 of a store whose pages have eight of them.
Chosen sample(const QueryCase& given, uint32_t layer, const std::vector<float>& shares,
              const SampleSize& size) {
  SelectorQuery query = given.query(0, true);
  query.layer = layer;
  SelectorScratch scratch;
  scratch.scores.assign(first, 100.0f);
  scratch.scores.insert(scratch.scores.end(), shares.begin(), shares.end());
  Selection out;
  begin_selection(1, &out);
  begin_samples(&out);
  sample_list(query, {quad_tokens, first, end, end}, 0, size, &scratch, &out);
  std::vector<std::pair<uint32_t, double>> found;
  const auto add = [&](const Array<PageRef>& pages, const Array<uint32_t>& numbers, bool sampled) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      CHECK((sampled ? pages[i].bias > 0 : pages[i].bias == 0));
      if (sampled) CHECK(std::popcount(pages[i].tokens) == 4);
      if (i > 0) CHECK((sampled ? numbers[i] >= numbers[i - 1] : numbers[i] > numbers[i - 1]));
      for (uint32_t quad = 0; quad < page_quads; ++quad)
        if (const uint64_t tokens = pages[i].tokens >> 4 * quad & 15) {
          CHECK(tokens == 15);
          found.push_back(
              {numbers[i] * page_quads + quad, std::exp(static_cast<double>(pages[i].bias))});
        }
    }
  };
  add(out.lists[0], out.page_numbers[0], false);
  add(out.samples[0], out.sample_numbers[0], true);
  std::sort(found.begin(), found.end());
  CHECK(out.tokens == found.size() * 4);
  Chosen chosen;
  for (const auto& [number, weight] : found)
    chosen.numbers.push_back(number), chosen.weights.push_back(weight);
  return chosen;
}

// Kernels::sample's.
double random_of(uint32_t number, uint32_t seed) {
  uint32_t x = number * 0x9e3779b1u + seed;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return std::ldexp(((x ^ x >> 16) >> 8) + 0.5, -24);
}

std::vector<float> random_shares(std::mt19937* random, float power, float sum) {
  std::exponential_distribution<float> exponential;
  std::vector<float> shares(quads);
  for (float& s : shares) s = std::pow(exponential(*random), power);
  const float all = std::accumulate(shares.begin(), shares.end(), 0.0f);
  for (float& s : shares) s *= sum / all;
  return shares;
}

}  // namespace

TEST_CASE(
    "a sample is what the threshold takes that reads the fewest and leaves no more variance than "
    "is allowed, each with its weight") {
  const PageStore store = random_store(64, 40, 2, 64);
  const QueryCase given(store, 1, 3, 5);
  std::mt19937 random(3);
  for (uint32_t layer = 0; layer < 5; ++layer)
    for (double variance : {1e-6, 1e-4, 1e-3, 1e-2, 1.0})
      for (const auto& [min_quads, max_quads] : {std::pair{0u, 0u},
                                                 {0u, 5u},
                                                 {1u, 16u},
                                                 {5u, 5u},
                                                 {10u, 200u},
                                                 {79u, 80u},
                                                 {80u, 80u},
                                                 {100u, 200u}}) {
        std::vector<float> shares = random_shares(&random, 4, 0.8f);
        if (layer == 4) shares[5] = shares[6] = shares[60] = 0;
        const auto sum_of = [&](auto f) {
          double sum = 0;
          for (float s : shares) sum += f(static_cast<double>(s));
          return sum;
        };
        const auto left = [&](double t) {
          return sum_of([&](double s) { return s * std::max(t - s, 0.0); });
        };
        const auto expected = [&](double t) {
          return sum_of([&](double s) { return std::min(1.0, s / t); });
        };
        const Chosen got = sample(given, layer, shares, {min_quads, max_quads, variance});
        CAPTURE(min_quads);
        CAPTURE(max_quads);
        CAPTURE(variance);
        const double threshold = static_cast<double>(sample_threshold(
            cpu_kernels(), shares.data(), quads, {min_quads, max_quads, variance}));
        if (min_quads >= quads) {
          CHECK(threshold == 0);
        } else if (max_quads == 0) {
          CHECK(got.numbers.empty());
          continue;
        } else {
          const double count = expected(threshold),
                       positive = sum_of([](double s) { return s > 0 ? 1.0 : 0.0; });
          CHECK(count <= max_quads * 1.01);
          CHECK(count >= std::min<double>(min_quads, positive) * 0.99);
          if (count < std::min<double>(max_quads, positive) * 0.99)
            CHECK(left(threshold) <= variance * 1.01);
          // it reads no more than it has to
          if (count > min_quads * 1.01) CHECK(left(threshold) >= variance * 0.98);
        }
        std::vector<uint32_t> numbers;
        for (uint32_t i = 0; i < quads; ++i)
          if (static_cast<double>(shares[i]) >=
              random_of(first + i, sample_seed(layer, given.kv_head)) * threshold)
            numbers.push_back(first + i);
        REQUIRE(got.numbers == numbers);
        for (std::size_t i = 0; i < numbers.size(); ++i)
          CHECK(got.weights[i] ==
                doctest::Approx(
                    std::max(1.0, threshold > 0
                                      ? threshold / static_cast<double>(shares[numbers[i] - first])
                                      : 1.0))
                    .epsilon(1e-4));
      }
}

TEST_CASE("sums over a sample are on average those over everything, however wrong the shares are") {
  const PageStore store = random_store(64, 40, 2, 64);
  const QueryCase given(store, 1, 3, 5);
  std::mt19937 random(4);
  std::normal_distribution<double> normal;
  for (float power : {0.5f, 2.0f, 6.0f}) {
    const std::vector<float> shares = random_shares(&random, power, 1);
    std::vector<double> asked_of(quads);  // what has little to do with the shares
    double want = 0;
    for (double& x : asked_of) want += x = 1 + normal(random);
    for (uint32_t count : {4u, 20u}) {
      constexpr uint32_t times = 6000;
      double sum = 0, squares = 0, of_shares = 0;
      for (uint32_t layer = 0; layer < times; ++layer) {
        const Chosen chosen = sample(given, layer, shares, {count, count, 0});
        double estimate = 0;
        for (std::size_t i = 0; i < chosen.numbers.size(); ++i) {
          estimate += chosen.weights[i] * asked_of[chosen.numbers[i] - first];
          of_shares +=
              chosen.weights[i] * static_cast<double>(shares[chosen.numbers[i] - first]) / times;
        }
        sum += estimate, squares += estimate * estimate;
      }
      const double mean = sum / times, error = std::sqrt((squares / times - mean * mean) / times);
      CAPTURE(power);
      CAPTURE(count);
      CHECK(of_shares == doctest::Approx(1).epsilon(0.02));
      // beyond, quads that hardly ever come decide the sum
      if (power < 3) CHECK(std::fabs(mean - want) < 5 * error);
    }
  }
}

TEST_CASE(
    "where a variance decides how many there are, the sum of the shares is right on average too") {
  const PageStore store = random_store(64, 40, 2, 64);
  const QueryCase given(store, 1, 3, 5);
  std::mt19937 random(6);
  for (float power : {2.0f, 6.0f})
    for (double error : {0.05, 0.1, 0.2}) {
      const std::vector<float> shares = random_shares(&random, power, 1);
      constexpr uint32_t times = 8000;
      double sum = 0, squares = 0;
      for (uint32_t layer = 0; layer < times; ++layer) {
        const Chosen chosen = sample(given, layer, shares, {1, 1000, error * error});
        double estimate = 0;
        for (std::size_t i = 0; i < chosen.numbers.size(); ++i)
          estimate += chosen.weights[i] * static_cast<double>(shares[chosen.numbers[i] - first]);
        sum += estimate / times, squares += estimate * estimate / times;
      }
      CAPTURE(power);
      CAPTURE(error);
      CHECK(sum == doctest::Approx(1).epsilon(0.005));
      CHECK(std::sqrt(squares - sum * sum) < 1.15 * error);
    }
}

TEST_CASE(
    "a coverage is a standard error, a quarter of the budget to four times it its limits; a budget "
    "alone is the number") {
  const SampleSize by_budget = sample_size(1000, 0, 3);
  CHECK((by_budget.min_quads == 250 && by_budget.max_quads == 250 && by_budget.variance == 0));
  const SampleSize by_coverage = sample_size(1600, 0.9f, 3);
  CHECK((by_coverage.min_quads == 100 && by_coverage.max_quads == 1600));
  CHECK(by_coverage.variance == doctest::Approx(0.09).epsilon(1e-6));
}

TEST_CASE(
    "rows that choose together read what one of them alone looks for, and no sample stands for too "
    "many") {
  // of 1152 tokens behind the sinks; the sketch separates it from similar tokens
  constexpr uint32_t rows = 60, alone = 17, wanted = 703, budget = 288;
  const PageStore store = random_store(64, 37, 1, 8);
  KeySketch sketch(store.shape());
  REQUIRE(sketch.build(store, nullptr, cpu_kernels(), &test::pool(2), nullptr).ok());
  QueryCase given(store, 0, rows, 3);
  const PageShape& shape = store.shape().page;
  Array<float> k(std::size_t{shape.page_tokens} * shape.dim), v(k.size());
  const PageRef page = store.page(0, 0, wanted / shape.page_tokens);
  cpu_kernels().unseal_page(shape, page.data, page.scales, k.data(), v.data());
  for (uint32_t d = 0; d < shape.dim; ++d)
    given.f32[alone * shape.dim + d] = 4 * k[wanted % shape.page_tokens * shape.dim + d];
  cpu_kernels().quantize_queries(given.f32.data(), rows, shape.dim, given.q.data(),
                                 given.split.data(), given.scale.data());
  SelectorQuery query{.kernels = cpu_kernels(),
                      .pages = store,
                      .sketch = sketch,
                      .layer = 0,
                      .kv_head = 0,
                      .rows = given.rows,
                      .near_m = given.near_m.data(),
                      .near_l = given.near_l.data(),
                      .first_page = 1,
                      .budget_tokens = budget,
                      .share = true};
  SelectorScratch scratch;
  Selection out;
  std::set<std::vector<uint32_t>> drawn;
  double heaviest = 0, read = 0;
  constexpr uint32_t draws = 200;
  for (query.draw = 0; query.draw < draws; ++query.draw) {
    strategy_info("bounded")->make()->select_for_rows(query, 12, &scratch, &out);
    REQUIRE(out.sampled);
    CHECK(test::chosen_tokens(out, 0, shape).count(wanted) == 1);
    for (const PageRef& sample : out.samples[0])
      heaviest = std::max(heaviest, std::exp(static_cast<double>(sample.bias)));
    drawn.insert({out.sample_numbers[0].begin(), out.sample_numbers[0].end()});
    read += static_cast<double>(out.tokens);
  }
  CHECK(drawn.size() > draws / 2);  // their own random numbers
  Array<float> sums, more;
  for (uint32_t first = 0; first < rows; first += 12) {  // the same in parts
    SelectorQuery part = query;
    part.draw = draws - 1;
    part.rows = row_of(query.rows, first, 12);
    part.near_m += first, part.near_l += first;
    CHECK(strategy_info("bounded")->make()->sum_shares(part, &scratch, &more).intact);
    if (first == 0) sums = more;
    else cpu_kernels().add(sums.data(), more.data(), sums.size());
  }
  Array<float> round;
  // a scan finds the same wherever it begins; there are three extents
  for (query.first_extent = 1; query.first_extent < 5; ++query.first_extent) {
    CHECK(strategy_info("bounded")->make()->sum_shares(query, &scratch, &round).intact);
    if (query.first_extent == 1) more = round;
    CHECK(round == more);
  }
  query.first_extent = 0;
  CHECK(strategy_info("bounded")->make()->sum_shares(query, &scratch, &round).intact);
  CHECK(round == more);
  query.draw = draws - 1;
  Selection parts;
  strategy_info("bounded")->make()->choose_by_sums(query, sums, &scratch, &parts);
  CHECK(parts.sample_numbers == out.sample_numbers);
  CHECK(parts.page_numbers == out.page_numbers);
  CHECK(heaviest > 5);
  CHECK(heaviest < 10 * 1152 / budget * 1.01);
  CHECK(read / draws == doctest::Approx(budget).epsilon(0.05));
}
