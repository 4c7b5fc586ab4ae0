// A sketch of the sealed keys: a few numbers of every key in 4 bits, chosen to predict its scores.
// One scan of the sketch estimates the score of every token from a sixteenth of the bytes of K and
// V.
//
// For each layer and KV head the sketch keeps n numbers of a key, key . A. A query becomes query .
// B, and the product of the two estimates the score after RoPE. A and B, [dim][n], are the matrices
// of rank n whose estimates differ least from the scores, in the mean over keys of second moment K
// and queries of second moment Q. With Q = L L^T and the leading eigenvectors W of L^T K L, A = L W
// and B = L^-T W. A principal component analysis of the keys alone (Loki, arXiv 2406.02542, section
// 4) is the case Q = 1. It keeps the directions in which keys differ most, which heads that look
// for one token among many do not use.
//
// Coordinates are then scaled so that keys vary nearly alike in all of them, because all numbers of
// a quad, four tokens, share one step of 4 bits.
//
// Q is half the second moment of the newest queries of prefill and half isotropic, because
// questions differ from the document. Where no queries are known (a cache without a model, a
// session that rewound past them) Q = 1: the sketch has the components of the keys alone. Measured
// over 128,000 tokens of a book, with bases found by iteration: the attention that the best
// hundredth of the blocks of 16 tokens has, for questions, in the four heads that the keys'
// components serve worst. It was 46 to 65% with components, 48 to 71% with A and B, and 57 to 81%
// with exact scores.
//
// K depends on the range of positions, because the slow channels of RoPE turn with them. So the
// bases are found at the end of prefill, and again when the text has doubled, or has grown by a
// quarter at the end of a later prefill. Pages sealed in between are added with the current bases.
// While a GPU prefills, the CPU finds bases layer by layer in the last steps, and adds the pages of
// later steps to those layers.
// In 300 questions to a trained model of 32K tokens bases of the first four fifths of a document
// gave as many right answers as those of all of it (`bounded`, 1%: 87.9% and 87.6%; 5%: 88.1% and
// 88.0%).
//
// Forks share extents and copy them before a write; extents may be in a mapped cache file. Threads:
// const functions may be called at once; the others are exclusive.
#pragma once

