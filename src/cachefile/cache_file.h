// A cache file: a 4 KiB header with the section table, the sections, and a checksum for every 4 KiB
// block of each section. This file implements the container; format.h and docs/file-format.md
// define the contents of the sections.
//
// Writing is atomic: a unique temporary file in the same folder is preallocated, written, synced
// and renamed, and the folder is synced. The path holds the old file or the new one, never a
// mixture. On failure or cancellation the temporary file is removed.
//
// Opening reads and verifies the header, the section table and the checksum tables. Blocks are
// verified at their first use (check) or all at once (verify_all). The file stays open and mapped,
// and sections are used in the mapping. The bounds are the exception: every selection reads them
// from end to end, so they are copied to private memory, where a truncated file or a failing disk
// is an error. An access to a mapped byte that is missing raises SIGBUS; read() reports an error.
// While the file is open it has a shared lock, where the file system has locks, so that a library
// does not evict it.
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

// One thread at a time. After a failure only the destructor may be called.
class CacheWriter {
 public:
  // Creates the file that will replace `path`. `identity` goes into the header.
  static Status create(const std::string& path, const format::Identity& identity,
                       std::unique_ptr<CacheWriter>* out,
                       std::shared_ptr<os::FileReaper> reaper = {});
  CacheWriter(const CacheWriter&) = delete;
  CacheWriter& operator=(const CacheWriter&) = delete;

  // Declares a section of exactly `bytes` bytes. All sections are declared before begin(), each
  // kind once (indexes: any number).
  Status add_section(format::SectionKind kind, uint32_t version, uint64_t bytes);
  // Reserves the space. Code::no_space when the disk is too full; then nothing has been written.
  Status begin();
  // Appends to the sections in the order of their declaration, in pieces of any size.
  Status write(const void* data, std::size_t size);
  uint64_t bytes_total() const { return total_; }  // of all sections
  uint64_t bytes_written() const { return written_; }
  // Syncs and renames. After success the file is durable. If only the sync of the folder fails, the
  // new file is in place and the error says so.
  Status finish(const AtomicFile::BeforeRename& before_rename = {});

 private:
  CacheWriter(const std::string& path, const format::Identity& identity);
  void enter_section();  // skips complete sections, empty ones included
  Status flush();        // writes the gathered bytes to the file

  std::string path_;
  AtomicFile file_;
  bool begun_ = false;
  bool broken_ = false;  // a write failed: finish() must fail
  CacheHeader header_;
  uint64_t total_ = 0, written_ = 0;  // bytes of all sections
  uint32_t section_ = 0;              // index of the section being written
  uint64_t position_ = 0;             // bytes of that section that have been gathered
  Buffer<std::byte> gather_;          // up to gather_bytes of them, from the beginning of a block
  std::size_t gathered_ = 0;
  // of all blocks so far: the tables of the sections, one after the other
  Array<uint64_t> checksums_;
};

// Immutable except for the record of verified blocks: all functions may be called at once.
class CacheFile {
 public:
  // Maps and validates. Codes: not_a_cache (wrong magic), version (needs a newer reader, or stale),
  // corrupt (with the offset). On failure *out is unchanged. The mapping lives as long as the
  // CacheFile. pool: reads the tables, which are long in a long file; null: the caller reads them,
  // here and below. cancel: tested after each MiB, here and below; null: none. The tables take
  // memory of 0.2% of the sections' sizes. A caller that loads a file checks these sizes with
  // CachePeek before it opens it.
  static Status open(const std::string& path, std::shared_ptr<const CacheFile>* out,
                     ThreadPool* pool = nullptr, const Cancel* cancel = nullptr);
  static Status open(CachePeek peek, std::shared_ptr<const CacheFile>* out, ThreadPool* pool,
                     const Cancel* cancel);

  const std::string& path() const { return path_; }
  const format::Identity& identity() const { return header_.identity; }
  uint32_t version() const { return header_.version; }
  uint64_t size() const { return header_.file_size; }
  // Code::corrupt where the file was cut since it was mapped. Costs a system call.
  Status check_size() const { return file_.check_size(size()); }

  using Section = CacheHeader::Entry;
  // In file order, sections of unknown kinds included.
  std::span<const Section> sections() const { return header_.entries(); }
  const Section* find(format::SectionKind kind) const;  // the first of its kind

