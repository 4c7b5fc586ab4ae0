// A cache file: a 4 KiB header with the table of its sections, the sections, and a checksum for
// every 4 KiB block of each. This file knows the container; what the sections hold is written in
// format.h and docs/file-format.md.
//
// Writing is atomic: a unique temporary file in the same folder, preallocated, written, synced,
// renamed, folder synced. The path holds the old file or the new one, never anything between; on
// failure or cancel the temporary file is removed. Reading: header, section table and checksum
// tables are read and verified when the file is opened; blocks when they are first used (check), or
// all at once (verify_all). The file stays open and mapped. Sections are used where the mapping has
// them, but for summaries: every choice of pages reads these from end to end, so they are read into
// private memory, and a file that is cut off or a disk that fails is an error there. While it is
// open it is locked as shared, where the file system has locks: a library does not evict it.
// Touching a mapped byte that is not there any more raises SIGBUS; read() does not.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/status.h"
#include "cachefile/atomic_file.h"
#include "cachefile/cache_header.h"
#include "cachefile/cache_peek.h"
#include "cachefile/format.h"
#include "os/os.h"

namespace kvasir {

// One thread at a time. After a failure only the destructor may follow.
class CacheWriter {
 public:
  // Begins a file that will replace `path`. `identity` goes into the header.
  static Status create(const std::string& path, const format::Identity& identity,
                       std::unique_ptr<CacheWriter>* out,
                       std::shared_ptr<os::FileReaper> reaper = {});
  CacheWriter(const CacheWriter&) = delete;
  CacheWriter& operator=(const CacheWriter&) = delete;

  // Declares a section of exactly `bytes` bytes. All sections are declared before begin(), a kind
  // only once (indexes: any number).
  Status add_section(format::SectionKind kind, uint32_t version, uint64_t bytes);
  // Reserves the space. Code::no_space when the disk is too full; nothing has been written then.
  Status begin();
  // Appends to the sections in the order in which they were declared, in pieces of any size.
  Status write(const void* data, std::size_t size);
  uint64_t bytes_total() const { return total_; }  // of all sections
  uint64_t bytes_written() const { return written_; }
  // Syncs and renames. After success the file is durable. When only the folder's sync fails, the
  // new file is in place and the error says so.
  Status finish(const AtomicFile::BeforeRename& before_rename = {});

 private:
  CacheWriter(const std::string& path, const format::Identity& identity);
  void enter_section();  // skips sections that are complete, also empty ones
  Status flush();        // the gathered bytes, to the file

  std::string path_;
  AtomicFile file_;
  bool begun_ = false;
  bool broken_ = false;  // a write failed: nothing may make a file of what is there
  CacheHeader header_;
  uint64_t total_ = 0, written_ = 0;  // bytes of all sections
  uint32_t section_ = 0;              // the one being written
  uint64_t position_ = 0;             // bytes of it that have been gathered
  Buffer<std::byte> gather_;          // up to gather_bytes of it, beginning at a block
  std::size_t gathered_ = 0;
  Array<uint64_t> checksums_;  // of all blocks so far, the sections' tables one after the other
};

// Immutable but for the memory of what has been checked: all functions may run together.
class CacheFile {
 public:
  // Maps and validates. Tells apart: not_a_cache (wrong magic), version (needs a newer reader;
  // stale), corrupt (with the offset). On failure *out is unchanged. The mapping lives as long as
  // the CacheFile. pool: who reads the tables, which a long file has much of; the caller alone
  // where null, here and below. cancel: looked at after each MiB, here and below; null: none. The
  // tables take memory, 0.2% of the sections' sizes. Who loads a file compares these sizes with
  // what it knows before it opens what it has peeked at.
  static Status open(const std::string& path, std::shared_ptr<const CacheFile>* out,
                     ThreadPool* pool = nullptr, const Cancel* cancel = nullptr);
  static Status open(CachePeek peek, std::shared_ptr<const CacheFile>* out, ThreadPool* pool,
                     const Cancel* cancel);

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

