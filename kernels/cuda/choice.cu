// What new tokens attend, by the names in launch.cc: the sketch's estimates of every token's score, from the same integers as the processor's, and the
// choice of quads by them, as select/bounded.cc and select/sampling.cc have it.
#include "attention_common.h"
#include "integer_products.h"

namespace kvasir::cuda {
namespace {

constexpr float like_the_best = 2;  // select/bounded.cc

constexpr uint32_t scan_rows = 4;  // of a group, that share a pass
constexpr uint32_t tile_quads = 16;

// The larger of two largest scores, and the sum of exponentials of both, relative to it.
__device__ void add_scores(float& m, float& l, float other_m, float other_l) {
  const float most = fmaxf(m, other_m);
  l = l * relative(m, most) + other_l * relative(other_m, most);
  m = most;
}

// What a lane has of the sketch's tile: of a token of each of two neighbouring quads, eight coordinates or four.
template <uint32_t groups>
struct SketchWords {
  static_assert(groups == 3 || groups == 6);
  uint2 whole, rest;  // rest: where a key has more coordinates than a product of 32 takes

  __device__ void load(const uint2* tile, uint32_t token, uint32_t of_key, uint32_t pair) {
    const uint2 *its = tile + of_key * tile_quads / 2 + pair, *behind = tile + (4 + of_key / 2) * tile_quads / 2 + pair;
    whole = of_key < groups ? __ldcs(its + token * groups * tile_quads / 2) : uint2();
    if (groups > 4) rest = __ldcs(behind + token * groups * tile_quads / 2);
  }
};

// A warp a tile of 16 quads, whose tokens of the same place are the rows of a product with four queries. Rows and coordinates are in such an order that a
// lane reads two neighbouring words of the tile at a time: row i < 8 is quad 2 i, row 8 + i the one behind it. The four queries are the columns twice, so that half
// of the lanes find the scores of the first of the two quads, the others those of the second. A tile's loads all come before its products as long as there are
// registers for that: with one pointer more in the loop (where the next tile is), 1,000,000 tokens took 74 us, not 58.
template <uint32_t groups>
__device__ void score_sketch(const DeviceKv& kv, const DeviceAttention& a) {
  constexpr uint32_t n = groups * 8, warps = scan_threads / warp;
  const uint32_t at = blockIdx.y, head = at / a.blocks, lane = threadIdx.x % warp, w = threadIdx.x / warp;
  const uint32_t pair = lane / 4, of_key = lane % 4, quad = 2 * pair + of_key / 2;
  constexpr uint32_t page_quads = page_size / 2 / (groups * 64 / 3) / 4, tiles_of = extent_pages * page_quads / tile_quads;  // of a head of 64 or 128
  const auto its_offset = static_cast<uint32_t>(kv.sketch_offset + head * kv.sketch_size);
  const auto extent_at = [&](uint32_t e) { return __ldg(reinterpret_cast<const unsigned long long*>(kv.sketch_at) + e); };
  // The first tile of each warp; a tile is a part of an extent's sketch.
  if (const uint32_t tile = blockIdx.x * warps + w; at % a.blocks == 0 && tile < a.extents * tiles_of) {
    const std::size_t bytes = kv.sketch_size / tiles_of;
    if (const unsigned long long at = extent_at(tile / tiles_of))
      for (std::size_t i = lane * std::size_t{128}; i < bytes; i += warp * 128) prefetch(reinterpret_cast<const int8_t*>(at) + its_offset + tile % tiles_of * bytes + i);
  }
  after_previous();
  constexpr uint32_t its_rows = scan_rows / 2;  // of a lane, when scores are known: neighbouring ones
  constexpr auto minus_eights = static_cast<int32_t>(0xf8f8f8f8u);
  __shared__ float parts[warps][scan_rows][2];
  const uint32_t pages = kv.counts->pages, extents = (pages + extent_pages - 1) / extent_pages, tiles = extents * tiles_of;
  const uint32_t first = page_quads, end = pages * page_quads;  // page 0 holds the sinks
  const Askers askers = askers_of(a.n, a.blocks, at % a.blocks);
  const uint32_t rows = askers.asking() * kv.group;
  const std::size_t first_row = std::size_t{at} * a.asking_rows, stride = std::size_t{a.extents} * tiles_of * tile_quads;
  for (uint32_t i = blockIdx.x * scan_threads + threadIdx.x; i < share_bins; i += gridDim.x * scan_threads)
    a.share_counts[std::size_t{at} * share_bins + i] = 0, a.share_sums[std::size_t{at} * share_bins + i] = 0;
  if (blockIdx.x == 0 && threadIdx.x < 2) a.list_counts[2 * at + threadIdx.x] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 2) a.parts_done[at] = 0;
  for (uint32_t begin = 0; begin < rows; begin += scan_rows) {
    const uint32_t mine = begin + of_key % 2 * its_rows;  // this lane's first row
    uint32_t q[2], q_rest = 0;
    int32_t start[its_rows] = {};
    float scale[its_rows], m[its_rows], l[its_rows] = {};
    const auto query_at = [&](uint32_t row) { return (std::size_t{head} * a.n + askers.token(row / kv.group)) * kv.group + row % kv.group; };
    const auto projected = [&](uint32_t row) { return reinterpret_cast<const int32_t*>(a.projected + query_at(min(row, rows - 1)) * n); };
    const int32_t* column = projected(begin + pair % scan_rows);
    q[0] = of_key < groups ? column[2 * of_key] : 0;
    q[1] = of_key < groups ? column[2 * of_key + 1] : 0;
    if (groups > 4) q_rest = column[8 + of_key];
#pragma unroll
    for (uint32_t r = 0; r < its_rows; ++r) {
      const uint32_t row = min(mine + r, rows - 1);
      scale[r] = a.projected_scale[query_at(row)];
      m[r] = a.states[state_at(kv, a, head, askers.token(row / kv.group), 0, row % kv.group) + kv.dim];  // few scores are above what sinks and window have
#pragma unroll
      for (uint32_t i = 0; i < groups * 2; ++i) start[r] = __dp4a(minus_eights, projected(mine + r)[i], start[r]);  // the sketch's values are larger by 8
    }
    for (uint32_t tile = blockIdx.x * warps + w; tile < tiles; tile += gridDim.x * warps) {
      const int8_t* sketch = reinterpret_cast<const int8_t*>(extent_at(tile / tiles_of) + its_offset);
      const uint2* words = reinterpret_cast<const uint2*>(sketch) + std::size_t{tile % tiles_of} * 4 * groups * tile_quads / 2;
      const auto* scales = reinterpret_cast<const uint16_t*>(sketch + std::size_t{tiles_of} * 4 * groups * tile_quads * 4);
      SketchWords<groups> of[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) of[i].load(words, i, of_key, pair);
      const float step = from_bf16(__ldg(scales + tile % tiles_of * tile_quads + quad));
      int32_t best[its_rows];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        int32_t d[4] = {start[0], start[1], start[0], start[1]};
        const auto low = [](uint32_t x) { return x & 0x0f0f0f0f; };
        const auto high = [](uint32_t x) { return x >> 4 & 0x0f0f0f0f; };
        multiply_32(d, {low(of[i].whole.x), low(of[i].whole.y), high(of[i].whole.x), high(of[i].whole.y)}, q);
        if (groups > 4) multiply_16(d, low(of[i].rest.x >> of_key % 2 * 4), low(of[i].rest.y >> of_key % 2 * 4), q_rest);
#pragma unroll
        for (uint32_t r = 0; r < its_rows; ++r) {
          const int32_t its = of_key < 2 ? d[r] : d[2 + r];
          best[r] = i == 0 ? its : max(best[r], its);
        }
      }
      const uint32_t its = tile * tile_quads + quad;
#pragma unroll
      for (uint32_t r = 0; r < its_rows; ++r) {
        if (mine + r >= rows) continue;
        const float score = static_cast<float>(best[r]) * step * scale[r];
        a.scores[(first_row + mine + r) * stride + its] = score;
        if (its < first || its >= end) continue;
        if (score > m[r])
          l[r] = l[r] * __expf(m[r] - score) + 1, m[r] = score;
        else
          l[r] += __expf(score - m[r]);
      }
    }
    // The lanes of every other column have the same rows.
#pragma unroll
    for (uint32_t r = 0; r < its_rows; ++r) {
      float most = m[r], sum = l[r];
#pragma unroll
      for (uint32_t step = 2; step < warp; step *= 2) {
        const float other_m = __shfl_xor_sync(all_lanes, most, step), other_l = __shfl_xor_sync(all_lanes, sum, step);
        add_scores(most, sum, other_m, other_l);
      }
      if (lane < 2) parts[w][lane * its_rows + r][0] = most, parts[w][lane * its_rows + r][1] = sum;
    }
    __syncthreads();
    if (const uint32_t r = threadIdx.x; r < scan_rows && begin + r < rows) {
      float most = -INFINITY, sum = 0;
      for (uint32_t i = 0; i < warps; ++i) add_scores(most, sum, parts[i][r][0], parts[i][r][1]);
      float* to = a.score_sums + ((first_row + begin + r) * most_score_parts + blockIdx.x) * 2;
      to[0] = most, to[1] = sum;
    }
    __syncthreads();
  }
}

