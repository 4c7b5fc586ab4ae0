// The keys and values of one sequence: sealed int8 pages, and the tokens at both ends in full
// precision.
//
//   tokens   0 ........ T | T .............. pages * T | ........ n
//            sinks (copy) | sealed pages               | window
//
// New tokens enter the window. When it holds a page more than window_tokens, its oldest page_tokens
// tokens are sealed. The tokens of the first page (the sinks) are also kept in full precision, and
// attention reads them there: selection begins at page 1. K is stored centred: when the first page
// is sealed, the mean key of the window is computed once and then subtracted from every key of the
// layer and head. That shifts all scores of a query by the same number, so attention is unchanged.
// With window_tokens == keep_all nothing is ever sealed: the full-precision store.
//
// A step is prepare(n), write(layer, ...) for every layer, commit(n). Nothing is visible before
// commit(), so a step that fails or is cancelled leaves no trace. Threads: as for PageStore;
// write() for different layers must not overlap with commit().
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "backend/thread_pool.h"
#include "base/memory.h"
#include "base/status.h"
#include "store/key_sketch.h"
#include "store/page_store.h"
#include "store/representatives.h"
#include "store/token_index.h"

namespace kvasir {

// The memory that a sequence may use. Pages beyond it are spilled to a file without a name, or are
// read from the mapped file again.
// read from a mapped file, and forgotten.
struct MemoryBudget {
  uint64_t bytes = 0;        // bound of private_bytes() and mapped summaries; 0: none
  std::string spill_folder;  // "": the default of os::File::create_nameless()
  // The most tokens of a step, which the window holds before they are sealed. A larger step that
  // fits raises it.
  uint32_t step_tokens = 0;
  // Closes the spill file and the files of unfinished saves; null: the destructors do.
  std::shared_ptr<os::FileReaper> reaper;
};

// Checks when a sequence is opened, not in the middle of prefill, that a sequence that seals pages,
// or does not, can keep the budget at all, and that the folder accepts files. Code::bad_argument,
// Code::not_found, Code::permission, Code::no_space.
Status check_memory_budget(const MemoryBudget& budget, bool full_precision);

class KvStore {
 public:
  static constexpr uint32_t keep_all = UINT32_MAX;

  KvStore(const StoreShape& shape, uint32_t window_tokens);
  // A fork: shares everything until one of the two changes.
  KvStore(const KvStore&) = default;
  KvStore(KvStore&&) noexcept = default;
  KvStore& operator=(KvStore&&) noexcept = default;

  const StoreShape& shape() const { return pages_.shape(); }
  const PageStore& pages() const { return pages_; }
  const KeySketch& sketch() const { return sketch_; }
  const Representatives& representatives() const { return representatives_; }
  const TokenIndexes& indexes() const { return indexes_; }
  uint64_t tokens() const { return sealed_tokens() + window_count_; }
  uint64_t sealed_tokens() const { return uint64_t{pages_.pages()} * shape().page.page_tokens; }
  uint32_t window_count() const { return window_count_; }
  uint32_t window_tokens() const { return window_tokens_; }
  // Changes with the committed rows of the window; equal in a fork.
  uint64_t window_stamp() const { return window_stamp_; }
  uint64_t sinks_stamp() const { return sinks_stamp_; }  // changes with the sinks and the centre
  uint32_t sink_count() const { return pages_.pages() ? shape().page.page_tokens : 0; }

  // Full-precision rows, [count][dim], centred when the store is. Uncommitted rows follow the
  // window's.
  struct Rows {
    const float* k;
    const float* v;
  };
  Rows sinks(uint32_t layer, uint32_t head) const;
  Rows window(uint32_t layer, uint32_t head) const;

