#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "backend/device_operations.h"
#include "emulated.h"
#include "state.h"

namespace kvasir {
namespace emulated {
namespace {

constexpr uint64_t own_bytes = uint64_t{64} << 20;  // of a device, in addition to its free bytes
constexpr std::size_t page = 4096, max_poisoned = std::size_t{1} << 20;

std::mutex host_mutex;
// of allocate_host(), or registered to be written; and of register_host(): all devices read it
std::map<uintptr_t, std::size_t> host_memory, shared_memory;

// Where a device has shared memory: nobody else can follow that.
constexpr uint64_t seen_bits = uint64_t{15} << 60;
uint64_t seen_by(const DeviceContext* c, uintptr_t at) {
  return at | static_cast<uint64_t>(c->index + 1) << 60;
}

uintptr_t number(const void* p) { return reinterpret_cast<uintptr_t>(p); }

bool holds(const std::map<uintptr_t, std::size_t>& regions, uintptr_t at, std::size_t size) {
  auto after = regions.upper_bound(at);
  return after != regions.begin() && (--after, at + size <= after->first + after->second);
}

bool is_host_memory(const void* p, std::size_t size) {
  const std::lock_guard lock(host_mutex);
  return holds(host_memory, number(p), size);
}

// Comes first in every call that may fail.
int begin_call(DeviceContext* c) {
  Machine& m = machine();
  const bool is_told = ++m.calls == m.fails_at;
  const int error = is_told ? m.fails_with.load() : 0;
  if (Cancel* cancel = m.fires; is_told && !error && cancel) cancel->fire();
  if (!c) return error;
  const std::lock_guard lock(c->mutex);
  if (!c->error && (error == lost || m.lost == c->index)) c->error = lost;
  return c->error ? c->error : error;
}

// The device's memory can be touched as long as one of them is there, and afterwards cannot: every
// eighth time, since that takes long.
class Working {
 public:
  explicit Working(DeviceContext* c) : c_(c) {
    const std::lock_guard lock(c_->mutex);
    if (c_->working++ == 0 && c_->is_closed) protect(PROT_READ | PROT_WRITE);
    c_->is_closed = false;
  }
  ~Working() {
    const std::lock_guard lock(c_->mutex);
    if (--c_->working > 0 || ++c_->rests % 8 != 0) return;
    protect(PROT_NONE);
    c_->is_closed = true;
  }
  Working(const Working&) = delete;
  Working& operator=(const Working&) = delete;

