// Recurrent layers: convolution, states of heads, gates. The names are those in
// launch_recurrent.cc.
#include "backend/device_recurrent.h"
#include "layout.h"
#include "rounding.h"
#include "tiles.h"

namespace kvasir::cuda {
namespace {

constexpr unsigned all_lanes = ~0u;

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The sum over `lanes` neighbouring lanes.
template <int lanes>
__device__ inline float lane_sum(float x) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(all_lanes, x, step);
  return x;
}

// The sum over a block, returned to all threads.
__device__ inline float block_sum(float x) {
  __shared__ float parts[recurrent_threads / 32];
  x = lane_sum<32>(x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (const float part : parts) x += part;
  return x;
}

// Copies 4 bytes to shared memory, zeros where there is nothing.
__device__ inline void copy_number(float* to, const float* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 4 : 0));
}

constexpr uint32_t row_lanes = 8;  // that have a column's rows

// What some tokens give to a panel.
template <uint32_t rows>
struct Stage {
  static constexpr uint32_t keys = rows * row_lanes, tokens = rows > 16 ? 8 : 16;
  float k[tokens][keys], q[tokens][keys], v[tokens][state_panel], decay[tokens], rate[tokens];

  __device__ void copy(const DeviceHeadStates& h, uint32_t first, uint32_t count, uint32_t head,
                       uint32_t key_head) {
    const std::size_t key = std::size_t{key_head} * h.keys;
    for (uint32_t i = threadIdx.x; i < count * keys; i += recurrent_threads) {
      const uint32_t t = i / keys, r = i % keys;
      const bool there = r < h.keys;
      const float* row = h.x + std::size_t{first + t} * h.channels + key + (there ? r : 0);
      copy_number(&k[t][r], row + h.k_at, there);
      copy_number(&q[t][r], row + h.q_at, there);
    }
    for (uint32_t i = threadIdx.x; i < count * state_panel; i += recurrent_threads) {
      const uint32_t t = i / state_panel, c = i % state_panel,
                     column = blockIdx.x * state_panel + c;
      const bool there = column < h.values;
      const float* row = h.x + std::size_t{first + t} * h.channels + h.v_at;
      copy_number(&v[t][c], row + std::size_t{head} * h.values + (there ? column : 0), there);
    }
    for (uint32_t t = threadIdx.x; t < count; t += recurrent_threads) {
      const std::size_t at = std::size_t{first + t} * h.heads + head;
      copy_number(&decay[t], h.decay + at, true);
      copy_number(&rate[t], h.rate + at, true);
    }
    copies_given();
  }
};

