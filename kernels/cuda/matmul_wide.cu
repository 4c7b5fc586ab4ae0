// Products of quantised weights with many inputs, on the warp-group products of compute capability
// 9.0. Weights and inputs become halves first: a slice of the weights at a time, so that few bytes
// are written, and all inputs once, each divided by the largest that its scales allow. They lie in
// device memory as shared memory has them: tiles of 64 columns, whose rows of 128 bytes are
// swizzled as the products read them. So a tile is one copy without a map.
//
// A block computes 128 rows of weights by 256 inputs. One warp group copies tiles to a ring, and
// leaves registers to the two that multiply, 64 rows each. A block stays on its multiprocessor for
// all its tiles, and copies the first tiles of the next product while the last one is written.
#include <cuda_fp16.h>

#include <cfloat>

#include "dependent.h"
#include "formats.h"
#include "matmul_row.h"
#include "matmul_wide.h"
#include "matmul_wide_gated.h"
#include "products.h"
#include "tiles.h"
#include "warp_groups.h"

namespace kvasir::cuda {
namespace {

constexpr uint32_t line = wide_columns * 2;  // bytes of a row of a tile
constexpr uint32_t weight_tile = wide_rows * line, input_tile = wide_inputs * line;
constexpr uint32_t step_bytes = weight_tile + input_tile;
static_assert(wide_shared_bytes >= wide_steps * (step_bytes + 16) + 1024);

// 16 bytes of a row of a tile, swizzled: eight rows occupy all banks.
__device__ inline std::size_t place_of(std::size_t tile, uint32_t rows, uint32_t row,
                                       uint32_t piece) {
  return (tile * rows + row) * line + ((piece ^ (row & 7)) << 4);
}

// The number j of a word of four signed bytes, as a float.
__device__ inline float number_of(uint32_t word, int j) {
  return static_cast<float>(static_cast<int8_t>(word >> 8 * j));
}

__device__ inline uint32_t two_halves(float a, float b) {
  const __half2 both = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Eight neighbouring numbers of a unit to halves. words: two of them.
__device__ inline uint4 eight_halves(const uint32_t* words, float scale, float offset) {
  uint32_t to[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = words[i / 2];
    const int j = i % 2 * 2;
    to[i] = two_halves(__fmaf_rn(scale, number_of(word, j), offset),
                       __fmaf_rn(scale, number_of(word, j + 1), offset));
  }
  return make_uint4(to[0], to[1], to[2], to[3]);
}

// Block (tile of rows, part): weights of the slice that begins with tile `first` of the products'
// rows. A thread has a unit.
template <TensorType type>
__device__ inline void write_halves(const Products& products, uint32_t units, uint32_t first,
                                    uint8_t* to) {
  const uint32_t tile = first + blockIdx.x, tiles = (units + 1) / 2,
                 at = blockIdx.y * blockDim.x + threadIdx.x, row = at / (2 * tiles),
                 unit = at % (2 * tiles);
  if (row >= wide_rows) return;
  const auto& [product, its_row] = row_of_tile(products, tile, row);
  const std::size_t place = std::size_t{blockIdx.x} * tiles + unit / 2;
  uint4 halves[4] = {};
  if (its_row < product.rows && unit < units) {
    const Unit<type> w(product.w, std::size_t{its_row} * units + unit);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      halves[i] = eight_halves(w.u + 2 * i, weight_factor(type) * w.scales[i / 2].x,
                               weight_factor(type) * w.scales[i / 2].y);
  }
  after_previous();
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    *reinterpret_cast<uint4*>(to + place_of(place, wide_rows, row, unit % 2 * 4 + i)) = halves[i];
}

// ---- copies and products of a block -----------------------------------------------------------

struct Ring {
  uint32_t tiles, barriers;  // addresses in shared memory
  uint32_t step = 0, parity = 0;
  __device__ uint32_t tile() const { return tiles + step * step_bytes; }
  __device__ uint32_t full() const { return barriers + step * 16; }
  __device__ uint32_t empty() const { return barriers + step * 16 + 8; }
  __device__ void next() {
    if (++step == wide_steps) step = 0, parity ^= 1;
  }
};

// The tiles of a slice, in the order in which blocks compute them: all rows with some tiles of
// inputs, which stay in the cache of the device, then all rows with the next ones. Neighbouring
// blocks have the same weights.
struct TilesOfSlice {
  static constexpr uint32_t together = 8;  // tiles of inputs
  uint32_t row_tiles, input_tiles, end;
  __device__ TilesOfSlice(const WideSlice& slice)
      : row_tiles(slice.row_tiles), input_tiles((slice.n + wide_inputs - 1) / wide_inputs),
        end(row_tiles * input_tiles) {}
  struct Tile {
    uint32_t row, input;
  };
  __device__ Tile at(uint32_t i) const {
    const uint32_t first = i / (row_tiles * together) * together,
                   width = min(together, input_tiles - first), within = i - first * row_tiles;
    return {within / width, first + within % width};
  }
};

__device__ inline void copy_tiles(const WideSlice& slice, Ring ring) {
  const TilesOfSlice tiles(slice);
  for (uint32_t i = blockIdx.x; i < tiles.end; i += gridDim.x) {
    const TilesOfSlice::Tile tile = tiles.at(i);
    const uint8_t *weights = slice.weights + std::size_t{tile.row} * slice.steps * weight_tile,
                  *inputs = slice.inputs + std::size_t{tile.input} * slice.steps * input_tile;
    for (uint32_t k = 0; k < slice.steps; ++k, ring.next()) {
      wait_for(ring.empty(), ring.parity ^ 1);
      expect(ring.full(), step_bytes);
      copy_tile(ring.tile(), weights + std::size_t{k} * weight_tile, weight_tile, ring.full());
      copy_tile(ring.tile() + weight_tile, inputs + std::size_t{k} * input_tile, input_tile,
                ring.full());
    }
  }
}

// Of a warp: rows 64 group + 16 warp to + 15 of the tile. d: of inputs 0 to 127, 128 to 255.
// scales: of the tile's inputs. Where it adds to y, it loads some numbers at once: a load before
// each store would wait.
__device__ inline void write_products(const Products& products, const WideSlice& slice,
                                      uint32_t tile, uint32_t first_input, uint32_t group,
                                      const float (&d)[2][64], const float* scales) {
  constexpr uint32_t together = 4;  // columns of eight inputs
  const Product& product = product_of_tile(products, slice.first + tile);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4,
                 first_row = (slice.first + tile - product.begin) * wide_rows + group * 64 +
                             warp * 16 + lane / 4;
  bool has_row[2];
  float bias[2];
#pragma unroll
  for (uint32_t r = 0; r < 2; ++r) {
    has_row[r] = first_row + 8 * r < product.rows;
    bias[r] = product.bias && has_row[r] ? product.bias[first_row + 8 * r] : 0;
  }
#pragma unroll
  for (uint32_t first = 0; first < wide_inputs / 8; first += together) {
    // Column j has inputs 8 j and 8 j + 1 from this one on.
    const uint32_t input = first_input + first * 8 + lane % 4 * 2;
    float* const y = product.y + std::size_t{input} * product.rows + first_row;
    const auto is_there = [&](uint32_t i, uint32_t r) { return input + i < slice.n && has_row[r]; };
    const auto at = [&](uint32_t i, uint32_t r) -> float& {
      return y[std::size_t{i} * product.rows + 8 * r];
    };
    float before[together][2][2] = {};
    if (products.add) {
#pragma unroll
      for (uint32_t j = 0; j < together; ++j)
#pragma unroll
        for (uint32_t c = 0; c < 2; ++c)
#pragma unroll
          for (uint32_t r = 0; r < 2; ++r)
            if (is_there(8 * j + c, r)) before[j][c][r] = at(8 * j + c, r);
    }
#pragma unroll
    for (uint32_t j = 0; j < together; ++j)
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) {
        const float scale = scales[(first + j) * 8 + lane % 4 * 2 + c];
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) {
          const float sum = d[(first + j) / 16][(first + j) % 16 * 4 + 2 * r + c];
          float x = __fmul_rn(sum * scale, product.scale);
          if (product.bias) x += bias[r];
          if (is_there(8 * j + c, r)) at(8 * j + c, r) = products.add ? before[j][c][r] + x : x;
        }
      }
  }
}

// write(tile, first input, d, scales): of a tile of rows and inputs.
template <class Write>
__device__ inline void multiply_tiles(const WideSlice& slice, Ring ring, uint32_t group,
                                      Write&& write) {
  const TilesOfSlice tiles(slice);
  const bool speaks = threadIdx.x % 128 == 0;
  constexpr uint32_t each = wide_inputs / 32;  // scales that a lane loads
  __shared__ __align__(16) float scales_of_warps[8][wide_inputs];
  float* const scales = scales_of_warps[threadIdx.x / 32];
  for (uint32_t at = blockIdx.x; at < tiles.end; at += gridDim.x) {
    const TilesOfSlice::Tile tile = tiles.at(at);
    float d[2][64];
#pragma unroll
    for (uint32_t i = 0; i < 64; ++i) d[0][i] = d[1][i] = 0;
    // They come while products are summed.
    const uint32_t first_input = tile.input * wide_inputs, own = threadIdx.x % 32 * each;
    float own_scales[each];
#pragma unroll
    for (uint32_t i = 0; i < each; ++i)
      own_scales[i] =
          first_input + own + i < slice.n ? __ldg(slice.input_scales + first_input + own + i) : 0;
    uint32_t read = 0;  // the barrier of the step before, which is read until its products are done
    for (uint32_t k = 0; k < slice.steps; ++k, ring.next()) {
      wait_for(ring.full(), ring.parity);
      const uint64_t a = descriptor_of(ring.tile() + group * 64 * line),
                     b = descriptor_of(ring.tile() + weight_tile),
                     b2 = descriptor_of(ring.tile() + weight_tile + 128 * line);
      products_begin();
#pragma unroll
      for (uint32_t i = 0; i < wide_columns / 16; ++i) {
        multiply_halves(d[0], a + 2 * i, b + 2 * i, true);
        multiply_halves(d[1], a + 2 * i, b2 + 2 * i, true);
      }
      products_given();
      products_done<1>();
      if (read && speaks) arrive(read);
      read = ring.empty();
    }
    products_done<0>();
    if (speaks) arrive(read);
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) scales[own + i] = own_scales[i];
    __syncwarp();
    write(tile.row, first_input, d, scales);
  }
}

