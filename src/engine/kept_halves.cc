#include "engine/kept_halves.h"

#include <algorithm>
#include <new>
#include <utility>

namespace kvasir {

// Null: there is no room.
std::byte* KeptHalves::take(std::size_t bytes) {
  constexpr std::size_t block = std::size_t{1} << 30;
  if (blocks_.empty() || used_ + bytes > blocks_.back().bytes()) {
    const std::size_t size = std::max(bytes, std::min(block, device_->budget() / 64));
    DeviceBuffer<std::byte> more;
    if (is_full_ || device_->left() < device_->budget() / 2 + size ||
        !more.allocate(device_, size, "weights in half precision").ok())
      return is_full_ = true, nullptr;
    blocks_.push_back(std::move(more));
    used_ = 0;
  }
  return blocks_.back().get() + std::exchange(used_, used_ + bytes);
}

// Null: they are not kept.
std::vector<DeviceHalves>* KeptHalves::halves_of(std::span<const DeviceProduct> products) {
  if (const auto known = halves_.find(products[0].w.data); known != halves_.end())
    return &known->second;
  std::size_t bytes = 0;
  std::vector<DeviceHalves> halves;
  for (const DeviceProduct& p : products) {
    halves.push_back({nullptr, device_->kernels().kept_bytes(device_->context(), p.w)});
    bytes += halves.back().bytes;
  }
  std::byte* at = bytes > 0 ? take(bytes) : nullptr;
  if (!at) return nullptr;
  for (DeviceHalves& h : halves) h.memory = std::exchange(at, at + h.bytes);
  return &halves_.emplace(products[0].w.data, std::move(halves)).first->second;
}

void KeptHalves::give(std::span<DeviceProduct> products) noexcept try {
  if (products.empty()) return;
  std::vector<DeviceHalves>* const halves = halves_of(products);
  for (std::size_t i = 0; halves && i < products.size(); ++i)
    if ((*halves)[i].bytes > 0) products[i].halves = &(*halves)[i];
} catch (const std::bad_alloc&) {
  is_full_ = true;
}

}  // namespace kvasir
