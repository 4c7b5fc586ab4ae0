#include "device_double.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "compute/device.h"
#include "compute/kernels.h"
#include "compute/page.h"
#include "select/sampling.h"

namespace kvasir {

using test::device_double;

struct DeviceContext {
  int index;
  std::mutex mutex;
  std::map<uint64_t, uint64_t> memory;  // begin, end
};

using Work = std::function<int()>;

struct DeviceGraph {
  std::vector<Work> work;
};

struct DeviceStream {
  DeviceContext* context;
  std::unique_ptr<DeviceGraph> recorded;  // between begin_graph() and end_graph()
  int failed = 0;
};

namespace {

enum Error { out_of_memory = 1, none_there, lost, foreign_memory, shared_already, not_shared };

uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }

// Memory of the processor's that all devices may follow: pinned, or shared.
struct Host {
  std::mutex mutex;
  std::map<uint64_t, uint64_t> pinned, shared;
};
Host& host() {
  static Host h;
  return h;
}

bool inside(const std::map<uint64_t, uint64_t>& memory, uint64_t at) {
  const auto next = memory.upper_bound(at);
  return next != memory.begin() && at < std::prev(next)->second;
}

bool owns(DeviceContext* c, std::initializer_list<const void*> pointers) {
  const std::lock_guard lock(c->mutex);
  return std::all_of(pointers.begin(), pointers.end(), [&](const void* p) { return !p || inside(c->memory, address(p)); });
}

bool may_read(DeviceContext* c, uint64_t at) {
  if (owns(c, {reinterpret_cast<const void*>(at)})) return true;
  const std::lock_guard lock(host().mutex);
  return inside(host().pinned, at) || inside(host().shared, at);
}

// Does the work, or keeps it for a graph.
int give(DeviceStream* s, Work work) {
  if (s->recorded) return s->recorded->work.push_back(std::move(work)), 0;
  if (device_double().lost == s->context->index) return s->failed = lost;
  const int error = work();
  return error ? s->failed = error : 0;
}

template <class F>
int give(DeviceStream* s, std::initializer_list<const void*> pointers, F&& work) {
  if (!owns(s->context, pointers)) return s->failed = foreign_memory;
  return give(s, Work([work = std::forward<F>(work)] { return work(), 0; }));
}

struct FreeAligned {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{256}); }
};
std::byte* aligned(std::size_t size) { return static_cast<std::byte*>(::operator new[](std::max<std::size_t>(size, 1), std::align_val_t{256})); }

// ---- devices and memory ---------------------------------------------------------------------------------------------------

int count(int* devices) {
  *devices = device_double().count;
  return *devices > 0 ? 0 : none_there;
}

const char* error_text(int error) {
  constexpr const char* texts[] = {"", "out of memory", "no driver", "it was lost", "memory of another device", "shared already", "not shared"};
  return texts[error];
}

bool is_out_of_memory(int error) { return error == out_of_memory; }

int capability(int index, int* major, int* minor) { return *major = device_double().capability[index], *minor = 0; }

int open(int index, DeviceContext** out) {
  *out = new DeviceContext{index, {}, {}};
  ++device_double().opened[index];
  return 0;
}

int close(DeviceContext* c) {
  --device_double().opened[c->index];
  delete c;
  return 0;
}

int describe(DeviceContext* c, DeviceInfo* out) {
  *out = {"a double", device_double().free_bytes[c->index], device_double().free_bytes[c->index], 100};
  return 0;
}

int allocate(DeviceContext* c, std::size_t size, void** out) {
  size = std::max<std::size_t>(size, 1);
  if (device_double().lost == c->index) return lost;
  if (device_double().bytes[c->index] + size > device_double().most_bytes[c->index]) return out_of_memory;
  device_double().bytes[c->index] += size;
  std::byte* memory = aligned(size);
  std::memset(memory, 0xff, size);
  const std::lock_guard lock(c->mutex);
  c->memory[address(memory)] = address(memory) + size;
  *out = memory;
  return 0;
}

int release(DeviceContext* c, void* memory) {
  const std::lock_guard lock(c->mutex);
  const auto at = c->memory.find(address(memory));
  if (at == c->memory.end()) return foreign_memory;
  device_double().bytes[c->index] -= at->second - at->first;
  c->memory.erase(at);
  FreeAligned()(static_cast<std::byte*>(memory));
  return 0;
}

