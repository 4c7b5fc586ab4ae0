// Which tokens of a question choose for which: neighbours share a list of quads, and every fourth
// of them asks for it. For the CPU and devices alike.
#pragma once

#include <cstdint>

namespace kvasir {

// query rows that share a pass over the pages: int32 scores of a tile stay in L1
constexpr uint32_t question_rows = 128;
constexpr uint32_t selecting_stride = 4;  // of tokens

// Tokens of a block, whose heads are `group` to a KV head.
constexpr uint32_t question_tokens(uint32_t group) {
  return group < question_rows ? question_rows / group : 1;
}

// `count` neighbours, from `first` on, that share a list. Every fourth one asks, the last among
// them.
struct QueryGroup {
  uint32_t first, count;
  constexpr uint32_t asking() const { return (count + selecting_stride - 1) / selecting_stride; }
  constexpr uint32_t first_selecting() const { return first + (count - 1) % selecting_stride; }
  constexpr uint32_t token(uint32_t i) const { return first_selecting() + i * selecting_stride; }
};

// n tokens in so many blocks of about the same size, how many ask in one of them at most; block b
// of them, and a token's.
constexpr uint32_t question_blocks(uint32_t n, uint32_t group) {
  return (n + question_tokens(group) - 1) / question_tokens(group);
}
constexpr uint32_t max_selecting(uint32_t n, uint32_t blocks) {
  return ((n + blocks - 1) / blocks + selecting_stride - 1) / selecting_stride;
}
constexpr QueryGroup query_group_of(uint32_t n, uint32_t blocks, uint32_t b) {
  const auto begin = static_cast<uint32_t>(uint64_t{n} * b / blocks),
             end = static_cast<uint32_t>(uint64_t{n} * (b + 1) / blocks);
  return {begin, end - begin};
}
constexpr uint32_t question_block(uint32_t n, uint32_t blocks, uint32_t token) {
  return static_cast<uint32_t>((uint64_t{token + 1} * blocks - 1) / n);
}

}  // namespace kvasir
