// Speed of a GPU: matrix products, prefill attention, decode attention, and the search for the
// nearest keys of an index build.
//
//   bench-device [type]            type: "Q4_0" and others, "attention", "nearest", "attend" [all]
//   bench-device attend TOKENS     one token at the end of TOKENS tokens [131072]: device_attend.cc
//   bench-device attention RATE    RATE: 10^12 operations per second of a library's half-precision
//                                  products, to compare with
//
// Decode: one input with matrices of 14336 x 4096 that together exceed any cache; GB per second of
// weights as stored in the file, and the ratio to a copy within GPU memory (bytes read and
// written). Prefill: several inputs, in 10^12 operations per second. Drafts: the inputs of a step
// with drafts, each with the bits of one alone; the time in units of that of one input. Layer: all
// work of one token in a layer of Llama 3 8B except attention; then the layer's products with the
// 22 inputs of a question, together and each launch alone, where a large cache holds some of the
// weights. Medians of seven runs of consecutive work in a graph, as in decode. Attention: 8 KV
// heads of 128 with 4 query heads each, over pages in GPU memory; two products per score. Nearest:
// the 400 nearest of 131,072 keys of a KV head for each of 16,384 queries, kernels alone and with
// copies, compared with one CPU thread, which must find the same keys.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/device.h"
#include "backend/kernels.h"
#include "backend/page.h"
#include "base/memory.h"
#include "device.h"
#include "select/graph/device_search.h"

using namespace kvasir;

namespace {

constexpr uint32_t rows = 14336, cols = 4096, matrices = Bench::times, max_inputs = 2048,
                   question = 22;

struct Inputs {
  DeviceBuffer<float> x, scale, y;
  DeviceBuffer<int8_t> q;
  DeviceBuffer<int16_t> sums;
  DeviceBuffer<uint32_t> first_bad;

