// Prefill attention: every token of a step over all tokens before it and itself, or over those of
// the tiles that prefill_tiles.cu chose, on the tensor cores.
//
// First the keys and values of a layer are laid out in half precision, in the order of the text:
// the sinks, the sealed pages, the window and the tokens of the step. prefill_place() says where
// each number is. Those of each KV head are divided by an upper bound of their magnitude, and each
// query by its own, so that no number leaves the range of half precision. Scores and output are
// multiplied by these again. Then blocks of query rows (tokens times heads of the group) go once
// over the keys that they see, a tile at a time, after Dao, "FlashAttention-2" (2023). Where there
// are too few blocks for the device, several blocks divide the keys of the same rows.
// prefill_merge() merges what they leave. For a sparse step, queries and keys are laid out as bytes
// too: prefill_tiles.cu.
// Compute capability 9.0 has kernels of its own for the blocks: prefill_wide.cu.
#include "prefill_matrices.h"
#include "prefill_rows.h"

namespace kvasir::cuda {
namespace {

constexpr uint32_t layout_threads = prefill_layout_threads, warps = layout_threads / warp;

// The pages of a KV head, without that of the sinks, whose rows are in full precision.
// which: 0 keys, 1 values.
struct SealedPages {
  const DevicePrefill& r;
  uint32_t head, page_tokens, tokens;
  __device__ SealedPages(const DevicePrefill& of, uint32_t its_head, uint32_t its_tokens)
      : r(of), head(its_head), page_tokens(its_tokens), tokens(of.pages * its_tokens) {}
  __device__ bool has(uint32_t token) const { return token >= page_tokens && token < tokens; }
  // Of four tokens, the first a multiple of 4, and four dimensions. Keys: a word has those of a
  // token; values: those of a dimension.
  __device__ uint4 sixteen(uint32_t which, uint32_t token, uint32_t d) const {
    const uint32_t page = token / page_tokens;
    const auto* data =
        reinterpret_cast<const uint4*>(r.pages_at[page / extent_pages] + r.pages_offset) +
        (std::size_t{head} * extent_pages + page % extent_pages) * (page_size / 16);
    return data[which * (page_size / 32) + token % page_tokens / 4 * (r.dim / 4) + d / 4];
  }
  __device__ const uint16_t* scales(uint32_t which, uint32_t token) const {
    const uint32_t page = token / page_tokens;
    return reinterpret_cast<const uint16_t*>(r.scales_at[page / extent_pages] + r.scales_offset) +
           ((std::size_t{head} * extent_pages + page % extent_pages) * 2 + which) * page_tokens +
           token % page_tokens;
  }
  __device__ float scale(uint32_t which, uint32_t token) const {
    return from_bf16(*scales(which, token));
  }
};

__device__ inline float largest_of(float4 x) {
  return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
}

// Four dimensions of a row in full precision.
__device__ inline float4 load_row(const DevicePrefill& r, const float* step, uint32_t head,
                                  uint32_t which, uint32_t token, uint32_t d) {
  const Rows source = rows_of(r, step, head, which, token);
  const auto at = [&](uint32_t i) {
    return i < source.there ? source.row[i] - (source.centre ? source.centre[i] : 0.0f) : 0.0f;
  };
  return make_float4(at(d), at(d + 1), at(d + 2), at(d + 3));
}

// Block (tile_scale_keys tokens, head): lays out their keys and values, with rows of zeros up to a
// multiple of prefill_keys, and for a sparse step the keys as bytes.
template <uint32_t dim>
__device__ void lay_out(const DevicePrefill& r, const float* k, const float* v) {
  constexpr uint32_t tokens = tile_scale_keys, groups = dim / 4, items = tokens / 4 * groups;
  static_assert(tokens == warp);
  const uint32_t first = blockIdx.x * tokens, head = blockIdx.y;
  const SealedPages sealed(r, head, page_size / 2 / dim);
  const std::size_t at = std::size_t{head} * r.room * dim;
  uint16_t* const to[2] = {r.keys + at, r.values + at};
  int8_t* const bytes =
      r.tiles.keys ? r.tiles.keys + std::size_t{head} * r.room * tile_row_bytes(dim) : nullptr;
  const float scale[2] = {inverse(r.largest[head * 2]), inverse(r.largest[head * 2 + 1])};
  float of_byte = 0;  // what a key's numbers are multiplied by
  if (bytes) {
    const uint32_t own = first + threadIdx.x % warp;
    float largest = sealed.has(own) ? largest_byte * sealed.scale(0, own) : 0.0f;
    if (sealed.has(first) && sealed.has(first + tokens - 1)) {
      largest = warp_max(largest);
    } else {
      for (uint32_t i = threadIdx.x; i < tokens * groups; i += layout_threads) {
        if (sealed.has(first + i / groups)) continue;
        const float4 x = load_row(r, k, head, 0, first + i / groups, i % groups * 4);
        largest = fmaxf(largest, largest_of(x));
      }
      largest = block_max(largest);
    }
    of_byte = largest_byte * inverse(largest);
    if (threadIdx.x == 0)
      r.tiles.key_scales[head * (r.room / tokens) + blockIdx.x] = largest / largest_byte;
  }
  for (uint32_t i = threadIdx.x; i < items; i += layout_threads) {
    const uint32_t token = first + i / groups * 4, d = i % groups * 4;
#pragma unroll
    for (uint32_t which = 0; which < 2; ++which) {
      const auto put = [&](uint32_t t, float4 x) {
        const float s = scale[which];
        *reinterpret_cast<uint2*>(to[which] + prefill_place(r.room, t, d)) =
            make_uint2(halves(x.x * s, x.y * s), halves(x.z * s, x.w * s));
        if (which == 0 && bytes) *tile_bytes_at(bytes, r.room, t, d) = rounded(x, of_byte);
      };
      if (!sealed.has(token)) {
#pragma unroll 1
        for (uint32_t t = token; t < token + 4; ++t)
          put(t, load_row(r, which ? v : k, head, which, t, d));
        continue;
      }
      const uint4 source = sealed.sixteen(which, token, d);
      const uint32_t words[4] = {source.x, source.y, source.z, source.w};
      const auto four = *reinterpret_cast<const ushort4*>(sealed.scales(which, token));
      const uint16_t scales[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const float s = from_bf16(scales[j]);
        const auto number = [&](uint32_t n) {
          return s * (which ? signed_byte(words[n], j) : signed_byte(words[j], n));
        };
        put(token + j, make_float4(number(0), number(1), number(2), number(3)));
      }
    }
  }
}

}  // namespace

extern "C" {

// Block (head, which, part): the largest magnitude of a part of the head's keys or values.
// prefill_queries() has cleared r.largest.
__global__ void __launch_bounds__(1024)
    prefill_largest(DevicePrefill r, const float* k, const float* v) {
  after_previous();
  const uint32_t head = blockIdx.x, which = blockIdx.y, tokens = r.window + r.n,
                 sealed = r.pages * r.page_tokens, first = blockIdx.z * blockDim.x + threadIdx.x,
                 stride = gridDim.z * blockDim.x;
  const float* step = which ? v : k;
  float max_score = 0;
  const SealedPages pages(r, head, r.page_tokens);
  for (uint32_t i = first; i < sealed; i += stride)
    if (pages.has(i)) max_score = fmaxf(max_score, largest_byte * pages.scale(which, i));
  const uint32_t sinks = r.pages ? r.page_tokens : 0, fours = r.dim / 4;
  for (std::size_t i = first; i < std::size_t{sinks + tokens} * fours; i += stride) {
    const auto token = static_cast<uint32_t>(i / fours), d = static_cast<uint32_t>(i % fours) * 4;
    const float4 x =
        load_row(r, step, head, which, token < sinks ? token : token - sinks + sealed, d);
    max_score = fmaxf(max_score, largest_of(x));
  }
  max_score = block_max(max_score);
  // Floats that are not negative are ordered as their bits are.
  if (threadIdx.x == 0)
    atomicMax(reinterpret_cast<int*>(r.largest + head * 2 + which), __float_as_int(max_score));
}

// A warp per row of queries, rows of zeros at the end included. Runs before prefill_largest().
__global__ void __launch_bounds__(layout_threads) prefill_queries(DevicePrefill r, const float* q) {
  after_previous();
  if (blockIdx.x == 0 && threadIdx.x < 2) r.largest[blockIdx.y * 2 + threadIdx.x] = 0;
  const uint32_t row = blockIdx.x * warps + threadIdx.x / warp, head = blockIdx.y,
                 lane = threadIdx.x % warp, token = row / r.group;
  if (row >= r.q_room) return;
  const float* from =
      q + (std::size_t{token} * r.kv_heads * r.group + head * r.group + row % r.group) * r.head_dim;
  const auto at = [&](uint32_t d) { return token < r.n && d < r.head_dim ? from[d] : 0.0f; };
  // A lane's numbers: four from dimension 4 lane on, then from there on.
  constexpr uint32_t fours = max_prefill_dim / (4 * warp);
  float4 own[fours];
  float max_score = 0;
#pragma unroll
  for (uint32_t i = 0; i < fours; ++i) {
    const uint32_t d = 4 * (i * warp + lane);
    if (r.head_dim % 4 == 0 && token < r.n && d < r.head_dim)
      own[i] = *reinterpret_cast<const float4*>(from + d);
    else own[i] = make_float4(at(d), at(d + 1), at(d + 2), at(d + 3));
    max_score = fmaxf(max_score, largest_of(own[i]));
  }
  max_score = warp_max(max_score);
  const float scale = inverse(max_score);
  const std::size_t to = std::size_t{head} * r.q_room + row;
  if (r.sink_scores) {  // keys are centred
    float sum = 0;
    for (uint32_t d = lane; r.centre && d < r.head_dim; d += warp)
      sum += at(d) * r.centre[head * r.dim + d];
    sum = warp_sum(sum) / sqrtf(static_cast<float>(r.head_dim));
    if (lane == 0) r.sink_scores[to] = r.sink_logits[head * r.group + row % r.group] - sum;
  }
  uint16_t* const of_head = r.q + std::size_t{head} * r.q_room * r.dim;
  int8_t* const bytes = r.tiles.q + std::size_t{head} * r.q_room * tile_row_bytes(r.dim);
#pragma unroll
  for (uint32_t i = 0; i < fours; ++i) {
    const uint32_t d = 4 * (i * warp + lane);
    const float4 x = own[i];
    if (d >= r.dim) break;
    *reinterpret_cast<uint2*>(of_head + prefill_place(r.q_room, row, d)) =
        make_uint2(halves(x.x * scale, x.y * scale), halves(x.z * scale, x.w * scale));
    if (r.tiles.q) *tile_bytes_at(bytes, r.q_room, row, d) = rounded(x, scale * largest_byte);
  }
  if (lane == 0) r.q_scale[to] = max_score / sqrtf(static_cast<float>(r.head_dim));
}

}  // extern "C"

namespace {

// ---- attention

__device__ inline void load_transposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}
// Block (rows of queries, the last ones first; head; part of the keys). A warp has a quarter of the
// rows: O += P V over a tile of keys with P = e^(Q K^T - the largest).
template <int dim, bool windowed>
__device__ void attend_text(const DevicePrefill& r, float* out, float* lse) {
  constexpr uint32_t block_rows = prefill_block_rows(dim), tile_of_keys = prefill_tile_keys(dim);
  constexpr int row_tiles = block_rows / 4 / 16;  // per warp, of 16 rows each
  constexpr int key_tiles = tile_of_keys / 8;
  extern __shared__ uint4 shared[];
  constexpr uint32_t tile_bytes = tile_of_keys * dim * 2;
  const uint32_t queries = shared_address(shared), first_tile = queries + block_rows * dim * 2;
  const uint32_t lane = threadIdx.x % warp, g = lane / 4, t = lane % 4;
  const uint32_t head = blockIdx.y, first_row = (gridDim.x - 1 - blockIdx.x) * block_rows,
                 warp_row = threadIdx.x / warp * (row_tiles * 16);
  after_previous();
  const SeenTiles seen = seen_tiles<windowed>(r, head, first_row, block_rows, tile_of_keys);
  const uint16_t* keys = r.keys + std::size_t{head} * r.room * dim;
  const uint16_t* values = r.values + std::size_t{head} * r.room * dim;
  copy_rows<dim, block_rows>(queries, r.q + std::size_t{head} * r.q_room * dim, r.q_room,
                             first_row);
  const auto copy_tile = [&](uint32_t i) {
    const uint32_t to = first_tile + i % 2 * 2 * tile_bytes, first = seen.tile(i) * tile_of_keys;
    copy_rows<dim, tile_of_keys>(to, keys, r.room, first);
    copy_rows<dim, tile_of_keys>(to + tile_bytes, values, r.room, first);
    copies_given();
  };
  copy_tile(seen.begin);

  float o[row_tiles][dim / 8][4] = {}, max_score[row_tiles][2], sum[row_tiles][2] = {},
                           factor[row_tiles][2];
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[m][i] = score_factor(r, head, first_row + warp_row + m * 16 + i * 8 + g);
      max_score[m][i] = least_score<windowed>(factor[m][i]);
    }