// ---- the choice -----------------------------------------------------------------------------------------------------------

constexpr uint32_t bin_shift = 19, first_bin = (127 - 43) << 4;  // of a float's bits

__device__ float bin_edge(uint32_t bin) { return __uint_as_float((first_bin + bin) << bin_shift); }

// Adds to a sum in shared memory, where the hardware adds 32 bits at a time; what it does of 64 is a loop that waits for others.
__device__ void add_64(unsigned long long* sum, unsigned long long x) {
  auto* words = reinterpret_cast<uint32_t*>(sum);
  const auto low = static_cast<uint32_t>(x), before = atomicAdd(words, low);
  if (const uint32_t high = static_cast<uint32_t>(x >> 32) + (before + low < low); high > 0) atomicAdd(words + 1, high);
}

// The random number of a quad: Kernels::sample.
__device__ float random_of(uint32_t quad, uint32_t seed) {
  uint32_t x = quad * 0x9e3779b1u + seed;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  x ^= x >> 16;
  return (static_cast<float>(x >> 8) + 0.5f) * 0x1p-24f;
}

// The sum of x of a block's threads before this one, in their order; *all gets that of all. parts: [warps], not used by the call before.
template <uint32_t threads, class T>
__device__ T before_this(T x, T* parts, T* all) {
  constexpr uint32_t warps = threads / warp;
  const unsigned lane = threadIdx.x % warp, w = threadIdx.x / warp;
  T its = x, before{}, sum{};
  for (unsigned step = 1; step < warp; step *= 2) {
    const T other = __shfl_up_sync(all_lanes, its, step);
    if (lane >= step) its += other;
  }
  if (lane == warp - 1) parts[w] = its;
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < warps; ++i) {
    if (i == w) before = sum;
    sum += parts[i];
  }
  *all = sum;
  return before + (its - x);
}

