// Random sequences for the tests of a GPU's attention: keys that are sealed by the CPU, pages in
// its memory, outputs poisoned.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "device_support.h"
#include "reference/reference.h"

namespace kvasir::test {

// n elements of host memory that the device reads.
template <class T>
class Shared {
 public:
  explicit Shared(std::size_t n) : n_(n) {
    OK(ops().allocate_host(gpu()->context, n * sizeof(T), &memory_));
    std::fill_n(data(), n, T());
  }
  ~Shared() { (void)ops().release_host(gpu()->context, memory_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* data() { return static_cast<T*>(memory_); }
  const T* data() const { return static_cast<const T*>(memory_); }
  std::size_t size() const { return n_; }

 private:
  std::size_t n_;
  void* memory_ = nullptr;
};

struct Shape {
  uint32_t head_dim, kv_heads, group, pages, window, n;
  uint32_t least, most;
  float variance;
  float sharpness = 1;  // of queries
  bool has_sink_logits = false;
};

constexpr uint32_t sequence_layer = 3;

// One layer of a sequence in the layout of the store, and as the arguments of a device.
struct Sequence {
  Sequence(const Shape& s, Random& random)
      : shape(s), page(PageShape::of(s.head_dim)), extents(s.pages / extent_pages + 2),
        pages(std::size_t{extents} * s.kv_heads * PageShape::pages_bytes()),
        scales(std::size_t{extents} * s.kv_heads * page.scales_bytes() / 2),
        sketch(std::size_t{extents} * s.kv_heads * page.sketch_bytes()),
        basis(std::size_t{s.kv_heads} * page.dim * page.sketch_dim()),
        sinks(std::size_t{s.kv_heads} * 2 * page.page_tokens * page.dim),
        centre(std::size_t{s.kv_heads} * page.dim),
        window(std::size_t{s.kv_heads} * 2 * (s.window + s.n) * page.dim),
        q(std::size_t{s.n} * s.kv_heads * s.group * s.head_dim),
        k(std::size_t{s.n} * s.kv_heads * s.head_dim), v(k.size()) {
    for (std::vector<float>* x : {&q, &k, &v})
      for (float& f : *x) f = random.normal();
    for (float& f : q) f *= s.sharpness;
    const auto fill = [&](std::vector<float>& rows) {
      for (std::size_t i = 0; i < rows.size(); ++i)
        rows[i] = i % page.dim < s.head_dim ? random.normal() : 0.0f;
    };
    fill(sinks), fill(centre), fill(window);
    for (uint32_t h = 0; h < s.kv_heads * s.group; ++h) sink_logits.push_back(2 * random.normal());
    for (float& f : basis) f = random.normal() / 8;
    const Kernels& cpu = cpu_kernels();
    Guarded<int8_t> bounds(page.bounds_bytes());
    Guarded<float> rows(std::size_t{2} * page.page_tokens * page.dim),
        a(std::size_t{page.dim} * page.sketch_dim());
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = random.normal() / 8;
    for (uint32_t p = 0; p < s.pages; ++p) {
      for (uint32_t h = 0; h < s.kv_heads; ++h) {
        const float size = p % 7 == 3 ? 2.5f : 1;  // some pages stand out
        for (std::size_t i = 0; i < rows.size(); ++i)
          rows[i] = i % page.dim < s.head_dim ? size * random.normal() : 0.0f;
        const std::size_t at = std::size_t{p / extent_pages} * s.kv_heads + h;
        int8_t* to = pages.data() + at * PageShape::pages_bytes();
        uint16_t* its_scales = scales.data() + at * page.scales_bytes() / 2;
        cpu.seal_page(page, rows.data(), rows.data() + std::size_t{page.page_tokens} * page.dim,
                      p % extent_pages, to, its_scales, bounds.data());
        cpu.seal_sketch(page, a.data(), to + p % extent_pages * std::size_t{page_bytes},
                        its_scales + p % extent_pages * std::size_t{2} * page.page_tokens,
                        p % extent_pages, sketch.data() + at * page.sketch_bytes());
      }
    }
  }

  const Shape shape;
  const PageShape page;
  const uint32_t extents;
  Shared<int8_t> pages;
  Shared<uint16_t> scales;
  Shared<int8_t> sketch;
  std::vector<float> basis, sinks, centre, window, q, k, v, sink_logits;
};

struct OnDevice {
  explicit OnDevice(const Sequence& t)
      : rows(t.shape.window + t.shape.n), row_size(t.page.dim), first_row(rows * 2 / 3), counts(1),
        budget(1), sketch(t.sketch.size()), sketch_at(t.extents), pages_at(t.extents),
        scales_at(t.extents), basis(t.basis.data(), t.basis.size()),
        sinks(t.sinks.data(), t.sinks.size()), centre(t.centre.data(), t.centre.size()),
        window(rotated(t.window, rows - first_row).data(), t.window.size()),
        q(t.q.data(), t.q.size()), k(t.k.data(), t.k.size()), v(t.v.data(), t.v.size()),
        sink_logits(t.sink_logits.data(), t.sink_logits.size()) {
    const Shape& s = t.shape;
    const DeviceCounts c{.pages = s.pages, .window = s.window, .first_row = first_row};
    const DeviceBudget b{s.least, s.most, s.variance};
    counts.put(&c), budget.put(&b);
    std::vector<uint64_t> at(t.extents), scales(t.extents), sketched(t.extents);
    std::vector<int8_t> its_sketch(t.sketch.size());
    for (uint32_t e = 0; e < t.extents; ++e) {
      at[e] = reinterpret_cast<uint64_t>(t.pages.data() +
                                         std::size_t{e} * s.kv_heads * PageShape::pages_bytes());
      // the last one first
      const std::size_t bytes = s.kv_heads * t.page.sketch_bytes(),
                        place = (t.extents - 1 - e) * bytes;
      std::copy_n(t.sketch.data() + e * bytes, bytes, its_sketch.data() + place);
      sketched[e] = reinterpret_cast<uint64_t>(sketch.data() + place);
      scales[e] = reinterpret_cast<uint64_t>(t.scales.data() + std::size_t{e} * s.kv_heads *
                                                                   t.page.scales_bytes() / 2);
    }
    sketch.put(its_sketch.data()), sketch_at.put(sketched.data()), pages_at.put(at.data()),
        scales_at.put(scales.data());
    kv = {sequence_layer,
          s.kv_heads,
          s.group,
          t.page.head_dim,
          t.page.dim,
          t.page.page_tokens,
          t.page.sketch_dim(),
          counts.data(),
          budget.data(),
          sketch_at.data(),
          pages_at.data(),
          scales_at.data(),
          0,
          0,
          0,
          t.page.sketch_bytes(),
          basis.data(),
          sinks.data(),
          centre.data(),
          window.data(),
          rows,
          s.has_sink_logits ? sink_logits.data() : nullptr};
  }
  // Each head's keys and values rotated, so that row `by` is the first.
  std::vector<float> rotated(std::vector<float> planes, uint32_t by) const {
    const std::size_t plane = std::size_t{rows} * row_size;
    for (auto at = planes.begin(); at != planes.end(); at += static_cast<std::ptrdiff_t>(plane))
      std::rotate(at, at + static_cast<std::ptrdiff_t>(std::size_t{by} * row_size),
                  at + static_cast<std::ptrdiff_t>(plane));
    return planes;
  }
  // [kv_heads][2][rows][dim]
  std::vector<float> window_in_order() {
    const Guarded<float>& now = window.get();
    return rotated({now.data(), now.data() + now.size()}, first_row);
  }

  const uint32_t rows, row_size, first_row;  // of the window
  Memory<DeviceCounts> counts;
  Memory<DeviceBudget> budget;
  Memory<int8_t> sketch;
  Memory<uint64_t> sketch_at, pages_at, scales_at;
  Memory<float> basis, sinks, centre, window, q, k, v, sink_logits;
  DeviceKv kv;
};

struct Work {
  explicit Work(const Sequence& t)
      : rows(std::size_t{t.shape.kv_heads} * t.shape.n * t.shape.group),
        blocks(query_groups(t.shape.n, t.shape.group)),
        selecting_rows(max_selecting_tokens(t.shape.n, blocks) * t.shape.group),
        lists(std::size_t{t.shape.kv_heads} * blocks),
        stride(std::size_t{t.extents} * t.page.extent_quads()),
        most(static_cast<uint32_t>(std::min<std::size_t>(
            t.shape.most + 8 * static_cast<uint32_t>(std::sqrt(t.shape.most)) + 64, stride))),
        q(rows * t.page.dim), q8(rows * t.page.dim), q_scale(rows),
        projected(rows * t.page.sketch_dim()), projected_scale(rows),
        scores(lists * selecting_rows * stride),
        score_sums(lists * selecting_rows * max_score_parts * 2), share_counts(lists * share_bins),
        share_sums(lists * share_bins), thresholds(lists),
        part_counts(lists * ((stride + choose_quads - 1) / choose_quads)), chosen(lists * most),
        biases(lists * most), counts(lists * 2),
        states(rows * attention_parts * (t.page.dim + state_sums)),
        gathered(lists * most * quad_bytes_of(t.page.dim)), out(t.q.size()),
        out_q(out_cols(t) % 32 == 0 ? t.q.size() : 0), out_scale(out_q.size() / 32),
        out_sums(out_q.size() / 16), first_bad(1), lse(rows),
        mass(rows), a{t.shape.n,
                      blocks,
                      selecting_rows,
                      t.extents,
                      most,
                      q.data(),
                      q8.data(),
                      q_scale.data(),
                      projected.data(),
                      projected_scale.data(),
                      scores.data(),
                      score_sums.data(),
                      share_counts.data(),
                      share_sums.data(),
                      thresholds.data(),
                      part_counts.data(),
                      chosen.data(),
                      biases.data(),
                      nullptr,
                      counts.data(),
                      states.data(),
                      t.shape.n > 1 ? gathered.data() : nullptr,
                      {},
                      attention_parts,
                      nullptr,
                      nullptr} {
    constexpr uint32_t none = UINT32_MAX;
    first_bad.put(&none);
    made = {t.shape.n, out_cols(t), out.data()};
    if (out_q.size() > 0)
      made.q = out_q.data(), made.scale = out_scale.data(), made.sums = out_sums.data();
  }
  static uint32_t out_cols(const Sequence& t) {
    return static_cast<uint32_t>(t.q.size() / t.shape.n);
  }
  int finish(const DeviceKv& kv, float limit = 1e30f) {
    return ops().finish_attention(stream(), kv, a, made, {limit, 5, first_bad.data()}, lse.data(),
                                  mass.data());
  }
  // What was rounded is the output, as the CPU rounds it.
  void check_rounded() {
    const Guarded<float>& x = out.get();
    Guarded<int8_t> rounded(out_q.size());
    Guarded<float> scale(out_scale.size());
    Guarded<int16_t> sums(out_sums.size());
    if (out_q.size() > 0)
      cpu_kernels().quantize(x.data(), made.n, made.cols, rounded.data(), scale.data(),
                             sums.data());
    CHECK(std::equal(rounded.data(), rounded.data() + rounded.size(), out_q.get().data()));
    CHECK(std::equal(scale.data(), scale.data() + scale.size(), out_scale.get().data()));
    CHECK(std::equal(sums.data(), sums.data() + sums.size(), out_sums.get().data()));
  }
  std::size_t rows;
  uint32_t blocks, selecting_rows;
  std::size_t lists, stride;
  uint32_t most;
  Memory<float> q;
  Memory<int8_t> q8;
  Memory<float> q_scale;
  Memory<int8_t> projected;
  Memory<float> projected_scale, scores, score_sums;
  Memory<uint32_t> share_counts;
  Memory<unsigned long long> share_sums;
  Memory<float> thresholds;
  Memory<uint32_t> part_counts, chosen;
  Memory<float> biases;
  Memory<uint32_t> counts;
  Memory<float> states;
  Memory<uint8_t> gathered;
  Memory<float> out;
  Memory<int8_t> out_q;
  Memory<float> out_scale;
  Memory<int16_t> out_sums;
  Memory<uint32_t> first_bad;
  Memory<float> lse, mass;
  DeviceAttention a;
  DeviceActivations made;
};

struct Partial {
  std::vector<double> o;
  double m = -HUGE_VAL, l = 0;
};

inline void merge(Partial* a, const Partial& b) {
  const double most = std::max(a->m, b.m), x = a->m == -HUGE_VAL ? 0 : std::exp(a->m - most),
               y = b.m == -HUGE_VAL ? 0 : std::exp(b.m - most);
  for (std::size_t d = 0; d < a->o.size(); ++d) a->o[d] = a->o[d] * x + b.o[d] * y;
  a->l = a->l * x + b.l * y;
  a->m = most;
}

}  // namespace kvasir::test
