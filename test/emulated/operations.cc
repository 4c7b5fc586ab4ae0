// The operations, by the processor's own kernels and plain loops. Arrays that only one operation writes and another reads are as these two like them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "alignment.h"
#include "compute/kernels.h"
#include "emulated.h"
#include "select/sampling.h"
#include "state.h"

namespace kvasir::emulated {
namespace {

template <class T>
class Aligned {
 public:
  explicit Aligned(std::size_t n) : data_(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 64) / 64 * 64))) { std::fill_n(data_, n, T{}); }
  ~Aligned() { std::free(data_); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  T* get() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }

 private:
  T* const data_;
};

const Kernels& cpu() { return cpu_kernels(); }

// Partial attention of some rows, empty at first.
struct State {
  State(uint32_t n, uint32_t of_dim) : rows(n), dim(of_dim), o(std::size_t{n} * of_dim), m(n), l(n), scratch(cpu().attend_scratch(n, of_dim)) {
    std::fill_n(m.get(), n, -HUGE_VALF);
  }
  AttentionState view() { return {o.get(), m.get(), l.get()}; }
  const uint32_t rows, dim;
  Aligned<float> o, m, l;
  Aligned<std::byte> scratch;
};

// ---- weights, products and elementwise operations --------------------------------------------------------------------------------

std::size_t row_bytes(TensorType type, uint32_t cols) {
  const TensorTypeInfo& info = *tensor_type_info(type);
  return std::size_t{cols} / info.block_elements * info.block_bytes;
}

std::size_t matrix_bytes(TensorType type, uint32_t rows, uint32_t cols) { return rows * row_bytes(type, cols); }

int lay_out(DeviceStream* s, const DeviceMatrix& to, const std::byte* from, uint32_t row, uint32_t n) {
  return give(s, [=] {
    const std::size_t size = row_bytes(to.type, to.cols);
    return std::memcpy(const_cast<std::byte*>(to.data) + row * size, from, n * size), 0;
  });
}

void note(const float* x, std::size_t n, const DeviceCheck& check) {
  if (!std::all_of(x, x + n, [&](float v) { return std::fabs(v) < check.limit; })) *check.first = std::min(*check.first, check.mark);
}

void put(const float* x, const DeviceActivations& out) {
  if (out.f32) std::copy_n(x, std::size_t{out.n} * out.cols, out.f32);
  if (out.q) cpu().quantize(x, out.n, out.cols, out.q, out.scale, out.sums);
}

int quantize(DeviceStream* s, const DeviceActivations& x, const DeviceCheck& check) {
  if (const int error = check_rounded(x, "quantize")) return error;
  return give(s, [=] {
    note(x.f32, std::size_t{x.n} * x.cols, check);
    if (x.q) cpu().quantize(x.f32, x.n, x.cols, x.q, x.scale, x.sums);
    return 0;
  });
}

int matmul(DeviceStream* s, std::span<const DeviceProduct> products, const DeviceActivations& x, bool add) {
  if (const int error = check_matmul(products, x)) return error;
  return give(s, [=, given = std::vector<DeviceProduct>(products.begin(), products.end())] {
    for (const auto& [w, bias, y] : given) {
      Aligned<std::byte> scratch(cpu().matmul_scratch(w.type, w.cols));
      Aligned<float> made(std::size_t{x.n} * w.rows);
      const Activations in{x.n, x.cols, x.f32, x.q, x.scale, x.sums};
      cpu().matmul({w.data, w.type, w.rows, w.cols, row_bytes(w.type, w.cols)}, in, made.get(), w.rows, 0, w.rows, scratch.get());
      for (std::size_t i = 0; i < std::size_t{x.n} * w.rows; ++i) y[i] = (add ? y[i] : 0.0f) + (made[i] + (bias ? bias[i % w.rows] : 0.0f));
    }
    return 0;
  });
}

