#include "store/split_pages.h"

#include <cstring>

namespace kvasir {

namespace {

constexpr std::size_t half = page_bytes / 2;  // of a page: its keys, or its values

}  // namespace

// Keys are [dim / 4][page_tokens][4]: the same dimension of the token before is 4 bytes back, or at the end of the row in the page before.
void split_pages(uint32_t page_tokens, const uint8_t* from, uint8_t* to) {
  const std::size_t row = std::size_t{page_tokens} * 4;
  for (std::size_t page = 0; page < extent_pages; ++page) {
    const uint8_t* keys = from + page * page_bytes;
    uint8_t* out = to + page * half;
    for (std::size_t at = 0; at < half; at += row) {
      for (std::size_t j = 0; j < 4; ++j) {
        const uint8_t before = page == 0 ? uint8_t{0} : *(keys + at + row - 4 + j - page_bytes);
        out[at + j] = static_cast<uint8_t>(keys[at + j] - before);
      }
      for (std::size_t i = 4; i < row; ++i) out[at + i] = static_cast<uint8_t>(keys[at + i] - keys[at + i - 4]);
    }
    std::memcpy(to + (extent_pages + page) * half, keys + half, half);
  }
}

void join_pages(uint32_t page_tokens, const uint8_t* from, uint8_t* to) {
  const std::size_t row = std::size_t{page_tokens} * 4;
  for (std::size_t page = 0; page < extent_pages; ++page) {
    const uint8_t* in = from + page * half;
    uint8_t* keys = to + page * page_bytes;
    for (std::size_t at = 0; at < half; at += row) {
      for (std::size_t j = 0; j < 4; ++j) {
        const uint8_t before = page == 0 ? uint8_t{0} : *(keys + at + row - 4 + j - page_bytes);
        keys[at + j] = static_cast<uint8_t>(in[at + j] + before);
      }
      for (std::size_t i = 4; i < row; ++i) keys[at + i] = static_cast<uint8_t>(in[at + i] + keys[at + i - 4]);
    }
    std::memcpy(keys + half, from + (extent_pages + page) * half, half);
  }
}

}  // namespace kvasir
