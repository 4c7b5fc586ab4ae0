// The KV cache of one sequence: sealed int8 pages, and the tokens at both ends in full precision.
//
//   tokens   0 ........ T | T .............. pages * T | ........ n
//            sinks (copy) | sealed pages               | window
//
// New tokens enter the window. When it holds window_tokens and a page, its oldest page_tokens
// tokens are sealed. The store keeps the tokens of the first page (the sinks) in full precision
// too. Attention reads that copy, so selection begins at page 1. K is stored centred: when the
// first page is sealed, the mean key of the window is computed once for each layer and head. It is
// subtracted from every key. That shifts all scores of a query by the same number, so attention is
// unchanged. With window_tokens == keep_all (full precision) nothing is sealed.
//
// The store of layers whose queries see the newest `shape().window` tokens (here: their reach)
// keeps only what queries at its end and at its checkpoints can see, and a few tokens more.
// commit() drops the rest. So the sequence can go on from its end, and from a checkpoint after a
// rewind. Other positions need a prefill from resume_point(). Such a store has neither sinks nor
// summaries. In full precision it has one checkpoint, the end of the document, and keeps all tokens
// from its reach on.
//
//   tokens   0 .... | checkpoint - reach .. checkpoint | .... | n - reach .............. n
//           dropped                                   dropped  sealed pages | window
//
// A step is prepare(n), write(layer, ...) for every layer, commit(n). Nothing is visible before
// commit(), so a failed or cancelled step leaves the store unchanged. Threads: as for PageStore;
// write() must not overlap with commit().
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "backend/thread_pool.h"
#include "base/memory.h"
#include "base/status.h"
#include "store/checkpoints.h"
#include "store/key_sketch.h"
#include "store/page_store.h"
#include "store/representatives.h"
#include "store/token_index.h"

namespace kvasir {

// The memory that a sequence may use. Pages beyond it are spilled to a file without a name. Pages
// of a mapped file are dropped from memory and read again.
struct MemoryBudget {
  uint64_t bytes = 0;        // limit of private_bytes() plus mapped summaries; 0: none
  std::string spill_folder;  // "": the default of os::File::create_nameless()
  // Maximum tokens of a step, which the window holds until they are sealed. A larger step that fits
  // raises it.
  uint32_t step_tokens = 0;
  // The sequence's store of layers that see a window, whose bytes count too. No layers: none.
  StoreShape windows;
  uint32_t checkpoints = 0;  // of that store, and of the states
  uint64_t states = 0;       // bytes of the states of its recurrent layers, which count too
  // What its MTP layer keeps counts too, and stays in memory: a store, and hidden states of so many
  // numbers. No layers: none.
  StoreShape drafts;
  uint32_t hidden_width = 0;
  // Closes the spill file and the files of unfinished saves; null: destructors close them.
  std::shared_ptr<os::FileReaper> reaper;
};

// Checks a budget when a sequence is opened, before any prefill. A full-precision sequence cannot
// have one, and the folder must accept files. Code::bad_argument, Code::not_found,
// Code::permission, Code::no_space.
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
  uint64_t tokens() const { return window_begin() + window_count_; }
  uint64_t window_begin() const { return sealed_tokens() + dropped_; }  // its first token
  uint64_t sealed_tokens() const { return uint64_t{pages_.pages()} * shape().page.page_tokens; }
  uint32_t window_count() const { return window_count_; }
  uint32_t window_tokens() const { return window_tokens_; }
  // Changes with the committed rows of the window; equal in a fork.
  uint64_t window_stamp() const { return window_stamp_; }
  uint64_t sinks_stamp() const { return sinks_stamp_; }  // changes with the sinks and the centre
  uint32_t sink_count() const { return pages_.pages() ? shape().page.page_tokens : 0; }

