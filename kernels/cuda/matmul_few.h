// Products of quantised weights with 2 to 64 inputs, the size of a question. They are bound by
// reading the weights: asynchronous copies to shared memory bring weights while earlier ones are
// multiplied. Each output is computed by the same operations in the same order as by the tiles of
// matmul.cu, so it does not depend on the number of inputs.
#pragma once

#include <algorithm>

#include "dependent.h"
#include "formats.h"
#include "integer_products.h"
#include "products.h"
#include "tiles.h"
#include "weight_words.h"

namespace kvasir::cuda {

constexpr uint32_t warps = few_threads / 32;

// Waits until all groups of copies except the last `younger` have arrived.
template <int younger>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(younger) : "memory");
}
__device__ inline void wait_for_step(uint32_t steps) {  // the oldest of a ring of `steps` steps
  static_assert(max_few_steps == 6);
  if (steps >= 6) wait_for_copies<4>();
  else if (steps >= 4) wait_for_copies<2>();
  else if (steps == 3) wait_for_copies<1>();
  else wait_for_copies<0>();
}

// Threads that bring steps of so many units to shared memory for themselves: a block, or a warp.
template <uint32_t threads_, uint32_t units_>
struct Team {
  static constexpr uint32_t threads = threads_, units = units_;
  static __device__ uint32_t thread() { return threadIdx.x % threads; }
  static __device__ void sync() {
    if constexpr (threads == 32) __syncwarp();
    else __syncthreads();
  }
};
using Block = Team<few_threads, few_units>;

// The beginnings of the parts of a step's memory. The gaps between rows put the words that a warp
// reads of eight rows at once into different banks.
template <TensorType type, class Its = Block>
struct Step {
  using F = Format<type>;
  static constexpr bool super = F::super_bytes != 0;
  static constexpr uint32_t low_pitch = few_pitch(F::low * 4, Its::units),
                            high_pitch = F::high ? few_pitch(F::high * 4, Its::units) : 0,
                            scale_pitch = few_scale_pitch(type, Its::units),
                            input_pitch = few_pitch(32, Its::units);
  // inputs_there: a multiple of 8.
  uint32_t high, scales, supers, inputs, input_scales, sums, inputs_there;
  __device__ Step(uint32_t rows, uint32_t n)
      : high(rows * low_pitch), scales(high + rows * high_pitch),
        supers(scales + rows * scale_pitch), inputs(supers + rows * (super ? 4 : 0)),
        input_scales(inputs + n * input_pitch), sums(input_scales + n * Its::units * 4),
        inputs_there(n) {}
};

// The block's part: units of row r from first + r * units on.
struct Part {
  std::size_t first;
  uint32_t rows, units, n;
};

// Copies a step's units, from `at` on, of a plane with `bytes` per unit, `size` bytes at a time.
template <class Its, uint32_t bytes, uint32_t size>
__device__ inline void copy_plane(uint32_t to, uint32_t pitch, const uint8_t* plane,
                                  const Part& part, uint32_t at) {
  constexpr uint32_t pieces = Its::units * bytes / size, stride = Its::threads / pieces;
  static_assert(Its::threads % pieces == 0 && (size == 16 || size == 8 || size == 4));
  const uint32_t piece = Its::thread() % pieces;
  if (at + piece * size / bytes >= part.units) return;
#pragma unroll 1
  for (uint32_t r = Its::thread() / pieces; r < part.rows; r += stride) {
    const uint8_t* from =
        plane + (part.first + std::size_t{r} * part.units + at) * bytes + piece * size;
    if constexpr (size == 16) copy_async(to + r * pitch + piece * size, from);
    else if constexpr (size == 8) copy_words_async(to + r * pitch + piece * size, from);
    else copy_word_async(to + r * pitch + piece * size, from, true);
  }
}

