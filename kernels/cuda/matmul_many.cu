// Products of quantised weights with more inputs than matmul_few.cu takes, with the tensor cores'
// integer products. A block has 128 or 64 rows and 128 inputs. Two tiles of four units are in
// shared memory: one is filled while the other is multiplied. Weights stay packed there; each warp
// unpacks those that it multiplies. Each output is computed by the same operations in the same
// order as in matmul_few.cu, so it does not depend on the number of inputs. Instructions bound it,
// not the tensor cores: each sum of 32 products takes two operations in float.
#include "dependent.h"
#include "formats.h"
#include "integer_products.h"
#include "products.h"
#include "tiles.h"
#include "weight_words.h"

namespace kvasir::cuda {
namespace {

// Rows of inputs, and of weights of eight bits, are 128 bytes in pieces of 16; those of eight rows
// that a matrix is loaded from occupy all banks.
constexpr uint32_t row_bytes = many_units * 32;

__device__ inline uint32_t piece_of(uint32_t row, uint32_t at) {
  return row * row_bytes + ((at ^ (row & 7)) << 4);
}

template <TensorType type, uint32_t rows>
struct ManyTile {
  using F = Format<type>;
  static constexpr uint32_t threads = many_threads(type, rows), row_tiles = rows / 32,
                            input_tiles = threads == 256 ? 4 : 8;
  // Sums of a warp, of 16 rows by 8 inputs each.
  using Totals = float[row_tiles][input_tiles][4];
  static constexpr uint32_t low_pitch = many_pitch(F::low), high_pitch = many_pitch(F::high),
                            halves = F::two_scales ? 2 : 1, offsets = F::has_offset ? halves : 0;
  alignas(128) uint8_t inputs[many_inputs * row_bytes];
  alignas(128) uint8_t low[rows * low_pitch];
  float scales[many_units][halves][rows], scale[many_units][many_inputs];
  // What a type lacks has no bytes: the arrays follow each other.
  __device__ uint8_t* high() { return reinterpret_cast<uint8_t*>(this + 1); }
  __device__ const uint8_t* high() const { return reinterpret_cast<const uint8_t*>(this + 1); }
  __device__ float* weight_offsets() {
    return reinterpret_cast<float*>(high() + rows * high_pitch);
  }
  __device__ const float* weight_offsets() const {
    return reinterpret_cast<const float*>(high() + rows * high_pitch);
  }
  __device__ float* sums() { return weight_offsets() + many_units * offsets * rows; }
  __device__ const float* sums() const { return weight_offsets() + many_units * offsets * rows; }
  static constexpr uint32_t rest =
      rows * high_pitch + many_units * offsets * (rows + many_inputs) * 4;
};

// What a block multiplies.
struct Task {
  Planes w;
  uint32_t rows, first_row, units, n, first_input;
  const int8_t* q;
  const float* scale;
  const int16_t* sums;
};

// Starts copies of `count` rows of a tile, of units from `at` on, 16 bytes at a time. Rows beyond
// the last one repeat it; units beyond the last one are not copied.
template <uint32_t bytes, uint32_t threads, class Place>
__device__ inline void copy_rows(const Task& task, uint32_t at, uint32_t count, uint32_t first,
                                 uint32_t end, const void* from, Place&& place) {
  constexpr uint32_t pieces = many_units * bytes / 16, stride = threads / pieces;
  static_assert(threads % pieces == 0);
  const uint32_t piece = threadIdx.x % pieces, row = threadIdx.x / pieces;
  if (at + piece * 16 / bytes >= task.units) return;
  const uint8_t* const column = static_cast<const uint8_t*>(from) +
                                (std::size_t{first} * task.units + at) * bytes + piece * 16;
  const uint32_t row_size = task.units * bytes, last = end - 1 - first;
#pragma unroll
  for (uint32_t r = row; r < count; r += stride)
    copy_async(place(r, piece), column + std::size_t{min(r, last)} * row_size);
}

template <TensorType type, uint32_t rows>
__device__ inline void copy_tile(const Task& task, uint32_t at, ManyTile<type, rows>& to) {
  using F = Format<type>;
  using Tile = ManyTile<type, rows>;
  constexpr uint32_t threads = Tile::threads;
  const uint32_t inputs = shared_address(to.inputs), low = shared_address(to.low),
                 high = shared_address(to.high());
  copy_rows<32, threads>(task, at, many_inputs, task.first_input, task.n, task.q,
                         [=](uint32_t r, uint32_t piece) { return inputs + piece_of(r, piece); });
  copy_rows<F::low * 4, threads>(
      task, at, rows, task.first_row, task.rows, task.w.low, [=](uint32_t r, uint32_t piece) {
        return low + (F::low == 8 ? piece_of(r, piece) : r * Tile::low_pitch + piece * 16);
      });
  if constexpr (F::high != 0 && F::super_bytes != 0) {
    copy_rows<F::high * 4, threads>(
        task, at, rows, task.first_row, task.rows, task.w.high,
        [=](uint32_t r, uint32_t piece) { return high + r * Tile::high_pitch + piece * 16; });
  } else if constexpr (F::high != 0) {  // rows begin at multiples of a word
    static_assert(F::high == 1);
#pragma unroll
    for (uint32_t i = threadIdx.x; i < rows * many_units; i += threads) {
      const uint32_t r = i / many_units, k = i % many_units,
                     row = min(task.first_row + r, task.rows - 1);
      if (at + k < task.units)
        copy_word_async(high + r * Tile::high_pitch + k * 4,
                        task.w.high + (std::size_t{row} * task.units + at + k) * 4, true);
    }
  }
  copies_given();
}

// Scales and sums of the next tile, in registers on their way; zero beyond the last unit.
template <TensorType type, uint32_t rows>
struct Scales {
  using F = Format<type>;
  using Tile = ManyTile<type, rows>;
  static constexpr uint32_t threads = Tile::threads, weights = rows * many_units / threads,
                            inputs = many_inputs * many_units / threads;
  uint32_t of_weights[weights], supers[F::super_bytes ? weights : 1];
  float of_inputs[inputs];
  short2 sums[Tile::offsets ? inputs : 1];

