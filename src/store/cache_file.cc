// CacheFile: maps a cache file and believes nothing in it before its checksum has been seen to match.
#include "store/cache_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/checksum.h"

namespace kvasir {

using namespace format;

// What is mapped is used as it lies in the file.
static_assert(std::endian::native == std::endian::little, "the sections' numbers are little endian");

namespace {

constexpr uint64_t word_blocks = 64;                      // blocks a word of the bitmap
constexpr uint64_t verify_step = uint64_t{1} << 20;       // bytes between two looks at the cancel flag: well under 1 ms
constexpr uint64_t read_ahead = uint64_t{16} << 20;       // bytes asked of the disk before they are needed

bool is_zero(const std::byte* p, uint64_t size) {
  return size == 0 || (p[0] == std::byte{0} && std::memcmp(p, p + 1, size - 1) == 0);
}

}  // namespace

Status CacheFile::open(const std::string& path, std::shared_ptr<const CacheFile>* out) {
  std::shared_ptr<CacheFile> cache(new CacheFile);
  cache->path_ = path;
  os::File file;
  if (Status s = os::File::open_read(path, &file); !s.ok()) return s;
  uint64_t size = 0;
  if (Status s = file.size(&size); !s.ok()) return s;
  std::array<uint8_t, header_bytes> begin;
  const std::size_t readable = static_cast<std::size_t>(std::min(size, header_bytes));
  if (Status s = file.read(0, begin.data(), readable); !s.ok()) return s;
  if (Status s = CacheHeader::decode({begin.data(), readable}, size, path.c_str(), &cache->header_); !s.ok()) return s;

  if (Status s = os::Mapping::map(file, &cache->mapping_); !s.ok()) return s;
  if (cache->mapping_.size() != size) {
    return Status::error(Code::corrupt, "%s changed its size while it was opened", path.c_str());
  }
  if (Status s = cache->verify_tables(); !s.ok()) return s;
  cache->seen_ = Array<std::atomic<uint64_t>>(ceil_div(size, block_bytes * word_blocks));
  *out = std::move(cache);
  return {};
}

Status CacheFile::verify_tables() const {
  for (const Section& section : sections()) {
    const uint64_t sum = checksum(mapping_.data() + section.table_offset, section.table_bytes(), section.table_offset);
    if (sum == section.table_checksum) continue;
    return Status::error(Code::corrupt, "%s is damaged: the checksum table of section %s at byte %llu", path_.c_str(),
                         name_of(section.kind), static_cast<unsigned long long>(section.table_offset))
        .with_offset(section.table_offset);
  }
  return {};
}

const CacheFile::Section* CacheFile::find(SectionKind kind) const {
  for (const Section& section : sections()) {
    if (section.kind == kind) return &section;
  }
  return nullptr;
}

std::span<const std::byte> CacheFile::bytes(SectionKind kind) const {
  const Section* section = find(kind);
  if (!section) return {};
  return {mapping_.data() + section->offset, static_cast<std::size_t>(section->bytes)};
}

bool CacheFile::block_is_intact(const Section& section, uint64_t block) const {
  const uint64_t offset = block * block_bytes;
  const uint64_t size = std::min(block_bytes, section.bytes - offset);
  uint64_t expected;
  std::memcpy(&expected, mapping_.data() + section.table_offset + block * sizeof expected, sizeof expected);
  return checksum(mapping_.data() + section.offset + offset, static_cast<std::size_t>(size), section.offset + offset) ==
         expected;
}

// Two threads may verify the same block: both read what does not change, and set the same bit.
bool CacheFile::verify_missing(const Section& section, uint64_t word, uint64_t missing) const {
  const uint64_t first = section.offset / block_bytes;
  uint64_t intact = 0;
  for (uint64_t left = missing; left != 0; left &= left - 1) {
    const uint64_t bit = static_cast<uint64_t>(std::countr_zero(left));
    if (block_is_intact(section, word * word_blocks + bit - first)) intact |= uint64_t{1} << bit;
  }
  seen_[word].fetch_or(intact, std::memory_order_relaxed);
  return intact == missing;
}

bool CacheFile::check(const Section& section, uint64_t offset, uint64_t size) const {
  if (!range_fits(offset, size, section.bytes)) return false;
  if (size == 0) return true;
  const uint64_t first = (section.offset + offset) / block_bytes;
  const uint64_t last = (section.offset + offset + size - 1) / block_bytes;
  for (uint64_t word = first / word_blocks; word <= last / word_blocks; ++word) {
    uint64_t wanted = ~uint64_t{0};
    if (word == first / word_blocks) wanted &= ~uint64_t{0} << first % word_blocks;
    if (word == last / word_blocks) wanted &= ~uint64_t{0} >> (word_blocks - 1 - last % word_blocks);
    const uint64_t missing = wanted & ~seen_[word].load(std::memory_order_relaxed);
    if (missing != 0 && !verify_missing(section, word, missing)) return false;
  }
  return true;
}

Status CacheFile::damaged(const Section& section, uint64_t block) const {
  const uint64_t offset = section.offset + block * block_bytes;
  return Status::error(Code::corrupt, "%s is damaged: section %s at byte %llu of the file", path_.c_str(),
                       name_of(section.kind), static_cast<unsigned long long>(offset))
      .with_offset(offset);
}

Status CacheFile::check_section(const Section& section) const {
  if (check(section, 0, section.bytes)) return {};
  uint64_t block = 0;
  while (block + 1 < section.blocks() && block_is_intact(section, block)) ++block;
  return damaged(section, block);
}

Status CacheFile::require_zero(uint64_t begin, uint64_t end) const {
  if (is_zero(mapping_.data() + begin, end - begin)) return {};
  while (mapping_.data()[begin] == std::byte{0}) ++begin;
  return Status::error(Code::corrupt, "%s is damaged: byte %llu, between its sections, is not zero", path_.c_str(),
                       static_cast<unsigned long long>(begin))
      .with_offset(begin);
}

Status CacheFile::verify_all(Progress* progress, const Cancel* cancel) const {
  constexpr uint64_t step_blocks = verify_step / block_bytes;
  const auto stopped = [&](uint64_t done) {
    return is_cancelled(cancel) || (progress && !progress->update(done, size()));
  };
  const auto cancelled = [&] {
    return Status::error(Code::cancelled, "the check of %s was stopped", path_.c_str());
  };
  uint64_t end = header_bytes;  // of what has been verified
  if (Status s = verify_tables(); !s.ok()) return s;
  for (const Section& section : sections()) {
    if (Status s = require_zero(end, section.offset); !s.ok()) return s;
    for (uint64_t block = 0; block < section.blocks(); ++block) {
      if (block % step_blocks == 0) {
        const uint64_t at = section.offset + block * block_bytes;
        if (stopped(at)) return cancelled();
        if (at % read_ahead == 0 || block == 0) mapping_.advise(at, 2 * read_ahead, os::Mapping::Advice::will_need);
      }
      if (!block_is_intact(section, block)) return damaged(section, block);
    }
    end = section.offset + section.bytes;
  }
  if (Status s = require_zero(end, header_.tables_offset()); !s.ok()) return s;
  return stopped(size()) ? cancelled() : Status();
}

void CacheFile::advise(const Section& section, os::Mapping::Advice advice) const {
  mapping_.advise(section.offset, section.bytes, advice);
}

}  // namespace kvasir