  // Of a store whose queries see a window. keep(): makes the end a checkpoint, until a rewind
  // before it or until there are too many (checkpoints.h). Throws std::bad_alloc and leaves all
  // unchanged.
  void keep();
  void limit_checkpoints(const CheckpointLimits& limits);
  void forget_checkpoints() { checkpoints_.clear(); }
  std::span<const uint64_t> checkpoints() const { return checkpoints_; }  // ascending
  uint64_t last_checkpoint() const { return checkpoints_.empty() ? 0 : checkpoints_.back(); }
  // Makes an empty store begin at a token whose predecessors no query sees: at `token` or the last
  // one before it that can begin a store. Returns where. Throws std::bad_alloc.
  uint64_t begin_at(uint64_t token);
  // Drops tokens before `token` and those that share an extent with them, which no later query
  // sees, and the checkpoints that see them.
  void drop_before(uint64_t token);
  // The last position <= `tokens` at which a sequence can go on after rewind(); 0: at none but the
  // beginning. Always `tokens` without a window. Throws std::bad_alloc.
  uint64_t resume_point(uint64_t tokens) const {
    return resume_point(shape(), pages_.runs(), dropped_, this->tokens(), tokens);
  }
  // The same of a store that has these extents, or the tokens from `dropped` on, up to `end`.
  static uint64_t resume_point(const StoreShape& shape, const PageStore::Runs& runs,
                               uint64_t dropped, uint64_t end, uint64_t tokens);
  // Maximum bytes of such a store in a sequence of `tokens` tokens, with steps of `step` tokens and
  // so many checkpoints, and of a copy to which it goes back after an answer.
  static uint64_t max_bytes(const StoreShape& shape, uint32_t window_tokens, uint64_t tokens,
                            uint32_t step, uint32_t checkpoints);
  // Maximum bytes of the pages of a checkpoint.
  static uint64_t checkpoint_bytes(const StoreShape& shape, uint32_t window_tokens);

  // Full-precision rows, [count][dim], centred if the store has a centre. Uncommitted rows follow
  // the rows of the window.
  struct Rows {
    const float* k;
    const float* v;
  };
  Rows sinks(uint32_t layer, uint32_t head) const;
  Rows window(uint32_t layer, uint32_t head) const;

  // Sets the budget that prepare() enforces. Code::limit: a sequence of `tokens` tokens exceeds it.
  // Code::no_space, Code::io, ...: pages cannot be spilled. Throws std::bad_alloc. Code::cancelled,
  // here and below: tested between two slabs; slabs that were spilled stay spilled.
  Status set_budget(const MemoryBudget& budget, uint64_t tokens, const Cancel* cancel = nullptr);
  const MemoryBudget& budget() const { return budget_; }
  // Counts the MTP layer no longer, or again.
  void count_drafts(const StoreShape& drafts) { budget_.drafts = drafts; }
  // Bytes of a sequence of `tokens` tokens that cannot be spilled, including pages being spilled.
  uint64_t min_bytes(uint64_t tokens) const { return min_bytes(tokens, budget_.step_tokens); }
  // Checks that the budget suffices for `tokens` tokens, `more` bytes and steps of `step` tokens.
  Status check_budget(uint64_t tokens, uint64_t more = 0, uint32_t step = 0) const;
  // Spills the pages that growth to `tokens` tokens and `more` bytes would spill. Call before a
  // temporary copy of the sequence grows: pages that only the copy spills would stay in memory for
  // this sequence. Errors as for set_budget().
  Status keep_within_budget(uint64_t tokens, uint64_t more = 0, uint32_t step = 0,
                            const Cancel* cancel = nullptr);
  // With a budget: spills all pages that can be spilled and drops cached pages. Lasts until the
  // next step.
  Status shrink(const Cancel* cancel);
  // If the budget does not fit all pages: drops resident pages of the mapping, of one layer or of
  // all.
  void drop_resident_pages(uint32_t layer) const {
    if (drop_resident_) pages_.drop_resident_pages(layer);
  }
  void drop_resident_pages() const {
    for (uint32_t l = 0; l < shape().layers; ++l) drop_resident_pages(l);
  }

