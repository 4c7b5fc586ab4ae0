// A sketch of the sealed keys: of every key, the few numbers that say most about its scores, in 4
// bits. One scan of it estimates the score of every token at a sixteenth of the bytes of K and V.
//
// For each layer and KV head the sketch keeps n numbers of a key: key . A; a query's are query . B,
// and their product estimates the score, after RoPE. A and B, [dim][n], are those of rank n whose
// estimates differ least from the scores, in the mean over keys of second moment K and queries of
// second moment Q: with Q = L L^T and the leading eigenvectors W of L^T K L, A = L W and B = L^-T
// W. (A principal component analysis of the keys alone, Loki's, arXiv 2406.02542, section 4, is the
// case Q = 1; it keeps what keys differ by most, which heads that look for one token among many do
// not look at.) Each coordinate is then scaled so that keys vary nearly alike in all of them: all
// of a quad, four tokens, share one step of 4 bits. Q is half of what the newest queries of the
// reading have, half the same in all directions, because what is asked differs from what was read.
// Where none are known, in a cache without a model or a session that went back past them, Q = 1:
// the sketch has the components of the keys alone. Measured over 128,000 tokens of a book, when the
// bases were found by iteration, attention that the best hundredth of the blocks has in the four
// heads that the keys' components serve worst, for questions, with blocks of 16 tokens: 46 to 65%
// by components, 48 to 71% by A and B (57 to 81% by exact scores). K depends on how far positions
// reach, because the slow channels of RoPE turn with them; so the bases are found when a text has
// been read, and found again when it has grown by a part. Pages sealed in between are added with
// the bases at hand.
//
// Extents are shared by forks and copied when they are written to, or lie in a mapped cache file.
// Threads: const functions may run together; the rest is exclusive.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backend/kernels.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"
#include "cachefile/cache_file.h"
#include "store/page_store.h"

namespace kvasir {

class KeySketch {
 public:
  explicit KeySketch(const StoreShape& shape) : shape_(shape) {}

  bool built() const { return pages_ > 0; }
  // that it covers: all sealed ones, once it is built
  uint32_t pages() const { return pages_; }
  uint32_t built_pages() const { return built_pages_; }  // that there were when the basis was found
  // whether the text has not doubled since
  bool is_current() const { return built() && pages_ < 2 * built_pages_; }

  // Adds q q^T of all known queries to a KV head, in the keys' coordinates, to moment: [dim][dim].
  // From any thread.
  using QueryMoment = std::function<void(uint32_t layer, uint32_t head, double* moment)>;
  // Finds the bases of each head and covers all sealed pages. queries null: none are known. The old
  // sketch stays when this fails: Code::cancelled (seen between two pages of a head), Code::corrupt
  // (a damaged page of a mapped file); throws std::bad_alloc.
  Status build(const PageStore& pages, const QueryMoment& queries, const Kernels& kernels,
               ThreadPool* pool, const Cancel* cancel);
  // Makes room for pages up to `pages` in all, so that append() cannot fail. Code::corrupt; throws
  // std::bad_alloc.
  Status reserve(uint32_t pages);
  // Covers the pages that were sealed since. Nothing happens before it is built.
  void append(const PageStore& pages, const Kernels& kernels, ThreadPool* pool);
  void truncate(uint32_t pages);
  void clear();

  // PageShape::sketch_bytes()
  const int8_t* extent(uint32_t layer, uint32_t head, uint32_t e) const;
  // B, [dim][sketch_dim]
  const float* query_basis(uint32_t layer, uint32_t head) const;
  // as PageStore::intact_bounds
  bool intact(uint32_t layer, uint32_t head, uint32_t e) const;
  // The extent of `heads` of all layers' heads, from `first` on, verified, to `to`. Code::corrupt,
  // Code::io; throws std::bad_alloc.
  Status copy(uint32_t e, uint32_t first, uint32_t heads, std::byte* to) const;
  // as PageStore::stamp
  uint64_t stamp(uint32_t e) const { return extents_[e].stamp; }
  // changes with the bases
  uint64_t basis_stamp() const { return basis_stamp_; }
  Status damaged() const;

  uint64_t private_bytes() const;
  // A and B of all heads
  uint64_t basis_bytes() const { return 2 * shape_.heads_total() * basis_floats() * sizeof(float); }

  // The section of a cache file: f32 A [layers][kv_heads][dim][sketch_dim], B likewise, u32
  // built_pages and pages, zeros up to a multiple of 4096, then
  // [extents][layers][kv_heads][sketch_bytes]. 0 when there is nothing to write.
  // a section of another one is left alone, and the sketch found again
  static constexpr uint32_t section_version = 3;
  uint64_t file_bytes() const;
  Status write(const std::function<Status(const void* data, std::size_t size)>& write) const;
  // Over a section of this version in a mapped file, for a store of `pages` pages. Code::corrupt.
  static Status map(const StoreShape& shape, std::shared_ptr<const CacheFile> file, uint32_t pages,
                    ThreadPool* pool, const Cancel* cancel, KeySketch* out);
  // What a loader would refuse of what write() writes, for a store of `pages` pages; null: nothing.
  const char* wrong(uint32_t pages) const;

 private:
  struct Extent {
    const int8_t* data = nullptr;    // [layers][kv_heads][sketch_bytes]
    std::shared_ptr<int8_t> memory;  // where it is private
    uint64_t stamp = 0;
  };
  // A [layers][kv_heads][dim][sketch_dim], then B; not cleared when it is made: a large model's are
  // written by all threads
  struct Bases {
    explicit Bases(std::size_t n) : size(n), floats(make_buffer<float>(n)) {}
    std::size_t size;
    Buffer<float> floats;
  };
  std::size_t extent_bytes() const { return shape_.page.sketch_bytes() * shape_.heads_total(); }
  std::size_t basis_floats() const {
    return std::size_t{shape_.page.dim} * shape_.page.sketch_dim();
  }
  uint64_t head_bytes() const;  // of the section, before the extents
  Extent new_extent() const;
  void seal(Extent* extent, const PageStore& pages, const Bases& bases, uint32_t at, uint32_t page,
            const Kernels& kernels) const;

  StoreShape shape_;
  uint32_t pages_ = 0, built_pages_ = 0;
  std::shared_ptr<const Bases> bases_;
  uint64_t basis_stamp_ = 0;
  std::vector<Extent> extents_;
  std::shared_ptr<const CacheFile> file_;  // of extents that are mapped,
  uint64_t extents_at_ = 0;                // which begin here in its section
};

}  // namespace kvasir
