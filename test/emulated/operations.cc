// The operations, with the CPU's kernels and plain loops. Arrays that one operation writes and only
// one other reads have a layout of their own.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "alignment.h"
#include "backend/device_gated.h"
#include "backend/device_operations.h"
#include "backend/kernels.h"
#include "base/checked.h"
#include "emulated.h"
#include "select/sampling.h"
#include "state.h"
#include "work.h"

namespace kvasir::emulated {
namespace {

// ---- weights, products and elementwise operations
// --------------------------------------------------------------------------------

std::size_t row_bytes(TensorType type, uint32_t cols) {
  const TensorTypeInfo& info = *tensor_type_info(type);
  return std::size_t{cols} / info.block_elements * info.block_bytes;
}

std::size_t matrix_bytes(TensorType type, uint32_t rows, uint32_t cols) {
  return rows * row_bytes(type, cols);
}

// What stays of a matrix is a copy of it, which products of several inputs read.
std::size_t halves_bytes(DeviceContext*, uint32_t, uint32_t) {
  return machine().has_halves ? 1 : 0;
}

std::size_t kept_bytes(DeviceContext*, const DeviceMatrix& w) {
  return machine().has_halves ? matrix_bytes(w.type, w.rows, w.cols) : 0;
}

// A product, and where its matrix is copied to, or null.
using Given = std::pair<DeviceProduct, std::byte*>;
Given given_of(DeviceProduct p) {
  DeviceHalves* const halves = std::exchange(p.halves, nullptr);
  if (!halves) return {p, nullptr};
  if (!std::exchange(halves->is_made, true)) return {p, halves->memory};
  ++machine().kept_reads;
  return p.w.data = halves->memory, Given(p, nullptr);
}

int lay_out(DeviceStream* s, const DeviceMatrix& to, const std::byte* from, uint32_t row,
            uint32_t n) {
  return enqueue(s, [=] {
    const std::size_t size = row_bytes(to.type, to.cols);
    return std::memcpy(const_cast<std::byte*>(to.data) + row * size, from, n * size), 0;
  });
}

void note(const float* x, std::size_t n, const DeviceCheck& check) {
  if (!std::all_of(x, x + n, [&](float v) { return std::fabs(v) < check.limit; }))
    *check.first = std::min(*check.first, check.mark);
}

void put(const float* x, const DeviceActivations& out) {
  if (out.f32) std::copy_n(x, std::size_t{out.n} * out.cols, out.f32);
  if (out.q) cpu().quantize(x, out.n, out.cols, out.q, out.scale, out.sums);
}

}  // namespace

int quantize(DeviceStream* s, const DeviceActivations& x, const DeviceCheck& check) {
  if (const int error = check_rounded(x, "quantize")) return error;
  return enqueue(s, [=] {
    note(x.f32, std::size_t{x.n} * x.cols, check);
    if (x.q) cpu().quantize(x.f32, x.n, x.cols, x.q, x.scale, x.sums);
    return 0;
  });
}

namespace {

int matmul(DeviceStream* s, std::span<const DeviceProduct> products, const DeviceActivations& x,
           bool add) {
  if (const int error = check_matmul(products, x)) return error;
  std::vector<Given> given;
  std::transform(products.begin(), products.end(), std::back_inserter(given), given_of);
  return enqueue(s, [=] {
    for (const auto& [p, copy] : given) {
      const auto& [w, bias, y, halves] = p;
      if (copy) std::memcpy(copy, w.data, matrix_bytes(w.type, w.rows, w.cols));
      Aligned<std::byte> scratch(cpu().matmul_scratch(w.type, ProductMethod::many));
      Aligned<float> made(std::size_t{x.n} * w.rows);
      const Activations in{x.n, x.cols, x.f32, x.q, x.scale, x.sums};
      cpu().matmul({w.data, w.type, w.rows, w.cols, row_bytes(w.type, w.cols), w.scale}, in,
                   made.get(), w.rows, 0, w.rows, scratch.get());
      if (x.n > 1 && !x.alone && machine().several_differ)
        for (std::size_t i = 0; i < std::size_t{x.n} * w.rows; ++i) made[i] *= 1 + 1e-5f;
      for (std::size_t i = 0; i < std::size_t{x.n} * w.rows; ++i)
        y[i] = (add ? y[i] : 0.0f) + (made[i] + (bias ? bias[i % w.rows] : 0.0f));
    }
    return 0;
  });
}

int rms_norm(DeviceStream* s, const float* x, const float* weight, float epsilon,
             const DeviceCheck& check, const DeviceActivations& out) {
  if (const int error = check_rounded(out, "rms_norm")) return error;
  return enqueue(s, [=] {
    Aligned<float> y(std::size_t{out.n} * out.cols);
    note(x, std::size_t{out.n} * out.cols, check);
    cpu().rms_norm(x, weight, epsilon, out.n, out.cols, y.get());
    return put(y.get(), out), 0;
  });
}

int add_rms_norm(DeviceStream* s, const float* x, const float* weight, float epsilon,
                 const DeviceCheck& check, const DeviceActivations& out) {
  return enqueue(s, [=] {
    const std::size_t size = std::size_t{out.n} * out.cols;
    Aligned<float> y(size);
    note(x, size, check);
    cpu().rms_norm(x, weight, epsilon, out.n, out.cols, y.get());
    return cpu().add(out.f32, y.get(), size), 0;
  });
}

int layer_norm(DeviceStream* s, const float* x, const float* weight, const float* bias,
               float epsilon, const DeviceCheck& check, const DeviceActivations& out) {
  if (const int error = check_rounded(out, "layer_norm")) return error;
  return enqueue(s, [=] {
    Aligned<float> y(std::size_t{out.n} * out.cols);
    note(x, std::size_t{out.n} * out.cols, check);
    cpu().layer_norm(x, weight, bias, epsilon, out.n, out.cols, y.get());
    return put(y.get(), out), 0;
  });
}

int activate(DeviceStream* s, Activation f, const float* gate, const float* up,
             const DeviceCheck& check, const DeviceActivations& out) {
  if (const int error = check_rounded(out, "activate")) return error;
  return enqueue(s, [=] {
    const std::size_t size = std::size_t{out.n} * out.cols;
    Aligned<float> y(size);
    std::copy_n(gate, size, y.get());
    cpu().activate(f, y.get(), up, size);
    note(y.get(), size, check);
    return put(y.get(), out), 0;
  });
}

int multiply_gated(DeviceStream* s, std::span<const DeviceProduct> products, uint32_t room,
                   const DeviceActivations& x, Activation f, const DeviceCheck& check,
                   const DeviceActivations& out) {
  return gate_by_parts(s, products, room, x, f, check, out, matmul, activate);
}

int scale(DeviceStream* s, float* x, std::size_t n, float factor) {
  return enqueue(s, [=] {
    for (std::size_t i = 0; i < n; ++i) x[i] *= factor;
    return 0;
  });
}

int find_largest(DeviceStream* s, const float* x, uint32_t rows, std::size_t n,
                 DeviceLargest* out) {
  return enqueue(s, [=] {
    for (uint32_t i = 0; i < rows; ++i) {
      for (uint32_t part = 0; part < largest_parts; ++part) {
        const float* const row = x + i * n;
        const float *begin = row + n * part / largest_parts,
                    *end = row + n * (part + 1) / largest_parts,
                    *largest = std::max_element(begin, end);
        const bool finite = std::all_of(begin, end, [](float v) { return std::isfinite(v); });
        out[i * largest_parts + part] = {
            begin == end ? -INFINITY : *largest,
            finite ? static_cast<uint32_t>(largest - row) : no_largest};
      }
    }
    return 0;
  });
}

// The norm of each head of a token.
void normalise_heads(const DeviceHeads& h, float* x, uint32_t heads, const float* weight) {
  for (uint32_t i = 0; i < heads && h.norm != DeviceHeadNorm::none; ++i, x += h.head_dim) {
    const float* own = weight ? weight + std::size_t{i} * h.norm_stride : nullptr;
    if (h.norm == DeviceHeadNorm::rms) cpu().rms_norm(x, own, h.epsilon, 1, h.head_dim, x);
    else cpu().layer_norm(x, own, nullptr, h.epsilon, 1, h.head_dim, x);
  }
}

int rotate(DeviceStream* s, const DeviceHeads& h, const DeviceCheck& check) {
  return enqueue(s, [=] {
    float* x = h.qkv;
    for (const auto& [heads, norm] :
         {std::pair(h.heads, h.q_norm), std::pair(h.kv_heads, h.k_norm)}) {
      const std::size_t half = h.rotary_dim / 2, row = std::size_t{heads} * h.head_dim;
      for (std::size_t i = 0; i < h.n; ++i, x += row) {
        if (!h.norm_after_rope) normalise_heads(h, x, heads, norm);
        if (half > 0)
          cpu().rope(x, heads, h.head_dim, h.rotary_dim, h.cos + i * half, h.sin + i * half,
                     h.neox);
        if (h.norm_after_rope) normalise_heads(h, x, heads, norm);
      }
    }
    if (h.norm_v) cpu().rms_norm(x, nullptr, h.epsilon, h.n * h.kv_heads, h.head_dim, x);
    const std::size_t q_width = std::size_t{h.heads} * h.head_dim;
    for (std::size_t i = 0; i < h.n * q_width; ++i)
      h.qkv[i] *= h.q_factor * (h.q_factors ? h.q_factors[i / q_width] : 1.0f);
    return note(h.qkv, std::size_t{h.n} * (h.heads + 2 * h.kv_heads) * h.head_dim, check), 0;
  });
}

// ---- attention of a text that is read
// -----------------------------------------------------------------------------------------------

// Sixteen bits a number, in units of the largest of its kind.
constexpr float steps = 32767;

void to_fixed(const float* x, std::size_t n, float largest, uint16_t* out) {
  const float by = largest > 0 ? steps / largest : 0;
  for (std::size_t i = 0; i < n; ++i)
    out[i] = static_cast<uint16_t>(static_cast<int16_t>(std::nearbyintf(x[i] * by)));
}

void from_fixed(const uint16_t* x, std::size_t n, float largest, float* out) {
  for (std::size_t i = 0; i < n; ++i)
    out[i] = static_cast<float>(static_cast<int16_t>(x[i])) * (largest / steps);
}

float largest_of(const float* x, std::size_t n) {
  float largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

// As bytes times the returned scale, which is a 127th of `largest`.
float to_bytes(const float* x, std::size_t n, float largest, int8_t* out) {
  for (std::size_t i = 0; i < n; ++i)
    out[i] = static_cast<int8_t>(largest > 0 ? std::nearbyint(x[i] * (127 / largest)) : 0);
  return largest / 127;
}

// What the choice of tiles reads of a head's keys, and of a row of queries. largest: of each key.
void put_tile_keys(const DevicePrefill& r, uint32_t head, const float* keys,
                   const std::vector<float>& largest) {
  const uint32_t row = tile_row_bytes(r.dim);
  float* scales = r.tiles.key_scales + head * (r.room / tile_scale_keys);
  for (std::size_t first = 0; first < largest.size(); first += tile_scale_keys) {
    const std::size_t end = std::min(first + tile_scale_keys, largest.size());
    const float most = largest_of(&largest[first], end - first);
    for (std::size_t t = first; t < end; ++t)
      scales[first / tile_scale_keys] =
          to_bytes(keys + t * r.dim, r.dim, most, r.tiles.keys + (head * r.room + t) * row);
  }
}
void put_tile_query(const DevicePrefill& r, std::size_t at, const float* q) {
  to_bytes(q, r.dim, r.q_scale[at], r.tiles.q + at * tile_row_bytes(r.dim));
}

int prepare_prefill(DeviceStream* s, const DevicePrefill& r, const float* q, const float* k,
                    const float* v) {
  if (const int error = check_prepare_reading(r, q)) return error;
  return enqueue(s, [=, context = s->context] {
    const PageShape shape = PageShape::of(r.head_dim);
    const std::size_t dim = r.dim, page = std::size_t{r.page_tokens} * dim, sealed = r.pages * page,
                      all = sealed + (r.window + r.n) * dim;
    Aligned<float> keys(all), values(all), row(dim);
    std::vector<float> key_largest(all / dim);
    for (uint32_t h = 0; h < r.kv_heads; ++h) {
      for (uint32_t p = 0; p < r.pages; ++p) {
        const float* sinks = r.sinks + h * 2 * page;
        if (p == 0) {
          std::copy_n(sinks, page, keys.get()), std::copy_n(sinks + page, page, values.get());
          continue;
        }
        const std::size_t in_extent = std::size_t{h} * extent_pages + p % extent_pages,
                          scale_bytes = std::size_t{4} * r.page_tokens;
        const uint64_t data_at =
            r.pages_at[p / extent_pages] + r.pages_offset + in_extent * page_bytes;
        if (const int error = check_seen_pages(data_at)) return error;
        const std::byte* data = followed(context, data_at, page_bytes);
        const std::byte* scales = followed(
            context, r.scales_at[p / extent_pages] + r.scales_offset + in_extent * scale_bytes,
            scale_bytes);
        if (!data || !scales) return refused;
        const auto* its_data = reinterpret_cast<const int8_t*>(data);
        const auto* its_scales = reinterpret_cast<const uint16_t*>(scales);
        cpu().unseal_page(shape, its_data, its_scales, keys.get() + p * page,
                          values.get() + p * page);
        for (uint32_t t = 0; t < r.page_tokens; ++t)
          key_largest[p * r.page_tokens + t] =
              127 * std::bit_cast<float>(uint32_t{its_scales[t]} << 16);
      }
      const std::size_t stride = r.seen ? r.head_dim : dim;  // of a ring, or of rows in order
      const float* window = r.window_rows + std::size_t{h} * 2 * r.window_room * stride;
      for (uint32_t t = 0; t < r.window; ++t) {
        const std::size_t row = r.seen ? (r.ring_first + t) % r.window_room : t;
        std::copy_n(window + row * stride, stride, keys.get() + sealed + t * dim);
        std::copy_n(window + (r.window_room + row) * stride, stride,
                    values.get() + sealed + t * dim);
      }
      for (uint32_t t = 0; t < r.n; ++t) {
        const std::size_t to = sealed + (r.window + t) * dim,
                          from = (std::size_t{t} * r.kv_heads + h) * r.head_dim;
        for (uint32_t d = 0; d < r.head_dim; ++d) {
          keys[to + d] = k[from + d] - (r.centre ? r.centre[h * dim + d] : 0);
          values[to + d] = v[from + d];
        }
      }
      for (std::size_t t = 0; t < key_largest.size(); ++t)
        if (t < r.page_tokens || t >= r.pages * r.page_tokens)
          key_largest[t] = largest_of(keys.get() + t * dim, dim);
      if (r.tiles.keys) put_tile_keys(r, h, keys.get(), key_largest);
      float* largest = r.largest + 2 * h;
      largest[0] = largest_of(keys.get(), all), largest[1] = largest_of(values.get(), all);
      to_fixed(keys.get(), all, largest[0], r.keys + std::size_t{h} * r.room * dim);
      to_fixed(values.get(), all, largest[1], r.values + std::size_t{h} * r.room * dim);
      for (uint32_t i = 0; i < r.n * r.group; ++i) {
        const std::size_t from = ((std::size_t{i / r.group} * r.kv_heads + h) * r.group +
                                  i % r.group) *
                                 r.head_dim,
                          at = std::size_t{h} * r.q_room + i;
        std::copy_n(q + from, r.head_dim, row.get());
        r.q_scale[at] = largest_of(row.get(), dim);
        if (r.sink_scores) {  // keys are centred
          const float* c = r.centre + h * dim;
          const float shift =
              r.centre ? std::inner_product(row.get(), row.get() + dim, c, 0.0f) : 0.0f;
          r.sink_scores[at] = r.sink_logits[h * r.group + i % r.group] -
                              shift / std::sqrt(static_cast<float>(r.head_dim));
        }
        to_fixed(row.get(), dim, r.q_scale[at], r.q + at * dim);
        if (r.tiles.q) put_tile_query(r, at, row.get());
      }
    }
    return 0;
  });
}

// The first key, of those laid out, that a token of the step sees.
uint32_t first_key(const DevicePrefill& r, uint32_t token) {
  if (!r.seen) return 0;
  const DeviceWindow window{.window = r.seen, .chunked = r.chunked};
  const uint64_t own = r.position + token, first = first_seen_of(window, own);
  return r.window + token - static_cast<uint32_t>(own - first);
}

uint32_t blocks_of(const DevicePrefill& r) {
  return static_cast<uint32_t>(ceil_div(r.n * r.group, prefill_rows));
}

int choose_prefill(DeviceStream* s, const DevicePrefill& r) {
  return enqueue(s, [=] {
    const DevicePrefillTiles& tiles = r.tiles;
    const std::size_t dim = r.dim, row_bytes = tile_row_bytes(r.dim);
    const uint32_t before = r.pages * r.page_tokens + r.window, all = before + r.n,
                   n = tiles.near > 1 ? tiles.near - 1 : 0;
    Aligned<float> scores(all), shares(std::max(n, 1u));
    std::vector<uint32_t> chosen(std::max(n, 1u));
    for (uint32_t h = 0; h < r.kv_heads; ++h) {
      const int8_t* keys = r.tiles.keys + std::size_t{h} * r.room * row_bytes;
      const float* scales = r.tiles.key_scales + h * (r.room / tile_scale_keys);
      for (uint32_t block = 0; block < blocks_of(r); ++block) {
        std::fill_n(shares.get(), n, 0.0f);
        for (uint32_t i = 0; i < choosing_rows(r.group); ++i) {
          const uint32_t row = choosing_row(block * choosing_rows(r.group) + i, r.group),
                         seen = before + row / r.group + 1;
          if (row / r.group >= r.n) continue;
          const std::size_t at = std::size_t{h} * r.q_room + row;
          const int8_t* q = r.tiles.q + at * row_bytes;
          const float factor = r.q_scale[at] / 127 / std::sqrt(static_cast<float>(r.head_dim));
          for (uint32_t t = 0; t < seen; ++t)
            scores[t] = static_cast<float>(
                            std::inner_product(q, q + dim, keys + std::size_t{t} * row_bytes, 0)) *
                        (factor * scales[t / tile_scale_keys]);
          const auto tile_count = static_cast<uint32_t>(ceil_div(seen, prefill_keys));
          std::vector<float> best(std::size_t{tile_count} * prefill_tile_groups, -INFINITY);
          for (uint32_t t = 0; t < seen; ++t) {
            float& x =
                best[t / prefill_keys * prefill_tile_groups + tile_group_of(t % prefill_keys)];
            x = std::max(x, scores[t]);
          }
          const float largest = *std::max_element(best.begin(), best.end());
          double sum = 0;
          for (const float x : best) sum += std::exp(double{x} - largest);
          for (uint32_t t = prefill_tile_groups; t < tiles.near * prefill_tile_groups; ++t)
            shares[t / prefill_tile_groups - 1] +=
                static_cast<float>(std::exp(double{best[t]} - largest) / sum);
        }
        const float least =
            0.1f * std::accumulate(shares.get(), shares.get() + n, 0.0f) / static_cast<float>(n);
        for (uint32_t i = 0; i < n; ++i) shares[i] = std::max(shares[i], least);
        const uint32_t count = block < tiles.exact ? n : tiles.chosen;
        const float threshold = sample_threshold(cpu(), shares.get(), n, {count, count, 0});
        const uint32_t found =
            cpu().sample(shares.get(), n, 1, tiles.seed_of(h, block), threshold, chosen.data());
        const std::size_t at = std::size_t{h} * blocks_of(r) + block;
        uint32_t* list = tiles.lists + at * tiles.room;
        float* biases = tiles.biases + at * tiles.room;
        list[0] = 0, biases[0] = 0;
        for (uint32_t i = 0; i < found; ++i) {
          const float share = shares[chosen[i]];
          list[i + 1] = chosen[i] + 1;
          biases[i + 1] = share < threshold ? std::log2(threshold / share) : 0;
        }
        tiles.counts[at] = tiles.near > 0 ? found + 1 : 0;
      }
    }
    return 0;
  });
}

// Rows of one block attend the tiles that it chose. Returns the first key of those that follow.
uint32_t attend_tiles(const DevicePrefill& r, uint32_t head, uint32_t block, const QueryRows& query,
                      const float* keys, const float* values, State* state) {
  const std::size_t at = std::size_t{head} * blocks_of(r) + block, size = prefill_keys * r.dim;
  uint32_t limits[32];
  std::fill_n(limits, query.rows, prefill_keys);
  for (uint32_t i = 0; i < r.tiles.counts[at]; ++i) {
    const std::size_t tile = r.tiles.lists[at * r.tiles.room + i];
    State part(query.rows, r.dim);
    cpu().attend_rows(query, keys + tile * size, values + tile * size, prefill_keys, limits,
                      part.view(), part.scratch.get());
    for (uint32_t row = 0; row < query.rows; ++row)
      part.m[row] += r.tiles.biases[at * r.tiles.room + i] * 0.693147181f;
    cpu().merge(state->view(), part.view(), query.rows, r.dim);
  }
  return r.tiles.near * prefill_keys;
}

int attend_prefill(DeviceStream* s, const DevicePrefill& r, float* out, float* lse) {
  if (const int error = check_attend_reading(r)) return error;
  return enqueue(s, [=] {
    const uint32_t together = r.seen ? 1 : 32;  // rows that see the same first key
    const std::size_t dim = r.dim;
    const uint32_t before = r.pages * r.page_tokens + r.window, all = before + r.n;
    Aligned<float> keys(all * dim), values(all * dim), q(together * dim);
    for (uint32_t h = 0; h < r.kv_heads; ++h) {
      from_fixed(r.keys + std::size_t{h} * r.room * dim, all * dim, r.largest[2 * h], keys.get());
      from_fixed(r.values + std::size_t{h} * r.room * dim, all * dim, r.largest[2 * h + 1],
                 values.get());
      for (uint32_t begin = 0; begin < r.n * r.group; begin += together) {
        const uint32_t rows = std::min(together, r.n * r.group - begin);
        uint32_t first = first_key(r, begin / r.group), limits[32];
        for (uint32_t i = 0; i < rows; ++i) {
          const std::size_t at = std::size_t{h} * r.q_room + begin + i;
          from_fixed(r.q + at * dim, dim, r.q_scale[at] / std::sqrt(static_cast<float>(r.head_dim)),
                     q.get() + i * dim);
        }
        State state(rows, r.dim);
        for (uint32_t i = 0; r.sink_scores && i < rows; ++i)
          state.m[i] = r.sink_scores[std::size_t{h} * r.q_room + begin + i], state.l[i] = 1;
        const QueryRows query{rows, r.dim, q.get(), nullptr, nullptr, nullptr};
        if (r.tiles.room > 0)
          first = attend_tiles(r, h, begin / prefill_rows, query, keys.get(), values.get(), &state);
        for (uint32_t i = 0; i < rows; ++i) limits[i] = before + (begin + i) / r.group + 1 - first;
        cpu().attend_rows(query, keys.get() + first * dim, values.get() + first * dim,
                          limits[rows - 1], limits, state.view(), state.scratch.get());
        for (uint32_t i = 0; i < rows; ++i) {
          const std::size_t to = (std::size_t{(begin + i) / r.group} * r.kv_heads + h) * r.group +
                                 (begin + i) % r.group;
          cpu().finish({state.o.get() + i * dim, state.m.get() + i, state.l.get() + i}, 1, r.dim,
                       r.head_dim, out + to * r.head_dim, r.head_dim);
          lse[to] = state.m[i] + std::log(state.l[i]);
        }
      }
    }
    return 0;
  });
}

}  // namespace

void fill_operations(DeviceKernels* k) {
#define KVASIR_FILL(name) k->name = name;
  KVASIR_DEVICE_PRODUCTS(KVASIR_FILL)
#undef KVASIR_FILL
  fill_attention(k);
  fill_experts(k);
  fill_recurrent(k);
}

}  // namespace kvasir::emulated
