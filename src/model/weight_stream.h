// Weights of layers, or their routed experts, that a GPU has no room for: they come to its memory
// when prefill goes through a layer, and the next layer takes their place. There are two places, so
// that a layer's weights come while the layer before is computed. Vectors stay on the device.
//
// The pool's threads copy the weights from the mapped file to pinned memory. From there they go to
// the device, which lays them out. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/status.h"
#include "model/device_loader.h"
#include "model/device_weights.h"
#include "model/model.h"

namespace kvasir {

class WeightStream {
 public:
  // For layers [here.first_layer(), end). `here` has some of them; it has to outlive the object, as
  // the weights do. Code::no_memory names what is missing; Code::device.
  static Status open(const Weights& weights, const ModelConfig& config, const DeviceWeights& here,
                     uint32_t end, std::unique_ptr<WeightStream>* out);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  // Of a layer: its addresses stay, its weights are there after bring().
  const DeviceWeights::Layer& layer(uint32_t layer) const;
  const DeviceWeights::Experts::Routed& routed(uint32_t layer) const;
  bool streams(uint32_t layer) const { return !plan_of(layer).pieces.empty(); }
  uint32_t streamed_layers() const { return streamed_; }
  uint64_t bytes() const { return bytes_; }  // that came to the device so far

  // Waits until a layer's weights are there. No work on the layer before may be under way. Then the
  // next streamed layer may come. Code::cancelled, Code::device.
  Status bring(uint32_t layer, ThreadPool* pool, const CancelLatch& cancel);
  // Lets 1/parts of the next streamed layer come while others compute. Does not wait for its end.
  Status advance(uint32_t parts, ThreadPool* pool, const CancelLatch& cancel);

 private:
  struct Plan {
    std::vector<WeightPiece> pieces;
    std::size_t bytes = 0;
    uint32_t place = 0;
  };
  static constexpr uint32_t no_layer = UINT32_MAX;

  WeightStream(const DeviceWeights& here, uint32_t end);
  Status make(const Weights& weights, const ModelConfig& config);
  Status load(const Weights& weights, const ModelConfig& config, uint32_t layer,
              DeviceLoader* loader, DeviceLoader::Place* place);
  bool has_base(uint32_t layer) const { return layer < here_.end_layer(); }
  const Plan& plan_of(uint32_t layer) const { return plans_[layer - first_]; }
  uint32_t next_after(uint32_t layer) const;
  Status start(uint32_t layer);
  Status copy(std::size_t bytes, ThreadPool* pool, const CancelLatch& cancel);
  Status wait();

  const DeviceWeights& here_;
  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const uint32_t first_, end_;
  std::vector<DeviceWeights::Layer> layers_;  // [end - first]; of streamed parts
  std::vector<Plan> plans_;                   // [end - first]
  uint32_t streamed_ = 0;
  uint64_t bytes_ = 0;
  DeviceBuffer<std::byte> places_[2];
  uint32_t in_place_[2] = {no_layer, no_layer};  // complete
  uint32_t coming_ = no_layer;
  std::size_t piece_ = 0;  // of the coming layer, the next one to copy
  // Two pieces are on their way, each with a stream of its own.
  PinnedBuffer<std::byte> host_[2];
  DeviceBuffer<std::byte> staging_[2];
  DeviceStream* streams_[2] = {nullptr, nullptr};
  uint32_t turn_ = 0;
};

}  // namespace kvasir
