#include "cachefile/split_pages.h"

#include <cstring>

namespace kvasir {

namespace {

constexpr std::size_t half = page_bytes / 2;        // bytes of a page's keys, and of its values
constexpr std::size_t row = PageShape::key_stride;  // four dimensions of a quad's tokens
constexpr uint8_t none[4] = {};

// The same dimensions of the token before the quad's first one, for the row at `at` of a page's
// keys: the last token of the previous quad, which may be in the previous page.
const uint8_t* before(const uint8_t* keys, std::size_t page, std::size_t at,
                      std::size_t quad_bytes) {
  if (at >= quad_bytes) return keys + at - quad_bytes + row - 4;
  return page > 0 ? keys - page_bytes + half - quad_bytes + at + row - 4 : none;
}

}  // namespace

void split_pages(uint32_t page_tokens, const uint8_t* from, uint8_t* to) {
  const std::size_t quad_bytes = half / page_tokens * quad_tokens;
  for (std::size_t page = 0; page < extent_pages; ++page) {
    const uint8_t* keys = from + page * page_bytes;
    uint8_t* out = to + page * half;
    for (std::size_t at = 0; at < half; at += row) {
      const uint8_t* previous = before(keys, page, at, quad_bytes);
      for (std::size_t j = 0; j < 4; ++j)
        out[at + j] = static_cast<uint8_t>(keys[at + j] - previous[j]);
      for (std::size_t i = 4; i < row; ++i)
        out[at + i] = static_cast<uint8_t>(keys[at + i] - keys[at + i - 4]);
    }
    std::memcpy(to + (extent_pages + page) * half, keys + half, half);
  }
}

void join_pages(uint32_t page_tokens, const uint8_t* from, uint8_t* to) {
  const std::size_t quad_bytes = half / page_tokens * quad_tokens;
  for (std::size_t page = 0; page < extent_pages; ++page) {
    const uint8_t* in = from + page * half;
    uint8_t* keys = to + page * page_bytes;
    for (std::size_t at = 0; at < half; at += row) {
      const uint8_t* previous = before(keys, page, at, quad_bytes);
      for (std::size_t j = 0; j < 4; ++j)
        keys[at + j] = static_cast<uint8_t>(in[at + j] + previous[j]);
      for (std::size_t i = 4; i < row; ++i)
        keys[at + i] = static_cast<uint8_t>(in[at + i] + keys[at + i - 4]);
    }
    std::memcpy(keys + half, from + (extent_pages + page) * half, half);
  }
}

}  // namespace kvasir
