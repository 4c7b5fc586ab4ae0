// Documents of synthetic keys and values, of any length. Answers over them take the time of real
// ones, and need no prefill. Their texts have no meaning.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sessions.h"

namespace tool {

// A growing document in a kv_cache. Its numbers depend on the seed alone, not on the steps of
// growth. Sessions share its pages.
class SyntheticDocument {
 public:
  SyntheticDocument(Console& console, const kv_model_info& model, const SessionFlags& flags,
                    uint64_t seed);

  void grow_to(uint64_t tokens);
  // A session over the whole document. The model prefills the newest tokens, those of the window.
  Session open(kv_model* model, std::span<const int32_t> tokens);

 private:
  struct Rows {
    std::vector<float> k, v;  // [layers][tokens][kv_heads][head_dim]
  };
  void make_centres();
  void make(uint64_t first, uint64_t count, Rows* rows) const;
  void make_token(uint64_t token, uint32_t layer, float* k, float* v) const;

  Console& console_;
  const kv_model_info model_;
  const SessionFlags flags_;
  const uint64_t seed_;
  const size_t width_;  // elements of a layer's keys per token
  const uint64_t step_tokens_;
  std::vector<float> means_;    // [layers][2][kv_heads][head_dim], keys and values
  std::vector<float> centres_;  // [layers][topics][kv_heads][head_dim], keys
  Cache cache_;
  uint64_t tokens_ = 0;
};

}  // namespace tool
