// An incremental UTF-8 decoder: bytes in as tokens produce them, whole characters out.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace kvasir {

class Utf8Stream {
 public:
  // Adds bytes and appends every complete character to *out; keeps an incomplete tail (at most 3
  // bytes). Bytes that cannot become a character become U+FFFD, one per maximal bad sequence.
  void push(std::string_view bytes, std::string* out);
  // Ends the text: an incomplete tail becomes U+FFFD.
  void finish(std::string* out);
  void reset() { pending_.clear(); }

 private:
  std::string pending_;
};

}  // namespace kvasir
