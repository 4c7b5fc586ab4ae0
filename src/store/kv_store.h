// The keys and values of one sequence: sealed int8 pages, and around them what stays in full
// precision.
//
//   tokens   0 ........ T | T .............. pages * T | ........ n
//            sinks (copy) | sealed pages               | window
//
// Tokens enter the window. When it holds a page more than window_tokens, its oldest page_tokens
// tokens are sealed. The first page's tokens (the sinks) are kept in full precision as well, and
// attention reads them there: selection begins at page 1. K is stored centred: the mean key of what
// the window holds when the first page is sealed is subtracted from every key of the layer and
// head, for good. That shifts all logits of a query by the same number, so attention is unchanged.
// With window_tokens == keep_all nothing is ever sealed: the full-precision store.
//
// A step is prepare(n), write(layer, ...) for every layer, commit(n). Until commit nothing is
// visible, so a step that fails or is cancelled is simply dropped. Threads: as PageStore; write()
// for different layers may not overlap with commit().
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

// How much of a sequence may be in memory: pages beyond it are spilled to a file without a name,
// read from a mapped file, and forgotten.
struct MemoryBudget {
  uint64_t bytes = 0;        // of what private_bytes() and mapped summaries count; 0: no limit
  std::string spill_folder;  // "": os::File::create_nameless() tells
  // most tokens of a step: the window holds them before they are sealed. A larger step that fits
  // raises it
  uint32_t step_tokens = 0;
  // Closes the spill file and what a save leaves unfinished; null: the destructors do.
  std::shared_ptr<os::FileReaper> reaper;
};

// That what is sealed, or not, can be kept within it at all, and that its folder takes files: known
// when a sequence is opened, not in the middle of a text. Code::bad_argument, Code::not_found,
// Code::permission, Code::no_space.
Status check_memory_budget(const MemoryBudget& budget, bool full_precision);

class KvStore {
 public:
  static constexpr uint32_t keep_all = UINT32_MAX;

  KvStore(const StoreShape& shape, uint32_t window_tokens);
  // a fork: shares what there is, until the one or the other goes on
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
  // changes with the window's committed rows; a fork has the same
  uint64_t window_stamp() const { return window_stamp_; }
  uint64_t sinks_stamp() const { return sinks_stamp_; }  // with the sinks and the centre
  uint32_t sink_count() const { return pages_.pages() ? shape().page.page_tokens : 0; }

  // Full-precision rows, [count][dim], centred when the store is; the window's are followed by
  // those written and not committed.
  struct Rows {
    const float* k;
    const float* v;
  };
  Rows sinks(uint32_t layer, uint32_t head) const;
  Rows window(uint32_t layer, uint32_t head) const;

  // Code::limit when a sequence of so many tokens cannot keep within it. Code::no_space, Code::io,
  // ... where nothing can be spilled. Afterwards prepare() keeps within it. Throws std::bad_alloc.
  // Code::cancelled, here and below, is seen between two slabs: those that are spilled by then stay
  // spilled.
  Status set_budget(const MemoryBudget& budget, uint64_t tokens, const Cancel* cancel = nullptr);
  const MemoryBudget& budget() const { return budget_; }
  // What cannot be spilled of a sequence of so many tokens, and what is on its way.
  uint64_t min_bytes(uint64_t tokens) const { return min_bytes(tokens, budget_.step_tokens); }
  // That it is enough for them and so many bytes besides, also where a step is of so many tokens.
  Status check_budget(uint64_t tokens, uint64_t more = 0, uint32_t step = 0) const;
  // Spills now what growing to so many tokens would, and what so many bytes besides take the room
  // of. Before a sequence is copied that will grow and be dropped: what it spills the copy still
  // has in memory. Errors as set_budget().
  Status keep_within_budget(uint64_t tokens, uint64_t more = 0, uint32_t step = 0,
                            const Cancel* cancel = nullptr);
  // Where there is a budget: spills what can be, and keeps no chosen pages, until the next step.
  Status shrink(const Cancel* cancel);
  // Where a budget has no room for all pages: what was read through a mapping of this layer's
  // pages, or all layers', is let go of.
  void drop_resident_pages(uint32_t layer) const {
    if (drop_resident_) pages_.drop_resident_pages(layer);
  }
  void drop_resident_pages() const {
    for (uint32_t l = 0; l < shape().layers; ++l) drop_resident_pages(l);
  }

