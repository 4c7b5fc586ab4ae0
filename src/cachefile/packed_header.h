// The first 256 bytes of a packed document as a value. pack() encodes it, unpack() decodes it;
// docs/file-format.md defines it byte by byte. No I/O.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "cachefile/format.h"
#include "cachefile/format_fields.h"

namespace kvasir {

namespace packed {

// Like the magic of a cache file, for the same reasons.
constexpr std::array<uint8_t, 8> magic = {0x8B, 'K', 'V', 'Z', '\r', '\n', 0x1A, '\n'};
constexpr uint32_t version = 2;
constexpr uint32_t minimum_reader = 2;
// Version 1, with documents of format versions 1 and 2, was written before the first release.
constexpr uint32_t oldest_readable = 2;
constexpr uint64_t header_bytes = 256;
constexpr uint64_t header_seed = 0x726973'61764B5A;

// A chunk: u32 bytes, u32 0, u64 checksum of these bytes (the seed is their offset), and the bytes:
// a zstd frame of so much of the document.
constexpr uint64_t chunk_bytes = uint64_t{256} << 10;
constexpr uint64_t chunk_header_bytes = 16;

// No document is longer than max_ratio times its packed copy plus packed_slack; a header that
// claims more is not accepted. Each section is padded by up to 64 KiB of zeros, which pack to
// almost nothing. Keys and values hardly compress.
constexpr uint64_t max_ratio = 64;
constexpr uint64_t packed_slack = uint64_t{4} << 20;

// Byte offsets in the header.
constexpr uint64_t place_version = 8;          // u32
constexpr uint64_t place_minimum_reader = 12;  // u32
constexpr uint64_t place_byte_order = 16;      // u32
constexpr uint64_t place_level = 20;           // u32
constexpr uint64_t place_packed_bytes = 24;    // u64
constexpr uint64_t place_document_bytes = 32;  // u64
constexpr uint64_t place_pages_offset = 40;    // u64, in the document
constexpr uint64_t place_pages_bytes = 48;     // u64
constexpr uint64_t place_page_tokens = 56;     // u32
constexpr uint64_t place_layers = 60;          // u32
constexpr uint64_t place_kv_heads = 64;        // u32
constexpr uint64_t place_head_dim = 68;        // u32
constexpr uint64_t place_tokens = 72;          // u64
constexpr uint64_t place_format_version = 80;  // u32
constexpr uint64_t place_model_name = 88;      // char [64]
constexpr uint64_t place_reserved = 152;       // u8 [88], and u32 at 84
constexpr uint64_t place_content = 240;        // u64
constexpr uint64_t place_checksum = 248;       // u64, of all bytes before it

inline constexpr format::Field header_fields[] = {
    {"magic", 0, 8, format::FieldIs::data},
    {"version", place_version, 4, format::FieldIs::revision},
    {"minimum reader", place_minimum_reader, 4, format::FieldIs::revision},
    {"byte order", place_byte_order, 4, format::FieldIs::revision},
    {"level", place_level, 4, format::FieldIs::choice},
    {"packed bytes", place_packed_bytes, 8, format::FieldIs::size},
    {"document bytes", place_document_bytes, 8, format::FieldIs::size},
    {"pages offset", place_pages_offset, 8, format::FieldIs::size},
    {"pages bytes", place_pages_bytes, 8, format::FieldIs::size},
    {"page tokens", place_page_tokens, 4, format::FieldIs::size},
    {"layers", place_layers, 4, format::FieldIs::size},
    {"kv heads", place_kv_heads, 4, format::FieldIs::size},
    {"head dim", place_head_dim, 4, format::FieldIs::size},
    {"tokens", place_tokens, 8, format::FieldIs::size},
    {"format version", place_format_version, 4, format::FieldIs::revision},
    {"reserved", 84, 4, format::FieldIs::reserved},
    {"model name", place_model_name, 64, format::FieldIs::data},
    {"reserved", place_reserved, place_content - place_reserved, format::FieldIs::reserved},
    {"content", place_content, 8, format::FieldIs::checksum},
    {"checksum", place_checksum, 8, format::FieldIs::checksum},
};
static_assert(format::cover(header_fields, header_bytes));

inline constexpr format::Field chunk_fields[] = {
    {"bytes", 0, 4, format::FieldIs::size},
    {"reserved", 4, 4, format::FieldIs::reserved},
    {"checksum", 8, 8, format::FieldIs::checksum},
};
static_assert(format::cover(chunk_fields, chunk_header_bytes));

}  // namespace packed

// Whether a file with these first bytes is a packed document, intact or damaged.
bool is_packed(std::span<const uint8_t> begin);

// The smallest file that can hold the document's bytes up to `end`.
constexpr uint64_t min_packed_bytes(uint64_t end) {
  return end <= packed::packed_slack ? 0 : (end - packed::packed_slack) / packed::max_ratio;
}

struct CacheHeader;

struct PackedHeader {
  uint32_t version = packed::version;
  uint32_t level = 0;           // of zstd; informative
  uint64_t packed_bytes = 0;    // of the file
  uint64_t document_bytes = 0;  // of the unpacked document
  // The part of the document that has pages, and the tokens of a page. Pages are stored in the
  // order of split_pages(). 0: no pages.
  uint64_t pages_offset = 0, pages_bytes = 0;
  uint32_t page_tokens = 0;
  uint32_t format_version = 0;  // of the document
  format::Identity identity;    // of the document, without fingerprint and vocabulary
  // Checksum of the document, chunk by chunk: the seed is the checksum of the chunks before, at
  // first 0.
  uint64_t content = 0;

  uint64_t chunks() const;
  // Code::corrupt where the document's header, its first bytes, differs from this one. path: of the
  // packed file.
  Status check_document(const CacheHeader& document, const char* path) const;
  // Whether these bytes of the document are pages and nothing else.
  bool has_pages(uint64_t offset, uint64_t size) const;

  void encode(std::span<uint8_t, packed::header_bytes> out) const;
  // begin: the first min(file_bytes, header_bytes) bytes of the file; path: for messages.
  // Code::not_a_cache, Code::version, Code::corrupt. On failure *out is unchanged.
  static Status decode(std::span<const uint8_t> begin, uint64_t file_bytes, const char* path,
                       PackedHeader* out);
};

}  // namespace kvasir
