#include "engine/kept_halves.h"

#include <algorithm>

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

void KeptHalves::give(std::span<DeviceProduct> products) {
  if (products.empty()) return;
  auto known = halves_.find(products[0].w.data);
  if (known == halves_.end()) {
    std::size_t bytes = 0;
    std::vector<DeviceHalves> halves;
    for (const DeviceProduct& p : products) {
      const std::size_t its = device_->kernels().kept_bytes(device_->context(), p.w);
      halves.push_back({nullptr, its, false});
      bytes += its;
    }
    std::byte* at = bytes > 0 ? take(bytes) : nullptr;
    if (!at) return;
    for (DeviceHalves& h : halves) h.memory = std::exchange(at, at + h.bytes);
    known = halves_.emplace(products[0].w.data, std::move(halves)).first;
  }
  for (std::size_t i = 0; i < products.size(); ++i)
    if (known->second[i].bytes > 0) products[i].halves = &known->second[i];
}

}  // namespace kvasir
