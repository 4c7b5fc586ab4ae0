#include "session/number_arrays.h"

#include <atomic>
#include <bit>
#include <cstring>

#include "backend/kernels.h"
#include "backend/parallel_chunks.h"
#include "base/magnitude.h"

namespace kvasir {

namespace {

// bytes per task when the task computes, not only copies
constexpr std::size_t small_piece = std::size_t{1} << 17;
constexpr float too_large = 1e30f;

// Rounds to nearest, ties to even; overflow is infinity.
uint16_t to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u,
                 magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u)  // subnormal: an addition shifts and rounds
    return static_cast<uint16_t>(
        sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u));
  return static_cast<uint16_t>(sign |
                               (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

uint16_t to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace

bool read_numbers(const NumberArray& from, ThreadPool* pool, Array<float>* to) {
  if (to->size() < from.count) to->resize(from.count);
  const TensorType types[] = {TensorType::f32, TensorType::f16, TensorType::bf16};
  const std::size_t size = size_of(from.type);
  const auto* begin = static_cast<const std::byte*>(from.numbers) + from.first * size;
  std::atomic<bool> good{true};
  parallel_chunks(
      from.count * sizeof(float), pool,
      [&](std::size_t at, std::size_t bytes) {
        const std::size_t first = at / sizeof(float), n = bytes / sizeof(float);
        const WeightView view{begin + first * size, types[static_cast<std::size_t>(from.type)], 1,
                              static_cast<uint32_t>(n), 0};
        cpu_kernels().dequantize_row(view, 0, to->data() + first);
        if (!all_below({to->data() + first, n}, too_large))
          good.store(false, std::memory_order_relaxed);
      },
      small_piece);
  return good.load(std::memory_order_relaxed);
}

void write_numbers(Numbers type, const float* from, std::size_t count, void* to) {
  if (type == Numbers::f32) {
    std::memcpy(to, from, count * sizeof *from);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const uint16_t x = type == Numbers::f16 ? to_f16(from[i]) : to_bf16(from[i]);
    std::memcpy(static_cast<std::byte*>(to) + i * sizeof x, &x, sizeof x);
  }
}

}  // namespace kvasir
