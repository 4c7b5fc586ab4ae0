// Finds the spellings of special tokens in text: the leftmost first, and the longest of those at
// the same place.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/cancel.h"
#include "base/memory.h"
#include "text/vocabulary.h"

namespace kvasir {

// A trie. A search costs at most the size of the text times the longest spelling, which gguf_limits
// bounds (tens of bytes in practice), and in ordinary text one table look-up per byte. A step takes
// at most eight comparisons for any spellings.
class SpecialMatcher {
 public:
  struct Match {
    std::size_t begin, end;  // bytes of the text
    Token token;
  };

  // Matches user-defined tokens always, and control and unknown tokens on request.
  explicit SpecialMatcher(const Vocabulary& vocabulary);

  // The first match at or after `from`. False when there is none, or when cancelled.
  bool find(std::string_view text, std::size_t from, bool with_control, CancelPoll* cancel,
            Match* out) const;

 private:
  struct Node {
    uint32_t child = 0;     // index of the first child
    uint16_t children = 0;  // up to 256
    unsigned char byte = 0;
    bool is_control = false;  // of the token
    Token token = -1;         // that ends here
  };
  struct Range;
  uint32_t step(uint32_t node, unsigned char byte) const;  // 0 when there is no such child

  Array<Node> nodes_;         // [0] is the root
  uint32_t first_[256] = {};  // the root's children
  bool has_user_defined_ = false;
};

}  // namespace kvasir