int rms_norm(DeviceStream* s, const float* x, const float* weight, float epsilon, const DeviceCheck& check, const DeviceActivations& out) {
  if (const int error = check_rounded(out, "rms_norm")) return error;
  return give(s, [=] {
    Aligned<float> y(std::size_t{out.n} * out.cols);
    note(x, std::size_t{out.n} * out.cols, check);
    cpu().rms_norm(x, weight, epsilon, out.n, out.cols, y.get());
    return put(y.get(), out), 0;
  });
}

int swiglu(DeviceStream* s, const float* gate, const float* up, const DeviceCheck& check, const DeviceActivations& out) {
  if (const int error = check_rounded(out, "swiglu")) return error;
  return give(s, [=] {
    const std::size_t size = std::size_t{out.n} * out.cols;
    Aligned<float> y(size);
    std::copy_n(gate, size, y.get());
    cpu().swiglu(y.get(), up, size);
    note(y.get(), size, check);
    return put(y.get(), out), 0;
  });
}

int rotate(DeviceStream* s, const DeviceHeads& h, const DeviceCheck& check) {
  return give(s, [=] {
    float* x = h.qkv;
    for (const auto& [heads, norm] : {std::pair(h.heads, h.q_norm), std::pair(h.kv_heads, h.k_norm)}) {
      if (norm) cpu().rms_norm(x, norm, h.epsilon, h.n * heads, h.head_dim, x);
      const std::size_t half = h.rotary_dim / 2, row = std::size_t{heads} * h.head_dim;
      for (std::size_t i = 0; i < h.n; ++i, x += row) cpu().rope(x, heads, h.head_dim, h.rotary_dim, h.cos + i * half, h.sin + i * half, h.neox);
    }
    return note(h.qkv, std::size_t{h.n} * (h.heads + 2 * h.kv_heads) * h.head_dim, check), 0;
  });
}

// ---- attention of new tokens -----------------------------------------------------------------------------------------------------

PageShape shape_of(const DeviceKv& kv) { return PageShape::of(kv.head_dim); }

float* state_at(const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token, uint32_t part, uint32_t row) {
  return a.states + (((std::size_t{head} * a.n + token) * attention_parts + part) * kv.group + row) * (kv.dim + state_sums);
}

QueryRows rows_of(const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token) {
  const std::size_t row = (std::size_t{head} * a.n + token) * kv.group;
  return {kv.group, kv.dim, a.q + row * kv.dim, a.q8 + row * kv.dim, nullptr, a.q_scale + row};
}

template <class F>
int for_each_list(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a, F&& f) {
  return give(s, [kv, a, f, context = s->context] {
    for (uint32_t head = 0; head < kv.kv_heads; ++head)
      for (uint32_t token = 0; token < a.n; ++token)
        if (const int error = f(context, kv, a, head, token)) return error;
    return 0;
  });
}

