// The measurements of kvasir bench: speeds at a depth, and the time and memory of a mapped file.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "sessions.h"

namespace tool {

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct Samples {
  std::vector<double> values;
  double median() const;
};

struct DecodeSpeed {
  std::string strategy;
  Samples tokens_per_second;
  Json stats;  // after the last repetition; null without decode
};

struct MappedCost {
  std::string strategy;
  Samples load_ms;
  Samples first_token_ms;       // of an answer to a short question, right after load
  Samples tokens_per_second;    // of decode after it
  uint64_t kv_bytes = 0;        // in the file
  uint64_t resident_bytes = 0;  // of the file's mapping, at the end of the answer
  uint64_t private_bytes = 0;   // of the KV cache outside the file
  Json stats;                   // after the last repetition
};

struct DepthResult {
  uint64_t depth = 0;  // tokens before the measured ones
  Samples prefill_tokens_per_second;
  std::vector<DecodeSpeed> decode;  // in the order of the strategies
  std::vector<MappedCost> mapped;
};

struct BenchModel {
  Model model;
  kv_model_info info{};
  uint32_t threads = 0;
};

// Of a saved document. Each time but the first two ends with the first token of an answer.
struct ReuseCost {
  std::string strategy;
  Samples load_ms, first_token_ms;
  Samples rewind_ms;  // by 10 tokens
  Samples prefix_ms;  // load of the first 90% of the tokens
  Samples edit_ms;    // prefill of 100 other tokens in place of the last ones; no answer
  uint64_t file_bytes = 0;
};

// Depths are sorted. One sequence grows through them, and each measurement uses a fork.
std::vector<DepthResult> measure(Console& console, const BenchModel& model,
                                 const BenchArguments& arguments);

ReuseCost measure_reuse(Console& console, const BenchModel& model, const BenchArguments& arguments);

Session load_cache(Console& console, kv_model* model, const std::string& path,
                   const SessionOptions& options);

// The answer to a short question, of at most `count` tokens.
kv_answer short_answer(Console& console, kv_session* session, uint64_t count);

// Resident bytes of this process's mappings of a file; none where the system has no such count.
std::optional<uint64_t> resident_bytes_of(const std::string& path);

}  // namespace tool
