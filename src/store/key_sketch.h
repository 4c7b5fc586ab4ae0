// A sketch of the sealed keys: of every key, the few numbers that say most about its scores, in 4 bits. One scan of it estimates the
// score of every token at a sixteenth of the bytes of K and V.
//
// For each layer and KV head, with C the second moment of the keys and M that of queries, and M = L L^T:  q . k = (L^-1 q) . (L^T k).
// The sketch keeps the coordinates of L^T k along the leading eigenvectors U of L^T C L, which make the mean square of what is left out
// of q . k least (a principal component analysis that knows what will be asked; Loki, arXiv 2406.02542, section 4, has the keys' alone):
//   key . basis, basis = L U [dim][n];   query . query_basis, query_basis = L^-T U [dim][n].
// M is of the newest queries, whose rotary phases are those of the questions to come, plus as much in every direction: what is asked
// differs from what was read. C is over all sealed keys. So the bases are found when a document has been read, and found again when it has
// grown by a part; pages sealed in between are added with the bases at hand.
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
  uint32_t built_pages() const { return built_pages_; }  // that there were when the bases were found

  // Finds bases and covers all sealed pages. queries: [layers][kv_heads][dim][dim], sums of q q^T; zeros where nothing is known. The old
  // sketch stays when this fails: Code::corrupt (a damaged page of a mapped file); throws std::bad_alloc.
  Status build(const PageStore& pages, std::span<const float> queries, const Kernels& kernels, ThreadPool* pool);
  // Makes room for pages up to `pages` in all, so that append() cannot fail. Code::corrupt; throws std::bad_alloc.
  Status reserve(uint32_t pages);
  // Covers the pages that were sealed since. Nothing happens before it is built.
  void append(const PageStore& pages, const Kernels& kernels, ThreadPool* pool);
  void truncate(uint32_t pages);
  void clear();

  const int8_t* extent(uint32_t layer, uint32_t head, uint32_t e) const;       // PageShape::sketch_bytes()
  const float* query_basis(uint32_t layer, uint32_t head) const;               // [dim][sketch_dim]
  bool intact(uint32_t layer, uint32_t head, uint32_t e) const;                // as PageStore::intact_bounds
  Status damaged() const;

  uint64_t private_bytes() const;

  // The section of a cache file: bases f32 [layers][kv_heads][2][dim][sketch_dim] (of keys, of queries), u32 built_pages and pages, zeros
  // up to a multiple of 4096, then [extents][layers][kv_heads][sketch_bytes]. 0 when there is nothing to write.
  uint64_t file_bytes() const;
  Status write(const std::function<Status(const void* data, std::size_t size)>& write) const;
  // Over a section of a mapped file, for a store of `pages` pages. Code::corrupt.
  static Status map(const StoreShape& shape, std::shared_ptr<const CacheFile> file, uint32_t pages, KeySketch* out);

 private:
  struct Extent {
    const int8_t* data = nullptr;          // [layers][kv_heads][sketch_bytes]
    std::shared_ptr<int8_t> memory;        // where it is private
  };
  struct Bases {
    Array<float> keys, queries;  // [layers][kv_heads][dim][sketch_dim]
  };
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
