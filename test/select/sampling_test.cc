// Samples against the definition of select/sampling.h, and what they promise: sums that are right on average.
#include <algorithm>
#include <bit>
#include <numeric>

#include "helpers.h"
#include "select/sampling.h"

using namespace kvasir;
using test::Asked;
using test::random_store;

namespace {

constexpr uint32_t first = 2, end = 80, blocks = end - first;

struct Chosen {
  std::vector<uint32_t> numbers;  // of blocks, ascending
  std::vector<double> weights;
};

// From shares of blocks 2 to 79 of a store whose pages have two blocks of 16.
Chosen sample(const Asked& asked, uint32_t layer, const std::vector<float>& shares, const SampleSize& size) {
  SelectorQuery query = asked.query(0, true);
  query.layer = layer;
  SelectorScratch scratch;
  scratch.scores.assign(first, 100.0f);
  scratch.scores.insert(scratch.scores.end(), shares.begin(), shares.end());
  Selection out;
  begin_selection(1, &out);
  begin_samples(&out);
  sample_list(query, {16, first, end, end}, 0, size, &scratch, &out);
  std::vector<std::pair<uint32_t, double>> found;
  const auto add = [&](const Array<PageRef>& pages, const Array<uint32_t>& numbers, bool sampled) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      CHECK((sampled ? pages[i].bias > 0 : pages[i].bias == 0));
      if (sampled) CHECK(std::popcount(pages[i].tokens) == 16);
      if (i > 0) CHECK((sampled ? numbers[i] >= numbers[i - 1] : numbers[i] > numbers[i - 1]));
      for (uint32_t half : {0u, 1u})
        if (const uint64_t tokens = pages[i].tokens >> 16 * half & 0xffff) {
          CHECK(tokens == 0xffff);
          found.push_back({numbers[i] * 2 + half, std::exp(static_cast<double>(pages[i].bias))});
        }
    }
  };
  add(out.lists[0], out.page_numbers[0], false);
  add(out.samples[0], out.sample_numbers[0], true);
  std::sort(found.begin(), found.end());
  CHECK(out.tokens == found.size() * 16);
  Chosen chosen;
  for (const auto& [number, weight] : found) chosen.numbers.push_back(number), chosen.weights.push_back(weight);
  return chosen;
}

std::vector<float> random_shares(std::mt19937* random, float power, float sum) {
  std::exponential_distribution<float> exponential;
  std::vector<float> shares(blocks);
  for (float& s : shares) s = std::pow(exponential(*random), power);
  const float all = std::accumulate(shares.begin(), shares.end(), 0.0f);
  for (float& s : shares) s *= sum / all;
  return shares;
}

}  // namespace

TEST_CASE("a sample is the fewest blocks of the highest priorities that leave no more variance than is allowed, each with its weight") {
  const PageStore store = random_store(64, 40, 2, 64);
  const Asked asked(store, 1, 3, 5);
  std::mt19937 random(3);
  for (uint32_t layer = 0; layer < 5; ++layer)
    for (double variance : {1e-6, 1e-4, 1e-3, 1e-2, 1.0})
      for (const auto& [least, most] : {std::pair{0u, 0u}, {0u, 5u}, {1u, 16u}, {5u, 5u}, {10u, 200u}, {77u, 78u}, {78u, 78u}, {100u, 200u}}) {
        std::vector<float> shares = random_shares(&random, 4, 0.8f);
        if (layer == 4) shares[5] = shares[6] = shares[60] = 0;
        const Chosen got = sample(asked, layer, shares, {least, most, variance});
        std::vector<float> priorities(blocks);
        cpu_kernels().sample_priorities(shares.data(), blocks, first, sample_seed(layer, asked.kv_head), priorities.data());
        std::vector<uint32_t> order(blocks);
        std::iota(order.begin(), order.end(), 0u);
        std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return priorities[a] > priorities[b]; });
        const auto left_out = [&](std::size_t i) { return i < blocks ? static_cast<double>(priorities[order[i]]) : 0; };
        const auto left = [&](std::size_t i) {
          double sum = 0;
          for (float s : shares) sum += static_cast<double>(s) * std::max(left_out(i) - static_cast<double>(s), 0.0);
          return sum;
        };
        std::size_t want = std::min(least, blocks);
        while (want < std::min(most, blocks) && left(want) > variance) ++want;
        double t = left_out(want);
        if (want > least && want < std::min(most, blocks)) {  // the threshold at which the variance is the allowed one
          double high = left_out(want - 1);
          for (int i = 0; i < 100; ++i) {
            const double middle = (t + high) / 2;
            double sum = 0;
            for (float s : shares) sum += static_cast<double>(s) * std::max(middle - static_cast<double>(s), 0.0);
            (sum <= variance ? t : high) = middle;
          }
        }
        std::vector<uint32_t> numbers;
        for (std::size_t i = 0; i < want; ++i)
          if (priorities[order[i]] > 0 || least >= blocks) numbers.push_back(order[i] + first);
        std::sort(numbers.begin(), numbers.end());
        CAPTURE(least);
        CAPTURE(most);
        CAPTURE(variance);
        REQUIRE(got.numbers == numbers);
        for (std::size_t i = 0; i < numbers.size(); ++i)
          CHECK(got.weights[i] == doctest::Approx(std::max(1.0, t / static_cast<double>(shares[numbers[i] - first]))).epsilon(1e-4));
      }
}