 private:
  void protect(int access) {
    for (const auto* memory : {&c_->memory, &c_->released})
      for (const auto& [at, size] : *memory)
        (void)mprotect(reinterpret_cast<void*>(at), size, access);
  }
  DeviceContext* const c_;
};

// What was released while there was work that might use it.
void unmap(DeviceContext* c) {
  for (const auto& [at, size] : c->released) (void)munmap(reinterpret_cast<void*>(at), size + page);
  c->released.clear();
}

int do_work(DeviceContext* c, StreamState* s, uint64_t until) {
  const Working working(c);
  while (s->done < until && !s->work.empty()) {
    const Work work = std::move(s->work.front());
    s->work.pop_front();
    ++s->done;
    const bool is_lost = (std::lock_guard(c->mutex), c->error != 0);
    const int error = is_lost ? 0 : work();
    const std::lock_guard lock(c->mutex);
    --c->waiting;
    if (error && !c->error) c->error = error;
  }
  const std::lock_guard lock(c->mutex);
  if (c->waiting == 0) unmap(c);
  return c->error;
}

int count(int* out) {
  *out = machine().count;
  const int error = begin_call(nullptr);
  return *out > 0 ? error : no_devices;
}

const char* error_text(int error) {
  if (error == misaligned) return machine().misaligned;
  return error == no_devices      ? "no driver"
         : error == out_of_memory ? "out of memory"
         : error == refused       ? "not as asked"
                                  : "it is lost";
}

bool is_out_of_memory(int error) { return error == out_of_memory; }

int capability(int index, int* major, int* minor) {
  return *major = machine().capability[index], *minor = 0, begin_call(nullptr);
}

int open(int index, DeviceContext** out) {
  if (const int error = begin_call(nullptr)) return error;
  *out = new DeviceContext;
  (*out)->index = index;
  ++machine().opened[index], ++machine().held;
  return 0;
}

int close(DeviceContext* c) {
  unmap(c);
  --machine().opened[c->index], --machine().held;
  delete c;
  return 0;
}

int describe(DeviceContext* c, DeviceInfo* out) {
  if (const int error = begin_call(c)) return error;
  const uint64_t unused = machine().free_bytes[c->index], taken = machine().bytes[c->index];
  *out = {"A device made of the CPU",       unused + own_bytes,
          unused - std::min(unused, taken), machine().multiprocessors,
          machine().registration_bytes,     machine().block_bytes};
  return 0;
}

// In pages of its own, poisoned; the one behind cannot be touched.
int allocate(DeviceContext* c, std::size_t size, void** out) {
  if (const int error = begin_call(c)) return error;
  ++machine().allocations;
  const std::size_t bytes = (std::max<std::size_t>(size, 1) + page - 1) / page * page;
  const std::lock_guard lock(c->mutex);
  if (machine().bytes[c->index] + bytes > machine().max_bytes[c->index] || size >= uint64_t{1}
                                                                                       << 40)
    return out_of_memory;
  void* at = mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return out_of_memory;
  std::memset(at, 0xff, std::min(bytes, max_poisoned));
  (void)mprotect(static_cast<std::byte*>(at) + bytes, page, PROT_NONE);
  if (c->is_closed) (void)mprotect(at, bytes, PROT_NONE);
  c->memory.emplace(number(at), bytes);
  machine().bytes[c->index] += bytes;
  ++machine().held;
  return *out = at, 0;
}

int release(DeviceContext* c, void* memory) {
  const std::lock_guard lock(c->mutex);
  const auto at = c->memory.find(number(memory));
  c->released.insert(*at);
  machine().bytes[c->index] -= at->second;
  c->memory.erase(at);
  if (c->waiting == 0) unmap(c);
  --machine().held;
  return c->error;
}

int allocate_host(DeviceContext* c, std::size_t size, void** out) {
  if (const int error = begin_call(c)) return error;
  ++machine().allocations;
  const std::size_t bytes = (std::max<std::size_t>(size, 1) + page - 1) / page * page;
  *out = std::aligned_alloc(page, bytes);
  std::memset(*out, 0xff, bytes);
  const std::lock_guard lock(host_mutex);
  host_memory.emplace(number(*out), size);
  ++machine().held;
  return 0;
}

int release_host(DeviceContext*, void* memory) {
  const std::lock_guard lock(host_mutex);
  host_memory.erase(number(memory));
  std::free(memory);
  --machine().held;
  return 0;
}

// As the driver: what is shared already, by whichever device, is not shared again. Devices see what
// they write where the CPU does.
int register_host(DeviceContext* c, const void* memory, std::size_t size, bool written,
                  uint64_t* out) {
  if (const int error = begin_call(c)) return error;
  const std::lock_guard lock(host_mutex);
  const uintptr_t begin = number(memory);
  const auto after = shared_memory.upper_bound(begin);
  const bool overlaps = (after != shared_memory.end() && after->first < begin + size) ||
                        holds(shared_memory, begin, 1);
  if (overlaps || begin % page != 0 || size % page != 0) return refused;
  if (const int error = machine().refuses_sharing) return error;
  ++machine().held;
  if (written) return host_memory.emplace(begin, size), *out = begin, 0;
  shared_memory.emplace(begin, size), ++machine().shared;
  return *out = seen_by(c, begin), 0;
}

int unregister_host(DeviceContext* c, const void* memory) {
  {
    const std::lock_guard lock(host_mutex);
    if (host_memory.erase(number(memory)) == 0) {
      if (shared_memory.erase(number(memory)) == 0) return refused;
      --machine().shared;
    }
  }
  --machine().held;
  const std::lock_guard lock(c->mutex);
  return c->error;
}

int map_host(DeviceContext* c, const void* memory, uint64_t* out) {
  if (const int error = begin_call(c)) return error;
  const std::lock_guard lock(host_mutex);
  return holds(shared_memory, number(memory), 1) ? (*out = seen_by(c, number(memory)), 0) : refused;
}

int open_stream(DeviceContext* c, DeviceStream** out) {
  if (const int error = begin_call(c)) return error;
  *out = new DeviceStream{c, std::make_shared<StreamState>()};
  ++machine().held;
  return 0;
}

int wait(DeviceStream* s) {
  if (const int error = begin_call(s->context)) return error;
  machine().waits += !s->state->work.empty();
  return do_work(s->context, s->state.get(), UINT64_MAX);
}

int close_stream(DeviceStream* s) {
  const int error = do_work(s->context, s->state.get(), UINT64_MAX);
  delete s;
  --machine().held;
  return error;
}

void count_waiting(DeviceContext* c, uint64_t more) {
  const std::lock_guard lock(c->mutex);
  c->waiting += more;
}

// Work of any kind, as enqueue() has it.
int put(DeviceStream* s, Work work) {
  if (const int error = begin_call(s->context)) return error;
  StreamState& state = *s->state;
  if (state.kept) return state.kept->work.push_back(std::move(work)), 0;
  ++machine().enqueued;
  state.work.push_back(std::move(work));
  ++state.given;
  return count_waiting(s->context, 1), 0;
}

int after(DeviceStream* s, DeviceStream* other) {
  return put(s, [c = other->context, state = other->state, until = other->state->given] {
    return do_work(c, state.get(), until);
  });
}

int upload(DeviceStream* s, void* to, const void* from, std::size_t size) {
  if (size == 0) return begin_call(s->context);
  Machine& m = machine();
  (s->state->computes ? m.uploaded : m.uploaded_beside)[s->context->index] += size;
  if (is_host_memory(from, size)) return put(s, [=] { return std::memcpy(to, from, size), 0; });
  if (s->state->kept) return refused;
  const auto* bytes = static_cast<const std::byte*>(from);
  return put(s, [to, copy = std::vector<std::byte>(bytes, bytes + size)] {
    return std::copy(copy.begin(), copy.end(), static_cast<std::byte*>(to)), 0;
  });
}

int download(DeviceStream* s, void* to, const void* from, std::size_t size) {
  return put(s, [=] { return std::memcpy(to, from, size), 0; });
}

int begin_graph(DeviceStream* s) {
  ++machine().graphs;
  if (const int error = begin_call(s->context)) return error;
  s->state->kept = new DeviceGraph;
  ++machine().held;
  return 0;
}

int release_graph(DeviceStream*, DeviceGraph* graph) {
  delete graph;
  --machine().held;
  return 0;
}

int end_graph(DeviceStream* s, DeviceGraph** out) {
  *out = std::exchange(s->state->kept, nullptr);
  const int error = begin_call(s->context);
  if (error && *out) (void)release_graph(s, std::exchange(*out, nullptr));
  return is_out_of_memory(error) ? 0 : error;
}

int run_graph(DeviceStream* s, const DeviceGraph* graph) {
  if (const int error = begin_call(s->context)) return error;
  ++machine().enqueued;
  StreamState& state = *s->state;
  state.work.insert(state.work.end(), graph->work.begin(), graph->work.end());
  state.given += graph->work.size();
  count_waiting(s->context, graph->work.size());
  return 0;
}

DeviceKernels make_table() {
  DeviceKernels k{};
#define KVASIR_FILL(name) k.name = name;
  KVASIR_DEVICE_MEMORY(KVASIR_FILL)
#undef KVASIR_FILL
  fill_operations(&k);
  return k;
}

}  // namespace

int enqueue(DeviceStream* s, Work work) {
  s->state->computes = true;
  return put(s, std::move(work));
}

const std::byte* followed(DeviceContext* c, uint64_t seen, std::size_t size) {
  const auto at = static_cast<uintptr_t>(seen & ~seen_bits);
  const auto* memory = reinterpret_cast<const std::byte*>(at);
  if (at == seen && is_host_memory(memory, size)) return memory;
  {
    const std::lock_guard lock(c->mutex);
    if (at == seen && holds(c->memory, at, size)) return memory;
  }
  const std::lock_guard lock(host_mutex);
  return seen == seen_by(c, at) && holds(shared_memory, at, size) ? memory : nullptr;
}

Machine& machine() {
  static Machine m;
  return m;
}

}  // namespace emulated

const DeviceKernels* cuda_kernels() {
  static const DeviceKernels table = emulated::make_table();
  return &table;
}

}  // namespace kvasir