  // Sets the budget; from then on prepare() keeps it. Code::limit when a sequence of `tokens`
  // tokens cannot keep it. Code::no_space, Code::io, ... when pages cannot be spilled. Throws
  // std::bad_alloc. Code::cancelled, here and below, is tested between two slabs; slabs spilled
  // before stay spilled.
  Status set_budget(const MemoryBudget& budget, uint64_t tokens, const Cancel* cancel = nullptr);
  const MemoryBudget& budget() const { return budget_; }
  // Bytes of a sequence of `tokens` tokens that cannot be spilled, including pages being spilled.
  uint64_t min_bytes(uint64_t tokens) const { return min_bytes(tokens, budget_.step_tokens); }
  // Checks that the budget suffices for `tokens` tokens and `more` bytes, also with a step of
  // `step` tokens.
  Status check_budget(uint64_t tokens, uint64_t more = 0, uint32_t step = 0) const;
  // Spills now what growth to `tokens` tokens and `more` bytes would spill. Called before a copy of
  // the sequence grows and is dropped: pages that the copy spills, this sequence would still have
  // in memory. Errors as for set_budget().
  Status keep_within_budget(uint64_t tokens, uint64_t more = 0, uint32_t step = 0,
                            const Cancel* cancel = nullptr);
  // With a budget: spills all it can and drops cached pages, until the next step.
  Status shrink(const Cancel* cancel);
  // With a budget that does not fit all pages: drops resident pages of the mapping of this layer,
  // or of all layers.
  void drop_resident_pages(uint32_t layer) const {
    if (drop_resident_) pages_.drop_resident_pages(layer);
  }
  void drop_resident_pages() const {
    for (uint32_t l = 0; l < shape().layers; ++l) drop_resident_pages(l);
  }

  // Makes room for n more tokens and for the pages that commit() seals. Throws std::bad_alloc, or
  // returns Code::corrupt (a damaged page of a mapped file would have to be copied); the store is
  // unchanged. overlap: the calls of observe() that may overlap; pool: as for
  // PageStore::reserve().
  using Overlap = Representatives::Overlap;
  Status prepare(uint32_t n, Overlap overlap = Overlap::nothing, ThreadPool* pool = nullptr);
  // prepare() in two parts: the needs of write() and observe(), then those of seal() and commit().
  Status prepare_rows(uint32_t n, Overlap overlap, ThreadPool* pool,
                      const Cancel* cancel = nullptr);
  Status prepare_pages(uint32_t n, ThreadPool* pool, const Cancel* cancel = nullptr);
  // Writes the step's n tokens of one layer, or of one of its heads: k, v: [n][kv_heads][head_dim],
  // K after RoPE. Calls for different ones may overlap. pool: the threads that write; null: the
  // caller.
  void write(uint32_t layer, uint32_t n, const float* k, const float* v,
             ThreadPool* pool = nullptr);
  void write_keys(uint32_t layer, uint32_t head, uint32_t n, const float* k);
  void write_values(uint32_t layer, uint32_t head, uint32_t n, const float* v);
  // After write() of the same layer: takes the step's queries, [n][heads * head_dim] after RoPE,
  // from which the representatives are found. Calls may overlap as prepare() was configured.
  void observe(uint32_t layer, uint32_t n, const float* q, uint32_t heads);
  void observe(uint32_t layer, uint32_t head, uint32_t n, const float* q, uint32_t heads);
  // After write() of a layer, while other layers are still to come: seals what commit(n) would seal
  // of it. Possible when the pages are known, so not for the first pages of a text.
  void seal(uint32_t layer, uint32_t n, const Kernels& kernels, ThreadPool* pool);
  // Whether seal() was called for the layer in this step.
  bool sealed_ahead(uint32_t layer) const { return sealed_ahead_[layer]; }
  void commit(uint32_t n, const Kernels& kernels, ThreadPool* pool);
  // Before commit(kept), in a step of n written tokens: keeps only the first `kept`.
  void keep_first(uint32_t kept, uint32_t n) { representatives_.keep_first(kept, n); }

  // Goes back to the first `tokens` tokens (<= tokens()). Tokens that have left the window are
  // restored from their pages until the window holds window_tokens again. Throws std::bad_alloc.
  // Code::corrupt for damaged pages of a mapped file and for pages with NaN or infinity; then
  // nothing is changed.
  Status rewind(uint64_t tokens, const Kernels& kernels);

  // Pages that are sealed after prefill of `tokens` tokens, for any step sizes.
  uint32_t pages_after(uint64_t tokens) const;
  // Goes back to the first `pages` sealed pages (<= pages().pages()) with an empty window; the
  // caller computes the tokens behind them again. Pages and their summaries stay. Throws
  // std::bad_alloc and leaves the store unchanged.
  void cut(uint32_t pages);

  // Builds the sketch of the sealed keys, anew if there is one; see KeySketch::build. From then on
  // it follows the pages. It also covers the pages that commit() of a prepared step of `open`
  // tokens will seal.
  Status build_sketch(const KeySketch::QueryMoment& queries, const Kernels& kernels,
                      ThreadPool* pool, const Cancel* cancel, uint32_t open = 0);

  // Some queries are unknown: discards the representatives and finds no more.
  void forget_representatives() { representatives_.forget(); }
  // The strategy does not use representatives: no step finds any.
  void drop_representatives() { representatives_.drop(); }