void round_projected(const float* x, uint32_t n, int8_t* out, float* scale) {
  float largest = 0;
  for (uint32_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  const bool none = !(largest > 1e-30f && largest < 1e30f);
  *scale = none ? 0 : largest / 127;
  for (uint32_t i = 0; i < n; ++i) out[i] = static_cast<int8_t>(none ? 0 : std::lrint(x[i] * (127 / largest)));
}

int begin_attention(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with, const float* q, const float* k, const float* v) {
  return for_each_list(s, of, with, [=](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token) {
    float* key = kv.window + (std::size_t{head} * 2 * kv.window_rows + kv.counts->window + token) * kv.dim;
    float* value = key + std::size_t{kv.window_rows} * kv.dim;
    const std::size_t from = (std::size_t{token} * kv.kv_heads + head) * kv.head_dim;
    for (uint32_t d = 0; d < kv.dim; ++d) {
      key[d] = d < kv.head_dim ? k[from + d] - kv.centre[head * kv.dim + d] : 0;
      value[d] = d < kv.head_dim ? v[from + d] : 0;
    }
    const float scale = 1 / std::sqrt(static_cast<float>(kv.head_dim));
    for (uint32_t r = 0; r < kv.group; ++r) {
      const std::size_t row = (std::size_t{head} * a.n + token) * kv.group + r;
      float* x = a.q + row * kv.dim;
      const float* its_q = q + ((std::size_t{token} * kv.kv_heads + head) * kv.group + r) * kv.head_dim;
      for (uint32_t d = 0; d < kv.dim; ++d) x[d] = d < kv.head_dim ? its_q[d] * scale : 0;
      cpu().quantize_queries(x, 1, kv.dim, a.q8 + row * kv.dim, nullptr, a.q_scale + row);
      std::vector<float> projected(kv.sketch_dim);
      for (uint32_t d = 0; d < kv.dim; ++d)
        for (uint32_t c = 0; c < kv.sketch_dim; ++c) projected[c] += x[d] * kv.basis[(std::size_t{head} * kv.dim + d) * kv.sketch_dim + c];
      round_projected(projected.data(), kv.sketch_dim, a.projected + row * kv.sketch_dim, a.projected_scale + row);
    }
    return 0;
  });
}

// Into part 0; the parts of chosen pages are empty until then.
int attend_near(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with) {
  return for_each_list(s, of, with, [](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token) {
    const uint32_t sinks = kv.counts->pages > 0 ? kv.page_tokens : 0;
    const float *sink = kv.sinks + std::size_t{head} * 2 * kv.page_tokens * kv.dim, *window = kv.window + std::size_t{head} * 2 * kv.window_rows * kv.dim;
    State state(kv.group, kv.dim);
    const QueryRows rows = rows_of(kv, a, head, token);
    cpu().attend_rows(rows, sink, sink + std::size_t{kv.page_tokens} * kv.dim, sinks, nullptr, state.view(), state.scratch.get());
    cpu().attend_rows(rows, window, window + std::size_t{kv.window_rows} * kv.dim, kv.counts->window + token + 1, nullptr, state.view(), state.scratch.get());
    for (uint32_t part = 0; part < attention_parts; ++part) {
      for (uint32_t r = 0; r < kv.group; ++r) {
        float* to = state_at(kv, a, head, token, part, r);
        std::fill_n(to, kv.dim + state_sums, 0.0f);
        to[kv.dim] = -HUGE_VALF;
        if (part > 0) continue;
        std::copy_n(state.o.get() + std::size_t{r} * kv.dim, kv.dim, to);
        to[kv.dim] = state.m[r], to[kv.dim + 1] = to[kv.dim + 2] = state.l[r];
      }
    }
    return 0;
  });
}

std::size_t stride_of(const DeviceKv& kv, const DeviceAttention& a) { return std::size_t{a.extents} * shape_of(kv).extent_quads(); }

const int8_t* sketch_of(const DeviceKv& kv, uint32_t head, uint32_t e) {
  return reinterpret_cast<const int8_t*>(kv.sketch_at[e]) + kv.sketch_offset + head * kv.sketch_size;
}

int score_sketch(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with) {
  if (const int error = check_score_sketch(of, with)) return error;
  return for_each_list(s, of, with, [](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token) {
    const PageShape shape = shape_of(kv);
    const std::size_t row = (std::size_t{head} * a.n + token) * kv.group, stride = stride_of(kv, a);
    for (uint32_t e = 0; e * extent_pages < kv.counts->pages; ++e) {
      if (const int error = check_sketch(kv.sketch_at[e] + kv.sketch_offset)) return error;
      cpu().score_sketch(shape, kv.group, a.projected + row * kv.sketch_dim, a.projected_scale + row, sketch_of(kv, head, e), nullptr,
                         a.scores + row * stride + std::size_t{e} * shape.extent_quads(), stride);
    }
    return 0;
  });
}

// Where it is kept, as DeviceHotQuads::found has it.
uint32_t keep_quad(const DeviceHotQuads& hot, const DeviceCounts& counts, uint32_t head, uint32_t quad) {
  const uint32_t first = hot_place(quad, hot.room);
  unsigned long long* entries = hot.entries + std::size_t{head} * hot.room + first;
  uint32_t place = 0, last = UINT32_MAX, there = 0;
  for (uint32_t i = 0; i < hot_ways && !there; ++i) {
    const uint32_t chosen = is_kept(entries[i], counts) ? static_cast<uint32_t>(entries[i] >> 32) : 0;
    if (chosen > 0 && static_cast<uint32_t>(entries[i]) == quad)
      place = i, there = hot_is_there;
    else if (chosen < last)
      place = i, last = chosen;
  }
  if (!there && last == counts.step) return 0;
  entries[place] = uint64_t{counts.step} << 32 | quad;
  return (first + place + 1) | there;
}

int choose(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with) {
  return for_each_list(s, of, with, [](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token) {
    const std::size_t at = std::size_t{head} * a.n + token, stride = stride_of(kv, a);
    const uint32_t first = shape_of(kv).page_quads(), end = kv.counts->pages * first;
    uint32_t* counts = a.list_counts + 2 * at;
    counts[0] = counts[1] = 0;
    if (end <= first) return 0;
    float* shares = a.scores + at * kv.group * stride;
    const uint32_t n = end - first;
    std::vector<double> sums(n);
    for (uint32_t r = 0; r < kv.group; ++r) {  // select/bounded.cc
      const float *state = state_at(kv, a, head, token, 0, r), *scores = shares + r * stride + first;
      const double most = std::max(state[kv.dim] - std::log(2.0f), *std::max_element(scores, scores + n));
      double all = state[kv.dim + 1] * std::exp(state[kv.dim] - std::log(2.0) - most);
      for (uint32_t i = 0; i < n; ++i) all += std::exp(scores[i] - most);
      for (uint32_t i = 0; i < n; ++i) sums[i] += std::exp(scores[i] - most) / all;
    }
    for (uint32_t i = 0; i < n; ++i) shares[first + i] = sums[i] >= 0x1p-43 ? static_cast<float>(sums[i]) : 0;
    if (kv.budget->most == 0) return 0;
    const float t = sample_threshold(cpu(), shares + first, n, {kv.budget->least, kv.budget->most, static_cast<double>(kv.budget->variance)});
    std::vector<uint32_t> chosen(n);
    chosen.resize(std::min(cpu().sample(shares + first, n, first, sample_seed(kv.layer, head), t, chosen.data()), a.most));
    for (uint32_t i = 0; i < chosen.size(); ++i) {
      const uint32_t quad = chosen[i] + first;
      a.lists[at * a.most + i] = quad;
      a.biases[at * a.most + i] = shares[quad] < t ? std::log(t / shares[quad]) : 0;
      if (!a.hot.room) continue;
      const uint32_t found = keep_quad(a.hot, *kv.counts, head, quad);
      a.hot.found[std::size_t{head} * a.most + i] = found;
      counts[1] += found / hot_is_there;
    }
    counts[0] = static_cast<uint32_t>(chosen.size());
    return 0;
  });
}

// A quad's keys, values and scales as DeviceHotQuads has them, from there or from its page.
int find_quad(DeviceContext* context, const DeviceKv& kv, uint32_t head, uint32_t quad, const uint8_t* hot, uint8_t* out) {
  const std::size_t half = std::size_t{quad_tokens} * kv.dim, scales = quad_tokens * sizeof(uint16_t);
  if (hot) return std::copy_n(hot, 2 * (half + scales), out), 0;
  const uint32_t page_quads = shape_of(kv).page_quads(), page = quad / page_quads, in_page = quad % page_quads, extent = page / extent_pages;
  const std::size_t in_extent = std::size_t{head} * extent_pages + page % extent_pages;
  const uint64_t keys = kv.pages_at[extent] + kv.pages_offset + in_extent * page_bytes + in_page * half;
  const uint64_t its_scales = kv.scales_at[extent] + kv.scales_offset + in_extent * 4 * kv.page_tokens + in_page * scales;
  int error = check_seen_pages(keys);
  if (!error) error = check_seen_quad_scales(its_scales);
  if (error) return error;
  const auto copy = [&](uint64_t from, std::size_t size) {
    const std::byte* memory = followed(context, from, size);
    if (memory) std::memcpy(std::exchange(out, out + size), memory, size);
    return memory != nullptr;
  };
  return copy(keys, half) && copy(keys + page_bytes / 2, half) && copy(its_scales, scales) && copy(its_scales + 2 * kv.page_tokens, scales) ? 0 : refused;
}

float from_bf16(const uint8_t* bytes) {
  uint16_t high;
  std::memcpy(&high, bytes, sizeof high);
  const uint32_t bits = uint32_t{high} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

int attend_chosen(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with) {
  if (const int error = check_attend_chosen(with)) return error;
  return for_each_list(s, of, with, [](DeviceContext* context, const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token) {
    const std::size_t at = std::size_t{head} * a.n + token, half = std::size_t{quad_tokens} * kv.dim, quad_bytes = 2 * half + 4 * quad_tokens;
    const uint32_t count = a.list_counts[2 * at];
    std::vector<uint8_t> quads(count * quad_bytes);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t found = a.hot.room ? a.hot.found[std::size_t{head} * a.most + i] : 0;
      uint8_t* place = found ? a.hot.quads + (std::size_t{head} * a.hot.room + (found & ~hot_is_there) - 1) * a.hot.quad_bytes : nullptr;
      const uint8_t* hot = found & hot_is_there ? place : nullptr;
      if (const int error = find_quad(context, kv, head, a.lists[at * a.most + i], hot, quads.data() + i * quad_bytes)) return error;
      if (place && !hot) std::copy_n(quads.data() + i * quad_bytes, quad_bytes, place);
    }
    if (count == 0) return 0;
    const QueryRows rows = rows_of(kv, a, head, token);
    std::vector<float> scores(count * quad_tokens);
    for (uint32_t r = 0; r < kv.group; ++r) {
      for (uint32_t i = 0; i < scores.size(); ++i) {
        const uint8_t* quad = quads.data() + i / quad_tokens * quad_bytes;
        int32_t product = 0;
        for (uint32_t d = 0; d < kv.dim; ++d)
          product += rows.q[std::size_t{r} * kv.dim + d] * static_cast<int8_t>(quad[d / 4 * 16 + i % quad_tokens * 4 + d % 4]);
        scores[i] = static_cast<float>(product) * from_bf16(quad + 2 * half + i % quad_tokens * 2) * rows.scale[r] + a.biases[at * a.most + i / quad_tokens];
      }
      const float most = *std::max_element(scores.begin(), scores.end());
      float sum = 0, own = 0, *o = state_at(kv, a, head, token, near_parts, r);
      for (uint32_t i = 0; i < scores.size(); ++i) {
        const uint8_t* quad = quads.data() + i / quad_tokens * quad_bytes;
        const float weight = std::exp(scores[i] - most), scaled = weight * from_bf16(quad + 2 * half + (quad_tokens + i % quad_tokens) * 2);
        sum += weight, own += a.biases[at * a.most + i / quad_tokens] == 0 ? weight : 0;
        for (uint32_t d = 0; d < kv.dim; ++d) o[d] += scaled * static_cast<int8_t>(quad[half + d * 4 + i % quad_tokens]);
      }
      o[kv.dim] = most, o[kv.dim + 1] = sum, o[kv.dim + 2] = own;
    }
    return 0;
  });
}

int finish_attention(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with, const DeviceActivations& out, const DeviceCheck& check, float* totals,
                     float* mass) {
  const int error = for_each_list(s, of, with, [=](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token) {
    for (uint32_t r = 0; r < kv.group; ++r) {
      float most = -HUGE_VALF, sum = 0, own = 0;
      for (uint32_t part = 0; part < attention_parts; ++part) most = std::max(most, state_at(kv, a, head, token, part, r)[kv.dim]);
      std::vector<float> o(kv.dim);
      for (uint32_t part = 0; part < attention_parts; ++part) {
        const float *state = state_at(kv, a, head, token, part, r), weight = std::exp(state[kv.dim] - most);
        sum += weight * state[kv.dim + 1], own += weight * state[kv.dim + 2];
        for (uint32_t d = 0; d < kv.dim; ++d) o[d] += weight * state[d];
      }
      const std::size_t to = (std::size_t{token} * kv.kv_heads + head) * kv.group + r;
      for (uint32_t d = 0; d < kv.head_dim; ++d) out.f32[to * kv.head_dim + d] = o[d] / sum;
      totals[to] = most + std::log(sum), mass[to] = own / sum;
    }
    return 0;
  });
  return error ? error : quantize(s, out, check);
}

// ---- attention of a text that is read -----------------------------------------------------------------------------------------------

// Sixteen bits a number, in units of the largest of its kind.
constexpr float steps = 32767;

void to_fixed(const float* x, std::size_t n, float largest, uint16_t* out) {
  const float by = largest > 0 ? steps / largest : 0;
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<uint16_t>(static_cast<int16_t>(std::nearbyintf(x[i] * by)));
}

void from_fixed(const uint16_t* x, std::size_t n, float largest, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<int16_t>(x[i])) * (largest / steps);
}