  bool allocate(const std::shared_ptr<Device>& device) {
    const std::size_t size = std::size_t{max_inputs} * cols;
    return x.allocate(device, size, "inputs").ok() && q.allocate(device, size, "inputs").ok() &&
           scale.allocate(device, size / 32, "inputs").ok() &&
           sums.allocate(device, size / 16, "inputs").ok() &&
           first_bad.allocate(device, 1, "inputs").ok() &&
           y.allocate(device, std::size_t{max_inputs} * rows, "outputs").ok();
  }
  DeviceActivations view(uint32_t n) const {
    return {n, cols, x.get(), q.get(), scale.get(), sums.get()};
  }
  DeviceCheck check() const { return {1e30f, 0, first_bad.get()}; }
};

// Bytes read and written per second.
double copy_speed(Bench* bench) {
  DeviceBuffer<std::byte> from, to;
  constexpr uint32_t copied_rows = 4 * rows;
  const std::size_t bytes = std::size_t{copied_rows} * cols * sizeof(float);
  if (!from.allocate(bench->device, bytes, "a copy").ok() ||
      !to.allocate(bench->device, bytes, "a copy").ok())
    return 0;
  // this type needs no other layout
  const DeviceMatrix matrix{TensorType::f32, copied_rows, cols, to.get()};
  return 2 * static_cast<double>(bytes) / bench->median_seconds([&](uint32_t) {
    bench->check(bench->ops().lay_out(bench->stream, matrix, from.get(), 0, copied_rows));
  });
}

// Products of layers with the inputs of a question, with the matrices of measure_layer().
void measure_question(Bench* bench, const Inputs& inputs, std::span<const DeviceMatrix> w,
                      std::size_t layer_bytes, double copy) {
  constexpr uint32_t matrices_of_layer = 7;
  const std::size_t layers = w.size() / matrices_of_layer;
  struct Launch {
    const char* name;
    std::size_t first, count;
    bool add;
  };
  constexpr Launch launches[] = {
      {"qkv", 0, 3, false}, {"o", 3, 1, true}, {"gate+up", 4, 2, false}, {"down", 6, 1, true}};
  const auto give = [&](uint32_t i, const Launch& l) {
    std::array<DeviceProduct, 3> products{};
    float* y = inputs.y.get();
    for (std::size_t m = 0; m < l.count; ++m) {
      products[m] = {w[i % layers * matrices_of_layer + l.first + m], nullptr, y};
      y += std::size_t{question} * products[m].w.rows;
    }
    DeviceActivations x = inputs.view(question);
    x.cols = products[0].w.cols;
    bench->check(bench->ops().matmul(bench->stream, std::span(products).first(l.count), x, l.add));
  };
  const double all = bench->median_seconds([&](uint32_t i) {
    for (const Launch& l : launches) give(i, l);
  });
  const double speed = static_cast<double>(layer_bytes) / all;
  std::printf("%-7s layer  %7.1f GB/s  %5.2f x copy   %.1f us: its products with %u inputs;",
              tensor_type_info(w[0].type)->name, speed * 1e-9, speed / copy, all * 1e6, question);
  for (const Launch& l : launches)
    std::printf("  %s %.1f us", l.name,
                1e6 * bench->median_seconds([&](uint32_t i) { give(i, l); }));
  std::printf("\n");
}

// Work of one token between two attentions: bytes of weights as stored in the file, and seconds.
void measure_layer(Bench* bench, const Inputs& inputs, TensorType type, const std::byte* file,
                   double copy) {
  constexpr uint32_t layers = 4, width = 4096, heads = 32, kv_heads = 8, dim = 128,
                     kv = kv_heads * dim, wide = 14336;
  constexpr std::pair<uint32_t, uint32_t> shapes[] = {{width, width}, {kv, width},   {kv, width},
                                                      {width, width}, {wide, width}, {wide, width},
                                                      {width, wide}};
  const DeviceKernels& ops = bench->ops();
  DeviceBuffer<std::byte> memory;
  std::size_t bytes = 0, file_bytes = 0;
  for (const auto& [its_rows, its_cols] : shapes) {
    bytes += ops.matrix_bytes(type, its_rows, its_cols);
    file_bytes += std::size_t{its_rows} * its_cols / tensor_type_info(type)->block_elements *
                  tensor_type_info(type)->block_bytes;
  }
  if (!memory.allocate(bench->device, layers * bytes, "weights").ok())
    return (void)std::printf("%-7s layer  no memory\n", tensor_type_info(type)->name);
  std::vector<DeviceMatrix> w;
  std::byte* at = memory.get();
  for (uint32_t i = 0; i < layers; ++i)
    for (const auto& [its_rows, its_cols] : shapes) {
      w.push_back({type, its_rows, its_cols, at});
      bench->check(ops.lay_out(bench->stream, w.back(), file, 0, its_rows));
      at += ops.matrix_bytes(type, its_rows, its_cols);
    }
  const bool is_float = tensor_type_info(type)->block_elements == 1;
  float *x = inputs.x.get(), *h = x + wide, *weight = h + wide, *qkv = inputs.y.get(),
        *a = qkv + wide, *gate = a + wide, *up = gate + wide;
  const auto input = [&](float* f32, uint32_t its_cols) {
    return is_float
               ? DeviceActivations{1, its_cols, f32}
               : DeviceActivations{
                     1, its_cols, nullptr, inputs.q.get(), inputs.scale.get(), inputs.sums.get()};
  };
  const double seconds = bench->median_seconds([&](uint32_t i) {
    const DeviceMatrix* layer = &w[i % layers * std::size(shapes)];
    const DeviceCheck check = inputs.check();
    DeviceActivations attended = input(a, width);
    attended.f32 = a;
    const DeviceHeads rotated{.n = 1,
                              .heads = heads,
                              .kv_heads = kv_heads,
                              .head_dim = dim,
                              .qkv = qkv,
                              .epsilon = 1e-5f,
                              .rotary_dim = dim,
                              .cos = weight,
                              .sin = weight};
    const std::array first{DeviceProduct{layer[0], nullptr, qkv},
                           DeviceProduct{layer[1], nullptr, qkv + width},
                           DeviceProduct{layer[2], nullptr, qkv + width + kv}};
    const std::array second{DeviceProduct{layer[4], nullptr, gate},
                            DeviceProduct{layer[5], nullptr, up}};
    const DeviceProduct o{layer[3], nullptr, x}, down{layer[6], nullptr, x};
    bench->check(ops.rms_norm(bench->stream, x, weight, 1e-5f, check, input(h, width)));
    bench->check(ops.matmul(bench->stream, first, input(h, width), false));
    bench->check(ops.rotate(bench->stream, rotated, check));
    bench->check(ops.quantize(bench->stream, attended, check));
    bench->check(ops.matmul(bench->stream, {&o, 1}, attended, true));
    bench->check(ops.rms_norm(bench->stream, x, weight, 1e-5f, check, input(h, width)));
    bench->check(ops.matmul(bench->stream, second, input(h, width), false));
    bench->check(ops.activate(bench->stream, Activation::silu, gate, up, check, input(gate, wide)));
    bench->check(ops.matmul(bench->stream, {&down, 1}, input(gate, wide), true));
  });
  const double speed = static_cast<double>(file_bytes) / seconds;
  std::printf("%-7s layer  %7.1f GB/s  %5.2f x copy   %.1f us\n", tensor_type_info(type)->name,
              speed * 1e-9, speed / copy, seconds * 1e6);
  measure_question(bench, inputs, w, file_bytes, copy);
}

void measure(Bench* bench, const Inputs& inputs, TensorType type, double copy) {
  const DeviceKernels& ops = bench->ops();
  const TensorTypeInfo& info = *tensor_type_info(type);
  const std::size_t file_bytes = std::size_t{rows} * cols / info.block_elements * info.block_bytes,
                    bytes = ops.matrix_bytes(type, rows, cols);
  DeviceBuffer<std::byte> file, laid_out;
  if (!file.allocate(bench->device, file_bytes, "weights").ok() ||
      !laid_out.allocate(bench->device, matrices * bytes, "weights").ok()) {
    std::printf("%-7s no memory\n", info.name);
    return;
  }
  // Half-precision numbers of 0x2d2d are small and finite. All quants are equal, for which no
  // kernel here has another path.
  const Array<uint8_t> blocks(file_bytes, 0x2d);
  bench->check(ops.upload(bench->stream, file.get(), blocks.data(), file_bytes));
  const auto matrix = [&](uint32_t i) {
    return DeviceMatrix{type, rows, cols, laid_out.get() + i * bytes};
  };
  for (uint32_t i = 0; i < matrices; ++i)
    bench->check(ops.lay_out(bench->stream, matrix(i), file.get(), 0, rows));
  bench->check(ops.wait(bench->stream));
  const auto seconds = [&](uint32_t n, bool alone = false) {
    return bench->median_seconds([&](uint32_t i) {
      const DeviceProduct product{matrix(i), nullptr, inputs.y.get()};
      DeviceActivations x = inputs.view(n);
      x.alone = alone;
      bench->check(ops.matmul(bench->stream, {&product, 1}, x, false));
    });
  };
  const double one = seconds(1), decode = static_cast<double>(file_bytes) / one;
  std::printf("%-7s decode %7.1f GB/s  %5.2f x copy   prefill", info.name, decode * 1e-9,
              decode / copy);
  for (uint32_t n : {8u, question, 64u, 512u, 2048u})
    std::printf("  n %u: %.1f", n, 2e-12 * rows * cols * n / seconds(n));
  std::printf(" T/s   drafts");
  for (uint32_t n = 2; n <= max_alone; ++n)
    std::printf("  n %u: %.2f of one", n, seconds(n, true) / one);
  std::printf("\n");
  measure_layer(bench, inputs, type, file.get(), copy);
}

void measure_attention(Bench* bench, uint32_t tokens, uint32_t n, double rate) {
  constexpr uint32_t kv_heads = 8, group = 4;
  constexpr PageShape page = PageShape::of(128);
  const uint32_t pages = (tokens - n) / page.page_tokens,
                 extents = (pages + extent_pages - 1) / extent_pages, q_room = n * group;
  const std::size_t extent_bytes = kv_heads * PageShape::pages_bytes(),
                    scale_bytes = kv_heads * page.scales_bytes();
  const std::size_t width = std::size_t{kv_heads} * group * page.dim,
                    row = std::size_t{kv_heads} * page.dim;
  DeviceBuffer<std::byte> memory;
  DeviceBuffer<uint64_t> at;
  DeviceBuffer<float> q, k, out, lse, q_scale, largest, sinks;
  DeviceBuffer<uint16_t> keys, values, half_q;
  const std::shared_ptr<Device>& device = bench->device;
  const auto take = [&](auto& buffer, std::size_t size) {
    return buffer.allocate(device, size, "attention").ok();
  };
  if (!take(memory, extents * (extent_bytes + scale_bytes)) || !take(at, 2 * extents) ||
      !take(q, n * width) || !take(k, n * row) || !take(out, n * width) ||
      !take(lse, n * kv_heads * group) || !take(q_scale, kv_heads * q_room) ||
      !take(largest, kv_heads * 2) || !take(sinks, 4 * kv_heads * page_bytes) ||
      !take(keys, tokens * row) || !take(values, tokens * row) || !take(half_q, q_room * row)) {
    std::printf("attention: no memory\n");
    return;
  }
  uint32_t seed = 1;
  const auto random = [&] { return (seed = seed * 1664525 + 1013904223) >> 8; };
  Array<std::byte> some(extents * extent_bytes);
  for (std::byte& b : some) b = static_cast<std::byte>(random() % 255 - 127);
  Array<uint16_t> scales(extents * scale_bytes / 2, 0x3c00);  // 1/128
  Array<float> x(n * width);
  for (float& f : x) f = static_cast<float>(random() % 2000) * 0.001f - 1;
  Array<uint64_t> addresses;
  const auto begin = reinterpret_cast<uint64_t>(memory.get());
  for (uint32_t e = 0; e < extents; ++e) addresses.push_back(begin + e * extent_bytes);
  for (uint32_t e = 0; e < extents; ++e)
    addresses.push_back(begin + extents * extent_bytes + e * scale_bytes);
  const DeviceKernels& ops = bench->ops();
  bench->check(ops.upload(bench->stream, memory.get(), some.data(), some.size()));
  bench->check(
      ops.upload(bench->stream, memory.get() + some.size(), scales.data(), extents * scale_bytes));
  bench->check(
      ops.upload(bench->stream, at.get(), addresses.data(), addresses.size() * sizeof(uint64_t)));
  bench->check(ops.upload(bench->stream, q.get(), x.data(), n * width * sizeof(float)));
  bench->check(ops.upload(bench->stream, k.get(), x.data(), n * row * sizeof(float)));
  bench->check(ops.upload(bench->stream, sinks.get(), x.data(),
                          std::min(sinks.bytes(), x.size() * sizeof(float))));
  bench->check(ops.wait(bench->stream));
  const DevicePrefill r{kv_heads,
                        group,
                        128,
                        page.dim,
                        page.page_tokens,
                        n,
                        pages,
                        0,
                        at.get(),
                        at.get() + extents,
                        0,
                        0,
                        sinks.get(),
                        nullptr,
                        nullptr,
                        0,
                        tokens,
                        q_room,
                        keys.get(),
                        values.get(),
                        half_q.get(),
                        q_scale.get(),
                        largest.get()};
  const double prepared = bench->median_seconds([&](uint32_t) {
    bench->check(ops.prepare_prefill(bench->stream, r, q.get(), k.get(), k.get()));
  });
  const double attended = bench->median_seconds(
      [&](uint32_t) { bench->check(ops.attend_prefill(bench->stream, r, out.get(), lse.get())); });
  const double scores = static_cast<double>(n) * kv_heads * group * (tokens - 0.5 * (n - 1)),
               operations = 4e-12 * scores * page.dim / attended;
  std::printf("attention of %4u tokens at the end of %6u: %7.3f ms, %.1f T/s", n, tokens,
              1e3 * attended, operations);
  if (rate > 0) std::printf(", %.2f of %.0f", operations / rate, rate);
  std::printf("; %.3f ms to lay out what it reads\n", 1e3 * prepared);
}

// The nearest keys of `n` queries on the CPU, best first, as in select/graph/ood.cc.
void find_by_processor(const QueryRows& q, uint32_t n, std::span<const PageRef> pages,
                       uint32_t items, uint32_t k, uint32_t* out) {
  constexpr uint32_t batch_rows = 16, batch_pages = 256;
  const Kernels& cpu = cpu_kernels();
  const uint32_t page_tokens = items / static_cast<uint32_t>(pages.size());
  Array<float> scores(std::size_t{batch_rows} * items);
  Array<std::byte> scratch(
      std::max<std::size_t>(cpu.attend_scratch(batch_rows, q.dim), std::size_t{items} * 4));
  for (uint32_t at = 0; at < n; at += batch_rows) {
    const QueryRows some = row_of(q, at, batch_rows);
    for (uint32_t p = 0; p < pages.size(); p += batch_pages)
      cpu.score_tokens(some, pages.data() + p,
                       std::min(batch_pages, static_cast<uint32_t>(pages.size()) - p),
                       scores.data() + std::size_t{p} * page_tokens, items, scratch.data());
    for (uint32_t r = 0; r < batch_rows; ++r, out += k) {
      const float* row = scores.data() + std::size_t{r} * items;
      (void)cpu.top_k(row, items, k, out, scratch.data());
      std::sort(out, out + k, [&](uint32_t a, uint32_t b) {
        return row[a] > row[b] || (row[a] == row[b] && a < b);
      });
    }
  }
}

void measure_nearest(Bench* bench, uint32_t dim) {
  constexpr uint32_t items = 131072, queries = 16384, k = 400, batch = 1024, by_processor = 64;
  const PageShape page = PageShape::of(dim);
  const DeviceKernels& ops = bench->ops();
  uint32_t seed = 1;
  const auto random = [&] { return (seed = seed * 1664525 + 1013904223) >> 8; };
  Array<int8_t> q(std::size_t{queries} * dim), keys(std::size_t{items} * dim),
      data(items / page.page_tokens * std::size_t{page_bytes});
  Array<float> q_scales(queries), scales(items);
  Array<uint16_t> page_scales(std::size_t{items} * 2);
  Array<PageRef> pages;
  for (int8_t& b : q) b = static_cast<int8_t>(random() % 255 - 127);
  for (int8_t& b : keys) b = static_cast<int8_t>(random() % 255 - 127);
  for (float& f : q_scales) f = 1e-4f * static_cast<float>(random() % 1000);
  for (uint32_t i = 0; i < items; ++i) {
    const uint32_t p = i / page.page_tokens, t = i % page.page_tokens;
    const auto scale = static_cast<uint16_t>(0x3c00 + random() % 128);  // from 1/128
    scales[i] = std::bit_cast<float>(uint32_t{scale} << 16);
    page_scales[std::size_t{p} * 2 * page.page_tokens + t] = scale;
    int8_t* to = data.data() + std::size_t{p} * page_bytes + page.key_at(t);
    for (uint32_t d = 0; d < dim; ++d)
      to[d / 4 * PageShape::key_stride + d % 4] = keys[std::size_t{i} * dim + d];
    if (t == 0)
      pages.push_back({data.data() + std::size_t{p} * page_bytes,
                       page_scales.data() + std::size_t{p} * 2 * page.page_tokens,
                       ~uint64_t{0} >> (64 - page.page_tokens)});
  }
  const QueryRows all{queries, dim, nullptr, q.data(), nullptr, q_scales.data()};
  double seconds = 0;
  {
    DeviceBuffer<int8_t> device_q, device_keys;
    DeviceBuffer<float> device_q_scales, device_scales, best;
    DeviceBuffer<uint32_t> nearest;
    const auto take = [&](auto& buffer, std::size_t n) {
      return buffer.allocate(bench->device, n, "nearest keys").ok();
    };
    if (!take(device_q, q.size()) || !take(device_keys, keys.size()) ||
        !take(device_q_scales, queries) || !take(device_scales, items) ||
        !take(best, std::size_t{batch} * nearest_groups(items)) || !take(nearest, batch * k))
      return (void)std::printf("nearest: no memory\n");
    bench->check(ops.upload(bench->stream, device_q.get(), q.data(), q.size()));
    bench->check(ops.upload(bench->stream, device_keys.get(), keys.data(), keys.size()));
    bench->check(
        ops.upload(bench->stream, device_q_scales.get(), q_scales.data(), queries * sizeof(float)));
    bench->check(
        ops.upload(bench->stream, device_scales.get(), scales.data(), items * sizeof(float)));
    bench->check(ops.wait(bench->stream));
    seconds = bench->median_seconds([&](uint32_t i) {
      const std::size_t at = i * batch % queries;
      bench->check(ops.find_nearest(
          bench->stream, {batch, items, dim, k, device_q.get() + at * dim,
                          device_q_scales.get() + at, device_keys.get(), device_scales.get(),
                          nearest_groups(items), best.get(), nearest.get()}));
    });
  }
  DeviceSearch search(bench->device);
  Array<uint32_t> found, expected(by_processor * k);
  const CancelLatch never(nullptr);
  const auto clock = [] { return std::chrono::steady_clock::now(); };
  const auto since = [&](auto begin) {
    return std::chrono::duration<double>(clock() - begin).count();
  };
  // the first run allocates
  bool good = search.find({keys.data(), scales.data(), items, true}, all, k, never, &found);
  auto begin = clock();
  good = good && search.find({keys.data(), scales.data(), items, true}, all, k, never, &found);
  const double whole = since(begin);
  begin = clock();
  find_by_processor(all, by_processor, pages, items, k, expected.data());
  const double processor = since(begin) / by_processor;
  good = good && std::equal(expected.begin(), expected.end(), found.begin());
  bench->good = bench->good && good;
  const double rate = batch / seconds;
  std::printf(
      "nearest of dim %3u: %6.3f M queries/s, %6.1f T/s, %.2f ms for %u; with copies %.2f ms, %.0f "
      "x a thread of the CPU (%.0f queries/s, %s)%s\n",
      dim, 1e-6 * rate, 2e-12 * rate * items * dim, 1e3 * queries / rate, queries, 1e3 * whole,
      queries / whole * processor, 1 / processor, cpu_kernels().name, good ? "" : ": NOT THE SAME");
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench;
  std::vector<int> found;
  Status s = Device::find("cuda", &found);
  if (s.ok()) s = Device::open(found[0], 0, 1, &bench.device);
  if (!s.ok()) {
    std::fprintf(stderr, "%s\n", s.message());
    return 1;
  }
  bench.check(bench.ops().open_stream(bench.device->context(), &bench.stream));
  Inputs inputs;
  if (!bench.good || !inputs.allocate(bench.device)) return 1;
  Array<float> x(std::size_t{max_inputs} * cols);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(i * 7919 % 1000) * 0.001f - 0.5f;
  bench.check(bench.ops().upload(bench.stream, inputs.x.get(), x.data(), x.size() * sizeof(float)));
  // a layer reads buffers that no product has written
  bench.check(bench.ops().upload(bench.stream, inputs.y.get(), x.data(), x.size() * sizeof(float)));
  bench.check(bench.ops().quantize(bench.stream, inputs.view(max_inputs), inputs.check()));
  const std::string only = argc > 1 ? argv[1] : "";
  if (only.empty() || only == "attention")
    for (const uint32_t tokens : {8192u, 32768u, 131072u})
      for (const uint32_t n : {256u, 512u, 1024u, 2048u})
        if (bench.good)
          measure_attention(&bench, tokens, n, argc > 2 ? std::strtod(argv[2], nullptr) : 0);
  if (only.empty() || only == "nearest")
    for (const uint32_t dim : {64u, 128u})
      if (bench.good) measure_nearest(&bench, dim);
  const double copy = copy_speed(&bench);
  std::printf("%s: copy %.1f GB/s\n", bench.device->info().name, copy * 1e-9);
  if (bench.good && (only.empty() || only == "attend"))
    measure_attend(&bench,
                   argc > 2 ? static_cast<uint32_t>(
                                  std::clamp(std::strtol(argv[2], nullptr, 10), 4096l, 1l << 22))
                            : 131072,
                   copy);
  for (uint32_t id = 0; const char* name = tensor_type_name(id); ++id)
    if (const auto type = static_cast<TensorType>(id);
        bench.good && tensor_type_info(type) && (only.empty() || only == name))
      measure(&bench, inputs, type, copy);
  bench.check(bench.ops().close_stream(bench.stream));
  return bench.good ? 0 : 1;
}
