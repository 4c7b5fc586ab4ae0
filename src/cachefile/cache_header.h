// The first 4 KiB of a cache file as a value. CacheWriter encodes it, CacheFile decodes it. No I/O.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "cachefile/format.h"

namespace kvasir {

// Identifies the contents of a file: the header's checksum covers those of all blocks.
struct FileStamp {
  uint64_t checksum = 0, bytes = 0;
  bool operator==(const FileStamp&) const = default;
};

struct CacheHeader {
  struct Entry {
    format::SectionKind kind{};
    uint32_t version = 0;
    uint32_t flags = 0;
    uint64_t offset = 0, bytes = 0;                 // of the section
    uint64_t table_offset = 0, table_checksum = 0;  // of its checksum table: u64 [blocks]

    uint64_t blocks() const;
    uint64_t table_bytes() const { return blocks() * sizeof(uint64_t); }
  };

  uint32_t version = format::plain_version;
  uint32_t minimum_reader = format::plain_version;
  uint64_t file_size = 0;  // bytes
  format::Identity identity;
  uint64_t own_checksum = 0;  // set by decode()
  uint32_t section_count = 0;
  std::array<Entry, format::max_sections> sections;

  std::span<Entry> entries() { return {sections.data(), section_count}; }
  std::span<const Entry> entries() const { return {sections.data(), section_count}; }

  FileStamp stamp() const { return {own_checksum, file_size}; }

  // Offset of the first checksum table, after the last section.
  uint64_t tables_offset() const;

  // Computes every offset and the file size from the order and the sizes of the sections. False
  // when the file would exceed 2^62 bytes.
  [[nodiscard]] bool lay_out();

  void encode(std::span<uint8_t, format::header_bytes> out) const;

  // begin: the first min(file_size, header_bytes) bytes of the file; path: for messages. On failure
  // *out is unchanged. Code::not_a_cache, Code::version, Code::corrupt, as for CacheFile::open.
  static Status decode(std::span<const uint8_t> begin, uint64_t file_size, const char* path,
                       CacheHeader* out);
};

}  // namespace kvasir
