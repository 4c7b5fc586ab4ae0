// Small cache files for tests. The checksums of a damaged file can be repaired, to test the checks
// after them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "cachefile/cache_file.h"

namespace samples {

using kvasir::CacheFile;
using kvasir::CacheWriter;
using kvasir::Code;
using kvasir::Status;
using kvasir::format::SectionKind;
namespace format = kvasir::format;

struct Part {
  SectionKind kind;
  uint32_t version;
  std::vector<uint8_t> bytes;
};

inline std::vector<uint8_t> noise(std::size_t size, uint64_t seed) {
  std::vector<uint8_t> out(size);
  uint64_t state = seed * 2654435769u + 1;
  for (uint8_t& byte : out) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<uint8_t>(state >> 56);
  }
  return out;
}

inline format::Identity identity(uint64_t tokens) {
  format::Identity id;
  id.model.fill(0xA5);
  id.layers = 4;
  id.kv_heads = 2;
  id.head_dim = 64;
  id.vocabulary = 32000;
  id.tokens = tokens;
  std::strcpy(id.model_name, "mini reader");
  return id;
}

// Sections around the sizes where blocks and their alignment begin and end.
inline std::vector<Part> parts(uint64_t seed) {
  return {{SectionKind::state, 1, noise(100, seed)},
          {SectionKind::sinks, 1, {}},
          {SectionKind::pages, 3, noise(20 * 4096, seed + 1)},
          {SectionKind::bounds, 1, noise(65536, seed + 2)},
          {SectionKind::statistics, 1, noise(5000, seed + 3)}};
}

// Writes in pieces of `piece` bytes.
inline Status save(const std::string& path, const std::vector<Part>& parts, uint64_t tokens,
                   std::size_t piece = 7777) {
  std::unique_ptr<CacheWriter> writer;
  if (Status s = CacheWriter::create(path, identity(tokens), &writer); !s.ok()) return s;
  for (const Part& part : parts) {
    if (Status s = writer->add_section(part.kind, part.version, part.bytes.size()); !s.ok())
      return s;
  }
  if (Status s = writer->begin(); !s.ok()) return s;
  for (const Part& part : parts) {
    for (std::size_t i = 0; i < part.bytes.size(); i += piece) {
      const std::size_t size = std::min(piece, part.bytes.size() - i);
      if (Status s = writer->write(part.bytes.data() + i, size); !s.ok()) return s;
    }
  }
  return writer->finish();
}

// Whether the file at `path` is whole and is the one that save() makes of these.
inline bool holds(const std::string& path, const std::vector<Part>& parts, uint64_t tokens) {
  std::shared_ptr<const CacheFile> file;
  if (!CacheFile::open(path, &file).ok() || !file->verify_all(nullptr, nullptr).ok()) return false;
  if (file->identity().tokens != tokens || file->sections().size() != parts.size()) return false;
  for (const Part& part : parts) {
    const auto* section = file->find(part.kind);
    const auto bytes = file->bytes(part.kind);
    if (!section || section->version != part.version || bytes.size() != part.bytes.size())
      return false;
    if (!file->check_section(*section).ok()) return false;
    if (!bytes.empty() && std::memcmp(bytes.data(), part.bytes.data(), bytes.size()) != 0)
      return false;
  }
  return true;
}

inline uint64_t get(const std::vector<uint8_t>& file, uint64_t place, int bytes) {
  uint64_t value = 0;
  for (int i = bytes; i-- > 0;) value = value << 8 | file[place + static_cast<uint64_t>(i)];
  return value;
}

inline void put(std::vector<uint8_t>& file, uint64_t place, int bytes, uint64_t value) {
  for (int i = 0; i < bytes; ++i)
    file[place + static_cast<uint64_t>(i)] = static_cast<uint8_t>(value >> (8 * i));
}

inline void repair_header(std::vector<uint8_t>& file) {
  if (file.size() < format::header_bytes) return;
  put(file, format::header_at("checksum"), 8,
      kvasir::checksum(file.data(), format::header_at("checksum"), format::header_seed));
}

// Makes every checksum inside the file match, whatever the header says.
inline void repair(std::vector<uint8_t>& file) {
  if (file.size() < format::header_bytes) return;
  const uint64_t count =
      std::min<uint64_t>(get(file, format::header_at("section count"), 4), format::max_sections);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t entry = format::header_at("sections") + i * format::entry_bytes;
    const uint64_t offset = get(file, entry + format::entry_at("offset"), 8),
                   bytes = get(file, entry + format::entry_at("size"), 8);
    const uint64_t table = get(file, entry + format::entry_at("table offset"), 8);
    if (offset > file.size() || bytes > file.size() - offset || table > file.size()) continue;
    const uint64_t blocks = (bytes + format::block_bytes - 1) / format::block_bytes;
    if (table < format::header_bytes || blocks > (file.size() - table) / 8) continue;
    for (uint64_t b = 0; b < blocks; ++b) {
      const uint64_t at = offset + b * format::block_bytes;
      const uint64_t size = std::min(format::block_bytes, offset + bytes - at);
      put(file, table + b * 8, 8, kvasir::checksum(file.data() + at, size, at));
    }
    put(file, entry + format::entry_at("table checksum"), 8,
        kvasir::checksum(file.data() + table, blocks * 8, table));
  }
  repair_header(file);
}

}  // namespace samples
