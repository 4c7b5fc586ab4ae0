// The first 4 KiB of a cache file as a value: what CacheWriter writes and CacheFile reads. No I/O.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "cachefile/format.h"

namespace kvasir {

// Whether a file begins with a magic as transfers leave it that take it for text: the high bit of
// its first byte cut off, this byte recoded from Latin-1 or replaced because it is not UTF-8, or
// the line ends behind changed. `kind`: the magic's fourth byte.
bool looks_like_text_damage(std::span<const uint8_t> begin, uint8_t kind);

// A file that is shorter or longer than its header says: Code::corrupt, with the offset where the
// two part.
Status check_file_size(const char* path, uint64_t is, uint64_t must);

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

  uint32_t version = format::version;
  uint32_t minimum_reader = format::minimum_reader;
  uint64_t file_size = 0;  // bytes
  format::Identity identity;
  uint32_t section_count = 0;
  std::array<Entry, format::max_sections> sections;

  std::span<Entry> entries() { return {sections.data(), section_count}; }
  std::span<const Entry> entries() const { return {sections.data(), section_count}; }

  // Where the first checksum table begins, after the last section.
  uint64_t tables_offset() const;

  // Sets every offset and the file's size from the sections' order and sizes. False when the file
  // would pass 2^62 bytes.
  [[nodiscard]] bool lay_out();

  void encode(std::span<uint8_t, format::header_bytes> out) const;

  // `begin`: the file's first min(file_size, header_bytes) bytes; `path` is for messages. On
  // failure *out is unchanged. Code::not_a_cache, Code::version or Code::corrupt, as
  // CacheFile::open says.
  static Status decode(std::span<const uint8_t> begin, uint64_t file_size, const char* path,
                       CacheHeader* out);
};

}  // namespace kvasir
