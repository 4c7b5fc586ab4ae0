// The layout of pages, extents and sketches, shared by kernels, store and file format.
//
// A page holds page_tokens tokens of one layer and one KV head in 4 KiB:
//   K  int8 [page_tokens / 4][dim / 4][4 tokens][4]   four dimensions of four tokens at a time: a
//                                                     dot product sums over dimensions
//   V  int8 [page_tokens / 4][dim][4 tokens]          one broadcast of four weights serves every
//                                                     dimension
// K and V have a bf16 scale per token each, rounded up so that |value| <= 127: k ~= K * k_scale,
// v ~= V * v_scale. Four such tokens are a quad, the least that is read of a page. Its keys are
// 4 * dim contiguous bytes; so are its values, half a page later.
//
// Of latent attention, a value is the first numbers of its key. A page then holds the keys of 64
// tokens, in the same order, and no values. K and V have the same scales. Its 64 * dim bytes are
// whole blocks of 4 KiB, because dim is a multiple of 64.
//
// An extent is 16 consecutive pages of one layer and KV head, with their scales and bounds: the
// unit of allocation in memory and in files. Its three arrays (sizes below):
//   pages   [16 pages][bytes of a page]
//   scales  bf16 [16 pages][2][page_tokens]          of K, then of V
//   bounds  int8 [tiles][2 * dim / 4][16 blocks][4]  channels 0 .. dim-1: maximum of K, rounded up;
//                                                    dim .. 2dim-1: minimum, rounded down
//           f32  [tiles][16 blocks]                  a scale per block of block_tokens tokens
// All parts of an unsealed page are zero.
//
// A sketch holds a few numbers of every key in 4 bits, so that one scan estimates the score of
// every token (store/key_sketch.h):
//   sketch  [tiles][4 tokens][sketch_dim / 8][16 quads][4]  value + 8: channel 8 i + j is the low
//                                                           half of byte j, 8 i + 4 + j the high
//           bf16 [tiles][16 quads]                          a scale per quad
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

constexpr uint32_t page_bytes = 4096;  // with keys and values
constexpr uint32_t extent_pages = 16;
// Tokens of a quad, the smallest unit of selection: the width of an integer dot product.
constexpr uint32_t quad_tokens = 4;
// Blocks whose bounds, and quads whose sketches, are interleaved: the int32 lanes of a 512-bit
// register.
constexpr uint32_t tile_blocks = 16;
constexpr uint32_t max_head_dim = 512;
// Of latent attention: 512 numbers and 64 that rotate, of DeepSeek V2 and V3.
constexpr uint32_t latent_page_tokens = 64, latent_dim_multiple = 64, max_latent_dim = 576;
constexpr uint32_t max_dim = max_latent_dim;  // of all shapes

struct PageShape {
  uint32_t head_dim = 0;      // of the model, elements
  uint32_t dim = 0;           // head_dim padded with zeros: 32, 64, 128, 256 or 512
  uint32_t page_tokens = 0;   // 2048 / dim: 64, 32, 16, 8 or 4
  uint32_t block_tokens = 0;  // tokens per bound: 16, or a smaller page
  bool latent = false;  // values are the first numbers of the keys: dim and page_tokens differ

  // head_dim in 1 .. max_head_dim, or max_latent_dim.
  static constexpr PageShape of(uint32_t head_dim, bool latent = false) {
    PageShape s;
    s.head_dim = head_dim;
    s.latent = latent;
    if (latent) {
      s.dim = (head_dim + latent_dim_multiple - 1) / latent_dim_multiple * latent_dim_multiple;
      s.page_tokens = latent_page_tokens;
      s.block_tokens = 16;
      return s;
    }
    s.dim = 32;
    while (s.dim < head_dim && s.dim < max_head_dim) s.dim *= 2;
    s.page_tokens = page_bytes / 2 / s.dim;
    s.block_tokens = s.page_tokens < 16 ? s.page_tokens : 16;
    return s;
  }

  // blocks per page: 4, 2, 1, 1, 1
  constexpr uint32_t page_blocks() const { return page_tokens / block_tokens; }
  constexpr uint32_t extent_tokens() const { return extent_pages * page_tokens; }
  constexpr uint32_t extent_tiles() const { return extent_pages * page_blocks() / tile_blocks; }
  constexpr uint32_t extent_blocks() const { return extent_pages * page_blocks(); }
  // quads per page: 16, 8, 4, 2, 1
  constexpr uint32_t page_quads() const { return page_tokens / quad_tokens; }
  constexpr uint32_t extent_quads() const { return extent_pages * page_quads(); }
  constexpr uint32_t quad_tiles() const { return extent_quads() / tile_blocks; }

  // The byte at which a token's key begins in a page. Dimension d is d / 4 * key_stride + d % 4
  // bytes further.
  static constexpr uint32_t key_stride = quad_tokens * 4;
  constexpr std::size_t key_at(uint32_t token) const {
    return std::size_t{token / quad_tokens} * quad_tokens * dim + token % quad_tokens * 4;
  }

  // Rows of a token in full precision: its key, and its value where it has one.
  constexpr uint32_t planes() const { return latent ? 1 : 2; }
  // Bytes of a page, and of an extent's pages.
  constexpr std::size_t page_size() const {
    return latent ? std::size_t{page_tokens} * dim : page_bytes;
  }
  constexpr std::size_t pages_size() const { return extent_pages * page_size(); }

  // Bytes of an extent's arrays. pages_bytes(): where keys and values are stored.
  static constexpr std::size_t pages_bytes() { return std::size_t{extent_pages} * page_bytes; }
  constexpr std::size_t scales_bytes() const {
    return std::size_t{extent_pages} * 2 * page_tokens * 2;
  }
  constexpr std::size_t bounds_bytes() const {
    return std::size_t{extent_tiles()} * tile_blocks * (2 * dim + sizeof(float));
  }

  // Numbers of a sketch per key: three eighths of dim, in whole groups of eight.
  constexpr uint32_t sketch_dim() const { return (dim * 3 / 8 + 7) / 8 * 8; }
  constexpr std::size_t sketch_bytes() const {
    return std::size_t{extent_quads()} * (quad_tokens * sketch_dim() / 2 + sizeof(uint16_t));
  }

  constexpr bool operator==(const PageShape&) const = default;
};

static_assert(PageShape::of(64).page_tokens == 32 && PageShape::of(64).extent_tiles() == 2);
static_assert(PageShape::of(128).bounds_bytes() == 4096 + 64 &&
              PageShape::of(64).bounds_bytes() == 4096 + 128);
static_assert(PageShape::of(max_latent_dim, true).dim == max_dim &&
              PageShape::of(max_latent_dim, true).page_size() % page_bytes == 0);
static_assert(PageShape::of(max_head_dim).page_tokens == quad_tokens &&
              PageShape::of(max_head_dim).quad_tiles() == 1);

// The arrays of one extent of one layer and KV head; see the top of this file.
struct ExtentView {
  const int8_t* pages;
  const uint16_t* scales;
  const int8_t* bounds;
};

// A page to attend, or a part of it.
struct PageRef {
  const int8_t* data;      // the page's bytes, 64-byte aligned
  const uint16_t* scales;  // bf16 [2][page_tokens]
  uint64_t tokens;         // bit t: token t of the page is selected; never 0
  float bias = 0;          // added to every score: ln of the number of tokens that each stands for
};

}  // namespace kvasir
