// The children of a node are contiguous and sorted by their bytes, so a step is a binary search
// among at most 256.
#include "text/special_matcher.h"

#include <algorithm>

namespace kvasir {

// A node's spellings while the trie is built: [first, last) of the sorted tokens.
struct SpecialMatcher::Range {
  uint32_t first, last;
};

SpecialMatcher::SpecialMatcher(const Vocabulary& vocabulary) {
  const auto is_control = [&](Token token) {
    return vocabulary.kind(token) == TokenKind::control ||
           vocabulary.kind(token) == TokenKind::unknown;
  };
  Array<Token> tokens;  // of equal spellings the first token comes first
  for (uint32_t i = 0; i < vocabulary.size(); ++i) {
    const auto token = static_cast<Token>(i);
    const bool user_defined = vocabulary.kind(token) == TokenKind::user_defined;
    if (vocabulary.text(token).empty() || !(user_defined || is_control(token))) continue;
    tokens.push_back(token);
    has_user_defined_ |= user_defined;
  }
  std::sort(tokens.begin(), tokens.end(), [&](Token a, Token b) {
    const int order = vocabulary.text(a).compare(vocabulary.text(b));
    return order != 0 ? order < 0 : a < b;
  });

  // Level by level: reads each byte of the spellings once.
  Array<Range> level, next;
  level.push_back({0, static_cast<uint32_t>(tokens.size())});
  nodes_.push_back({});
  uint32_t node = 0;  // the first of the level
  for (std::size_t depth = 0; !level.empty(); ++depth) {
    next.clear();
    for (Range range : level) {
      const auto text = [&](uint32_t i) { return vocabulary.text(tokens[i]); };
      while (range.first < range.last && text(range.first).size() == depth) {
        if (nodes_[node].token < 0)
          nodes_[node].token = tokens[range.first],
          nodes_[node].is_control = is_control(tokens[range.first]);
        ++range.first;
      }
      nodes_[node].child = static_cast<uint32_t>(nodes_.size());
      while (range.first < range.last) {
        const auto byte = static_cast<unsigned char>(text(range.first)[depth]);
        Range child = {range.first, range.first};
        while (child.last < range.last &&
               static_cast<unsigned char>(text(child.last)[depth]) == byte)
          ++child.last;
        ++nodes_[node].children;
        if (depth == 0) first_[byte] = static_cast<uint32_t>(nodes_.size());
        nodes_.push_back({.byte = byte});
        next.push_back(child);
        range.first = child.last;
      }
      ++node;
    }
    level.swap(next);
  }
}

uint32_t SpecialMatcher::step(uint32_t node, unsigned char byte) const {
  const Node* const begin = nodes_.data() + nodes_[node].child;
  const Node* const end = begin + nodes_[node].children;
  const Node* const found =
      std::lower_bound(begin, end, byte, [](const Node& n, unsigned char b) { return n.byte < b; });
  return found == end || found->byte != byte ? 0 : static_cast<uint32_t>(found - nodes_.data());
}

bool SpecialMatcher::find(std::string_view text, std::size_t from, bool with_control,
                          CancelPoll* cancel, Match* out) const {
  if (!with_control && !has_user_defined_) return false;
  for (std::size_t begin = from; begin < text.size(); ++begin) {
    uint32_t node = first_[static_cast<unsigned char>(text[begin])];
    bool found = false;
    std::size_t end = begin + 1;
    for (; node != 0; ++end) {
      if (nodes_[node].token >= 0 && (with_control || !nodes_[node].is_control)) {
        *out = {begin, end, nodes_[node].token};
        found = true;
      }
      if (end == text.size()) break;
      node = step(node, static_cast<unsigned char>(text[end]));
    }
    if (cancel->stop(end - begin)) return false;
    if (found) return true;
  }
  return false;
}

}  // namespace kvasir
