// The kernel contract: every operation on long arrays, as a table of plain functions.
//
// kernels/cpu fills the table for each instruction set; cpu_kernels() chooses one at the first
// call. Code above never depends on which. kernels/reference has the same operations in scalar
// double precision: the oracle of the tests, not shipped.
//
// Common rules, unless a function says otherwise:
//   - Arrays of floats and bytes begin at multiples of 64 bytes.
//   - Outputs do not overlap inputs. Nothing is allocated.
//   - Several threads may call a function at once on different outputs.
//   - Results do not depend on the division of work among threads: it never changes the order of a
//     sum.
//   - Integer parts (quantised products, page weights) are exact. Instruction sets differ only in
//     the rounding of floats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/activation.h"
#include "backend/page.h"
#include "gguf/tensor_type.h"

namespace kvasir {

// A matrix of weights in the layout of the file: row r gives output r. Any alignment.
struct WeightView {
  const std::byte* data = nullptr;
  TensorType type = TensorType::f32;
  uint32_t rows = 0;  // outputs
  uint32_t cols = 0;  // inputs; a multiple of the type's block
  std::size_t row_bytes = 0;
  float scale = 1;  // of all weights
};

// Which code computes a matrix product. The methods round differently. Within each, an output
// depends on its row and its input alone.
enum class ProductMethod : uint8_t {
  by_count,  // method_of(inputs)
  few,       // reads each row of weights in place
  many,      // unpacks weights for all inputs
  tiles,     // unpacks weights to bf16; needs Activations::tiles. Float weights use `many`
};
constexpr uint32_t max_few_inputs = 8;  // measured: `many` is faster for more
constexpr uint32_t max_lane_inputs = 16;
constexpr uint32_t tile_inputs = 512;     // inputs of a group in the order of tiles
constexpr uint32_t tile_pass_rows = 256;  // rows of a pass of tiles, which reads all inputs

constexpr ProductMethod method_of(uint32_t inputs) {
  return inputs <= max_few_inputs ? ProductMethod::few : ProductMethod::many;
}

// n rows of inputs to a matrix product, in float and, for quantised weights, in int8 with a scale
// per 32: x ~= q * scale[block]. `sums` has the sum of q over each 16 inputs, for weight types with
// an offset or 16-wide scales.
struct Activations {
  uint32_t n = 0, cols = 0;
  const float* f32 = nullptr;     // [n][cols]
  const int8_t* q = nullptr;      // [n][cols]           |q| <= 127
  const float* scale = nullptr;   // [n][cols / 32]
  const int16_t* sums = nullptr;  // [n][cols / 16]
  ProductMethod method = ProductMethod::by_count;
  const std::byte* lanes = nullptr;  // what Kernels::to_lanes wrote of all n, or null
  const std::byte* tiles = nullptr;  // what Kernels::to_tiles wrote of all n, or null
};

constexpr ProductMethod method_of(const Activations& x) {
  return x.method == ProductMethod::by_count ? method_of(x.n) : x.method;
}

// Rows [first, first + n) of x. With tiles, `first` is a multiple of tile_inputs. So is n, unless
// these rows are the last ones.
inline Activations rows_of(const Activations& x, std::size_t first, uint32_t n) {
  return {n,
          x.cols,
          x.f32 + first * x.cols,
          x.q + first * x.cols,
          x.scale + first * (x.cols / 32),
          x.sums + first * (x.cols / 16),
          x.method,
          n == x.n ? x.lanes : nullptr,
          x.tiles ? x.tiles + first * x.cols * sizeof(uint16_t) : nullptr};
}

// Queries of one KV head, quantised per row: f32 ~= q * scale. Multiplied by the softmax scale.
struct QueryRows {
  uint32_t rows = 0, dim = 0;  // dim is padded: PageShape::dim
  const float* f32 = nullptr;  // [rows][dim]
  const int8_t* q = nullptr;   // [rows][dim]      |q| <= 127
  // [rows][2 * dim]  the positive part max(q, 0), then the negative part min(q, 0)
  const int8_t* split = nullptr;
  const float* scale = nullptr;  // [rows]
  bool latent = false;           // PageShape::latent of the pages that they attend

