#include "offload/gpu_states.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/memory.h"

namespace kvasir {

constexpr const char* subject = "states of recurrent layers";

// Pinned memory through which states come to host memory, several times as fast as without.
struct GpuStates::Staging {
  static constexpr std::size_t floats = std::size_t{2} << 20;
  std::mutex mutex;
  PinnedBuffer<float> memory;
};

class GpuStates::Part final : public StatePart {
 public:
  Part(std::size_t first_float, std::shared_ptr<Staging> staging)
      : at_(first_float), staging_(std::move(staging)) {}
  Status allocate(const std::shared_ptr<Device>& device, std::size_t floats) {
    device_ = device;
    return floats_.allocate(device, floats, subject);
  }

  Status read(float* out) const override {
    const DeviceKernels& ops = device_->kernels();
    DeviceStream* stream = nullptr;  // of this thread
    RETURN_IF_ERROR(device_->status(ops.open_stream(device_->context(), &stream), "a stream"));
    int error = copy(stream, out);
    if (const int e = ops.close_stream(stream); !error) error = e;
    return device_->status(error, subject);
  }
  std::size_t at() const override { return at_; }

  bool is_on(const Device& device, std::size_t first_float, std::size_t floats) const {
    return device_.get() == &device && at_ == first_float &&
           floats_.bytes() == floats * sizeof(float);
  }
  float* floats() const { return floats_.get(); }

 private:
  int copy(DeviceStream* stream, float* out) const {
    const DeviceKernels& ops = device_->kernels();
    const std::size_t all = floats_.bytes() / sizeof(float);
    const std::scoped_lock lock(staging_->mutex);
    PinnedBuffer<float>& memory = staging_->memory;
    const std::size_t room = std::min(all, Staging::floats);
    // Without pinned memory the driver copies through its own.
    if (!memory.get() && !memory.allocate(device_, room).ok()) {
      const int error = ops.download(stream, out, floats_.get(), floats_.bytes());
      return error ? error : ops.wait(stream);
    }
    for (std::size_t at = 0, n; at < all; at += n) {
      n = std::min(all - at, room);
      int error = ops.download(stream, memory.get(), floats_.get() + at, n * sizeof(float));
      if (!error) error = ops.wait(stream);
      if (error) return error;
      std::copy_n(memory.get(), n, out + at);
    }
    return 0;
  }

  const std::size_t at_;
  const std::shared_ptr<Staging> staging_;  // of states of one size
  std::shared_ptr<Device> device_;
  DeviceBuffer<float> floats_;
};

GpuStates::GpuStates(const std::shared_ptr<Device>& device, const ModelConfig& config,
                     uint32_t first, uint32_t layers)
    : device_(device), ops_(device->kernels()), first_(first), layers_(layers),
      layer_size_(config.recurrent.state_size()), staging_(std::make_shared<Staging>()) {}

// A part that nobody else has. from: that of the state before the step, which stays in own_. Where
// there are `most` already, another one is left to those that share it.
Status GpuStates::take(const Part* from, std::size_t most, std::shared_ptr<Part>* out) {
  for (const auto& part : own_)
    if (is_sole(part)) return *out = part, Status();
  auto part = std::make_shared<Part>(first_ * layer_size_, staging_);
  RETURN_IF_ERROR(part->allocate(device_, size()));
  if (own_.size() >= most) own_.erase(own_.begin() + (own_.front().get() == from ? 1 : 0));
  own_.push_back(part);
  *out = std::move(part);
  return {};
}

Status GpuStates::prepare(RecurrentState* states, uint32_t rows, DeviceStream* stream) {
  if (const int error = ops_.wait(stream)) return device_->status(error, subject);
  if (!addresses_.get()) RETURN_IF_ERROR(addresses_.allocate(device_, max_alone, subject));
  if (!addresses_host_.get()) RETURN_IF_ERROR(addresses_host_.allocate(device_, max_alone));
  std::shared_ptr<const Part> from;
  for (const auto& part : states->parts())
    if (const auto own = std::dynamic_pointer_cast<const Part>(part))
      if (own->is_on(*device_, first_ * layer_size_, size())) from = own;
  if (!from) {
    if (!states->is_whole())
      return Status::error(Code::internal, "a state is in the memory of another device");
    std::shared_ptr<Part> copy;
    RETURN_IF_ERROR(take(nullptr, most_own, &copy));
    const int error =
        ops_.upload(stream, copy->floats(), states->now(first_), size() * sizeof(float));
    if (error) return device_->status(error, subject);
    from = std::move(copy);
  }
  std::vector<std::shared_ptr<Part>> next(rows);
  const Part* before = from.get();
  for (uint32_t i = 0; i < rows; ++i) {
    RETURN_IF_ERROR(take(from.get(), std::max<std::size_t>(most_own, rows + 1), &next[i]));
    addresses_host_.get()[i] = {before->floats(), next[i]->floats()};
    before = next[i].get();
  }
  for (uint32_t i = 0; i < rows; ++i) states->set_next_part(std::move(next[i]), i);
  return {};
}

uint64_t GpuStates::reserve() const {
  return layers_ == 0 ? 0
                      : (2 * most_own - std::min(own_.size(), 2 * most_own)) *
                            Device::allocated_size(size() * sizeof(float));
}

int GpuStates::begin(DeviceStream* stream) {
  return ops_.upload(stream, addresses_.get(), addresses_host_.get(),
                     max_alone * sizeof(DeviceStates));
}

}  // namespace kvasir