#include <algorithm>
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
  // Pages covered: all sealed pages, once it is built.
  uint32_t pages() const { return pages_; }
  // Pages when the bases were found; of a build in parts, at its end.
  uint32_t built_pages() const { return built_pages_; }
  // Whether the text has not doubled since then.
  bool is_current() const { return built() && pages_ < 2 * built_pages_; }

  // Adds q q^T of all known queries of a KV head, in the keys' coordinates, to moment: [dim][dim].
  // Called from any thread.
  using QueryMoment = std::function<void(uint32_t layer, uint32_t head, double* moment)>;
  // Finds the bases of each head and covers all sealed pages. queries null: none are known. On
  // failure the old sketch stays: Code::cancelled (tested between two pages of a head),
  // Code::corrupt (a damaged page of a mapped file); throws std::bad_alloc.
  Status build(const PageStore& pages, const QueryMoment& queries, const Kernels& kernels,
               ThreadPool* pool, const Cancel* cancel);
  // build() in parts, within the steps that seal the pages.
  class Build;
  // Throws std::bad_alloc.
  void begin(Build* build) const;
  // Layers find their bases in groups, so that threads have work: the first one of a layer's group.
  uint32_t group_begin(uint32_t layer) const { return layer / group_layers() * group_layers(); }
  // After the layers before it: adds a layer whose first `count` pages are sealed. A layer without
  // bases waits for the last one of its group, and for the step whose turn it is: see
  // Build::begin_step(). This call and the next ones cover the pages of layers that have bases, a
  // part of them each, so that none takes long; take() covers the rest. Where a part does not
  // succeed (the caller tests the cancel token; a damaged page) the layer keeps those before.
  // Throws std::bad_alloc.
  void add_layer(const PageStore& pages, uint32_t count, uint32_t layer, const QueryMoment& queries,
                 const Kernels& kernels, ThreadPool* pool, const Cancel* cancel,
                 Build* build) const;
  // Covers a part of the pages of layers that wait for the next calls, if there are any.
  void cover_next(const PageStore& pages, uint32_t count, const Kernels& kernels, ThreadPool* pool,
                  const Cancel* cancel, Build* build) const;
  // Replaces the sketch by a build, to which it adds the sealed pages that are missing. false: the
  // sketch is as before, because a layer has no bases, the build covers a page that is not sealed,
  // a page is damaged, or it was cancelled. Throws std::bad_alloc.
  bool take(const PageStore& pages, const Kernels& kernels, ThreadPool* pool, const Cancel* cancel,
            Build&& build);
  // Makes room for `pages` pages in all, so that append() cannot fail. pool: clears it; null: the
  // caller does. Code::corrupt; throws std::bad_alloc.
  Status reserve(uint32_t pages, ThreadPool* pool = nullptr);
  // A layer's part of append(), of its sealed pages up to `end`, which need not be committed. After
  // the parts of all layers and the store's commit, call appended() in place of append().
  void append_layer(const PageStore& pages, uint32_t layer, uint32_t end, const Kernels& kernels,
                    ThreadPool* pool) {
    append_heads(pages, layer * shape_.kv_heads, shape_.kv_heads, end, kernels, pool,
                 CancelLatch(nullptr));
  }
  void appended(const PageStore& pages);
  // Covers the pages sealed since the last call. Does nothing before build(). false: cancelled,
  // within two extents of a head; the sketch is as before.
  bool append(const PageStore& pages, const Kernels& kernels, ThreadPool* pool,
              const Cancel* cancel = nullptr);
  void truncate(uint32_t pages);
  void clear();

  // PageShape::sketch_bytes()
  const int8_t* extent(uint32_t layer, uint32_t head, uint32_t e) const;
  // B, [dim][sketch_dim]
  const float* query_basis(uint32_t layer, uint32_t head) const;
  // See PageStore::intact_bounds.
  bool intact(uint32_t layer, uint32_t head, uint32_t e) const;
  // Copies `heads` heads of an extent, from `first` on over all layers, verified. Code::corrupt,
  // Code::io; throws std::bad_alloc.
  Status copy(uint32_t e, uint32_t first, uint32_t heads, std::byte* to) const;
  // See PageStore::stamp.
  uint64_t stamp(uint32_t e) const { return extents_[e].stamp; }
  // Changes with the bases.
  uint64_t basis_stamp() const { return basis_stamp_; }
  Status damaged() const;

  uint64_t private_bytes() const;
  // Bytes of A and B of all heads.
  uint64_t basis_bytes() const { return 2 * shape_.heads_total() * basis_floats() * sizeof(float); }

  // The section of a cache file: f32 A [layers][kv_heads][dim][sketch_dim], f32 B likewise, u32
  // built_pages and pages, zeros up to a multiple of 4096, then
  // [extents][layers][kv_heads][sketch_bytes]. 0 bytes without a sketch. A section of another
  // version is ignored, and the sketch is built again.
  static constexpr uint32_t section_version = 3;
  uint64_t file_bytes() const;
  Status write(const std::function<Status(const void* data, std::size_t size)>& write) const;
  // A sketch in a section of this version of a mapped file, for a store of `pages` pages.
  // Code::corrupt. map_in_place(): the bases stay in the mapping. Nothing is appended to such a
  // sketch, and check_bases() comes before the first use of a layer's.
  static Status map(const StoreShape& shape, std::shared_ptr<const CacheFile> file, uint32_t pages,
                    ThreadPool* pool, const Cancel* cancel, KeySketch* out);
  static Status map_in_place(const StoreShape& shape, std::shared_ptr<const CacheFile> file,
                             uint32_t pages, KeySketch* out);
  // Verifies the query bases of a layer. Code::corrupt.
  Status check_bases(uint32_t layer) const;
  // The reason why a loader would refuse the output of write() for a store of `pages` pages; null:
  // none.
  const char* wrong(uint32_t pages) const;

 private:
  struct Extent {
    const int8_t* data = nullptr;    // [layers][kv_heads][sketch_bytes]
    std::shared_ptr<int8_t> memory;  // where it is private
    uint64_t stamp = 0;
  };
  // A [layers][kv_heads][dim][sketch_dim], then B. Not cleared at first: for a large model all
  // threads write them.
  struct Bases {
    explicit Bases(std::size_t n) : size(n), floats(make_buffer<float>(n)), data(floats.get()) {}
    Bases(const float* mapped, std::size_t n) : size(n), data(mapped) {}
    std::size_t size;
    Buffer<float> floats;  // none in a mapping
    const float* data;
  };
  std::size_t extent_bytes() const { return shape_.page.sketch_bytes() * shape_.heads_total(); }
  std::size_t basis_floats() const {
    return std::size_t{shape_.page.dim} * shape_.page.sketch_dim();
  }
  uint64_t head_bytes() const;  // of the section, before the extents
  static Status check_map(const CacheFile& file, const KeySketch& sketch, uint32_t pages,
                          uint32_t* built_pages);
  void map_extents(std::shared_ptr<const CacheFile> file, uint32_t pages, uint32_t built_pages,
                   std::shared_ptr<const Bases> bases);
  Extent new_extent() const;
  void append_heads(const PageStore& pages, uint32_t first_head, uint32_t heads, uint32_t end,
                    const Kernels& kernels, ThreadPool* pool, const CancelLatch& latch);
  void seal(Extent* extent, const PageStore& pages, const Bases& bases, uint32_t at, uint32_t page,
            const Kernels& kernels) const;
  uint32_t group_layers() const;
  void make_room(uint32_t count, Build* build) const;
  void replace(Build&& build, uint32_t pages);
  // Layers [first, end).
  struct Layers {
    uint32_t first, end;
  };
  bool find_bases(const PageStore& pages, uint32_t count, Layers layers, const QueryMoment& queries,
                  const Kernels& kernels, ThreadPool* pool, const CancelLatch& latch,
                  Build* build) const;
  bool cover(const PageStore& pages, uint32_t count, Layers layers, const Kernels& kernels,
             ThreadPool* pool, const CancelLatch& latch, Build* build) const;

  StoreShape shape_;
  uint32_t pages_ = 0, built_pages_ = 0;
  std::shared_ptr<const Bases> bases_;
  uint64_t basis_stamp_ = 0;
  std::vector<Extent> extents_;
  std::shared_ptr<const CacheFile> file_;  // of mapped extents
  uint64_t extents_at_ = 0;                // offset of the extents in its section
};

