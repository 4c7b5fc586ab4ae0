// What the library's two files share: a text whose document is to be saved, and what it is known
// by.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cachefile/token_chain.h"
#include "library/library.h"

namespace kvasir {

struct Library::Wanted {
  std::string name;      // as the caller wants it; empty: the hash
  std::string hash;      // of text, model and way of reading: 16 hexadecimal digits
  bool replace = false;  // a document of that name
  Fingerprint model{};
  std::span<const Token> tokens;
  TokenChain exact;                   // of the text that was read exactly
  std::optional<TokenChain> sparse;   // and sparsely, where the session reads so
  std::vector<std::string> damaged;   // documents that this text begins with, whose place it takes
  std::vector<std::string> unusable;  // others that could not be used; they keep their names

  // Whether that is a document of all of this text and no more.
  bool is_in(const CachePeek& peek) const;
};

}  // namespace kvasir