// The threshold by how many shares are of which size. By all threads of a block of choose_threads, to all. What select/sampling.cc finds by steps is found
// by the bin in which it lies; the shares of that bin count as their mean, which makes it differ by a thousandth at most.
__device__ float find_threshold(const DeviceBudget& budget, float variance, uint32_t n, const uint32_t* bin_counts, const unsigned long long* bin_sums) {
  constexpr uint32_t each = share_bins / choose_threads;
  static_assert(share_bins % choose_threads == 0);
  __shared__ uint32_t counts[choose_threads / warp];
  __shared__ unsigned long long sums[choose_threads / warp];
  __shared__ float square_sums[choose_threads / warp];
  __shared__ float below[share_bins + 1], squares_below[share_bins + 1];  // the sums of shares below a bin's edge, and of their squares
  __shared__ uint32_t above[share_bins + 1];                             // how many are not below
  if (n <= budget.least) return 0;
  const auto as_share = [](unsigned long long sum) { return static_cast<float>(sum) * (1 / share_unit); };
  uint32_t count[each], its_count = 0, all;
  unsigned long long sum[each], its_sum = 0, all_sum;
  float squares[each], its_squares = 0, all_squares;
#pragma unroll
  for (uint32_t i = 0; i < each; ++i) {
    const uint32_t bin = threadIdx.x * each + i;
    count[i] = __ldcg(bin_counts + bin), sum[i] = __ldcg(bin_sums + bin);  // other blocks have counted too
    squares[i] = count[i] > 0 ? as_share(sum[i]) * as_share(sum[i]) / static_cast<float>(count[i]) : 0.0f;
    its_count += count[i], its_sum += sum[i], its_squares += squares[i];
  }
  uint32_t before = before_this<choose_threads>(its_count, counts, &all);
  unsigned long long sum_before = before_this<choose_threads>(its_sum, sums, &all_sum);
  float squares_before = before_this<choose_threads>(its_squares, square_sums, &all_squares);
  uint32_t bins = 0;  // of which the threshold is not below the edge: the first ones
#pragma unroll
  for (uint32_t i = 0; i < each; ++i) {
    const uint32_t bin = threadIdx.x * each + i, others = all - before;
    const float t = bin_edge(bin), its_below = as_share(sum_before), expected = static_cast<float>(others) + its_below / t;
    below[bin] = its_below, squares_below[bin] = squares_before, above[bin] = others;
    const bool low = expected >= static_cast<float>(budget.least) && (t * its_below - squares_before <= variance || expected > static_cast<float>(budget.most));
    bins += static_cast<uint32_t>(__syncthreads_count(low));
    before += count[i], sum_before += sum[i], squares_before += squares[i];
  }
  if (threadIdx.x == 0) below[share_bins] = as_share(all_sum), squares_below[share_bins] = all_squares, above[share_bins] = 0;
  __syncthreads();
  if (bins == 0) return bin_edge(0);
  const auto from = [&](uint32_t edge) {
    const auto others = static_cast<float>(above[edge]);
    const auto by_count = [&](uint32_t wanted) { return static_cast<float>(wanted) > others ? below[edge] / (static_cast<float>(wanted) - others) : INFINITY; };
    return below[edge] > 0 ? fminf(fmaxf((variance + squares_below[edge]) / below[edge], by_count(budget.most)), by_count(budget.least)) : INFINITY;
  };
  const uint32_t its_bin = above[bins - 1] - above[bins];
  const float mean = its_bin > 0 ? (below[bins] - below[bins - 1]) / static_cast<float>(its_bin) : 0.0f;
  const float if_below = from(bins), if_not = from(bins - 1), t = if_below >= mean ? if_below : fminf(if_not, mean);
  return fminf(fmaxf(t, bin_edge(bins - 1)), bins < share_bins ? bin_edge(bins) : 3e38f);
}

