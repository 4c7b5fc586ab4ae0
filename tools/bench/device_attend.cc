// Time of the decode attention of one token in a layer of Llama 3 8B's shape. Exact: all pages, in
// GPU memory. Bounded: 512 quads selected by a sketch, from pages in host memory; the GPU keeps
// read quads. Keys, values and queries are random; queries change slightly from token to token.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "backend/page.h"
#include "base/checked.h"
#include "base/memory.h"
#include "device.h"

namespace kvasir {
namespace {

constexpr uint32_t kv_heads = 8, group = 4, heads = kv_heads * group, window = 256,
                   window_rows = 352, budget = 512;
constexpr PageShape page = PageShape::of(128);
constexpr uint32_t width = heads * page.dim, row = kv_heads * page.dim,
                   quad_bytes = 8 * page.dim + 16;
constexpr std::size_t extent_bytes = kv_heads * PageShape::pages_bytes(),
                      scale_bytes = kv_heads * page.scales_bytes();
constexpr std::size_t basis_size = std::size_t{row} * page.sketch_dim(),
                      sinks_size = std::size_t{row} * 2 * page.page_tokens;
constexpr std::size_t window_size = std::size_t{row} * 2 * window_rows;
constexpr uint32_t operations = 5;
constexpr const char* names[operations] = {"begin", "scan and near", "choose", "chosen", "finish"};

// Parts of a query that stay from token to token and that change. 91% of a list are then selected
// again; in answers more (offload/gpu_selective_attention.cc).
constexpr float stays = 0.9f, is_new = 0.436f;

uint64_t address_of(const void* p) { return reinterpret_cast<uint64_t>(p); }

// Several layers, attended in turn so that no cache holds their pages. A token attends all of them.
class Layers {
 public:
  Layers(Bench* bench, uint32_t tokens)
      : bench_(bench), tokens_(tokens), pages_((tokens - window) / page.page_tokens),
        extents_(static_cast<uint32_t>(ceil_div(pages_, extent_pages))),
        extents_room_(extents_ + std::clamp(extents_ / 8, 32u, 64u)),
        quads_((pages_ - 1) * page.page_quads()) {
    constexpr std::size_t no_cache = std::size_t{150} << 20;
    while (
        layers_ < Bench::times &&
        (Bench::times % layers_ || layers_ * extents_ * kv_heads * page.sketch_bytes() < no_cache))
      ++layers_;
    // as in GpuSelectiveAttention
    const uint32_t deviation = static_cast<uint32_t>(std::sqrt(static_cast<double>(budget)));
    most_ = (budget + 8 * deviation + 64) * 9 / 8;
    hot_room_ = static_cast<uint32_t>(round_up(4 * (budget + 2 * deviation), hot_ways));
  }

  bool allocate() {
    const std::size_t n = layers_, hot = n * kv_heads * hot_room_,
                      stride = std::size_t{extents_room_} * page.extent_quads();
    const std::size_t parts = ceil_div(stride, choose_quads);
    return pages_host_.allocate(bench_->device, n * layer_bytes()).ok() &&
           counts_host_.allocate(bench_->device, Bench::times).ok() &&
           take(pages_device_, n * layer_bytes()) && take(sketch_, n * sketch_bytes()) &&
           take(at_, n * arrays * extents_room_) && take(counts_, Bench::times) &&
           take(budget_, 1) && take(basis_, n * basis_size) && take(sinks_, n * sinks_size) &&
           take(centre_, row) && take(window_, n * window_size) &&
           take(given_q_, std::size_t{Bench::times} * width) && take(given_k_, row) &&
           take(q_, width) && take(q8_, width) && take(q_scale_, heads) &&
           take(projected_, heads * page.sketch_dim()) && take(projected_scale_, heads) &&
           take(scores_, heads * stride) &&
           take(score_sums_, std::size_t{heads} * max_score_parts * 2) &&
           take(share_counts_, std::size_t{kv_heads} * share_bins) &&
           take(share_sums_, std::size_t{kv_heads} * share_bins) && take(thresholds_, kv_heads) &&
           take(part_counts_, kv_heads * parts) && take(lists_, n * kv_heads * most_) &&
           take(biases_, n * kv_heads * most_) && take(list_counts_, n * kv_heads * 2) &&
           take(states_, heads * attention_parts * (page.dim + state_sums)) &&
           take(hot_quads_, hot * quad_bytes) && take(hot_entries_, hot) &&
           take(found_, n * kv_heads * most_) && take(all_lists_, std::size_t{kv_heads} * quads_) &&
           take(all_biases_, std::size_t{kv_heads} * quads_) && take(all_counts_, kv_heads * 2) &&
           take(out_, width) && take(out_q_, width) && take(out_scale_, width / 32) &&
           take(out_sums_, width / 16) && take(lse_, heads) && take(mass_, heads) &&
           take(first_bad_, 1);
  }

