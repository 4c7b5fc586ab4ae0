// Hashes of a sequence's tokens, block by block; the seed of each is the hash of the block before.
// Two sequences with the same hash of a block share, except by chance, all tokens up to its end.
// The first seed is the key: it covers what the KV cache depends on besides the tokens, so that
// sequences with different prefill share nothing.
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

  // How many tokens the text `tokens`, with this chain, shares at least with the beginning of
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