// Where a quad that was chosen is kept, as DeviceHotQuads::found has it. Its places are looked at by other threads too: an entry is taken by the one who exchanges it
// for its own, and not again in this step, so that each failure to is another's success.
__device__ uint32_t keep_quad(const DeviceHotQuads& hot, const DeviceCounts& counts, uint32_t head, uint32_t quad) {
  const uint32_t first = hot_place(quad, hot.room);
  unsigned long long* const entries = hot.entries + std::size_t{head} * hot.room + first;
  const unsigned long long mine = static_cast<unsigned long long>(counts.step) << 32 | quad;
  for (;;) {
    unsigned long long before = 0;  // what the place has
    uint32_t place = 0, last = UINT32_MAX;
#pragma unroll
    for (uint32_t i = 0; i < hot_ways; ++i) {
      const unsigned long long entry = *reinterpret_cast<volatile unsigned long long*>(entries + i);
      const bool kept = is_kept(entry, counts);
      if (kept && static_cast<uint32_t>(entry) == quad) return atomicCAS(entries + i, entry, mine) == entry ? (first + i + 1) | hot_is_there : 0;
      const uint32_t chosen = kept ? static_cast<uint32_t>(entry >> 32) : 0;
      if (chosen < last) before = entry, place = i, last = chosen;
    }
    if (last == counts.step) return 0;  // all are of this step
    if (atomicCAS(entries + place, before, mine) == before) return first + place + 1;
  }
}

}  // namespace