  // Allocates room for n more tokens and for the pages that commit() seals. Throws std::bad_alloc,
  // or returns Code::corrupt (it would have to copy a damaged page of a mapped file). Then the
  // store is unchanged. overlap: calls of observe() that may overlap. pool: as for
  // PageStore::reserve().
  using Overlap = Representatives::Overlap;
  Status prepare(uint32_t n, Overlap overlap = Overlap::nothing, ThreadPool* pool = nullptr);
  // prepare() in two parts: first for write() and observe(), then for seal() and commit(). few:
  // seal_rows() is expected, which leaves few rows in the window.
  Status prepare_rows(uint32_t n, Overlap overlap, ThreadPool* pool, const Cancel* cancel = nullptr,
                      bool few = false);
  Status prepare_pages(uint32_t n, ThreadPool* pool, const Cancel* cancel = nullptr);
  // A part of a later prepare_pages(n), while a GPU is at work: PageStore::make_spare.
  void prepare_ahead(uint32_t n, ThreadPool* pool) {
    pages_.make_spare(pages_.pages() + pages_after(window_count_ + n), pool);
  }
  void end_ahead() { pages_.drop_spare(); }  // after the last step of a text
  // Writes the step's n tokens of one layer, or of one of its heads. k, v:
  // [n][kv_heads][head_dim], K after RoPE. Calls for different layers and heads may overlap. pool:
  // the threads that write; null: the calling thread.
  void write(uint32_t layer, uint32_t n, const float* k, const float* v,
             ThreadPool* pool = nullptr);
  // Some of the step's rows, which k and v have from the first one on.
  struct RowRange {
    uint32_t first, end;
  };
  void write_keys(uint32_t layer, uint32_t head, RowRange rows, const float* k);
  void write_values(uint32_t layer, uint32_t head, RowRange rows, const float* v);
  // After write() of the same layer: finds representatives from the step's queries q,
  // [n][heads * head_dim] after RoPE. Calls may overlap as prepare() was configured.
  void observe(uint32_t layer, uint32_t n, const float* q, uint32_t heads);
  void observe(uint32_t layer, uint32_t head, uint32_t n, const float* q, uint32_t heads);
  // After write() of a layer and before the other layers: seals the pages of this layer that
  // commit(n) would seal, and adds them to the sketch. Requires prepare_pages(), and a centre, so
  // it does nothing for the first pages of a text.
  void seal(uint32_t layer, uint32_t n, const Kernels& kernels, ThreadPool* pool);
  // write() and seal() at once, also of the first pages of a text: rows that are sealed are not
  // written to the window, but for the first `attended` ones. No queries may be observed in the
  // step, and nothing may attend its other rows.
  struct StepRows {
    uint32_t count;
    const float *k, *v;  // as for write()
    uint32_t attended = 0;
  };
  // Whether it may be called: pages are sealed, none is spilled, and the centre is known or the
  // step begins the text.
  bool can_seal_rows(uint32_t n) const;
  // Throws std::bad_alloc; the step then fails as if it had not begun.
  void seal_rows(uint32_t layer, const StepRows& rows, const Kernels& kernels, ThreadPool* pool);
  // Whether the layer was sealed in this step.
  bool sealed_ahead(uint32_t layer) const { return sealed_ahead_[layer]; }
  void commit(uint32_t n, const Kernels& kernels, ThreadPool* pool);
  // The most tokens, up to n, of a step whose tokens but the last seal no page: what the last one
  // attends is in full precision, as if each were a step.
  uint32_t open_tokens(uint32_t n) const {
    for (uint32_t i = 1; i < n; ++i)
      if (pages_after(uint64_t{window_count_} + i) > 0) return i;
    return n;
  }
  // Before commit(kept), in a step of n written tokens: keeps only the first `kept`.
  void keep_first(uint32_t kept, uint32_t n) { representatives_.keep_first(kept, n); }