  for (uint32_t at = seen.begin; at < seen.end; ++at) {
    const float bias = seen.bias(at);
    copies_done();
    __syncthreads();
    const uint32_t tile_keys = first_tile + at % 2 * 2 * tile_bytes,
                   tile_values = tile_keys + tile_bytes;
    if (at + 1 < seen.end) copy_tile(at + 1);

    float s[row_tiles][key_tiles][4] = {};
#pragma unroll
    for (int d = 0; d < dim / 16; ++d) {
      uint32_t a[row_tiles][4];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
        load_matrices(a[m], piece<dim>(queries, warp_row + m * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
      for (int k = 0; k < key_tiles / 2; ++k) {
        uint32_t b[4];
        load_matrices(
            b, piece<dim>(tile_keys, k * 16 + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          multiply(s[m][2 * k], a[m], b[0], b[1]);
          multiply(s[m][2 * k + 1], a[m], b[2], b[3]);
        }
      }
    }

    if (at >= seen.masked_from || at < seen.masked_to) {
      const uint32_t tile = seen.tile(at);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int k = 0; k < key_tiles; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (!is_seen<windowed>(r, seen, first_row + warp_row + m * 16 + i / 2 * 8 + g,
                                   tile * tile_of_keys + k * 8 + 2 * t + i % 2))
              s[m][k][i] = -INFINITY;
    }

    uint32_t p[row_tiles][key_tiles][2];
    bool grew = false;
    float keep[row_tiles][2];
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float largest = fmaxf(s[m][0][2 * i], s[m][0][2 * i + 1]);
#pragma unroll
        for (int k = 1; k < key_tiles; ++k)
          largest = fmaxf(largest, fmaxf(s[m][k][2 * i], s[m][k][2 * i + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 2));
        largest = largest * factor[m][i] + bias;
        grew |= largest > max_score[m][i];
        largest = fmaxf(largest, max_score[m][i]);
        // The first tile has a key that every row sees.
        keep[m][i] = power_of_two(max_score[m][i] - largest);
        max_score[m][i] = largest;
        const float offset = largest - bias;
        float tile_sum = 0;
#pragma unroll
        for (int k = 0; k < key_tiles; ++k) {
          const float x = power_of_two(s[m][k][2 * i] * factor[m][i] - offset),
                      y = power_of_two(s[m][k][2 * i + 1] * factor[m][i] - offset);
          tile_sum += x + y;
          p[m][k][i] = halves(x, y);
        }
        sum[m][i] = sum[m][i] * keep[m][i] + tile_sum;
      }
    if (__any_sync(all_lanes, grew)) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int d = 0; d < dim / 8; ++d)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[m][d][i] *= keep[m][i / 2];
    }

#pragma unroll
    for (int k = 0; k < key_tiles / 2; ++k) {
#pragma unroll
      for (int d = 0; d < dim / 16; ++d) {
        uint32_t b[4];
        load_transposed(b, piece<dim>(tile_values, k * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          const uint32_t a[4] = {p[m][2 * k][0], p[m][2 * k][1], p[m][2 * k + 1][0],
                                 p[m][2 * k + 1][1]};
          multiply(o[m][2 * d], a, b[0], b[1]);
          multiply(o[m][2 * d + 1], a, b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      write_row<dim>(r, head, first_row + warp_row + m * 16 + i * 8 + g, max_score[m][i],
                     warp_sum(sum[m][i], 4), out, lse,
                     [&](int d) { return make_float2(o[m][d][2 * i], o[m][d][2 * i + 1]); });
}

}  // namespace

extern "C" {

__global__ void __launch_bounds__(layout_threads)
    prefill_lay_out_64(DevicePrefill r, const float* k, const float* v) {
  after_previous();
  lay_out<64>(r, k, v);
}
__global__ void __launch_bounds__(layout_threads)
    prefill_lay_out_128(DevicePrefill r, const float* k, const float* v) {
  after_previous();
  lay_out<128>(r, k, v);
}
__global__ void __launch_bounds__(layout_threads)
    prefill_lay_out_256(DevicePrefill r, const float* k, const float* v) {
  after_previous();
  lay_out<256>(r, k, v);
}

// A warp per row of queries: merges the parts of its keys.
__global__ void __launch_bounds__(layout_threads)
    prefill_merge(DevicePrefill r, uint32_t parts, float* out, float* lse) {
  after_previous();
  const uint32_t row = blockIdx.x * warps + threadIdx.x / warp, head = blockIdx.y,
                 lane = threadIdx.x % warp, token = row / r.group;
  if (token >= r.n) return;
  const auto part = [&](uint32_t i) { return part_of(r, head, i, parts, row); };
  const float its_largest = lane < parts ? part(lane)[r.dim] : -INFINITY;
  float largest = its_largest;
  for (uint32_t width = warp / 2; width > 0; width /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, width));
  const float weight = power_of_two(its_largest - largest),
              all = warp_sum(lane < parts ? weight * part(lane)[r.dim + 1] : 0);
  const RowEnd end = end_row(r, head, row, largest, all);
  const std::size_t at = std::size_t{token} * r.kv_heads * r.group + head * r.group + row % r.group;
  if (lane == 0) lse[at] = end.lse;
  float sums[max_prefill_dim / warp] = {};
  for (uint32_t i = 0; i < parts; ++i) {
    const float factor = __shfl_sync(all_lanes, weight, i);
    const float* from = part(i) + lane;
#pragma unroll
    for (uint32_t d = 0; d < max_prefill_dim / warp; ++d)
      if (d * warp < r.dim) sums[d] += factor * from[d * warp];
  }
#pragma unroll
  for (uint32_t d = 0; d < max_prefill_dim / warp; ++d)
    if (const uint32_t c = d * warp + lane; c < r.head_dim)
      out[at * r.head_dim + c] = sums[d] * end.scale;
}

__global__ void __launch_bounds__(prefill_threads, 3)
    prefill_attend_64(DevicePrefill r, float* out, float* lse) {
  attend_text<64, false>(r, out, lse);
}
__global__ void __launch_bounds__(prefill_threads, 2)
    prefill_attend_128(DevicePrefill r, float* out, float* lse) {
  attend_text<128, false>(r, out, lse);
}
__global__ void __launch_bounds__(prefill_threads, 2)
    prefill_attend_256(DevicePrefill r, float* out, float* lse) {
  attend_text<256, false>(r, out, lse);
}
__global__ void __launch_bounds__(prefill_threads, 2)
    prefill_window_64(DevicePrefill r, float* out, float* lse) {
  attend_text<64, true>(r, out, lse);
}
__global__ void __launch_bounds__(prefill_threads, 2)
    prefill_window_128(DevicePrefill r, float* out, float* lse) {
  attend_text<128, true>(r, out, lse);
}
__global__ void __launch_bounds__(prefill_threads, 1)
    prefill_window_256(DevicePrefill r, float* out, float* lse) {
  attend_text<256, true>(r, out, lse);
}

}  // extern "C"
}  // namespace kvasir::cuda
