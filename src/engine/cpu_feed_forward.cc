// The networks of layers on the CPU, and the end of a layer.
#include <algorithm>
#include <cmath>
#include <string>

#include "engine/cpu_executor.h"

namespace kvasir {

// Gate values become what they exceed the mean by more than `scale` standard deviations, or 0.
static void thin_out_gates(float* gate, std::size_t n, float scale) {
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < n; ++i) sum += double{gate[i]};
  const double mean = sum / static_cast<double>(n);
  for (std::size_t i = 0; i < n; ++i)
    squares += (double{gate[i]} - mean) * (double{gate[i]} - mean);
  const double deviation = std::sqrt(squares / static_cast<double>(n));
  const auto threshold = static_cast<float>(mean + double{scale} * deviation);
  for (std::size_t i = 0; i < n; ++i) gate[i] = std::max(gate[i] - threshold, 0.0f);
}

// x += network(h);  h = norm(x), or the mixer's input of a parallel layer
Status CpuExecutor::feed_forward(uint32_t layer) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t width = model_.config().width;
  if (step_->step.keys_only) return cancel_->fired() ? Status() : check_layer(layer, n_);
  const uint32_t first = attention_->first_needed(step_->step, layer), n = n_ - first;
  float* x = step_->x + std::size_t{first} * width;
  if (!c.has_feed_forward()) return cancel_->fired() ? Status() : check_layer(layer, first);
  const float* h =
      c.is_parallel() ? y_.get() + std::size_t{first} * width : norm(x, w.ffn_norm, n, h_.get());
  if (c.has_dense()) dense(layer, h, n);
  if (c.has_experts() && c.has_dense()) RETURN_IF_ERROR(add_experts(layer, x, n));
  else if (c.has_experts()) RETURN_IF_ERROR(experts(layer, {n, h, h}, h_.get()));
  add(x, w.ffn_post_norm, n);
  finish_layer(layer, first);
  return cancel_->fired() ? Status() : check_layer(layer, first);
}

// h_ = W_down (f(W_gate h) * W_up h)
void CpuExecutor::dense(uint32_t layer, const float* h, uint32_t n) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t width = model_.config().width;
  if (c.gated) multiply(h, n, width, {{&w.gate, gate_.get()}, {&w.up, up_.get()}});
  else multiply(h, n, width, {{&w.up, gate_.get()}});
  activate(c, n);
  multiply(gate_.get(), n, c.feed_forward, {{&w.down, h_.get()}});
}

Status CpuExecutor::experts(uint32_t layer, CpuExperts::Input input, float* out) {
  input.limit = too_large, input.open = step_->step.open;
  const bool good = experts_->run(layer, input, *cancel_, out);
  return good || cancel_->fired() ? Status() : not_a_number("layer " + std::to_string(layer));
}

// h_ = norm(h_) + norm(experts(norm(x))); h_ holds the output of the dense network.
Status CpuExecutor::add_experts(uint32_t layer, const float* x, uint32_t n) {
  const ExpertWeights& w = model_.weights().layers[layer].experts;
  const std::size_t cols = model_.config().width;
  float *const y = y_.get(), *const routed = y + n * cols;
  by_rows(n, [&](std::size_t first, uint32_t count) {
    const std::size_t at = first * cols;
    normalise(h_.get() + at, w.dense_norm, count, h_.get() + at);
    normalise(x + at, w.router_norm, count, routed + at);
    normalise(x + at, w.input_norm, count, y + at);
  });
  RETURN_IF_ERROR(experts(layer, {n, y, routed}, y));
  by_rows(n, [&](std::size_t first, uint32_t count) {
    const std::size_t at = first * cols;
    normalise(y + at, w.output_norm, count, y + at);
    kernels_.add(h_.get() + at, y + at, count * cols);
  });
  return {};
}

void CpuExecutor::activate(const LayerConfig& c, uint32_t n) {
  const std::size_t cols = c.feed_forward;
  by_rows(n, [&](std::size_t first, uint32_t count) {
    if (c.sparsity > 0)
      for (std::size_t t = first; t < first + count; ++t)
        thin_out_gates(gate_.get() + t * cols, cols, c.sparsity);
    kernels_.activate(c.activation, gate_.get() + first * cols,
                      c.gated ? up_.get() + first * cols : nullptr, count * cols);
  });
}

// h_ goes to the stream, or to the streams that the layer does not compute on.
void CpuExecutor::add_layer_input(float* x, const Norm& post_norm, uint32_t n, uint32_t first) {
  if (!altup_) return add(x, post_norm, n);
  by_rows(n, [&](std::size_t begin, uint32_t count) {
    float* h = h_.get() + begin * model_.config().width;
    normalise(h, post_norm, count, h);
  });
  altup_->add(first, h_.get());
}

// x += norm(W_out (gelu(W_gate x) * the layer's input)), then the factor of the layer's output.
void CpuExecutor::finish_layer(uint32_t layer, uint32_t first) {
  const ModelConfig& c = model_.config();
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t n = n_ - first, size = c.layer_input;
  float* x = step_->x + std::size_t{first} * c.width;
  const float* input = x;
  if (altup_) {
    altup_->correct(layer, first, x);
    altup_->scale(layer, first, x, h_.get());
    input = h_.get();
  }
  if (size > 0) {
    multiply(input, n, c.width, {{&w.input_gate, gate_.get()}});
    by_rows(n, [&](std::size_t begin, uint32_t count) {
      for (std::size_t t = begin; t < begin + count; ++t)
        kernels_.activate(Activation::gelu, gate_.get() + t * size,
                          step_->layer_inputs + ((first + t) * c.depth() + layer) * size, size);
    });
    multiply(gate_.get(), n, size, {{&w.input_out, h_.get()}});
    add_layer_input(x, w.input_norm, n, first);
  }
  if (w.output_scale.empty()) return;
  by_rows(n, [&](std::size_t begin, uint32_t count) {
    for (std::size_t i = begin * c.width; i < (begin + count) * c.width; ++i)
      x[i] *= w.output_scale[0];
  });
}

}  // namespace kvasir
