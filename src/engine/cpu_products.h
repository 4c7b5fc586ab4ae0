// Products of matrices with a step's activations on the CPU: y = W x + b.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "backend/kernels.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "model/model.h"

namespace kvasir {

class CpuProducts {
 public:
  // The pool must outlive it.
  explicit CpuProducts(ThreadPool* pool) : kernels_(cpu_kernels()), pool_(pool) {}

  // Makes room for a matrix; nothing for one without data. Call for all, then allocate().
  void consider(const WeightView& w);
  // Throws std::bad_alloc.
  void allocate() { scratch_ = make_buffer<std::byte>(scratch_size_ * pool_->threads()); }
  // Makes room for n inputs of at most `widest` columns. Throws std::bad_alloc.
  void resize(uint32_t n, std::size_t widest);
  // For the products of a step. Once the latch has fired, results are meaningless.
  void begin(const CancelLatch& cancel, ProductMethod method = ProductMethod::by_count) {
    cancel_ = &cancel, method_ = method;
  }

  struct Product {
    const Linear* linear;
    float* y;  // [n][rows]
  };
  // Products of matrices that share their input, in one parallel loop over all their rows.
  // x: [n][cols].
  void multiply(const float* x, uint32_t n, uint32_t cols, std::initializer_list<Product> products);

 private:
  void prepare(Activations* x);
  uint32_t rows_of_task(std::initializer_list<Product> products, const Activations& x,
                        uint32_t blocks) const;

  const Kernels& kernels_;
  ThreadPool* const pool_;
  const CancelLatch* cancel_ = nullptr;
  ProductMethod method_ = ProductMethod::by_count;
  Buffer<int8_t> quants_;         // [n][widest input]
  Buffer<float> scales_;          // [n][widest input / 32]
  Buffer<int16_t> sums_;          // [n][widest input / 16]
  Buffer<std::byte> lanes_;       // Kernels::to_lanes of as many inputs as it takes
  Buffer<std::byte> tiles_;       // Kernels::to_tiles of n inputs
  Buffer<std::byte> scratch_;     // [threads][scratch of the largest matrix]
  std::size_t scratch_size_ = 0;  // of one thread
};

}  // namespace kvasir
