// Weights in half precision, which a long prefill keeps: each of its steps would make them again.
// They take twice the memory of weights in eight bits, so they are kept where half of a GPU's
// memory is left besides, and until the text ends.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "backend/device.h"

namespace kvasir {

class KeptHalves {
 public:
  explicit KeptHalves(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  // Gives matrices that are multiplied together their halves, one behind the other, where there is
  // room.
  void give(std::span<DeviceProduct> products) noexcept;
  bool empty() const { return blocks_.empty(); }
  // No work may use them any more.
  void release() { halves_.clear(), blocks_.clear(), used_ = 0, is_full_ = false; }
  void give_up() { release(), is_full_ = true; }  // until release()

 private:
  std::byte* take(std::size_t bytes);
  std::vector<DeviceHalves>* halves_of(std::span<const DeviceProduct> products);

  const std::shared_ptr<Device> device_;
  std::vector<DeviceBuffer<std::byte>> blocks_;
  std::size_t used_ = 0;  // bytes of the last block
  bool is_full_ = false;
  std::map<const std::byte*, std::vector<DeviceHalves>> halves_;  // by the first matrix
};

}  // namespace kvasir
