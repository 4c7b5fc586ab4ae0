// The mixers of layers on the CPU.
#include <algorithm>
#include <cmath>
#include <string>

#include "engine/cpu_executor.h"

namespace kvasir {

// x += W_o attention(q, k, v);  q, k, v = RoPE(W h)
Status CpuExecutor::attention(uint32_t layer, const float* h) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t width = model_.config().width;
  const float* laurel = altup_ ? altup_->laurel(layer, h) : nullptr;
  project(layer, h);
  if (c.writes_kv) make_values(c);
  rotate(c, q_.get(), c.heads, w.q_norm);
  if (c.writes_kv) rotate(c, k_.get(), c.kv_heads, w.k_norm);
  scale_queries(c);

  attention_->write(*step_, layer, {.q = q_.get(), .k = k_.get(), .v = v_.get()});
  if (step_->step.keys_only) return {};
  RETURN_IF_ERROR(attention_->attend(*step_, layer, q_.get(), a_.get()));

  const uint32_t first = attention_->first_needed(step_->step, layer), n = n_ - first;
  if (c.gates_output) gate_output(c, first);
  multiply(a_.get() + std::size_t{first} * c.q_width(), n, c.q_width(), {{&w.o, h_.get()}});
  add(step_->x + std::size_t{first} * width, w.mixer_post_norm, n);
  if (laurel) add_laurel(laurel, first);
  return {};
}

// x += W_o outputs(attention(q, k, v)), as LatentConfig has them
Status CpuExecutor::latent(uint32_t layer, const float* h) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  latent_->project(*step_, layer, h, q_.get(), k_.get());
  scale_queries(c);
  attention_->write(*step_, layer, {.q = q_.get(), .k = k_.get(), .v = nullptr});
  if (step_->step.keys_only) return {};
  RETURN_IF_ERROR(attention_->attend(*step_, layer, q_.get(), a_.get()));

  const uint32_t first = attention_->first_needed(step_->step, layer), n = n_ - first;
  const float* o = latent_->outputs(*step_, layer, a_.get() + std::size_t{first} * c.q_width(), n);
  multiply(o, n, c.o_width(), {{&w.o, h_.get()}});
  add(step_->x + std::size_t{first} * model_.config().width, w.mixer_post_norm, n);
  return {};
}

// q, k, v = W h, what of them the layer has
void CpuExecutor::project(uint32_t layer, const float* h) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t width = model_.config().width;
  float* q = c.gates_output ? query_gates_.get() : q_.get();
  if (!c.writes_kv) multiply(h, n_, width, {{&w.q, q}});
  else if (c.v_is_k) multiply(h, n_, width, {{&w.q, q}, {&w.k, k_.get()}});
  else multiply(h, n_, width, {{&w.q, q}, {&w.k, k_.get()}, {&w.v, v_.get()}});
  if (!c.gates_output) return;
  by_rows(n_, [&](std::size_t first, uint32_t count) {
    for (std::size_t i = first * c.heads; i < (first + count) * c.heads; ++i)
      std::copy_n(q + 2 * i * c.head_dim, c.head_dim, q_.get() + i * c.head_dim);
  });
}

// Attention's output of tokens [first, n) *= sigmoid(gate)
void CpuExecutor::gate_output(const LayerConfig& c, uint32_t first) {
  by_rows(n_ - first, [&](std::size_t begin, uint32_t count) {
    for (std::size_t i = (first + begin) * c.heads; i < (first + begin + count) * c.heads; ++i)
      kernels_.sigmoid_gate(a_.get() + i * c.head_dim,
                            query_gates_.get() + (2 * i + 1) * c.head_dim, c.head_dim);
  });
}

// x += recurrent(h)
Status CpuExecutor::recurrent(uint32_t layer, const float* h) {
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t first = attention_->first_needed(step_->step, layer);
  const bool good = recurrent_->run(layer, h, first, h_.get());
  add(step_->x + std::size_t{first} * model_.config().width, w.mixer_post_norm, n_ - first);
  return good || cancel_->fired() ? Status() : not_a_number("layer " + std::to_string(layer));
}

