#include "model/device_sizes.h"

#include <algorithm>

#include "base/checked.h"
#include "model/gpu_expert_workspace.h"

namespace kvasir {

// Tokens whose keys and values experts leave room for in a device's memory: a document of usual
// length is attended there.
constexpr uint64_t kept_free_tokens = 16384;
// The same of one layer, where weights come in prefill: no other layer's keys and values are there.
constexpr uint64_t streamed_tokens = 32768;

std::size_t matrix_room(const DeviceKernels& kernels, const WeightView& w) {
  return w.data ? round_up(kernels.matrix_bytes(w.type, w.rows, w.cols), 256) : 0;
}

WeightView stacked(const ExpertMatrices& matrices, uint32_t experts) {
  WeightView w = matrices.first;
  w.rows *= experts;
  return w;
}

std::size_t routed_room(const DeviceKernels& kernels, const ExpertWeights& w, uint32_t experts) {
  std::size_t size = matrix_room(kernels, w.router.w);
  for (const ExpertMatrices* m : {&w.gate, &w.up, &w.down})
    size += matrix_room(kernels, stacked(*m, experts));
  return size;
}

RowRuns query_rows(const LayerConfig& layer, bool gates) {
  if (!layer.gates_output) return {};
  return {gates ? layer.head_dim : 0, layer.head_dim, 2 * layer.head_dim};
}

RowRuns rate_rows(const RecurrentConfig& recurrent, bool alpha) {
  const uint32_t group = recurrent.heads / recurrent.key_heads;  // a key head's betas, then alphas
  return {alpha ? group : 0, group, 2 * group};
}

static uint64_t bytes_of(const Array<float>& x) {
  return Device::allocated_size(x.size() * sizeof(float));
}
static uint64_t bytes_of(const Norm& norm) { return bytes_of(norm.weight) + bytes_of(norm.bias); }

DeviceSizes::DeviceSizes(const Weights& weights, const ModelConfig& config,
                         const DeviceKernels& kernels)
    : kernels_(kernels), config_(config) {
  for (uint32_t l = 0; l < weights.layers.size(); ++l) {
    const LayerConfig& c = config.layer(l);
    LayerSizes size = layer(weights.layers[l], c);
    // a session's keys and values of the window
    if (c.has_attention() && c.is_windowed()) size.base += window_layer_bytes(config);
    else if (c.has_attention())
      size.attention = uint64_t{2} * c.kv_width() * std::min(config.context, kept_free_tokens);
    // A session's state of the layer: before and after a step, and one that it may go back to. They
    // are rounded in the margin.
    if (c.is_recurrent()) size.base += 3 * config.recurrent.state_size() * sizeof(float);
    layers.push_back(size);
  }
  std::size_t matrix = 0;
  output = bytes_of(weights.output_norm);
  add(weights.output, &matrix, &output);
  output += Device::allocated_size(matrix);
  const auto workspace = [&](bool routed, uint32_t step = usual_step) {
    return device_workspace_bytes(workspace_widths_of(config, weights),
                                  expert_widths_of(config, weights, routed), step);
  };
  margin = workspace(false) + Device::allocated_size(piece) + window_step_bytes(config, usual_step);
  large_margin = workspace(true, large_step) - workspace(true) +
                 window_step_bytes(config, large_step) - window_step_bytes(config, usual_step) +
                 stream_step(large_step) - stream_step(usual_step);
  // A device has each of the three states of its layers in one piece, which is rounded.
  const uint64_t states = config.state_size() * sizeof(float);
  if (states >= Device::rounded_bytes / 2) margin += 3 * Device::rounded_bytes;
  experts_margin = workspace(true) - workspace(false);
  stream_margin = stream_room();
}

// A step's queries, keys and values of a layer, and a residual stream.
uint64_t DeviceSizes::stream_step(uint32_t tokens) const {
  const Widths w = widths_of(config_);
  return Device::allocated_size(uint64_t{tokens} *
                                ((2 * w.q + 2 * w.kv + config_.heads) * 4 + w.q * 2)) +
         Device::allocated_size(uint64_t{tokens} * w.width * 4);
}

// Two layers' weights and two pieces of them; the vectors of all layers, which stay; keys and
// values of a layer, as they are in pages and as attention reads them, with an eighth more of
// these; a step's queries, keys and values; and the residual stream of the next step.
uint64_t DeviceSizes::stream_room() const {
  uint64_t weights = 0;
  for (const LayerSizes& layer : layers) weights = std::max(weights, layer.base + layer.experts);
  const uint64_t piece_room = std::min<uint64_t>(weights, streamed_piece);
  const Widths w = widths_of(config_);
  const uint64_t tokens = std::min(config_.context, streamed_tokens),
                 keys = tokens * w.kv * (2 + 4) + tokens / 8 * w.kv * 4;
  return vectors_ + 2 * Device::allocated_size(weights) + 2 * Device::allocated_size(piece_room) +
         Device::allocated_size(keys) + stream_step(usual_step) + experts_margin;
}

void DeviceSizes::add_stream_steps(std::span<const std::shared_ptr<Device>> devices) {
  const auto widest = static_cast<uint32_t>(widths_of(config_).widest);
  uint64_t most = 0;
  for (const auto& device : devices) {
    const uint32_t step = streamed_step_of(*device);
    const uint64_t more = step > usual_step_of(*device) ? large_margin : 0;
    most = std::max(most, more + Device::allocated_size(
                                     kernels_.halves_bytes(device->context(), step, widest)));
  }
  stream_margin += most;
}

DevicePlan DeviceSizes::plan(std::size_t first_layer, std::span<const uint64_t> rooms) const {
  const std::span<const LayerSizes> all = std::span(layers).subspan(first_layer);
  DevicePlan plan = plan_devices(all, output, experts_margin, rooms);
  // Spans have all layers of a model, with one stream of rows.
  const bool spans = config_.streams == 1 && config_.layer_input == 0 && !config_.shares_kv();
  uint32_t placed = 0, with_experts = 0;
  for (const DevicePlan::Part& part : plan.parts)
    placed += part.layers, with_experts += part.experts;
  const bool has_experts =
      std::any_of(all.begin(), all.end(), [](const LayerSizes& l) { return l.experts > 0; });
  const bool lacks_layers = placed < all.size() || (has_experts && with_experts < placed);
  if (plan.complete || !spans || !lacks_layers) return plan;
  std::vector<LayerSizes> sizes(all.begin(), all.end());
  std::vector<uint64_t> left(rooms.begin(), rooms.end());
  for (LayerSizes& layer : sizes) layer.attention = 0;  // stream_margin has that of one layer
  for (uint64_t& room : left) room -= std::min(room, stream_margin);
  DevicePlan streaming = plan_devices(sizes, output, experts_margin, left);
  if (streaming.parts[0].layers == 0) return plan;
  streaming.streams = true;
  return streaming;
}

uint64_t DeviceSizes::margin_on(const Device& device) const {
  return margin + (usual_step_of(device) == large_step ? large_margin : 0);
}

uint64_t DeviceSizes::room(const Device& device) const {
  return device.left() - std::min(device.left(), margin_on(device));
}

void DeviceSizes::add(const Linear& linear, std::size_t* matrices, uint64_t* biases, RowRuns runs) {
  if (!linear.w.data) return;
  piece = std::max(piece, linear.w.row_bytes);
  WeightView w = linear.w;
  w.rows = runs.rows(w.rows);
  *matrices += matrix_room(kernels_, w), *biases += bytes_of(linear.bias);
}

void DeviceSizes::recurrent(const RecurrentWeights& w, std::size_t* matrices, uint64_t* base) {
  for (const Linear* linear : {&w.in, &w.gate, &w.alpha, &w.out}) add(*linear, matrices, base);
  const bool both = config_.recurrent.kind == RecurrentKind::delta_net && !w.alpha.w.data;
  if (both) add(w.beta, matrices, base, rate_rows(config_.recurrent, true));
  add(w.beta, matrices, base, both ? rate_rows(config_.recurrent, false) : RowRuns());
  for (const Array<float>* vector :
       {&w.convolution, &w.bias, &w.decay, &w.decay_bias, &w.skip, &w.norm})
    *base += bytes_of(*vector);
}

LayerSizes DeviceSizes::layer(const LayerWeights& w, const LayerConfig& c) {
  LayerSizes size;
  std::size_t matrices = 0;
  const ExpertWeights& e = w.experts;
  for (const Norm* norm :
       {&w.mixer_norm, &w.mixer_post_norm, &w.ffn_norm, &w.ffn_post_norm, &w.input_norm,
        &e.router_norm, &e.input_norm, &e.output_norm, &e.dense_norm})
    size.base += bytes_of(*norm);
  for (const Array<float>* vector : {&w.q_norm, &w.k_norm, &w.sinks, &e.shared_router})
    size.base += bytes_of(*vector);
  add(w.q, &matrices, &size.base, query_rows(c, false));
  if (c.gates_output) add(w.q, &matrices, &size.base, query_rows(c, true));
  if (c.is_recurrent()) recurrent(w.recurrent, &matrices, &size.base);
  for (const Linear* linear : {&w.k, &w.v, &w.o, &w.gate, &w.up, &w.down, &w.input_gate,
                               &w.input_out, &e.shared_gate, &e.shared_up, &e.shared_down})
    add(*linear, &matrices, &size.base);
  vectors_ += size.base;
  size.base += Device::allocated_size(matrices);
  if (c.has_experts()) size.experts = experts(e, c.experts.count);
  return size;
}

uint64_t DeviceSizes::experts(const ExpertWeights& w, uint32_t count) {
  uint64_t vectors = bytes_of(w.router.bias) + bytes_of(w.selection_bias);
  for (const ExpertMatrices* m : {&w.gate, &w.up, &w.down}) {
    piece = std::max(piece, m->first.row_bytes);
    vectors += bytes_of(m->biases) + bytes_of(m->scales);
  }
  piece = std::max(piece, w.router.w.row_bytes);
  vectors_ += vectors;
  return Device::allocated_size(routed_room(kernels_, w, count)) + vectors;
}

}  // namespace kvasir