class KeySketch::Build {
 public:
  bool begun() const { return bases_ != nullptr; }
  bool complete() const { return begun() && layers_found() == found_.size(); }
  std::size_t layers_found() const {  // that have bases
    return static_cast<std::size_t>(std::count(found_.begin(), found_.end(), true));
  }
  const std::vector<uint32_t>& covered() const { return covered_; }  // [layers] pages
  // Before the first layer of a step. `left`: steps that can find bases, with this one, at least
  // 1. The groups of layers without bases are spread over them. A call covers one of so many
  // `parts` of a layer's pages, at least 1.
  static constexpr uint32_t most_parts = 4;
  void begin_step(uint32_t left, uint32_t parts = most_parts) {
    steps_left_ = left, parts_ = parts, groups_ = 0, is_abandoned_ = false, covers_ = true;
    behind_.clear();
  }
  // The next calls cover nothing, until begin_step().
  void stop_covering() { covers_ = false; }
  // Until the next step.
  void abandon() { *this = Build(), is_abandoned_ = true; }
  bool is_abandoned() const { return is_abandoned_; }

 private:
  friend class KeySketch;
  std::shared_ptr<Bases> bases_;
  std::vector<Extent> extents_;
  std::vector<bool> found_;        // [layers] whether it has bases
  std::vector<uint32_t> covered_;  // [layers]
  std::vector<uint32_t> behind_;   // layers of this step that have bases and miss pages
  bool is_abandoned_ = false, covers_ = true;
  uint32_t steps_left_ = 1, parts_ = most_parts;
  uint32_t groups_ = 0;  // groups without bases that this step has come to
};

}  // namespace kvasir
