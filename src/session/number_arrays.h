// Arrays of numbers of callers that bring their own weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/thread_pool.h"
#include "base/memory.h"

namespace kvasir {

// Element type of the caller's contiguous arrays, of any alignment.
enum class Numbers : uint32_t { f32 = 0, f16 = 1, bf16 = 2 };

constexpr std::size_t size_of(Numbers type) {
  return type == Numbers::f32 ? sizeof(float) : sizeof(uint16_t);
}

// Copies numbers [first, first + count) of an array to the beginning of *to, which grows. False:
// one is NaN, infinity or of a magnitude over 1e30. Smaller ones keep sums and differences finite.
struct NumberArray {
  Numbers type = Numbers::f32;
  const void* numbers = nullptr;
  std::size_t first = 0, count = 0;
};
bool read_numbers(const NumberArray& from, ThreadPool* pool, Array<float>* to);

void write_numbers(Numbers type, const float* from, std::size_t count, void* to);

}  // namespace kvasir