  // A span: a step whose tokens go through a layer chunk by chunk, all of them before they go
  // through the next layer.
  //
  //   begin_span(n, largest chunk)
  //     begin_layer();  prepare_chunk(layer, n), write(layer, n, ...), end_chunk(layer, n) of each
  //   commit_span()
  //
  // In between the store is what the layer under way sees, after the chunks that it has seen, and
  // of no use for other layers. So a span is run on a fork, which replaces the sequence's store
  // afterwards. layer: no_layer: of another store. Every layer has the same chunks.
  static constexpr uint32_t no_layer = UINT32_MAX;
  // Whether spans can follow: pages are sealed, without a budget and without representatives.
  bool can_span() const;
  // Errors as for prepare_rows() and prepare_pages().
  Status begin_span(uint64_t n, uint32_t chunk, ThreadPool* pool, const Cancel* cancel);
  void begin_layer();
  Status prepare_chunk(uint32_t layer, uint32_t n, ThreadPool* pool);
  // Before end_chunk(), where there is time: touches the memory that the chunk needs in the next
  // layer, so that the system has cleared it by then.
  void touch_next_layer(uint32_t layer, uint32_t n, ThreadPool* pool);
  void end_chunk(uint32_t layer, uint32_t n, const Kernels& kernels, ThreadPool* pool);
  // Code::cancelled: the fork is of no use.
  Status commit_span(const Kernels& kernels, ThreadPool* pool, const Cancel* cancel = nullptr);

  // Truncates the sequence to its first `tokens` tokens (<= tokens(), and a resume_point()).
  // Restores tokens from pages until the window holds window_tokens again. Throws std::bad_alloc.
  // Code::corrupt (a damaged page of a mapped file, or a page with NaN or infinity): the store is
  // unchanged.
  Status rewind(uint64_t tokens, const Kernels& kernels);

  // Number of sealed pages after prefill of `tokens` tokens, for any step sizes.
  uint32_t pages_after(uint64_t tokens) const;
  // Truncates the sequence to its first `pages` sealed pages (<= pages().pages()) with an empty
  // window. The caller computes the later tokens again. These pages and their summaries stay.
  // Throws std::bad_alloc and then leaves the store unchanged.
  void cut(uint32_t pages);

  // Builds the sketch of the sealed keys; replaces an existing one. Later pages extend it. See
  // KeySketch::build. Reserves room for the pages that commit() of a prepared step of `open` tokens
  // will seal.
  Status build_sketch(const KeySketch::QueryMoment& queries, const Kernels& kernels,
                      ThreadPool* pool, const Cancel* cancel, uint32_t open = 0);

  // build_sketch() within steps, of which this one has n tokens, layer by layer, each after its
  // seal(); the step's pages are covered. Where a layer cannot be added it stays as it was.
  void add_to_sketch(uint32_t layer, uint32_t n, const KeySketch::QueryMoment& queries,
                     const Kernels& kernels, ThreadPool* pool, const Cancel* cancel,
                     KeySketch::Build* build) const;
  // The same of a span of n tokens, after all chunks of a layer; no_layer: KeySketch::cover_next().
  void add_span_to_sketch(uint32_t layer, uint64_t n, const KeySketch::QueryMoment& queries,
                          const Kernels& kernels, ThreadPool* pool, const Cancel* cancel,
                          KeySketch::Build* build) const;
  // After the commit of the last one: see KeySketch::take().
  bool take_sketch(KeySketch::Build&& build, const Kernels& kernels, ThreadPool* pool,
                   const Cancel* cancel);

  // Discards the representatives because some queries are unknown. Later steps find none.
  void forget_representatives() { representatives_.forget(); }
  // Disables representatives for strategies that do not use them. No step finds any.
  void drop_representatives() { representatives_.drop(); }

  // Discards the sketch until it is built again.
  void forget_sketch() { sketch_.clear(); }

  // Takes the representatives that another store found in the same tokens.
  void take_representatives(KvStore&& other) {
    representatives_ = std::move(other.representatives_);
  }

  // Removes the newest token, so that it can be computed again. Requires tokens() > 0. Throws
  // std::bad_alloc and then leaves the store unchanged.
  void pop();

