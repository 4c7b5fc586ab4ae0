#include "comparison.h"

#include <algorithm>

namespace tool {

void ComparisonSum::add(const Json& head) {
  ComparisonSum one;
  one.queries = head.at("queries").get<uint64_t>();
  const auto n = static_cast<double>(one.queries);
  const auto real = [&](const char* name) { return head.at(name).get<double>(); };
  one.mass = n * real("mass");
  one.min_mass = real("min_mass");
  one.error = n * real("error");
  one.largest_error = real("largest_error");
  one.recall = n * real("recall");
  one.min_recall = real("min_recall");
  one.tokens = n * real("tokens");
  if (head.contains("search_keys")) {
    one.searches = n;
    one.search_keys = n * real("search_keys");
    one.search_recall = n * real("search_recall");
  }
  if (head.contains("mass_estimated")) {
    one.estimated_queries = n;
    one.mass_estimated = n * real("mass_estimated");
    one.estimate_error = n * real("estimate_error");
  }
  if (head.contains("certificate")) {
    one.certified_queries = n;
    one.certificate = n * real("certificate");
    one.certificate_excess = real("certificate_excess");
  }
  add(one);
}

void ComparisonSum::add(const ComparisonSum& o) {
  queries += o.queries;
  mass += o.mass;
  min_mass = std::min(min_mass, o.min_mass);
  error += o.error;
  largest_error = std::max(largest_error, o.largest_error);
  recall += o.recall;
  min_recall = std::min(min_recall, o.min_recall);
  tokens += o.tokens;
  searches += o.searches;
  search_keys += o.search_keys;
  search_recall += o.search_recall;
  estimated_queries += o.estimated_queries;
  mass_estimated += o.mass_estimated;
  estimate_error += o.estimate_error;
  certified_queries += o.certified_queries;
  certificate += o.certificate;
  certificate_excess = std::max(certificate_excess, o.certificate_excess);
}

Json ComparisonSum::json() const {
  const auto n = static_cast<double>(std::max<uint64_t>(queries, 1));
  Json json = {{"queries", queries},
               {"mass", mass / n},
               {"min_mass", min_mass},
               {"error", error / n},
               {"largest_error", largest_error},
               {"recall", recall / n},
               {"min_recall", min_recall},
               {"tokens", tokens / n}};
  if (searches > 0) {
    json["search_keys"] = search_keys / searches;
    json["search_recall"] = search_recall / searches;
  }
  if (estimated_queries > 0) {
    json["mass_estimated"] = mass_estimated / estimated_queries;
    json["estimate_error"] = estimate_error / estimated_queries;
  }
  if (certified_queries > 0) {
    json["certificate"] = certificate / certified_queries;
    json["certificate_excess"] = certificate_excess;
  }
  return json;
}

void ComparisonSums::add(const Json& stats) {
  const Json& compared = stats.at("compared");
  const Json& layers = compared.at("layers");
  layers_.resize(std::max(layers_.size(), layers.size()));
  for (size_t l = 0; l < layers.size(); ++l) {
    layers_[l].resize(layers[l].size());
    for (size_t h = 0; h < layers[l].size(); ++h) layers_[l][h].add(layers[l][h]);
  }
  keys_scanned_ += stats.at("last_keys_scanned").get<uint64_t>();
  summary_bytes_ += stats.at("last_summary_bytes").get<uint64_t>();
  const auto steps = compared.at("covered_steps").get<uint64_t>();
  const Json& covered = compared.at("covered");
  covered_steps_ += steps;
  covered_.resize(std::max(covered_.size(), covered.size()), std::vector<double>(covered.size()));
  for (size_t i = 0; i < covered.size(); ++i)
    for (size_t j = 0; j < covered.size(); ++j)
      covered_[i][j] += static_cast<double>(steps) * covered[i][j].get<double>();
}

ComparisonSum ComparisonSums::all() const {
  ComparisonSum sum;
  for (const auto& layer : layers_)
    for (const ComparisonSum& head : layer) sum.add(head);
  return sum;
}

std::vector<std::vector<double>> ComparisonSums::covered() const {
  std::vector<std::vector<double>> means = covered_;
  for (auto& row : means)
    for (double& x : row) x /= static_cast<double>(std::max<uint64_t>(covered_steps_, 1));
  return means;
}

}  // namespace tool
