// Latent attention on the CPU, but for attention itself: LatentConfig has the equations.
//
// Each head has two small matrices of its own. Where the file has W_kh transposed, its rows are
// unpacked and combined (Kernels::multiply). A token's result depends on the token and on the
// number of tokens in the step, as that of every product does, not on threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/kernels.h"
#include "backend/thread_pool.h"
#include "base/memory.h"
#include "engine/cpu_products.h"
#include "engine/step.h"
#include "model/model.h"

namespace kvasir {

class CpuLatent {
 public:
  // For the layers from first_layer on. All arguments must outlive it. Makes room in `products`,
  // which the caller allocates afterwards. Throws std::bad_alloc.
  CpuLatent(const Model& model, uint32_t first_layer, ThreadPool* pool, CpuProducts* products);

  // Makes room for steps of n tokens. Throws std::bad_alloc.
  void resize(uint32_t n);
  // Columns of the widest input to `products`, besides the model's width.
  std::size_t widest() const { return widest_; }

  // Of all tokens, from the normalised stream h: [n][width]. q: [n][heads][rank + rotated];
  // k: [n][rank + rotated].
  void project(const StepContext& step, uint32_t layer, const float* h, float* q, float* k);
  // Returns the outputs of the heads, [n][heads][values], valid until the next call.
  // attended: [n][heads][rank + rotated].
  const float* outputs(const StepContext& step, uint32_t layer, const float* attended, uint32_t n);

 private:
  // Scratch of a thread, for a block of tokens and a head.
  struct Worker {
    Buffer<float> rows;     // [tokens][plain or rank] inputs of a product
    Buffer<int8_t> quants;  // the same, quantised
    Buffer<float> scales;
    Buffer<int16_t> sums;
    Buffer<float> absorbed;          // [tokens][rank]
    Buffer<float> weights;           // [plain][rank] of a head
    const void* unpacked = nullptr;  // the matrix in `weights`
    Buffer<std::byte> product;
  };
  // Tokens [first, first + count), and a head.
  struct Task {
    uint32_t head, first, count;
    ProductMethod method;
  };

  void make_keys(const StepContext& step, uint32_t layer, float* queries, float* keys);
  void absorb(const LayerConfig& c, const ExpertMatrices& keys, const Task& task, float* q,
              Worker* w) const;
  void multiply(const WeightView& weights, const Task& task, float* y, std::size_t stride,
                Worker* w) const;
  template <class F>
  void by_heads(const StepContext& step, uint32_t heads, uint32_t n, F&& f);

  const Model& model_;
  const ModelConfig& config_;
  const Kernels& kernels_;
  ThreadPool* const pool_;
  CpuProducts* const products_;
  std::vector<Worker> workers_;  // [threads]
  uint32_t capacity_ = 0;        // tokens that the arrays below hold
  Buffer<float> low_;            // [n][query_rank]
  Buffer<float> queries_;        // [n][heads][plain + rotated]
  Buffer<float> outputs_;        // [n][heads][values]
  // Of all layers, the largest.
  std::size_t widest_ = 0, low_width_ = 0, queries_width_ = 0, outputs_width_ = 0;
};

}  // namespace kvasir