extern "C" {

// Blocks of a list, each of some share_quads quads: the rows' shares, summed, in the place of the first row's scores, and how many are
// of which size. Sums are of whole numbers, so that their order does not matter. The block that is done last finds the threshold.
__global__ void __launch_bounds__(share_threads) attention_shares(DeviceKv kv, DeviceAttention a, uint32_t score_parts) {
  after_previous();
  __shared__ float most_of[most_asking_rows], part_of[most_asking_rows], share_of[most_asking_rows];
  __shared__ uint32_t counts[share_bins];
  __shared__ unsigned long long shares_of[share_bins];
  const uint32_t head = blockIdx.y / a.blocks, thread = threadIdx.x, lane = thread % warp, w = thread / warp;
  const uint32_t page_quads = kv.page_tokens / 4, first = page_quads, end = kv.counts->pages * page_quads;
  if (end <= first) return;
  const Askers askers = askers_of(a.n, a.blocks, blockIdx.y % a.blocks);
  const uint32_t rows = askers.asking() * kv.group;
  const std::size_t at = blockIdx.y, first_row = at * a.asking_rows, stride = std::size_t{a.extents} * extent_pages * page_quads;
  for (uint32_t i = thread; i < share_bins; i += share_threads) counts[i] = 0, shares_of[i] = 0;
  for (uint32_t r = w; r < rows; r += share_threads / warp) {
    const float* sums = a.score_sums + (first_row + r) * most_score_parts * 2;
    const float* state = a.states + state_at(kv, a, head, askers.token(r / kv.group), 0, r % kv.group);
    float m = -INFINITY, l = 0;
    for (uint32_t i = lane; i < score_parts; i += warp) add_scores(m, l, sums[2 * i], sums[2 * i + 1]);
    const float near_m = state[kv.dim] - __logf(like_the_best), most = fmaxf(warp_max(m), near_m), sum = warp_sum(l * relative(m, most));
    const float total = sum + state[kv.dim + 1] * relative(near_m, most);
    if (lane == 0) most_of[r] = most, part_of[r] = 1 / total, share_of[r] = sum / total;
  }
  __syncthreads();
  // A share that is too small for one of many tokens makes a sample of it too heavy for all of them: select/bounded.cc, choose_together().
  float least = 0;
  for (uint32_t r = 0; a.n > 1 && r < rows; ++r) least += share_of[r];
  least *= 0.1f / static_cast<float>(end - first);
  float* scores = a.scores + first_row * stride;
  for (uint32_t part = blockIdx.x * share_quads; part < end; part += gridDim.x * share_quads) {
#pragma unroll
    for (uint32_t i = 0; i < share_quads / share_threads; ++i) {
      const uint32_t quad = part + i * share_threads + thread;
      if (quad < first || quad >= end) continue;
      float share = 0;
      for (uint32_t r = 0; r < rows; ++r) share += __expf(scores[r * stride + quad] - most_of[r]) * part_of[r];
      share = fmaxf(share >= bin_edge(0) ? share : 0, least);  // what is no number too
      scores[quad] = share;
      if (const uint32_t bits = __float_as_uint(share) >> bin_shift; bits >= first_bin) {
        const uint32_t bin = min(bits - first_bin, share_bins - 1);
        atomicAdd(counts + bin, 1u);
        add_64(shares_of + bin, __float2ull_rn(share * share_unit));
      }
    }
  }
  __syncthreads();
  for (uint32_t i = thread; i < share_bins; i += share_threads)
    if (counts[i] > 0) atomicAdd(a.share_counts + at * share_bins + i, counts[i]), atomicAdd(a.share_sums + at * share_bins + i, shares_of[i]);
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (thread == 0) last = atomicAdd(a.parts_done + at, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const auto askers_heads = static_cast<float>(askers.asking());
  const float t = find_threshold(*kv.budget, kv.budget->variance * askers_heads * askers_heads, end - first, a.share_counts + at * share_bins, a.share_sums + at * share_bins);
  if (thread == 0) a.thresholds[at] = t;
}

// Blocks of choose_quads of a list: what the threshold takes of them, a bit each, and how many.
__global__ void __launch_bounds__(choose_threads) attention_choose(DeviceKv kv, DeviceAttention a) {
  after_previous();
  __shared__ uint32_t parts[choose_threads / warp];
  const uint32_t head = blockIdx.y / a.blocks, lane = threadIdx.x % warp, w = threadIdx.x / warp;
  const uint32_t page_quads = kv.page_tokens / 4, first = page_quads, end = kv.counts->pages * page_quads, begin = blockIdx.x * choose_quads;
  const std::size_t at = blockIdx.y, stride = std::size_t{a.extents} * extent_pages * page_quads;
  if (end <= first || begin >= end || kv.budget->most == 0) return;
  const float t = a.thresholds[at];
  const float* shares = a.scores + at * a.asking_rows * stride;
  const uint32_t seed = (kv.layer << 16 | head) * 0x85ebca6bu;  // sample_seed()
  uint32_t* masks = a.masks + (at * gridDim.x + blockIdx.x) * (choose_quads / warp);
  uint32_t count = 0;
#pragma unroll
  for (uint32_t i = 0; i < choose_quads / choose_threads; ++i) {
    const uint32_t quad = begin + i * choose_threads + threadIdx.x;
    const unsigned mask = __ballot_sync(all_lanes, quad >= first && quad < end && shares[quad] >= t * random_of(quad, seed));
    if (lane == 0) masks[i * (choose_threads / warp) + w] = mask, count += __popc(mask);
  }
  uint32_t all;
  before_this<choose_threads>(count, parts, &all);
  if (threadIdx.x == 0) a.part_counts[at * gridDim.x + blockIdx.x] = all;
}

// The same blocks: their part of the list, and where it is kept.
__global__ void __launch_bounds__(choose_threads) attention_list(DeviceKv kv, DeviceAttention a) {
  after_previous();
  constexpr uint32_t its_masks = choose_quads / warp;
  static_assert(its_masks <= choose_threads);
  __shared__ uint32_t parts[2][choose_threads / warp], places[its_masks];
  const uint32_t head = blockIdx.y / a.blocks, thread = threadIdx.x, lane = thread % warp, w = thread / warp;
  const uint32_t page_quads = kv.page_tokens / 4, end = kv.counts->pages * page_quads, begin = blockIdx.x * choose_quads;
  const std::size_t at = blockIdx.y, stride = std::size_t{a.extents} * extent_pages * page_quads;
  if (end <= page_quads || kv.budget->most == 0 || begin >= end) return;
  const uint32_t* counts = a.part_counts + at * gridDim.x;
  uint32_t before_block = 0, first_place, all;
  for (uint32_t i = thread; i < blockIdx.x; i += choose_threads) before_block += counts[i];
  before_this<choose_threads>(before_block, parts[0], &first_place);
  const uint32_t* masks = a.masks + (at * gridDim.x + blockIdx.x) * its_masks;
  const uint32_t its = thread < its_masks ? masks[thread] : 0;
  const uint32_t its_place = first_place + before_this<choose_threads>(static_cast<uint32_t>(__popc(its)), parts[1], &all);
  if (thread < its_masks) places[thread] = its_place;
  __syncthreads();
  if (begin + choose_quads >= end && thread == 0) a.list_counts[2 * at] = min(first_place + all, a.most);  // more than there is room for is all but impossible
  const float t = a.thresholds[at];
  const float* shares = a.scores + at * a.asking_rows * stride;
  const DeviceCounts step = *kv.counts;
  uint32_t again = 0;
  for (uint32_t i = w; i < its_masks; i += choose_threads / warp) {
    const unsigned mask = masks[i];
    const uint32_t to = places[i] + __popc(mask & ((1u << lane) - 1)), quad = begin + i * warp + lane;
    if (!(mask >> lane & 1) || to >= a.most) continue;
    const float share = shares[quad];
    a.lists[at * a.most + to] = quad;
    a.biases[at * a.most + to] = share < t ? __logf(t / share) : 0.0f;
    if (!a.hot.room) continue;
    const uint32_t found = keep_quad(a.hot, step, head, quad);
    a.hot.found[std::size_t{head} * a.most + to] = found;
    again += found >> 31;
  }
  if (again > 0) atomicAdd(a.list_counts + 2 * at + 1, again);
}

#define KVASIR_OF_DIM(dim, groups) \
  __global__ void __launch_bounds__(scan_threads, scan_blocks) attention_scan_##dim(DeviceKv kv, DeviceAttention a) { score_sketch<groups>(kv, a); }
KVASIR_OF_DIM(64, 3)
KVASIR_OF_DIM(128, 6)

}  // extern "C"
}  // namespace kvasir::cuda
