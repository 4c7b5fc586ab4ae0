// Layers with experts. The GPU computes the shared expert and a dense network besides experts. It
// computes the routed experts where DeviceWeights has them; no layer waits for the CPU then.
// Otherwise the CPU computes them at the same time: the residual stream comes to host memory, and
// the experts' outputs go to the GPU.
#include <algorithm>
#include <array>
#include <limits>

#include "base/checked.h"
#include "base/magnitude.h"
#include "engine/gpu_executor.h"
#include "gguf/limits.h"

namespace kvasir {
namespace {

bool is_float(const DeviceMatrix& m) { return tensor_type_info(m.type)->block_elements == 1; }

DeviceRouting routing_of(const ExpertConfig& c, const DeviceWeights::Experts::Routed& w) {
  static_assert(DeviceRouting::max_experts == gguf_limits::experts);
  return {.experts = c.count,
          .used = c.used,
          .groups = c.groups,
          .groups_used = c.groups_used,
          .gating = c.gating,
          .normalise = c.normalise,
          .chooses_by_logits = c.chooses_by_logits,
          .scale = c.scale,
          .bias = w.selection_bias.get()};
}

DeviceExpertProduct product_of(const DeviceWeights::ExpertMatrices& m, float* y) {
  return {m.w, m.biases.get(), m.scales.get(), y};
}

}  // namespace

// Where the inputs of these matrices go: [n][cols]. f32: where floats are.
DeviceActivations GpuExecutor::expert_inputs(
    uint32_t n, std::size_t cols, float* f32,
    std::initializer_list<const DeviceMatrix*> matrices) const {
  DeviceActivations to{n, static_cast<uint32_t>(cols)};
  for (const DeviceMatrix* m : matrices) {
    if (m->data && is_float(*m)) to.f32 = f32;
    if (m->data && !is_float(*m))
      to.q = experts_work_.quants, to.scale = experts_work_.scales, to.sums = experts_work_.sums;
  }
  return to;
}

// x += experts(norm(x)), with what the layer has besides.
void GpuExecutor::enqueue_experts(uint32_t layer) {
  const LayerConfig& c = config_.layer(layer);
  const DeviceWeights::Layer& w = weights_of(layer);
  const DeviceWeights::Experts& e = w.experts;
  const DeviceWeights::Experts::Routed& routed = routed_of(layer);
  const bool here = routed.are_here(), shared = c.experts.shared_width > 0;
  if (!here) enqueue_host_copy();
  if (c.has_dense()) multiply(enqueue_gated(layer), {{&w.down, experts_work_.dense}});
  DeviceActivations h;
  if (here && c.has_dense()) {
    h = expert_norm(e.router_norm.get(), layer);
    enqueue_routers(layer, h, true, false);
    h = expert_norm(e.input_norm.get(), layer);
    enqueue_routers(layer, h, false, shared);
  } else if (here || shared) {
    h = expert_norm(w.ffn_norm.weight.get(), layer);
    enqueue_routers(layer, h, here, shared);
  }
  if (here) enqueue_routed(layer, h);
  if (error_) return;
  if (shared && !joins_shared(layer)) enqueue_shared(layer, h);
  if (!here) experts_status_ = run_experts(layer);
  enqueue_sum(layer);
}

// Whether the shared expert goes through the products of the routed ones, as one choice more of
// each token: those of one token take longer to begin than to compute.
bool GpuExecutor::joins_shared(uint32_t layer) const {
  const LayerConfig& c = config_.layer(layer);
  const DeviceWeights::Experts& e = weights_of(layer).experts;
  const DeviceWeights::Experts::Routed& r = routed_of(layer);
  return r.are_here() && expert_rows(layer).in_order() && c.gated && !c.experts.weighs_input &&
         c.experts.shared_width == c.experts.width && r.gate.w.type == r.up.w.type &&
         r.gate.w.type == e.shared_gate.w.type && r.up.w.type == e.shared_up.w.type &&
         r.down.w.type == e.shared_down.w.type && !e.shared_gate.bias.get() &&
         !e.shared_up.bias.get() && !e.shared_down.bias.get();
}

// The norm of the residual stream, as the input of all that experts have.
DeviceActivations GpuExecutor::expert_norm(const float* weight, uint32_t layer) {
  const DeviceWeights::Experts& e = weights_of(layer).experts;
  DeviceActivations out{n_, config_.width, work_.h};  // of the shared expert's gate, and checks
  const DeviceWeights::Experts::Routed& routed = routed_of(layer);
  for (const DeviceMatrix* m :
       {&routed.router.w, &routed.gate.w, &routed.up.w, &e.shared_gate.w, &e.shared_up.w})
    if (m->data && !is_float(*m))
      out.q = work_.quants, out.scale = work_.scales, out.sums = work_.sums;
  enqueue(ops_.rms_norm(stream_, work_.x, weight, config_.norm_epsilon, check(layer), out));
  return out;
}

DeviceExpertRows GpuExecutor::expert_rows(uint32_t layer) const {
  if (!routed_of(layer).are_here()) return {.n = n_, .used = 1, .experts = 1};
  const ExpertConfig& c = config_.layer(layer).experts;
  const ExpertWorkspace& to = experts_work_;
  DeviceExpertRows rows{.n = n_, .used = c.used, .experts = c.count, .chosen = to.chosen};
  if (n_ > 1 && !open_)
    rows.row_of = to.row_of, rows.choice_of = to.choice_of, rows.tiles = to.tiles;
  return rows;
}

// The logits of the routed experts, and the gate of the shared one.
void GpuExecutor::enqueue_routers(uint32_t layer, const DeviceActivations& h, bool routed,
                                  bool shared) {
  const DeviceWeights::Experts& e = weights_of(layer).experts;
  std::array<DeviceProduct, 2> products;
  std::size_t count = 0;
  if (routed) {
    const DeviceWeights::Matrix& router = routed_of(layer).router;
    products[count++] = {router.w, router.bias.get(), experts_work_.logits};
  }
  if (shared && e.shared_router.get()) {
    const DeviceMatrix row{TensorType::f32, 1, config_.width,
                           reinterpret_cast<const std::byte*>(e.shared_router.get())};
    products[count++] = {row, nullptr, experts_work_.shared_gate};
  }
  DeviceActivations x = h;
  x.alone = open_;
  enqueue(ops_.matmul(stream_, {products.data(), count}, x, false));
}

// The choice of each token's experts, and their outputs. h: their input.
void GpuExecutor::enqueue_routed(uint32_t layer, const DeviceActivations& h) {
  const ExpertConfig& c = config_.layer(layer).experts;
  const DeviceWeights::Experts::Routed& w = routed_of(layer);
  const ExpertWorkspace& to = experts_work_;
  const DeviceExpertRows rows = expert_rows(layer);
  DeviceCheck finite = check(layer);
  finite.limit = std::numeric_limits<float>::infinity();
  enqueue(ops_.route(stream_, routing_of(c, w), to.logits, finite, rows));
  const bool joined = joins_shared(layer);
  const auto choices = static_cast<uint32_t>(rows.choices()) + (joined ? n_ : 0);
  DeviceActivations input = h;
  if (!rows.in_order()) enqueue(ops_.group_choices(stream_, rows));
  if (error_) return;  // what follows reads indices that are missing
  if (!rows.in_order() || c.weighs_input) {
    input = expert_inputs(choices, config_.width, to.inputs, {&w.gate.w, &w.up.w});
    enqueue(ops_.gather_inputs(stream_, rows, h, c.weighs_input, input));
  }
  const DeviceWeights::Experts& e = weights_of(layer).experts;
  const auto with = [&](DeviceExpertProduct product, const DeviceWeights::Matrix& shared) {
    if (joined) product.shared = shared.w;
    return product;
  };
  const auto multiply_rows = [&](const DeviceWeights::ExpertMatrices& m, float* y) {
    const DeviceExpertProduct product = with(product_of(m, y), e.shared_down);
    enqueue(ops_.multiply_experts(stream_, {&product, 1}, rows, input));
  };
  const LayerConfig& network = config_.layer(layer);
  if (!network.gated) {
    multiply_rows(w.up, to.gate);
  } else if (w.gate.w.type == w.up.w.type) {
    const std::array both{with(product_of(w.gate, to.gate), e.shared_gate),
                          with(product_of(w.up, to.up), e.shared_up)};
    enqueue(ops_.multiply_experts(stream_, both, rows, input));
  } else {
    multiply_rows(w.gate, to.gate);
    multiply_rows(w.up, to.up);
  }
  input = expert_inputs(choices, c.width, to.gate, {&w.down.w});
  enqueue(ops_.activate(stream_, network.activation, to.gate, network.gated ? to.up : nullptr,
                        check(layer), input));
  multiply_rows(w.down, to.rows);
}

// The shared expert, and the gate of its output.
void GpuExecutor::enqueue_shared(uint32_t layer, const DeviceActivations& h) {
  const DeviceWeights::Experts& e = weights_of(layer).experts;
  const ExpertWorkspace& to = experts_work_;
  const LayerConfig& c = config_.layer(layer);
  if (c.gated) multiply(h, {{&e.shared_gate, to.gate}, {&e.shared_up, to.up}});
  else multiply(h, {{&e.shared_up, to.gate}});
  const DeviceActivations gated =
      expert_inputs(n_, c.experts.shared_width, to.gate, {&e.shared_down.w});
  enqueue(ops_.activate(stream_, c.activation, to.gate, c.gated ? to.up : nullptr, check(layer),
                        gated));
  multiply(gated, {{&e.shared_down, to.shared}});
}

// The experts' outputs go to the residual stream.
void GpuExecutor::enqueue_sum(uint32_t layer) {
  const LayerConfig& c = config_.layer(layer);
  const DeviceWeights::Layer& w = weights_of(layer);
  const DeviceWeights::Experts& e = w.experts;
  const ExpertWorkspace& from = experts_work_;
  const float* const post_norm = w.ffn_post_norm.weight.get();
  const bool added = !c.has_dense() && !post_norm;
  DeviceExpertSum sum{.rows = from.rows};
  sum.weighs = routed_of(layer).are_here() && !c.experts.weighs_input;
  if (c.experts.shared_width > 0)
    sum.shared = joins_shared(layer) ? from.rows + expert_rows(layer).choices() * config_.width
                                     : from.shared;
  if (e.shared_router.get()) sum.shared_gate = from.shared_gate;
  sum.add = added;
  if (added) sum.factor = config_.residual_scale;  // otherwise the norm has it
  float* y = added ? work_.x : work_.h;
  enqueue(ops_.sum_experts(stream_, expert_rows(layer), sum, {n_, config_.width, y}));
  const auto add_norm = [&](float* x, const float* weight, float* out) {
    enqueue(ops_.add_rms_norm(stream_, x, weight, config_.norm_epsilon, check(layer),
                              {n_, config_.width, out}));
  };
  if (c.has_dense()) {
    norm_in_place(from.dense, e.dense_norm.get(), config_.width, check(layer));
    add_norm(y, e.output_norm.get(), from.dense);
    y = from.dense;
  }
  if (!added) add_norm(y, post_norm, work_.x);
}

// ---- experts on the CPU

// Starts the way of the residual stream to host memory.
void GpuExecutor::enqueue_host_copy() {
  enqueue(ops_.after(copies_, stream_));
  enqueue(ops_.download(copies_, experts_x_.get(), work_.x, n_ * size_.width * sizeof(float)));
  enqueue(ops_.download(copies_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
}

// The routed experts of the copied stream. The GPU works meanwhile; the outputs follow its work.
Status GpuExecutor::run_experts(uint32_t layer) {
  RETURN_IF_ERROR(wait("a layer", copies_));
  const LayerWeights& w = model_.weights().layers[layer];
  const bool has_both = config_.layer(layer).has_dense();
  const std::size_t cols = size_.width, all = n_ * cols;
  float *const x = experts_x_.get(), *const h = experts_h_.get(), *const r = has_both ? h + all : h;
  constexpr uint32_t together = 16;  // rows of a task
  step_->pool->run(static_cast<uint32_t>(ceil_div(n_, together)), [&](uint32_t task, uint32_t) {
    if (step_->cancel.fired()) return;
    const uint32_t first = task * together, rows = std::min(together, n_ - first);
    const std::size_t at = first * cols;
    const auto norm_of = [&](const Norm& norm, float* to) {
      cpu_kernels().rms_norm(x + at, norm.weight.data(), config_.norm_epsilon, rows, config_.width,
                             to + at);
    };
    if (has_both) norm_of(w.experts.router_norm, r);
    norm_of(has_both ? w.experts.input_norm : w.ffn_norm, h);
  });
  const bool good = experts_->run(
      layer, {.n = n_, .x = h, .routed = r, .limit = too_large, .shared = false}, step_->cancel, x);
  if (step_->cancel.fired()) return {};
  if (!good) return not_a_number("layer " + std::to_string(layer));
  enqueue(ops_.upload(stream_, experts_work_.rows, x, all * sizeof(float)));
  return {};
}

}  // namespace kvasir