int allocate_host(DeviceContext*, std::size_t size, void** out) {
  *out = aligned(size);
  const std::lock_guard lock(host().mutex);
  host().pinned[address(*out)] = address(*out) + std::max<std::size_t>(size, 1);
  return 0;
}

int release_host(DeviceContext*, void* memory) {
  const std::lock_guard lock(host().mutex);
  host().pinned.erase(address(memory));
  FreeAligned()(static_cast<std::byte*>(memory));
  return 0;
}

// As the driver: what is shared once, by whichever device, is not shared again.
int share_host(DeviceContext*, const void* memory, std::size_t size, uint64_t* out) {
  const std::lock_guard lock(host().mutex);
  const uint64_t begin = address(memory), end = begin + size;
  for (const auto& [first, last] : host().shared)
    if (begin < last && first < end) return shared_already;
  host().shared[begin] = end;
  ++device_double().shared;
  return *out = begin, 0;
}

int unshare_host(DeviceContext*, const void* memory) {
  const std::lock_guard lock(host().mutex);
  if (host().shared.erase(address(memory)) == 0) return not_shared;
  --device_double().shared;
  return 0;
}

int see_host(DeviceContext*, const void* memory, uint64_t* out) {
  const std::lock_guard lock(host().mutex);
  return inside(host().shared, address(memory)) ? (*out = address(memory), 0) : not_shared;
}

int open_stream(DeviceContext* c, DeviceStream** out) {
  *out = new DeviceStream{c, nullptr, 0};
  return 0;
}
int close_stream(DeviceStream* s) {
  delete s;
  return 0;
}
int wait(DeviceStream* s) { return device_double().lost == s->context->index ? lost : s->failed; }
int after(DeviceStream*, DeviceStream*) { return 0; }

int upload(DeviceStream* s, void* to, const void* from, std::size_t size) {
  if (size == 0) return 0;
  return give(s, {to, static_cast<std::byte*>(to) + size - 1}, [=] { std::memcpy(to, from, size); });
}
int download(DeviceStream* s, void* to, const void* from, std::size_t size) {
  if (size == 0) return 0;
  return give(s, {from, static_cast<const std::byte*>(from) + size - 1}, [=] { std::memcpy(to, from, size); });
}

int begin_graph(DeviceStream* s) {
  s->recorded = std::make_unique<DeviceGraph>();
  return 0;
}
int end_graph(DeviceStream* s, DeviceGraph** out) {
  *out = s->recorded.release();
  return 0;
}
int run_graph(DeviceStream* s, const DeviceGraph* graph) {
  for (const Work& work : graph->work)
    if (const int error = give(s, work)) return error;
  return 0;
}
int release_graph(DeviceStream*, DeviceGraph* graph) {
  delete graph;
  return 0;
}

// ---- weights, products, elementwise -----------------------------------------------------------------------------------------

std::size_t row_bytes(TensorType type, uint32_t cols) {
  const TensorTypeInfo& info = *tensor_type_info(type);
  return std::size_t{cols} / info.block_elements * info.block_bytes;
}

std::size_t matrix_bytes(TensorType type, uint32_t rows, uint32_t cols) { return rows * row_bytes(type, cols); }

int lay_out(DeviceStream* s, const DeviceMatrix& to, const std::byte* from, uint32_t row, uint32_t n) {
  const std::size_t bytes = row_bytes(to.type, to.cols);
  auto* at = const_cast<std::byte*>(to.data) + row * bytes;
  return give(s, {at, from}, [=] { std::memcpy(at, from, n * bytes); });
}

int quantize(DeviceStream* s, const DeviceActivations& x) {
  return give(s, {x.f32, x.q, x.scale, x.sums}, [=] { cpu_kernels().quantize(x.f32, x.n, x.cols, x.q, x.scale, x.sums); });
}

int matmul(DeviceStream* s, const DeviceMatrix& w, const DeviceActivations& x, const float* bias, float* y, std::size_t y_stride) {
  return give(s, {w.data, x.f32, x.q, bias, y}, [=] {
    const Kernels& k = cpu_kernels();
    const std::unique_ptr<std::byte[], FreeAligned> scratch(aligned(k.matmul_scratch(w.type, w.cols)));
    k.matmul({w.data, w.type, w.rows, w.cols, row_bytes(w.type, w.cols)}, {x.n, x.cols, x.f32, x.q, x.scale, x.sums}, y, y_stride, 0, w.rows, scratch.get());
    for (uint32_t i = 0; bias && i < x.n; ++i) k.add(y + i * y_stride, bias, w.rows);
  });
}

