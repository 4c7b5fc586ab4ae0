// What the parts of a model take of a GPU's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/device_plan.h"
#include "model/model.h"

namespace kvasir {

// Bytes of a matrix among others: the next one begins where every kernel can read it. 0: none.
std::size_t matrix_room(const DeviceKernels& kernels, const WeightView& w);
// All experts' matrices, as if they were one.
WeightView stacked(const ExpertMatrices& matrices, uint32_t experts);
// Rows [first, first + count) of each `stride` rows of a matrix; count 0: all rows.
struct RowRuns {
  uint32_t first = 0, count = 0, stride = 0;

  uint32_t rows(uint32_t all) const { return count > 0 ? all / stride * count : all; }
};
// The rows of q, and of what gates attention's output, which alternate where there are gates.
RowRuns query_rows(const LayerConfig& layer, bool gates);
// The rows of alpha or beta in a matrix of both.
RowRuns rate_rows(const RecurrentConfig& recurrent, bool alpha);
// Bytes of a layer's router and routed experts, in one piece of memory.
std::size_t routed_room(const DeviceKernels& kernels, const ExpertWeights& w, uint32_t experts);

struct DeviceSizes {
  // Of a matrix that is on its way; a row that is longer goes alone.
  static constexpr std::size_t piece_bytes = std::size_t{32} << 20;
  // The same of a WeightStream, of which two are on their way.
  static constexpr std::size_t streamed_piece = std::size_t{16} << 20;

  DeviceSizes(const Weights& weights, const ModelConfig& config, const DeviceKernels& kernels);
  uint64_t margin_on(const Device& device) const;
  uint64_t room(const Device& device) const;
  // Adds to stream_margin what steps of prefill take on one of the devices, at most: weights in
  // half precision, and the workspace of larger steps than the usual ones.
  void add_stream_steps(std::span<const std::shared_ptr<Device>> devices);
  // For the layers from first_layer on. Where not everything fits, devices leave room for what
  // comes to them in prefill (WeightStream), unless not one layer would fit besides.
  DevicePlan plan(std::size_t first_layer, std::span<const uint64_t> rooms) const;

  std::vector<LayerSizes> layers;
  uint64_t output = 0, margin = 0;  // a session's workspace and what weights come through
  uint64_t large_margin = 0;        // what is added to it on devices of large steps
  uint64_t experts_margin = 0;      // of the workspace, for routed experts
  uint64_t stream_margin = 0;       // of prefill with weights that come when their turn comes
  std::size_t piece = piece_bytes;  // bytes that weights come in, at least those of any row

 private:
  void add(const Linear& linear, std::size_t* matrices, uint64_t* biases, RowRuns runs = {});
  LayerSizes layer(const LayerWeights& w, const LayerConfig& c);
  void recurrent(const RecurrentWeights& w, std::size_t* matrices, uint64_t* base);
  uint64_t experts(const ExpertWeights& w, uint32_t count);
  uint64_t stream_step(uint32_t tokens) const;
  uint64_t stream_room() const;

  const DeviceKernels& kernels_;
  const ModelConfig& config_;
  uint64_t vectors_ = 0;  // bytes of all layers' vectors, biases among them
};

}  // namespace kvasir
