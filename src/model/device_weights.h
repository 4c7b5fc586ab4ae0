// The weights of some of a model's layers, and of its output, in the memory of a device. Immutable;
// shared by the sessions of a model. Of several devices each has layers that follow those of the
// one before it; the first layers come first, and the CPU has those that did not fit.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/device.h"
#include "base/cancel.h"
#include "base/status.h"
#include "model/device_sketches.h"

namespace kvasir {

struct Linear;
struct ModelConfig;
struct Weights;

struct DeviceOptions {
  // or as Device::find() has it; "auto": one that all of the model fits on, otherwise all of them
  std::string name = "cpu";
  uint64_t budget = 0;  // bytes of each device's memory, 0: what is free
};

class DeviceWeights {
 public:
  struct Matrix {
    DeviceMatrix w;
    DeviceBuffer<float> bias;  // empty: none
  };
  struct Layer {
    // of all matrices: a device hands out whole blocks, of which each alone would lose a part
    DeviceBuffer<std::byte> memory;
    // as in LayerWeights; some are empty
    DeviceBuffer<float> mixer_norm, mixer_post_norm, q_norm, k_norm, ffn_norm, ffn_post_norm;
    Matrix q, k, v, o, gate, up, down;
  };

  // As many layers as fit beside the workspace of a session, then the output, over the devices as
  // split_layers() has it; a device for which none is left is not used. Code::no_memory: not one
  // fits, and the message says what would. Other codes as Device::find() and Device::open(),
  // Code::device, Code::cancelled. Throws std::bad_alloc.
  static Status upload(const Weights& weights, const ModelConfig& config,
                       const DeviceOptions& options, const Cancel* cancel,
                       std::vector<DeviceWeights>* out);

  const std::shared_ptr<Device>& device() const { return device_; }
  uint32_t first_layer() const { return first_; }
  uint32_t end_layer() const { return first_ + static_cast<uint32_t>(layers_.size()); }
  const std::vector<Layer>& layers() const { return layers_; }  // from the first one on
  bool has_output() const { return output_memory_.get() != nullptr; }
  const Matrix& output() const { return output_; }
  const float* output_norm() const { return output_norm_.get(); }
  uint64_t bytes() const { return bytes_; }
  // of all sessions' keys in these layers
  const std::shared_ptr<DeviceSketches>& sketches() const { return sketches_; }

 private:
  class Loader;
  Status load(const Weights& weights, uint32_t first, uint32_t count, bool output,
              std::size_t piece, const Cancel* cancel);

  std::shared_ptr<Device> device_;
  uint32_t first_ = 0;
  std::vector<Layer> layers_;
  Matrix output_;
  DeviceBuffer<std::byte> output_memory_;
  DeviceBuffer<float> output_norm_;
  uint64_t bytes_ = 0;
  std::shared_ptr<DeviceSketches> sketches_ = std::make_shared<DeviceSketches>();
};

// How many layers of these sizes each device takes of those that are left by the ones before it:
// all of them where they fit, each device then at most the same share of its room, the least with
// which they do; otherwise as many as there is room for. output: bytes that the device with the
// last layer needs besides. All bytes.
struct LayerSplit {
  std::vector<uint32_t> layers;  // [devices]
  bool output = false;           // there is room for it
};
LayerSplit split_layers(std::span<const uint64_t> sizes, uint64_t output,
                        std::span<const uint64_t> rooms);

}  // namespace kvasir
