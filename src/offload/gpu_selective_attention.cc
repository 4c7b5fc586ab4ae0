#include "offload/gpu_selective_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/checked.h"
#include "select/sampling.h"

namespace kvasir {

constexpr const char* in_selective = "attention";
// of a KV head: of 32 layers with 8 heads of 128 they take 2.2 GB
constexpr uint32_t max_hot_quads = 8192;
// As many quads of a layer stay as so many of its lists usually have, fewer where memory is short.
// Of a list of 512 quads two lists' worth has 85% where the bundled model goes on with a text of
// 120,000 tokens, four 94%; of a text that is made up, of 131,072 tokens, two, four and eight have
// 85, 97 and 98%.
constexpr uint32_t hot_lists = 4;
// More than so many, or all quads, only where a fork may have as many.
constexpr uint32_t alone_lists = 2;

GpuSelectiveAttention::GpuSelectiveAttention(const std::shared_ptr<Device>& device,
                                             std::shared_ptr<DeviceSketches> sketches,
                                             const HeadShape& heads, const StoreShape& shape,
                                             uint32_t first, uint32_t layers)
    : device_(device), ops_(device->kernels()), heads_(heads), shape_(shape), first_(first),
      layers_(layers), sequence_(device, std::move(sketches), shape, first, layers, heads.heads),
      staged_pages_(device, shape) {}

Fallback GpuSelectiveAttention::refuses(const KvStore& store, const Plan& plan, bool exact,
                                        uint32_t n) const {
  if (exact && (n > 1 || plan.by_blocks)) return Fallback::attends_everything;
  if (exact && (plan.certify || plan.compare != CompareLevel::none)) return Fallback::compared;
  if (exact) return KvMirror::unfit(store, heads_);
  if (!plan.strategy->has(StrategyInfo::on_device)) return Fallback::other_strategy;
  if (n > KvMirror::max_tokens || plan.by_blocks) return Fallback::is_prefill;
  if (!plan.share_heads) return Fallback::separate_heads;
  if (plan.dense_layers > 0) return Fallback::dense_layers;
  if (plan.certify || plan.compare != CompareLevel::none) return Fallback::compared;
  if (const Fallback why = KvMirror::unfit(store, heads_); why != Fallback::none) return why;
  if (store.pages().pages() > 0 && store.sketch().pages() != store.pages().pages())
    return Fallback::no_sketch;
  return Fallback::none;
}

DeviceBudget GpuSelectiveAttention::budget_of(const Plan& plan, uint32_t layer) const {
  const SampleSize size = sample_size(plan.budget(first_ + layer), plan.coverage, heads_.group());
  return {size.min_quads, size.max_quads, static_cast<float>(size.variance)};
}

// After a failure release() comes next.
Status GpuSelectiveAttention::make_room(const Plan& plan, uint32_t n, uint32_t extents) {
  uint32_t list_quads = 1;
  for (uint32_t l = 0; l < layers_ && !exact_; ++l)
    list_quads = std::max(list_quads, budget_of(plan, l).max_quads);
  // A sample has so many in the mean: with room for eight standard deviations more none is left
  // out.
  list_quads = std::min(
      list_quads + 8 * static_cast<uint32_t>(std::sqrt(static_cast<double>(list_quads))) + 64,
      extents * shape_.page.extent_quads());
  if (n <= room_ && extents == extents_ && list_quads <= list_quads_) return {};
  const uint32_t tokens = n == 1
                              ? std::max(room_, 1u)
                              : std::max<uint32_t>(room_, static_cast<uint32_t>(round_up(n, 16)));
  list_quads = std::max(
      list_quads_, list_quads + list_quads / 8);  // a budget that is a fraction grows with the text
  room_ = extents_ = list_quads_ = 0;
  ++generation_;
  scores_ = {}, score_sums_ = {}, share_counts_ = {}, share_sums_ = {}, part_counts_ = {},
  states_ = {}, lists_ = {}, biases_ = {}, gathered_ = {};
  forget_hot_quads();
  hot_tried_ = 0;
  const PageShape& page = shape_.page;
  uint32_t blocks = 0, selecting = 0;  // of any step of so many tokens
  for (uint32_t i = 1; i <= tokens; ++i) {
    const uint32_t groups = query_groups(i, heads_.group());
    blocks = std::max(blocks, groups);
    selecting = std::max(selecting, groups * max_selecting_tokens(i, groups));
  }
  const std::size_t rows = std::size_t{tokens} * heads_.heads,
                    of_heads = std::size_t{blocks} * shape_.kv_heads, layers = layers_,
                    all_lists = layers * std::max(blocks, max_alone) * shape_.kv_heads,
                    all_rows = layers * std::max(tokens, max_alone) * heads_.heads;
  Status s = scores_.allocate(
      device_, std::size_t{selecting} * heads_.heads * extents * page.extent_quads(), in_selective);
  if (s.ok())
    s = score_sums_.allocate(device_, std::size_t{selecting} * heads_.heads * max_score_parts * 2,
                             in_selective);
  if (s.ok()) s = share_counts_.allocate(device_, of_heads * share_bins, in_selective);
  if (s.ok()) s = share_sums_.allocate(device_, of_heads * share_bins, in_selective);
  if (s.ok()) s = thresholds_.allocate(device_, of_heads, in_selective);
  if (s.ok())
    s = part_counts_.allocate(
        device_, of_heads * ceil_div(extents * page.extent_quads(), choose_quads), in_selective);
  if (s.ok())
    s = states_.allocate(device_, rows * attention_parts * (page.dim + state_sums), in_selective);
  if (s.ok()) s = lists_.allocate(device_, all_lists * list_quads, in_selective);
  if (s.ok()) s = list_counts_.allocate(device_, all_lists * 2, in_selective);
  if (s.ok()) s = biases_.allocate(device_, of_heads * list_quads, in_selective);
  if (s.ok() && tokens > 1)
    s = gathered_.allocate(device_, of_heads * list_quads * quad_bytes_of(page.dim), in_selective);
  if (s.ok()) s = q_.allocate(device_, rows * page.dim, in_selective);
  if (s.ok()) s = q8_.allocate(device_, rows * page.dim, in_selective);
  if (s.ok()) s = projected_.allocate(device_, rows * page.sketch_dim(), in_selective);
  if (s.ok()) s = q_scale_.allocate(device_, rows, in_selective);
  if (s.ok()) s = projected_scale_.allocate(device_, rows, in_selective);
  if (s.ok()) s = lse_.allocate(device_, all_rows, in_selective);
  if (s.ok()) s = mass_.allocate(device_, all_rows, in_selective);
  if (s.ok()) s = lse_host_.allocate(device_, all_rows);
  if (s.ok()) s = mass_host_.allocate(device_, all_rows);
  if (s.ok()) s = lists_host_.allocate(device_, all_lists * list_quads);
  if (s.ok()) s = list_counts_host_.allocate(device_, all_lists * 2);
  if (s.ok()) s = budgets_host_.allocate(device_, layers);
  if (!s.ok()) return s;
  room_ = tokens, extents_ = extents, list_quads_ = list_quads;
  return {};
}

void GpuSelectiveAttention::forget_hot_quads() {
  hot_ends_.clear();
  hot_quads_ = {}, hot_entries_ = {}, found_ = {}, found_host_ = {};
  kept_quads_ = 0;
}

// Where a sample may have more than its budget it seldom has twice as many. There is room for a
// text that is a quarter longer.
std::vector<uint32_t> GpuSelectiveAttention::hot_ends(const KvStore& store, const Plan& plan,
                                                      uint32_t lists) const {
  const uint32_t quads = store.pages().pages() * shape_.page.page_quads(),
                 all = quads + quads / 4 + shape_.page.extent_quads();
  std::vector<uint32_t> ends;
  uint32_t end = 0;
  for (uint32_t l = 0; l < layers_; ++l) {
    if (exact_) {
      ends.push_back(end += static_cast<uint32_t>(round_up(all, hot_ways)));
      continue;
    }
    const uint64_t mean =
        std::max<uint64_t>(plan.budget(first_ + l) / quad_tokens, budget_of(plan, l).max_quads / 2);
    // two standard deviations more
    const uint64_t wanted =
        lists * (mean + 2 * static_cast<uint64_t>(std::sqrt(static_cast<double>(mean))));
    ends.push_back(end += static_cast<uint32_t>(round_up(
                       std::min<uint64_t>(wanted, std::min(all, max_hot_quads)), hot_ways)));
  }
  return ends;
}

// Of so many quads of each KV head, in all layers.
uint64_t GpuSelectiveAttention::hot_bytes(uint64_t quads) const {
  const uint64_t all = quads * shape_.kv_heads;
  return Device::allocated_size(all * quad_bytes_of(shape_.page.dim)) +
         Device::allocated_size(all * sizeof(unsigned long long));
}

// A budget that is a fraction grows with the text, as a short text does itself: there is room for
// more when it is a quarter more.
Status GpuSelectiveAttention::keep_hot_quads(const KvStore& store, const Plan& plan,
                                             uint64_t reserve, DeviceStream* stream) {
  if (store.pages().pages() == 0) return {};
  const uint32_t most = exact_ ? 1 : hot_lists;  // lists
  std::vector<uint32_t> ends = hot_ends(store, plan, most);
  if (exact_ ? keeps_all(store) : ends.back() <= hot_tried_ + hot_tried_ / 4) return {};
  hot_tried_ = ends.back();
  forget_hot_quads();
  ++generation_;
  // Not in the place of what a fork has for itself, which takes the steps that were taken here.
  const uint64_t its_work =
      std::apply([](const auto&... b) { return (b.taken() + ...); }, buffers());
  const uint64_t left = device_->left(), fork = reserve + sequence_.bytes_of_fork() + its_work,
                 heads = shape_.kv_heads, found = layers_ * heads * list_quads_;
  const auto bytes = [&] { return heads * ends.back() * quad_bytes_of(shape_.page.dim); };
  const auto fits = [&](uint32_t lists) {
    const uint64_t all = hot_bytes(ends.back()) + Device::allocated_size(found * sizeof(uint32_t));
    return all * (exact_ || lists > alone_lists ? 2 : 1) + fork <= left;
  };
  uint32_t lists = most;
  for (; !fits(lists); ends = hot_ends(store, plan, lists))
    if (--lists == 0) return {};
  const std::vector<unsigned long long> none(heads * ends.back());
  Status s = hot_quads_.allocate(device_, bytes(), in_selective);
  if (s.ok()) s = hot_entries_.allocate(device_, none.size(), in_selective);
  if (s.ok()) s = found_.allocate(device_, found, in_selective);
  if (s.ok()) s = found_host_.allocate(device_, heads * list_quads_);
  if (s.ok())
    s = device_->status(ops_.upload(stream, hot_entries_.get(), none.data(), hot_entries_.bytes()),
                        in_selective);
  if (s.ok()) return hot_ends_ = std::move(ends), Status();
  forget_hot_quads();
  return s.code() == Code::no_memory ? Status() : std::move(s);
}

bool GpuSelectiveAttention::keeps_all(const KvStore& store) const {
  const uint32_t quads = store.pages().pages() * shape_.page.page_quads();
  for (uint32_t l = 0; l < layers_; ++l)
    if (hot_room(l) < quads) return false;
  return true;
}

// Before prepare(): pinning the pages of a text that has no room takes long.
bool GpuSelectiveAttention::may_keep_all(const KvStore& store, uint64_t reserve) const {
  const uint64_t quads = store.pages().pages() * uint64_t{shape_.page.page_quads()},
                 held = hot_quads_.taken() + hot_entries_.taken();
  return keeps_all(store) || 2 * hot_bytes(quads * layers_) + reserve <= device_->left() + held;
}

bool GpuSelectiveAttention::drop_hot_quads() {
  if (hot_ends_.empty()) return false;
  forget_hot_quads();
  ++generation_;
  return true;
}

Status GpuSelectiveAttention::prepare(const KvMirror::UpdateRequest& request, const Plan& plan,
                                      bool exact, uint32_t n) {
  bool reads = false;
  RETURN_IF_ERROR(sequence_.update(request, {.sketch = !exact}, &reads));
  if (std::exchange(exact_, exact) != exact) ++generation_;
  RETURN_IF_ERROR(make_room(plan, n, sequence_.extents()));
  n_ = n;
  needs_staging_ = !reads && request.store.pages().pages() > 0;
  if (!needs_staging_) staged_pages_.release();
  if (needs_staging_ && !exact) RETURN_IF_ERROR(staged_pages_.make_room(lists() * list_quads_));
  if (std::exchange(under_way_, false)) sequence_.forget_kept();
  sequence_.begin_step(request.store, rows_);
  read_quads_ = request.store.pages().pages() * shape_.page.page_quads();
  for (uint32_t l = 0; l < layers_ && !exact; ++l) budgets_host_.get()[l] = budget_of(plan, l);
  return {};
}

int GpuSelectiveAttention::enqueue_counts(DeviceStream* stream) const {
  const int error =
      ops_.upload(stream, sequence_.budgets(), budgets_host_.get(), layers_ * sizeof(DeviceBudget));
  return error ? error : sequence_.enqueue_counts(rows_, stream);
}

void GpuSelectiveAttention::release() {
  sequence_.release();
  ++generation_;
  room_ = extents_ = list_quads_ = 0;
  std::apply([](auto&... b) { (void(b = {}), ...); }, buffers());
  forget_hot_quads();
  hot_tried_ = 0;
  staged_pages_.release();
}

DeviceAttention GpuSelectiveAttention::work(uint32_t layer) const {
  const std::size_t heads = layer * std::size_t{shape_.kv_heads},
                    hot = std::size_t{hot_before(layer)} * shape_.kv_heads,
                    quad_bytes = quad_bytes_of(shape_.page.dim);
  return {n_,
          blocks(),
          max_selecting_tokens(n_, blocks()) * heads_.group(),
          extents_,
          list_quads_,
          q_.get(),
          q8_.get(),
          q_scale_.get(),
          exact_ ? nullptr : projected_.get(),
          projected_scale_.get(),
          scores_.get(),
          score_sums_.get(),
          share_counts_.get(),
          share_sums_.get(),
          thresholds_.get(),
          part_counts_.get(),
          lists_.get() + place_of(layer) * lists() * list_quads_,
          biases_.get(),
          nullptr,
          list_counts_.get() + place_of(layer) * lists() * 2,
          states_.get(),
          n_ > 1           ? gathered_.get()
          : needs_staging_ ? staged_pages_.data()
                           : nullptr,
          {n_ == 1 ? hot_room(layer) : 0, quad_bytes, hot_quads_.get() + hot * quad_bytes,
           hot_entries_.get() + hot, found_.get() + heads * list_quads_},
          attention_parts,
          nullptr,
          nullptr,
          row_ == first_row_};
}

int GpuSelectiveAttention::enqueue_choice(DeviceStream* stream, uint32_t layer, const float* q,
                                          const float* k, const float* v) {
  const DeviceKv kv = sequence_.layer(layer, row_);
  const DeviceAttention a = work(layer);
  int error = ops_.begin_attention(stream, kv, a, q, k, v);
  if (exact_) return error;
  if (!error) error = ops_.score_sketch(stream, kv, a);
  if (!error) error = ops_.choose(stream, kv, a);
  if (!needs_staging_) return error;
  if (!error)
    error = ops_.download(stream, list_counts_host_.get() + place_of(layer) * lists() * 2,
                          a.list_counts, lists() * 2 * sizeof(uint32_t));
  if (!error)
    error = ops_.download(stream, lists_host_.get() + place_of(layer) * lists() * list_quads_,
                          a.lists, lists() * list_quads_ * sizeof(uint32_t));
  return error || a.hot.room == 0 ? error
                                  : ops_.download(stream, found_host_.get(), a.hot.list_places,
                                                  lists() * list_quads_ * sizeof(uint32_t));
}

Status GpuSelectiveAttention::stage_chosen(const KvStore& store, const Plan& plan, uint32_t layer,
                                           const CancelLatch& cancel, ThreadPool* pool,
                                           DeviceStream* stream) {
  const uint64_t wanted = plan.budget(first_ + layer) / quad_tokens * lists();
  if (store.pages().pages() > 0)
    staged_pages_.begin(store.pages(), first_ + layer, wanted, cancel, pool);
  RETURN_IF_ERROR(device_->status(ops_.wait(stream), in_selective));
  const DeviceAttention a = work(layer);
  const uint32_t* const counts = list_counts_host_.get() + place_of(layer) * lists() * 2;
  StagedPages::Lists copied{0,
                            0,
                            a.blocks,
                            list_quads_,
                            lists_host_.get() + place_of(layer) * lists() * list_quads_,
                            counts,
                            a.hot.room ? found_host_.get() : nullptr};
  const std::size_t quad_bytes = quad_bytes_of(shape_.page.dim);
  // one is fetched while the other is on its way
  const auto all = static_cast<uint32_t>(lists()), parts = n_ == 1 ? 1u : std::min(all, 2u);
  int error = 0;
  for (uint32_t part = 0; part < parts && !error; ++part) {
    copied.first = copied.end, copied.end = all * (part + 1) / parts;
    RETURN_IF_ERROR(staged_pages_.fetch(store.pages(), first_ + layer, copied,
                                        cannot_share() != Fallback::none, cancel, pool));
    // one token reads them where they are
    for (uint32_t i = copied.first; i < copied.end && n_ > 1 && !error; ++i) {
      const std::size_t at = std::size_t{i} * list_quads_ * quad_bytes;
      error = ops_.upload(stream, gathered_.get() + at, staged_pages_.data() + at,
                          counts[2 * i] * quad_bytes);
    }
  }
  return device_->status(error, in_selective);
}

int GpuSelectiveAttention::enqueue_chosen(DeviceStream* stream, uint32_t layer,
                                          const DeviceActivations& out, const DeviceCheck& check) {
  const DeviceKv kv = sequence_.layer(layer, row_);
  const DeviceAttention a = work(layer);
  const std::size_t rows = place_of(layer) * n_ * heads_.heads;
  int error = n_ > 1 && !needs_staging_ ? ops_.gather_chosen(stream, kv, a) : 0;
  if (!error) error = exact_ ? ops_.attend_all(stream, kv, a) : ops_.attend_chosen(stream, kv, a);
  return error ? error
               : ops_.finish_attention(stream, kv, a, out, check, lse_.get() + rows,
                                       mass_.get() + rows);
}

int GpuSelectiveAttention::enqueue_results(DeviceStream* stream) {
  const std::size_t rows = std::size_t{layers_} * rows_ * n_ * heads_.heads,
                    all = layers_ * rows_ * lists();
  int error = ops_.download(stream, lse_host_.get(), lse_.get(), rows * sizeof(float));
  if (!error) error = ops_.download(stream, mass_host_.get(), mass_.get(), rows * sizeof(float));
  if (needs_staging_ || exact_) return error;  // the rest has come, or there is no more
  if (!error)
    error = ops_.download(stream, list_counts_host_.get(), list_counts_.get(),
                          all * 2 * sizeof(uint32_t));
  return error ? error
               : ops_.download(stream, lists_host_.get(), lists_.get(),
                               all * list_quads_ * sizeof(uint32_t));
}

// Of what a step that attends everything has read. Quads that stayed were intact when they came.
bool GpuSelectiveAttention::intact(const KvStore& store, ThreadPool* pool) const {
  const PageStore& pages = store.pages();
  const uint64_t mapped = pages.mapped_bytes() / shape_.slab_bytes() * shape_.page.extent_quads();
  if (std::min<uint64_t>(mapped, read_quads_) <= sequence_.valid_quads(kept_step_, kept_quads_))
    return true;
  std::atomic<bool> out{true};
  pool->run(pages.extents(), [&](uint32_t e, uint32_t) {
    using format::SectionKind;
    if (!pages.intact_extent(SectionKind::pages, e) || !pages.intact_extent(SectionKind::scales, e))
      out = false;
  });
  return out;
}

void GpuSelectiveAttention::count_all(const KvStore& store, ReadCounts* counts) const {
  const uint32_t sealed = store.pages().pages();
  if (sealed == 0) return;
  const uint64_t lists = uint64_t{layers_} * (rows_ - first_row_) * shape_.kv_heads,
                 tokens = uint64_t{sealed - 1} * shape_.page.page_tokens * lists;
  counts->pages_touched += (sealed - 1) * lists;
  counts->tokens_read += tokens, counts->tokens_present += tokens;
  // Each row but the first finds there what those before it have kept.
  const uint32_t sinks = shape_.page.page_quads(),
                 kept = std::max(sequence_.valid_quads(kept_step_, kept_quads_), sinks) - sinks;
  const uint64_t hot =
      kept + uint64_t{rows_ - first_row_ - 1} * (sealed - 1) * shape_.page.page_quads();
  counts->tokens_hot += hot * quad_tokens * shape_.kv_heads * layers_;
}

Status GpuSelectiveAttention::collect(const KvStore& store, ThreadPool* pool,
                                      ReadCounts* counts) const {
  const PageStore& pages = store.pages();
  if (exact_) return count_all(store, counts), intact(store, pool) ? Status() : pages.damaged();
  const std::size_t all = layers_ * rows_ * lists();
  const bool checks = pages.mapped_bytes() > 0 && !needs_staging_;  // staged pages were verified
  const auto readers = [&](std::size_t list) {
    return uint64_t{query_group_of(n_, blocks(), static_cast<uint32_t>(list % blocks())).count};
  };
  std::atomic<bool> intact{true};
  std::atomic<uint64_t> touched{0};
  const auto is_attended = [&](std::size_t list) { return list / lists() % rows_ >= first_row_; };
  // Few lists take less time than threads take to wake up.
  constexpr std::size_t few = 32;
  run_tasks(
      checks || all > few ? pool : nullptr, static_cast<uint32_t>(all), [&](uint32_t i, uint32_t) {
        if (!is_attended(i)) return;
        // layer, row and head of the list
        const uint32_t at = i / blocks(), *list = lists_host_.get() + std::size_t{i} * list_quads_;
        uint64_t list_pages = 0;
        for (uint32_t q = 0, last = UINT32_MAX; q < list_counts_host_.get()[2 * i]; ++q) {
          const uint32_t page = list[q] / shape_.page.page_quads();
          if (page == last) continue;
          last = page, ++list_pages;
          if (checks && !pages.intact_page(first_ + at / (shape_.kv_heads * rows_),
                                           at % shape_.kv_heads, page))
            intact = false;
        }
        touched += list_pages * readers(i);
      });
  if (!intact) return pages.damaged();
  counts->pages_touched += touched;
  for (std::size_t i = 0; i < all; ++i) {
    if (!is_attended(i)) continue;
    const uint32_t* list_counts = list_counts_host_.get() + 2 * i;
    counts->tokens_read += list_counts[0] * readers(i) * quad_tokens,
        counts->tokens_hot += uint64_t{list_counts[1]} * quad_tokens;
  }
  const uint64_t sealed = store.sealed_tokens(), sinks = shape_.page.page_tokens;
  if (sealed == 0) return {};
  const uint64_t of_row = uint64_t{n_} * heads_.heads, attended = rows_ - first_row_,
                 rows = layers_ * attended * of_row;
  counts->summary_bytes += all / rows_ * attended * pages.extents() * shape_.page.sketch_bytes();
  counts->tokens_present += (sealed - sinks) * rows / heads_.group();
  counts->queries += rows;
  for (uint64_t row = 0; row < uint64_t{layers_} * rows_; ++row)
    for (uint64_t i = 0; i < of_row && row % rows_ >= first_row_; ++i)
      counts->mass += static_cast<double>(mass_host_.get()[row * of_row + i]);
  return {};
}

}  // namespace kvasir
