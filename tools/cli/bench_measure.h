// The measurements of kvasir bench: speeds at a depth, and what a mapped file costs in time and
// memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "console.h"

namespace tool {

struct Samples {
  std::vector<double> values;
  double median() const;
};

struct DecodeSpeed {
  std::string strategy;
  Samples tokens_per_second;
  Json stats;  // after the last repetition
};

struct MappedCost {
  std::string strategy;
  Samples load_ms;
  Samples first_token_ms;       // of an answer to a short question, right after loading
  Samples tokens_per_second;    // of what follows
  uint64_t kv_bytes = 0;        // in the file
  uint64_t resident_bytes = 0;  // of the file's mapping, at the end of the answer
  Json stats;                   // after the last repetition
};

struct DepthResult {
  uint64_t depth = 0;  // tokens before
  Samples prefill_tokens_per_second;
  std::vector<DecodeSpeed> decode;  // in the order of the strategies
  std::vector<MappedCost> mapped;
};

struct BenchModel {
  Model model;
  kv_model_information info{};
};

// Depths come sorted; a sequence grows through them, read or made up, and every measurement is made
// on a fork of it.
std::vector<DepthResult> measure(Console& console, const BenchModel& model,
                                 const BenchArguments& arguments);

// Resident bytes of this process's mappings of a file; nothing where the system does not tell.
std::optional<uint64_t> resident_bytes_of(const std::string& path);

}  // namespace tool
