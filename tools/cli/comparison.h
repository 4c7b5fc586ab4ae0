// Sums over answers of "compared", the comparison with exact attention in kv_session_stats_json.
#pragma once

#include <cstdint>
#include <vector>

#include "console.h"

namespace tool {

// Sums over query heads and tokens.
struct ComparisonSum {
  uint64_t queries = 0;
  double mass = 0, min_mass = 1;
  double error = 0, largest_error = 0;
  double recall = 0, min_recall = 1;
  double tokens = 0;
  double searches = 0, search_keys = 0, search_recall = 0;  // of query heads alone
  double estimated_queries = 0, mass_estimated = 0, estimate_error = 0;
  // certificate_excess: the largest; over 0 would be a wrong certificate
  double certified_queries = 0, certificate = 0, certificate_excess = -1;

  void add(const Json& head);
  void add(const ComparisonSum& other);
  Json json() const;  // means
};

class ComparisonSums {
 public:
  // Adds the statistics of a session after an answer. Throws Json::exception.
  void add(const Json& stats);

  ComparisonSum all() const;
  // [layers][kv_heads]
  const std::vector<std::vector<ComparisonSum>>& layers() const { return layers_; }
  uint64_t keys_scanned() const { return keys_scanned_; }
  uint64_t summary_bytes() const { return summary_bytes_; }
  uint64_t covered_steps() const { return covered_steps_; }
  std::vector<std::vector<double>> covered() const;  // [layers][layers] means

 private:
  std::vector<std::vector<ComparisonSum>> layers_;
  uint64_t keys_scanned_ = 0, summary_bytes_ = 0, covered_steps_ = 0;
  std::vector<std::vector<double>> covered_;
};

}  // namespace tool