  // The bytes of a section, not verified. Empty without such a section.
  std::span<const std::byte> bytes(format::SectionKind kind) const;

  // Verifies the blocks that hold [offset, offset + size) of a section, each once. False: damaged,
  // unreadable or outside the section. For verified blocks it costs one load per 64 blocks.
  bool check(const Section& section, uint64_t offset, uint64_t size) const;
  // Why a check() returned false, with file, section and offset: the last failure of any thread.
  Status failure() const;
  // check() of a whole section, with its failure.
  Status check_section(const Section& section, ThreadPool* pool = nullptr,
                       const Cancel* cancel = nullptr) const;
  // Reads whole blocks of a section from the file, not through the mapping, and verifies them:
  // block first + i into to[i], or `count` blocks one after the other. On failure the output is not
  // valid. Code::corrupt, Code::io.
  Status read(const Section& section, uint64_t first, std::span<std::byte* const> to) const;
  Status read(const Section& section, uint64_t first, uint64_t count, std::byte* to) const;
  // Reads any bytes of a section; verifies all blocks that hold them. Throws std::bad_alloc.
  Status copy(const Section& section, uint64_t offset, uint64_t size, std::byte* to) const;
  // copy() on all threads, for bytes that go elsewhere: calls f(at, data, size) with the bytes from
  // offset + at on, in pieces that fit a core's cache. f must not throw. After a failure some calls
  // are missing. blocks: receives the whole blocks that hold the bytes; null: they are not kept.
  using Take = std::function<void(uint64_t at, const std::byte* data, std::size_t size)>;
  Status scan(const Section& section, uint64_t offset, uint64_t size, ThreadPool* pool,
              const Cancel* cancel, const Take& f, std::byte* blocks = nullptr) const;
  // Reads every byte of the file again, the gaps between sections included. Code::cancelled.
  Status verify_all(Progress* progress, const Cancel* cancel) const;

  void advise(const Section& section, os::Mapping::Advice advice) const {
    advise(section, 0, section.bytes, advice);
  }
  // A part of a section.
  void advise(const Section& section, uint64_t offset, uint64_t size,
              os::Mapping::Advice advice) const;

  uint64_t private_bytes() const;  // tables, and the private memory that has been filled
  uint64_t table_bytes() const { return blocks_ * sizeof(uint64_t); }

 private:
  CacheFile() = default;
  const os::File& file() const;  // for reads
  Status read_tables(ThreadPool* pool, const Cancel* cancel);
  Status stopped() const;
  void place_sections();
  std::size_t index_of(const Section& section) const {
    return static_cast<std::size_t>(&section - sections().data());
  }
  bool is_private(const Section& section) const { return places_[index_of(section)].is_private; }
  // block: its number in the section
  bool block_is_intact(const Section& section, uint64_t block, const std::byte* data) const;
  bool verify_missing(const Section& section, uint64_t word, uint64_t missing) const;
  bool read_missing(const Section& section, uint64_t word, uint64_t missing) const;
  Status damaged(const Section& section, uint64_t block) const;
  void note(const Status& failure) const;

  std::string path_;
  os::File file_;
  std::vector<os::File> more_files_;  // more handles of the same file, for other threads
  os::Mapping mapping_;
  CacheHeader header_;
  struct Place {
    // The first byte of the section, in the mapping or in private memory.
    const std::byte* data = nullptr;
    bool is_private = false;
    uint64_t table = 0;  // index of its first checksum in tables_
  };
  std::array<Place, format::max_sections> places_;
  uint64_t blocks_ = 0;  // of all sections
  // Checksums of all blocks: the tables of the sections, one after the other.
  Buffer<uint64_t> tables_;
  // Room for the private sections, filled as they are read.
  Buffer<std::byte> private_;
  mutable std::atomic<uint64_t> private_blocks_{0};
  mutable std::mutex reading_;  // guards private_ while it is filled
  mutable std::mutex failing_;  // guards failure_
  mutable Status failure_;
  // Bit b: block b of the file, counted from its beginning, was verified. The 16 pages of an extent
  // share a word.
  mutable Array<std::atomic<uint64_t>> seen_;
};

}  // namespace kvasir
