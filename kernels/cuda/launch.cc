// The operations: which kernel runs, on how many blocks.
#include <algorithm>
#include <iterator>
#include <span>

#include "backend/device_gated.h"
#include "backend/device_operations.h"
#include "launch.h"
#include "launch_experts.h"
#include "launch_recurrent.h"
#include "launch_wide.h"

namespace kvasir::cuda {
namespace {

std::size_t float_bytes(TensorType type) { return type == TensorType::f32 ? 4 : 2; }

std::size_t matrix_bytes(TensorType type, uint32_t rows, uint32_t cols) {
  const std::size_t elements = std::size_t{rows} * cols;
  if (!is_quantised(type)) return plane_bytes(elements * float_bytes(type));
  std::size_t bytes = 0;
  (void)planes_at(type, elements / 32, nullptr, &bytes);
  return bytes;
}

int lay_out(DeviceStream* s, const DeviceMatrix& to, const std::byte* from, uint32_t row,
            uint32_t n) {
  if (is_quantised(to.type)) {
    const std::size_t in_row = to.cols / 32, units = n * in_row;
    return launch(s, Name("lay_out_", to.type).text, Grid{blocks_for(units, lay_out_threads)},
                  lay_out_threads, from, units, planes_of(to), row * in_row);
  }
  const std::size_t row_bytes = to.cols * float_bytes(to.type);
  const Current current(s->context);
  if (current.error()) return current.error();
  return driver().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(to.data + row * row_bytes),
                                    reinterpret_cast<CUdeviceptr>(from), n * row_bytes, s->stream);
}

// How a product runs: one input, up to max_alone as if alone, a few, more of quantised weights, or
// more of float weights.
struct Shape {
  const char* kind;
  unsigned rows, inputs, threads;  // of a block
};

// blocks(rows): the blocks of so many rows.
template <class Blocks>
Shape shape_of(const DeviceContext& c, TensorType type, const DeviceActivations& x,
               Blocks&& blocks) {
  const uint32_t n = x.n, row_rows = type == TensorType::f32 ? 1 : row_warps;
  if (n == 1) return {"row_", row_rows, 1, row_warps * 32};
  if (x.alone && is_quantised(type)) return {"rows_", alone_rows, max_alone, few_threads};
  if (x.alone) return {"rows_", row_rows, max_alone, row_warps * 32};
  if (!is_quantised(type)) return {"tile_", tile_rows, tile_inputs, tile_threads};
  if (n <= max_few_inputs) return {"few_", few_rows(c, blocks), max_few_inputs, few_threads};
  // Large blocks do more with what they read, and small ones keep a device busy.
  const bool many = has_many(type) &&
                    10 * blocks(many_rows) * blocks_for(n, many_inputs) >= 9 * c.multiprocessors;
  const unsigned rows = many ? many_rows : some_rows;
  return {many ? "many_" : "some_", rows, many_inputs, many_threads(type, rows)};
}

int multiply_parts(DeviceStream* s, std::span<const DeviceProduct> given,
                   const DeviceActivations& x, bool add);
int multiply_each(DeviceStream* s, std::span<const DeviceProduct> given, const DeviceActivations& x,
                  bool add);

// Multiplies matrices of one type in one launch.
int multiply(DeviceStream* s, std::span<const DeviceProduct> given, const DeviceActivations& x,
             bool add) {
  const TensorType type = given[0].w.type;
  if (x.alone && x.n > max_alone) return CUDA_ERROR_INVALID_VALUE;
  if (x.alone && x.n > 1 && is_quantised(type) && !is_common(type))
    return multiply_each(s, given, x, add);
  if (is_quantised(type) && is_wide(*s->context, given, x)) return multiply_wide(s, given, x, add);
  const bool quantised = is_quantised(type);
  const auto blocks_of_rows = [&](unsigned rows) {
    unsigned sum = 0;
    for (const DeviceProduct& p : given) sum += blocks_for(p.w.rows, rows);
    return sum;
  };
  // Reading a small matrix twice is faster than a few large blocks.
  if (quantised && x.n > max_few_inputs && x.n <= 2 * max_few_inputs &&
      2 * blocks_of_rows(many_rows) < s->context->multiprocessors)
    return multiply_parts(s, given, x, add);
  const Shape shape = shape_of(*s->context, type, x, blocks_of_rows);
  Products products{};
  unsigned blocks = 0;
  for (Product& p : products.list) p.begin = UINT32_MAX;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto& [w, bias, y, halves] = given[i];
    const Planes floats{reinterpret_cast<uint8_t*>(const_cast<std::byte*>(w.data)), nullptr,
                        nullptr, nullptr};
    products.list[i] = {quantised ? planes_of(w) : floats, w.rows, blocks, bias, y, w.scale};
    blocks += blocks_for(w.rows, shape.rows);
  }
  products.add = add;
  const Name name(shape.kind, type);
  Grid grid{blocks, blocks_for(x.n, shape.inputs)};
  if (quantised && x.n > 1 && x.n <= max_few_inputs) {
    const unsigned room = blocks_for(x.n, 8) * 8,
                   sums = x.alone ? 0 : few_sum_bytes(shape.rows, room),
                   step = x.alone ? alone_step_bytes(type) : few_step_bytes(type, shape.rows, room),
                   steps = ring_steps(*s->context, step, sums, blocks);
    grid.shared = sums + steps * step;
    return launch(s, name.text, grid, shape.threads, products, x.cols / 32, x.n, x.q, x.scale,
                  x.sums, shape.rows, steps);
  }
  if (!quantised) return launch(s, name.text, grid, shape.threads, products, x.cols, x.n, x.f32);
  if (x.n > max_few_inputs) grid.shared = 2 * many_tile_bytes(type, shape.rows);
  return launch(s, name.text, grid, shape.threads, products, x.cols / 32, x.n, x.q, x.scale,
                x.sums);
}

