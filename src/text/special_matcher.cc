// Children of a node form a list of at most 256 siblings, so no vocabulary can make a step slow.
#include "text/special_matcher.h"

namespace kvasir {

constexpr std::size_t kLookEvery = 4096;  // bytes between two looks at the cancel token

SpecialMatcher::SpecialMatcher(const Vocabulary& vocabulary) : nodes_(1) {
  for (uint32_t i = 0; i < vocabulary.size(); ++i) {
    const auto token = static_cast<Token>(i);
    const TokenKind kind = vocabulary.kind(token);
    const bool is_control = kind == TokenKind::control || kind == TokenKind::unknown;
    if (vocabulary.text(token).empty() || !(is_control || kind == TokenKind::user_defined)) continue;
    insert(vocabulary.text(token), token, is_control);
    has_user_defined_ |= !is_control;
  }
}

uint32_t SpecialMatcher::step(uint32_t node, unsigned char byte) const {
  if (node == 0) return first_[byte];
  uint32_t child = nodes_[node].child;
  while (child != 0 && nodes_[child].byte != byte) child = nodes_[child].sibling;
  return child;
}

void SpecialMatcher::insert(std::string_view text, Token token, bool is_control) {
  uint32_t node = 0;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    uint32_t child = step(node, byte);
    if (child == 0) {
      child = static_cast<uint32_t>(nodes_.size());
      nodes_.push_back(Node{.sibling = nodes_[node].child, .byte = byte});
      nodes_[node].child = child;
      if (node == 0) first_[byte] = child;
    }
    node = child;
  }
  if (nodes_[node].token >= 0) return;  // of equal spellings the first stands
  nodes_[node].token = token;
  nodes_[node].is_control = is_control;
}

bool SpecialMatcher::find(std::string_view text, std::size_t from, bool with_control, CancelPoll* cancel, Match* out) const {
  if (!with_control && !has_user_defined_) return false;
  for (std::size_t begin = from; begin < text.size(); ++begin) {
    if (begin % kLookEvery == 0 && cancel->stop(kLookEvery)) return false;
    uint32_t node = first_[static_cast<unsigned char>(text[begin])];
    bool found = false;
    for (std::size_t end = begin + 1; node != 0; ++end) {
      if (nodes_[node].token >= 0 && (with_control || !nodes_[node].is_control)) {
        *out = {begin, end, nodes_[node].token};
        found = true;
      }
      if (end == text.size()) break;
      node = step(node, static_cast<unsigned char>(text[end]));
    }
    if (found) return true;
  }
  return false;
}

}  // namespace kvasir
