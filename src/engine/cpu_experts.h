// The experts of a layer on the CPU:
//
//   p = gating(W_router x)        the experts that a token uses, and their weights
//   y = sum over them of p_e W_down,e (f(W_gate,e x) * W_up,e x), and the shared expert
//
// The tokens of a step are grouped by expert, so that each expert's weights are read once. One
// parallel loop has the rows of W_gate and W_up of all experts, another one those of W_down: small
// experts leave no thread without work. The shared expert is one more, which every token uses.
//
// A token's result depends on the token and on the number of tokens in the step, not on the other
// tokens or on threads. That number alone selects the method of products. Experts are added in the
// order of their rank.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/kernels.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "engine/expert_routing.h"
#include "model/model.h"

namespace kvasir {

class CpuExperts {
 public:
  // For the layers from first_layer on. All arguments must outlive it.
  CpuExperts(const ModelConfig& model, const Weights& weights, uint32_t first_layer,
             ThreadPool* pool);

  struct Input {
    uint32_t n = 0;                 // tokens
    const float* x = nullptr;       // [n][width]
    const float* routed = nullptr;  // [n][width] the router's input
    float limit = 0;                // of the magnitudes of an expert's inner values
    bool shared = true;             // false: without the shared expert
    bool open = false;              // each token has the bits of one alone
  };
  // Computes out: [n][width], which may be the input. Returns false where the router makes NaN or
  // infinity, or where an inner value is NaN or not below the limit. After a cancel the result has
  // no meaning. Throws std::bad_alloc.
  bool run(uint32_t layer, const Input& input, const CancelLatch& cancel, float* out);

 private:
  struct Matrix {
    WeightView w;
    const float* bias = nullptr;  // [rows], or null
    float scale = 1;              // of the product
  };
  // An expert and its tokens of the step.
  struct Group {
    Matrix gate, up, down;
    Activations input;      // [tokens][width]
    std::size_t first = 0;  // of its rows in rows_
    std::size_t inner = 0;  // of its values in inner_
  };
  // A product: [inputs][cols] to [inputs][rows].
  struct Product {
    uint32_t rows, cols, inputs;
  };
  // Outputs [row, end) of a product, for its inputs [first, first + count).
  struct Task {
    uint32_t product, row, end, first, count;
  };
  struct Quants {
    Buffer<int8_t> q;
    Buffer<float> scale;
    Buffer<int16_t> sums;
    void resize(std::size_t values);
  };

  static Matrix matrix_of(const Linear& linear);
  static Matrix matrix_of(const ExpertMatrices& matrices, uint32_t expert);
  static Activations rows_at(const float* x, const Quants& quants, std::size_t at, uint32_t n,
                             uint32_t cols);

  void resize(uint32_t n);
  void quantize(const float* x);
  // Of the products of all tokens.
  ProductMethod method() const { return open_ ? ProductMethod::few : method_of(n_); }
  void route(const float* x);
  void choose(std::size_t first, uint32_t count, float* scores);
  void weigh_shared(std::size_t first, uint32_t count, const float* x, uint32_t worker);
  void group(const float* x);
  void place();
  void gather(const float* x);
  void inner_task(const Task& task, uint32_t worker, float limit);
  void down_task(const Task& task, uint32_t worker);
  void multiply(const Matrix& m, const Activations& x, const Task& task, float* y, uint32_t worker);
  void combine(std::size_t first, uint32_t count, float* out) const;
  template <class F>
  void by_products(F&& f);
  void cut(const Product& product, uint32_t number, uint64_t even);

  const ModelConfig& model_;
  const Weights& all_weights_;
  const Kernels& kernels_;
  ThreadPool* const pool_;
  const uint32_t width_;
  Array<std::byte> scratch_;      // [threads][scratch of a product]
  std::size_t scratch_size_ = 0;  // of one thread

  // Of the layer and the step.
  const LayerConfig* layer_ = nullptr;
  const ExpertConfig* config_ = nullptr;
  const ExpertWeights* weights_ = nullptr;
  const CancelLatch* cancel_ = nullptr;
  uint32_t n_ = 0;
  bool open_ = false;  // Input::open
  bool has_shared_ = false;
  std::atomic<bool> good_{true};
  std::vector<Group> groups_;  // experts that have tokens
  std::vector<Product> products_;
  std::vector<Task> tasks_;

  // The workspace, for the largest layer.
  uint32_t capacity_ = 0;        // tokens
  Buffer<float> logits_;         // [n][experts]
  Buffer<float> scores_;         // [threads][2 * experts]
  Buffer<ExpertChoice> chosen_;  // [n][used]
  Buffer<float> shared_;         // [n] the weight of the shared expert
  Buffer<uint32_t> slots_;       // [n][used] a chosen expert's row in rows_
  Buffer<uint32_t> ends_;        // [experts] behind the last row of each
  Buffer<float> rows_;           // [n * used + n][width] gathered inputs, then outputs
  Buffer<float> inner_, up_;     // [n * used][expert width], then [n][shared width]
  Quants x_quants_, rows_quants_, inner_quants_;
};

}  // namespace kvasir