  static __device__ uint32_t row_of(uint32_t i) { return (threadIdx.x + i * threads) / many_units; }
  static __device__ uint32_t word(const uint8_t* plane, uint32_t bytes, std::size_t i) {
    return bytes == 4 ? reinterpret_cast<const uint32_t*>(plane)[i]
                      : reinterpret_cast<const uint16_t*>(plane)[i];
  }
  __device__ void load(const Task& task, uint32_t at) {
    const uint32_t unit = at + threadIdx.x % many_units;
    const bool there = unit < task.units;
#pragma unroll
    for (uint32_t i = 0; i < weights; ++i) {
      const std::size_t row = min(task.first_row + row_of(i), task.rows - 1),
                        from = row * task.units + unit;
      of_weights[i] = there ? word(task.w.scales, F::scale_bytes, from) : 0;
      if constexpr (F::super_bytes != 0)
        supers[i] = there ? word(task.w.supers, F::super_bytes, from / 8) : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < inputs; ++i) {
      const std::size_t input = min(task.first_input + row_of(i), task.n - 1),
                        from = input * task.units + unit;
      of_inputs[i] = there ? task.scale[from] : 0.0f;
      if constexpr (Tile::offsets != 0)
        sums[i] = there ? reinterpret_cast<const short2*>(task.sums)[from] : short2{};
    }
  }
  __device__ void put(Tile& to) {
    const uint32_t k = threadIdx.x % many_units;
#pragma unroll
    for (uint32_t i = 0; i < weights; ++i) {
      float2 scales[2];
      F::scales({nullptr, nullptr, reinterpret_cast<uint8_t*>(&of_weights[i]),
                 reinterpret_cast<uint8_t*>(&supers[F::super_bytes ? i : 0])},
                0, scales);
#pragma unroll
      for (uint32_t half = 0; half < Tile::halves; ++half) {
        to.scales[k][half][row_of(i)] = scales[half].x;
        if constexpr (Tile::offsets != 0)
          to.weight_offsets()[(k * Tile::halves + half) * rows + row_of(i)] = scales[half].y;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < inputs; ++i) {
      to.scale[k][row_of(i)] = of_inputs[i];
      if constexpr (Tile::offsets != 0) {
        const float low = sums[i].x, high = sums[i].y;
        float* const both = to.sums() + k * Tile::halves * many_inputs + row_of(i);
        both[0] = F::two_scales ? low : low + high;
        if constexpr (F::two_scales) both[many_inputs] = high;
      }
    }
  }
};

// Adds the products of unit k.
template <TensorType type, uint32_t rows>
__device__ inline void multiply_unit(const ManyTile<type, rows>& tile, uint32_t k,
                                     uint32_t warp_row, uint32_t warp_input,
                                     typename ManyTile<type, rows>::Totals& total) {
  using F = Format<type>;
  using Tile = ManyTile<type, rows>;
  constexpr uint32_t halves = Tile::halves, row_tiles = Tile::row_tiles,
                     input_tiles = Tile::input_tiles;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t b[input_tiles / 2][4];
  float2 scales[input_tiles], sums[input_tiles][halves];
#pragma unroll
  for (uint32_t j = 0; j < input_tiles / 2; ++j)
    load_matrices(
        b[j], shared_address(tile.inputs + piece_of(warp_input + j * 16 + lane / 16 * 8 + lane % 8,
                                                    2 * k + lane / 8 % 2)));
#pragma unroll
  for (uint32_t j = 0; j < input_tiles; ++j) {
    const uint32_t input = warp_input + j * 8 + 2 * t;
    scales[j] = *reinterpret_cast<const float2*>(&tile.scale[k][input]);
    if constexpr (F::has_offset)
#pragma unroll
      for (uint32_t half = 0; half < halves; ++half)
        sums[j][half] = *reinterpret_cast<const float2*>(tile.sums() +
                                                         (k * halves + half) * many_inputs + input);
  }
#pragma unroll
  for (uint32_t i = 0; i < row_tiles; ++i) {
    const uint32_t row = warp_row + i * 16 + g;
    uint32_t a[4];
    if constexpr (F::low == 8)
      load_matrices(
          a, shared_address(tile.low + piece_of(warp_row + i * 16 + lane % 16, 2 * k + lane / 16)));
    else
      load_weights<type, Tile::low_pitch, Tile::high_pitch>(
          a, tile.low + row * Tile::low_pitch + k * (F::low * 4),
          tile.high() + row * Tile::high_pitch + k * (F::high * 4), t);
    float weight_scale[halves][2], start[2], offset[halves][2];
#pragma unroll
    for (uint32_t half = 0; half < halves; ++half)
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) {
        weight_scale[half][c] = tile.scales[k][half][row + c * 8];
        if constexpr (F::has_offset)
          offset[half][c] = tile.weight_offsets()[(k * halves + half) * rows + row + c * 8];
      }
    start[0] = weight_scale[0][0] * -as_float_value,
    start[1] = weight_scale[0][1] * -as_float_value;
#pragma unroll
    for (uint32_t j = 0; j < input_tiles; ++j) {
      const uint32_t words[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
      float part[4];
#pragma unroll
      for (uint32_t half = 0; half < halves; ++half) {
        int d[4];
        if constexpr (F::two_scales)
          multiply_16_from(d, as_float, a[2 * half], a[2 * half + 1], words[half]);
        else multiply_32_from(d, as_float, a, words);
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c) {  // row c / 2 * 8, input c % 2
          const float s = weight_scale[half][c / 2], x = __int_as_float(d[c]);
          // Exact except for one rounding: a scale has less than 20 bits.
          if (half == 0) part[c] = __fmaf_rn(s, x, start[c / 2]);
          else part[c] = __fmaf_rn(s, x - as_float_value, part[c]);
          if constexpr (F::has_offset)
            part[c] =
                __fmaf_rn(offset[half][c / 2], c % 2 ? sums[j][half].y : sums[j][half].x, part[c]);
        }
      }
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c)
        total[i][j][c] = __fmaf_rn(part[c], c % 2 ? scales[j].y : scales[j].x, total[i][j][c]);
    }
  }
}

// Writes through shared memory, half of the inputs at a time: neighbouring rows are written at
// once, with little code.
template <class Tile, uint32_t rows>
__device__ inline void put_totals(const typename Tile::Totals& total, const Product& product,
                                  const Task& task, bool add, uint32_t warp_row,
                                  uint32_t warp_input, float* staged) {
  constexpr uint32_t half = many_inputs / 2;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (uint32_t part = 0; part < 2; ++part) {
    __syncthreads();
    if (warp_input / half == part) {
#pragma unroll
      for (uint32_t i = 0; i < Tile::row_tiles; ++i)
#pragma unroll
        for (uint32_t j = 0; j < Tile::input_tiles; ++j)
#pragma unroll
          for (uint32_t c = 0; c < 4; ++c)
            staged[(warp_input % half + j * 8 + 2 * t + c % 2) * rows + warp_row + i * 16 + g +
                   c / 2 * 8] = total[i][j][c];
    }
    __syncthreads();
    const uint32_t r = threadIdx.x % rows, row = task.first_row + r;
    for (uint32_t i = threadIdx.x / rows; row < task.rows && i < half; i += Tile::threads / rows)
      if (const uint32_t input = task.first_input + part * half + i; input < task.n)
        put(add, product, input, row, staged[i * rows + r]);
  }
}

template <TensorType type, uint32_t rows>
__device__ inline void multiply_many(const Products& products, uint32_t units, uint32_t n,
                                     const int8_t* q, const float* scale, const int16_t* sums) {
  using Tile = ManyTile<type, rows>;
  constexpr uint32_t bytes = sizeof(Tile) + Tile::rest;
  static_assert(bytes == many_tile_bytes(type, rows) && bytes % 128 == 0);
  static_assert(2 * bytes >= many_inputs / 2 * rows * sizeof(float));
  extern __shared__ __align__(128) uint8_t many_memory[];
  const auto tile = [](uint32_t turn) -> Tile& {
    return *reinterpret_cast<Tile*>(many_memory + turn * bytes);
  };
  Task task{{}, 0, 0, units, n, blockIdx.y * many_inputs, q, scale, sums};
  const Product& product = product_of_block(products, rows, &task.first_row);
  task.w = product.w, task.rows = product.rows;
  // A warp has half of the rows.
  const uint32_t warp_row = threadIdx.x / 32 % 2 * (rows / 2),
                 warp_input = threadIdx.x / 64 * (Tile::input_tiles * 8);
  after_previous();
  typename Tile::Totals total = {};
  Scales<type, rows> scales;
  copy_tile<type, rows>(task, 0, tile(0));
  scales.load(task, 0);
  scales.put(tile(0));
#pragma unroll 1
  for (uint32_t at = 0, turn = 0; at < units; at += many_units, turn ^= 1) {
    copies_done();
    __syncthreads();  // this tile has arrived, and nobody reads the other one
    const bool more = at + many_units < units;
    if (more) {
      copy_tile<type, rows>(task, at + many_units, tile(turn ^ 1));
      scales.load(task, at + many_units);
    }
#pragma unroll 1
    for (uint32_t k = 0; k < many_units; ++k)
      multiply_unit<type, rows>(tile(turn), k, warp_row, warp_input, total);
    if (more) scales.put(tile(turn ^ 1));
  }
  put_totals<Tile, rows>(total, product, task, products.add, warp_row, warp_input,
                         reinterpret_cast<float*>(many_memory));
}

}  // namespace

extern "C" {

#define MANY_KERNEL(name)                                                                          \
  __global__ void __launch_bounds__(many_threads(TensorType::name, many_rows), 2)                  \
      many_##name(Given products, uint32_t units, uint32_t n, const int8_t* q, const float* scale, \
                  const int16_t* sums) {                                                           \
    multiply_many<TensorType::name, many_rows>(products, units, n, q, scale, sums);                \
  }
#define SOME_KERNEL(name)                                                                          \
  __global__ void __launch_bounds__(many_threads(TensorType::name, some_rows), 3)                  \
      some_##name(Given products, uint32_t units, uint32_t n, const int8_t* q, const float* scale, \
                  const int16_t* sums) {                                                           \
    multiply_many<TensorType::name, some_rows>(products, units, n, q, scale, sums);                \
  }
KVASIR_QUANTISED_TYPES(SOME_KERNEL)
MANY_KERNEL(q8_0)
MANY_KERNEL(q4_0)
MANY_KERNEL(q4_k)
MANY_KERNEL(q5_k) MANY_KERNEL(q6_k) MANY_KERNEL(iq4_nl) MANY_KERNEL(iq4_xs) MANY_KERNEL(mxfp4)

}  // extern "C"
}  // namespace kvasir::cuda
