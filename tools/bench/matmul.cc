// Speed of the matrix product of every instruction set of this CPU, on one thread.
//
//   bench-matmul [table [type]]      a table ("avx2"), a type ("Q4_0") [all]
//
// Prefill: 512 inputs, in 10^9 multiply-adds per second, with the ratio to the scalar table
// (measured on 16 inputs). Decode: one input with a matrix larger than any cache, in GB of weights
// per second, with the ratio to a plain read of the same bytes. Each figure is the best of several
// runs.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>

#include "backend/kernels.h"
#include "base/memory.h"

using namespace kvasir;

namespace {

struct Shape {
  uint32_t rows, cols;
};

constexpr Shape prefill_shapes[] = {{2048, 2048}, {8192, 2048}, {2048, 8192},
                                    {384, 384},   {1024, 384},  {384, 1024}};
constexpr std::size_t decode_bytes = std::size_t{192} << 20;

// CPU time, which other programs disturb less.
double now() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

template <class F>
double best_seconds(int runs, F&& f) {
  double best = 1e9;
  for (int i = 0; i < runs; ++i) {
    const double begin = now();
    f();
    best = std::min(best, now() - begin);
  }
  return best;
}

struct Matrix {
  Matrix(TensorType type, uint32_t rows, uint32_t cols) {
    const TensorTypeInfo& info = *tensor_type_info(type);
    const std::size_t row_bytes = std::size_t{cols / info.block_elements} * info.block_bytes;
    // Multiplication takes the same time for all bits. Half-precision numbers of 0x2d2d are small
    // and finite.
    bytes.assign(rows * row_bytes, 0x2d);
    view = {reinterpret_cast<const std::byte*>(bytes.data()), type, rows, cols, row_bytes};
  }
  Array<uint8_t> bytes;
  WeightView view;
};

struct Inputs {
  Inputs(const Kernels& k, uint32_t n, uint32_t cols)
      : x(std::size_t{n} * cols), q(x.size()), scale(x.size() / 32),
        sums(x.size() / 16), view{n, cols, x.data(), q.data(), scale.data(), sums.data()} {
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<float>(i * 7919 % 1000) * 0.001f - 0.5f;
    k.quantize(x.data(), n, cols, q.data(), scale.data(), sums.data());
  }
  Array<float> x;
  Array<int8_t> q;
  Array<float> scale;
  Array<int16_t> sums;
  Activations view;
};

double product_seconds(const Kernels& k, const WeightView& w, uint32_t n, int runs,
                       ProductMethod method = ProductMethod::by_count) {
  Inputs x(k, n, w.cols);
  x.view.method = method;
  Array<std::byte> lanes(k.lane_bytes(n, w.cols));
  if (method == ProductMethod::few && !lanes.empty()) {
    k.to_lanes(x.view, 0, n, lanes.data());
    x.view.lanes = lanes.data();
  }
  Array<std::byte> tiles(method == ProductMethod::tiles ? k.tile_bytes(n, w.cols) : 0);
  if (!tiles.empty()) {
    for (uint32_t i = 0; i < n; i += 16) k.to_tiles(x.view, i, std::min(n - i, 16u), tiles.data());
    x.view.tiles = tiles.data();
  }
  Array<float> y(std::size_t{n} * w.rows);
  Array<std::byte> scratch(k.matmul_scratch(w.type, method));
  return best_seconds(runs,
                      [&] { k.matmul(w, x.view, y.data(), w.rows, 0, w.rows, scratch.data()); });
}

// Speed with many inputs. Uses tiles if the table has them.
double giga_macs(const Kernels& k, const Matrix& w, uint32_t n, int runs) {
  const bool tiles =
      k.tile_bytes(n, w.view.cols) > 0 && tensor_type_info(w.view.type)->block_elements > 1;
  const ProductMethod method = tiles ? ProductMethod::tiles : ProductMethod::many;
  return 1e-9 * w.view.rows * w.view.cols * n / product_seconds(k, w.view, n, runs, method);
}

// A search for an absent byte: the widest loads of the C library and nothing else.
double read_seconds(const uint8_t* p, std::size_t bytes) {
  const void* volatile found = nullptr;
  return best_seconds(5, [&] { found = std::memchr(p, 0, bytes); });
}

void bench_prefill(const Kernels& k, TensorType type, const char* name) {
  for (const Shape shape : prefill_shapes) {
    if (shape.cols % tensor_type_info(type)->block_elements != 0) continue;
    const Matrix w(type, shape.rows, shape.cols);
    const int runs = shape.rows < 2048 ? 20 : 3;
    const double scalar =
        giga_macs(*cpu_kernels_by_name("scalar"), Matrix(type, 64, shape.cols), 16, 3);
    const bool is_scalar = &k == cpu_kernels_by_name("scalar");
    for (const uint32_t n : {16u, 64u, 512u}) {
      const double speed = giga_macs(k, w, n, is_scalar ? 1 : runs);
      std::printf("%-12s %-7s prefill %5u x %-5u n %3u %8.1f GMAC/s  %6.1f x scalar\n", k.name,
                  name, shape.rows, shape.cols, n, speed, speed / scalar);
    }
  }
}

void bench_decode(const Kernels& k, TensorType type, const char* name) {
  constexpr uint32_t cols = 2048;
  const TensorTypeInfo& info = *tensor_type_info(type);
  const Matrix w(
      type, static_cast<uint32_t>(decode_bytes / (cols / info.block_elements * info.block_bytes)),
      cols);
  const double bytes = 1e-9 * static_cast<double>(w.bytes.size()),
               read = bytes / read_seconds(w.bytes.data(), w.bytes.size());
  for (const ProductMethod method : {ProductMethod::few, ProductMethod::many})
    for (const uint32_t n : {1u, 2u, 3u, 4u, 6u, 8u, 12u, 16u}) {
      const double speed = bytes / product_seconds(k, w.view, n, 3, method);
      std::printf("%-12s %-7s decode  n %2u %s %14.1f GB/s    %6.2f x streaming read\n", k.name,
                  name, n, method == ProductMethod::few ? "few " : "many", speed, speed / read);
    }
}

}  // namespace

int main(int argc, char** argv) {
  for (uint32_t i = 0; const Kernels* k = cpu_kernels_at(i); ++i) {
    if (argc > 1 && std::strcmp(argv[1], k->name) != 0) continue;
    for (uint32_t id = 0; const char* name = tensor_type_name(id); ++id) {
      const auto type = static_cast<TensorType>(id);
      if (!tensor_type_info(type) || (argc > 2 && std::strcmp(argv[2], name) != 0)) continue;
      bench_prefill(*k, type, name);
      bench_decode(*k, type, name);
    }
  }
  return 0;
}
