#include "offload/gpu_prefill_attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/checked.h"
#include "select/sampling.h"

namespace kvasir {

constexpr const char* in_prefill = "a text that is read";

GpuPrefillAttention::GpuPrefillAttention(const std::shared_ptr<Device>& device,
                                         const HeadShape& heads, const StoreShape& shape,
                                         uint32_t first, uint32_t layers)
    : device_(device), ops_(device->kernels()), heads_(heads), shape_(shape), first_(first),
      layers_(layers) {}

Fallback GpuPrefillAttention::refuses(const KvStore& store, uint32_t n) const {
  constexpr uint32_t few = 64;  // tokens: for fewer the pages are not copied
  if (n == 1 || (n <= few && !holds_memory())) return Fallback::few_tokens;
  if (store.budget().bytes > 0) return Fallback::memory_limit;
  if (store.window_tokens() == KvStore::keep_all) return Fallback::full_precision;
  if (std::find(std::begin(attended_dims), std::end(attended_dims), shape_.page.dim) ==
      std::end(attended_dims))
    return Fallback::head_size;
  return Fallback::none;
}

void GpuPrefillAttention::release() {
  // After a failure something may be on its way to the memory that goes.
  for (DeviceStream*& each : piece_streams_)
    if (DeviceStream* stream = std::exchange(each, nullptr)) (void)ops_.close_stream(stream);
  blocks_.clear(), stamps_.clear();
  pages_at_ = {}, scales_at_ = {};
  keys_ = {}, values_ = {}, q_ = {};
  q_scale_ = {}, largest_ = {}, sinks_ = {}, centre_ = {}, window_ = {}, sink_scores_ = {},
  parts_ = {};
  release_tiles();
  staging_ = {}, pieces_ = {};
  room_ = q_room_ = part_room_ = window_room_ = address_room_ = placed_ = 0;
  sinks_stamp_ = 0, staging_room_ = piece_room_ = 0;
}

// Arrays that every layer fills anew are never there old and new together.
Status GpuPrefillAttention::make_room(const KvStore& store, uint64_t follows, ThreadPool* pool) {
  RETURN_IF_ERROR(make_step_room(store, follows));
  RETURN_IF_ERROR(make_window_room(store));
  RETURN_IF_ERROR(make_extent_room(store, follows));
  RETURN_IF_ERROR(make_staging_room(pool));
  const uint32_t missing = missing_extents(store.pages());
  return missing > 0 ? make_piece_room(missing, pool) : Status();
}

// For the keys and values of a layer in full precision, and the queries of a step.
Status GpuPrefillAttention::make_step_room(const KvStore& store, uint64_t follows) {
  const std::size_t kv_heads = shape_.kv_heads, dim = shape_.page.dim;
  const auto rounded = [](uint64_t rows) {
    return static_cast<uint32_t>(round_up(rows, prefill_keys));
  };
  const uint32_t rows = rounded(store.tokens() + n_),
                 q_rows = static_cast<uint32_t>(
                     round_up(std::size_t{n_} * heads_.group(), prefill_rows));
  if (rows > room_) {
    const uint32_t all = rounded(store.tokens() + n_ + follows),
                   more = rounded(rows + rows / 8 + 4 * n_);
    Status s = Status::error(Code::no_memory, "%s", in_prefill);
    for (const uint32_t room : {follows > 0 ? all : more, more, rows})
      if (s.code() == Code::no_memory) s = make_key_room(room);
    RETURN_IF_ERROR(std::move(s));
  }
  if (q_rows > q_room_) {
    release_tiles();
    q_room_ = 0, q_ = {}, q_scale_ = {}, sink_scores_ = {};
    RETURN_IF_ERROR(q_.allocate(device_, kv_heads * q_rows * dim, in_prefill));
    RETURN_IF_ERROR(q_scale_.allocate(device_, kv_heads * q_rows, in_prefill));
    if (!sink_logits_.empty())
      RETURN_IF_ERROR(sink_scores_.allocate(device_, kv_heads * q_rows, in_prefill));
    q_room_ = q_rows;
  }
  make_part_room(n_);
  return largest_.get() ? Status() : largest_.allocate(device_, kv_heads * 2, in_prefill);
}

Status GpuPrefillAttention::make_key_room(uint32_t rows) {
  const std::size_t numbers = std::size_t{shape_.kv_heads} * rows * shape_.page.dim;
  release_tiles();
  room_ = 0, keys_ = {}, values_ = {};
  RETURN_IF_ERROR(keys_.allocate(device_, numbers, in_prefill));
  RETURN_IF_ERROR(values_.allocate(device_, numbers, in_prefill));
  return room_ = rows, Status();
}

// For parts of a small step's keys. Without room for them it takes longer.
void GpuPrefillAttention::make_part_room(uint32_t n) {
  constexpr uint32_t most_parts = 16;
  const uint32_t dim = shape_.page.dim;
  const auto rows = static_cast<uint32_t>(shape_.kv_heads *
                                          round_up(std::size_t{n} * heads_.group(), prefill_rows));
  const uint32_t wanted =
      2 * rows > max_prefill_part_rows ? 0 : std::min(most_parts * rows, max_prefill_part_rows);
  if (wanted <= part_room_) return;
  part_room_ = 0, parts_ = {};
  if (parts_.allocate(device_, wanted * prefill_part_floats(dim), in_prefill).ok())
    part_room_ = wanted;
}

void GpuPrefillAttention::release_tiles() {
  tile_heads_ = 0;
  tile_keys_ = {}, tile_q_ = {}, tile_key_scales_ = {};
  tile_scores_ = {}, tile_biases_ = {}, tile_lists_ = {}, tile_counts_ = {};
}

// Of as many KV heads at once as there is room for.
Status GpuPrefillAttention::make_tile_room(const Plan& plan) {
  const uint32_t page_tokens = shape_.page.page_tokens, sealed = pages_ * page_tokens;
  const auto recent = static_cast<uint32_t>(std::min<uint64_t>(plan.recent_tokens, sealed));
  near_tile_ = std::min((sealed - recent) / prefill_keys, max_prefill_tiles);
  chosen_tiles_ = static_cast<uint32_t>(
      std::min<uint64_t>(ceil_div(plan.budget_tokens, prefill_keys), near_tile_));
  if (tile_heads_ > 0) return {};
  release_tiles();
  const std::size_t tiles = room_ / prefill_keys, blocks = q_room_ / prefill_rows,
                    lists = shape_.kv_heads * blocks;
  const std::size_t row = shape_.kv_heads * std::size_t{tile_row_bytes(shape_.page.dim)};
  RETURN_IF_ERROR(tile_keys_.allocate(device_, row * room_, in_prefill));
  RETURN_IF_ERROR(tile_q_.allocate(device_, row * q_room_, in_prefill));
  RETURN_IF_ERROR(
      tile_key_scales_.allocate(device_, shape_.kv_heads * (room_ / tile_scale_keys), in_prefill));
  RETURN_IF_ERROR(tile_lists_.allocate(device_, lists * tiles, in_prefill));
  RETURN_IF_ERROR(tile_biases_.allocate(device_, lists * tiles, in_prefill));
  RETURN_IF_ERROR(tile_counts_.allocate(device_, lists, in_prefill));
  for (uint32_t heads = shape_.kv_heads;; heads = static_cast<uint32_t>(ceil_div(heads, 2))) {
    Status s = tile_scores_.allocate(
        device_, heads * blocks * choosing_rows(heads_.group()) * tiles, in_prefill);
    if (s.ok()) return tile_heads_ = heads, Status();
    if (s.code() != Code::no_memory || heads == 1) return s;
  }
}

// For the window, the sinks and the centre of every layer.
Status GpuPrefillAttention::make_window_room(const KvStore& store) {
  const std::size_t dim = shape_.page.dim, heads = heads_total();
  const uint32_t window = std::max(store.window_count(), 1u), page_tokens = shape_.page.page_tokens;
  if (window > window_room_) {
    window_room_ = 0, window_ = {};
    const auto more =
        static_cast<uint32_t>(round_up(std::max(window, store.window_tokens() + page_tokens), 16));
    RETURN_IF_ERROR(window_.allocate(device_, heads * 2 * more * dim, in_prefill));
    window_room_ = more;
  }
  if (!sinks_.get())
    RETURN_IF_ERROR(sinks_.allocate(device_, heads * 2 * page_tokens * dim, in_prefill));
  return centre_.get() ? Status() : centre_.allocate(device_, heads * dim, in_prefill);
}

// For the extents of pages, also those that the step will seal, so that these can be put ahead.
// Makes room for all that follows, or a quarter more, within the budget; where that is too much,
// for as many as are needed.
Status GpuPrefillAttention::make_extent_room(const KvStore& store, uint64_t follows) {
  const auto extents_after = [&](uint64_t more) {
    return static_cast<uint32_t>(ceil_div(
        store.pages().pages() + store.pages_after(store.window_count() + more), extent_pages));
  };
  const uint32_t extents = store.pages().extents(), after = extents_after(n_);
  const std::size_t size = layers_ * (pages_size() + scales_size());
  while (after > extents_room()) {
    const uint32_t has = extents_room(), needed = extents - std::min(has, extents);
    uint32_t more =
        follows > 0 ? extents_after(n_ + follows) - has : std::max(after - has, has / 4);
    stamps_.resize((std::size_t{has} + more) * layers_, 0);
    blocks_.emplace_back();
    Status s = blocks_.back().memory.allocate(device_, more * size, in_prefill);
    for (const uint32_t fewer : {after - has, needed})
      if (s.code() == Code::no_memory && fewer > 0 && more > fewer)
        s = blocks_.back().memory.allocate(device_, (more = fewer) * size, in_prefill);
    if (!s.ok()) {
      blocks_.pop_back();
      if (needed == 0 && s.code() == Code::no_memory) break;
      return s;
    }
    blocks_.back().first = has, blocks_.back().count = more;
  }
  const uint32_t room = extents_room();
  return room > address_room_ ? make_address_room(room + room / 2 + 64) : Status();
}

// For the addresses of `extents` extents.
Status GpuPrefillAttention::make_address_room(uint32_t extents) {
  address_room_ = placed_ = 0, pages_at_ = {}, scales_at_ = {};
  RETURN_IF_ERROR(pages_at_.allocate(device_, std::size_t{layers_} * extents, in_prefill));
  RETURN_IF_ERROR(scales_at_.allocate(device_, std::size_t{layers_} * extents, in_prefill));
  address_room_ = extents;
  return {};
}

// For what a step copies from full precision, for addresses, and for the pages that it seals.
Status GpuPrefillAttention::make_staging_room(ThreadPool* pool) {
  const std::size_t floats = heads_total() * 2 * shape_.page.dim * sizeof(float),
                    extents = ceil_div(n_ + shape_.page.page_tokens, shape_.page.extent_tokens()),
                    room = std::max({floats * window_room_, floats * (shape_.page.page_tokens + 1),
                                     std::size_t{layers_} * address_room_ * 2 * sizeof(uint64_t),
                                     turns * (extents + 1) * (pages_size() + scales_size())});
  if (room <= staging_room_) return {};
  staging_room_ = 0, staging_ = {};
  RETURN_IF_ERROR(staging_.allocate(device_, room, pool));
  staging_room_ = room;
  return {};
}

// Counts the extents whose pages some layer misses.
uint32_t GpuPrefillAttention::missing_extents(const PageStore& pages) const {
  uint32_t count = 0;
  for (uint32_t e = 0; e < pages.extents(); ++e) {
    const uint64_t* const stamps = stamps_.data() + std::size_t{e} * layers_;
    count += std::any_of(stamps, stamps + layers_,
                         [&](uint64_t stamp) { return stamp != pages.stamp(e); });
  }
  return count;
}

Status GpuPrefillAttention::make_piece_room(uint32_t extents, ThreadPool* pool) {
  const std::size_t one = pages_size() + scales_size();
  std::size_t room = std::max(one, std::min(extents * one, prefill_piece_bytes));
  if (room > piece_room_) {
    if (piece_room_ > 0) RETURN_IF_ERROR(device_->status(wait_for_pieces(), in_prefill));
    piece_room_ = 0, pieces_ = {};
    Status s = pieces_.allocate(device_, piece_count * room, pool);
    if (s.code() == Code::no_memory)
      s = pieces_.allocate(device_, piece_count * (room = one), pool);
    RETURN_IF_ERROR(std::move(s));
    piece_room_ = room;
  }
  for (DeviceStream*& stream : piece_streams_)
    if (!stream)
      RETURN_IF_ERROR(device_->status(ops_.open_stream(device_->context(), &stream), "a stream"));
  return {};
}

const GpuPrefillAttention::Block& GpuPrefillAttention::block_of(uint32_t extent) const {
  return *std::find_if(blocks_.begin(), blocks_.end(),
                       [&](const Block& b) { return extent < b.first + b.count; });
}

// The addresses of all extents.
Status GpuPrefillAttention::place(DeviceStream* stream) {
  const uint32_t room = extents_room();
  if (placed_ == room) return {};
  const std::size_t all = std::size_t{layers_} * address_room_;
  auto* at = reinterpret_cast<uint64_t*>(staging_.get());
  std::fill_n(at, 2 * all, 0);
  for (const Block& b : blocks_)
    for (uint32_t layer = 0; layer < layers_; ++layer)
      for (uint32_t e = b.first; e < b.first + b.count; ++e) {
        const std::size_t i = std::size_t{layer} * address_room_ + e;
        at[i] = reinterpret_cast<uint64_t>(pages_of(b, layer, e));
        at[all + i] = reinterpret_cast<uint64_t>(scales_of(b, layer, e));
      }
  int error = ops_.upload(stream, pages_at_.get(), at, all * sizeof(uint64_t));
  if (!error) error = ops_.upload(stream, scales_at_.get(), at + all, all * sizeof(uint64_t));
  if (!error) error = ops_.wait(stream);
  if (!error) placed_ = room;
  return device_->status(error, in_prefill);
}

int GpuPrefillAttention::wait_for_pieces() {
  int error = 0;
  for (DeviceStream* stream : piece_streams_)
    if (const int failed = stream ? ops_.wait(stream) : 0; !error) error = failed;
  return error;
}

// Copies extents [first, end) of a layer, which are neighbours in a block.
Status GpuPrefillAttention::bring_piece(const KvStore& store, uint32_t layer, uint32_t first,
                                        uint32_t end, ThreadPool* pool) {
  const PageStore& pages = store.pages();
  const std::size_t count = end - first;
  RETURN_IF_ERROR(make_piece_room(end - first, pool));
  DeviceStream* const stream = piece_streams_[piece_];
  if (const int error = ops_.wait(stream)) return device_->status(error, in_prefill);
  std::byte* const to = pieces_.get() + piece_ * piece_room_;
  std::byte* const to_scales = to + count * pages_size();
  piece_ = (piece_ + 1) % piece_count;
  std::atomic<bool> intact{true};
  pool->run((end - first) * shape_.kv_heads, [&](uint32_t task, uint32_t) {
    const uint32_t i = task / shape_.kv_heads, h = task % shape_.kv_heads, e = first + i;
    const uint32_t there = std::min(extent_pages, pages.pages() - e * extent_pages);
    for (uint32_t p = 0; p < there; ++p)
      if (!pages.intact_page(first_ + layer, h, e * extent_pages + p)) intact = false;
    const ExtentView view = pages.extent(first_ + layer, h, e);
    std::memcpy(to + i * pages_size() + h * PageShape::pages_bytes(), view.pages,
                PageShape::pages_bytes());
    std::memcpy(to_scales + i * scales_size() + h * shape_.page.scales_bytes(), view.scales,
                shape_.page.scales_bytes());
  });
  if (!intact) return pages.damaged();
  const Block& block = block_of(first);
  for (uint32_t e = first; e < end; ++e) stamp_of(layer, e) = 0;  // in case the copy fails
  int error = ops_.upload(stream, pages_of(block, layer, first), to, count * pages_size());
  if (!error)
    error = ops_.upload(stream, scales_of(block, layer, first), to_scales, count * scales_size());
  if (error) return device_->status(error, in_prefill);
  for (uint32_t e = first; e < end; ++e) stamp_of(layer, e) = pages.stamp(e);
  return {};
}

// Copies extents that differ from what the device has, as many neighbours of a block together as
// fit a piece.
Status GpuPrefillAttention::bring(const KvStore& store, uint32_t layer, ThreadPool* pool,
                                  const CancelLatch& cancel, DeviceStream* stream) {
  const PageStore& pages = store.pages();
  const uint32_t extents = pages.extents();
  const auto is_there = [&](uint32_t e) { return stamp_of(layer, e) == pages.stamp(e); };
  const auto together = static_cast<uint32_t>(piece_room_ / (pages_size() + scales_size()));
  // After a failure no copy is under way, and if the device failed, nothing is known to be there.
  struct Copies {
    GpuPrefillAttention& its;
    bool awaited = false;
    ~Copies() {
      if (!awaited && its.wait_for_pieces() != 0)
        std::fill(its.stamps_.begin(), its.stamps_.end(), 0);
    }
  } copies{*this};
  bool brings = false;
  for (uint32_t first = 0, end; first < extents; first = end) {
    end = first + 1;
    if (is_there(first)) continue;
    if (cancel.fired())
      return Status::error(Code::cancelled, "cancelled; the sequence is as it was");
    const Block& block = block_of(first);
    const uint32_t last = std::min({extents, block.first + block.count, first + together});
    while (end < last && !is_there(end)) ++end;
    RETURN_IF_ERROR(bring_piece(store, layer, first, end, pool));
    brings = true;
  }
  int error = 0;
  for (DeviceStream* each : piece_streams_)
    if (brings && !error) error = ops_.after(stream, each);
  copies.awaited = error == 0;
  return device_->status(error, in_prefill);
}

int GpuPrefillAttention::put_ahead(const KvStore& store, uint32_t layer, std::size_t turn,
                                   ThreadPool* pool, DeviceStream* stream) {
  const PageStore& pages = store.pages();
  const uint32_t first = pages.pages() / extent_pages;
  const auto end = static_cast<uint32_t>(
      ceil_div(pages.pages() + store.pages_after(store.window_count() + n_), extent_pages));
  const std::size_t size = pages_size() + scales_size();
  if (layer == 0) ahead_ = 0;
  if (!store.sealed_ahead(first_ + layer) || end > extents_room() ||
      turns * (end - first) * size > staging_room_)
    return 0;
  std::byte* staged = staging_.get() + turn * (end - first) * size;
  pool->run((end - first) * shape_.kv_heads, [&](uint32_t task, uint32_t) {
    const uint32_t e = task / shape_.kv_heads, h = task % shape_.kv_heads;
    const ExtentView view = pages.extent(first_ + layer, h, first + e);
    std::memcpy(staged + e * size + h * PageShape::pages_bytes(), view.pages,
                PageShape::pages_bytes());
    std::memcpy(staged + e * size + pages_size() + h * shape_.page.scales_bytes(), view.scales,
                shape_.page.scales_bytes());
  });
  int error = 0;
  for (uint32_t e = first; e < end && !error; ++e, staged += size) {
    const Block& block = block_of(e);
    stamp_of(layer, e) = 0;
    error = ops_.upload(stream, pages_of(block, layer, e), staged, pages_size());
    if (!error)
      error = ops_.upload(stream, scales_of(block, layer, e), staged + pages_size(), scales_size());
  }
  ++ahead_;
  return error;
}

void GpuPrefillAttention::committed(const KvStore& store) {
  if (std::exchange(ahead_, 0) < layers_) return;
  for (uint32_t e = pages_ / extent_pages; e < store.pages().extents(); ++e)
    for (uint32_t layer = 0; layer < layers_; ++layer) stamp_of(layer, e) = store.pages().stamp(e);
}

// What is in full precision.
Status GpuPrefillAttention::put_rows(const KvStore& store, ThreadPool* pool, DeviceStream* stream) {
  const std::size_t dim = shape_.page.dim, heads = heads_total(),
                    filled = store.window_count() * dim;
  auto* staged = reinterpret_cast<float*>(staging_.get());
  int error = 0;
  centred_ = !store.centre().empty();
  if (sinks_stamp_ != store.sinks_stamp()) {
    const std::size_t rows = 2 * shape_.page.page_tokens * dim,
                      size = store.sink_floats().empty() ? 0 : heads * rows,
                      centre = centred_ ? heads * dim : 0;
    if (size > 0) std::copy_n(store.sink_floats().data() + first_head() * rows, size, staged);
    if (centred_) std::copy_n(store.centre().data() + first_head() * dim, centre, staged + size);
    error = ops_.upload(stream, sinks_.get(), staged, size * sizeof(float));
    if (!error) error = ops_.upload(stream, centre_.get(), staged + size, centre * sizeof(float));
    if (!error) error = ops_.wait(stream);
    if (error) return device_->status(error, in_prefill);
    sinks_stamp_ = store.sinks_stamp();
  }
  if (filled == 0) return {};
  const std::size_t room = std::size_t{window_room_} * dim;
  pool->run(static_cast<uint32_t>(heads), [&](uint32_t h, uint32_t) {
    const KvStore::Rows rows = store.window(first_ + h / shape_.kv_heads, h % shape_.kv_heads);
    std::copy_n(rows.k, filled, staged + h * 2 * room);
    std::copy_n(rows.v, filled, staged + (h * 2 + 1) * room);
  });
  error = ops_.upload(stream, window_.get(), staged, heads * 2 * room * sizeof(float));
  // the staging memory is left alone until the stream has been waited for
  return device_->status(error, in_prefill);
}

Status GpuPrefillAttention::prepare(const KvStore& store, const Plan& plan, uint32_t exact,
                                    uint32_t n, uint64_t follows, ThreadPool* pool,
                                    DeviceStream* stream) {
  n_ = n, pages_ = store.pages().pages(), window_count_ = store.window_count(), ahead_ = 0;
  sparse_ = plan.by_blocks, draw_ = store.tokens();
  exact_blocks_ = static_cast<uint32_t>(ceil_div(uint64_t{exact} * heads_.group(), prefill_rows));
  if (!sparse_) release_tiles();
  Status room = make_room(store, follows, pool);
  if (room.code() == Code::no_memory && tile_heads_ > 0)
    release_tiles(), room = make_room(store, follows, pool);
  RETURN_IF_ERROR(std::move(room));
  if (sparse_) RETURN_IF_ERROR(make_tile_room(plan));
  RETURN_IF_ERROR(place(stream));
  return put_rows(store, pool, stream);
}

DevicePrefillTiles GpuPrefillAttention::tiles_of(uint32_t layer) const {
  if (!sparse_) return {};
  return {room_ / prefill_keys,
          chosen_tiles_,
          near_tile_,
          sample_seed(first_ + layer, 0, static_cast<uint32_t>(draw_)),
          tile_heads_,
          exact_blocks_,
          tile_keys_.get(),
          tile_q_.get(),
          tile_key_scales_.get(),
          tile_scores_.get(),
          tile_lists_.get(),
          tile_biases_.get(),
          tile_counts_.get()};
}

int GpuPrefillAttention::enqueue(DeviceStream* stream, uint32_t layer, const float* q,
                                 const float* k, const float* v, float* out, float* lse) const {
  const PageShape& page = shape_.page;
  const std::size_t first = std::size_t{layer} * shape_.kv_heads;
  const auto q_rows =
      static_cast<uint32_t>(round_up(std::size_t{n_} * heads_.group(), prefill_rows));
  const float* const sinks = sink_logits_.empty() ? nullptr : sink_logits_[layer];
  const DevicePrefill r{shape_.kv_heads,
                        heads_.group(),
                        page.head_dim,
                        page.dim,
                        page.page_tokens,
                        n_,
                        pages_,
                        window_count_,
                        pages_at_.get() + std::size_t{layer} * address_room_,
                        scales_at_.get() + std::size_t{layer} * address_room_,
                        0,
                        0,
                        sinks_.get() + first * 2 * page.page_tokens * page.dim,
                        centred_ ? centre_.get() + first * page.dim : nullptr,
                        window_.get() + first * 2 * window_room_ * page.dim,
                        window_room_,
                        room_,
                        q_rows,
                        keys_.get(),
                        values_.get(),
                        q_.get(),
                        q_scale_.get(),
                        largest_.get(),
                        sinks,
                        sinks ? sink_scores_.get() : nullptr,
                        0,
                        0,
                        false,
                        0,
                        parts_.get(),
                        part_room_,
                        tiles_of(layer)};
  int error = ops_.prepare_prefill(stream, r, q, k, v);
  if (!error && sparse_) error = ops_.choose_prefill(stream, r);
  return error ? error : ops_.attend_prefill(stream, r, out, lse);
}

}  // namespace kvasir