template <class Its, TensorType type>
__device__ inline void copy_weights(uint32_t to, const Step<type, Its>& step, const Planes& w,
                                    const Part& part, uint32_t at) {
  using F = Format<type>;
  using S = Step<type, Its>;
  constexpr bool super = S::super;  // then the units are a multiple of 8
  // A super block's scales: as many bytes at a time as a step has, up to 16.
  constexpr uint32_t together = super ? std::min(16u, Its::units * F::scale_bytes) : 4;
  copy_plane<Its, F::low * 4, 16>(to, S::low_pitch, w.low, part, at);
  if constexpr (F::high != 0)
    copy_plane<Its, F::high * 4, super ? 16 : 4>(to + step.high, S::high_pitch, w.high, part, at);
  if constexpr (super || F::scale_bytes == 4) {
    copy_plane<Its, F::scale_bytes, together>(to + step.scales, S::scale_pitch, w.scales, part, at);
  } else {  // two at a time, from an even one on
    constexpr uint32_t words = Its::units;
    const uint32_t word = Its::thread() % words;
#pragma unroll 1
    for (uint32_t r = Its::thread() / words; r < part.rows; r += Its::threads / words) {
      const std::size_t begin = part.first + std::size_t{r} * part.units + at, odd = begin % 2;
      if (2 * word < min(Its::units, part.units - at) + odd)
        copy_word_async(to + step.scales + r * S::scale_pitch + word * 4,
                        w.scales + (begin - odd + 2 * word) * 2, true);
    }
  }
  if constexpr (super) {  // of two bytes: two at a time, from an even one on
    if (const uint32_t r = Its::thread(); r < part.rows) {
      const std::size_t super_block = (part.first + std::size_t{r} * part.units + at) / 8;
      copy_word_async(to + step.supers + r * 4,
                      w.supers + (F::super_bytes == 4 ? super_block : super_block / 2) * 4, true);
    }
  }
}

template <class Its, TensorType type>
__device__ inline void copy_inputs(uint32_t to, const Step<type, Its>& step, const int8_t* q,
                                   const float* scale, const int16_t* sums, const Part& part,
                                   uint32_t at) {
  constexpr uint32_t units = Its::units, pieces = units * 2;
  const uint32_t piece = Its::thread() % pieces;
  if (at + piece / 2 < part.units)
#pragma unroll 1
    for (uint32_t i = Its::thread() / pieces; i < part.n; i += Its::threads / pieces)
      copy_async(to + step.inputs + i * Step<type, Its>::input_pitch + piece * 16,
                 q + (std::size_t{i} * part.units + at) * 32 + piece * 16);
  const uint32_t k = Its::thread() % units;
  const bool there = at + k < part.units;
#pragma unroll 1
  for (uint32_t i = Its::thread() / units; i < part.n; i += Its::threads / units) {
    const std::size_t unit = there ? std::size_t{i} * part.units + at + k : 0;
    const uint32_t word = (k * step.inputs_there + i) * 4;
    copy_word_async(to + step.input_scales + word, scale + unit, there);
    if constexpr (Format<type>::has_offset)
      copy_word_async(to + step.sums + word, sums + 2 * unit, there);
  }
}

