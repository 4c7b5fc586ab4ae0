// A cache file: a 4 KiB header with the table of its sections, the sections, and a checksum for every 4 KiB block of each.
// This file knows the container; what the sections hold is written in format.h and format.md.
//
// Writing is atomic: a unique temporary file in the same folder, preallocated, written, synced, renamed, folder synced. The path
// holds the old file or the new one, never anything between; on failure or cancel the temporary file is removed.
// Reading maps the file. Header, section table and checksum tables are verified when it is opened; blocks when they are first used
// (check), or all at once (verify_all).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/cancel.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/status.h"
#include "os/os.h"
#include "store/cache_header.h"
#include "store/format.h"

namespace kvasir {

// One thread at a time. After a failure only the destructor may follow.
class CacheWriter {
 public:
  // Begins a file that will replace `path`. `identity` goes into the header.
  static Status create(const std::string& path, const format::Identity& identity, std::unique_ptr<CacheWriter>* out);
  ~CacheWriter();  // removes the temporary file unless finished
  CacheWriter(const CacheWriter&) = delete;
  CacheWriter& operator=(const CacheWriter&) = delete;

  // Declares a section of exactly `bytes` bytes. All sections are declared before begin(), a kind only once (indexes: any number).
  Status add_section(format::SectionKind kind, uint32_t version, uint64_t bytes);
  // Reserves the space. Code::no_space when the disk is too full; nothing has been written then.
  Status begin();
  // Appends to the sections in the order in which they were declared, in pieces of any size.
  Status write(const void* data, std::size_t size);
  uint64_t bytes_total() const { return total_; }      // of all sections
  uint64_t bytes_written() const { return written_; }
  // Syncs and renames. After success the file is durable. When only the folder's sync fails, the new file is in place
  // and the error says so.
  Status finish();

 private:
  CacheWriter(const std::string& path, const format::Identity& identity);
  void enter_section();  // skips sections that are complete, also empty ones
  Status flush();        // the gathered bytes, to the file

  std::string path_;
  os::File file_;            // the temporary file
  bool temporary_ = false;   // it exists under its own name
  bool begun_ = false;
  bool broken_ = false;      // a write failed: nothing may make a file of what is there
  CacheHeader header_;
  uint64_t total_ = 0, written_ = 0;  // bytes of all sections
  uint32_t section_ = 0;     // the one being written
  uint64_t position_ = 0;    // bytes of it that have been gathered
  Buffer<std::byte> gather_;  // up to gather_bytes of it, beginning at a block
  std::size_t gathered_ = 0;
  Array<uint64_t> checksums_;  // of all blocks so far, the sections' tables one after the other
};

// Immutable but for the memory of what has been checked: all functions may run together.
class CacheFile {
 public:
  // Maps and validates. Tells apart: not_a_cache (wrong magic), version (needs a newer reader; stale), corrupt (with the offset).
  // On failure *out is unchanged. The mapping lives as long as the CacheFile.
  static Status open(const std::string& path, std::shared_ptr<const CacheFile>* out);

  const std::string& path() const { return path_; }
  const format::Identity& identity() const { return header_.identity; }
  uint32_t version() const { return header_.version; }
  uint64_t size() const { return header_.file_size; }

  using Section = CacheHeader::Entry;
  // In file order; sections of kinds that this reader does not know are among them.
  std::span<const Section> sections() const { return header_.entries(); }
  const Section* find(format::SectionKind kind) const;  // the first of its kind

  // A section's bytes, not yet checked. Empty when there is no such section.
  std::span<const std::byte> bytes(format::SectionKind kind) const;

  // Verifies the blocks that hold [offset, offset + size) of a section, unless they were before. False: damaged, or not within
  // the section. Cheap (one relaxed load for up to 64 blocks) when they have been seen.
  bool check(const Section& section, uint64_t offset, uint64_t size) const;
  // As check() over a whole section, with a message that names file, section and offset.
  Status check_section(const Section& section) const;
  // Reads every byte of the file again, those between the sections too. Code::cancelled when asked to stop.
  Status verify_all(Progress* progress, const Cancel* cancel) const;

  void advise(const Section& section, os::Mapping::Advice advice) const;

 private:
  CacheFile() = default;
  Status verify_tables() const;
  bool block_is_intact(const Section& section, uint64_t block) const;  // block: of the section
  bool verify_missing(const Section& section, uint64_t word, uint64_t missing) const;
  Status damaged(const Section& section, uint64_t block) const;
  Status require_zero(uint64_t begin, uint64_t end) const;

  std::string path_;
  os::Mapping mapping_;
  CacheHeader header_;
  // Bit b: block b of the file (counted from its beginning) was found intact. An extent's 16 pages share a word.
  mutable Array<std::atomic<uint64_t>> seen_;
};

}  // namespace kvasir
