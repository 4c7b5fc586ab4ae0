// Hashes of a sequence's tokens, block by block, each with the one before as its seed: two
// sequences with the same hash of a block have, but for chance, all tokens up to its end in common.
// The first seed is the key: what the reading depended on besides the tokens, so that sequences
// that were read differently have nothing in common.
//
// In a cache file (section chain): u64 key, u64 [ceil(tokens / block)].
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/checksum.h"
#include "base/memory.h"
#include "base/status.h"

namespace kvasir {

struct TokenChain {
  static constexpr std::size_t block = 256;  // tokens

  uint64_t key = 0;
  Array<uint64_t> hashes;

  static TokenChain of(std::span<const int32_t> tokens, uint64_t key) {
    TokenChain chain{key, {}};
    chain.hashes.reserve(tokens.size() / block + 1);
    for (; !tokens.empty(); tokens = tokens.subspan(std::min(block, tokens.size()))) {
      const auto part = tokens.first(std::min(block, tokens.size()));
      chain.hashes.push_back(checksum(part.data(), part.size_bytes(),
                                      chain.hashes.empty() ? key : chain.hashes.back()));
    }
    return chain;
  }

  // Of the text `tokens`, with this chain, how many tokens at least it begins with in common with
  // another sequence of `count` tokens: whole blocks, or all of that sequence.
  uint64_t common(std::span<const int32_t> tokens, const TokenChain& other, uint64_t count) const {
    if (key != other.key) return 0;
    const std::size_t whole = std::min<std::size_t>(tokens.size(), count) / block;
    std::size_t same = 0;
    while (same < whole && hashes[same] == other.hashes[same]) ++same;
    const uint64_t at = same * block, rest = count - at;
    if (rest == 0 || rest >= block || tokens.size() - at < rest) return at;
    const uint64_t last =
        checksum(tokens.data() + at, rest * sizeof tokens[0], same ? hashes[same - 1] : key);
    return last == other.hashes[same] ? count : at;
  }
};

}  // namespace kvasir
