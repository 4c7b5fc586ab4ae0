// Attention of selected quads: products of keys in integers, weights, sums of values.
#pragma once

#include "attention_near.h"
#include "attention_quads.h"

namespace kvasir::cuda {
namespace {

constexpr unsigned attend_warps = attend_threads / warp;

// A warp's part of the attention of `rows` query rows: a lane has four neighbouring dimensions of
// o, `wide` times, and m, l and own of one row.
template <uint32_t dim, uint32_t rows>
struct Part {
  // Lanes that share a token's values.
  static constexpr uint32_t lanes_across = dim / 4 < warp ? dim / 4 : warp;
  static constexpr uint32_t tokens_at_once = warp / lanes_across, wide = dim / 4 / lanes_across;
  static constexpr uint32_t lanes_of_row = warp / rows;
  float o[rows][wide][4] = {}, m = -INFINITY, l = 0, own = 0;  // own: the part of l for itself

  static __device__ uint32_t own_row() { return threadIdx.x % warp / lanes_of_row; }
  // The lane's quad of those that the warp has, and its word of the quad's values, in load j.
  static __device__ uint32_t quad_of(uint32_t j) {
    return j / wide * tokens_at_once + threadIdx.x % warp / lanes_across;
  }
  static __device__ uint32_t word_of(uint32_t j) {
    return j % wide * lanes_across + threadIdx.x % warp % lanes_across;
  }

  // Adds the sums of lanes that are `step` apart. Of two such lanes each keeps half of the sums,
  // and goes on with the lane that is half as far away, down to `last`.
  template <uint32_t step, uint32_t half, uint32_t last>
  static __device__ void halve(uint32_t lane, int32_t (&sums)[rows * 4]) {
    const bool upper = lane & step;
#pragma unroll
    for (uint32_t i = 0; i < half; ++i) {
      const int32_t given = upper ? sums[i] : sums[i + half];
      sums[i] = (upper ? sums[i + half] : sums[i]) + __shfl_xor_sync(all_lanes, given, step);
    }
    if constexpr (step > last) halve<step / 2, half / 2, last>(lane, sums);
  }

