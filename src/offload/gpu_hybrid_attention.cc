#include "offload/gpu_hybrid_attention.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/checked.h"
#include "base/number_text.h"
#include "os/os.h"

namespace kvasir {

constexpr const char* in_hybrid = "co-execution";
constexpr std::size_t measured_bytes = std::size_t{8} << 20;

GpuHybridAttention::GpuHybridAttention(const std::shared_ptr<Device>& device,
                                       std::shared_ptr<DeviceSketches> sketches,
                                       const HeadShape& heads, const StoreShape& shape,
                                       uint32_t first, uint32_t layers)
    : device_(device), ops_(device->kernels()), heads_(heads), shape_(shape), first_(first),
      layers_(layers), sequence_(device, std::move(sketches), shape, first, layers, heads.heads),
      packed_(device, shape, first, layers) {}

Fallback GpuHybridAttention::refuses(const KvStore& store, const Plan& plan, bool exact,
                                     uint32_t n) const {
  if (n > KvMirror::max_tokens || plan.by_blocks) return Fallback::is_prefill;
  if (exact && n > 1) return Fallback::attends_everything;
  if (plan.query_batch && n > 1) return Fallback::query_batch;
  if (plan.certify || plan.compare != CompareLevel::none) return Fallback::compared;
  return KvMirror::unfit(store, heads_);
}

// All that depends on the step's tokens and the text's length.
Status GpuHybridAttention::make_room(uint32_t n, uint32_t list_quads) {
  if (n <= room_ && list_quads <= list_quads_) return {};
  const uint32_t tokens = n == 1
                              ? std::max(room_, 1u)
                              : std::max<uint32_t>(room_, static_cast<uint32_t>(round_up(n, 16)));
  list_quads = std::max(list_quads_, list_quads + list_quads / 8);
  room_ = list_quads_ = 0;
  ++generation_;
  std::apply([](auto&... b) { (void(b = {}), ...); }, buffers());
  const PageShape& page = shape_.page;
  const std::size_t rows = std::size_t{tokens} * heads_.heads,
                    list = std::size_t{shape_.kv_heads} * list_quads,
                    all_rows = std::size_t{layers_} * std::max(tokens, max_alone) * heads_.heads;
  Status s = q_.allocate(device_, rows * page.dim, in_hybrid);
  if (s.ok()) s = q8_.allocate(device_, rows * page.dim, in_hybrid);
  if (s.ok()) s = q_scale_.allocate(device_, rows, in_hybrid);
  if (s.ok())
    s = states_.allocate(device_, rows * attention_parts * (page.dim + state_sums), in_hybrid);
  if (s.ok()) s = lse_.allocate(device_, all_rows, in_hybrid);
  if (s.ok()) s = mass_.allocate(device_, all_rows, in_hybrid);
  if (s.ok()) s = near_sums_.allocate(device_, 2 * rows);
  if (s.ok()) s = states_host_.allocate(device_, rows * (page.dim + state_sums));
  if (s.ok()) s = lse_host_.allocate(device_, all_rows);
  if (s.ok()) s = mass_host_.allocate(device_, all_rows);
  if (s.ok()) s = list_counts_.allocate(device_, 2 * shape_.kv_heads);
  if (s.ok() && list_quads > 0) s = quads_.allocate(device_, list);
  if (s.ok() && list_quads > 0) s = biases_.allocate(device_, list);
  if (s.ok() && list_quads > 0) s = present_.allocate(device_, list);
  if (!s.ok()) return s;
  room_ = tokens, list_quads_ = list_quads;
  return {};
}

Status GpuHybridAttention::prepare(const KvMirror::UpdateRequest& request, const Plan& plan,
                                   bool exact, uint32_t n, uint64_t reserve) {
  const PageStore& pages = request.store.pages();
  rates_ = device_->page_rates(request.pool->threads());
  const uint32_t sixteenths = rates_.sixteenths();
  needs_packed_ =
      !exact && plan.strategy->has(StrategyInfo::filters) && rates_.known() && pages.pages() > 0;
  bool reads = false;
  const KvMirror::Wants wants{.sketch = false,
                              .pages = n == 1 && (sixteenths > 0 || needs_packed_)};
  RETURN_IF_ERROR(sequence_.update(request, wants, &reads));
  reads_ = reads;
  sixteenths_ = reads ? sixteenths : 0;
  // A list has at list_quads as many quads as tokens are chosen, or what there is.
  uint64_t list_quads = 0;
  for (uint32_t l = first_; l < first_ + layers_ && !exact && sixteenths_ > 0; ++l)
    if (!plan.is_dense(l))
      list_quads = std::max(list_quads, plan.coverage > 0 ? 4 * plan.budget(l) : plan.budget(l));
  list_quads = std::min<uint64_t>(list_quads * sixteenths_ / 16 + shape_.page.page_quads(),
                                  std::uint64_t{pages.pages()} * shape_.page.page_quads());
  RETURN_IF_ERROR(make_room(n, static_cast<uint32_t>(list_quads)));
  packs_ = false, why_not_packed_ = Fallback::none;
  if (std::exchange(under_way_, false)) packed_.forget();
  if (!needs_packed_) {
    packed_.release();
  } else if (reads && n == 1) {
    RETURN_IF_ERROR(packed_.prepare(pages, plan, reserve, &why_not_packed_));
    packs_ = why_not_packed_ == Fallback::none;
  }
  n_ = n;
  sequence_.begin_step(request.store, rows_);
  return device_->status(sequence_.enqueue_counts(rows_, request.streams.own), in_hybrid);
}

Fallback GpuHybridAttention::cannot_read() const {
  if (n_ > 1) return Fallback::several_tokens;
  if (!rates_.known()) return Fallback::unknown_rate;
  return rates_.sixteenths() == 0 && !needs_packed_ ? Fallback::cpu_is_faster
                                                    : sequence_.cannot_share();
}

std::string GpuHybridAttention::share() const {
  char text[256];
  std::snprintf(text, sizeof text,
                "%u sixteenths of the pages: the CPU attends %s GB/s, the GPU reads %s GB/s",
                sixteenths_, fixed_text(rates_.cpu / 1e9, 1).c_str(),
                fixed_text(rates_.device / 1e9, 1).c_str());
  std::string out = rates_.known() ? text : text_of(Fallback::unknown_rate);
  if (packs_) out += "; the GPU reads in one go what a filter layer chose for the layers after it";
  if (why_not_packed_ != Fallback::none) out += std::string("; ") + text_of(why_not_packed_);
  return out;
}

// The best of some readings of memory like that of the pages. What is there makes no difference.
Status GpuHybridAttention::measure(double cpu_rate, uint32_t threads, const CancelLatch& cancel,
                                   DeviceStream* stream) {
  if (!(cpu_rate > 0) || room_ == 0) return {};
  Device::Staging staged;
  if (Status s = device_->stage(measured_bytes, cancel, &staged); !s.ok())
    return s.code() == Code::no_memory ? Status() : std::move(s);
  DeviceAttention a = work();
  a.n = a.blocks = 1;
  a.max_quads =
      static_cast<uint32_t>(measured_bytes / quad_bytes_of(shape_.page.dim) / shape_.kv_heads);
  a.lists = nullptr, a.present = nullptr, a.biases = nullptr;
  a.gathered = reinterpret_cast<uint8_t*>(staged.data);
  for (uint32_t h = 0; h < shape_.kv_heads; ++h)
    list_counts_.get()[2 * h] = a.max_quads, list_counts_.get()[2 * h + 1] = 0;
  uint64_t best = UINT64_MAX;
  for (int i = 0; i < 4; ++i) {
    const uint64_t begin = os::now_ns();
    int error = ops_.attend_chosen(stream, sequence_.layer(0), a);
    if (!error) error = ops_.wait(stream);
    if (error) return device_->status(error, in_hybrid);
    best = std::min(best, os::now_ns() - begin);
  }
  const double bytes = static_cast<double>(std::size_t{a.max_quads} * shape_.kv_heads *
                                           quad_bytes_of(shape_.page.dim));
  device_->set_page_rates(
      threads, {cpu_rate, bytes / static_cast<double>(std::max<uint64_t>(best, 1)) * 1e9});
  return {};
}

DeviceAttention GpuHybridAttention::work() const {
  DeviceAttention a{};
  a.n = a.blocks = n_;
  a.max_quads = list_quads_;
  a.q = q_.get(), a.q8 = q8_.get(), a.q_scale = q_scale_.get();
  a.lists = quads_.get(), a.biases = biases_.get(), a.present = present_.get(),
  a.list_counts = list_counts_.get();
  a.states = states_.get();
  a.parts = near_parts;
  a.near_sums = near_sums_.get();
  return a;
}

void GpuHybridAttention::begin(const KvStore& store, ThreadPool* pool, DeviceStream* stream,
                               DeviceStream* copies) {
  store_ = &store, pool_ = pool, stream_ = stream, copies_ = copies, counts_ = {};
  under_way_ = true, waits_for_packed_ = false;
  packed_.begin_step();
}

int GpuHybridAttention::enqueue_projected(DeviceStream* stream, uint32_t layer, const float* q,
                                          const float* k, const float* v) {
  return ops_.begin_attention(stream, kv_of(layer), work(), q, k, v);
}

int GpuHybridAttention::enqueue_near(uint32_t layer) {
  const int error = ops_.after(copies_, stream_);
  return error ? error : ops_.attend_sinks_and_window(copies_, kv_of(layer), work());
}

int GpuHybridAttention::wait_for_packed(DeviceStream* stream) {
  return std::exchange(waits_for_packed_, false) ? ops_.after(stream, copies_) : 0;
}

int GpuHybridAttention::enqueue_packed(DeviceStream* stream, uint32_t layer) {
  const DeviceKv kv = kv_of(layer);
  DeviceAttention a = work();
  a.near_sums = nullptr;
  packed_.fill(first_ + layer, &a);
  const int error = ops_.attend_sinks_and_window(stream, kv, a);
  return error ? error : ops_.attend_chosen(stream, kv, a);
}

int GpuHybridAttention::enqueue_finish(DeviceStream* stream, uint32_t layer, bool packed,
                                       const DeviceActivations& out, const DeviceCheck& check) {
  DeviceAttention a = work();
  a.parts = packed || has_parts_ ? attention_parts : near_parts;
  a.cpu_states = packed ? nullptr : states_host_.get();
  const std::size_t rows = rows_before(layer);
  if (!packed)
    if (const int error = ops_.after(stream, copies_)) return error;
  return ops_.finish_attention(stream, kv_of(layer), a, out, check, lse_.get() + rows,
                               mass_.get() + rows);
}

Status GpuHybridAttention::near(const float** sums) {
  *sums = near_sums_.get();
  return device_->status(ops_.wait(copies_), in_hybrid);
}

HybridGpu::Lists GpuHybridAttention::lists() {
  return {list_quads_, quads_.get(), present_.get(), biases_.get(), list_counts_.get()};
}

Status GpuHybridAttention::enqueue_lists() {
  has_parts_ = true;
  return device_->status(ops_.attend_chosen(stream_, kv_of(of_.layer), work()), in_hybrid);
}

Status GpuHybridAttention::enqueue_pages(uint32_t first) {
  has_parts_ = true;
  const uint32_t page_quads = shape_.page.page_quads(), end = store_->pages().pages() * page_quads;
  for (uint32_t h = 0; h < shape_.kv_heads; ++h)
    list_counts_.get()[2 * h] = end - first * page_quads,
                           list_counts_.get()[2 * h + 1] = first * page_quads;
  DeviceAttention a = work();
  a.lists = nullptr, a.biases = nullptr, a.present = nullptr;
  return device_->status(ops_.attend_chosen(stream_, kv_of(of_.layer), a), in_hybrid);
}

Status GpuHybridAttention::lse(const float** lse) {
  const std::size_t rows = std::size_t{n_} * heads_.heads, first = rows_before(of_.layer);
  int error = enqueue_finish(stream_, of_.layer, false, of_.out, of_.check);
  is_finished_ = true;
  if (!error)
    error =
        ops_.download(stream_, lse_host_.get() + first, lse_.get() + first, rows * sizeof(float));
  if (!error) error = ops_.wait(stream_);
  *lse = lse_host_.get() + first;
  return device_->status(error, in_hybrid);
}

Status GpuHybridAttention::pack(uint32_t filter_layer, const Selection& choice) {
  waits_for_packed_ = true;
  return packed_.enqueue(
      copies_, filter_layer, choice, store_->pages(),
      [&](uint32_t layer) { return sequence_.layer(layer); }, pool_, &counts_);
}

int GpuHybridAttention::enqueue_end(DeviceStream* stream) {
  const std::size_t rows = std::size_t{layers_} * rows_ * n_ * heads_.heads;
  const int error = ops_.download(stream, lse_host_.get(), lse_.get(), rows * sizeof(float));
  return error ? error : ops_.download(stream, mass_host_.get(), mass_.get(), rows * sizeof(float));
}

void GpuHybridAttention::collect(const Plan& plan, bool exact, ReadCounts* counts) const {
  *counts += counts_;
  if (exact || !plan.strategy->has(StrategyInfo::samples) || store_->sealed_tokens() == 0) return;
  const std::size_t rows = std::size_t{rows_} * n_ * heads_.heads;
  for (uint32_t l = 0; l < layers_; ++l) {
    if (plan.is_dense(first_ + l)) continue;
    counts->queries += rows;
    for (std::size_t i = 0; i < rows; ++i)
      counts->mass += static_cast<double>(mass_host_.get()[l * rows + i]);
  }
}

void GpuHybridAttention::committed(const KvStore& store, uint32_t kept) {
  sequence_.committed(store, kept);
  under_way_ = false;
}

void GpuHybridAttention::release() {
  sequence_.release();
  packed_.release();
  ++generation_;
  room_ = list_quads_ = 0;
  std::apply([](auto&... b) { (void(b = {}), ...); }, buffers());
}

}  // namespace kvasir
