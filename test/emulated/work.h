// Helpers of the operations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "backend/kernels.h"

namespace kvasir::emulated {

template <class T>
class Aligned {
 public:
  explicit Aligned(std::size_t n)
      : data_(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 64) / 64 * 64))) {
    std::fill_n(data_, n, T{});
  }
  ~Aligned() { std::free(data_); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  T* get() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }

 private:
  T* const data_;
};

inline const Kernels& cpu() { return cpu_kernels(); }

// Partial attention of some rows, empty at first.
struct State {
  State(uint32_t n, uint32_t of_dim)
      : rows(n), dim(of_dim), o(std::size_t{n} * of_dim), m(n), l(n),
        scratch(cpu().attend_scratch(n, of_dim)) {
    std::fill_n(m.get(), n, -HUGE_VALF);
  }
  AttentionState view() { return {o.get(), m.get(), l.get()}; }
  const uint32_t rows, dim;
  Aligned<float> o, m, l;
  Aligned<std::byte> scratch;
};

}  // namespace kvasir::emulated