int rms_norm(DeviceStream* s, const float* x, const float* weight, float epsilon, uint32_t n, uint32_t cols, float* y) {
  return give(s, {x, weight, y}, [=] { cpu_kernels().rms_norm(x, weight, epsilon, n, cols, y); });
}

int rope(DeviceStream* s, float* x, uint32_t n, uint32_t heads, uint32_t head_dim, uint32_t rotary, const float* cos, const float* sin, bool neox) {
  return give(s, {x, cos, sin}, [=] {
    for (std::size_t i = 0; i < n; ++i)
      cpu_kernels().rope(x + i * heads * head_dim, heads, head_dim, rotary, cos + i * (rotary / 2), sin + i * (rotary / 2), neox);
  });
}

int swiglu(DeviceStream* s, float* gate, const float* up, std::size_t n) {
  return give(s, {gate, up}, [=] { cpu_kernels().swiglu(gate, up, n); });
}
int add(DeviceStream* s, float* x, const float* y, std::size_t n) {
  return give(s, {x, y}, [=] { cpu_kernels().add(x, y, n); });
}
int check(DeviceStream* s, const float* x, std::size_t n, float limit, uint32_t mark, uint32_t* first) {
  return give(s, {x, first}, [=] {
    if (!std::all_of(x, x + n, [=](float f) { return std::fabs(f) < limit; })) *first = std::min(*first, mark);
  });
}

// ---- attention of new tokens --------------------------------------------------------------------------------------------------

float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }
float relative(float m, float most) { return m == -INFINITY ? 0.0f : std::exp(m - most); }

// A query row's softmax, one key after the other. own: what stands for itself.
struct Softmax {
  explicit Softmax(uint32_t dim) : o(dim) {}
  template <class Value>
  void see(double score, bool is_own, Value&& value) {
    if (score > m) {
      const double keep = m == -INFINITY ? 0 : std::exp(m - score);
      l *= keep, own *= keep, m = score;
      for (double& x : o) x *= keep;
    }
    const double weight = std::exp(score - m);
    l += weight, own += is_own ? weight : 0;
    for (uint32_t d = 0; d < o.size(); ++d) o[d] += weight * value(d);
  }
  void put(float* state) const {
    const std::size_t dim = o.size();
    for (std::size_t d = 0; d < dim; ++d) state[d] = static_cast<float>(o[d]);
    state[dim] = static_cast<float>(m), state[dim + 1] = static_cast<float>(l), state[dim + 2] = static_cast<float>(own);
  }
  std::vector<double> o;
  double m = -INFINITY, l = 0, own = 0;
};

// n: a multiple of 16, which a compiler takes together.
float dot(const float* a, const float* b, uint32_t n) {
  constexpr uint32_t lanes = 16;
  float sums[lanes] = {}, sum = 0;
  for (uint32_t i = 0; i < n; i += lanes)
    for (uint32_t j = 0; j < lanes; ++j) sums[j] += a[i + j] * b[i + j];
  for (const float x : sums) sum += x;
  return sum;
}

float* state_at(const DeviceKv& kv, const DeviceAttention& a, uint32_t head, uint32_t token, uint32_t part, uint32_t row) {
  return a.states + (((std::size_t{head} * a.n + token) * attention_parts + part) * kv.group + row) * (kv.dim + state_sums);
}

