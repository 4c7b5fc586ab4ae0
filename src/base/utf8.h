// UTF-8: one step over untrusted bytes.
#pragma once

#include <cstddef>
#include <string_view>

namespace kvasir {

enum class Utf8 { valid, invalid, incomplete };

// Tests the first character of `text` (not empty). *length is its size when valid; when invalid,
// the maximal prefix that begins no character (1 to 3 bytes); when incomplete, all of `text`, which
// more bytes may complete.
Utf8 utf8_step(std::string_view text, std::size_t* length);

}  // namespace kvasir
