// The weights of a model's first layers, and of its output, in the memory of a device. Immutable; shared by the sessions of a model.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "compute/device.h"

namespace kvasir {

struct Linear;
struct ModelConfig;
struct Weights;

struct DeviceOptions {
  std::string name = "cpu";  // or as Device::open() has it
  uint64_t budget = 0;       // bytes of the device's memory, 0: what is free
};

class DeviceWeights {
 public:
  struct Matrix {
    DeviceMatrix w;
    DeviceBuffer<std::byte> data;
    DeviceBuffer<float> bias;  // empty: none
  };
  struct Layer {
    DeviceBuffer<float> attention_norm, q_norm, k_norm, ffn_norm;  // the second and third empty where the architecture has none
    Matrix q, k, v, o, gate, up, down;
  };

  // As many layers as fit beside the workspace of a session, then the output. Code::no_memory: not one does, and the message says what would. Other
  // codes as Device::open(), Code::device. Throws std::bad_alloc.
  static Status upload(const Weights& weights, const ModelConfig& config, uint32_t rope_dim, const DeviceOptions& options,
                       std::shared_ptr<const DeviceWeights>* out);

  const std::shared_ptr<Device>& device() const { return device_; }
  const std::vector<Layer>& layers() const { return layers_; }
  bool has_output() const { return output_.data.get() != nullptr; }
  const Matrix& output() const { return output_; }
  const float* output_norm() const { return output_norm_.get(); }
  uint64_t bytes() const { return bytes_; }

 private:
  class Loader;
  std::shared_ptr<Device> device_;
  std::vector<Layer> layers_;
  Matrix output_;
  DeviceBuffer<float> output_norm_;
  uint64_t bytes_ = 0;
};

}  // namespace kvasir