int begin_attention(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a, const float* q, const float* k, const float* v) {
  return give(s, {q, k, v, kv.centre, kv.window, kv.basis, kv.counts, a.q, a.q8, a.q_scale, a.projected, a.projected_scale}, [=] {
    const uint32_t rows = kv.kv_heads * a.n * kv.group, coordinates = kv.sketch_dim;
    for (uint32_t i = 0; i < a.n * kv.kv_heads; ++i) {
      const uint32_t head = i % kv.kv_heads, token = i / kv.kv_heads;
      float* to = kv.window + (std::size_t{head} * 2 * kv.window_rows + kv.counts->window + token) * kv.dim;
      for (uint32_t d = 0; d < kv.dim; ++d) {
        const bool has = d < kv.head_dim;
        to[d] = has ? k[std::size_t{i} * kv.head_dim + d] - kv.centre[head * kv.dim + d] : 0.0f;
        to[std::size_t{kv.window_rows} * kv.dim + d] = has ? v[std::size_t{i} * kv.head_dim + d] : 0.0f;
      }
    }
    for (uint32_t row = 0; row < rows; ++row) {
      const uint32_t head = row / (a.n * kv.group), token = row / kv.group % a.n;
      const float* from = q + (std::size_t{token} * kv.kv_heads * kv.group + head * kv.group + row % kv.group) * kv.head_dim;
      float* to = a.q + std::size_t{row} * kv.dim;
      for (uint32_t d = 0; d < kv.dim; ++d) to[d] = d < kv.head_dim ? from[d] / std::sqrt(static_cast<float>(kv.head_dim)) : 0.0f;
      const float* basis = kv.basis + std::size_t{head} * kv.dim * coordinates;
      std::vector<float> x(coordinates);
      float most = 0;
      for (uint32_t c = 0; c < coordinates; ++c) {
        for (uint32_t d = 0; d < kv.dim; ++d) x[c] += to[d] * basis[d * coordinates + c];
        most = std::max(most, std::fabs(x[c]));
      }
      const bool known = most > 1e-30f && most < 1e30f;  // not where there is no sketch yet
      for (uint32_t c = 0; c < coordinates; ++c)
        a.projected[std::size_t{row} * coordinates + c] = static_cast<int8_t>(known ? std::lrint(x[c] * (127 / most)) : 0);
      a.projected_scale[row] = known ? most / 127 : 0;
    }
    cpu_kernels().quantize_queries(a.q, rows, kv.dim, a.q8, nullptr, a.q_scale);
  });
}

int attend_near(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  return give(s, {kv.sinks, kv.window, kv.counts, a.q, a.states}, [=] {
    const uint32_t sinks = kv.counts->pages > 0 ? kv.page_tokens : 0;
    for (uint32_t row = 0; row < kv.kv_heads * a.n * kv.group; ++row) {
      const uint32_t head = row / (a.n * kv.group), token = row / kv.group % a.n, rows_before = kv.counts->window + token + 1;
      Softmax sum(kv.dim);
      const auto see = [&](const float* keys, uint32_t room, uint32_t n) {
        for (std::size_t i = 0; i < n; ++i)
          sum.see(static_cast<double>(dot(a.q + std::size_t{row} * kv.dim, keys + i * kv.dim, kv.dim)), true,
                  [&](uint32_t d) { return static_cast<double>(keys[(room + i) * kv.dim + d]); });
      };
      see(kv.sinks + std::size_t{head} * 2 * kv.page_tokens * kv.dim, kv.page_tokens, sinks);
      see(kv.window + std::size_t{head} * 2 * kv.window_rows * kv.dim, kv.window_rows, rows_before);
      sum.put(state_at(kv, a, head, token, 0, row % kv.group));
    }
  });
}

PageShape shape_of(const DeviceKv& kv) { return PageShape::of(kv.head_dim); }

int score_sketch(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  return give(s, {kv.sketch, kv.counts, a.projected, a.projected_scale, a.scores}, [=] {
    const PageShape shape = shape_of(kv);
    const uint32_t stride = a.extents * shape.extent_quads(), extents = (kv.counts->pages + extent_pages - 1) / extent_pages;
    for (uint32_t i = 0; i < kv.kv_heads * a.n; ++i) {
      const std::size_t row = std::size_t{i} * kv.group;
      for (uint32_t e = 0; e < extents; ++e)
        cpu_kernels().score_sketch(shape, kv.group, a.projected + row * kv.sketch_dim, a.projected_scale + row,
                                   kv.sketch + e * kv.sketch_stride + i / a.n * kv.sketch_size, nullptr,
                                   a.scores + row * stride + std::size_t{e} * shape.extent_quads(), stride);
    }
  });
}

