// Helpers of the tests of a GPU's operations: the first GPU, opened once, and poisoned memory on it
// between guards.
#pragma once

#include <doctest/doctest.h>

#include <cstdlib>
#include <string>

#include "backend/device.h"
#include "support.h"

namespace kvasir::test {

struct Gpu {
  DeviceContext* context = nullptr;
  DeviceStream* stream = nullptr;
};

// The first one, opened once. Null where there is none; with KVASIR_TEST_NEEDS_GPU set that is a
// failure.
inline Gpu* gpu() {
  static Gpu opened;
  static Gpu* const found = [] {
    const DeviceKernels* k = cuda_kernels();
    int count = 0, error = 0;
    const std::string missing = !k                           ? "this build has no CUDA"
                                : (error = k->count(&count)) ? k->error_text(error)
                                : count == 0                 ? "no GPU here"
                                                             : "";
    if (missing.empty()) {
      REQUIRE(k->open(0, &opened.context) == 0);
      REQUIRE(k->open_stream(opened.context, &opened.stream) == 0);
      return &opened;
    }
    MESSAGE("not run: ", missing);
    REQUIRE(!std::getenv("KVASIR_TEST_NEEDS_GPU"));
    return static_cast<Gpu*>(nullptr);
  }();
  return found;
}

inline DeviceStream* stream() { return gpu() ? gpu()->stream : nullptr; }

inline const DeviceKernels& ops() { return *cuda_kernels(); }
#define OK(call) REQUIRE((call) == 0)

// n elements on the device between guards; every byte 0xff at first.
template <class T>
class Memory {
 public:
  explicit Memory(std::size_t n) : n_(n), host_(n) {
    OK(ops().allocate(gpu()->context, bytes(), &memory_));
    OK(ops().upload(stream(), memory_, reinterpret_cast<std::byte*>(host_.data()) - guard,
                    bytes()));
    OK(ops().wait(stream()));
  }
  Memory(const T* from, std::size_t n) : Memory(n) { put(from); }
  ~Memory() { (void)ops().release(gpu()->context, memory_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void put(const T* from) {
    OK(ops().upload(stream(), data(), from, n_ * sizeof(T)));
    OK(ops().wait(stream()));
  }
  T* data() { return reinterpret_cast<T*>(static_cast<std::byte*>(memory_) + guard); }
  std::size_t size() const { return n_; }
  // What is there now; nothing was written around it.
  const Guarded<T>& get() {
    OK(ops().download(stream(), reinterpret_cast<std::byte*>(host_.data()) - guard, memory_,
                      bytes()));
    OK(ops().wait(stream()));
    CHECK(host_.guards_intact());
    return host_;
  }

  const Guarded<T>& got() const { return host_; }  // by the last get()

 private:
  // Guarded's own: a multiple of what device loads are aligned to
  static constexpr std::size_t guard = 256;
  std::size_t bytes() const { return n_ * sizeof(T) + 2 * guard; }
  std::size_t n_;
  Guarded<T> host_;
  void* memory_ = nullptr;
};

}  // namespace kvasir::test