  // Verifies the blocks that hold [offset, offset + size) of a section, unless they were before.
  // False: damaged, cannot be read, or not within the section. Cheap (one load for up to 64 blocks)
  // when they have been seen.
  bool check(const Section& section, uint64_t offset, uint64_t size) const;
  // Why a check was false, naming file, section and offset: of all threads' checks the last one.
  Status failure() const;
  // As check() over a whole section, with the failure.
  Status check_section(const Section& section, ThreadPool* pool = nullptr,
                       const Cancel* cancel = nullptr) const;
  // Reads whole blocks of a section from the file, past the mapping, and verifies what was read:
  // block first + i into to[i], or `count` of them one after the other. On failure what was read is
  // not to be used. Code::corrupt, Code::io.
  Status read(const Section& section, uint64_t first, std::span<std::byte* const> to) const;
  Status read(const Section& section, uint64_t first, uint64_t count, std::byte* to) const;
  // The same of any bytes within the section: all blocks that hold them are verified. Throws
  // std::bad_alloc.
  Status copy(const Section& section, uint64_t offset, uint64_t size, std::byte* to) const;
  // The same by all threads, of what is used elsewhere than it lies: f(at, data, size) is given the
  // bytes from offset + at on, pieces that a core's cache holds, and may not throw. After a failure
  // it has not been given all.
  using Take = std::function<void(uint64_t at, const std::byte* data, std::size_t size)>;
  Status scan(const Section& section, uint64_t offset, uint64_t size, ThreadPool* pool,
              const Cancel* cancel, const Take& f) const;
  // Reads every byte of the file again, those between the sections too. Code::cancelled when asked
  // to stop.
  Status verify_all(Progress* progress, const Cancel* cancel) const;

  void advise(const Section& section, os::Mapping::Advice advice) const {
    advise(section, 0, section.bytes, advice);
  }
  // a part of it
  void advise(const Section& section, uint64_t offset, uint64_t size,
              os::Mapping::Advice advice) const;

  uint64_t private_bytes() const;  // of tables and of what has been read into private memory so far
  uint64_t table_bytes() const { return blocks_ * sizeof(uint64_t); }

 private:
  CacheFile() = default;
  const os::File& file() const;  // to read by
  Status read_tables(ThreadPool* pool, const Cancel* cancel);
  Status stopped() const;
  void place_sections();
  std::size_t index_of(const Section& section) const {
    return static_cast<std::size_t>(&section - sections().data());
  }
  bool is_private(const Section& section) const { return places_[index_of(section)].is_private; }
  // block: of the section
  bool block_is_intact(const Section& section, uint64_t block, const std::byte* data) const;
  bool verify_missing(const Section& section, uint64_t word, uint64_t missing) const;
  bool read_missing(const Section& section, uint64_t word, uint64_t missing) const;
  Status damaged(const Section& section, uint64_t block) const;
  void note(const Status& failure) const;

  std::string path_;
  os::File file_;
  std::vector<os::File> more_files_;  // the same, for other threads
  os::Mapping mapping_;
  CacheHeader header_;
  struct Place {
    // the section's first byte, in the mapping or in private memory
    const std::byte* data = nullptr;
    bool is_private = false;
    uint64_t table = 0;  // its checksums in tables_
  };
  std::array<Place, format::max_sections> places_;
  uint64_t blocks_ = 0;  // of all sections
  // checksums of all blocks, the sections' tables one after the other
  Buffer<uint64_t> tables_;
  // room for the private sections; touched where they have been read
  Buffer<std::byte> private_;
  mutable std::atomic<uint64_t> private_blocks_{0};
  mutable std::mutex reading_;  // into private_
  mutable std::mutex failing_;  // guards failure_
  mutable Status failure_;
  // Bit b: block b of the file (counted from its beginning) was found intact. An extent's 16 pages
  // share a word.
  mutable Array<std::atomic<uint64_t>> seen_;
};

}  // namespace kvasir
