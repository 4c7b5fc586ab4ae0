// CacheFile: uses nothing of a cache file before its checksum matches.
#include "cachefile/cache_file.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "backend/first_failure.h"
#include "backend/parallel_chunks.h"
#include "base/checked.h"
#include "base/checksum.h"
#include "cachefile/cache_verify.h"

namespace kvasir {

using namespace format;

// Mapped bytes are used without conversion.
static_assert(std::endian::native == std::endian::little,
              "the sections' numbers are little endian");

namespace {

constexpr uint64_t word_blocks = 64;  // blocks per word of the bitmap
// Bytes between reading and use: they stay in a core's second-level cache.
constexpr std::size_t scan_step = std::size_t{64} << 10;
constexpr uint32_t max_pieces = word_blocks;  // destinations of one read

// The kernel counts the users of an open file. Sixteen threads that read 450,000 pages from memory
// took 3.3 us per page through one open file, and 1.1 us through files of their own; four threads
// took 1.3 and 1.0 us.
constexpr uint32_t handle_threads = 4;

// Sections that every selection reads from end to end.
bool is_read_whole(SectionKind kind) { return kind == SectionKind::bounds; }

constexpr int lock_tries = 20;

}  // namespace

Status CacheFile::open(const std::string& path, std::shared_ptr<const CacheFile>* out,
                       ThreadPool* pool, const Cancel* cancel) {
  CachePeek peek;
  RETURN_IF_ERROR(CachePeek::open(path, &peek));
  return open(std::move(peek), out, pool, cancel);
}

Status CacheFile::open(CachePeek peek, std::shared_ptr<const CacheFile>* out, ThreadPool* pool,
                       const Cancel* cancel) {
  std::shared_ptr<CacheFile> cache(new CacheFile);
  cache->path_ = peek.path();
  cache->header_ = peek.header();
  os::File file = std::move(peek).take_file();
  const uint64_t size = cache->header_.file_size;
  // The lock informs other processes; the mapping does not depend on it. A writer releases its lock
  // just after the rename.
  bool locked = false;
  for (int tries = 0; tries < lock_tries && file.lock(os::Lock::shared, &locked).ok() && !locked;
       ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  RETURN_IF_ERROR(os::Mapping::map(file, &cache->mapping_));
  if (cache->mapping_.size() != size) {
    return Status::error(Code::corrupt, "%s changed its size during the open",
                         cache->path_.c_str());
  }
  cache->file_ = std::move(file);
  // Fewer handles are only slower.
  for (uint32_t threads = handle_threads; pool && threads < pool->threads();
       threads += handle_threads)
    if (os::File more; cache->file_.reopen(&more).ok())
      cache->more_files_.push_back(std::move(more));
  cache->place_sections();
  RETURN_IF_ERROR(cache->read_tables(pool, cancel));
  cache->seen_ = Array<std::atomic<uint64_t>>(ceil_div(size, block_bytes * word_blocks));
  *out = std::move(cache);
  return {};
}

const os::File& CacheFile::file() const {
  const std::size_t i = os::thread_number() % (1 + more_files_.size());
  return i == 0 ? file_ : more_files_[i - 1];
}

void CacheFile::place_sections() {
  uint64_t private_size = 0;
  for (const Section& section : sections()) {
    Place& place = places_[index_of(section)];
    place.table = blocks_;
    blocks_ += section.blocks();
    place.is_private = is_read_whole(section.kind);
    if (place.is_private) private_size += section.blocks() * block_bytes;
  }
  tables_ = make_buffer<uint64_t>(blocks_);
  os::prefer_huge_pages(tables_.get(), blocks_ * sizeof(uint64_t));
  private_ = make_buffer<std::byte>(private_size);
  os::prefer_huge_pages(private_.get(), private_size);
  std::byte* next = private_.get();
  for (const Section& section : sections()) {
    Place& place = places_[index_of(section)];
    place.data = place.is_private ? next : mapping_.data() + section.offset;
    if (place.is_private) next += section.blocks() * block_bytes;
  }
}

Status CacheFile::read_tables(ThreadPool* pool, const Cancel* cancel) {
  FirstFailure failure;
  parallel_chunks(table_bytes(), pool, [&](std::size_t at, std::size_t size) {
    if (is_cancelled(cancel)) return failure.note(stopped());
    if (Status s = file().read(header_.tables_offset() + at,
                               reinterpret_cast<std::byte*>(tables_.get()) + at, size);
        !s.ok())
      failure.note(std::move(s));
  });
  RETURN_IF_ERROR(std::move(failure).take());
  for (const Section& section : sections()) {
    const uint64_t* table = tables_.get() + places_[index_of(section)].table;
    if (is_cancelled(cancel)) return stopped();
    if (checksum(table, section.table_bytes(), section.table_offset) != section.table_checksum)
      return table_damaged(file_, section);
  }
  return {};
}

Status CacheFile::stopped() const {
  return Status::error(Code::cancelled, "cancelled; nothing of %s was loaded", path_.c_str());
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
  return {places_[index_of(*section)].data, static_cast<std::size_t>(section->bytes)};
}

bool CacheFile::block_is_intact(const Section& section, uint64_t block,
                                const std::byte* data) const {
  const uint64_t offset = block * block_bytes;
  const uint64_t size = std::min(block_bytes, section.bytes - offset);
  return checksum(data, static_cast<std::size_t>(size), section.offset + offset) ==
         tables_[places_[index_of(section)].table + block];
}

Status CacheFile::read(const Section& section, uint64_t first,
                       std::span<std::byte* const> to) const {
  os::File::Piece pieces[max_pieces];
  while (!to.empty()) {
    const std::size_t count = std::min<std::size_t>(to.size(), max_pieces);
    const uint64_t begin = first * block_bytes,
                   end = std::min(section.bytes, begin + count * block_bytes);
    for (std::size_t i = 0; i < count; ++i)
      pieces[i] = {to[i],
                   static_cast<std::size_t>(std::min(block_bytes, end - begin - i * block_bytes))};
    // Prefetched: for scattered pages it was seldom in the cache.
    __builtin_prefetch(&tables_[places_[index_of(section)].table + first]);
    RETURN_IF_ERROR(file().read(section.offset + begin, {pieces, count}));
    for (std::size_t i = 0; i < count; ++i)
      if (!block_is_intact(section, first + i, to[i])) return damaged(section, first + i);
    first += count;
    to = to.subspan(count);
  }
  return {};
}

Status CacheFile::read(const Section& section, uint64_t first, uint64_t count,
                       std::byte* to) const {
  const uint64_t begin = first * block_bytes,
                 end = std::min(section.bytes, begin + count * block_bytes);
  RETURN_IF_ERROR(file().read(section.offset + begin, to, static_cast<std::size_t>(end - begin)));
  for (uint64_t i = 0; i < count; ++i)
    if (!block_is_intact(section, first + i, to + i * block_bytes))
      return damaged(section, first + i);
  return {};
}

Status CacheFile::copy(const Section& section, uint64_t offset, uint64_t size,
                       std::byte* to) const {
  if (size == 0) return {};
  const uint64_t first = offset / block_bytes, count = ceil_div(offset + size, block_bytes) - first;
  if (offset % block_bytes == 0 && size % block_bytes == 0) return read(section, first, count, to);
  const auto blocks = make_buffer<std::byte>(count * block_bytes);
  RETURN_IF_ERROR(read(section, first, count, blocks.get()));
  std::memcpy(to, blocks.get() + offset % block_bytes, size);
  return {};
}

Status CacheFile::scan(const Section& section, uint64_t offset, uint64_t size, ThreadPool* pool,
                       const Cancel* cancel, const Take& f, std::byte* blocks) const {
  if (!range_fits(offset, size, section.bytes)) return damaged(section, 0);
  if (size == 0) return {};
  const uint64_t first = offset / block_bytes, count = ceil_div(offset + size, block_bytes) - first;
  FirstFailure failure;
  parallel_chunks(
      static_cast<std::size_t>(count * block_bytes), pool,
      [&](std::size_t at, std::size_t bytes) {
        if (is_cancelled(cancel)) return failure.note(stopped());
        const auto own = blocks ? nullptr : make_buffer<std::byte>(bytes);
        std::byte* const to = blocks ? blocks + at : own.get();
        const uint64_t begin = first * block_bytes + at;  // in the section
        if (Status s = read(section, begin / block_bytes, bytes / block_bytes, to); !s.ok())
          return failure.note(std::move(s));
        const uint64_t from = std::max(begin, offset), end = std::min(begin + bytes, offset + size);
        f(from - offset, to + (from - begin), static_cast<std::size_t>(end - from));
      },
      scan_step);
  return std::move(failure).take();
}

// Two threads may verify the same block: both read the same bytes and set the same bit.
bool CacheFile::verify_missing(const Section& section, uint64_t word, uint64_t missing) const {
  const uint64_t first = section.offset / block_bytes;
  const std::byte* data = places_[index_of(section)].data;
  uint64_t intact = 0;
  for (uint64_t left = missing; left != 0; left &= left - 1) {
    const uint64_t bit = static_cast<uint64_t>(std::countr_zero(left)),
                   block = word * word_blocks + bit - first;
    if (block_is_intact(section, block, data + block * block_bytes)) intact |= uint64_t{1} << bit;
  }
  seen_[word].fetch_or(intact, std::memory_order_release);
  if (intact == missing) return true;
  note(damaged(section, word * word_blocks +
                            static_cast<uint64_t>(std::countr_zero(missing & ~intact)) - first));
  return false;
}

// Reads a block once. Its bit allows its use while other blocks are read. Blocks that are not
// requested but adjacent are read too, because they will be needed soon; their errors are ignored.
bool CacheFile::read_missing(const Section& section, uint64_t word, uint64_t missing) const {
  const uint64_t first = section.offset / block_bytes, end = first + section.blocks(),
                 word_begin = word * word_blocks;
  std::byte* data = private_.get() + (places_[index_of(section)].data - private_.get());
  const std::lock_guard lock(reading_);
  const uint64_t seen = seen_[word].load(std::memory_order_relaxed);
  const auto read_run = [&](uint64_t begin, uint64_t count) {  // blocks of the file
    if (Status s = read(section, begin - first, count, data + (begin - first) * block_bytes);
        !s.ok()) {
      note(s);
      return false;
    }
    seen_[word].fetch_or((~uint64_t{0} >> (word_blocks - count)) << (begin - word_begin),
                         std::memory_order_release);
    private_blocks_.fetch_add(count, std::memory_order_relaxed);
    return true;
  };
  const uint64_t run_begin = std::max(first, word_begin),
                 run_end = std::min(end, word_begin + word_blocks);
  const uint64_t run = (~uint64_t{0} >> (word_blocks - (run_end - run_begin)))
                       << (run_begin - word_begin);
  if ((seen & run) == 0 && read_run(run_begin, run_end - run_begin)) return true;
  for (uint64_t left = missing & ~seen; left != 0; left &= left - 1)
    if (!read_run(word_begin + static_cast<uint64_t>(std::countr_zero(left)), 1)) return false;
  return true;
}

bool CacheFile::check(const Section& section, uint64_t offset, uint64_t size) const {
  if (!range_fits(offset, size, section.bytes)) {
    note(damaged(section, 0));
    return false;
  }
  if (size == 0) return true;
  const uint64_t first = (section.offset + offset) / block_bytes;
  const uint64_t last = (section.offset + offset + size - 1) / block_bytes;
  for (uint64_t word = first / word_blocks; word <= last / word_blocks; ++word) {
    uint64_t wanted = ~uint64_t{0};
    if (word == first / word_blocks) wanted &= ~uint64_t{0} << first % word_blocks;
    if (word == last / word_blocks)
      wanted &= ~uint64_t{0} >> (word_blocks - 1 - last % word_blocks);
    const uint64_t missing = wanted & ~seen_[word].load(std::memory_order_acquire);
    if (missing == 0) continue;
    if (!(is_private(section) ? read_missing(section, word, missing)
                              : verify_missing(section, word, missing)))
      return false;
  }
  return true;
}

Status CacheFile::damaged(const Section& section, uint64_t block) const {
  return section_damaged(file_, section, section.offset + block * block_bytes);
}

void CacheFile::note(const Status& failure) const {
  const std::lock_guard lock(failing_);
  failure_ = failure.copy();
}

Status CacheFile::failure() const {
  const std::lock_guard lock(failing_);
  return failure_.copy();
}

Status CacheFile::check_section(const Section& section, ThreadPool* pool,
                                const Cancel* cancel) const {
  std::atomic<bool> intact{true}, stop{false};
  parallel_chunks(static_cast<std::size_t>(section.bytes), pool,
                  [&](std::size_t at, std::size_t size) {
                    if (is_cancelled(cancel)) return stop.store(true, std::memory_order_relaxed);
                    if (!check(section, at, size)) intact.store(false, std::memory_order_relaxed);
                  });
  if (!intact.load(std::memory_order_relaxed)) return failure();
  return stop.load(std::memory_order_relaxed) ? stopped() : Status();
}

Status CacheFile::verify_all(Progress* progress, const Cancel* cancel) const {
  return verify_cache(file_, header_, progress, cancel);
}

uint64_t CacheFile::private_bytes() const {
  return private_blocks_.load(std::memory_order_relaxed) * block_bytes + table_bytes();
}

void CacheFile::advise(const Section& section, uint64_t offset, uint64_t size,
                       os::Mapping::Advice advice) const {
  mapping_.advise(section.offset + offset, size, advice);
}

}  // namespace kvasir