  // Discards the sketch until it is built again.
  void forget_sketch() { sketch_.clear(); }

  // Takes the representatives that another store found in the same tokens.
  void take_representatives(KvStore&& other) {
    representatives_ = std::move(other.representatives_);
  }

  // Removes the newest token, to compute it again. tokens() > 0. Throws std::bad_alloc and leaves
  // the store unchanged.
  void pop();

  // Sets an index whose tokens are all sealed; it replaces the one of its kind.
  void set_index(std::shared_ptr<TokenIndex> index, uint32_t valid) {
    TokenIndexes::Entry& entry = indexes_.of(index->kind());
    entry = {std::move(index), valid};
  }

  uint64_t private_bytes() const;

  // Persistence of sinks, window and centre; sizes in floats.
  // [layers][kv_heads][2][page_tokens][dim]; 0 when nothing is sealed.
  std::size_t sinks_size() const { return sinks_ ? sinks_room() : 0; }
  std::size_t window_size() const;  // [layers][kv_heads][2][window_count][dim]
  // [layers][kv_heads][dim]; 0 when nothing is sealed.
  std::size_t centre_size() const { return centre_.size(); }
  std::span<const float> centre() const { return centre_; }
  std::span<const float> sink_floats() const { return {sinks_.get(), sinks_size()}; }
  Status write_window(const std::function<Status(const void* data, std::size_t size)>& write) const;
  // A store from saved parts. The caller has checked the sizes, and fills the arrays that are not
  // null before any other call. The window has room for a first question and answer within the
  // budget of the store. Throws std::bad_alloc.
  struct SavedRows {
    uint32_t window_count = 0;
    bool has_centre = false, has_sinks = false;
  };
  static KvStore restore(PageStore pages, KeySketch sketch, Representatives representatives,
                         uint32_t window_tokens, const SavedRows& saved,
                         const MemoryBudget& budget);
  struct Restored {
    float* centre;  // each is null where the part is missing
    float* sinks;
    // plane: (layer * kv_heads + head) * 2 + which
    float* window(uint64_t plane) const { return window_begin + plane * window_stride; }
    float* window_begin;
    std::size_t window_stride;
  };
  Restored restored();

 private:
  uint64_t min_bytes(uint64_t tokens, uint32_t step) const;
  std::size_t sinks_room() const;  // floats of sinks_ when they exist
  float* window_row(uint32_t layer, uint32_t head, uint32_t which, uint32_t row);
  const float* window_row(uint32_t layer, uint32_t head, uint32_t which, uint32_t row) const;
  float* plane(uint64_t i) const {
    return window_.get() + (i * capacity_ + first_row_) * shape().page.dim;
  }
  uint32_t capacity_for(uint32_t rows) const;
  Status own_window(uint32_t rows, bool alters = false, ThreadPool* pool = nullptr,
                    const Cancel* cancel = nullptr);
  // window_count_ became smaller: rows behind it may belong to another store.
  void lowered() { appends_.here = is_sole(window_); }
  void fix_centre(uint32_t rows, ThreadPool* pool);

  PageStore pages_;
  KeySketch sketch_;
  Representatives representatives_;
  TokenIndexes indexes_;
  MemoryBudget budget_;
  uint64_t cache_limit_ = PageCache::by_itself;
  bool drop_resident_ = false;  // files hold more than the budget
  uint32_t window_tokens_;
  uint32_t window_count_ = 0;
  uint32_t capacity_ = 0;   // rows of room in window_
  uint32_t first_row_ = 0;  // first row of the window; those before it were sealed
  uint64_t window_stamp_ = 0, sinks_stamp_ = 0;
  std::size_t window_floats() const;  // of window_
  // [layers][kv_heads][2][capacity][dim], shared with copies. Rows that any of them has committed
  // are not written again. Only one store, without copies, writes behind them.
  std::shared_ptr<float[]> window_;
  struct Appends {
    Appends() = default;
    Appends(const Appends&) {}
    Appends(Appends&&) noexcept = default;
    Appends& operator=(Appends&&) noexcept = default;
    bool here = false;
  };
  Appends appends_;
  std::vector<bool> sealed_ahead_;  // [layers] sealed by seal() in this step
  // [layers][kv_heads][2][page_tokens][dim]; null when nothing is sealed; never changed.
  std::shared_ptr<float[]> sinks_;
  Array<float> centre_;  // [layers][kv_heads][dim]
};

}  // namespace kvasir