// write(group, ...): as of multiply_tiles().
template <class Write>
__device__ inline void copy_and_multiply(const WideSlice& slice, uint8_t* memory, Write&& write) {
  const uint32_t begin = (shared_address(memory) + 1023) / 1024 * 1024;
  const Ring ring{begin, begin + wide_steps * step_bytes};
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < wide_steps; ++i)
      begin_barrier(ring.barriers + i * 16, 1), begin_barrier(ring.barriers + i * 16 + 8, 2);
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  after_previous();
  const uint32_t group = threadIdx.x / 128;
  if (group < 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_tiles(slice, ring, group,
                   [&](uint32_t tile, uint32_t first, float(&d)[2][64], const float* scales) {
                     write(group, tile, first, d, scales);
                   });
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 128 == 0) copy_tiles(slice, ring);
  }
}

}  // namespace

extern "C" {

#define HALVES_KERNEL(name)                                                        \
  __global__ void __launch_bounds__(wide_halves_threads)                           \
      halves_##name(Given products, uint32_t units, uint32_t first, uint8_t* to) { \
    write_halves<TensorType::name>(products, units, first, to);                    \
  }
KVASIR_QUANTISED_TYPES(HALVES_KERNEL)

// A block has an input.
__global__ void __launch_bounds__(wide_halves_threads)
    halves_of_inputs(uint32_t units, const int8_t* q, const float* scale, uint8_t* to,
                     float* input_scales, float weights_factor) {
  after_previous();
  const uint32_t input = blockIdx.x, tiles = (units + 1) / 2;
  const float* scales = scale + std::size_t{input} * units;
  float largest = 0;
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) largest = fmaxf(largest, scales[i]);
  __shared__ float of_warps[wide_halves_threads / 32];
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  for (uint32_t i = 0; i < wide_halves_threads / 32; ++i) largest = fmaxf(largest, of_warps[i]);
  largest *= 128;
  const float factor = largest > FLT_MIN ? 1 / largest : 0;
  if (threadIdx.x == 0) input_scales[input] = largest / weights_factor;
  for (uint32_t at = threadIdx.x; at < tiles * 8; at += blockDim.x) {  // eight numbers each
    const uint32_t unit = at / 4;
    uint4 halves{};
    if (unit < units) {
      const uint2 words = *reinterpret_cast<const uint2*>(
          q + (std::size_t{input} * units + unit) * 32 + at % 4 * 8);
      const uint32_t both[2] = {words.x, words.y};
      halves = eight_halves(both, scales[unit] * factor, 0);
    }
    *reinterpret_cast<uint4*>(to + place_of(std::size_t{input / wide_inputs} * tiles + at / 8,
                                            wide_inputs, input % wide_inputs, at % 8)) = halves;
  }
}

