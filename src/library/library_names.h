// Types of both files of the library: a text whose document is to be saved, and its hashes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cachefile/token_chain.h"
#include "library/library.h"

namespace kvasir {

// What determines the marks and the system text of the turns. Views of a session.
struct Turns {
  Chat chat;
  std::string_view instructions;

  // Whether the next question gets the same turn. A file of an older library names no chat format:
  // any matches.
  Status match(const CachePeek& peek, bool* out) const;
};

struct Library::Wanted {
  std::string name;      // of the caller; empty: the hash
  std::string hash;      // of text, model and prefill: 16 hexadecimal digits
  bool replace = false;  // a document of that name
  Fingerprint model{};
  Turns turns;
  std::span<const Token> tokens;
  TokenChain exact;                   // of the text after exact prefill
  std::optional<TokenChain> sparse;   // after sparse prefill, if the session has it
  std::vector<std::string> damaged;   // documents that this text begins with: it replaces them
  std::vector<std::string> unusable;  // others that could not be used; they keep their names

  // Whether the file is a document of exactly this text, with the same turns.
  bool is_in(const CachePeek& peek) const;
};

}  // namespace kvasir
