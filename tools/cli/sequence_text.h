// What a saved sequence holds of a document. The comparison is of text, byte for byte, so a cache
// is never taken for another document's.
#pragma once

#include <cstddef>
#include <string>

#include "console.h"

namespace tool {

struct Holdings {
  enum Kind {
    whole,      // exactly this document
    beginning,  // its first `bytes` bytes
    more,       // this document and something after it
    other,
  };
  Kind kind = other;
  size_t bytes = 0;
};

Holdings compare(Console& console, kv_model* model, const kv_session* session,
                 const std::string& document);

}  // namespace tool
