#include "compute/device.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <string_view>

namespace kvasir {

constexpr int oldest_capability = 8;
constexpr uint64_t most_reserve = uint64_t{512} << 20;  // for streams, graphs and the screen

Device::~Device() {
  if (context_) (void)kernels_.close(context_);
}

Status Device::open(const char* name, uint64_t budget, std::shared_ptr<Device>* out) {
  constexpr std::string_view family = "cuda";
  const std::string_view asked = name;
  const auto unknown = [&] { return Status::error(Code::bad_argument, "device '%.40s' is not known: \"cpu\", \"cuda\" or \"cuda:N\"", name); };
  if (asked.substr(0, family.size()) != family) return unknown();
  int index = 0;
  if (asked.size() > family.size()) {
    const char *begin = asked.data() + family.size() + 1, *end = asked.data() + asked.size();
    if (asked[family.size()] != ':' || begin == end || *begin == '-') return unknown();
    if (const auto read = std::from_chars(begin, end, index); read.ec != std::errc() || read.ptr != end) return unknown();
  }
  const DeviceKernels* kernels = cuda_kernels();
  if (!kernels) return Status::error(Code::unsupported, "device '%.40s': this build of Kvasir has no CUDA", name);
  int count = 0;
  if (const int error = kernels->count(&count)) return Status::error(Code::not_found, "device '%.40s': %s", name, kernels->error_text(error));
  if (index >= count) return Status::error(Code::not_found, "device '%.40s' is not there: this machine has %d", name, count);
  int major = 0, minor = 0;
  if (const int error = kernels->capability(index, &major, &minor))
    return Status::error(Code::device, "device '%.40s': %s", name, kernels->error_text(error));
  if (major < oldest_capability)
    return Status::error(Code::not_found, "device '%.40s' has compute capability %d.%d; %d.0 or newer is needed", name, major, minor, oldest_capability);
  std::shared_ptr<Device> device(new Device(*kernels, budget));
  device->name_ = "cuda:" + std::to_string(index);
  if (const int error = kernels->open(index, &device->context_)) return device->status(error, "its kernels");
  if (const int error = kernels->describe(device->context_, &device->info_)) return device->status(error, "what it is");
  const uint64_t unused = device->info_.free_bytes;
  if (budget == 0) device->budget_ = unused - std::min(unused / 8, most_reserve);
  *out = std::move(device);
  return {};
}

Status Device::status(int error, const char* what) const {
  if (error == 0) return {};
  if (kernels_.is_out_of_memory(error)) return Status::error(Code::no_memory, "%s has no memory for %s", name_.c_str(), what);
  return Status::error(Code::device, "%s failed (%s): %s", name_.c_str(), what, kernels_.error_text(error));
}

Status Device::allocate(std::size_t size, const char* what, void** out) {
  const uint64_t taken = taken_by(size);
  uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    if (taken > budget_ - used)
      return Status::error(Code::no_memory, "%s: %s would take %" PRIu64 " bytes; %" PRIu64 " of %" PRIu64 " are left", name_.c_str(), what, taken,
                           budget_ - used, budget_);
  } while (!used_.compare_exchange_weak(used, used + taken, std::memory_order_relaxed));
  const int error = kernels_.allocate(context_, size, out);
  if (error) used_.fetch_sub(taken, std::memory_order_relaxed);
  return status(error, what);
}

Status Device::share(uint64_t* begin, uint64_t* end, uint64_t* seen) {
  constexpr uint64_t system_page = 4096;
  const uint64_t first = *begin / system_page * system_page, last = (*end + system_page - 1) / system_page * system_page;
  const std::lock_guard lock(sharing_);
  auto at = std::find_if(shared_.begin(), shared_.end(), [&](const Shared& s) { return s.begin <= first && last <= s.end; });
  if (at == shared_.end()) {
    shared_.reserve(shared_.size() + 1);
    Shared fresh{first, last, 0, 0};
    if (const int error = kernels_.share_host(context_, reinterpret_cast<const void*>(first), last - first, &fresh.seen))
      return kernels_.is_out_of_memory(error)
                 ? status(error, "the processor's memory that it reads")
                 : Status::error(Code::unsupported, "%s cannot read the processor's memory: %s", name_.c_str(), kernels_.error_text(error));
    at = shared_.insert(shared_.end(), fresh);
  }
  ++at->users;
  *begin = at->begin, *end = at->end, *seen = at->seen;
  return {};
}

void Device::unshare(uint64_t begin) {
  const std::lock_guard lock(sharing_);
  const auto at = std::find_if(shared_.begin(), shared_.end(), [&](const Shared& s) { return s.begin == begin; });
  if (--at->users > 0) return;
  (void)kernels_.unshare_host(context_, reinterpret_cast<const void*>(begin));
  shared_.erase(at);
}

void Device::release(void* memory, std::size_t size) {
  (void)kernels_.release(context_, memory);
  used_.fetch_sub(taken_by(size), std::memory_order_relaxed);
}

}  // namespace kvasir
