#include "engine/layer_inputs.h"

#include <algorithm>
#include <cmath>

#include "engine/cpu_tasks.h"

namespace kvasir {

LayerInputs::LayerInputs(const Model& model, ThreadPool* pool)
    : model_(model), pool_(pool), products_(pool) {
  if (model.config().layer_input == 0) return;
  products_.consider(model.weights().input_projection.w);
  products_.allocate();
}

void LayerInputs::resize(uint32_t n) {
  const ModelConfig& c = model_.config();
  if (n <= capacity_ || c.layer_input == 0) return;
  capacity_ = 0, inputs_ = {};  // never old and new together
  inputs_ = make_buffer<float>(std::size_t{n} * c.depth() * c.layer_input);
  if (!embeddings_)
    embeddings_ = make_buffer<float>(std::size_t{pool_->threads()} * c.depth() * c.layer_input);
  products_.resize(n, c.width);
  capacity_ = n;
}

void LayerInputs::make(const StepContext& step) {
  const ModelConfig& c = model_.config();
  if (c.layer_input == 0) return;
  const Kernels& kernels = cpu_kernels();
  const Weights& w = model_.weights();
  const uint32_t size = c.layer_input, n = step.tokens();
  const std::size_t cols = std::size_t{c.depth()} * size;
  products_.begin(step.cancel, step.product_method());
  products_.multiply(step.x, n, c.width, {{&w.input_projection, inputs_.get()}});
  const float projected = 1 / std::sqrt(static_cast<float>(c.width)),
              embedded = std::sqrt(static_cast<float>(size)), both = 1 / std::sqrt(2.0f);
  for_blocks(pool_, step.cancel, 0, n, [&](std::size_t first, uint32_t count, uint32_t worker) {
    float* embedding = embeddings_.get() + worker * cols;
    for (std::size_t t = first; t < first + count; ++t) {
      float* inputs = inputs_.get() + t * cols;
      for (std::size_t i = 0; i < cols; ++i) inputs[i] *= projected;
      kernels.rms_norm(inputs, w.input_norm.weight.data(), c.norm_epsilon, c.depth(), size, inputs);
      kernels.dequantize_row(w.input_embedding, static_cast<uint32_t>(step.step.tokens[t]),
                             embedding);
      for (std::size_t i = 0; i < cols; ++i)
        inputs[i] = (inputs[i] + embedded * embedding[i]) * both;
    }
  });
}

}  // namespace kvasir