float largest_of(const float* x, std::size_t n) {
  float largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

int prepare_reading(DeviceStream* s, const DeviceReading& r, const float* q, const float* k, const float* v) {
  if (const int error = check_prepare_reading(r)) return error;
  return give(s, [=, context = s->context] {
    const PageShape shape = PageShape::of(r.head_dim);
    const std::size_t dim = r.dim, page = std::size_t{r.page_tokens} * dim, sealed = r.pages * page, all = sealed + (r.window + r.n) * dim;
    Aligned<float> keys(all), values(all), row(dim);
    for (uint32_t h = 0; h < r.kv_heads; ++h) {
      for (uint32_t p = 0; p < r.pages; ++p) {
        const float* sinks = r.sinks + h * 2 * page;
        if (p == 0) {
          std::copy_n(sinks, page, keys.get()), std::copy_n(sinks + page, page, values.get());
          continue;
        }
        const std::size_t in_extent = std::size_t{h} * extent_pages + p % extent_pages, scale_bytes = std::size_t{4} * r.page_tokens;
        const uint64_t data_at = r.pages_at[p / extent_pages] + r.pages_offset + in_extent * page_bytes;
        if (const int error = check_seen_pages(data_at)) return error;
        const std::byte* data = followed(context, data_at, page_bytes);
        const std::byte* scales = followed(context, r.scales_at[p / extent_pages] + r.scales_offset + in_extent * scale_bytes, scale_bytes);
        if (!data || !scales) return refused;
        const auto* its_data = reinterpret_cast<const int8_t*>(data);
        const auto* its_scales = reinterpret_cast<const uint16_t*>(scales);
        cpu().unseal_page(shape, its_data, its_scales, keys.get() + p * page, values.get() + p * page);
      }
      const float* window = r.window_rows + std::size_t{h} * 2 * r.window_room * dim;
      std::copy_n(window, r.window * dim, keys.get() + sealed);
      std::copy_n(window + std::size_t{r.window_room} * dim, r.window * dim, values.get() + sealed);
      for (uint32_t t = 0; t < r.n; ++t) {
        const std::size_t to = sealed + (r.window + t) * dim, from = (std::size_t{t} * r.kv_heads + h) * r.head_dim;
        for (uint32_t d = 0; d < r.head_dim; ++d) {
          keys[to + d] = k[from + d] - (r.centre ? r.centre[h * dim + d] : 0);
          values[to + d] = v[from + d];
        }
      }
      float* largest = r.largest + 2 * h;
      largest[0] = largest_of(keys.get(), all), largest[1] = largest_of(values.get(), all);
      to_fixed(keys.get(), all, largest[0], r.keys + std::size_t{h} * r.room * dim);
      to_fixed(values.get(), all, largest[1], r.values + std::size_t{h} * r.room * dim);
      for (uint32_t i = 0; i < r.n * r.group; ++i) {
        const std::size_t from = ((std::size_t{i / r.group} * r.kv_heads + h) * r.group + i % r.group) * r.head_dim, at = std::size_t{h} * r.q_room + i;
        std::copy_n(q + from, r.head_dim, row.get());
        r.q_scale[at] = largest_of(row.get(), dim);
        to_fixed(row.get(), dim, r.q_scale[at], r.q + at * dim);
      }
    }
    return 0;
  });
}

int attend_reading(DeviceStream* s, const DeviceReading& r, float* out, float* totals) {
  if (const int error = check_attend_reading(r)) return error;
  return give(s, [=] {
    constexpr uint32_t together = 32;
    const std::size_t dim = r.dim;
    const uint32_t before = r.pages * r.page_tokens + r.window, all = before + r.n;
    Aligned<float> keys(all * dim), values(all * dim), q(together * dim);
    for (uint32_t h = 0; h < r.kv_heads; ++h) {
      from_fixed(r.keys + std::size_t{h} * r.room * dim, all * dim, r.largest[2 * h], keys.get());
      from_fixed(r.values + std::size_t{h} * r.room * dim, all * dim, r.largest[2 * h + 1], values.get());
      for (uint32_t begin = 0; begin < r.n * r.group; begin += together) {
        const uint32_t rows = std::min(together, r.n * r.group - begin);
        uint32_t limits[together];
        for (uint32_t i = 0; i < rows; ++i) {
          const std::size_t at = std::size_t{h} * r.q_room + begin + i;
          from_fixed(r.q + at * dim, dim, r.q_scale[at] / std::sqrt(static_cast<float>(r.head_dim)), q.get() + i * dim);
          limits[i] = before + (begin + i) / r.group + 1;
        }
        State state(rows, r.dim);
        const QueryRows query{rows, r.dim, q.get(), nullptr, nullptr, nullptr};
        cpu().attend_rows(query, keys.get(), values.get(), limits[rows - 1], limits, state.view(), state.scratch.get());
        for (uint32_t i = 0; i < rows; ++i) {
          const std::size_t to = (std::size_t{(begin + i) / r.group} * r.kv_heads + h) * r.group + (begin + i) % r.group;
          cpu().finish({state.o.get() + i * dim, state.m.get() + i, state.l.get() + i}, 1, r.dim, r.head_dim, out + to * r.head_dim, r.head_dim);
          totals[to] = state.m[i] + std::log(state.l[i]);
        }
      }
    }
    return 0;
  });
}

}  // namespace

void fill_operations(DeviceKernels* k) {
  k->matrix_bytes = matrix_bytes;
  k->lay_out = lay_out;
  k->matmul = matmul;
  k->quantize = quantize;
  k->rms_norm = rms_norm;
  k->swiglu = swiglu;
  k->rotate = rotate;
  k->begin_attention = begin_attention;
  k->attend_near = attend_near;
  k->score_sketch = score_sketch;
  k->choose = choose;
  k->attend_chosen = attend_chosen;
  k->finish_attention = finish_attention;
  k->prepare_reading = prepare_reading;
  k->attend_reading = attend_reading;
  k->find_nearest = find_nearest;
}

}  // namespace kvasir::emulated