  // Makes room for n more tokens and for the pages that committing them seals. Throws
  // std::bad_alloc or says Code::corrupt (a damaged page of a mapped file would have to be copied);
  // the store stays as it was. together: what may be observed by several threads at once; pool: as
  // PageStore::reserve() has it.
  using Together = Representatives::Together;
  Status prepare(uint32_t n, Together together = Together::nothing, ThreadPool* pool = nullptr);
  // The same in two parts: what write() and observe() need, then what seal() and commit() do.
  Status prepare_rows(uint32_t n, Together together, ThreadPool* pool,
                      const Cancel* cancel = nullptr);
  Status prepare_pages(uint32_t n, ThreadPool* pool, const Cancel* cancel = nullptr);
  // The step's n tokens of one layer, or of one of its heads: k, v: [n][kv_heads][head_dim], K
  // after RoPE. Of different ones they may run together. pool: whose threads write, the caller
  // alone where null.
  void write(uint32_t layer, uint32_t n, const float* k, const float* v,
             ThreadPool* pool = nullptr);
  void write_keys(uint32_t layer, uint32_t head, uint32_t n, const float* k);
  void write_values(uint32_t layer, uint32_t head, uint32_t n, const float* v);
  // After write() of the same layer: the step's queries, [n][heads * head_dim] after RoPE, from
  // which the representatives are found. Of different ones they may run together where prepare()
  // was told so.
  void observe(uint32_t layer, uint32_t n, const float* q, uint32_t heads);
  void observe(uint32_t layer, uint32_t head, uint32_t n, const float* q, uint32_t heads);
  // After write() of a layer, and while others are still to come: seals of it what commit(n) would.
  // Where that can be known: not of a text's first pages.
  void seal(uint32_t layer, uint32_t n, const Kernels& kernels, ThreadPool* pool);
  // of the step: by seal()
  bool sealed_ahead(uint32_t layer) const { return sealed_ahead_[layer]; }
  void commit(uint32_t n, const Kernels& kernels, ThreadPool* pool);
  // Before commit(kept), of a step whose n tokens were written: only the first `kept` stay.
  void keep_first(uint32_t kept, uint32_t n) { representatives_.keep_first(kept, n); }

  // Back to the first `tokens` tokens (<= tokens()). Tokens whose window rows are gone come back
  // from their pages, until the window holds window_tokens again. Throws std::bad_alloc. Damaged
  // pages of a mapped file, and pages that give numbers which are not finite: Code::corrupt,
  // nothing changed.
  Status rewind(uint64_t tokens, const Kernels& kernels);

  // Pages that are sealed when so many tokens have been read, in steps of any size.
  uint32_t pages_after(uint64_t tokens) const;
  // Back to the first `pages` sealed pages (<= pages().pages()), with an empty window: the tokens
  // behind them are read again. Pages and what belongs to them stay where they are. Throws
  // std::bad_alloc and leaves the store as it was.
  void cut(uint32_t pages);

  // Finds the sketch of the sealed keys, or finds it again; see KeySketch::build. From then on it
  // follows the pages, and covers those that commit() of a step of `open` tokens, which prepare()
  // made room for, will seal.
  Status build_sketch(const KeySketch::QueryMoment& queries, const Kernels& kernels,
                      ThreadPool* pool, const Cancel* cancel, uint32_t open = 0);

  // Some queries were not there to find representatives by; from now on there are none.
  void forget_representatives() { representatives_.forget(); }
  // The strategy does not want them: no step finds any.
  void drop_representatives() { representatives_.drop(); }

  // Until it is built again.
  void forget_sketch() { sketch_.clear(); }

  // Takes the representatives that another store found in the same tokens.
  void take_representatives(KvStore&& other) {
    representatives_ = std::move(other.representatives_);
  }

  // Takes back the newest token alone, to run it again. tokens() > 0. Throws std::bad_alloc and
  // leaves the store as it was.
  void pop();

