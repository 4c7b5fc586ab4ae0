// The weights of some layers, and of the output, in GPU memory. Immutable; shared by the sessions
// of a model. Several GPUs have consecutive runs of layers, from the first layer on. The CPU has
// the layers that did not fit.
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
  // "cpu", a name of Device::find(), or "auto": one GPU that the model fits on, otherwise all
  std::string name = "cpu";
  uint64_t budget = 0;  // bytes of each device's memory, 0: what is free
};

class DeviceWeights {
 public:
  struct Matrix {
    DeviceMatrix w;
    DeviceBuffer<float> bias;  // empty: none
  };
  struct Norm {
    DeviceBuffer<float> weight, bias;  // empty: none
  };
  // As in LayerWeights; some are empty. ModelConfig::residual_scale is in the weights of what the
  // residual stream gets: the norms behind mixer and network, or W_o and W_down.
  struct Layer {
    // of all matrices: a device allocates whole blocks, of which each matrix would waste a part
    DeviceBuffer<std::byte> memory;
    Norm mixer_norm, mixer_post_norm, ffn_norm, ffn_post_norm;
    DeviceBuffer<float> q_norm, k_norm, sinks;
    Matrix q, k, v, o, gate, up, down;
    Matrix input_gate, input_out;
    Norm input_norm;
    float output_scale = 1;
  };

  // Uploads as many layers as fit besides the workspace of a session, then the output.
  // split_layers() distributes them; a GPU without layers is not used. Code::no_memory: not one
  // layer fits, and the message says what would. Other codes as Device::find() and Device::open(),
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
  const Norm& output_norm() const { return output_norm_; }
  uint64_t bytes() const { return bytes_; }
  // of all sessions' keys in these layers
  const std::shared_ptr<DeviceSketches>& sketches() const { return sketches_; }

 private:
  class Loader;
  Status load(const Weights& weights, float residual_scale, uint32_t first, uint32_t count,
              bool output, std::size_t piece, const Cancel* cancel);

  std::shared_ptr<Device> device_;
  uint32_t first_ = 0;
  std::vector<Layer> layers_;
  Matrix output_;
  DeviceBuffer<std::byte> output_memory_;
  Norm output_norm_;
  uint64_t bytes_ = 0;
  std::shared_ptr<DeviceSketches> sketches_ = std::make_shared<DeviceSketches>();
};

// Distributes layers of these sizes. Where all fit, every device fills at most the same share of
// its room, the smallest share with which they fit. Otherwise each device takes as many as it has
// room for. output: what the device with the last layer needs besides. All in bytes.
struct LayerSplit {
  std::vector<uint32_t> layers;  // [devices]
  bool output = false;           // there is room for it
};
LayerSplit split_layers(std::span<const uint64_t> sizes, uint64_t output,
                        std::span<const uint64_t> rooms);

}  // namespace kvasir
