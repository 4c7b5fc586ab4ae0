// The first 256 bytes of a packed document as a value. pack() encodes it, unpack() decodes it;
// docs/file-format.md defines it byte by byte. No I/O.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "cachefile/format.h"

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

using format::FieldIs;

inline constexpr auto header_fields = format::lay_out({
    {"magic", 8, FieldIs::data},
    {"version", 4, FieldIs::revision},
    {"minimum reader", 4, FieldIs::revision},
    {"byte order", 4, FieldIs::revision},
    {"level", 4, FieldIs::choice},
    {"packed bytes", 8, FieldIs::size},
    {"document bytes", 8, FieldIs::size},
    {"pages offset", 8, FieldIs::size},  // in the document
    {"pages bytes", 8, FieldIs::size},
    {"page tokens", 4, FieldIs::size},
    {"layers", 4, FieldIs::size},
    {"kv heads", 4, FieldIs::size},
    {"head dim", 4, FieldIs::size},
    {"tokens", 8, FieldIs::size},
    {"format version", 4, FieldIs::revision},
    {"reserved", 4, FieldIs::reserved},
    {"model name", 64, FieldIs::data},
    {"reserved", 88, FieldIs::reserved},
    {"content", 8, FieldIs::checksum},
    {"checksum", 8, FieldIs::checksum},  // of all bytes before it
});
static_assert(format::end_of(header_fields) == header_bytes);
consteval uint64_t header_at(std::string_view name) {
  return format::offset_in(header_fields, name);
}

inline constexpr auto chunk_fields = format::lay_out({
    {"bytes", 4, FieldIs::size},
    {"reserved", 4, FieldIs::reserved},
    {"checksum", 8, FieldIs::checksum},
});
static_assert(format::end_of(chunk_fields) == chunk_header_bytes);

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
