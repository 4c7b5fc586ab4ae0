// Layers with a state of fixed size: engine/cpu_recurrent.h. The GPU computes them in every mode of
// attention; a layer without attention needs no CPU.
#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/cpu_recurrent.h"
#include "engine/gpu_executor.h"

namespace kvasir {

// No step can do without them: all else gives way. Windows come after them, or the CPU attends
// them.
Status GpuExecutor::plan_states(const StepContext& c) {
  if (states_.layers() == 0 || !c.states) return {};
  const uint32_t rows = rows_of(c);
  const auto prepare = [&] { return states_.prepare(c.states, rows, stream_); };
  Status s = prepare();
  while (s.code() == Code::no_memory && release_one()) s = prepare();
  s = or_with_less(std::move(s), std::max(c.tokens(), KvMirror::max_tokens), prepare);
  if (s.code() == Code::no_memory && windows_.holds_memory()) release_windows(), s = prepare();
  return s;
}

Status GpuExecutor::mix_without_attention(uint32_t layer) {
  switch (mode_) {
    case AttentionMode::cpu:
      as_graph(local(layer), [&] {
        if (layer > first_layer()) complete_before(layer);
        enqueue_projection(layer, nullptr);
      });
      return {};
    case AttentionMode::gpu_selective:
      if (!replays_) enqueue_attended(layer);
      return {};
    case AttentionMode::co_execution:
      as_graph(hybrid_part(layer), [&] { enqueue_attended(layer); });
      return {};
    case AttentionMode::gpu_prefill:
      if (layer > first_layer()) check_and_feed_forward(layer - 1, prefill_output(layer - 1));
      enqueue_projection(layer, nullptr);
      return {};
  }
  return {};
}

// The mixer's output stays in the workspace. y: the normalised input.
void GpuExecutor::enqueue_recurrent(uint32_t layer, const DeviceActivations& y) {
  const DeviceWeights::Recurrent& w = weights_of(layer).recurrent;
  const RecurrentConfig& r = config_.recurrent;
  const Workspace::Recurrent& to = work_.recurrent;
  multiply(y, {{&w.in, to.in}, {&w.gate, to.gate}, {&w.alpha, to.alpha}, {&w.beta, to.beta}});
  const bool alone = r.kind == RecurrentKind::convolution;
  enqueue(ops_.convolve(stream_, {.n = n_,
                                  .taps = r.taps,
                                  .channels = r.channels,
                                  .x = to.in,
                                  .factors = alone ? to.beta : nullptr,
                                  .weights = w.convolution.get(),
                                  .bias = w.bias.get(),
                                  .gates = alone ? to.gate : nullptr,
                                  .silu = !alone,
                                  .states = states_.addresses(),
                                  .each = rows_ > 1,
                                  .offset = states_.offset(config_.layer(layer).state),
                                  .y = to.mixed}));
  if (!alone) return enqueue_states(layer);
  // A prefill's last layer goes on with the rows of the logits alone, or with none: what the state
  // keeps of the others would not be checked.
  if (mode_ == AttentionMode::gpu_prefill && layer + 1 == end_layer())
    enqueue(ops_.quantize(stream_, {n_, r.inner(), to.mixed}, check(layer)));
}

// The heads' matrices, and the gates of their output.
void GpuExecutor::enqueue_states(uint32_t layer) {
  const DeviceWeights::Recurrent& w = weights_of(layer).recurrent;
  const RecurrentConfig& r = config_.recurrent;
  const Workspace::Recurrent& to = work_.recurrent;
  const bool delta = r.kind == RecurrentKind::delta_net;
  const uint32_t keys = r.key_heads * r.key_dim;
  const DeviceHeadStates h{.n = n_,
                           .heads = r.heads,
                           .key_heads = r.key_heads,
                           .keys = r.key_dim,
                           .values = r.value_dim,
                           .delta = delta,
                           .cyclic_keys = r.cyclic_keys,
                           .channels = r.channels,
                           // the delta rule: q, k, v; Mamba-2: v, k, q
                           .k_at = delta ? keys : r.inner(),
                           .q_at = delta ? 0 : r.inner() + keys,
                           .v_at = delta ? 2 * keys : 0,
                           .x = to.mixed,
                           .alpha = to.alpha,
                           .beta = to.beta,
                           .factors = w.decay.get(),
                           .biases = w.decay_bias.get(),
                           .skip = w.skip.get(),
                           .epsilon = l2_epsilon,
                           .decay = to.decay,
                           .rate = to.rate,
                           .states = states_.addresses(),
                           .each = rows_ > 1,
                           .offset = states_.offset(config_.layer(layer).state) + r.inputs_size(),
                           .out = to.out};
  enqueue(ops_.prepare_heads(stream_, h));
  enqueue(ops_.advance_heads(stream_, h));
  const uint32_t groups = delta ? r.heads : r.key_heads;
  const DeviceActivations rounded = rounded_gates(w.out);
  const DeviceGatedNorm gated{.rows = n_ * groups,
                              .cols = r.inner() / groups,
                              .x = to.out,
                              .gates = to.gate,
                              .weights = w.norm.get(),
                              .groups_of_weights = delta ? 1 : groups,
                              .gates_first = !delta,
                              .epsilon = config_.norm_epsilon,
                              .q = rounded.q,
                              .scale = rounded.scale,
                              .sums = rounded.sums};
  enqueue(ops_.gate_heads(stream_, gated, check(layer)));
}

// What gate_heads() rounds for W_out; without arrays where it rounds nothing.
DeviceActivations GpuExecutor::rounded_gates(const DeviceWeights::Matrix& out) const {
  const RecurrentConfig& r = config_.recurrent;
  const uint32_t groups = r.kind == RecurrentKind::delta_net ? r.heads : r.key_heads;
  const bool rounds = r.kind != RecurrentKind::convolution && r.inner() / groups % 32 == 0;
  return rounds ? inputs(work_.recurrent.gate, r.inner(), {&out}) : DeviceActivations{};
}

// x += W_out of the mixer's output
void GpuExecutor::add_recurrent(uint32_t layer) {
  const DeviceWeights::Layer& w = weights_of(layer);
  const RecurrentConfig& r = config_.recurrent;
  const bool alone = r.kind == RecurrentKind::convolution;
  float* out =
      (alone ? work_.recurrent.mixed : work_.recurrent.gate) + std::size_t{first_row_} * r.inner();
  DeviceActivations a = inputs(out, r.inner(), {&w.recurrent.out});
  a.f32 = out;
  // The last rows alone come first in the arrays of what is rounded.
  if (first_row_ > 0 || !rounded_gates(w.recurrent.out).q)
    enqueue(ops_.quantize(stream_, a, check(layer)));
  add_product(a, w.recurrent.out, w.mixer_post_norm, layer);
}

}  // namespace kvasir
