// Attention of new tokens, with the CPU's kernels and plain loops.
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "alignment.h"
#include "backend/device_operations.h"
#include "select/sampling.h"
#include "state.h"
#include "work.h"

namespace kvasir::emulated {
namespace {

PageShape shape_of(const DeviceKv& kv) { return PageShape::of(kv.head_dim); }

float* state_at(const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token,
                uint32_t part, uint32_t row) {
  return a.states +
         (((std::size_t{head} * a.n + token) * attention_parts + part) * kv.group + row) *
             (kv.dim + state_sums);
}

QueryRows rows_of(const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token) {
  const std::size_t row = (std::size_t{head} * a.n + token) * kv.group;
  return {kv.group, kv.dim, a.q + row * kv.dim, a.q8 + row * kv.dim, nullptr, a.q_scale + row};
}

template <class F>
int for_each(DeviceStream* s, uint32_t of_head, const DeviceKv& kv, const DeviceAttention& a,
             F&& f) {
  return enqueue(s, [of_head, kv, a, f, context = s->context] {
    for (uint32_t head = 0; head < kv.kv_heads; ++head)
      for (uint32_t i = 0; i < of_head; ++i)
        if (const int error = f(context, kv, a, head, i)) return error;
    return 0;
  });
}
template <class F>
int for_each_token(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a, F&& f) {
  return for_each(s, a.n, kv, a, std::forward<F>(f));
}
template <class F>
int for_each_list(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a, F&& f) {
  return for_each(s, a.blocks, kv, a, std::forward<F>(f));
}

// The rows of a block that ask, each: f(its place among them, the token, its number in the group).
template <class F>
void for_each_asking(const DeviceKv& kv, const DeviceAttention& a, uint32_t block, F&& f) {
  const QueryGroup askers = query_group_of(a.n, a.blocks, block);
  for (uint32_t i = 0; i < askers.selecting() * kv.group; ++i)
    f(i, askers.token(i / kv.group), i % kv.group);
}

void round_projected(const float* x, uint32_t n, int8_t* out, float* scale) {
  float largest = 0;
  for (uint32_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  const bool none = !(largest > 1e-30f && largest < 1e30f);
  *scale = none ? 0 : largest / 127;
  for (uint32_t i = 0; i < n; ++i)
    out[i] = static_cast<int8_t>(none ? 0 : std::lrint(x[i] * (127 / largest)));
}

int begin_attention(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with,
                    const float* q, const float* k, const float* v) {
  return for_each_token(
      s, of, with,
      [=](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head,
          uint32_t token) {
        const DeviceCounts& counts = *kv.counts;
        const uint32_t at = window_row(counts, counts.window + token, kv.window_rows);
        float* key = kv.window + (std::size_t{head} * 2 * kv.window_rows + at) * kv.dim;
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
          const float* its_q =
              q + ((std::size_t{token} * kv.kv_heads + head) * kv.group + r) * kv.head_dim;
          for (uint32_t d = 0; d < kv.dim; ++d) x[d] = d < kv.head_dim ? its_q[d] * scale : 0;
          cpu().quantize_queries(x, 1, kv.dim, a.q8 + row * kv.dim, nullptr, a.q_scale + row);
          if (!a.projected) continue;
          std::vector<float> projected(kv.sketch_dim);
          for (uint32_t d = 0; d < kv.dim; ++d)
            for (uint32_t c = 0; c < kv.sketch_dim; ++c)
              projected[c] += x[d] * kv.basis[(std::size_t{head} * kv.dim + d) * kv.sketch_dim + c];
          round_projected(projected.data(), kv.sketch_dim, a.projected + row * kv.sketch_dim,
                          a.projected_scale + row);
        }
        return 0;
      });
}

// Into part 0.
int attend_sinks_and_window(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with) {
  return for_each_token(
      s, of, with,
      [](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head,
         uint32_t token) {
        const uint32_t sinks = kv.counts->pages > 0 ? kv.page_tokens : 0;
        const float *sink = kv.sinks + std::size_t{head} * 2 * kv.page_tokens * kv.dim,
                    *window = kv.window + std::size_t{head} * 2 * kv.window_rows * kv.dim;
        State state(kv.group, kv.dim);
        const QueryRows rows = rows_of(kv, a, head, token);
        for (uint32_t r = 0; kv.sink_logits && r < kv.group; ++r) {  // keys are centred
          const float *x = rows.f32 + std::size_t{r} * kv.dim, *c = kv.centre + head * kv.dim;
          state.m[r] =
              kv.sink_logits[head * kv.group + r] - std::inner_product(x, x + kv.dim, c, 0.0f);
          state.l[r] = 1;
        }
        cpu().attend_rows(rows, sink, sink + std::size_t{kv.page_tokens} * kv.dim, sinks, nullptr,
                          state.view(), state.scratch.get());
        const DeviceCounts& counts = *kv.counts;
        const uint32_t n = counts.window + token + 1,
                       before_end = std::min(n, kv.window_rows - counts.first_row);
        const auto attend = [&](uint32_t row, uint32_t count) {
          const float* keys = window + std::size_t{row} * kv.dim;
          cpu().attend_rows(rows, keys, keys + std::size_t{kv.window_rows} * kv.dim, count, nullptr,
                            state.view(), state.scratch.get());
        };
        attend(counts.first_row, before_end);
        if (n > before_end) attend(0, n - before_end);
        for (uint32_t r = 0; r < kv.group; ++r) {
          float* to = state_at(kv, a, head, token, 0, r);
          std::copy_n(state.o.get() + std::size_t{r} * kv.dim, kv.dim, to);
          to[kv.dim] = state.m[r], to[kv.dim + 1] = to[kv.dim + 2] = state.l[r];
          if (!a.near_sums) continue;
          const std::size_t all = std::size_t{kv.kv_heads} * a.n * kv.group,
                            at = (std::size_t{head} * a.n + token) * kv.group + r;
          a.near_sums[at] = state.m[r], a.near_sums[all + at] = state.l[r];
        }
        return 0;
      });
}

std::size_t stride_of(const DeviceKv& kv, const DeviceAttention& a) {
  return std::size_t{a.extents} * shape_of(kv).extent_quads();
}

const int8_t* sketch_of(const DeviceKv& kv, uint32_t head, uint32_t e) {
  return reinterpret_cast<const int8_t*>(kv.sketch_at[e]) + kv.sketch_offset +
         head * kv.sketch_size;
}

int score_sketch(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with) {
  if (const int error = check_score_sketch(of, with)) return error;
  if (const int error = attend_sinks_and_window(s, of, with)) return error;
  return for_each_list(
      s, of, with,
      [](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head,
         uint32_t block) {
        const PageShape shape = shape_of(kv);
        const std::size_t at = std::size_t{head} * a.blocks + block, stride = stride_of(kv, a);
        for (uint32_t e = 0; e * extent_pages < kv.counts->pages; ++e) {
          if (const int error = check_sketch(kv.sketch_at[e] + kv.sketch_offset)) return error;
          for_each_asking(kv, a, block, [&](uint32_t i, uint32_t token, uint32_t r) {
            const std::size_t row = (std::size_t{head} * a.n + token) * kv.group + r;
            cpu().score_sketch(shape, 1, a.projected + row * kv.sketch_dim, a.projected_scale + row,
                               sketch_of(kv, head, e), nullptr,
                               a.scores + (at * a.selecting_rows + i) * stride +
                                   std::size_t{e} * shape.extent_quads(),
                               stride);
          });
        }
        return 0;
      });
}

// Where it is kept, as DeviceHotQuads::found has it.
uint32_t keep_quad(const DeviceHotQuads& hot, const DeviceCounts& counts, uint32_t head,
                   uint32_t quad) {
  const uint32_t first = hot_place(quad, hot.room);
  unsigned long long* entries = hot.entries + std::size_t{head} * hot.room + first;
  uint32_t place = 0, last = UINT32_MAX, there = 0;
  for (uint32_t i = 0; i < hot_ways && !there; ++i) {
    const uint32_t chosen =
        is_kept(entries[i], counts) ? static_cast<uint32_t>(entries[i] >> 32) : 0;
    if (chosen > 0 && static_cast<uint32_t>(entries[i]) == quad) place = i, there = hot_present;
    else if (chosen < last) place = i, last = chosen;
  }
  if (!there && last == counts.step) return 0;
  entries[place] = uint64_t{counts.step} << 32 | quad;
  return (first + place + 1) | there;
}

int choose(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with) {
  return for_each_list(
      s, of, with,
      [](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head,
         uint32_t block) {
        const std::size_t at = std::size_t{head} * a.blocks + block, stride = stride_of(kv, a);
        const uint32_t first = shape_of(kv).page_quads(), end = kv.counts->pages * first;
        uint32_t* counts = a.list_counts + 2 * at;
        counts[0] = counts[1] = 0;
        if (end <= first) return 0;
        float* shares = a.scores + at * a.selecting_rows * stride;
        const uint32_t n = end - first;
        std::vector<double> sums(n);
        // select/bounded.cc
        for_each_asking(kv, a, block, [&](uint32_t row, uint32_t token, uint32_t r) {
          const float *state = state_at(kv, a, head, token, 0, r),
                      *scores = shares + row * stride + first;
          const double most =
              std::max(state[kv.dim] - std::log(2.0f), *std::max_element(scores, scores + n));
          double all = state[kv.dim + 1] * std::exp(state[kv.dim] - std::log(2.0) - most);
          for (uint32_t i = 0; i < n; ++i) all += std::exp(scores[i] - most);
          for (uint32_t i = 0; i < n; ++i) sums[i] += std::exp(scores[i] - most) / all;
        });
        const double least = a.n > 1 ? 0.1 * std::accumulate(sums.begin(), sums.end(), 0.0) / n : 0,
                     askers = query_group_of(a.n, a.blocks, block).selecting();
        for (uint32_t i = 0; i < n; ++i)
          shares[first + i] = std::max(sums[i] >= 0x1p-43 ? static_cast<float>(sums[i]) : 0,
                                       static_cast<float>(least));
        if (kv.budget->max_quads == 0) return 0;
        const float t =
            sample_threshold(cpu(), shares + first, n,
                             {kv.budget->min_quads, kv.budget->max_quads,
                              static_cast<double>(kv.budget->variance) * askers * askers});
        std::vector<uint32_t> chosen(n);
        chosen.resize(std::min(
            cpu().sample(shares + first, n, first, sample_seed(kv.layer, head), t, chosen.data()),
            a.max_quads));
        for (uint32_t i = 0; i < chosen.size(); ++i) {
          const uint32_t quad = chosen[i] + first;
          a.lists[at * a.max_quads + i] = quad;
          a.biases[at * a.max_quads + i] = shares[quad] < t ? std::log(t / shares[quad]) : 0;
          if (!a.hot.room) continue;
          const uint32_t found = keep_quad(a.hot, *kv.counts, head, quad);
          a.hot.list_places[std::size_t{head} * a.max_quads + i] = found;
          counts[1] += found / hot_present;
        }
        counts[0] = static_cast<uint32_t>(chosen.size());
        return 0;
      });
}

// A quad's keys, values and scales as DeviceHotQuads has them, from there or from its page.
int find_quad(DeviceContext* context, const DeviceKv& kv, uint32_t head, uint32_t quad,
              const uint8_t* hot, uint8_t* out) {
  const std::size_t half = std::size_t{quad_tokens} * kv.dim,
                    scales = quad_tokens * sizeof(uint16_t);
  if (hot) return std::copy_n(hot, 2 * (half + scales), out), 0;
  const uint32_t page_quads = shape_of(kv).page_quads(), page = quad / page_quads,
                 in_page = quad % page_quads, extent = page / extent_pages;
  const std::size_t in_extent = std::size_t{head} * extent_pages + page % extent_pages;
  const uint64_t keys =
      kv.pages_at[extent] + kv.pages_offset + in_extent * page_bytes + in_page * half;
  const uint64_t its_scales =
      kv.scales_at[extent] + kv.scales_offset + in_extent * 4 * kv.page_tokens + in_page * scales;
  int error = check_seen_pages(keys);
  if (!error) error = check_seen_quad_scales(its_scales);
  if (error) return error;
  const auto copy = [&](uint64_t from, std::size_t size) {
    const std::byte* memory = followed(context, from, size);
    if (memory) std::memcpy(std::exchange(out, out + size), memory, size);
    return memory != nullptr;
  };
  return copy(keys, half) && copy(keys + page_bytes / 2, half) && copy(its_scales, scales) &&
                 copy(its_scales + 2 * kv.page_tokens, scales)
             ? 0
             : refused;
}

float from_bf16(const uint8_t* bytes) {
  uint16_t high;
  std::memcpy(&high, bytes, sizeof high);
  const uint32_t bits = uint32_t{high} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

int gather_chosen(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with) {
  if (const int error = check_gathered(with)) return error;
  return for_each_list(s, of, with,
                       [](DeviceContext* context, const DeviceKv& kv, const DeviceAttention& a,
                          uint32_t head, uint32_t block) {
                         const std::size_t at = std::size_t{head} * a.blocks + block;
                         for (uint32_t i = 0; i < a.list_counts[2 * at]; ++i)
                           if (const int error = find_quad(
                                   context, kv, head, a.lists[at * a.max_quads + i], nullptr,
                                   a.gathered + (at * a.max_quads + i) * quad_bytes_of(kv.dim)))
                             return error;
                         return 0;
                       });
}

int gather_group(DeviceStream* s, const DeviceKv& of, const DeviceGroup& with) {
  if (const int error = check_group(with)) return error;
  return enqueue(s, [kv = of, g = with, context = s->context] {
    const std::size_t quad_bytes = quad_bytes_of(kv.dim);
    DeviceKv its = kv;
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
      for (uint32_t head = 0; head < kv.kv_heads; ++head)
        for (uint32_t i = 0; i < *g.count; ++i)
          if (const int error = find_quad(
                  context, its, head, g.quads[i], nullptr,
                  g.to + ((std::size_t{layer} * kv.kv_heads + head) * g.room + g.places[i]) *
                             quad_bytes))
            return error;
      its.pages_offset += std::size_t{kv.kv_heads} * PageShape::pages_bytes(),
          its.scales_offset += kv.kv_heads * shape_of(kv).scales_bytes();
    }
    return 0;
  });
}

// Where quad i stays if each has its place, as DeviceHotQuads::list_places has it.
uint32_t keep_in_order(const DeviceHotQuads& hot, const DeviceCounts& counts, uint32_t head,
                       uint32_t quad) {
  if (quad >= hot.room) return 0;
  unsigned long long& entry = hot.entries[std::size_t{head} * hot.room + quad];
  const bool there = static_cast<uint32_t>(entry) == quad && is_kept(entry, counts);
  if (!there) entry = uint64_t{counts.step} << 32 | quad;
  return (quad + 1) | (there ? hot_present : 0);
}

// all: every quad, in place of those of the lists.
int attend_quads(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with, bool all) {
  if (const int error = check_attend_chosen(with)) return error;
  return for_each_token(
      s, of, with,
      [all](DeviceContext* context, const DeviceKv& kv, const DeviceAttention& a, uint32_t head,
            uint32_t token) {
        const std::size_t at = std::size_t{head} * a.blocks + query_group_at(a.n, a.blocks, token),
                          half = std::size_t{quad_tokens} * kv.dim,
                          quad_bytes = 2 * half + 4 * quad_tokens;
        const uint32_t page_quads = shape_of(kv).page_quads(), pages = kv.counts->pages,
                       count = all ? (std::max(pages, 1u) - 1) * page_quads : a.list_counts[2 * at];
        const auto bias_of = [&](std::size_t i) {
          return a.biases && !all ? a.biases[at * a.max_quads + i] : 0.0f;
        };
        const auto is_present = [&](std::size_t i, std::size_t t) {
          return !a.present || a.present[at * a.max_quads + i] >> t & 1;
        };
        std::vector<uint8_t> quads(count * quad_bytes);
        for (uint32_t i = 0; i < count; ++i) {
          const uint32_t quad = all       ? page_quads + i
                                : a.lists ? a.lists[at * a.max_quads + i]
                                          : a.list_counts[2 * at + 1] + i,
                         found = !a.hot.room ? 0
                                 : all       ? keep_in_order(a.hot, *kv.counts, head, quad)
                                       : a.hot.list_places[std::size_t{head} * a.max_quads + i];
          uint8_t* place =
              found ? a.hot.quads + (std::size_t{head} * a.hot.room + (found & ~hot_present) - 1) *
                                        a.hot.quad_bytes
                    : nullptr;
          const uint8_t* hot = found & hot_present ? place : nullptr;
          const uint8_t* there =
              hot || !a.gathered ? hot : a.gathered + (at * a.max_quads + i) * quad_bytes;
          if (const int error =
                  find_quad(context, kv, head, quad, there, quads.data() + i * quad_bytes))
            return error;
          if (place && !hot) std::copy_n(quads.data() + i * quad_bytes, quad_bytes, place);
        }
        for (uint32_t part = near_parts; part < attention_parts; ++part)
          for (uint32_t r = 0; r < kv.group; ++r) {
            float* to = state_at(kv, a, head, token, part, r);
            std::fill_n(to, kv.dim + state_sums, 0.0f);
            to[kv.dim] = -HUGE_VALF;
          }
        if (count == 0) return 0;
        const QueryRows rows = rows_of(kv, a, head, token);
        std::vector<float> scores(count * quad_tokens);
        for (uint32_t r = 0; r < kv.group; ++r) {
          for (uint32_t i = 0; i < scores.size(); ++i) {
            const uint8_t* quad = quads.data() + i / quad_tokens * quad_bytes;
            int32_t product = 0;
            for (uint32_t d = 0; d < kv.dim; ++d)
              product += rows.q[std::size_t{r} * kv.dim + d] *
                         static_cast<int8_t>(quad[d / 4 * 16 + i % quad_tokens * 4 + d % 4]);
            scores[i] = static_cast<float>(product) *
                            from_bf16(quad + 2 * half + i % quad_tokens * 2) * rows.scale[r] +
                        bias_of(i / quad_tokens);
            if (!is_present(i / quad_tokens, i % quad_tokens)) scores[i] = -HUGE_VALF;
          }
          const float most = *std::max_element(scores.begin(), scores.end());
          float sum = 0, own = 0, *o = state_at(kv, a, head, token, near_parts, r);
          for (uint32_t i = 0; i < scores.size(); ++i) {
            const uint8_t* quad = quads.data() + i / quad_tokens * quad_bytes;
            const float weight = std::exp(scores[i] - most),
                        scaled = weight *
                                 from_bf16(quad + 2 * half + (quad_tokens + i % quad_tokens) * 2);
            sum += weight, own += bias_of(i / quad_tokens) == 0 ? weight : 0;
            for (uint32_t d = 0; d < kv.dim; ++d)
              o[d] += scaled * static_cast<int8_t>(quad[half + d * 4 + i % quad_tokens]);
          }
          o[kv.dim] = most, o[kv.dim + 1] = sum, o[kv.dim + 2] = own;
        }
        return 0;
      });
}

int attend_chosen(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  return attend_quads(s, kv, a, false);
}

int attend_all(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  const int error = attend_sinks_and_window(s, kv, a);
  return error ? error : attend_quads(s, kv, a, true);
}

int finish_attention(DeviceStream* s, const DeviceKv& of, const DeviceAttention& with,
                     const DeviceActivations& out, const DeviceCheck& check, float* lse,
                     float* mass) {
  const int error = for_each_token(
      s, of, with,
      [=](DeviceContext*, const DeviceKv& kv, const DeviceAttention& a, uint32_t head,
          uint32_t token) {
        for (uint32_t r = 0; r < kv.group; ++r) {
          float most = -HUGE_VALF, sum = 0, own = 0;
          std::vector<const float*> parts;
          for (uint32_t part = 0; part < a.parts; ++part)
            parts.push_back(state_at(kv, a, head, token, part, r));
          if (a.cpu_states)
            parts.push_back(a.cpu_states + ((std::size_t{head} * a.n + token) * kv.group + r) *
                                               (kv.dim + state_sums));
          for (const float* state : parts) most = std::max(most, state[kv.dim]);
          std::vector<float> o(kv.dim);
          for (const float* state : parts) {
            const float weight = std::exp(state[kv.dim] - most);
            sum += weight * state[kv.dim + 1], own += weight * state[kv.dim + 2];
            for (uint32_t d = 0; d < kv.dim; ++d) o[d] += weight * state[d];
          }
          const std::size_t to = (std::size_t{token} * kv.kv_heads + head) * kv.group + r;
          for (uint32_t d = 0; d < kv.head_dim; ++d) out.f32[to * kv.head_dim + d] = o[d] / sum;
          lse[to] = most + std::log(sum), mass[to] = own / sum;
        }
        return 0;
      });
  return error ? error : quantize(s, out, check);
}

}  // namespace

void fill_attention(DeviceKernels* k) {
#define KVASIR_FILL(name) k->name = name;
  KVASIR_DEVICE_ATTENTION(KVASIR_FILL)
#undef KVASIR_FILL
}

}  // namespace kvasir::emulated