// Halves of the inputs, one after the other.
int multiply_parts(DeviceStream* s, std::span<const DeviceProduct> given,
                   const DeviceActivations& x, bool add) {
  DeviceProduct products[max_products];
  for (uint32_t first = 0, n; first < x.n; first += n) {
    n = first ? x.n - first : blocks_for(x.n, 16) * 8;  // never one: its sums have another order
    for (std::size_t i = 0; i < given.size(); ++i)
      products[i] = given[i], products[i].y += std::size_t{first} * given[i].w.rows;
    if (const int error = multiply(s, {products, given.size()}, part_of(x, first, n), add))
      return error;
  }
  return 0;
}

// One input after the other: types that are not common have no kernel for several as if alone.
int multiply_each(DeviceStream* s, std::span<const DeviceProduct> given, const DeviceActivations& x,
                  bool add) {
  DeviceProduct products[max_products];
  for (uint32_t input = 0; input < x.n; ++input) {
    for (std::size_t i = 0; i < given.size(); ++i)
      products[i] = given[i], products[i].y += std::size_t{input} * given[i].w.rows;
    if (const int error = multiply(s, {products, given.size()}, input_of(x, input), add))
      return error;
  }
  return 0;
}

int matmul(DeviceStream* s, std::span<const DeviceProduct> products, const DeviceActivations& x,
           bool add) {
  for (std::size_t i = 0, count; i < products.size(); i += count) {
    for (count = 1; count < max_products && i + count < products.size() &&
                    products[i + count].w.type == products[i].w.type;)
      ++count;
    if (const int error = multiply(s, products.subspan(i, count), x, add)) return error;
  }
  return 0;
}

unsigned blocks_of(std::size_t n) { return blocks_for(n, elementwise_threads * elementwise_each); }

int quantize(DeviceStream* s, const DeviceActivations& x, const DeviceCheck& check) {
  return launch(s, "quantize", Grid{blocks_of(std::size_t{x.n} * x.cols)}, elementwise_threads, x,
                check);
}

unsigned norm_threads_of(const DeviceActivations& out) {
  return std::min(blocks_for(out.cols, 32 * elementwise_each) * 32, unsigned{norm_threads});
}

// Whether there are so many rows that few threads for each occupy the device. No bit changes.
bool has_short_norms(const DeviceStream* s, const DeviceActivations& out) {
  return out.cols <= max_short_norm && out.n >= 4 * s->context->multiprocessors;
}

int rms_norm(DeviceStream* s, const float* x, const float* weight, float epsilon,
             const DeviceCheck& check, const DeviceActivations& out) {
  if (has_short_norms(s, out))
    return launch(s, "short_rms_norm", Grid{out.n}, short_norm_threads, x, weight, epsilon, check,
                  out);
  return launch(s, "rms_norm", Grid{out.n}, norm_threads_of(out), x, weight, epsilon, check, out);
}

int add_rms_norm(DeviceStream* s, const float* x, const float* weight, float epsilon,
                 const DeviceCheck& check, const DeviceActivations& out) {
  if (has_short_norms(s, out))
    return launch(s, "add_short_rms_norm", Grid{out.n}, short_norm_threads, x, weight, epsilon,
                  check, out);
  return launch(s, "add_rms_norm", Grid{out.n}, norm_threads_of(out), x, weight, epsilon, check,
                out);
}