  void fill() {
    fill_pages();
    for (DeviceBuffer<float>* to : {&basis_, &sinks_, &centre_, &window_, &given_k_}) {
      Array<float> x(to->bytes() / sizeof(float));
      for (float& f : x) f = uniform();
      put(*to, x);
    }
    walk_.resize(std::size_t{layers_} * width);
    for (float& f : walk_) f = uniform();
    const DeviceBudget its_budget{budget, budget, 0};
    bench_->check(
        bench_->ops().upload(bench_->stream, budget_.get(), &its_budget, sizeof its_budget));
    put(hot_entries_, Array<unsigned long long>(hot_entries_.bytes() / sizeof(unsigned long long)));
    Array<uint32_t> all(std::size_t{kv_heads} * quads_), all_counts(kv_heads * 2);
    // page 0 holds the sinks
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = page.page_quads() + static_cast<uint32_t>(i % quads_);
    for (uint32_t h = 0; h < kv_heads; ++h) all_counts[2 * h] = quads_;
    put(all_lists_, all), put(all_biases_, Array<float>(all.size())), put(all_counts_, all_counts);
    put(first_bad_, Array<uint32_t>(1, UINT32_MAX));
    next_tokens();
  }

  void measure(double copy) {
    const double exact =
        bench_->median_seconds([&](uint32_t i) { bench_->check(attend_exactly(i)); });
    const double its_pages = bench_->median_seconds([&](uint32_t i) {
      bench_->check(bench_->ops().attend_chosen(bench_->stream, all_pages(i), all_of_them()));
    });
    double until[operations + 1] = {};  // seconds of the first operations
    for (uint32_t n = 1; n <= operations; ++n) {
      since_ = step_ + 1;  // without attend_chosen() quads have a place and are not there
      until[n] = bench_->median_seconds([&](uint32_t i) { bench_->check(attend(i, n)); },
                                        [&] { next_tokens(); });
    }
    Array<uint32_t> counts(list_counts_.bytes() / sizeof(uint32_t));
    uint32_t first_bad = 0;
    bench_->check(bench_->ops().download(bench_->stream, counts.data(), list_counts_.get(),
                                         list_counts_.bytes()));
    bench_->check(
        bench_->ops().download(bench_->stream, &first_bad, first_bad_.get(), sizeof first_bad));
    bench_->check(bench_->ops().wait(bench_->stream));
    double chosen = 0, again = 0;
    for (std::size_t i = 0; i < counts.size(); i += 2) chosen += counts[i], again += counts[i + 1];
    const double speed = static_cast<double>(kv_heads) * quads_ * quad_bytes / its_pages;
    std::printf("attend %7u: exact %8.1f us, chosen alone %8.1f us, %.1f GB/s, %.2f x copy\n",
                tokens_, 1e6 * exact, 1e6 * its_pages, 1e-9 * speed, speed / copy);
    std::printf("             bounded %6.1f us: ", 1e6 * until[operations]);
    for (uint32_t n = 0; n < operations; ++n)
      std::printf("%s %.1f%s", names[n], 1e6 * (until[n + 1] - until[n]),
                  n + 1 < operations ? ", " : " us");
    std::printf("; of %.0f quads a list %.0f%% are found again\n", chosen / (layers_ * kv_heads),
                100 * again / chosen);
    std::printf("             exact / bounded %.2f%s\n", exact / until[operations],
                first_bad == UINT32_MAX ? "" : ": NOT FINITE");
    bench_->good = bench_->good && first_bad == UINT32_MAX;
  }

 private:
  // Addresses of the arrays: [layers][arrays][extents_room_].
  enum : uint32_t { sketches, host_pages, host_scales, device_pages, device_scales, arrays };

  std::size_t layer_bytes() const { return extents_ * (extent_bytes + scale_bytes); }
  std::size_t sketch_bytes() const { return extents_ * kv_heads * page.sketch_bytes(); }
  template <class T>
  bool take(DeviceBuffer<T>& buffer, std::size_t size) {
    return buffer.allocate(bench_->device, size, "attention").ok();
  }
  template <class T>
  void put(const DeviceBuffer<T>& to, const Array<T>& from) {
    bench_->check(bench_->ops().upload(bench_->stream, to.get(), from.data(), to.bytes()));
  }
  uint32_t random() { return (seed_ = seed_ * 1664525 + 1013904223) >> 8; }
  float uniform() { return static_cast<float>(random() % 2001) * 0.001f - 1; }

