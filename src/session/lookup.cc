#include "session/lookup.h"

#include <algorithm>

namespace kvasir {

constexpr std::size_t block_tokens = 128;  // that are compared at once
// Comparisons of a scan behind the two newest tokens: a text of repetitions has many places.
constexpr uint64_t max_compared = 1 << 16;

// Whether tokens p[i - 1], p[i] are `before`, `last` for an i < n.
static bool has_pair(const Token* p, std::size_t n, Token before, Token last) {
  uint32_t any = 0;
  for (std::size_t i = 0; i < n; ++i)
    any |= uint32_t{p[i] == last} & uint32_t{p[static_cast<std::ptrdiff_t>(i) - 1] == before};
  return any != 0;
}

LookupMatch find_newest(std::span<const Token> tokens, Token next) {
  LookupMatch best;
  if (tokens.size() < LookupMatch::min_length) return best;
  const Token* const p = tokens.data();
  const Token before = tokens.back();
  uint64_t compared = 0;
  // Of the run that ends at i; the sequence's own ends at size - 1, followed by `next`.
  const auto length_at = [&](std::size_t i) {
    const auto most = static_cast<uint32_t>(std::min<std::size_t>(LookupMatch::max_length, i + 1));
    uint32_t length = 2;
    while (length < most && p[i - length] == p[tokens.size() - length]) ++length;
    compared += length;
    return length;
  };
  for (std::size_t end = tokens.size(); end > 1 && compared < max_compared;) {
    const std::size_t begin = end - std::min(end - 1, block_tokens);
    const bool some = has_pair(p + begin, end - begin, before, next);
    for (std::size_t i = end; some && i-- > begin;) {
      if (p[i] != next || p[i - 1] != before) continue;
      const uint32_t length = length_at(i);
      if (length > best.length) best = {length, i + 1};
      if (length == LookupMatch::max_length) return best;
    }
    end = begin;
  }
  return best;
}

void append_lookup(std::span<const Token> tokens, Token next, const LookupMatch& match,
                   uint32_t count, Array<Token>* out) {
  const std::size_t first = out->size(), size = tokens.size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = match.end + i;
    out->push_back(at < size ? tokens[at] : at == size ? next : (*out)[first + (at - size - 1)]);
  }
}

}  // namespace kvasir
