// Groups of neighbouring tokens of a question that share a list of quads. Every fourth token of a
// group, and the last, selects. The CPU and devices use the same groups.
#pragma once

#include <cstdint>

namespace kvasir {

// Query rows that share a pass over the pages: the int32 scores of a tile stay in L1.
constexpr uint32_t query_group_rows = 128;
constexpr uint32_t query_group_stride = 4;  // tokens from one that selects to the next

// Tokens of a query group; `group` query heads per KV head.
constexpr uint32_t query_group_tokens(uint32_t group) {
  return group < query_group_rows ? query_group_rows / group : 1;
}

// `count` neighbouring tokens from `first` on, which share a list.
struct QueryGroup {
  uint32_t first, count;
  // How many tokens select, and the i-th of them.
  constexpr uint32_t selecting() const {
    return (count + query_group_stride - 1) / query_group_stride;
  }
  constexpr uint32_t first_selecting_token() const {
    return first + (count - 1) % query_group_stride;
  }
  constexpr uint32_t token(uint32_t i) const {
    return first_selecting_token() + i * query_group_stride;
  }
};

// The number of query groups of n tokens, all of about the same size.
constexpr uint32_t query_groups(uint32_t n, uint32_t group) {
  return (n + query_group_tokens(group) - 1) / query_group_tokens(group);
}
// The most tokens of one of `blocks` groups that select.
constexpr uint32_t max_selecting_tokens(uint32_t n, uint32_t blocks) {
  return ((n + blocks - 1) / blocks + query_group_stride - 1) / query_group_stride;
}
// Group b of `blocks`.
constexpr QueryGroup query_group_of(uint32_t n, uint32_t blocks, uint32_t b) {
  const auto begin = static_cast<uint32_t>(uint64_t{n} * b / blocks),
             end = static_cast<uint32_t>(uint64_t{n} * (b + 1) / blocks);
  return {begin, end - begin};
}
// The number of the group that has `token`.
constexpr uint32_t query_group_at(uint32_t n, uint32_t blocks, uint32_t token) {
  return static_cast<uint32_t>((uint64_t{token + 1} * blocks - 1) / n);
}

}  // namespace kvasir
