#include "backend/device.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <mutex>
#include <string_view>
#include <utility>

#include "backend/parallel_chunks.h"
#include "base/checked.h"
#include "base/memory.h"
#include "base/quoted.h"
#include "os/os.h"

namespace kvasir {

constexpr int oldest_capability = 8;
constexpr uint64_t max_reserve = uint64_t{512} << 20;  // for streams, graphs and the screen
constexpr std::string_view family = "cuda", all = "all";

namespace {

// The numbers in a device name; none: all.
bool parse(std::string_view name, std::vector<int>* out) {
  if (name == "auto") return true;
  for (bool more = true; more;) {
    const std::size_t comma = name.find(',');
    std::string_view entry = name.substr(0, comma);
    more = comma != name.npos;
    const bool alone = !more && out->empty();
    name.remove_prefix(more ? comma + 1 : name.size());
    if (!entry.starts_with(family)) return false;
    entry.remove_prefix(family.size());
    int index = 0;
    if (!entry.empty()) {
      if (!entry.starts_with(':')) return false;
      entry.remove_prefix(1);
      if (entry == all) return alone;
      if (entry.empty() || entry[0] == '-') return false;
      if (const auto read = std::from_chars(entry.data(), entry.data() + entry.size(), index);
          read.ec != std::errc() || read.ptr != entry.data() + entry.size())
        return false;
    }
    out->push_back(index);
  }
  return true;
}

// Host memory that devices read. A process registers it once for all devices.
struct Region {
  uint64_t begin, end;
  uint64_t mapped;  // the owner's address of it
  uint32_t users;
  std::shared_ptr<Device> owner;
};
struct Registry {
  std::mutex mutex;
  std::vector<Region> regions;
};
// Never destroyed: a program may close its last session when it exits.
Registry& registry() {
  static Registry& only = *new Registry;
  return only;
}

}  // namespace

Device::~Device() {
  for (std::byte* memory : {staging_, host_})
    if (memory) (void)kernels_.release_host(context_, memory);
  if (context_) (void)kernels_.close(context_);
}

Status Device::find(const std::string& name, std::vector<int>* out) {
  const Quoted quoted(name);
  const char* const text = quoted.text();
  std::vector<int> indices;
  if (!parse(name, &indices))
    return Status::error(Code::bad_argument,
                         "device '%s' is not known: \"cpu\", \"auto\", \"cuda\", \"cuda:N\", a "
                         "list as \"cuda:0,cuda:1\", or \"cuda:all\"",
                         text);
  const DeviceKernels* kernels = cuda_kernels();
  if (!kernels)
    return Status::error(Code::unsupported, "device '%s': this build of Kvasir has no CUDA", text);
  int count = 0;
  if (const int error = kernels->count(&count))
    return Status::error(Code::not_found, "device '%s': %s", text, kernels->error_text(error));
  const bool every = indices.empty();
  for (int i = 0; every && i < count; ++i) indices.push_back(i);
  if (indices.empty())
    return Status::error(Code::not_found, "device '%s': this machine has no GPU", text);
  std::vector<int> found;
  Status too_old;
  for (const int index : indices) {
    if (index >= count)
      return Status::error(Code::not_found,
                           "device '%s': cuda:%d does not exist: this machine has %d", text, index,
                           count);
    int major = 0, minor = 0;
    if (const int error = kernels->capability(index, &major, &minor))
      return Status::error(Code::device, "device '%s': cuda:%d: %s", text, index,
                           kernels->error_text(error));
    if (major >= oldest_capability) found.push_back(index);
    else
      too_old = Status::error(
          Code::not_found,
          "device '%s': cuda:%d has compute capability %d.%d; %d.0 or newer is needed", text, index,
          major, minor, oldest_capability);
  }
  if (!too_old.ok() && (!every || found.empty())) return too_old;
  *out = std::move(found);
  return {};
}

Status Device::open(int index, uint64_t budget, uint32_t users, std::shared_ptr<Device>* out) {
  const DeviceKernels& kernels = *cuda_kernels();
  std::shared_ptr<Device> device(new Device(kernels, budget));
  device->name_ = "cuda:" + std::to_string(index);
  if (const int error = kernels.open(index, &device->context_))
    return device->status(error, "kernels");
  if (const int error = kernels.describe(device->context_, &device->info_))
    return device->status(error, "its description");
  const uint64_t unused = device->info_.free_bytes;
  if (budget == 0) device->budget_ = (unused - std::min(unused / 8, max_reserve)) / users;
  *out = std::move(device);
  return {};
}

Status Device::status(int error, const char* subject) const {
  if (error == 0) return {};
  if (kernels_.is_out_of_memory(error))
    return Status::error(Code::no_memory, "%s has no memory for %s", name_.c_str(), subject);
  return Status::error(Code::device, "%s failed (%s): %s", name_.c_str(), subject,
                       kernels_.error_text(error));
}

Status Device::allocate(std::size_t size, const char* subject, void** out) {
  const uint64_t taken = allocated_size(size);
  uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    if (taken > budget_ - used)
      return Status::error(Code::no_memory,
                           "%s: %s need %" PRIu64 " bytes; %" PRIu64 " of %" PRIu64 " are left",
                           name_.c_str(), subject, taken, budget_ - used, budget_);
  } while (!used_.compare_exchange_weak(used, used + taken, std::memory_order_relaxed));
  const int error = kernels_.allocate(context_, size, out);
  if (error) used_.fetch_sub(taken, std::memory_order_relaxed);
  return status(error, subject);
}

