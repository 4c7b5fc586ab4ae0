// The content of the golden documents: test/golden/write_golden.cc writes them, golden_test.cc
// reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvasir.h"
#include "strategies.h"

namespace golden {

constexpr std::size_t document_tokens = 200;
constexpr std::size_t continued_tokens = 8;
constexpr uint64_t budget_tokens = 32;

// The document, and what its continuation is scored by.
inline std::vector<int32_t> tokens(std::size_t count = document_tokens, uint32_t state = 11) {
  std::vector<int32_t> out(count);
  for (int32_t& token : out) {
    state = state * 1664525u + 1013904223u;
    token = static_cast<int32_t>(3 + (state >> 16) % 250);
  }
  return out;
}

inline kv_session_options options(const char* strategy) {
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.threads = 2;
  o.decode = strategies::budgeted(strategy, budget_tokens);
  o.window_tokens = 16;
  return o;
}

}  // namespace golden