__global__ void __launch_bounds__(wide_threads, 1)
    multiply_wide(Given products, const __grid_constant__ WideSlice slice) {
  extern __shared__ uint8_t wide_memory[];
  copy_and_multiply(slice, wide_memory,
                    [&](uint32_t group, uint32_t tile, uint32_t first_input, float(&d)[2][64],
                        const float* scales) {
                      write_products(products, slice, tile, first_input, group, d, scales);
                    });
}

#define GATED_KERNEL(name)                                                                       \
  __global__ void __launch_bounds__(wide_threads, 1)                                             \
      multiply_wide_##name(Given products, const __grid_constant__ WideSlice slice,              \
                           const __grid_constant__ WideGated gated) {                            \
    extern __shared__ uint8_t wide_memory[];                                                     \
    __shared__ GatedRoom rooms[2];                                                               \
    copy_and_multiply(slice, wide_memory,                                                        \
                      [&](uint32_t group, uint32_t tile, uint32_t first_input, float(&d)[2][64], \
                          const float* scales) {                                                 \
                        write_gated<Activation::name>(products, gated, slice, tile, first_input, \
                                                      group, d, scales, &rooms[group]);          \
                      });                                                                        \
  }
KVASIR_WIDE_ACTIVATIONS(GATED_KERNEL)

}  // extern "C"
}  // namespace kvasir::cuda
