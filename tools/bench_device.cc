// Speed of a GPU's matrix products.
//
//   bench-device [type]      a type's name ("Q4_0"); all without it
//
// Decode: one input with matrices of 14336 x 4096 that together are larger than any cache, in GB of weights (as the file has them) a second, with the
// ratio to a copy within the device's memory (bytes read and written). Prefill: several inputs, in 10^12 operations a second. Medians of seven runs, of
// products that follow one another in a graph, as those of a decoded token do.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/memory.h"
#include "compute/device.h"
#include "compute/kernels.h"

using namespace kvasir;

namespace {

constexpr uint32_t rows = 14336, cols = 4096, matrices = 24, most_inputs = 2048;
constexpr TensorType types[] = {TensorType::f32,  TensorType::f16,  TensorType::bf16, TensorType::q8_0, TensorType::q4_0,
                                TensorType::q4_1, TensorType::q5_0, TensorType::q5_1, TensorType::q2_k, TensorType::q3_k,
                                TensorType::q4_k, TensorType::q5_k, TensorType::q6_k, TensorType::iq4_nl};

struct Bench {
  std::shared_ptr<Device> device;
  DeviceStream* stream = nullptr;
  bool good = true;

  void check(int error) {
    if (error && std::exchange(good, false)) std::fprintf(stderr, "%s\n", device->status(error, "measuring").message());
  }
  const DeviceKernels& ops() const { return device->kernels(); }

  // Of f(i), i = 0 .. matrices - 1, kept as a graph, in seconds each.
  template <class F>
  double median_seconds(F&& f) {
    std::vector<double> seconds;
    DeviceGraph* graph = nullptr;
    check(ops().begin_graph(stream));
    for (uint32_t i = 0; i < matrices; ++i) f(i);
    check(ops().end_graph(stream, &graph));
    for (int run = 0; good && graph && run < 8; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      check(ops().run_graph(stream, graph));
      check(ops().wait(stream));
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / matrices);
    }
    if (graph) check(ops().release_graph(stream, graph));
    if (seconds.empty()) return 1e9;
    seconds.erase(seconds.begin());  // the first one loads kernels
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

struct Inputs {
  DeviceBuffer<float> x, scale, y;
  DeviceBuffer<int8_t> q;
  DeviceBuffer<int16_t> sums;

  bool allocate(const std::shared_ptr<Device>& device) {
    const std::size_t size = std::size_t{most_inputs} * cols;
    return x.allocate(device, size, "inputs").ok() && q.allocate(device, size, "inputs").ok() && scale.allocate(device, size / 32, "inputs").ok() &&
           sums.allocate(device, size / 16, "inputs").ok() && y.allocate(device, std::size_t{most_inputs} * rows, "outputs").ok();
  }
  DeviceActivations view(uint32_t n) const { return {n, cols, x.get(), q.get(), scale.get(), sums.get()}; }
};

// Bytes read and written a second.
double copy_speed(Bench* bench) {
  DeviceBuffer<std::byte> from, to;
  constexpr uint32_t copied_rows = 4 * rows;
  const std::size_t bytes = std::size_t{copied_rows} * cols * sizeof(float);
  if (!from.allocate(bench->device, bytes, "a copy").ok() || !to.allocate(bench->device, bytes, "a copy").ok()) return 0;
  const DeviceMatrix matrix{TensorType::f32, copied_rows, cols, to.get()};  // which is laid out as it is
  return 2 * static_cast<double>(bytes) / bench->median_seconds([&](uint32_t) { bench->check(bench->ops().lay_out(bench->stream, matrix, from.get(), 0, copied_rows)); });
}

void measure(Bench* bench, const Inputs& inputs, TensorType type, double copy) {
  const DeviceKernels& ops = bench->ops();
  const TensorTypeInfo& info = *tensor_type_info(type);
  const std::size_t file_bytes = std::size_t{rows} * cols / info.block_elements * info.block_bytes, bytes = ops.matrix_bytes(type, rows, cols);
  DeviceBuffer<std::byte> file, laid_out;
  if (!file.allocate(bench->device, file_bytes, "weights").ok() || !laid_out.allocate(bench->device, matrices * bytes, "weights").ok()) {
    std::printf("%-7s no memory\n", info.name);
    return;
  }
  // Half-precision numbers of 0x2d2d are small and finite; the quants are then alike, which no kernel here takes another way for.
  const Array<uint8_t> blocks(file_bytes, 0x2d);
  bench->check(ops.upload(bench->stream, file.get(), blocks.data(), file_bytes));
  const auto matrix = [&](uint32_t i) { return DeviceMatrix{type, rows, cols, laid_out.get() + i * bytes}; };
  for (uint32_t i = 0; i < matrices; ++i) bench->check(ops.lay_out(bench->stream, matrix(i), file.get(), 0, rows));
  bench->check(ops.wait(bench->stream));
  const auto seconds = [&](uint32_t n) {
    return bench->median_seconds([&](uint32_t i) { bench->check(ops.matmul(bench->stream, matrix(i), inputs.view(n), nullptr, inputs.y.get(), rows)); });
  };
  const double decode = static_cast<double>(file_bytes) / seconds(1);
  std::printf("%-7s decode %7.1f GB/s  %5.2f x copy   prefill", info.name, decode * 1e-9, decode / copy);
  for (uint32_t n : {8u, 64u, 512u, 2048u}) std::printf("  n %u: %.1f", n, 2e-12 * rows * cols * n / seconds(n));
  std::printf(" T/s\n");
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench;
  if (const Status s = Device::open("cuda", 0, &bench.device); !s.ok()) {
    std::fprintf(stderr, "%s\n", s.message());
    return 1;
  }
  bench.check(bench.ops().open_stream(bench.device->context(), &bench.stream));
  Inputs inputs;
  if (!bench.good || !inputs.allocate(bench.device)) return 1;
  Array<float> x(std::size_t{most_inputs} * cols);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 1000) * 0.001f - 0.5f;
  bench.check(bench.ops().upload(bench.stream, inputs.x.get(), x.data(), x.size() * sizeof(float)));
  bench.check(bench.ops().quantize(bench.stream, inputs.view(most_inputs)));
  const double copy = copy_speed(&bench);
  std::printf("%s: copy %.1f GB/s\n", bench.device->info().name, copy * 1e-9);
  for (TensorType type : types)
    if (bench.good && (argc < 2 || std::strcmp(argv[1], tensor_type_info(type)->name) == 0)) measure(&bench, inputs, type, copy);
  bench.check(bench.ops().close_stream(bench.stream));
  return bench.good ? 0 : 1;
}
