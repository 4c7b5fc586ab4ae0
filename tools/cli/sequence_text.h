// The text of a saved sequence, compared with a document byte for byte. A cache file is never taken
// for that of another document.
#pragma once

#include <cstddef>
#include <string>

#include "sessions.h"

namespace tool {

struct Overlap {
  enum Kind {
    whole,      // the sequence is exactly this document
    beginning,  // its first `bytes` bytes
    longer,     // this document with something after it
    other,
  };
  Kind kind = other;
  size_t bytes = 0;
};

// `flags` have the instructions before the document.
Overlap compare(Console& console, kv_model* model, const kv_session* session,
                const SessionFlags& flags, const std::string& document);

}  // namespace tool