TEST_CASE("sums over a sample are on average those over everything, however wrong the shares are") {
  const PageStore store = random_store(64, 40, 2, 64);
  const Asked asked(store, 1, 3, 5);
  std::mt19937 random(4);
  std::normal_distribution<double> normal;
  for (float power : {0.5f, 2.0f, 6.0f}) {
    const std::vector<float> shares = random_shares(&random, power, 1);
    std::vector<double> asked_of(blocks);  // what has little to do with the shares
    double want = 0;
    for (double& x : asked_of) want += x = 1 + normal(random);
    for (uint32_t count : {4u, 20u}) {
      constexpr uint32_t times = 6000;
      double sum = 0, squares = 0, of_shares = 0;
      for (uint32_t layer = 0; layer < times; ++layer) {
        const Chosen chosen = sample(asked, layer, shares, {count, count, 0});
        double its = 0;
        for (std::size_t i = 0; i < chosen.numbers.size(); ++i) {
          its += chosen.weights[i] * asked_of[chosen.numbers[i] - first];
          of_shares += chosen.weights[i] * static_cast<double>(shares[chosen.numbers[i] - first]) / times;
        }
        sum += its, squares += its * its;
      }
      const double mean = sum / times, error = std::sqrt((squares / times - mean * mean) / times);
      CAPTURE(power);
      CAPTURE(count);
      CHECK(of_shares == doctest::Approx(1).epsilon(0.02));
      if (power < 3) CHECK(std::fabs(mean - want) < 5 * error);  // beyond, blocks that hardly ever come decide the sum
    }
  }
}

TEST_CASE("where a variance decides how many there are, the sum of the shares is right on average too") {
  const PageStore store = random_store(64, 40, 2, 64);
  const Asked asked(store, 1, 3, 5);
  std::mt19937 random(6);
  for (float power : {2.0f, 6.0f})
    for (double error : {0.05, 0.1, 0.2}) {
      const std::vector<float> shares = random_shares(&random, power, 1);
      constexpr uint32_t times = 8000;
      double sum = 0, squares = 0;
      for (uint32_t layer = 0; layer < times; ++layer) {
        const Chosen chosen = sample(asked, layer, shares, {1, 1000, error * error});
        double its = 0;
        for (std::size_t i = 0; i < chosen.numbers.size(); ++i) its += chosen.weights[i] * static_cast<double>(shares[chosen.numbers[i] - first]);
        sum += its / times, squares += its * its / times;
      }
      CAPTURE(power);
      CAPTURE(error);
      CHECK(sum == doctest::Approx(1).epsilon(0.005));
      CHECK(std::sqrt(squares - sum * sum) < 1.15 * error);
    }
}

TEST_CASE("a coverage is a standard error, a quarter of the budget to four times it its limits; a budget alone is the number") {
  const SampleSize by_budget = sample_size(1000, 0, 16, 3);
  CHECK((by_budget.least == 63 && by_budget.most == 63 && by_budget.variance == 0));
  const SampleSize by_coverage = sample_size(1600, 0.9f, 16, 3);
  CHECK((by_coverage.least == 25 && by_coverage.most == 400));
  CHECK(by_coverage.variance == doctest::Approx(0.09).epsilon(1e-6));
}
