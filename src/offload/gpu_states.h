// The states of a sequence's recurrent layers on a GPU. The state at the end of the sequence is
// there alone (StatePart of store/recurrent_state.h): no step takes it to host memory, but
// checkpoints and saves copy it there. A step writes another one, so that a failed or cancelled
// step leaves the state as it was, and sequences that share a state never write it. Two states are
// used in turn; a copy of the sequence to which it goes back has a third. A step of which only some
// tokens may stay writes a state after each of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device.h"
#include "base/status.h"
#include "model/config.h"
#include "store/recurrent_state.h"

namespace kvasir {

class GpuStates {
 public:
  // Of `layers` recurrent layers, from number `first` on.
  GpuStates(const std::shared_ptr<Device>& device, const ModelConfig& config, uint32_t first,
            uint32_t layers);

  uint32_t layers() const { return layers_; }
  // Changes the layers. Steps of the others are over.
  void move_to(uint32_t first, uint32_t layers) { first_ = first, layers_ = layers, own_.clear(); }
  // For a step: makes room for the next state, or for those after each of `rows` tokens. They
  // become parts of *states with the commit. Copies the state before the step to the GPU where it
  // is not there. Waits for the stream. Code::no_memory, Code::device. Throws std::bad_alloc.
  Status prepare(RecurrentState* states, uint32_t rows, DeviceStream* stream);
  // After prepare(). Returns an error code of DeviceKernels.
  int begin(DeviceStream* stream);
  // In GPU memory, after begin(); the address stays. Of each token that has a state of its own. A
  // layer's place in both states.
  const DeviceStates* addresses() const { return addresses_.get(); }
  std::size_t offset(uint32_t state) const { return (state - first_) * layer_size_; }
  // Bytes of GPU memory that the sequence's states and those of a fork may still take.
  uint64_t reserve() const;

 private:
  class Part;
  struct Staging;
  Status take(const Part* from, std::size_t most, std::shared_ptr<Part>* out);
  std::size_t size() const { return layers_ * layer_size_; }

  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  uint32_t first_, layers_;
  const std::size_t layer_size_;
  static constexpr std::size_t most_own = 2;
  std::vector<std::shared_ptr<Part>> own_;  // they are used in turn
  const std::shared_ptr<Staging> staging_;
  DeviceBuffer<DeviceStates> addresses_;
  PinnedBuffer<DeviceStates> addresses_host_;
};

}  // namespace kvasir
