// Alternating updates (AltUp, arXiv 2301.13310) and the low-rank residual (LAuReL, arXiv
// 2411.07501) of Gemma 3n. A token has several streams. A layer predicts all of them, computes on
// one, and corrects all by what it made of that one:
//
//   X'_i = X_i + sum_j P_ij(X_0) X_j
//   b = (attention(y) + X'_0 + laurel(y)) / sqrt(2),  y = norm(X'_0);  b += ffn(norm(b))
//   X_i = X'_i + (C_i(b) + 1) (b - X'_0)
//
// Stream 0 is the residual stream of the executor; the others are here.
#pragma once

#include <cstdint>

#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "engine/cpu_products.h"
#include "model/model.h"

namespace kvasir {

class AltUp {
 public:
  // All arguments must outlive it.
  AltUp(const Model& model, ThreadPool* pool, CpuProducts* products);

  // Makes room for steps of n tokens. Throws std::bad_alloc.
  void resize(uint32_t n);
  // Makes the streams of n tokens from their embeddings x: [n][width].
  void begin(const float* x, uint32_t n, const CancelLatch& cancel);
  // Predicts the streams of a layer. x becomes X'_0.
  void predict(uint32_t layer, float* x);
  // laurel(y) of the layer's normalised input y: [n][width]. The result lives until correct().
  const float* laurel(uint32_t layer, const float* y);
  // Corrects the streams of tokens [first, n) by x, which becomes X_0.
  void correct(uint32_t layer, uint32_t first, float* x);
  // Adds g: [n - first][width] to the streams besides X_0.
  void add(uint32_t first, const float* g);
  // X_0 of tokens [first, n), scaled by the layer's own weights, into y: [n - first][width].
  void scale(uint32_t layer, uint32_t first, const float* x, float* y);
  // x, X_0 of tokens [first, n), becomes the mean of the streams.
  void merge(uint32_t first, float* x);

 private:
  float* stream(uint32_t i) { return streams_.get() + std::size_t{i - 1} * capacity_ * width_; }
  void route(uint32_t layer, const float* x, uint32_t n);

  const Model& model_;
  const Kernels& kernels_;
  ThreadPool* const pool_;
  CpuProducts* const products_;
  const uint32_t width_, count_;  // streams
  const CancelLatch* cancel_ = nullptr;
  uint32_t n_ = 0, capacity_ = 0;
  Buffer<float> streams_;    // [count - 1][capacity][width]
  Buffer<float> predicted_;  // [n][width] X'_0
  Buffer<float> h_;          // [n][width]
  Buffer<float> low_;        // [n][rank]
  Buffer<float> laurel_;     // [n][width]
  Buffer<float> routed_;     // [n][count]
};

}  // namespace kvasir
