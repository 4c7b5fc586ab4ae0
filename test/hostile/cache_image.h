// A saved sequence taken apart: its header and sections as values, which a test lies about, and
// puts together again as a sparse file whose layout and checksums all match, so that the lie is
// what a reader meets.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/checked.h"
#include "base/checksum.h"
#include "cachefile/cache_header.h"
#include "store/cache_samples.h"
#include "temp_folder.h"

namespace hostile {

namespace format = kvasir::format;

// Writes `bytes` at `offset`, but for blocks of zeros: a file that was made larger has them.
inline void write_sparse(std::fstream* file, uint64_t offset, const std::vector<uint8_t>& bytes) {
  for (std::size_t at = 0; at < bytes.size(); at += format::block_bytes) {
    const std::size_t size = std::min<std::size_t>(format::block_bytes, bytes.size() - at);
    const auto* block = bytes.data() + at;
    if (std::all_of(block, block + size, [](uint8_t b) { return b == 0; })) continue;
    file->seekp(static_cast<std::streamoff>(offset + at));
    file->write(reinterpret_cast<const char*>(block), static_cast<std::streamsize>(size));
  }
}

struct CacheImage {
  struct Patch {
    uint64_t offset = 0;
    uint64_t bytes = 0, value = 0;
  };
  kvasir::CacheHeader header;
  std::vector<std::vector<uint8_t>>
      sections;                // their first bytes; what the header says beyond is zeros
  std::vector<Patch> patches;  // of the header's bytes, at last

  explicit CacheImage(const std::vector<uint8_t>& file) {
    const std::span<const uint8_t> begin(file.data(),
                                         std::min<std::size_t>(file.size(), format::header_bytes));
    if (!kvasir::CacheHeader::decode(begin, file.size(), "honest", &header).ok()) return;
    for (const auto& section : header.entries()) {
      const auto at = file.begin() + static_cast<std::ptrdiff_t>(section.offset);
      sections.emplace_back(at, at + static_cast<std::ptrdiff_t>(section.bytes));
    }
  }

  std::size_t index_of(format::SectionKind kind) const {
    std::size_t i = 0;
    while (i < sections.size() && header.sections[i].kind != kind) ++i;
    return i;
  }
  uint64_t get(format::SectionKind kind, uint64_t at, uint64_t bytes) const {
    return samples::get(sections.at(index_of(kind)), at, static_cast<int>(bytes));
  }
  void put(format::SectionKind kind, uint64_t at, uint64_t bytes, uint64_t value) {
    samples::put(sections.at(index_of(kind)), at, static_cast<int>(bytes), value);
  }
  // Its first bytes are kept, or followed by zeros.
  void resize(std::size_t i, uint64_t bytes) {
    header.sections[i].bytes = bytes;
    if (bytes < sections[i].size()) sections[i].resize(bytes);
  }

  // False where no file system holds such a file: nothing has been tested then.
  bool write(const std::string& path) const {
    kvasir::CacheHeader h = header;
    if (!h.lay_out()) return false;
    std::vector<std::vector<uint8_t>> tables;
    for (uint32_t i = 0; i < h.section_count; ++i)
      tables.push_back(table_of(&h.sections[i], sections[i]));
    std::vector<uint8_t> begin(format::header_bytes);
    h.encode(std::span<uint8_t, format::header_bytes>(begin));
    for (const Patch& p : patches)
      samples::put(begin, p.offset, static_cast<int>(p.bytes), p.value);
    const bool seals = std::any_of(patches.begin(), patches.end(), [](const Patch& p) {
      return p.offset >= format::header_at("checksum");
    });
    if (!seals) samples::repair_header(begin);

    std::ofstream(in_utf8(path), std::ios::binary | std::ios::trunc).close();
    std::error_code too_large;
    std::filesystem::resize_file(in_utf8(path), h.file_size, too_large);
    if (too_large) return false;
    std::fstream file(in_utf8(path), std::ios::binary | std::ios::in | std::ios::out);
    write_sparse(&file, 0, begin);
    for (uint32_t i = 0; i < h.section_count; ++i) {
      write_sparse(&file, h.sections[i].offset, sections[i]);
      write_sparse(&file, h.sections[i].table_offset, tables[i]);
    }
    return static_cast<bool>(file.flush());
  }

 private:
  // Checksums of the blocks that hold something, and of a few MiB of zeros behind; of the others
  // zeros, which do not match. The table's own checksum matches, but where computing it would take
  // long.
  static std::vector<uint8_t> table_of(kvasir::CacheHeader::Entry* entry,
                                       const std::vector<uint8_t>& bytes) {
    constexpr uint64_t summed_blocks = 2048, summed_table = uint64_t{8} << 20;
    const uint64_t honest =
        std::min(entry->blocks(), kvasir::ceil_div(bytes.size(), format::block_bytes));
    const uint64_t summed = std::min(entry->blocks(), honest + summed_blocks);
    std::vector<uint8_t> table(summed * sizeof(uint64_t)), block;
    for (uint64_t b = 0; b < summed; ++b) {
      const uint64_t at = b * format::block_bytes,
                     size = std::min(format::block_bytes, entry->bytes - at);
      const uint64_t there = at < bytes.size() ? std::min<uint64_t>(size, bytes.size() - at) : 0;
      block.assign(size, 0);
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at < bytes.size() ? at : 0), there,
                  block.begin());
      samples::put(table, b * sizeof(uint64_t), 8,
                   kvasir::checksum(block.data(), block.size(), entry->offset + at));
    }
    kvasir::RunningChecksum sum(entry->table_offset);
    sum.add(table.data(), table.size());
    static const std::vector<uint8_t> zeros(uint64_t{1} << 20);
    for (uint64_t at = table.size(); at < std::min(summed_table, entry->table_bytes());) {
      const uint64_t size = std::min<uint64_t>(zeros.size(), entry->table_bytes() - at);
      sum.add(zeros.data(), size);
      at += size;
    }
    entry->table_checksum = sum.value();
    return table;
  }
};

}  // namespace hostile