  // Sets an index whose tokens are all sealed; it replaces the one of its kind.
  void set_index(std::shared_ptr<TokenIndex> index, uint32_t valid) {
    TokenIndexes::Entry& entry = indexes_.of(index->kind());
    entry = {std::move(index), valid};
  }

  // Code::corrupt: the file that is mapped was cut.
  Status check_file() const;
  uint64_t private_bytes() const;

  // Persistence of sinks, window and centre; sizes in floats.
  // [layers][kv_heads][planes][page_tokens][dim]; 0 when nothing is sealed.
  std::size_t sinks_size() const { return sinks_ ? sinks_room() : 0; }
  std::size_t window_size() const;  // [layers][kv_heads][planes][window_count][dim]
  // [layers][kv_heads][dim]; 0 when nothing is sealed.
  std::size_t centre_size() const { return centre_.size(); }
  std::span<const float> centre() const { return centre_; }
  std::span<const float> sink_floats() const { return {sinks_.get(), sinks_size()}; }
  Status write_window(const std::function<Status(const void* data, std::size_t size)>& write) const;
  // Creates a store from saved parts. The caller has checked the sizes. Before any other call it
  // fills the non-null arrays of restored(). The window has room for a first question and answer
  // within the budget. Throws std::bad_alloc.
  struct SavedRows {
    uint32_t window_count = 0;
    bool has_centre = false, has_sinks = false;
    uint64_t dropped = 0;               // with a window, in full precision: tokens before its rows
    std::vector<uint64_t> checkpoints;  // with a window; limit_checkpoints() is called after it
  };
  static KvStore restore(PageStore pages, KeySketch sketch, Representatives representatives,
                         uint32_t window_tokens, const SavedRows& saved,
                         const MemoryBudget& budget);
  // Creates a store that nothing is appended to: sinks and window stay in a mapped file. The caller
  // has verified the centre, and the sizes. Throws std::bad_alloc.
  struct MappedRows {
    std::shared_ptr<const CacheFile> file;
    std::span<const float> centre, sinks, window;  // as write_window() and the functions above
    uint32_t window_count = 0;
  };
  static KvStore map(PageStore pages, KeySketch sketch, uint32_t window_tokens,
                     const MappedRows& rows);
  // Verifies what a layer of such a store has besides pages, before its first use: sinks, window
  // and bases. Any thread. Code::corrupt. After `cancel` has fired the layer may stay unverified.
  Status check_rows(uint32_t layer, const CancelLatch& cancel) const;
  bool has_checked_rows(uint32_t layer) const {
    return !rows_file_ || rows_checked_[layer].load(std::memory_order_acquire);
  }
  struct Restored {
    float* centre;  // each is null where the part is missing
    float* sinks;
    // plane: (layer * kv_heads + head) * planes + which
    float* window(uint64_t plane) const { return window_begin + plane * window_stride; }
    float* window_begin;
    std::size_t window_stride;
  };
  Restored restored();