int layer_norm(DeviceStream* s, const float* x, const float* weight, const float* bias,
               float epsilon, const DeviceCheck& check, const DeviceActivations& out) {
  return launch(s, "layer_norm", Grid{out.n}, norm_threads_of(out), x, weight, bias, epsilon, check,
                out);
}

int activate(DeviceStream* s, Activation f, const float* gate, const float* up,
             const DeviceCheck& check, const DeviceActivations& out) {
  return launch(s, "activate", Grid{blocks_of(std::size_t{out.n} * out.cols)}, elementwise_threads,
                f, gate, up, check, out);
}

int multiply_gated(DeviceStream* s, std::span<const DeviceProduct> products, uint32_t room,
                   const DeviceActivations& x, Activation f, const DeviceCheck& check,
                   const DeviceActivations& out) {
  if (is_wide_gated(*s->context, products, x, f, out))
    return multiply_wide_gated(s, products, x, f, check, out);
  return gate_by_parts(s, products, room, x, f, check, out, matmul, activate);
}

int scale(DeviceStream* s, float* x, std::size_t n, float factor) {
  return launch(s, "scale", Grid{blocks_of(n)}, elementwise_threads, x, n, factor);
}

int find_largest(DeviceStream* s, const float* x, uint32_t rows, std::size_t n,
                 DeviceLargest* out) {
  return launch(s, "find_largest", Grid{largest_parts, rows}, norm_threads, x, n, out);
}

int rotate(DeviceStream* s, const DeviceHeads& h, const DeviceCheck& check) {
  const std::size_t rows = std::size_t{h.n} * (h.heads + 2 * h.kv_heads);
  return launch(s, "rotate", Grid{blocks_for(rows, elementwise_threads / 32)}, elementwise_threads,
                h, check);
}

// ---- attention

constexpr unsigned min_score_parts = 32, all_score_parts = scan_blocks * 120,
                   all_share_parts = share_blocks * 128;
// Blocks per head and layer: enough for the bus, with room for concurrent work.
constexpr unsigned group_parts = 4;

int begin_attention(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a, const float* q,
                    const float* k, const float* v) {
  return launch(s, "attention_begin", Grid{kv.kv_heads * a.n * (kv.group + 1)}, begin_threads, kv,
                a, q, k, v);
}

int attend_sinks_and_window(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  return launch(s, AttentionName("near", kv.dim).text, Grid{kv.kv_heads * kv.group, a.n},
                near_threads, kv, a);
}

// Blocks of a KV head that attend sinks and window, a row each, in the launch that scores its
// quads.
unsigned near_rows(const DeviceKv& kv, const DeviceAttention& a) { return a.n == 1 ? kv.group : 0; }

// Blocks that score the quads of a KV head: as many as a large device runs at a time, for all
// heads.
unsigned score_parts(const DeviceKv& kv, const DeviceAttention& a) {
  const unsigned tiles = a.extents * kv.page_tokens / 4;  // 16 pages per extent, 16 quads per tile
  const unsigned all =
      std::min(all_score_parts,
               scan_blocks * 132 - std::min(near_rows(kv, a) * kv.kv_heads, all_score_parts));
  const unsigned max_count =
      std::clamp(all / (kv.kv_heads * a.blocks), min_score_parts, unsigned{max_score_parts});
  return std::min(blocks_for(tiles, scan_threads / 32), max_count);
}

int score_sketch(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  const unsigned near = near_rows(kv, a);
  const int error = near ? 0 : attend_sinks_and_window(s, kv, a);
  return error ? error
               : launch(s, AttentionName("scan", kv.dim).text,
                        Grid{near + score_parts(kv, a), kv.kv_heads * a.blocks}, scan_threads, kv,
                        a, near);
}

int choose(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  const std::size_t quads = std::size_t{a.extents} * kv.page_tokens * 4;
  const unsigned lists = kv.kv_heads * a.blocks, parts = blocks_for(quads, choose_quads);
  const unsigned share_parts =
      std::min(blocks_for(quads, share_quads), std::max(all_share_parts / lists, 16u));
  const int error = launch(s, "attention_shares", Grid{share_parts, lists}, share_threads, kv, a,
                           score_parts(kv, a));
  return error ? error : launch(s, "attention_choose", Grid{parts, lists}, choose_threads, kv, a);
}

int gather_chosen(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  return launch(s, "attention_gather",
                Grid{blocks_for(a.max_quads, gather_threads / 32), kv.kv_heads * a.blocks},
                gather_threads, kv, a);
}