  // For tokens 4 (lane % lanes) to + 3, whose integer products with the rows are in s, to be summed
  // over the lanes of these tokens: writes the weights of the values to weights[row][token]. A lane
  // is left with the sums of its own row, of some of the four tokens.
  template <uint32_t lanes>
  __device__ void weigh(const int32_t (&s)[rows][4], float q_scale, const float (&k_scale)[4],
                        const float (&v_scale)[4], float bias, uint32_t present,
                        float (*weights)[64]) {
    static_assert(rows == 4 && warp / lanes >= rows);
    constexpr uint32_t left = rows * 4 * lanes / warp;
    const uint32_t lane = threadIdx.x % warp, first = lane / lanes * left % 4;
    int32_t sums[rows * 4];
#pragma unroll
    for (uint32_t i = 0; i < rows * 4; ++i) sums[i] = s[i / 4][i % 4];
    halve<warp / 2, rows * 2, lanes>(lane, sums);
    const auto of_token = [&](const float(&x)[4], uint32_t i) {  // x[first + i]
      if constexpr (left == 4) return x[i];
      if constexpr (left == 2) return first ? x[2 + i] : x[i];
      return first & 2 ? first & 1 ? x[3] : x[2] : first & 1 ? x[1] : x[0];
    };
    float x[left], max_score = m;
#pragma unroll
    for (uint32_t i = 0; i < left; ++i) {
      x[i] = present >> (first + i) & 1
                 ? static_cast<float>(sums[i]) * of_token(k_scale, i) * q_scale + bias
                 : -INFINITY;
      max_score = fmaxf(max_score, x[i]);
    }
    max_score = warp_max(max_score, lanes_of_row);
    const float keep = relative(m, max_score);
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < left; ++i) {
      x[i] = relative(x[i], max_score);
      sum += x[i];
      weights[own_row()][lane % lanes * 4 + first + i] = x[i] * of_token(v_scale, i);
    }
    l = l * keep + warp_sum(sum, lanes_of_row);
    own = own * keep + warp_sum(bias == 0 ? sum : 0.0f, lanes_of_row);
    m = max_score;
    if (__any_sync(all_lanes, keep != 1)) {
#pragma unroll
      for (uint32_t r = 0; r < rows; ++r) {
        const float of_row = __shfl_sync(all_lanes, keep, static_cast<int>(r * lanes_of_row));
#pragma unroll
        for (uint32_t i = 0; i < wide; ++i)
          for (uint32_t d = 0; d < 4; ++d) o[r][i][d] *= of_row;
      }
    }
    __syncwarp();
  }
};

// The parts of a block's warps.
template <uint32_t dim, uint32_t rows>
struct WarpParts {
  float o[attend_warps][rows][dim], m[attend_warps][rows], l[attend_warps][rows],
      own[attend_warps][rows];
};

// Merges the parts of the warps into the states of the block's rows.
template <uint32_t dim, uint32_t rows>
__device__ void write_states(const DeviceKv& kv, const DeviceAttention& a, Part<dim, rows>& part,
                             uint32_t at_part, uint32_t head, uint32_t token, uint32_t first_row,
                             WarpParts<dim, rows>* parts) {
  using P = Part<dim, rows>;
  const uint32_t lane = threadIdx.x % warp, w = threadIdx.x / warp;
  __syncthreads();
#pragma unroll
  for (uint32_t r = 0; r < rows; ++r) {
    if (lane == r * P::lanes_of_row)
      parts->m[w][r] = part.m, parts->l[w][r] = part.l, parts->own[w][r] = part.own;
#pragma unroll
    for (uint32_t i = 0; i < P::wide * 4; ++i) {
      float x = part.o[r][i / 4][i % 4];
      for (uint32_t step = P::lanes_across; step < warp; step *= 2)
        x += __shfl_xor_sync(all_lanes, x, step);
      if (lane < P::lanes_across) parts->o[w][r][P::word_of(i / 4) * 4 + i % 4] = x;
    }
  }
  __syncthreads();
  for (uint32_t at = threadIdx.x; at < rows * dim; at += attend_threads) {
    const uint32_t r = at / dim, d = at % dim;
    if (first_row + r >= kv.group) break;
    float max_score = -INFINITY, sum = 0, own = 0, out = 0;
#pragma unroll
    for (uint32_t i = 0; i < attend_warps; ++i) max_score = fmaxf(max_score, parts->m[i][r]);
#pragma unroll
    for (uint32_t i = 0; i < attend_warps; ++i) {
      const float weight = relative(parts->m[i][r], max_score);
      sum += weight * parts->l[i][r];
      own += weight * parts->own[i][r];
      out += weight * parts->o[i][r][d];
    }
    float* state = a.states + state_at(kv, a, head, token, near_parts + at_part, first_row + r);
    state[d] = out;
    if (d == 0) state[dim] = max_score, state[dim + 1] = sum, state[dim + 2] = own;
  }
}

// A lane's part of the products of some quads' keys with the rows. `lanes` neighbouring lanes have
// a quad each, the other lanes further dimensions of the same quads; words: of a row, four
// dimensions each.
template <uint32_t lanes, uint32_t pieces, uint32_t rows, uint32_t words>
__device__ void multiply(const uint4 (&k)[pieces], const int32_t (&q)[rows][words],
                         int32_t (&s)[rows][4]) {
  const uint32_t lane = threadIdx.x % warp;
#pragma unroll
  for (uint32_t j = 0; j < pieces; ++j) {
#pragma unroll
    for (uint32_t r = 0; r < rows; ++r) {
      const int32_t x = q[r][j * (warp / lanes) + lane / lanes];
      s[r][0] = __dp4a(static_cast<int32_t>(k[j].x), x, s[r][0]);
      s[r][1] = __dp4a(static_cast<int32_t>(k[j].y), x, s[r][1]);
      s[r][2] = __dp4a(static_cast<int32_t>(k[j].z), x, s[r][2]);
      s[r][3] = __dp4a(static_cast<int32_t>(k[j].w), x, s[r][3]);
    }
  }
}

// The part of the selected quads that is block `at_part`'s of chosen_parts; all: every quad is
// selected, and quad i has place i among those that stay. A warp works on as many quads at a time
// as a page has. It loads the keys of the next ones before it uses the values of these.
template <uint32_t dim, uint32_t rows>
__device__ void attend_chosen(const DeviceKv& kv, const DeviceAttention& a, uint32_t at_part,
                              bool all) {
  const bool early = all && a.reads_early;
  if (!early) after_previous();
  using P = Part<dim, rows>;
  constexpr uint32_t page_tokens = page_size / 2 / dim;
  __shared__ int32_t q[rows][dim / 4];
  __shared__ union {
    __align__(16) float weights[attend_warps][rows][64];
    WarpParts<dim, rows> parts;
  } memory;
  const uint32_t chunks = (kv.group + rows - 1) / rows, head = blockIdx.y / chunks,
                 first_row = blockIdx.y % chunks * rows, token = blockIdx.z;
  const uint32_t lane = threadIdx.x % warp, w = threadIdx.x / warp;
  const std::size_t at = std::size_t{head} * a.blocks + query_group_at(a.n, a.blocks, token),
                    row = (std::size_t{head} * a.n + token) * kv.group + first_row;
  // Quads at a time; words of four dimensions.
  constexpr uint32_t lanes = page_tokens / 4, groups = dim / 4;
  const uint32_t* list = a.lists && !all ? a.lists + at * a.max_quads : nullptr;
  const float* biases = a.biases && !all ? a.biases + at * a.max_quads : nullptr;
  const uint8_t* present = a.present ? a.present + at * a.max_quads : nullptr;
  const DeviceCounts step = all ? *kv.counts : DeviceCounts();
  const uint32_t sinks = all && step.pages > 0 ? page_tokens / 4 : 0,
                 count = all ? step.pages * (page_tokens / 4) - sinks : a.list_counts[2 * at],
                 first = all    ? sinks
                         : list ? 0
                                : a.list_counts[2 * at + 1];
  // The entry of a quad of the list; behind the end of the list a copy of another entry.
  struct Entry {
    uint32_t quad, found, present;
    float bias;
  };
  unsigned long long* const entries = a.hot.entries + std::size_t{head} * a.hot.room + first;
  const auto entry_of = [&](uint32_t i) {
    if (all) {
      if (i >= count || first + i >= a.hot.room) return Entry{i, 0, 15u, 0.0f};
      // Another block may have put it there in this step: then it is not read from there.
      const unsigned long long held = *static_cast<volatile unsigned long long*>(entries + i);
      const bool there = static_cast<uint32_t>(held) == first + i && is_kept(held, step) &&
                         static_cast<uint32_t>(held >> 32) != step.step;
      return Entry{i, (first + i + 1) | (there ? hot_present : 0), 15u, 0.0f};
    }
    const bool inside = i < a.max_quads;
    return Entry{list && inside ? list[i] : i,
                 a.hot.room && inside ? a.hot.list_places[std::size_t{head} * a.max_quads + i] : 0,
                 present && inside ? present[i] : 15u, biases && inside ? biases[i] : 0.0f};
  };
  // This lane's quad of the warp's quads; other lanes have it too.
  constexpr uint32_t stride = chosen_parts * attend_warps * lanes;
  uint32_t i = (at_part * attend_warps + w) * lanes + lane % lanes;
  const auto pointer = [](const uint8_t* p, uint32_t from) {
    return reinterpret_cast<uint8_t*>(
        __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(p), from));
  };
  const bool keeps = a.hot.room > 0 && first_row == 0;
  Entry entry = entry_of(i);
  Quad source;
  uint8_t* to = nullptr;  // where the quad is kept
  bool there = false;
  uint4 k[4], v[4];
  uint2 source_scales;
  const auto load_keys = [&] {
    there = i < count;
    const uint32_t found = there ? entry.found : 0;
    uint8_t* const place = found ? hot_quad(a.hot, head, (found & ~hot_present) - 1) : nullptr;
    source = Quad();
    if (found & hot_present) source = Quad(place, dim);
    else if (there)
      source = a.gathered ? Quad(a.gathered + (at * a.max_quads + i) * quad_bytes_of(dim), dim)
                          : Quad(kv, head, first + entry.quad, dim);
    to = first_row == 0 && !(found & hot_present) ? place : nullptr;
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j)
      k[j] = there ? __ldcs(reinterpret_cast<const uint4*>(source.keys) + j * (warp / lanes) +
                            lane / lanes)
                   : uint4();
  };
  // Scales of keys and values are neighbours: a lane reads one of the two, so both are loaded at
  // once.
  const auto load_values = [&] {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      const auto* from = reinterpret_cast<const uint4*>(pointer(source.values, P::quad_of(j)));
      v[j] = from ? __ldcs(from + P::word_of(j)) : uint4();
    }
    source_scales = there ? __ldcs(reinterpret_cast<const uint2*>(
                                lane / lanes % 2 ? source.value_scales : source.scales))
                          : uint2();
  };
  const auto scales_of = [&](uint32_t kind) {
    const int from = static_cast<int>(kind * lanes + lane % lanes);
    return uint2{__shfl_sync(all_lanes, source_scales.x, from),
                 __shfl_sync(all_lanes, source_scales.y, from)};
  };
  load_keys();
  load_values();
  if (early) after_previous();
  const uint32_t own_row = P::own_row();
  const float q_scale = first_row + own_row < kv.group ? a.q_scale[row + own_row] : 0.0f;
  for (uint32_t word = threadIdx.x; word < rows * dim / 4; word += attend_warps * warp)
    q[word / (dim / 4)][word % (dim / 4)] =
        first_row + word / (dim / 4) < kv.group
            ? reinterpret_cast<const int32_t*>(a.q8 + row * dim)[word]
            : 0;
  __syncthreads();
  P part;

  while (i - lane % lanes < count) {
    const Entry own = entry;
    entry = entry_of(i + stride);
    const uint2 k_scales = scales_of(0), v_scales = scales_of(1);
    if (keeps) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if (to) reinterpret_cast<uint4*>(to)[j * (warp / lanes) + lane / lanes] = k[j];
        if (uint8_t* value = pointer(to, P::quad_of(j)))
          reinterpret_cast<uint4*>(value)[groups + P::word_of(j)] = v[j];
      }
      if (to && lane < lanes)
        reinterpret_cast<uint2*>(to + 8 * dim)[0] = k_scales,
                                          reinterpret_cast<uint2*>(to + 8 * dim)[1] = v_scales;
      if (all && to && lane < lanes)
        entries[own.quad] = static_cast<unsigned long long>(step.step) << 32 | (first + own.quad);
    }
    const float k_scale[4] = {from_bf16(k_scales.x & 0xffff), from_bf16(k_scales.x >> 16),
                              from_bf16(k_scales.y & 0xffff), from_bf16(k_scales.y >> 16)};
    const float v_scale[4] = {from_bf16(v_scales.x & 0xffff), from_bf16(v_scales.x >> 16),
                              from_bf16(v_scales.y & 0xffff), from_bf16(v_scales.y >> 16)};
    int32_t s[rows][4] = {};
    multiply<lanes>(k, q, s);
    const float bias = there ? own.bias : 0.0f;
    const uint32_t seen = there ? own.present : 0;
    i += stride;
    const bool goes_on = i - lane % lanes < count;
    if (goes_on) load_keys();
    part.template weigh<lanes>(s, q_scale, k_scale, v_scale, bias, seen, memory.weights[w]);
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t four = P::quad_of(j);
      const uint32_t words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
      for (uint32_t r = 0; r < rows; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(&memory.weights[w][r][four * 4]);
#pragma unroll
        for (uint32_t d = 0; d < 4; ++d)
          part.o[r][j % P::wide][d] +=
              x.x * signed_byte(words[d], 0) + x.y * signed_byte(words[d], 1) +
              x.z * signed_byte(words[d], 2) + x.w * signed_byte(words[d], 3);
      }
    }
    __syncwarp();
    if (goes_on) load_values();
  }
  write_states<dim, rows>(kv, a, part, at_part, head, token, first_row, &memory.parts);
}

}  // namespace
}  // namespace kvasir::cuda