int choose(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  if (a.hot.room > 0 && !owns(s->context, {a.hot.held, a.hot.held_counts})) return s->failed = foreign_memory;
  return give(s, {kv.counts, kv.budget, a.scores, a.states, a.lists, a.biases, a.list_counts}, [=] {
    const PageShape shape = shape_of(kv);
    const uint32_t stride = a.extents * shape.extent_quads(), first = shape.page_quads(), end = kv.counts->pages * first;
    const uint32_t turn = kv.counts->turn;
    for (uint32_t i = 0; i < kv.kv_heads * a.n; ++i) {
      const uint32_t head = i / a.n, token = i % a.n;
      uint32_t *its_counts = a.list_counts + 2 * i, *list = a.lists + std::size_t{i} * a.most;
      its_counts[0] = its_counts[1] = 0;
      if (end > first && kv.budget->most > 0) {
        std::vector<float> m(kv.group), l(kv.group), shares(std::size_t{kv.group} * stride);
        for (uint32_t r = 0; r < kv.group; ++r) {
          const float* state = state_at(kv, a, head, token, 0, r);
          m[r] = state[kv.dim] - std::log(2.0f), l[r] = state[kv.dim + 1];
        }
        std::copy_n(a.scores + std::size_t{i} * kv.group * stride, shares.size(), shares.begin());
        cpu_kernels().attention_shares(shares.data() + first, kv.group, stride, end - first, m.data(), l.data());
        const float* its = shares.data() + first;
        const float t = sample_threshold(cpu_kernels(), its, end - first, {kv.budget->least, kv.budget->most, static_cast<double>(kv.budget->variance)});
        std::vector<uint32_t> chosen(end - first + 64);
        chosen.resize(std::min(a.most, cpu_kernels().sample(its, end - first, first, sample_seed(kv.layer, head), t, chosen.data())));
        for (std::size_t c = 0; c < chosen.size(); ++c) {
          list[c] = first + chosen[c];
          a.biases[std::size_t{i} * a.most + c] = its[chosen[c]] < t ? std::log(t / its[chosen[c]]) : 0.0f;
        }
        its_counts[0] = static_cast<uint32_t>(chosen.size());
      }
      if (a.hot.room == 0) continue;
      const auto held = [&](uint32_t half) { return a.hot.held + (std::size_t{half} * kv.kv_heads + head) * a.hot.room; };
      const uint32_t known = kv.counts->hot ? a.hot.held_counts[(1 - turn) * kv.kv_heads + head] : 0, keeps = std::min(its_counts[0], a.hot.room);
      for (uint32_t c = 0; c < keeps; ++c) its_counts[1] += std::binary_search(held(1 - turn), held(1 - turn) + known, list[c]);
      std::copy_n(list, keeps, held(turn));
      a.hot.held_counts[turn * kv.kv_heads + head] = keeps;
    }
  });
}

int attend_chosen(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a) {
  DeviceContext* const context = s->context;
  if (!owns(context, {kv.pages_at, kv.scales_at, a.lists, a.biases, a.list_counts, a.q8, a.q_scale, a.states})) return s->failed = foreign_memory;
  return give(s, Work([=] {
    const PageShape shape = shape_of(kv);
    for (uint32_t i = 0; i < kv.kv_heads * a.n; ++i) {
      const uint32_t head = i / a.n, token = i % a.n;
      std::vector<Softmax> sums(kv.group, Softmax(kv.dim));
      for (uint32_t c = 0; c < a.list_counts[2 * i]; ++c) {
        const uint32_t quad = a.lists[std::size_t{i} * a.most + c], page = quad / shape.page_quads(), e = page / extent_pages, of_page = quad % shape.page_quads();
        const uint64_t pages_at = kv.pages_at[e] + kv.pages_offset + head * PageShape::pages_bytes() + std::size_t{page % extent_pages} * page_bytes;
        const uint64_t scales_at = kv.scales_at[e] + kv.scales_offset + head * shape.scales_bytes() + std::size_t{page % extent_pages} * 4 * kv.page_tokens;
        if (!may_read(context, pages_at) || !may_read(context, scales_at)) return int{foreign_memory};
        const int8_t* keys = reinterpret_cast<const int8_t*>(pages_at) + std::size_t{of_page} * quad_tokens * kv.dim;
        const auto* scales = reinterpret_cast<const uint16_t*>(scales_at);
        const float bias = a.biases[std::size_t{i} * a.most + c];
        for (uint32_t t = 0; t < quad_tokens; ++t) {
          const uint32_t at = of_page * quad_tokens + t;
          const float k_scale = from_bf16(scales[at]), v_scale = from_bf16(scales[kv.page_tokens + at]);
          for (uint32_t r = 0; r < kv.group; ++r) {
            const std::size_t row = std::size_t{i} * kv.group + r;
            int32_t product = 0;
            for (uint32_t d = 0; d < kv.dim; ++d) product += keys[d / 4 * PageShape::key_stride + t * 4 + d % 4] * a.q8[row * kv.dim + d];
            sums[r].see(static_cast<double>(static_cast<float>(product) * k_scale * a.q_scale[row] + bias), bias == 0.0f, [&](uint32_t d) {
              return static_cast<double>(v_scale) * keys[page_bytes / 2 + d * quad_tokens + t];
            });
          }
        }
      }
      for (uint32_t r = 0; r < kv.group; ++r) sums[r].put(state_at(kv, a, head, token, near_parts, r));
    }
    return 0;
  }));
}