void Device::reserve_host(std::size_t staging_bytes, std::size_t bytes) {
  const auto reserve = [&](std::size_t size, std::byte** to, std::size_t* reserved) {
    void* memory = nullptr;
    if (*to || kernels_.allocate_host(context_, size, &memory)) return;
    *to = static_cast<std::byte*>(memory), *reserved = size;
  };
  const std::scoped_lock lock(staging_mutex_, host_mutex_);
  reserve(staging_bytes, &staging_, &staging_bytes_);
  if (host_) return;
  reserve(bytes / FreeSpace::alignment * FreeSpace::alignment, &host_, &host_bytes_);
  host_free_ = FreeSpace(host_bytes_);
}

Status Device::allocate_host(std::size_t size, ThreadPool* pool, HostMemory* out) {
  constexpr std::size_t large = std::size_t{4} << 20;
  const std::size_t taken = round_up(std::max<std::size_t>(size, 1), FreeSpace::alignment);
  *out = {nullptr, size};
  {
    const std::lock_guard lock(host_mutex_);
    if (std::size_t at = 0; host_free_.take(taken, &at)) return out->data = host_ + at, Status();
  }
  if (size >= large && registers_ && allocate_huge(round_up(size, system_page), pool, out))
    return {};
  return status(kernels_.allocate_host(context_, size, &out->data), "pinned host memory");
}

// False: the system has none, or the device does not see it where the CPU does.
bool Device::allocate_huge(std::size_t size, ThreadPool* pool, HostMemory* out) {
  void* const memory = allocate_pages(size);
  if (!memory) return false;
  os::prefer_huge_pages(memory, size);
  parallel_chunks(size, pool, [&](std::size_t at, std::size_t n) {
    std::memset(static_cast<std::byte*>(memory) + at, 0, n);
  });
  uint64_t seen = 0;
  const bool pinned = kernels_.register_host(context_, memory, size, true, &seen) == 0;
  if (pinned && seen == reinterpret_cast<uintptr_t>(memory))
    return out->data = memory, out->is_registered = true;
  registers_ = false;
  if (pinned) (void)kernels_.unregister_host(context_, memory);
  return deallocate_pages(memory), false;
}

void Device::release_host(const HostMemory& memory) {
  if (memory.is_registered) {
    (void)kernels_.unregister_host(context_, memory.data);
    return deallocate_pages(memory.data);
  }
  const auto at = static_cast<std::size_t>(static_cast<std::byte*>(memory.data) - host_);
  if (!host_ || at >= host_bytes_) return (void)kernels_.release_host(context_, memory.data);
  const std::lock_guard lock(host_mutex_);
  host_free_.give(at, round_up(std::max<std::size_t>(memory.bytes, 1), FreeSpace::alignment));
}