int gather_group(DeviceStream* s, const DeviceKv& kv, const DeviceGroup& g) {
  return launch(s, "attention_gather_group",
                Grid{std::min(blocks_for(g.max_quads, gather_threads / 32), group_parts),
                     kv.kv_heads, g.layers},
                gather_threads, kv, g);
}

// near_rows: of a KV head; 0: the lists' quads and no others.
int attend_quads(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a,
                 uint32_t near_rows) {
  const unsigned chunks = blocks_for(kv.group, attended_rows);
  return launch(s, AttentionName("chosen", kv.dim).text,
                Grid{near_rows + chosen_parts, kv.kv_heads * chunks, a.n}, attend_threads, kv, a,
                near_rows);
}

int attend_chosen(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  return attend_quads(s, kv, a, 0);
}

int attend_all(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  return attend_quads(s, kv, a, kv.group);
}

int finish_attention(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a,
                     const DeviceActivations& out, const DeviceCheck& check, float* lse,
                     float* mass) {
  DeviceActivations checked = out;
  if (kv.head_dim % 32 != 0) checked.q = nullptr;  // blocks of 32 inputs would span heads
  const int error = launch(s, "attention_finish", Grid{kv.kv_heads * kv.group, a.n}, kv.dim, kv, a,
                           checked, check, lse, mass);
  return error || checked.q == out.q ? error : quantize(s, out, check);
}

// ---- reading

int prepare_prefill(DeviceStream* s, const DevicePrefill& r, const float* q, const float* k,
                    const float* v) {
  constexpr unsigned largest_threads = 1024, largest_tokens = 256, most_parts = 32;
  int error = launch(s, "prefill_queries",
                     Grid{blocks_for(r.q_room, prefill_layout_threads / 32), r.kv_heads},
                     prefill_layout_threads, r, q);
  const unsigned tokens = r.pages * r.page_tokens + r.window + r.n,
                 rows = blocks_for(tokens, prefill_keys) * prefill_keys,
                 parts = std::min(blocks_for(tokens, largest_tokens), most_parts);
  if (!error)
    error = launch(s, "prefill_largest", Grid{r.kv_heads, 2, parts}, largest_threads, r, k, v);
  if (error) return error;
  return launch(s, LayOutName(r.dim).text, Grid{rows / tile_scale_keys, r.kv_heads},
                prefill_layout_threads, r, k, v);
}

int choose_prefill(DeviceStream* s, const DevicePrefill& r) {
  constexpr unsigned min_tiles = 32, most_parts = 16, rounds = 4;
  const bool wide = s->context->kernels.contains(TilesName(true, r.dim).text);
  const unsigned blocks = blocks_for(r.n * r.group, prefill_rows),
                 columns = blocks_for(blocks * choosing_rows(r.group),
                                      prefill_summed_rows * (wide ? choosing_groups(r.dim) : 1)),
                 tiles = blocks_for(r.pages * r.page_tokens + r.window + r.n, prefill_keys);
  for (uint32_t first = 0; first < r.kv_heads; first += r.tiles.heads) {
    const unsigned heads = std::min(r.tiles.heads, r.kv_heads - first),
                   resident = (wide ? 1 : 3) * s->context->multiprocessors,
                   wanted = blocks_for(rounds * resident, columns * heads),
                   parts = std::clamp(wanted, 1u, std::min(most_parts, tiles / min_tiles + 1));
    int error =
        launch(s, TilesName(wide, r.dim).text,
               Grid{columns, heads, parts,
                    wide ? prefill_wide_choosing_bytes(r.dim) : prefill_choosing_bytes(r.dim)},
               wide ? wide_choosing_threads(r.dim) : prefill_threads, r, first);
    if (!error)
      error = launch(s, "prefill_choose_tiles",
                     Grid{blocks, heads, 1, r.tiles.near * unsigned{sizeof(float)}},
                     prefill_choose_threads, r, first);
    if (error) return error;
  }
  return 0;
}

// Blocks of a step's attention. wide: by the kernels of compute capability 9.0.
struct PrefillBlocks {
  bool wide;
  unsigned rows, threads, shared, resident;  // resident: of a multiprocessor at once
  PrefillBlocks(const DeviceContext& c, const DevicePrefill& r)
      : wide(c.kernels.contains(PrefillName(true, r.seen > 0, r.dim).text)),
        rows(wide ? prefill_rows : prefill_block_rows(r.dim)),
        threads(wide ? prefill_wide_threads : prefill_threads),
        shared(wide ? prefill_wide_shared_bytes(r.dim) : prefill_shared_bytes(r.dim)),
        resident(wide ? 1 : prefill_resident(r.dim)) {}
};