  uint32_t page_tokens() const { return latent ? latent_page_tokens : page_bytes / 2 / dim; }
};

// Rows [row, row + rows) of q.
inline QueryRows row_of(const QueryRows& q, uint32_t row, uint32_t rows = 1) {
  return {rows,
          q.dim,
          q.f32 + std::size_t{row} * q.dim,
          q.q + std::size_t{row} * q.dim,
          q.split ? q.split + std::size_t{row} * 2 * q.dim : nullptr,
          q.scale + row,
          q.latent};
}

// Partials of attention of several query rows: unnormalised output, maximum score, sum of
// exponentials relative to it. The softmax output is o / l. Two partials merge after scaling to the
// larger m. An empty partial has m = -inf, l = 0, o = 0.
struct AttentionState {
  float* o;  // [rows][dim]
  float* m;  // [rows]
  float* l;  // [rows]
};

// A key in place.
struct KeyRef {
  const int8_t* data;
  float scale;
};

// A causal convolution of each channel over the tokens of a step and the `taps` - 1 tokens before
// them, whose inputs are the state of a recurrent layer.
constexpr uint32_t max_taps = 16;
struct Convolution {
  uint32_t n = 0, taps = 0, channels = 0;
  const float* x = nullptr;        // [n][channels]
  const float* weights = nullptr;  // [taps][channels]; the last tap is the token's own
  const float* bias = nullptr;     // [channels], or null
  const float* from = nullptr;     // [taps - 1][channels] inputs before the step, the oldest first
  float* to = nullptr;             // likewise: those at its end
  float* y = nullptr;              // [n][channels]
  bool silu = false;               // y = silu(y)
};

// A head of a recurrent layer: a matrix that n tokens read and change one after another.
//
//   M = decay M + k (rate (v - decay M^T k))^T   where it corrects (the delta rule)
//   M = decay M + k (rate v)^T                   otherwise
//   out = M^T q
constexpr uint32_t state_panel = 16;  // columns that are neighbours in memory
constexpr uint32_t state_panels(uint32_t values) {
  return (values + state_panel - 1) / state_panel;
}
struct StateStep {
  uint32_t n = 0, keys = 0, values = 0;  // tokens, rows, columns
  const float* from = nullptr;  // [state_panels(values)][keys][state_panel]; padding is zero
  float* to = nullptr;          // likewise: the matrix after the step; may be `from`
  const float *k = nullptr, *q = nullptr;         // [n][keys], key_stride from token to token
  const float* v = nullptr;                       // [n][values], value_stride from token to token
  const float *decay = nullptr, *rate = nullptr;  // [n], rate_stride from token to token
  float* out = nullptr;                           // [n][values], out_stride from token to token
  std::size_t key_stride = 0, value_stride = 0, rate_stride = 0, out_stride = 0;
  bool corrects = false;
};

// The sum of the shares below a threshold, the sum of their squares, and how many are not below.
struct ShareSums {
  double below, squares;
  uint32_t at_least;
};

struct Kernels {
  // "avx512amx", "avx512vnni", "avxvnni", "avx2", "neon-i8mm", "neon-dotprod", "scalar"
  const char* name;

  // ---- matrix products
  // Fills q, scale and sums of n rows (x: [n][cols], cols a multiple of 32) for rows [0, n).
  void (*quantize)(const float* x, uint32_t n, uint32_t cols, int8_t* q, float* scale,
                   int16_t* sums);

  // y[i * y_stride + r] = w.scale * sum_c w[r][c] * x[i][c]  for i in [0, x.n) and r in [row_begin,
  // row_end). row_begin is a multiple of matmul_rows; so is row_end, or it is w.rows. Quantised
  // weights use x.q/scale/sums and integer dot products, or x.tiles; F32, F16 and BF16 weights use
  // x.f32 and float accumulation. scratch: matmul_scratch(w.type, x.method) bytes, 64-byte aligned.
  void (*matmul)(const WeightView& w, const Activations& x, float* y, std::size_t y_stride,
                 uint32_t row_begin, uint32_t row_end, std::byte* scratch);
  std::size_t (*matmul_scratch)(TensorType type, ProductMethod method);
  // The quants of up to max_lane_inputs inputs in a second order. With it, `few` products of
  // quantised weights take less time and have the same bits. lane_bytes: of n inputs; 0: the table
  // has no such order. to_lanes: inputs [first, first + count) of x, at their place in out.
  std::size_t (*lane_bytes)(uint32_t n, uint32_t cols);
  void (*to_lanes)(const Activations& x, uint32_t first, uint32_t count, std::byte* out);
  // The inputs of ProductMethod::tiles: x.f32 in bf16, in the order of tiles, 64-byte aligned.
  // tile_bytes: of n inputs; 0: the table has no tiles. to_tiles: inputs [first, first + count) of
  // x, at their place in out. first is a multiple of 16; count is 16, or less for the last ones.
  std::size_t (*tile_bytes)(uint32_t n, uint32_t cols);
  void (*to_tiles)(const Activations& x, uint32_t first, uint32_t count, std::byte* out);
  uint32_t matmul_rows;  // rows per pass; tasks begin at multiples of it

  // out[c] = w.scale * w[row][c], dequantised exactly, then scaled: embedding rows. row < w.rows.
  void (*dequantize_row)(const WeightView& w, uint32_t row, float* out);