  // A layer's extents, then their scales; all layers have the same sizes.
  void fill_pages() {
    std::byte* const host = pages_host_.get();
    for (std::size_t i = 0; i < extents_ * extent_bytes; ++i)
      host[i] = static_cast<std::byte>(random() % 255 - 127);
    // 1/128
    std::fill_n(reinterpret_cast<uint16_t*>(host + extents_ * extent_bytes),
                extents_ * scale_bytes / 2, uint16_t{0x3c00});
    Array<std::byte> sketch(sketch_bytes());
    // 0.1875: estimated scores of a query are then from about -6 to 6
    constexpr uint16_t step = 0x3e40;
    for (std::size_t i = 0; i < sketch.size(); ++i) {
      const bool is_scale =
          i % page.sketch_bytes() >= page.sketch_bytes() - page.extent_quads() * sizeof step;
      sketch[i] = is_scale ? reinterpret_cast<const std::byte*>(&step)[i % 2]
                           : static_cast<std::byte>(random() >> 16);
    }
    Array<uint64_t> at(at_.bytes() / sizeof(uint64_t));
    for (uint32_t l = 0; l < layers_; ++l) {
      if (l > 0) std::memcpy(host + l * layer_bytes(), host, layer_bytes());
      bench_->check(bench_->ops().upload(bench_->stream, sketch_.get() + l * sketch.size(),
                                         sketch.data(), sketch.size()));
      uint64_t* addresses = at.data() + std::size_t{l} * arrays * extents_room_;
      for (uint32_t e = 0; e < extents_; ++e) {
        const std::size_t its_pages = l * layer_bytes() + e * extent_bytes,
                          its_scales =
                              l * layer_bytes() + extents_ * extent_bytes + e * scale_bytes;
        addresses[sketches * extents_room_ + e] =
            address_of(sketch_.get() + l * sketch.size() + e * kv_heads * page.sketch_bytes());
        addresses[host_pages * extents_room_ + e] = address_of(host + its_pages);
        addresses[host_scales * extents_room_ + e] = address_of(host + its_scales);
        addresses[device_pages * extents_room_ + e] = address_of(pages_device_.get() + its_pages);
        addresses[device_scales * extents_room_ + e] = address_of(pages_device_.get() + its_scales);
      }
    }
    bench_->check(
        bench_->ops().upload(bench_->stream, pages_device_.get(), host, pages_device_.bytes()));
    put(at_, at);
    bench_->check(bench_->ops().wait(bench_->stream));
  }

  // Queries and counts of a run.
  void next_tokens() {
    Array<float> q(std::size_t{Bench::times} * width);
    for (uint32_t i = 0; i < Bench::times; ++i) {
      float* direction = walk_.data() + std::size_t{i % layers_} * width;
      for (uint32_t d = 0; d < width; ++d)
        q[std::size_t{i} * width + d] = direction[d] = stays * direction[d] + is_new * uniform();
      counts_host_.get()[i] = {pages_, window, step_ + 1 + i / layers_, since_, UINT32_MAX, 0};
    }
    step_ += Bench::times / layers_;
    put(given_q_, q);
    bench_->check(
        bench_->ops().upload(bench_->stream, counts_.get(), counts_host_.get(), counts_.bytes()));
    bench_->check(bench_->ops().wait(bench_->stream));
  }

  DeviceKv kv(uint32_t i) const {
    const std::size_t l = i % layers_;
    const uint64_t* at = at_.get() + l * arrays * extents_room_;
    return {static_cast<uint32_t>(l),
            kv_heads,
            group,
            page.head_dim,
            page.dim,
            page.page_tokens,
            page.sketch_dim(),
            counts_.get() + i,
            budget_.get(),
            at + sketches * extents_room_,
            at + host_pages * extents_room_,
            at + host_scales * extents_room_,
            0,
            0,
            0,
            page.sketch_bytes(),
            basis_.get() + l * basis_size,
            sinks_.get() + l * sinks_size,
            centre_.get(),
            window_.get() + l * window_size,
            window_rows};
  }

