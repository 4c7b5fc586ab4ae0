// An incremental UTF-8 decoder: bytes in as tokens produce them, whole characters out.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace kvasir {

class Utf8Stream {
 public:
  // Adds bytes and appends to *out every complete character; an incomplete tail (at most 3 bytes)
  // is kept. Bytes that can never become a character come out as U+FFFD, one for each maximal bad
  // sequence.
  void push(std::string_view bytes, std::string* out);
  // The end: an incomplete tail comes out as U+FFFD.
  void finish(std::string* out);
  void reset() { pending_.clear(); }

 private:
  std::string pending_;
};

}  // namespace kvasir