// Adds the products of a unit. of[i]: scale and offset of row r + i * 8, per half; b: 8 inputs, of
// which this thread has the sums of two.
template <TensorType type>
__device__ inline void add_unit(float (&total)[4], const uint32_t (&a)[4],
                                const float2 (&scale_offsets)[2][2], const uint32_t (&b)[2],
                                float2 scales, [[maybe_unused]] int2 sums) {
  using F = Format<type>;
  float part[4];
#pragma unroll
  for (int half = 0; half < (F::two_scales ? 2 : 1); ++half) {
    int d[4];
    if constexpr (F::two_scales)
      multiply_16_from(d, as_float, a[2 * half], a[2 * half + 1], b[half]);
    else multiply_32_from(d, as_float, a, b);
#pragma unroll
    for (int c = 0; c < 4; ++c) {  // row c / 2 * 8, input c % 2
      const float2 scale_offset = scale_offsets[c / 2][half];
      if (half == 0)
        // Exact except for one rounding: a scale has less than 20 bits.
        part[c] = __fmaf_rn(scale_offset.x, __int_as_float(d[c]), scale_offset.x * -as_float_value);
      else part[c] = __fmaf_rn(scale_offset.x, __int_as_float(d[c]) - as_float_value, part[c]);
      if constexpr (F::has_offset) {
        // of the two sums of a unit
        const int ones = F::two_scales ? half ? 0x0100 : 0x0001 : 0x0101;
        const float sum =
            __int_as_float(__dp2a_lo(c % 2 ? sums.y : sums.x, ones, as_float)) - as_float_value;
        part[c] = __fmaf_rn(scale_offset.y, sum, part[c]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) total[c] = __fmaf_rn(part[c], c % 2 ? scales.y : scales.x, total[c]);
}

// A warp has 16 of the block's rows, and every groups-th tile of 8 inputs.
template <TensorType type>
struct Share {
  uint32_t row, group, groups, tiles;
  __device__ Share(uint32_t rows_of_block, uint32_t inputs)
      : row(threadIdx.x / 32 % (rows_of_block / 16) * 16),
        group(threadIdx.x / 32 / (rows_of_block / 16)), groups(warps / (rows_of_block / 16)),
        tiles(inputs / 8) {}
};

// The scales and offsets of unit at + k of a row of the block.
template <TensorType type, class Its>
__device__ inline void load_scales(float2 (&to)[2], const uint8_t* memory,
                                   const Step<type, Its>& step, const Part& part, uint32_t row,
                                   uint32_t at, uint32_t k) {
  using F = Format<type>;
  using S = Step<type, Its>;
  const std::size_t first = part.first + std::size_t{row} * part.units + at;
  const uint32_t odd = !S::super && F::scale_bytes == 2 ? first % 2 : 0,
                 odd_super = F::super_bytes == 2 ? first / 8 % 2 : 0;
  const Planes scales{nullptr, nullptr,
                      const_cast<uint8_t*>(memory + step.scales + row * S::scale_pitch +
                                           (k + odd) * F::scale_bytes),
                      const_cast<uint8_t*>(memory + step.supers + row * 4 + odd_super * 2)};
  F::scales(scales, 0, to);
}

// Units [at, at + few_units) at `memory`, or as many as exist. Sums are in shared memory: unrolling
// the loop over tiles, for registers, would make the code large.
template <TensorType type>
__device__ inline void multiply_step(float4* totals, const uint8_t* memory, const Step<type>& step,
                                     const Share<type>& share, const Part& part, uint32_t at) {
  using F = Format<type>;
  using S = Step<type>;
  // Units whose loads and products do not depend on each other.
  constexpr uint32_t units_at_once = F::two_scales ? 2 : 4;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, r = share.row + g;
#pragma unroll 1
  for (uint32_t k = 0; k < few_units && at + k < part.units; k += units_at_once) {
    uint32_t a[units_at_once][4];
    float2 scale_offsets[units_at_once][2][2];
#pragma unroll
    for (uint32_t u = 0; u < units_at_once; ++u) {
      if constexpr (F::low == 8)
        load_matrices(a[u], shared_address(memory + (share.row + lane % 16) * S::low_pitch +
                                           (k + u) * 32 + lane / 16 * 16));
      else
        load_weights<type, S::low_pitch, S::high_pitch>(
            a[u], memory + r * S::low_pitch + (k + u) * (F::low * 4),
            memory + step.high + r * S::high_pitch + (k + u) * (F::high * 4), t);
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
      for (uint32_t u = 0; u < units_at_once; ++u)
        load_scales(scale_offsets[u][i], memory, step, part, r + i * 8, at, k + u);
    if (!S::super && at + k + units_at_once > part.units) {  // nothing was copied beyond the row
#pragma unroll
      for (uint32_t u = 0; u < units_at_once; ++u)
        if (at + k + u >= part.units) scale_offsets[u][0][0] = scale_offsets[u][1][0] = {};
    }
    float4* sum = totals;
#pragma unroll 1
    for (uint32_t tile = share.group; tile < share.tiles;
         tile += share.groups, sum += few_threads) {
      float total[4] = {sum->x, sum->y, sum->z, sum->w};
      const uint32_t input_address = shared_address(
          memory + step.inputs + (tile * 8 + lane % 8) * few_pitch(32) + k * 32 + lane / 8 * 16);
      const uint32_t word = (k * step.inputs_there + tile * 8 + 2 * t) * 4;
#pragma unroll
      for (uint32_t u = 0; u < units_at_once; u += 2) {
        uint32_t b[4];
        load_matrices(b, input_address + u * 32);
#pragma unroll
        for (uint32_t v = u; v < u + 2; ++v) {
          const uint32_t sum_word = word + v * step.inputs_there * 4;
          const float2 scales =
              *reinterpret_cast<const float2*>(memory + step.input_scales + sum_word);
          const int2 sums = F::has_offset
                                ? *reinterpret_cast<const int2*>(memory + step.sums + sum_word)
                                : int2{};
          const uint32_t both[2] = {b[v % 2 * 2], b[v % 2 * 2 + 1]};
          add_unit<type>(total, a[v], scale_offsets[v], both, scales, sums);
        }
      }
      *sum = make_float4(total[0], total[1], total[2], total[3]);
    }
  }
}

// Brings a team's steps, one after the other, through a ring in shared memory, and calls
// multiply(memory, at) for each: it has the units from `at` on. Those begin at `first`, `stride`
// units apart.
template <class Its, TensorType type, class Multiply>
__device__ inline void for_each_step(const Planes& w, const Part& part, const Step<type, Its>& step,
                                     const int8_t* q, const float* scale, const int16_t* sums,
                                     uint8_t* memory, uint32_t bytes, uint32_t steps,
                                     uint32_t first, uint32_t stride, Multiply&& multiply) {
  uint32_t to = 0, from = 0;  // indices in the ring
#pragma unroll 1
  for (uint32_t copied = first, at = first; at < part.units; copied += stride) {
    const bool filled = copied >= first + (steps - 1) * stride;
    if (filled) {
      wait_for_step(steps);
      // The oldest copies have arrived, and nobody reads the former content any more.
      Its::sync();
    }
    if (copied < part.units) {
      copy_weights<Its>(shared_address(memory) + to * bytes, step, w, part, copied);
      copy_inputs<Its>(shared_address(memory) + to * bytes, step, q, scale, sums, part, copied);
    }
    copies_given();
    to = to + 1 == steps ? 0 : to + 1;
    if (!filled) continue;
    multiply(memory + from * bytes, at);
    at += stride;
    from = from + 1 == steps ? 0 : from + 1;
  }
}

template <TensorType type>
__device__ inline void multiply_few(const Rows& block, uint32_t units, uint32_t n, const int8_t* q,
                                    const float* scale, const int16_t* sums, uint32_t block_rows,
                                    uint32_t steps) {
  using F = Format<type>;
  static_assert(F::has_offset == has_sums(type));
  extern __shared__ __align__(128) uint8_t memory[];
  const Product& product = block.product;
  const uint32_t first_row = block.first;
  const Part part{block.first_weights * units, min(block_rows, product.rows - first_row), units, n};
  const uint32_t inputs = (n + 7) / 8 * 8, bytes = few_step_bytes(type, block_rows, inputs);
  const Step<type> step(block_rows, inputs);
  const Share<type> share(block_rows, inputs);
  const Planes& w = product.w;
  // Bytes of a row that are prefetched while the previous kernel works.
  const uint32_t early = min((steps - 1) * few_units, units) * (F::low * 4);
#pragma unroll 1
  for (uint32_t r = threadIdx.x / 8; r < part.rows; r += few_threads / 8)
    for (uint32_t i = threadIdx.x % 8 * 128; i < early; i += 8 * 128)
      prefetch(w.low + (part.first + std::size_t{r} * units) * (F::low * 4) + i);
  after_previous();
  // Private to this thread.
  float4* const totals = reinterpret_cast<float4*>(memory + steps * bytes) + threadIdx.x;
  for (uint32_t tile = share.group, j = 0; tile < share.tiles; tile += share.groups, ++j)
    totals[j * few_threads] = {};
  for_each_step(w, part, step, q, scale, sums, memory, bytes, steps, 0, few_units,
                [&](const uint8_t* from, uint32_t at) {
                  if (share.group < share.tiles)
                    multiply_step<type>(totals, from, step, share, part, at);
                });
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
  for (uint32_t tile = share.group, j = 0; tile < share.tiles; tile += share.groups, ++j) {
    const float4 sum = totals[j * few_threads];
    const float each[4] = {sum.x, sum.y, sum.z, sum.w};
    for (uint32_t c = 0; c < 4; ++c) {  // row c / 2 * 8, input c % 2
      const uint32_t row = first_row + share.row + g + c / 2 * 8, input = tile * 8 + 2 * t + c % 2;
      if (row < product.rows && input < n) put(block.add, product, input, row, each[c]);
    }
  }
}

}  // namespace kvasir::cuda
