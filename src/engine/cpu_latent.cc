#include "engine/cpu_latent.h"

#include <algorithm>

#include "base/checked.h"
#include "engine/cpu_tasks.h"

namespace kvasir {
namespace {

constexpr uint32_t task_tokens = 256;  // of a head's product; the last block has up to twice that
constexpr uint32_t row_multiple = 8;   // of Kernels::multiply

}  // namespace

CpuLatent::CpuLatent(const Model& model, uint32_t first_layer, ThreadPool* pool,
                     CpuProducts* products)
    : model_(model), config_(model.config()), kernels_(cpu_kernels()), pool_(pool),
      products_(products), workers_(pool->threads()) {
  std::size_t cols = 0, rank = 0, weights = 0, product = 64;
  for (uint32_t l = first_layer; l < config_.depth(); ++l) {
    const LayerConfig& layer = config_.layer(l);
    const LatentWeights& w = model.weights().layers[l].latent;
    const LatentConfig& c = layer.latent;
    for (const Linear* linear : {&w.query_a, &w.query, &w.kv}) products->consider(linear->w);
    for (const ExpertMatrices* m : {&w.keys, &w.values})
      if (m->first.data)
        product = std::max(product, kernels_.matmul_scratch(m->first.type, ProductMethod::many));
    low_width_ = std::max<std::size_t>(low_width_, c.query_rank);
    queries_width_ = std::max(queries_width_, std::size_t{layer.heads} * c.query());
    outputs_width_ = std::max(outputs_width_, std::size_t{layer.o_width()});
    cols = std::max<std::size_t>({cols, c.plain, c.rank});
    rank = std::max<std::size_t>(rank, c.rank);
    if (c.joint) weights = std::max(weights, std::size_t{c.plain} * c.rank);
  }
  widest_ = std::max(low_width_, outputs_width_);
  constexpr std::size_t tokens = 2 * task_tokens;
  for (Worker& w : workers_) {
    w.rows = make_buffer<float>(tokens * cols);
    w.quants = make_buffer<int8_t>(tokens * cols);
    w.scales = make_buffer<float>(tokens * ceil_div(cols, 32));
    w.sums = make_buffer<int16_t>(tokens * ceil_div(cols, 16));
    w.product = make_buffer<std::byte>(product);
    if (weights == 0) continue;
    w.absorbed = make_buffer<float>(tokens * rank);
    w.weights = make_buffer<float>(weights);
  }
}

void CpuLatent::resize(uint32_t n) {
  if (n <= capacity_) return;
  capacity_ = 0;
  low_ = {}, queries_ = {}, outputs_ = {};  // never old and new together
  low_ = make_buffer<float>(n * low_width_);
  queries_ = make_buffer<float>(n * queries_width_);
  outputs_ = make_buffer<float>(n * outputs_width_);
  capacity_ = n;
}

void CpuLatent::project(const StepContext& step, uint32_t layer, const float* h, float* q,
                        float* k) {
  const LayerConfig& c = config_.layer(layer);
  const LatentWeights& w = model_.weights().layers[layer].latent;
  const uint32_t n = step.tokens(), rank = c.latent.query_rank;
  if (rank == 0) {
    products_->multiply(h, n, config_.width, {{&w.query, queries_.get()}, {&w.kv, k}});
  } else {
    products_->multiply(h, n, config_.width, {{&w.query_a, low_.get()}, {&w.kv, k}});
    for_blocks(pool_, step.cancel, 0, n, [&](std::size_t first, uint32_t count, uint32_t) {
      float* low = low_.get() + first * rank;
      kernels_.rms_norm(low, w.query_norm.data(), config_.norm_epsilon, count, rank, low);
    });
    products_->multiply(low_.get(), n, rank, {{&w.query, queries_.get()}});
  }
  by_heads(step, c.heads, n,
           [&](const Task& task, Worker* worker) { absorb(c, w.keys, task, q, worker); });
  make_keys(step, layer, q, k);
}

// The parts of queries and keys with RoPE, and c.
void CpuLatent::make_keys(const StepContext& step, uint32_t layer, float* queries, float* keys) {
  const LayerConfig& c = config_.layer(layer);
  const LatentConfig& latent = c.latent;
  const LatentWeights& w = model_.weights().layers[layer].latent;
  const RopeConfig& rope = config_.ropes[c.rope];
  const uint32_t half = rope.dim / 2, n = step.tokens();
  const std::size_t angles = std::size_t{n} * config_.angles_before(c.rope);
  for_rows(pool_, step.cancel, 0, n, [&](std::size_t t) {
    float *q = queries + t * c.q_width(), *k = keys + t * c.head_dim;
    const float* query = queries_.get() + t * c.heads * latent.query();
    for (uint32_t i = 0; i < c.heads; ++i)
      std::copy_n(query + std::size_t{i} * latent.query() + latent.plain, latent.rotated,
                  q + std::size_t{i} * c.head_dim + latent.rank);
    kernels_.rms_norm(k, w.norm.data(), config_.norm_epsilon, 1, latent.rank, k);
    const float *cos = step.cos + angles + t * half, *sin = step.sin + angles + t * half;
    kernels_.rope(q + latent.rank, c.heads, c.head_dim, rope.dim, cos, sin, rope.neox);
    kernels_.rope(k + latent.rank, 1, c.head_dim, rope.dim, cos, sin, rope.neox);
  });
}

// q = W_kh^T q_h of a block of tokens.
void CpuLatent::absorb(const LayerConfig& c, const ExpertMatrices& keys, const Task& task, float* q,
                       Worker* w) const {
  const LatentConfig& latent = c.latent;
  const std::size_t stride = std::size_t{c.heads} * latent.query();
  const float* from =
      queries_.get() + task.first * stride + std::size_t{task.head} * latent.query();
  for (uint32_t i = 0; i < task.count; ++i)
    std::copy_n(from + i * stride, latent.plain, w->rows.get() + std::size_t{i} * latent.plain);
  float* to = q + std::size_t{task.first} * c.q_width() + std::size_t{task.head} * c.head_dim;
  const WeightView matrix = keys.of(task.head);
  if (!latent.joint) return multiply(matrix, task, to, c.q_width(), w);

  if (w->unpacked != matrix.data) {
    for (uint32_t r = 0; r < latent.plain; ++r)
      kernels_.dequantize_row(matrix, r, w->weights.get() + std::size_t{r} * latent.rank);
    w->unpacked = matrix.data;
  }
  const auto rows = static_cast<uint32_t>(round_up(task.count, row_multiple));
  std::fill_n(w->rows.get() + std::size_t{task.count} * latent.plain,
              std::size_t{rows - task.count} * latent.plain, 0.0f);
  kernels_.multiply(w->rows.get(), latent.plain, 1, rows, w->weights.get(), latent.rank,
                    latent.rank, latent.plain, w->absorbed.get(), latent.rank);
  for (uint32_t i = 0; i < task.count; ++i)
    std::copy_n(w->absorbed.get() + std::size_t{i} * latent.rank, latent.rank,
                to + std::size_t{i} * c.q_width());
}

const float* CpuLatent::outputs(const StepContext& step, uint32_t layer, const float* attended,
                                uint32_t n) {
  const LayerConfig& c = config_.layer(layer);
  const ExpertMatrices& values = model_.weights().layers[layer].latent.values;
  const uint32_t rank = c.latent.rank;
  by_heads(step, c.heads, n, [&](const Task& task, Worker* w) {
    const float* from =
        attended + std::size_t{task.first} * c.q_width() + std::size_t{task.head} * c.head_dim;
    for (uint32_t i = 0; i < task.count; ++i)
      std::copy_n(from + std::size_t{i} * c.q_width(), rank, w->rows.get() + std::size_t{i} * rank);
    float* to = outputs_.get() + std::size_t{task.first} * c.o_width() +
                std::size_t{task.head} * c.latent.values;
    multiply(values.of(task.head), task, to, c.o_width(), w);
  });
  return outputs_.get();
}

// y[i * stride + r] = W x_i of a block of tokens; x: Worker::rows.
void CpuLatent::multiply(const WeightView& weights, const Task& task, float* y, std::size_t stride,
                         Worker* w) const {
  if (tensor_type_info(weights.type)->block_elements > 1)
    kernels_.quantize(w->rows.get(), task.count, weights.cols, w->quants.get(), w->scales.get(),
                      w->sums.get());
  const Activations x{task.count,      weights.cols,  w->rows.get(), w->quants.get(),
                      w->scales.get(), w->sums.get(), task.method};
  kernels_.matmul(weights, x, y, stride, 0, weights.rows, w->product.get());
}

// f(task, worker) for all heads and blocks of tokens, in parallel. Blocks of a head are neighbours,
// so that few threads unpack its matrix.
template <class F>
void CpuLatent::by_heads(const StepContext& step, uint32_t heads, uint32_t n, F&& f) {
  const uint32_t blocks = std::max(1u, n / task_tokens);  // the last one takes what is left
  const ProductMethod method = step.step.open ? ProductMethod::few : method_of(n);
  pool_->run(heads * blocks, [&](uint32_t i, uint32_t worker) {
    if (step.cancel.fired()) return;
    const uint32_t block = i % blocks, first = block * task_tokens;
    f(Task{i / blocks, first, block + 1 == blocks ? n - first : task_tokens, method},
      &workers_[worker]);
  });
}

}  // namespace kvasir