  DeviceAttention work(uint32_t i) const {
    const std::size_t l = i % layers_, lists = l * kv_heads, hot = lists * hot_room_;
    DeviceAttention a{};
    a.n = a.blocks = 1, a.selecting_rows = group, a.extents = extents_room_, a.max_quads = most_;
    a.q = q_.get(), a.q8 = q8_.get(), a.q_scale = q_scale_.get();
    a.projected = projected_.get(), a.projected_scale = projected_scale_.get();
    a.scores = scores_.get(), a.score_sums = score_sums_.get();
    a.share_counts = share_counts_.get(), a.share_sums = share_sums_.get();
    a.thresholds = thresholds_.get(), a.part_counts = part_counts_.get();
    a.lists = lists_.get() + lists * most_, a.biases = biases_.get() + lists * most_,
    a.list_counts = list_counts_.get() + lists * 2;
    a.states = states_.get(), a.parts = attention_parts;
    a.hot = {hot_room_, quad_bytes, hot_quads_.get() + hot * quad_bytes, hot_entries_.get() + hot,
             found_.get() + lists * most_};
    return a;
  }

  DeviceKv all_pages(uint32_t i) const {
    DeviceKv layer_kv = kv(i);
    layer_kv.pages_at = layer_kv.sketch_at + device_pages * extents_room_,
    layer_kv.scales_at = layer_kv.sketch_at + device_scales * extents_room_;
    return layer_kv;
  }

  DeviceAttention all_of_them() const {
    DeviceAttention a = work(0);
    a.max_quads = quads_;
    a.lists = all_lists_.get(), a.biases = all_biases_.get(), a.list_counts = all_counts_.get();
    a.hot = {};
    return a;
  }

  int begin(const DeviceKv& kv, const DeviceAttention& a, uint32_t i) {
    return bench_->ops().begin_attention(bench_->stream, kv, a,
                                         given_q_.get() + std::size_t{i} * width, given_k_.get(),
                                         given_k_.get());
  }
  int finish(const DeviceKv& kv, const DeviceAttention& a) {
    const DeviceActivations out{
        1, width, out_.get(), out_q_.get(), out_scale_.get(), out_sums_.get()};
    return bench_->ops().finish_attention(bench_->stream, kv, a, out, {1e30f, 0, first_bad_.get()},
                                          lse_.get(), mass_.get());
  }

  int attend_exactly(uint32_t i) {
    const DeviceKv layer_kv = all_pages(i);
    const DeviceAttention a = all_of_them();
    int error = begin(layer_kv, a, i);
    if (!error) error = bench_->ops().attend_sinks_and_window(bench_->stream, layer_kv, a);
    if (!error) error = bench_->ops().attend_chosen(bench_->stream, layer_kv, a);
    return error ? error : finish(layer_kv, a);
  }

  // Runs the first n operations.
  int attend(uint32_t i, uint32_t n) {
    const DeviceKv layer_kv = kv(i);
    const DeviceAttention a = work(i);
    const DeviceKernels& ops = bench_->ops();
    int error = begin(layer_kv, a, i);
    if (n > 1 && !error) error = ops.score_sketch(bench_->stream, layer_kv, a);
    if (n > 2 && !error) error = ops.choose(bench_->stream, layer_kv, a);
    if (n > 3 && !error) error = ops.attend_chosen(bench_->stream, layer_kv, a);
    return n > 4 && !error ? finish(layer_kv, a) : error;
  }

  Bench* bench_;
  uint32_t tokens_, pages_, extents_, extents_room_, quads_;  // quads_: selectable ones
  uint32_t layers_ = 4, most_, hot_room_;
  uint32_t seed_ = 1, step_ = 0, since_ = 0;
  Array<float> walk_;                   // [layers][width] newest queries
  PinnedBuffer<std::byte> pages_host_;  // [layers][layer_bytes()]
  PinnedBuffer<DeviceCounts> counts_host_;
  DeviceBuffer<std::byte> pages_device_, sketch_;
  DeviceBuffer<uint64_t> at_;
  DeviceBuffer<DeviceCounts> counts_;  // [times]
  DeviceBuffer<DeviceBudget> budget_;
  DeviceBuffer<float> basis_, sinks_, centre_, window_, given_q_, given_k_, q_, q_scale_,
      projected_scale_, scores_, score_sums_, thresholds_, biases_, states_;
  DeviceBuffer<float> all_biases_, out_, out_scale_, lse_, mass_;
  DeviceBuffer<int8_t> q8_, projected_, out_q_;
  DeviceBuffer<int16_t> out_sums_;
  DeviceBuffer<uint32_t> share_counts_, part_counts_, lists_, list_counts_, found_, all_lists_,
      all_counts_, first_bad_;
  DeviceBuffer<unsigned long long> share_sums_, hot_entries_;
  DeviceBuffer<uint8_t> hot_quads_;
};

}  // namespace

void measure_attend(Bench* bench, uint32_t tokens, double copy) {
  Layers layers(bench, tokens);
  if (!layers.allocate()) return (void)std::printf("attend %7u: no memory\n", tokens);
  layers.fill();
  if (bench->good) layers.measure(copy);
}

}  // namespace kvasir
