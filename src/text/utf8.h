// UTF-8: one step over untrusted bytes, and an incremental decoder: bytes in as tokens produce them, whole characters out.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kvasir {

enum class Utf8 { valid, invalid, incomplete };

// Looks at the first character of `text` (not empty). *length is its size when valid; when invalid, the maximal prefix that
// begins no character (1 to 3 bytes); when incomplete, all of `text`, which more bytes may complete.
Utf8 utf8_step(std::string_view text, std::size_t* length);

class Utf8Stream {
 public:
  // Adds bytes and appends to *out every complete character; an incomplete tail (at most 3 bytes) is kept.
  // Bytes that can never become a character come out as U+FFFD, one for each maximal bad sequence.
  void push(std::string_view bytes, std::string* out);
  // The end: an incomplete tail comes out as U+FFFD.
  void finish(std::string* out);
  void reset() { pending_.clear(); }

 private:
  std::string pending_;
};

}  // namespace kvasir
