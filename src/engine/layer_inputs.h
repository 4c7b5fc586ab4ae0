// What each layer of a model gets of each token besides the residual stream (Gemma 3n and 4), from
// its embedding e:
//
//   (norm(W e / sqrt(width)) + sqrt(size) E[token]) / sqrt(2), of each layer
#pragma once

#include <cstdint>

#include "backend/thread_pool.h"
#include "base/memory.h"
#include "engine/cpu_products.h"
#include "engine/step.h"
#include "model/model.h"

namespace kvasir {

class LayerInputs {
 public:
  // All arguments must outlive it.
  LayerInputs(const Model& model, ThreadPool* pool);
  // Makes room for steps of n tokens. Throws std::bad_alloc.
  void resize(uint32_t n);
  // From step.x, the embeddings.
  void make(const StepContext& step);
  // [tokens][depth][size]; null where the model has none.
  const float* get() const { return inputs_.get(); }

 private:
  const Model& model_;
  ThreadPool* const pool_;
  CpuProducts products_;
  uint32_t capacity_ = 0;  // tokens
  Buffer<float> inputs_;
  Buffer<float> embeddings_;  // [threads][layers][layer_input] rows of the table
};

}  // namespace kvasir
