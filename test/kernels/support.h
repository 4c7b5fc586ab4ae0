// Helpers of the kernel tests: poisoned arrays with guard bands, random numbers, the tables that
// this CPU can run, and errors against the double-precision reference. Standard containers only:
// these tests also build where the library's dependencies are missing.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "backend/kernels.h"

namespace kvasir::test {

// n elements of T at a 64-byte boundary, every byte 0xff (NaN in any float type, an odd value in
// the others), between two guard bands of 256 bytes.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t n) : n_(n), bytes_(n * sizeof(T)) {
    base_ = static_cast<unsigned char*>(::operator new (bytes_ + 2 * guard, std::align_val_t{64}));
    std::memset(base_, 0xff, bytes_ + 2 * guard);
  }
  ~Guarded() { ::operator delete (base_, std::align_val_t{64}); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return reinterpret_cast<T*>(base_ + guard); }
  const T* data() const { return reinterpret_cast<const T*>(base_ + guard); }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  std::size_t size() const { return n_; }

  // False when something was written outside the n elements.
  bool guards_intact() const {
    for (std::size_t i = 0; i < guard; ++i) {
      if (base_[i] != 0xff || base_[guard + bytes_ + i] != 0xff) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t guard = 256;
  std::size_t n_, bytes_;
  unsigned char* base_;
};

// Reproducible everywhere, unlike the standard distributions.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567) {}
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545f4914f6cdd1du;
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  float uniform(float lo, float hi) {
    return lo + (hi - lo) * static_cast<float>(next() >> 40) * 0x1p-24f;
  }
  // Roughly normal, mean 0, variance 1: the sum of twelve uniforms.
  float normal() {
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += uniform(0, 1);
    return sum;
  }

 private:
  uint64_t state_;
};

// Every table of this build that this CPU runs, best last, after those whose instructions it lacks
// and that run by others: emulated_tables.cc.
std::vector<const Kernels*> emulated_kernels();
inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> tables = emulated_kernels();
  const auto own = tables.end() - tables.begin();
  for (uint32_t i = 0; const Kernels* k = cpu_kernels_at(i); ++i)
    tables.insert(tables.begin() + own, k);
  return tables;
}

// |a - b| / |b| in the Euclidean norm; infinite when anything is NaN, so that an unwritten output
// never passes.
template <class A, class B>
double relative_error(const A* a, const B* b, std::size_t n) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  if (!(difference >= 0 && norm >= 0)) return std::numeric_limits<double>::infinity();
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace kvasir::test