int finish_attention(DeviceStream* s, const DeviceKv& kv, const DeviceAttention& a, float* out, float* totals, float* mass) {
  return give(s, {a.states, out, totals, mass}, [=] {
    const uint32_t heads = kv.kv_heads * kv.group;
    for (uint32_t row = 0; row < kv.kv_heads * a.n * kv.group; ++row) {
      const uint32_t head = row / (a.n * kv.group), token = row / kv.group % a.n, of_group = row % kv.group;
      const float *near = state_at(kv, a, head, token, 0, of_group), *chosen = state_at(kv, a, head, token, near_parts, of_group);
      const float most = std::max(near[kv.dim], chosen[kv.dim]), x = relative(near[kv.dim], most), y = relative(chosen[kv.dim], most);
      const float l = x * near[kv.dim + 1] + y * chosen[kv.dim + 1];
      const std::size_t at = std::size_t{token} * heads + head * kv.group + of_group;
      for (uint32_t d = 0; d < kv.head_dim; ++d) out[at * kv.head_dim + d] = (x * near[d] + y * chosen[d]) / l;
      totals[at] = most + std::log(l);
      mass[at] = (x * near[kv.dim + 2] + y * chosen[kv.dim + 2]) / l;
    }
  });
}

// ---- attention of a text that is read ---------------------------------------------------------------------------------------------

// What is handed from the one to the other is the device's own in kernels/cuda; here keys and values are put where halves would be.
uint16_t to_half(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
float from_half(uint16_t x) {
  static const std::vector<float> values = [] {
    std::vector<float> all(65536);
    for (uint32_t i = 0; i < all.size(); ++i) all[i] = static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(i)));
    return all;
  }();
  return values[x];
}

int prepare_reading(DeviceStream* s, const DeviceReading& r, const float* q, const float* k, const float* v) {
  DeviceContext* const context = s->context;
  if (!owns(context, {q, k, v, r.pages_at, r.scales_at, r.sinks, r.centre, r.window_rows, r.keys, r.values, r.q})) return s->failed = foreign_memory;
  return give(s, Work([=] {
    const PageShape shape = PageShape::of(r.head_dim);
    for (uint32_t head = 0; head < r.kv_heads; ++head) {
      std::size_t at = 0;
      const auto put = [&](auto&& key, auto&& value) {
        for (uint32_t d = 0; d < r.dim; ++d) {
          const std::size_t to = (std::size_t{head} * r.room + at) * r.dim + d;
          r.keys[to] = to_half(key(d)), r.values[to] = to_half(value(d));
        }
        ++at;
      };
      const float* sinks = r.sinks + std::size_t{head} * 2 * r.page_tokens * r.dim;
      for (uint32_t i = 0; r.pages > 0 && i < r.page_tokens; ++i)
        put([&](uint32_t d) { return sinks[i * r.dim + d]; }, [&](uint32_t d) { return sinks[(r.page_tokens + i) * r.dim + d]; });
      for (uint32_t page = 1; page < r.pages; ++page) {
        const uint32_t e = page / extent_pages, of_extent = page % extent_pages;
        const uint64_t pages_at = r.pages_at[e] + r.pages_offset + head * PageShape::pages_bytes() + std::size_t{of_extent} * page_bytes;
        const uint64_t scales_at = r.scales_at[e] + r.scales_offset + head * shape.scales_bytes() + std::size_t{of_extent} * 4 * r.page_tokens;
        if (!may_read(context, pages_at) || !may_read(context, scales_at)) return int{foreign_memory};
        const auto* data = reinterpret_cast<const int8_t*>(pages_at);
        const auto* scales = reinterpret_cast<const uint16_t*>(scales_at);
        for (uint32_t t = 0; t < r.page_tokens; ++t) {
          const int8_t* quad = data + std::size_t{t / quad_tokens} * quad_tokens * r.dim;
          put([&](uint32_t d) { return from_bf16(scales[t]) * static_cast<float>(quad[d / 4 * PageShape::key_stride + t % quad_tokens * 4 + d % 4]); },
              [&](uint32_t d) { return from_bf16(scales[r.page_tokens + t]) * static_cast<float>(quad[page_bytes / 2 + d * quad_tokens + t % quad_tokens]); });
        }
      }
      const float* window = r.window_rows + std::size_t{head} * 2 * r.window_room * r.dim;
      for (uint32_t i = 0; i < r.window; ++i)
        put([&](uint32_t d) { return window[i * r.dim + d]; }, [&](uint32_t d) { return window[(r.window_room + i) * r.dim + d]; });
      for (uint32_t i = 0; i < r.n; ++i) {
        const std::size_t from = (std::size_t{i} * r.kv_heads + head) * r.head_dim;
        put([&](uint32_t d) { return d < r.head_dim ? k[from + d] - (r.centre ? r.centre[head * r.dim + d] : 0.0f) : 0.0f; },
            [&](uint32_t d) { return d < r.head_dim ? v[from + d] : 0.0f; });
      }
      for (uint32_t row = 0; row < r.n * r.group; ++row)
        for (uint32_t d = 0; d < r.dim; ++d)
          r.q[(std::size_t{head} * r.q_room + row) * r.dim + d] =
              to_half(d < r.head_dim ? q[((std::size_t{row / r.group} * r.kv_heads + head) * r.group + row % r.group) * r.head_dim + d] : 0.0f);
    }
    return 0;
  }));
}