// Parts that the keys of a block's rows are divided into: as many as take the device the least
// time, in rounds of all blocks that it computes at once. A part has some thousand keys, so that
// what it leaves takes little time to merge.
unsigned prefill_parts(const DeviceContext& c, const DevicePrefill& r, const PrefillBlocks& of,
                       unsigned blocks) {
  constexpr unsigned min_keys = 2048, most = 16;
  const unsigned resident = of.resident * c.multiprocessors,
                 text = r.pages * r.page_tokens + r.window,
                 left_out = r.tiles.near - std::min(r.tiles.near, r.tiles.chosen),
                 keys = text - left_out * prefill_keys;
  // Of a part, against the time of an undivided step: about that of so many keys.
  const double each = 256.0 / keys;
  const auto rounds = [&](unsigned parts) {
    return blocks_for(std::size_t{blocks} * parts, resident) / double(parts) + each * parts;
  };
  const std::size_t rows =
      std::size_t{r.kv_heads} * blocks_for(r.n * r.group, prefill_rows) * prefill_rows;
  unsigned best = 1;
  if (r.seen > 0) return best;
  for (unsigned parts = 2; parts <= most; ++parts)
    if (keys >= parts * min_keys && rows * parts <= r.part_room && rounds(parts) < rounds(best))
      best = parts;
  return best;
}

int attend_prefill(DeviceStream* s, const DevicePrefill& r, float* out, float* lse) {
  const PrefillBlocks of(*s->context, r);
  const unsigned rows = r.n * r.group, blocks = blocks_for(rows, of.rows),
                 parts = prefill_parts(*s->context, r, of, blocks * r.kv_heads);
  const int error = launch(s, PrefillName(of.wide, r.seen > 0, r.dim).text,
                           Grid{blocks, r.kv_heads, parts, of.shared}, of.threads, r, out, lse);
  if (error || parts == 1) return error;
  return launch(s, "prefill_merge", Grid{blocks_for(rows, prefill_layout_threads / 32), r.kv_heads},
                prefill_layout_threads, r, uint32_t{parts}, out, lse);
}

// ---- windows

int attend_window(DeviceStream* s, const DeviceWindow& w, const float* q, const float* k,
                  const float* v, float* out) {
  const uint32_t dim = *std::find_if(std::begin(window_dims), std::end(window_dims) - 1,
                                     [&](uint32_t each) { return w.head_dim <= each; });
  const unsigned group = w.heads / w.kv_heads, parts = window_parts(w.n);
  const Grid grid{blocks_for(std::size_t{w.n} * group, window_rows), w.kv_heads, parts};
  const int error = launch(s, WindowName(dim).text, grid, window_threads, w, q, k, v);
  return error ? error
               : launch(s, "window_finish", Grid{w.n * w.heads}, window_finish_threads, w, out,
                        parts);
}

int keep_window(DeviceStream* s, const DeviceWindow& w, const float* k, const float* v) {
  const uint32_t kept = std::min(w.n, w.room);
  return launch(s, "window_keep", Grid{kept, w.kv_heads}, window_finish_threads, w, k, v, kept);
}

// ---- nearest keys

// Blocks over parts of the items: twice what a large device runs at a time.
constexpr unsigned nearest_blocks = 528;

int find_nearest(DeviceStream* s, const DeviceNearest& n) {
  const unsigned row_blocks = blocks_for(n.rows, nearest_rows),
                 tiles = blocks_for(n.items, nearest_items);
  const unsigned parts = std::min(tiles, std::max(1u, nearest_blocks / std::max(1u, row_blocks)));
  const int error = launch(s, NearestName(n.dim).text, Grid{row_blocks, parts}, nearest_threads, n);
  return error || n.items == 0
             ? error
             : launch(s, "nearest_choose", Grid{n.rows}, nearest_choose_threads, n);
}

}  // namespace

void fill_operations(DeviceKernels* k) {
#define KVASIR_FILL(name) k->name = name;
  KVASIR_DEVICE_PRODUCTS(KVASIR_FILL)
  KVASIR_DEVICE_RECURRENT(KVASIR_FILL)
  KVASIR_DEVICE_EXPERTS(KVASIR_FILL)
  KVASIR_DEVICE_ATTENTION(KVASIR_FILL)
#undef KVASIR_FILL
}

}  // namespace kvasir::cuda