  // ---- elementwise
  // y[i] = x[i] / sqrt(mean(x[i]^2) + epsilon) * weight, for n rows of cols. y may be x. weight
  // null: ones.
  void (*rms_norm)(const float* x, const float* weight, float epsilon, uint32_t n, uint32_t cols,
                   float* y);
  // y[i] = (x[i] - mean) / sqrt(mean((x[i] - mean)^2) + epsilon) * weight + bias, likewise. bias
  // null: zeros.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float epsilon,
                     uint32_t n, uint32_t cols, float* y);
  // Rotates the first rotary_dim elements of n_heads vectors in place, `stride` floats apart. cos,
  // sin: [rotary_dim / 2]. neox: pairs (i, i + rotary_dim / 2), as in qwen; otherwise neighbours
  // (2i, 2i + 1), as in llama's GGUF files.
  void (*rope)(float* x, uint32_t n_heads, std::size_t stride, uint32_t rotary_dim,
               const float* cos, const float* sin, bool neox);
  // gate[i] = f(gate[i]) * up[i]; up null: f(gate[i]). clamped_silu needs up.
  void (*activate)(Activation f, float* gate, const float* up, std::size_t n);
  // x[i] = cap * tanh(x[i] / cap)
  void (*softcap)(float* x, float cap, std::size_t n);
  // x[i] += y[i]
  void (*add)(float* x, const float* y, std::size_t n);
  // x[i] *= 1 / (1 + e^-gate[i])
  void (*sigmoid_gate)(float* x, const float* gate, std::size_t n);

  // ---- recurrent layers
  // Channels [begin, end). Arrays may have any alignment.
  void (*convolve)(const Convolution& c, uint32_t begin, uint32_t end);
  // Panels [begin, end). Steps of n and m tokens give the bits of one of n + m. Any alignment.
  void (*advance_state)(const StateStep& s, uint32_t panel_begin, uint32_t panel_end);

  // ---- attention
  // Fills q, split (may be null) and scale of QueryRows from f32. Infinities and NaNs count as
  // zeros. A row of zeros gets scale 0.
  void (*quantize_queries)(const float* f32, uint32_t rows, uint32_t dim, int8_t* q, int8_t* split,
                           float* scale);

  // Adds the selected tokens of n_pages pages to the states of all rows; every row attends all of
  // them. Scores are integer products of K and q, plus the page's bias. Weights exp(s - m) *
  // v_scale are rounded to 14 bits of the largest weight in a tile and multiplied with V in
  // integers. scratch: attend_scratch bytes. Pages are taken in order; the list alone, not the
  // number of rows, fixes the order of sums.
  void (*attend_pages)(const QueryRows& q, const PageRef* pages, uint32_t n_pages,
                       AttentionState state, std::byte* scratch);

  // The scores of attend_pages, bit for bit: scores[r * stride + p * page_tokens + t] = K[t] . q[r]
  // * k_scale[t] * q_scale[r] + bias, for token t of page p; -inf for a token that is not selected.
  // scratch: attend_scratch bytes.
  void (*score_tokens)(const QueryRows& q, const PageRef* pages, uint32_t n_pages, float* scores,
                       std::size_t stride, std::byte* scratch);

  // Raises scores[r * stride + i] to the largest score of the tokens of block i, as score_tokens()
  // has it: of the pages i * block_pages to (i + 1) * block_pages - 1, or to the last one. Every
  // token is selected. block_pages: of 64 tokens. scratch: attend_scratch bytes.
  void (*raise_by_pages)(const QueryRows& q, const PageRef* pages, uint32_t n_pages,
                         uint32_t block_pages, float* scores, std::size_t stride,
                         std::byte* scratch);

  // The scores of n single keys: scores[r * score_stride + i] of keys[i], whose dimensions 4 j to
  // 4 j + 3 are at data + j * stride. A key of a page begins at PageShape::key_at and has stride
  // PageShape::key_stride.
  void (*score_keys)(const QueryRows& q, const KeyRef* keys, uint32_t n, uint32_t stride,
                     float* scores, std::size_t score_stride);

  // attend_pages over full-precision tokens k, v: [n][dim]. Row r attends tokens [0, limit[r]);
  // limit null: all n.
  void (*attend_rows)(const QueryRows& q, const float* k, const float* v, uint32_t n,
                      const uint32_t* limit, AttentionState state, std::byte* scratch);
  std::size_t (*attend_scratch)(uint32_t rows, uint32_t dim);

  // a <- merge of a and b. Either may be empty.
  void (*merge)(AttentionState a, AttentionState b, uint32_t rows, uint32_t dim);
  // out[r * out_stride + d] = o[r][d] / l[r] for d < head_dim; 0 where l is 0.
  void (*finish)(AttentionState a, uint32_t rows, uint32_t dim, uint32_t head_dim, float* out,
                 std::size_t out_stride);