 private:
  uint64_t min_bytes(uint64_t tokens, uint32_t step) const;
  uint64_t drafts_bytes(uint64_t tokens, uint32_t step) const;
  // Tokens before its end, or a checkpoint, that a store with a window keeps.
  static uint64_t kept_tokens(const StoreShape& shape, uint32_t window_tokens);
  void drop_unseen();
  void thin_checkpoints();
  void forget_checkpoints_behind(uint64_t tokens);
  std::size_t sinks_room() const;  // floats of sinks_ when they exist
  float* window_row(uint32_t layer, uint32_t head, uint32_t which, uint32_t row);
  const float* window_row(uint32_t layer, uint32_t head, uint32_t which, uint32_t row) const;
  uint32_t planes() const { return shape().heads_total() * shape().page.planes(); }
  float* plane(uint64_t i) const {
    return window_.get() + (i * capacity_ + first_row_) * shape().page.dim;
  }
  uint32_t capacity_for(uint32_t rows) const;
  Status own_window(uint32_t rows, bool alters = false, ThreadPool* pool = nullptr,
                    const Cancel* cancel = nullptr, bool few = false);
  // Call when window_count_ has decreased: later rows may belong to another store.
  void lowered() { appends_.here = is_sole(window_); }
  void fix_centre(uint32_t rows, uint32_t first_head, uint32_t heads, ThreadPool* pool);
  void begin_centre(uint32_t rows, ThreadPool* pool);
  void find_centre(uint32_t layer, uint32_t n, const float* k, ThreadPool* pool);
  void write_unsealed(uint32_t layer, uint32_t head, const StepRows& rows, const float* centre);
  void end_sketch(const Kernels& kernels, ThreadPool* pool);
  void end_seal(uint32_t layer, uint32_t sealed, const Kernels& kernels, ThreadPool* pool);
  void seal_copies(uint32_t layer, uint32_t p, uint32_t first, uint32_t end, const StepRows& rows,
                   const float* centres, const Kernels& kernels);
  void copy_keys(uint32_t head, RowRange rows, const float* k, const float* centre,
                 float* to) const;
  void copy_values(uint32_t head, RowRange rows, const float* v, float* to) const;
  void add_pages_to_sketch(uint32_t layer, uint32_t count, const KeySketch::QueryMoment& queries,
                           const Kernels& kernels, ThreadPool* pool, const Cancel* cancel,
                           KeySketch::Build* build) const;
  Status reserve_sealed(uint32_t sealed, bool filled, ThreadPool* pool, const Cancel* cancel);
  void begin_pages(uint32_t layer, uint32_t rows, ThreadPool* pool);

  PageStore pages_;
  KeySketch sketch_;
  Representatives representatives_;
  TokenIndexes indexes_;
  MemoryBudget budget_;
  uint64_t cache_limit_ = PageCache::by_itself;
  bool drop_resident_ = false;  // files hold more than the budget
  uint32_t window_tokens_;
  uint32_t window_count_ = 0;
  uint32_t capacity_ = 0;              // rows of room in window_
  uint32_t first_row_ = 0;             // first row of the window; those before it were sealed
  uint64_t dropped_ = 0;               // rows dropped before the window, in full precision
  std::vector<uint64_t> checkpoints_;  // ascending, of a store with a window
  CheckpointLimits checkpoint_limits_;
  uint64_t window_stamp_ = 0, sinks_stamp_ = 0;
  std::size_t window_floats() const;  // of window_
  // [layers][kv_heads][2][capacity][dim], shared with copies. A row that any copy has committed is
  // never written again. Only one of the sharing stores, not a copy, writes after them.
  std::shared_ptr<float[]> window_;
  struct Appends {
    Appends() = default;
    Appends(const Appends&) {}
    Appends(Appends&&) noexcept = default;
    Appends& operator=(Appends&&) noexcept = default;
    bool here = false;
  };
  Appends appends_;
  // [layers] KeySketch::basis_stamp() by which the layer's sealed pages are in the sketch.
  std::vector<uint64_t> sketched_;
  std::vector<bool> sealed_ahead_;  // [layers] sealed before the commit of this step
  Array<float> centre_ahead_;       // [layers][kv_heads][dim] of those, before the first commit
  bool in_span_ = false;
  struct Span {
    uint32_t pages = 0, window_count = 0, first_row = 0;  // before it
    uint64_t sinks_stamp = 0;                             // likewise
    bool has_centre = false;                              // likewise
    Array<float> centre;  // of the layers so far, while the layer under way has none
  } span_;
  // [layers][kv_heads][2][page_tokens][dim]; null when nothing is sealed; never changed.
  std::shared_ptr<float[]> sinks_;
  std::shared_ptr<const CacheFile> rows_file_;         // of map(): has sinks_ and window_
  std::shared_ptr<std::atomic<bool>[]> rows_checked_;  // [layers] of such a store
  Array<float> centre_;                                // [layers][kv_heads][dim]
};

}  // namespace kvasir