int attend_reading(DeviceStream* s, const DeviceReading& r, float* out, float* totals) {
  return give(s, {r.keys, r.values, r.q, out, totals}, [=] {
    const uint32_t before = r.pages * r.page_tokens + r.window;
    const float scale = 1 / std::sqrt(static_cast<float>(r.head_dim));
    std::vector<float> keys(std::size_t{before + r.n} * r.dim), values(keys.size()), q(r.dim), scores(before + r.n), o(r.dim);
    for (uint32_t head = 0; head < r.kv_heads; ++head) {
      const std::size_t first = std::size_t{head} * r.room * r.dim;
      for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = from_half(r.keys[first + i]), values[i] = from_half(r.values[first + i]);
      for (uint32_t row = 0; row < r.n * r.group; ++row) {
        const uint32_t token = row / r.group, n = before + token + 1;
        for (uint32_t d = 0; d < r.dim; ++d) q[d] = scale * from_half(r.q[(std::size_t{head} * r.q_room + row) * r.dim + d]);
        float most = -INFINITY, sum = 0;
        for (uint32_t i = 0; i < n; ++i) most = std::max(most, scores[i] = dot(q.data(), keys.data() + std::size_t{i} * r.dim, r.dim));
        std::fill(o.begin(), o.end(), 0.0f);
        for (uint32_t i = 0; i < n; ++i) {
          const float weight = std::exp(scores[i] - most);
          sum += weight;
          for (uint32_t d = 0; d < r.dim; ++d) o[d] += weight * values[std::size_t{i} * r.dim + d];
        }
        const std::size_t at = (std::size_t{token} * r.kv_heads + head) * r.group + row % r.group;
        for (uint32_t d = 0; d < r.head_dim; ++d) out[at * r.head_dim + d] = o[d] / sum;
        totals[at] = most + std::log(sum);
      }
    }
  });
}

}  // namespace

const DeviceKernels* cuda_kernels() {
  static constexpr DeviceKernels table = {count,         error_text,  is_out_of_memory, capability,     open,          close,           describe,
                                          allocate,      release,     allocate_host,    release_host,   share_host,    unshare_host,    see_host,
                                          open_stream,   close_stream, wait,            after,          upload,        download,        begin_graph,
                                          end_graph,     run_graph,   release_graph,    matrix_bytes,   lay_out,       quantize,        matmul,
                                          rms_norm,      rope,        swiglu,           add,            check,         begin_attention, attend_near,
                                          score_sketch,  choose,      attend_chosen,    finish_attention, prepare_reading, attend_reading};
  return &table;
}

test::DeviceDouble& test::device_double() {
  static DeviceDouble d;
  return d;
}

}  // namespace kvasir