// A block has a panel of a head's matrix in registers and follows the tokens. Eight lanes have a
// column: each of them runs of four rows, 32 rows apart, so that they read different banks. The
// next tokens are copied while these are computed.
template <uint32_t rows>
__device__ inline void advance(const DeviceHeadStates& h) {
  using Tokens = Stage<rows>;
  __shared__ __align__(16) Tokens stages[2];
  const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, own = lane % row_lanes,
                 own_column = threadIdx.x / row_lanes,
                 column = blockIdx.x * state_panel + own_column,
                 key_head = h.cyclic_keys ? head % h.key_heads : head / (h.heads / h.key_heads);
  const auto row_of = [own](uint32_t j) { return j / 4 * 32 + own * 4 + j % 4; };
  const std::size_t matrix = h.offset + head * h.matrix_size() +
                             std::size_t{blockIdx.x} * h.keys * state_panel + own_column;
  float state[rows];
  const float* const from = h.states->from + matrix;
#pragma unroll
  for (uint32_t j = 0; j < rows; ++j)
    state[j] = row_of(j) < h.keys ? from[row_of(j) * state_panel] : 0.0f;
  after_previous();
  stages[0].copy(h, 0, min(Tokens::tokens, h.n), head, key_head);
  const float skip = h.skip ? h.skip[head] : 0.0f;
  uint32_t stage = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < h.n; first += Tokens::tokens, stage ^= 1) {
    copies_done();
    __syncthreads();  // all see these tokens, and nobody reads the ones before them
    const uint32_t next = first + Tokens::tokens;
    if (next < h.n)
      stages[stage ^ 1].copy(h, next, min(Tokens::tokens, h.n - next), head, key_head);
    const Tokens& at = stages[stage];
    const uint32_t count = min(Tokens::tokens, h.n - first);
#pragma unroll 1
    for (uint32_t t = 0; t < count; ++t) {
      const float decay = at.decay[t], v = at.v[t][own_column];
      float change = v;
      if (h.delta) {
        float known[4] = {};
#pragma unroll
        for (uint32_t j = 0; j < rows; j += 4) {
          const float4 k = *reinterpret_cast<const float4*>(&at.k[t][row_of(j)]);
          known[0] = fmaf(state[j], k.x, known[0]);
          known[1] = fmaf(state[j + 1], k.y, known[1]);
          known[2] = fmaf(state[j + 2], k.z, known[2]);
          known[3] = fmaf(state[j + 3], k.w, known[3]);
        }
        const float sum = (known[0] + known[1]) + (known[2] + known[3]);
        change = fmaf(lane_sum<row_lanes>(sum), -decay, v);
      }
      change *= at.rate[t];
      float out[4] = {};
#pragma unroll
      for (uint32_t j = 0; j < rows; j += 4) {
        const float4 k = *reinterpret_cast<const float4*>(&at.k[t][row_of(j)]);
        const float4 q = *reinterpret_cast<const float4*>(&at.q[t][row_of(j)]);
        state[j] = fmaf(change, k.x, state[j] * decay);
        state[j + 1] = fmaf(change, k.y, state[j + 1] * decay);
        state[j + 2] = fmaf(change, k.z, state[j + 2] * decay);
        state[j + 3] = fmaf(change, k.w, state[j + 3] * decay);
        out[0] = fmaf(state[j], q.x, out[0]);
        out[1] = fmaf(state[j + 1], q.y, out[1]);
        out[2] = fmaf(state[j + 2], q.z, out[2]);
        out[3] = fmaf(state[j + 3], q.w, out[3]);
      }
      const float sum = lane_sum<row_lanes>((out[0] + out[1]) + (out[2] + out[3]));
      if (own == 0 && column < h.values)
        h.out[(std::size_t{first + t} * h.heads + head) * h.values + column] = fmaf(skip, v, sum);
      if (!h.each && first + t + 1 < h.n) continue;
      float* const to = h.states[h.each ? first + t : 0].to + matrix;
#pragma unroll
      for (uint32_t j = 0; j < rows; ++j)
        if (row_of(j) < h.keys) to[row_of(j) * state_panel] = state[j];
    }
  }
}

}  // namespace

