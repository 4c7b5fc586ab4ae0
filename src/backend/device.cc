#include "backend/device.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/checked.h"
#include "base/quoted.h"

namespace kvasir {

constexpr int oldest_capability = 8;
constexpr uint64_t max_reserve = uint64_t{512} << 20;  // for streams, graphs and the screen
constexpr std::string_view family = "cuda", all = "all";

namespace {

// The numbers that a name asks for; none: all.
bool parse(std::string_view name, std::vector<int>* out) {
  if (name == "auto") return true;
  for (bool more = true; more;) {
    const std::size_t comma = name.find(',');
    std::string_view asked = name.substr(0, comma);
    more = comma != name.npos;
    const bool alone = !more && out->empty();
    name.remove_prefix(more ? comma + 1 : name.size());
    if (!asked.starts_with(family)) return false;
    asked.remove_prefix(family.size());
    int index = 0;
    if (!asked.empty()) {
      if (!asked.starts_with(':')) return false;
      asked.remove_prefix(1);
      if (asked == all) return alone;
      if (asked.empty() || asked[0] == '-') return false;
      if (const auto read = std::from_chars(asked.data(), asked.data() + asked.size(), index);
          read.ec != std::errc() || read.ptr != asked.data() + asked.size())
        return false;
    }
    out->push_back(index);
  }
  return true;
}

// Memory of the CPU's that devices read. A process shares it once: for all devices.
struct Shared {
  uint64_t begin, end, seen;
  uint32_t users;
  std::shared_ptr<Device> by;  // who sees it at `seen`
};
struct Sharing {
  std::mutex mutex;
  std::vector<Shared> memory;
};
// Never destroyed: a program may close its last session when it exits.
Sharing& sharing() {
  static Sharing& shared = *new Sharing;
  return shared;
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
  std::vector<int> asked;
  if (!parse(name, &asked))
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
  const bool every = asked.empty();
  for (int i = 0; every && i < count; ++i) asked.push_back(i);
  if (asked.empty())
    return Status::error(Code::not_found, "device '%s': this machine has none", text);
  std::vector<int> found;
  Status too_old;
  for (const int index : asked) {
    if (index >= count)
      return Status::error(Code::not_found,
                           "device '%s': cuda:%d is not there: this machine has %d", text, index,
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
    return device->status(error, "its kernels");
  if (const int error = kernels.describe(device->context_, &device->info_))
    return device->status(error, "what it is");
  const uint64_t unused = device->info_.free_bytes;
  if (budget == 0) device->budget_ = (unused - std::min(unused / 8, max_reserve)) / users;
  *out = std::move(device);
  return {};
}

Status Device::status(int error, const char* what) const {
  if (error == 0) return {};
  if (kernels_.is_out_of_memory(error))
    return Status::error(Code::no_memory, "%s has no memory for %s", name_.c_str(), what);
  return Status::error(Code::device, "%s failed (%s): %s", name_.c_str(), what,
                       kernels_.error_text(error));
}

Status Device::allocate(std::size_t size, const char* what, void** out) {
  const uint64_t taken = taken_by(size);
  uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    if (taken > budget_ - used)
      return Status::error(Code::no_memory,
                           "%s: %s would take %" PRIu64 " bytes; %" PRIu64 " of %" PRIu64
                           " are left",
                           name_.c_str(), what, taken, budget_ - used, budget_);
  } while (!used_.compare_exchange_weak(used, used + taken, std::memory_order_relaxed));
  const int error = kernels_.allocate(context_, size, out);
  if (error) used_.fetch_sub(taken, std::memory_order_relaxed);
  return status(error, what);
}

void Device::keep_host(std::size_t staged) {
  const auto keep = [&](std::size_t bytes, std::byte** to, std::size_t* its_bytes) {
    void* memory = nullptr;
    if (*to || kernels_.allocate_host(context_, bytes, &memory)) return;
    *to = static_cast<std::byte*>(memory), *its_bytes = bytes;
  };
  const std::scoped_lock lock(staging_mutex_, host_mutex_);
  keep(staged, &staging_, &staging_bytes_);
  if (host_) return;
  keep(staged / 2 / FreeSpace::alignment * FreeSpace::alignment, &host_, &host_bytes_);
  host_free_ = FreeSpace(host_bytes_);
}

Status Device::allocate_host(std::size_t size, void** out) {
  const std::size_t taken = round_up(std::max<std::size_t>(size, 1), FreeSpace::alignment);
  {
    const std::lock_guard lock(host_mutex_);
    if (std::size_t at = 0; host_free_.take(taken, &at)) return *out = host_ + at, Status();
  }
  return status(kernels_.allocate_host(context_, size, out), "memory that it shares with the CPU");
}

void Device::release_host(void* memory, std::size_t size) {
  const auto at = static_cast<std::size_t>(static_cast<std::byte*>(memory) - host_);
  if (!host_ || at >= host_bytes_) return (void)kernels_.release_host(context_, memory);
  const std::lock_guard lock(host_mutex_);
  host_free_.give(at, round_up(std::max<std::size_t>(size, 1), FreeSpace::alignment));
}

Status Device::stage(std::size_t least, const CancelLatch& cancel, Staging* out) {
  constexpr std::chrono::milliseconds between(10);  // looks at what cancels
  std::unique_lock lock(staging_mutex_, std::defer_lock);
  // ThreadSanitizer of GCC 12 does not know try_lock_for()
  while (!lock.try_lock_until(std::chrono::system_clock::now() + between))
    if (cancel.fired()) return Status::error(Code::cancelled, "cancelled; nothing was changed");
  if (least > staging_bytes_) {
    if (staging_) (void)kernels_.release_host(context_, staging_);
    staging_ = nullptr, staging_bytes_ = 0;
    void* memory = nullptr;
    if (Status s = status(kernels_.allocate_host(context_, least, &memory),
                          "memory that it shares with the CPU");
        !s.ok())
      return s;
    staging_ = static_cast<std::byte*>(memory), staging_bytes_ = least;
  }
  *out = {std::move(lock), staging_, staging_bytes_};
  return {};
}

PageRates Device::page_rates(uint32_t threads) const {
  const std::lock_guard lock(rates_mutex_);
  for (const auto& [its_threads, rates] : rates_)
    if (its_threads == threads) return rates;
  return {};
}

void Device::set_page_rates(uint32_t threads, const PageRates& rates) {
  const std::lock_guard lock(rates_mutex_);
  std::erase_if(rates_, [&](const auto& r) { return r.first == threads; });
  rates_.emplace_back(threads, rates);
}

Status Device::share(uint64_t* begin, uint64_t* end, uint64_t* allowance, uint64_t* seen) {
  constexpr uint64_t system_page = 4096;
  const uint64_t first = *begin / system_page * system_page,
                 last = (*end + system_page - 1) / system_page * system_page;
  const auto failed = [&](int error) {
    return kernels_.is_out_of_memory(error)
               ? status(error, "host memory that it reads")
               : Status::error(Code::unsupported, "%s cannot read host memory: %s", name_.c_str(),
                               kernels_.error_text(error));
  };
  const std::lock_guard lock(sharing().mutex);
  std::vector<Shared>& shared = sharing().memory;
  auto at = std::find_if(shared.begin(), shared.end(),
                         [&](const Shared& s) { return s.begin <= first && last <= s.end; });
  if (at == shared.end()) {
    if (*allowance == 0) return *seen = 0, Status();
    shared.reserve(shared.size() + 1);
    Shared fresh{first, last, 0, 0, shared_from_this()};
    if (const int error = kernels_.register_host(context_, reinterpret_cast<const void*>(first),
                                                 last - first, &fresh.seen))
      return failed(error);
    at = shared.insert(shared.end(), std::move(fresh));
    *allowance -= std::min(*allowance, last - first);
  }
  uint64_t its = at->seen;
  if (at->by.get() != this)
    if (const int error =
            kernels_.map_host(context_, reinterpret_cast<const void*>(at->begin), &its))
      return failed(error);
  ++at->users;
  *begin = at->begin, *end = at->end, *seen = its;
  return {};
}

void Device::unshare(uint64_t begin) {
  std::shared_ptr<Device> by;  // closed, where nobody else has it, after the lock
  const std::lock_guard lock(sharing().mutex);
  std::vector<Shared>& shared = sharing().memory;
  const auto at =
      std::find_if(shared.begin(), shared.end(), [&](const Shared& s) { return s.begin == begin; });
  if (--at->users > 0) return;
  by = std::move(at->by);
  (void)by->kernels_.unshare_host(by->context_, reinterpret_cast<const void*>(begin));
  shared.erase(at);
}

void Device::release(void* memory, std::size_t size) {
  (void)kernels_.release(context_, memory);
  used_.fetch_sub(taken_by(size), std::memory_order_relaxed);
}

}  // namespace kvasir