// The norm of queries or keys, and RoPE. x: [n_][heads][head_dim].
void CpuExecutor::rotate(const LayerConfig& c, float* x, uint32_t heads,
                         const Array<float>& weight) {
  const ModelConfig& config = model_.config();
  const RopeConfig* rope = c.has_rope() ? &config.ropes[c.rope] : nullptr;
  const uint32_t half = rope ? rope->dim / 2 : 0;
  const std::size_t angles = rope ? std::size_t{n_} * config.angles_before(c.rope) : 0;
  by_rows(n_, [&](std::size_t first, uint32_t count) {
    for (std::size_t t = first; t < first + count; ++t) {
      float* row = x + t * heads * c.head_dim;
      if (!c.qk_norm_after_rope) normalise_heads(c, row, heads, weight);
      const std::size_t at = angles + t * half;
      if (rope)
        kernels_.rope(row, heads, c.head_dim, rope->dim, step_->cos + at, step_->sin + at,
                      rope->neox);
      if (c.qk_norm_after_rope) normalise_heads(c, row, heads, weight);
    }
  });
}

// The norm of one token's queries or keys. row: [heads][head_dim].
void CpuExecutor::normalise_heads(const LayerConfig& c, float* row, uint32_t heads,
                                  const Array<float>& weight) const {
  const float epsilon = model_.config().norm_epsilon;
  switch (c.qk_norm) {
    case QkNorm::none:
      return;
    case QkNorm::plain:
      return kernels_.rms_norm(row, nullptr, epsilon, heads, c.head_dim, row);
    case QkNorm::head:
      return kernels_.rms_norm(row, weight.data(), epsilon, heads, c.head_dim, row);
    case QkNorm::projection:
      return kernels_.rms_norm(row, weight.data(), epsilon, 1, heads * c.head_dim, row);
    case QkNorm::own:
      for (uint32_t h = 0; h < heads; ++h, row += c.head_dim)
        kernels_.layer_norm(row, weight.data() + std::size_t{h} * c.head_dim, nullptr, epsilon, 1,
                            c.head_dim, row);
  }
}

// x = (x + laurel) / sqrt(2)
void CpuExecutor::add_laurel(const float* laurel, uint32_t first) {
  const std::size_t cols = model_.config().width;
  const float half = 1 / std::sqrt(2.0f);
  by_rows(n_ - first, [&](std::size_t begin, uint32_t count) {
    for (std::size_t i = (first + begin) * cols; i < (first + begin + count) * cols; ++i)
      step_->x[i] = (step_->x[i] + laurel[i]) * half;
  });
}

// What values have of their own: the keys in their place, and a norm.
void CpuExecutor::make_values(const LayerConfig& c) {
  if (!c.v_is_k && !c.v_norm) return;
  const std::size_t cols = c.kv_width();
  by_rows(n_, [&](std::size_t first, uint32_t count) {
    float* v = v_.get() + first * cols;
    if (c.v_is_k) std::copy_n(k_.get() + first * cols, count * cols, v);
    if (c.v_norm)
      kernels_.rms_norm(v, nullptr, model_.config().norm_epsilon, count * c.kv_heads, c.head_dim,
                        v);
  });
}

// Factors of the scores go into the queries.
void CpuExecutor::scale_queries(const LayerConfig& c) {
  const Temperature& t = model_.config().temperature;
  const bool varies = c.temperature && t.scale != 0;
  if (c.query_scale == 1 && !varies) return;
  const uint64_t position = step_->position();
  const std::size_t cols = c.q_width();
  by_rows(n_, [&](std::size_t first, uint32_t count) {
    for (std::size_t i = first; i < first + count; ++i) {
      float factor = c.query_scale;
      if (varies) factor *= t.at(position + i);
      float* q = q_.get() + i * cols;
      for (std::size_t d = 0; d < cols; ++d) q[d] *= factor;
    }
  });
}

}  // namespace kvasir
