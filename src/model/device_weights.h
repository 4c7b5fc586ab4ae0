// The weights of some layers, and of the output, in GPU memory. Immutable; shared by the sessions
// of a model. Several GPUs have consecutive runs of layers, from the first layer on. The CPU has
// the layers that did not fit.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/device.h"
#include "base/cancel.h"
#include "base/status.h"
#include "model/device_sketches.h"

namespace kvasir {

class DeviceLoader;
class Model;
struct Linear;
struct ModelConfig;
struct Weights;

struct DeviceOptions {
  // "cpu", a name of Device::find(), or "auto": one GPU that the model fits on, otherwise all
  std::string name = "cpu";
  uint64_t budget = 0;  // bytes of each device's memory, 0: what is free
  bool drafts = false;  // leaves room for the MTP layer next to the output
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
  // The matrices of all experts, one after another.
  struct ExpertMatrices {
    DeviceMatrix w;
    DeviceBuffer<float> biases, scales;  // empty: none
  };
  // As in kvasir::ExpertWeights. The CPU computes the routed experts of a layer without `routed`.
  struct Experts {
    struct Routed {
      DeviceBuffer<std::byte> memory;  // of router and experts
      Matrix router;
      DeviceBuffer<float> selection_bias;
      ExpertMatrices gate, up, down;

      bool are_here() const { return up.w.data != nullptr; }
    };
    Routed routed;
    DeviceBuffer<float> router_norm, input_norm, output_norm, dense_norm, shared_router;
    Matrix shared_gate, shared_up, shared_down;

    bool are_here() const { return routed.are_here(); }
  };
  // As in kvasir::RecurrentWeights, with alpha and beta apart.
  struct Recurrent {
    Matrix in, gate, alpha, beta, out;
    DeviceBuffer<float> convolution, bias, decay, decay_bias, skip, norm;
  };
  // As in LayerWeights; some are empty. query_gate: the rows of q that gate attention's output.
  // ModelConfig::residual_scale is in the weights of what the residual stream gets: the norms
  // behind mixer and network, or the mixers' last matrices and W_down.
  struct Layer {
    // of all matrices: a device allocates whole blocks, of which each matrix would waste a part
    DeviceBuffer<std::byte> memory;
    Norm mixer_norm, mixer_post_norm, ffn_norm, ffn_post_norm;
    DeviceBuffer<float> q_norm, k_norm, sinks;
    Matrix q, query_gate, k, v, o, gate, up, down;
    Recurrent recurrent;
    Matrix input_gate, input_out;
    Norm input_norm;
    float output_scale = 1;
    Experts experts;
  };

  // Uploads as many layers as fit besides the workspace of a session, then the output, then routed
  // experts. plan_devices() distributes them; a GPU without layers is not used. Code::no_memory:
  // not one layer fits, and the message says what would. Other codes as Device::find() and
  // Device::open(), Code::device, Code::cancelled. Throws std::bad_alloc.
  static Status upload(const Model& model, const DeviceOptions& options, const Cancel* cancel,
                       std::vector<DeviceWeights>* out);

  // Uploads the layers of a part of a model (model/mtp.h) to the device that has its output, which
  // the part shares unless it has its own. Code::no_memory: the device has no room for it besides
  // what sessions take. Code::unsupported: no device has the output. Code::device,
  // Code::cancelled.
  // inputs: the matrix whose products the layers begin with.
  static Status upload_part(const Model& whole, const Model& part, const Linear& inputs,
                            const Cancel* cancel, std::vector<DeviceWeights>* out);

  // Whether weights of a model of so many layers are on none of its devices, and come in prefill.
  static bool some_come(std::span<const DeviceWeights> devices, uint32_t depth);

  const std::shared_ptr<Device>& device() const { return device_; }
  // Tokens of the prefill steps that the plan has room for.
  uint32_t usual_step() const { return usual_step_; }
  uint32_t first_layer() const { return first_; }
  uint32_t end_layer() const { return first_ + static_cast<uint32_t>(layers_.size()); }
  const std::vector<Layer>& layers() const { return layers_; }  // from the first one on
  bool has_output() const { return output_.w.data != nullptr; }
  const Matrix& output() const { return output_; }
  const Norm& output_norm() const { return output_norm_; }
  const Matrix& inputs() const { return inputs_; }  // empty: embeddings begin
  uint64_t bytes() const { return bytes_; }
  // Layers that have their routed experts on the device. They are before experts_end(), which is
  // end_layer() where no layer needs the CPU.
  uint32_t expert_layers() const;
  uint32_t experts_end() const { return experts_end_; }
  // of all sessions' keys in these layers
  const std::shared_ptr<DeviceSketches>& sketches() const { return sketches_; }

 private:
  // What a device gets: layers [first, first + count), and the experts of the first ones of them.
  struct Contents {
    uint32_t first = 0, count = 0, experts = 0;
    bool output = false;
  };
  Status load(const Weights& weights, const ModelConfig& config, const Contents& contents,
              std::size_t piece, const Cancel* cancel);
  Status load_experts(const Weights& weights, uint32_t count, DeviceLoader* loader);

  std::shared_ptr<Device> device_;
  uint32_t usual_step_ = 0;
  uint32_t first_ = 0, experts_end_ = 0;
  std::vector<Layer> layers_;
  Matrix output_;
  DeviceBuffer<std::byte> output_memory_;  // empty: the whole model's
  Norm output_norm_;
  Matrix inputs_;
  DeviceBuffer<std::byte> inputs_memory_;
  uint64_t bytes_ = 0;
  std::shared_ptr<DeviceSketches> sketches_ = std::make_shared<DeviceSketches>();
};

}  // namespace kvasir