extern "C" {

// A thread has a number.
__global__ void __launch_bounds__(elementwise_threads)
    sigmoid_gate(const float* x, const float* gate, DeviceCheck check, DeviceActivations out) {
  let_next_begin();
  after_previous();
  const std::size_t n = std::size_t{out.n} * out.cols,
                    at = std::size_t{blockIdx.x} * elementwise_threads + threadIdx.x;
  const bool inside = at < n;
  const float y[1] = {inside ? x[at] * sigmoid(gate[at]) : 0.0f};
  report(!(fabsf(y[0]) < check.limit), check);
  if (out.f32 && inside) out.f32[at] = y[0];
  if (out.q) round_inputs(y, at, inside, out);
}

// A thread has a channel of some tokens.
__global__ void __launch_bounds__(convolve_threads) recurrent_convolve(DeviceConvolution c) {
  after_previous();
  const uint32_t channel = blockIdx.x * convolve_threads + threadIdx.x, before = c.taps - 1,
                 first = blockIdx.y * convolve_tokens, end = min(c.n, first + convolve_tokens);
  if (channel >= c.channels) return;
  const float* from = c.states->from + c.offset;
  // Of all inputs: those of the state, then the step's.
  const auto input = [&](uint32_t i) {
    if (i < before) return from[std::size_t{i} * c.channels + channel];
    const std::size_t at = std::size_t{i - before} * c.channels + channel;
    return c.factors ? c.x[at] * c.factors[at] : c.x[at];
  };
  const float bias = c.bias ? c.bias[channel] : 0.0f;
#pragma unroll 1
  for (uint32_t t = first; t < end; ++t) {
    float sum = bias;
#pragma unroll 4
    for (uint32_t tap = 0; tap < c.taps; ++tap)
      sum = fmaf(c.weights[std::size_t{tap} * c.channels + channel], input(t + tap), sum);
    if (c.silu) sum *= sigmoid(sum);
    const std::size_t at = std::size_t{t} * c.channels + channel;
    c.y[at] = c.gates ? sum * c.gates[at] : sum;
    if (!c.each && t + 1 < c.n) continue;
    float* const to = c.states[c.each ? t : 0].to + c.offset;
    for (uint32_t i = 0; i < before; ++i)
      to[std::size_t{i} * c.channels + channel] = input(t + 1 + i);
  }
}

// A warp has the rates of a token, or a head of its q or k.
__global__ void __launch_bounds__(recurrent_threads) recurrent_prepare(DeviceHeadStates h) {
  after_previous();
  const uint32_t parts = 1 + (h.delta ? 2 * h.key_heads : 0), lane = threadIdx.x % 32;
  const std::size_t row = std::size_t{blockIdx.x} * (recurrent_threads / 32) + threadIdx.x / 32,
                    token = row / parts;
  const auto part = static_cast<uint32_t>(row % parts);
  if (token >= h.n) return;
  if (part == 0) {
    for (uint32_t head = lane; head < h.heads; head += 32) {
      const std::size_t at = token * h.heads + head;
      const float soft = softplus(h.alpha[at] + h.biases[head]);
      h.rate[at] = h.delta ? sigmoid(h.beta[at]) : soft;
      h.decay[at] = expf(h.factors[head] * soft);
    }
    return;
  }
  const bool is_q = part <= h.key_heads;
  const uint32_t head = is_q ? part - 1 : part - 1 - h.key_heads;
  float* x = h.x + token * h.channels + (is_q ? h.q_at : h.k_at) + std::size_t{head} * h.keys;
  float sum = 0;
  for (uint32_t i = lane; i < h.keys; i += 32) sum = fmaf(x[i], x[i], sum);
  sum = lane_sum<32>(sum) + h.epsilon;
  const float factor = 1.0f / sqrtf(is_q ? sum * static_cast<float>(h.keys) : sum);
  for (uint32_t i = lane; i < h.keys; i += 32) x[i] *= factor;
}

__global__ void __launch_bounds__(recurrent_threads) recurrent_advance_8(DeviceHeadStates h) {
  advance<8>(h);
}
__global__ void __launch_bounds__(recurrent_threads) recurrent_advance_16(DeviceHeadStates h) {
  advance<16>(h);
}
__global__ void __launch_bounds__(recurrent_threads) recurrent_advance_32(DeviceHeadStates h) {
  advance<32>(h);
}

// A block has a row. A thread writes only what it alone reads.
__global__ void __launch_bounds__(recurrent_threads)
    recurrent_gate(DeviceGatedNorm g, DeviceCheck check) {
  let_next_begin();
  after_previous();
  const std::size_t begin = std::size_t{blockIdx.x} * g.cols;
  const float *x = g.x + begin, *weights = g.weights;
  float* gates = g.gates + begin;
  if (weights) weights += std::size_t{blockIdx.x % g.groups_of_weights} * g.cols;
  float sum = 0;
  bool bad = false;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < g.cols; i += recurrent_threads) {
    const float gate = gates[i] * sigmoid(gates[i]), v = g.gates_first ? x[i] * gate : x[i];
    bad |= !(fabsf(x[i]) < check.limit);
    sum = fmaf(v, v, sum);
    gates[i] = g.gates_first ? v : gate;
  }
  report(bad, check);
  const float factor =
      weights ? 1.0f / sqrtf(block_sum(sum) / static_cast<float>(g.cols) + g.epsilon) : 1.0f;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < g.cols; i += recurrent_threads) {
    const float weight = weights ? factor * weights[i] : 1.0f;
    const float out[1] = {gates[i] * (g.gates_first ? weight : x[i] * weight)};
    gates[i] = out[0];
    if (!g.q) continue;
    report(!(fabsf(out[0]) < check.limit), check);
    DeviceActivations rounded{};
    rounded.q = g.q, rounded.scale = g.scale, rounded.sums = g.sums;
    round_inputs(out, begin + i, true, rounded);  // a warp has a block of 32
  }
}

}  // extern "C"
}  // namespace kvasir::cuda