Status Device::stage(std::size_t min_bytes, const CancelLatch& cancel, Staging* out) {
  constexpr std::chrono::milliseconds poll_time(10);  // of cancellation
  std::unique_lock lock(staging_mutex_, std::defer_lock);
  // ThreadSanitizer of GCC 12 does not intercept try_lock_for().
  while (!lock.try_lock_until(std::chrono::system_clock::now() + poll_time))
    if (cancel.fired()) return Status::error(Code::cancelled, "cancelled; nothing was changed");
  if (min_bytes > staging_bytes_) {
    if (staging_) (void)kernels_.release_host(context_, staging_);
    staging_ = nullptr, staging_bytes_ = 0;
    void* memory = nullptr;
    RETURN_IF_ERROR(
        status(kernels_.allocate_host(context_, min_bytes, &memory), "pinned host memory"));
    staging_ = static_cast<std::byte*>(memory), staging_bytes_ = min_bytes;
  }
  *out = {std::move(lock), staging_, staging_bytes_};
  return {};
}

PageRates Device::page_rates(uint32_t threads) const {
  const std::lock_guard lock(rates_mutex_);
  for (const auto& [count, rates] : rates_)
    if (count == threads) return rates;
  return {};
}

void Device::set_page_rates(uint32_t threads, const PageRates& rates) {
  const std::lock_guard lock(rates_mutex_);
  std::erase_if(rates_, [&](const auto& r) { return r.first == threads; });
  rates_.emplace_back(threads, rates);
}

Status Device::register_host(uint64_t* begin, uint64_t* end, uint64_t* allowance,
                             uint64_t* mapped) {
  const uint64_t first = *begin / system_page * system_page,
                 last = (*end + system_page - 1) / system_page * system_page;
  const auto failed = [&](int error) {
    return kernels_.is_out_of_memory(error)
               ? status(error, "host memory that it reads")
               : Status::error(Code::unsupported, "%s cannot read host memory: %s", name_.c_str(),
                               kernels_.error_text(error));
  };
  const std::lock_guard lock(registry().mutex);
  std::vector<Region>& regions = registry().regions;
  auto at = std::find_if(regions.begin(), regions.end(),
                         [&](const Region& r) { return r.begin <= first && last <= r.end; });
  if (at == regions.end()) {
    if (*allowance == 0) return *mapped = 0, Status();
    regions.reserve(regions.size() + 1);
    Region fresh{first, last, 0, 0, shared_from_this()};
    if (const int error = kernels_.register_host(context_, reinterpret_cast<const void*>(first),
                                                 last - first, false, &fresh.mapped))
      return failed(error);
    at = regions.insert(regions.end(), std::move(fresh));
    *allowance -= std::min(*allowance, last - first);
  }
  uint64_t address = at->mapped;
  if (at->owner.get() != this)
    if (const int error =
            kernels_.map_host(context_, reinterpret_cast<const void*>(at->begin), &address))
      return failed(error);
  ++at->users;
  *begin = at->begin, *end = at->end, *mapped = address;
  return {};
}

void Device::unregister_host(uint64_t begin) {
  std::shared_ptr<Device> owner;  // released after the lock: closes a device without other owners
  const std::lock_guard lock(registry().mutex);
  std::vector<Region>& regions = registry().regions;
  const auto at = std::find_if(regions.begin(), regions.end(),
                               [&](const Region& r) { return r.begin == begin; });
  if (--at->users > 0) return;
  owner = std::move(at->owner);
  (void)owner->kernels_.unregister_host(owner->context_, reinterpret_cast<const void*>(begin));
  regions.erase(at);
}

void Device::release(void* memory, std::size_t size) {
  (void)kernels_.release(context_, memory);
  used_.fetch_sub(allocated_size(size), std::memory_order_relaxed);
}

}  // namespace kvasir
