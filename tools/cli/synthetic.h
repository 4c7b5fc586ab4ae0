// Documents of made-up keys and values, as long as they are wanted: answers over them take the time
// that they take over a real one, and no text has to be read for it. What they say is nonsense.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "console.h"

namespace tool {

// One document that grows. The seed decides every number of it, and not how it grew; the store
// seals, sums up and keeps it as what it is given by an engine that reads. It shares its pages with
// its sessions.
class SyntheticDocument {
 public:
  SyntheticDocument(Console& console, const kv_model_information& model, const SessionFlags& flags,
                    uint64_t seed);

  void grow_to(uint64_t tokens);
  // Over all of it. The tokens are its own; the model reads the newest ones, those that a window
  // keeps in full precision.
  Session open(kv_model* model, std::span<const int32_t> tokens);

 private:
  struct Rows {
    std::vector<float> k, v;  // [layers][tokens][kv_heads][head_dim]
  };
  void make_centres();
  void make(uint64_t first, uint64_t count, Rows* rows) const;
  void make_token(uint64_t token, uint32_t layer, float* k, float* v) const;

  Console& console_;
  const kv_model_information model_;
  const SessionFlags flags_;
  const uint64_t seed_;
  const size_t width_;          // of a layer's keys
  const uint64_t at_once_;      // tokens
  std::vector<float> means_;    // [layers][2][kv_heads][head_dim], of keys and of values
  std::vector<float> centres_;  // [layers][topics][kv_heads][head_dim], of keys
  Cache cache_;
  uint64_t tokens_ = 0;
};

}  // namespace tool