  // ---- store
  // Seals page `page` (0 .. 15) of an extent: quantises k, v: [page_tokens][dim] (padding zero, K
  // already centred) and writes the page, its scales and its bounds to the extent's arrays. A token
  // of zeros gets scale 0. Infinities, NaNs and tokens of magnitude under 1e-30 count as zeros.
  // Bounds enclose the int8 values; null: none are written. Sealing an unsealed page gives the same
  // bytes. v is not read where the shape is latent.
  void (*seal_page)(const PageShape& shape, const float* k, const float* v, uint32_t page,
                    int8_t* pages, uint16_t* scales, int8_t* bounds);
  // The reverse for one page: k, v: [page_tokens][dim]. v is not written where it is null or the
  // shape is latent.
  void (*unseal_page)(const PageShape& shape, const int8_t* data, const uint16_t* scales, float* k,
                      float* v);

  // Upper bounds of q . k over each block of one extent (Quest, arXiv 2406.10774, section 3.3, by
  // two dot products): scores[r * stride + b] = q_scale[r] * block_scale[b] * (split[r] .
  // bounds[b]), b in [0, shape.extent_blocks()). next: the bounds of the next call, prefetched
  // (extents are slabs apart, where the CPU does not prefetch them); null: none.
  void (*score_bounds)(const PageShape& shape, const QueryRows& q, const int8_t* bounds,
                       const int8_t* next, float* scores, std::size_t stride);

  // out[r * out_stride + c] = sum over k < n of a[r * row + k * step] * b[k * b_stride + c], in
  // float, for r < rows and c < cols; finds the bases of sketches. cols: at least 16. Any
  // alignment.
  void (*multiply)(const float* a, std::size_t row, std::size_t step, uint32_t rows, const float* b,
                   std::size_t b_stride, uint32_t cols, uint32_t n, float* out,
                   std::size_t out_stride);
  // Writes the sketch of page `page` (0 .. 15) of an extent: key . basis of every token, in 4 bits.
  // basis: [dim][sketch_dim].
  void (*seal_sketch)(const PageShape& shape, const float* basis, const int8_t* data,
                      const uint16_t* scales, uint32_t page, int8_t* sketch);
  // The largest estimate of q . k among the tokens of each quad of an extent, scores[r * stride +
  // quad]. q: int8 [rows][sketch_dim], the queries in the sketch's coordinates, with a scale per
  // row. next: as for score_bounds.
  void (*score_sketch)(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale,
                       const int8_t* sketch, const int8_t* next, float* scores, std::size_t stride);
  // Raises scores[r * stride + i] to the largest score of tile i, 16 quads, of an extent: of those
  // from `first` on and before `end`, at most extent_quads. Tiles from `end` on are not written.
  // The rest as score_sketch().
  void (*raise_by_sketch)(const PageShape& shape, uint32_t rows, const int8_t* q,
                          const float* q_scale, const int8_t* sketch, const int8_t* next,
                          uint32_t first, uint32_t end, float* scores, std::size_t stride);
  // Shares of attention of n scores: exp(score) / (l * e^m + sum of all exp(scores)), where m and l
  // are the maximum and the sum of exponentials of other tokens (none: m = -inf, l = 0). Sums the
  // shares over rows into the first row of scores: [rows][stride]; the other rows are overwritten.
  // m, l: [rows]. A score 24 or more below the largest may get 0.
  void (*attention_shares)(float* scores, uint32_t rows, std::size_t stride, uint32_t n,
                           const float* m, const float* l);

  // Sums over the shares below a threshold (select/sampling.h). NaNs are in none of the sums.
  ShareSums (*sum_shares)(const float* shares, uint32_t n, float threshold);
  // Writes all i < n with shares[i] >= threshold * u, ascending, and returns how many. u in (0, 1)
  // is the random number of seed and first + i: the 24 upper bits of MurmurHash3's finalizer over
  // (first + i) * 0x9e3779b1 + seed, plus a half, in units of 2^-24. out: room for n.
  uint32_t (*sample)(const float* shares, uint32_t n, uint32_t first, uint32_t seed,
                     float threshold, uint32_t* out);

  // The k largest of scores[0 .. n), as ascending indices in out; ties go to the lowest index.
  // Returns their number: min(k, n), or fewer when a score is NaN, which a damaged summary may
  // cause. scratch: n * 4 bytes.
  uint32_t (*top_k)(const float* scores, uint32_t n, uint32_t k, uint32_t* out, std::byte* scratch);
};

// The best table that the CPU and the operating system support, chosen once.
const Kernels& cpu_kernels();
// For tests and benchmarks: a table by name, null when this build or this CPU lacks it; and the
// tables of this CPU, best first, null after the last.
const Kernels* cpu_kernels_by_name(const char* name);
const Kernels* cpu_kernels_at(uint32_t i);

}  // namespace kvasir
