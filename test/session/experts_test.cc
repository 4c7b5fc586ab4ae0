// Mixtures of experts: routing against a plain implementation, and whole models.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "engine/expert_routing.h"
#include "helpers.h"

using namespace kvasir;

namespace {

using Choices = std::vector<ExpertChoice>;

// By the definition, in double precision, by sorting.
Choices plain_choice(const ExpertConfig& c, const std::vector<float>& logits,
                     const std::vector<float>& bias) {
  const uint32_t n = c.count;
  std::vector<double> p(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  for (double& x : p) {
    if (c.gating == Gating::softmax) x = std::exp(x) / sum;
    if (c.gating == Gating::sigmoid) x = 1 / (1 + std::exp(-x));
  }
  std::vector<double> score = p;
  if (c.chooses_by_logits) score.assign(logits.begin(), logits.end());
  for (uint32_t e = 0; e < n; ++e) score[e] += bias.empty() ? 0.0 : static_cast<double>(bias[e]);

  const auto best_first = [](const std::vector<double>& values) {
    std::vector<uint32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return values[a] > values[b]; });
    return order;
  };
  const uint32_t size = n / c.groups;
  std::vector<double> groups;
  for (uint32_t g = 0; g < c.groups; ++g) {
    std::vector<double> in(score.begin() + g * size, score.begin() + (g + 1) * size);
    std::sort(in.rbegin(), in.rend());
    groups.push_back(in[0] + (size > 1 ? in[1] : 0));
  }
  std::vector<uint32_t> kept = best_first(groups);
  kept.resize(c.groups_used);

  Choices out;
  for (const uint32_t e : best_first(score)) {
    if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) continue;
    if (out.size() < c.used) out.push_back({e, 0});
  }
  double total = 0, chosen = 0;
  for (const ExpertChoice& e : out) total += std::exp(p[e.expert]), chosen += p[e.expert];
  for (ExpertChoice& e : out) {
    double weight = p[e.expert];
    if (c.gating == Gating::softmax_chosen) weight = std::exp(weight) / total;
    if (c.normalise) weight /= std::max(chosen, 6.1e-5);
    e.weight = static_cast<float>(weight * static_cast<double>(c.scale));
  }
  return out;
}

Choices choice(const ExpertConfig& c, std::vector<float> logits, const std::vector<float>& bias) {
  std::vector<float> scores(2 * c.count);
  Choices out(c.used);
  choose_experts(c, bias.empty() ? nullptr : bias.data(), logits.data(), scores.data(), out.data());
  return out;
}

void check_same(const Choices& a, const Choices& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i].expert == b[i].expert);
    CHECK(a[i].weight == doctest::Approx(b[i].weight).epsilon(1e-5));
  }
}

}  // namespace

TEST_CASE("experts are chosen and weighed as the definition says, by every gating and grouping") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const Gating gating : {Gating::softmax, Gating::sigmoid, Gating::softmax_chosen})
    for (const uint32_t groups : {1u, 2u, 4u, 8u, 32u})
      for (const bool normalise : {false, true})
        for (const bool biased : {false, true}) {
          if (gating == Gating::softmax_chosen && normalise) continue;  // already
          ExpertConfig c;
          c.count = 32, c.used = groups == 32 ? 4 : 6;
          c.gating = gating, c.normalise = normalise;
          c.groups = groups, c.groups_used = groups == 32 ? 9 : (groups + 1) / 2 + (groups == 8);
          c.scale = normalise ? 2.5f : 1;
          c.chooses_by_logits = gating == Gating::sigmoid && !biased && !normalise;
          for (int i = 0; i < 50; ++i) {
            std::vector<float> logits(c.count), bias(biased ? c.count : 0);
            for (float& x : logits) x = 2 * normal(random);
            for (float& x : bias) x = normal(random) / 4;
            check_same(choice(c, logits, bias), plain_choice(c, logits, bias));
          }
        }
}

TEST_CASE("equal experts and equal groups are chosen by their number, never one twice") {
  ExpertConfig c;
  c.count = 8, c.used = 3, c.groups = 4, c.groups_used = 2;
  const auto experts = [&](const std::vector<float>& logits) {
    std::vector<uint32_t> out;
    for (const ExpertChoice& e : choice(c, logits, {})) out.push_back(e.expert);
    return out;
  };
  CHECK(experts(std::vector<float>(8, 1.5f)) == std::vector<uint32_t>{0, 1, 2});
  CHECK(experts({0, 0, 3, 1, 1, 3, 0, 0}) == std::vector<uint32_t>{2, 5, 3});
  // Infinitely unlikely experts: their probabilities are zeros, which are equal.
  CHECK(experts({-3e38f, -3e38f, -3e38f, 3e38f, -3e38f, -3e38f, -3e38f, -3e38f}) ==
        std::vector<uint32_t>{3, 0, 1});
}

TEST_CASE("weights of zeros stay zeros when they are normalised") {
  ExpertConfig c;
  c.count = 4, c.used = 2, c.normalise = true, c.gating = Gating::sigmoid;
  for (const ExpertChoice& e : choice(c, std::vector<float>(4, -200.0f), {})) CHECK(e.weight == 0);
}
