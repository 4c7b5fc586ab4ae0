// A cache file: a 4 KiB header, a table of sections, the sections, and a checksum for every 4 KiB block of each.
// This file knows the container; what the sections hold is written in format.h and format.md.
//
// Writing is atomic: a unique temporary file in the same folder, preallocated, written, synced, renamed, folder synced. The path
// holds the old file or the new one, never anything between; on failure or cancel the temporary file is removed.
// Reading maps the file. Header, section table and checksum tables are verified when it is opened; blocks when they are first used
// (check), or all at once (verify_all).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "os/os.h"
#include "store/format.h"

namespace kvasir {

class CacheWriter {
 public:
  // Begins a file that will replace `path`. `identity` goes into the header.
  static Status create(const std::string& path, const format::Identity& identity, std::unique_ptr<CacheWriter>* out);
  ~CacheWriter();  // removes the temporary file unless finished

  // Declares a section of exactly `bytes` bytes. All sections are declared before the first write.
  Status add_section(format::SectionKind kind, uint32_t version, uint64_t bytes);
  // Reserves the space. Code::no_space when the disk is too full; nothing has been written then.
  Status begin();
  // Appends to the sections in the order in which they were declared, in pieces of any size.
  Status write(const void* data, std::size_t size);
  uint64_t bytes_total() const;
  uint64_t bytes_written() const;
  // Syncs and renames. After success the file is durable.
  Status finish();
};

class CacheFile {
 public:
  // Maps and validates. Tells apart: not_a_cache (wrong magic), version (needs a newer reader; stale), corrupt (with the offset).
  // On failure *out is unchanged. The mapping lives as long as the CacheFile.
  static Status open(const std::string& path, std::shared_ptr<const CacheFile>* out);

  const std::string& path() const;
  const format::Identity& identity() const;
  uint64_t size() const;
  struct Section { format::SectionKind kind; uint32_t version; uint64_t offset, bytes; };
  std::span<const Section> sections() const;
  const Section* find(format::SectionKind kind) const;

  // A section's bytes, not yet checked. Empty when there is no such section.
  std::span<const std::byte> bytes(format::SectionKind kind) const;

  // Verifies the blocks that hold [offset, offset + size) of a section, unless they were before. False: damaged. Thread-safe, cheap
  // (one relaxed load) for blocks that have been seen.
  bool check(const Section& section, uint64_t offset, uint64_t size) const;
  // As check() over a whole section, with a message that names file, section and offset.
  Status check_section(const Section& section) const;
  Status verify_all(Progress* progress, const Cancel* cancel) const;

  void advise(const Section& section, os::Mapping::Advice advice) const;
};

}  // namespace kvasir