  // An index of tokens that are all sealed, which replaces the one of its kind.
  void set_index(std::shared_ptr<TokenIndex> index, uint32_t valid) {
    TokenIndexes::Entry& entry = indexes_.of(index->kind());
    entry = {std::move(index), valid};
  }

  uint64_t private_bytes() const;

  // Persistence of the parts around the pages; sizes in floats.
  // [layers][kv_heads][2][page_tokens][dim], 0 when nothing is sealed
  std::size_t sinks_size() const { return sinks_ ? sinks_room() : 0; }
  std::size_t window_size() const;  // [layers][kv_heads][2][window_count][dim]
  // [layers][kv_heads][dim], 0 when nothing is sealed
  std::size_t centre_size() const { return centre_.size(); }
  std::span<const float> centre() const { return centre_; }
  std::span<const float> sink_floats() const { return {sinks_.get(), sinks_size()}; }
  Status write_window(const std::function<Status(const void* data, std::size_t size)>& write) const;
  // A store from saved parts; sizes have been checked by the caller, who fills the arrays that
  // there are before anything else is done. The window has room for a first question and an answer,
  // within the budget that the store is to have. Throws std::bad_alloc.
  struct SavedRows {
    uint32_t window_count = 0;
    bool has_centre = false, has_sinks = false;
  };
  static KvStore restore(PageStore pages, KeySketch sketch, Representatives representatives,
                         uint32_t window_tokens, const SavedRows& saved,
                         const MemoryBudget& budget);
  struct Restored {
    float* centre;  // null where there is none, and so on
    float* sinks;
    // plane: (layer * kv_heads + head) * 2 + which
    float* window(uint64_t plane) const { return window_begin + plane * window_stride; }
    float* window_begin;
    std::size_t window_stride;
  };
  Restored restored();

 private:
  uint64_t min_bytes(uint64_t tokens, uint32_t step) const;
  std::size_t sinks_room() const;  // floats of sinks_, where there are any
  float* window_row(uint32_t layer, uint32_t head, uint32_t which, uint32_t row);
  const float* window_row(uint32_t layer, uint32_t head, uint32_t which, uint32_t row) const;
  float* plane(uint64_t i) const {
    return window_.get() + (i * capacity_ + first_row_) * shape().page.dim;
  }
  uint32_t capacity_for(uint32_t rows) const;
  Status own_window(uint32_t rows, bool alters = false, ThreadPool* pool = nullptr,
                    const Cancel* cancel = nullptr);
  // window_count_ was: what is behind it may be another store's
  void lowered() { appends_.here = is_sole(window_); }
  void fix_centre(uint32_t rows, ThreadPool* pool);

  PageStore pages_;
  KeySketch sketch_;
  Representatives representatives_;
  TokenIndexes indexes_;
  MemoryBudget budget_;
  uint64_t cache_limit_ = PageCache::by_itself;
  bool drop_resident_ = false;  // more is in files than there is room for
  uint32_t window_tokens_;
  uint32_t window_count_ = 0;
  uint32_t capacity_ = 0;   // rows that window_ has room for
  uint32_t first_row_ = 0;  // of them, the window's: those before it were sealed
  uint64_t window_stamp_ = 0, sinks_stamp_ = 0;
  std::size_t window_floats() const;  // that window_ has
  // [layers][kv_heads][2][capacity][dim]. Copies have it too: rows that one of them has are not
  // written to. Behind them one store alone writes, which no copy of it is.
  std::shared_ptr<float[]> window_;
  struct Appends {
    Appends() = default;
    Appends(const Appends&) {}
    Appends(Appends&&) noexcept = default;
    Appends& operator=(Appends&&) noexcept = default;
    bool here = false;
  };
  Appends appends_;
  std::vector<bool> sealed_ahead_;  // [layers] by seal(), of the step
  // [layers][kv_heads][2][page_tokens][dim], null when nothing is sealed; not written to again
  std::shared_ptr<float[]> sinks_;
  Array<float> centre_;  // [layers][kv_heads][dim]
};

}  // namespace kvasir
