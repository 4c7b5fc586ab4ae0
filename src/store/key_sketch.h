// A sketch of the sealed keys: of every key, the few numbers that say most about its scores, in 4 bits. One scan of it estimates the
// score of every token at a sixteenth of the bytes of K and V.
//
// For each layer and KV head the sketch keeps the keys' coordinates along the leading eigenvectors of their second moment, over all sealed
// keys (a principal component analysis, as Loki has it, arXiv 2406.02542, section 4): key . basis and query . basis, [dim][n], after RoPE.
// The moment depends on how far positions reach, because the slow channels of RoPE turn with them; so the basis is found when a text has
// been read, and found again when it has grown by a part. Pages sealed in between are added with the basis at hand. (Weighing the
// directions by the queries of the reading was tried and is worse: what is asked differs from what was read.)
//
// Extents are shared by forks and copied when they are written to, or lie in a mapped cache file. Threads: const functions may run
// together; the rest is exclusive.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/memory.h"
#include "base/status.h"
#include "compute/kernels.h"
#include "compute/thread_pool.h"
#include "store/cache_file.h"
#include "store/page_store.h"

namespace kvasir {

class KeySketch {
 public:
  explicit KeySketch(const StoreShape& shape) : shape_(shape) {}

  bool built() const { return pages_ > 0; }
  uint32_t pages() const { return pages_; }              // that it covers: all sealed ones, once it is built
  uint32_t built_pages() const { return built_pages_; }  // that there were when the basis was found
  bool is_current() const { return built() && pages_ < 2 * built_pages_; }  // whether the text has not doubled since

  // Finds the basis of each head and covers all sealed pages. The old sketch stays when this fails: Code::corrupt (a damaged page of a
  // mapped file); throws std::bad_alloc.
  Status build(const PageStore& pages, const Kernels& kernels, ThreadPool* pool);
  // Makes room for pages up to `pages` in all, so that append() cannot fail. Code::corrupt; throws std::bad_alloc.
  Status reserve(uint32_t pages);
  // Covers the pages that were sealed since. Nothing happens before it is built.
  void append(const PageStore& pages, const Kernels& kernels, ThreadPool* pool);
  void truncate(uint32_t pages);
  void clear();

  const int8_t* extent(uint32_t layer, uint32_t head, uint32_t e) const;       // PageShape::sketch_bytes()
  const float* basis(uint32_t layer, uint32_t head) const;                     // [dim][sketch_dim]
  bool intact(uint32_t layer, uint32_t head, uint32_t e) const;                // as PageStore::intact_bounds
  Status damaged() const;

  uint64_t private_bytes() const;
  uint64_t basis_bytes() const { return shape_.heads_total() * basis_floats() * sizeof(float); }  // of all heads

  // The section of a cache file: basis f32 [layers][kv_heads][dim][sketch_dim], u32 built_pages and pages, zeros up to a multiple of
  // 4096, then [extents][layers][kv_heads][sketch_bytes]. 0 when there is nothing to write.
  uint64_t file_bytes() const;
  Status write(const std::function<Status(const void* data, std::size_t size)>& write) const;
  // Over a section of a mapped file, for a store of `pages` pages. Code::corrupt.
  static Status map(const StoreShape& shape, std::shared_ptr<const CacheFile> file, uint32_t pages, KeySketch* out);

 private:
  struct Extent {
    const int8_t* data = nullptr;          // [layers][kv_heads][sketch_bytes]
    std::shared_ptr<int8_t> memory;        // where it is private
  };
  using Bases = Array<float>;  // [layers][kv_heads][dim][sketch_dim]
  std::size_t extent_bytes() const { return shape_.page.sketch_bytes() * shape_.heads_total(); }
  std::size_t basis_floats() const { return std::size_t{shape_.page.dim} * shape_.page.sketch_dim(); }
  uint64_t head_bytes() const;  // of the section, before the extents
  Extent new_extent() const;
  void seal(Extent* extent, const PageStore& pages, const Bases& bases, uint32_t at, uint32_t page, const Kernels& kernels) const;

  StoreShape shape_;
  uint32_t pages_ = 0, built_pages_ = 0;
  std::shared_ptr<const Bases> bases_;
  std::vector<Extent> extents_;
  std::shared_ptr<const CacheFile> file_;  // of extents that are mapped
};

}  // namespace kvasir
