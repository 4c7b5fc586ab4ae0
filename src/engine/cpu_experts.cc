#include "engine/cpu_experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/checked.h"
#include "base/magnitude.h"
#include "engine/cpu_tasks.h"

namespace kvasir {
namespace {

constexpr uint32_t min_inputs = 64, max_inputs = 512;  // of a task whose rows are cut already

// Measured on a Xeon of the fourth generation with Q4_K and Q6_K: the tokens an expert up to which
// the method `few` is faster, and what unpacking weights for `many` costs, in inputs.
constexpr uint64_t few_tokens = 4;
constexpr uint64_t unpacking = 12;

bool is_quantized(const WeightView& w) {
  return w.data && tensor_type_info(w.type)->block_elements > 1;
}

// What the layers of a model need at most.
struct Largest {
  explicit Largest(const ModelConfig& c) {
    for (const LayerConfig& layer : c.layer_configs) {
      const ExpertConfig& e = layer.experts;
      count = std::max<std::size_t>(count, e.count);
      used = std::max<std::size_t>(used, e.used);
      inner = std::max(inner, std::size_t{e.used} * e.width + e.shared_width);
    }
  }
  std::size_t count = 0, used = 0;
  std::size_t inner = 0;  // values of a token
};

}  // namespace

CpuExperts::CpuExperts(const ModelConfig& model, const Weights& weights, uint32_t first_layer,
                       ThreadPool* pool)
    : model_(model), all_weights_(weights), kernels_(cpu_kernels()), pool_(pool),
      width_(model.width) {
  const auto consider = [&](const WeightView& w) {
    if (!w.data) return;
    const std::size_t size = kernels_.matmul_scratch(w.type, ProductMethod::many);
    scratch_size_ = std::max<std::size_t>(scratch_size_, round_up(size, 64));
  };
  for (std::size_t l = first_layer; l < weights.layers.size(); ++l) {
    const ExpertWeights& e = weights.layers[l].experts;
    for (const ExpertMatrices* m : {&e.gate, &e.up, &e.down}) consider(m->first);
    for (const Linear* m : {&e.router, &e.shared_gate, &e.shared_up, &e.shared_down})
      consider(m->w);
  }
  scratch_.resize(scratch_size_ * pool->threads());
}

bool CpuExperts::run(uint32_t layer, const Input& input, const CancelLatch& cancel, float* out) {
  layer_ = &model_.layer(layer);
  config_ = &layer_->experts;
  weights_ = &all_weights_.layers[layer].experts;
  cancel_ = &cancel, n_ = input.n, open_ = input.open, good_ = true;
  has_shared_ = input.shared && config_->shared_width > 0;
  resize(n_);

  route(input.routed);
  if (!good_ || cancel.fired()) return good_;
  group(input.x);
  products_.clear();
  for (const Group& g : groups_) products_.push_back({g.up.w.rows, width_, g.input.n});
  by_products([&](const Task& task, uint32_t worker) { inner_task(task, worker, input.limit); });
  products_.clear();
  for (const Group& g : groups_) products_.push_back({width_, g.down.w.cols, g.input.n});
  by_products([&](const Task& task, uint32_t worker) { down_task(task, worker); });
  for_blocks(pool_, *cancel_, 0, n_,
             [&](std::size_t first, uint32_t count, uint32_t) { combine(first, count, out); });
  return good_;
}

// ---- routing

// The experts of each token, their weights and that of the shared expert.
void CpuExperts::route(const float* x) {
  const Matrix router = matrix_of(weights_->router);
  if (is_quantized(router.w)) quantize(x);
  Activations input = rows_at(x, x_quants_, 0, n_, width_);
  input.method = method();
  products_.assign(1, {config_->count, width_, n_});
  by_products([&](const Task& task, uint32_t worker) {
    multiply(router, input, task, logits_.get(), worker);
  });
  for_blocks(pool_, *cancel_, 0, n_, [&](std::size_t first, uint32_t count, uint32_t worker) {
    choose(first, count, scores_.get() + std::size_t{2} * config_->count * worker);
    if (has_shared_) weigh_shared(first, count, x, worker);
  });
}

void CpuExperts::choose(std::size_t first, uint32_t count, float* scores) {
  const std::size_t experts = config_->count;
  float* logits = logits_.get() + first * experts;
  if (!all_finite({logits, count * experts})) {
    good_.store(false, std::memory_order_relaxed);
    return;
  }
  const float* bias = weights_->selection_bias.empty() ? nullptr : weights_->selection_bias.data();
  for (std::size_t t = first; t < first + count; ++t, logits += experts)
    choose_experts(*config_, bias, logits, scores, chosen_.get() + t * config_->used);
}

// 1, or the sigmoid of the gate that it has.
void CpuExperts::weigh_shared(std::size_t first, uint32_t count, const float* x, uint32_t worker) {
  float* const weights = shared_.get() + first;
  std::fill_n(weights, count, 1.0f);
  if (weights_->shared_router.empty()) return;
  const WeightView row{reinterpret_cast<const std::byte*>(weights_->shared_router.data()),
                       TensorType::f32, 1, width_, width_ * sizeof(float)};
  Activations input = rows_at(x, x_quants_, first, count, width_);
  input.method = ProductMethod::few;
  kernels_.matmul(row, input, weights, 1, 0, 1, scratch_.data() + worker * scratch_size_);
  for (uint32_t i = 0; i < count; ++i) weights[i] = 1 / (1 + std::exp(-weights[i]));
}

// ---- grouping

// Fills groups_: of each expert its matrices, and the inputs of its tokens.
void CpuExperts::group(const float* x) {
  const ExpertWeights& w = *weights_;
  for (const WeightView& each : {w.gate.first, w.up.first, w.shared_gate.w, w.shared_up.w})
    if (is_quantized(each)) {
      quantize(x);
      break;
    }
  place();
  const bool gathers = n_ > 1 || config_->weighs_input;
  if (gathers) gather(x);

  groups_.clear();
  const std::size_t used = std::size_t{n_} * config_->used;
  const Activations all = rows_at(x, x_quants_, 0, n_, width_);
  if (has_shared_) {
    Group& g = groups_.emplace_back(
        Group{matrix_of(w.shared_gate), matrix_of(w.shared_up), matrix_of(w.shared_down), all});
    g.input.method = method();
    g.first = used, g.inner = used * config_->width;
  }
  const ProductMethod method =
      open_ || used <= few_tokens * config_->count ? ProductMethod::few : ProductMethod::many;
  for (uint32_t e = 0, begin = 0; e < config_->count; begin = ends_[e++]) {
    if (ends_[e] == begin) continue;
    Group& g = groups_.emplace_back(
        Group{matrix_of(w.gate, e), matrix_of(w.up, e), matrix_of(w.down, e), all});
    if (gathers) g.input = rows_at(rows_.get(), rows_quants_, begin, ends_[e] - begin, width_);
    g.input.method = method;
    g.first = begin, g.inner = std::size_t{begin} * config_->width;
  }
}

// Gives each chosen expert of each token a row: those of an expert follow one another, in the order
// of the tokens.
void CpuExperts::place() {
  const std::size_t used = std::size_t{n_} * config_->used;
  std::fill_n(ends_.get(), config_->count, 0u);
  for (std::size_t i = 0; i < used; ++i) ++ends_[chosen_[i].expert];
  uint32_t begin = 0;
  for (uint32_t e = 0; e < config_->count; ++e) {
    const uint32_t tokens = ends_[e];
    ends_[e] = begin;
    begin += tokens;
  }
  for (std::size_t i = 0; i < used; ++i) slots_[i] = ends_[chosen_[i].expert]++;
}

// Copies the inputs of the chosen experts to their rows.
void CpuExperts::gather(const float* x) {
  const bool quants = is_quantized(weights_->gate.first) || is_quantized(weights_->up.first);
  const bool floats =
      (layer_->gated && !is_quantized(weights_->gate.first)) || !is_quantized(weights_->up.first);
  const std::size_t blocks = width_ / 32, halves = width_ / 16;
  for_blocks(pool_, *cancel_, 0, n_, [&](std::size_t first, uint32_t count, uint32_t) {
    for (std::size_t i = first * config_->used; i < (first + count) * config_->used; ++i) {
      const std::size_t from = i / config_->used, to = slots_[i];
      const float weight = config_->weighs_input ? chosen_[i].weight : 1.0f;
      if (floats)
        for (uint32_t c = 0; c < width_; ++c)
          rows_[to * width_ + c] = x[from * width_ + c] * weight;
      if (!quants) continue;
      std::memcpy(&rows_quants_.q[to * width_], &x_quants_.q[from * width_], width_);
      std::copy_n(&x_quants_.sums[from * halves], halves, &rows_quants_.sums[to * halves]);
      for (std::size_t b = 0; b < blocks; ++b)
        rows_quants_.scale[to * blocks + b] = x_quants_.scale[from * blocks + b] * weight;
    }
  });
}

// ---- products

// Rows of f(W_gate x) * W_up x, and their quants.
void CpuExperts::inner_task(const Task& task, uint32_t worker, float limit) {
  const Group& g = groups_[task.product];
  const std::size_t cols = g.up.w.rows;
  float* const inner = inner_.get() + g.inner;
  float* const up = layer_->gated ? up_.get() + g.inner : inner;
  if (layer_->gated) multiply(g.gate, g.input, task, inner, worker);
  multiply(g.up, g.input, task, up, worker);
  const uint32_t n = task.end - task.row;
  for (std::size_t t = task.first; t < task.first + task.count; ++t) {
    const std::size_t at = t * cols + task.row;
    kernels_.activate(layer_->activation, inner + at, layer_->gated ? up + at : nullptr, n);
    if (!all_below({inner + at, n}, limit)) good_.store(false, std::memory_order_relaxed);
    if (!is_quantized(g.down.w)) continue;
    const std::size_t q = g.inner + at;
    kernels_.quantize(inner + at, 1, n, &inner_quants_.q[q], &inner_quants_.scale[q / 32],
                      &inner_quants_.sums[q / 16]);
  }
}

void CpuExperts::down_task(const Task& task, uint32_t worker) {
  const Group& g = groups_[task.product];
  Activations input = rows_at(inner_.get() + g.inner, inner_quants_, 0, g.input.n, g.down.w.cols);
  input.q += g.inner, input.scale += g.inner / 32, input.sums += g.inner / 16;
  input.method = g.input.method;
  multiply(g.down, input, task, rows_.get() + g.first * width_, worker);
}

// The task's rows of y = scale W x + bias. y: [inputs][rows].
void CpuExperts::multiply(const Matrix& m, const Activations& x, const Task& task, float* y,
                          uint32_t worker) {
  y += std::size_t{task.first} * m.w.rows;
  kernels_.matmul(m.w, rows_of(x, task.first, task.count), y, m.w.rows, task.row, task.end,
                  scratch_.data() + worker * scratch_size_);
  if (!m.bias && m.scale == 1) return;
  for (uint32_t i = 0; i < task.count; ++i, y += m.w.rows)
    for (uint32_t r = task.row; r < task.end; ++r)
      y[r] = y[r] * m.scale + (m.bias ? m.bias[r] : 0.0f);
}

// out = the weighted sum of the experts' outputs, for tokens [first, first + count).
void CpuExperts::combine(std::size_t first, uint32_t count, float* out) const {
  const auto add = [&](float weight, std::size_t row, float* __restrict y) {
    const float* __restrict x = rows_.get() + row * width_;
    for (uint32_t i = 0; i < width_; ++i) y[i] += weight * x[i];
  };
  const std::size_t used = config_->used;
  for (std::size_t t = first; t < first + count; ++t) {
    float* y = out + t * width_;
    std::fill_n(y, width_, 0.0f);
    for (std::size_t i = t * used; i < (t + 1) * used; ++i)
      add(config_->weighs_input ? 1.0f : chosen_[i].weight, slots_[i], y);
    if (has_shared_) add(shared_[t], n_ * used + t, y);
  }
}

// ---- loops

// f(task, worker) over all products_, cut into tasks of about the same work, in parallel.
template <class F>
void CpuExperts::by_products(F&& f) {
  uint64_t total = 0;
  for (const Product& p : products_) total += (p.inputs + unpacking) * p.rows * p.cols;
  tasks_.clear();
  for (uint32_t i = 0; i < products_.size(); ++i)
    cut(products_[i], i, total / (uint64_t{pool_->threads()} * tasks_per_thread));
  pool_->run(static_cast<uint32_t>(tasks_.size()), [&](uint32_t i, uint32_t worker) {
    if (!cancel_->fired()) f(tasks_[i], worker);
  });
}

// Appends the tasks of a product. even: the work of a task.
void CpuExperts::cut(const Product& p, uint32_t number, uint64_t even) {
  const uint64_t step = std::max(kernels_.matmul_rows, 32u);  // of rows: whole blocks of quants
  const uint64_t some = std::clamp<uint64_t>(even / (step * p.cols), min_inputs, max_inputs);
  const uint64_t inputs = ceil_div(p.inputs, ceil_div(p.inputs, some));
  const uint64_t most = std::max<uint64_t>(1, task_products / (inputs * p.cols));
  const uint64_t share = even / ((inputs + unpacking) * p.cols);
  const uint64_t rows = round_up(std::clamp<uint64_t>(share, 1, most), step);
  for (uint64_t row = 0; row < p.rows; row += rows)
    for (uint64_t first = 0; first < p.inputs; first += inputs) {
      const uint64_t end = std::min<uint64_t>(p.rows, row + rows);
      const uint64_t count = std::min<uint64_t>(p.inputs - first, inputs);
      tasks_.push_back({number, static_cast<uint32_t>(row), static_cast<uint32_t>(end),
                        static_cast<uint32_t>(first), static_cast<uint32_t>(count)});
    }
}

void CpuExperts::quantize(const float* x) {
  for_blocks(pool_, *cancel_, 0, n_, [&](std::size_t first, uint32_t count, uint32_t) {
    const std::size_t at = first * width_;
    kernels_.quantize(x + at, count, width_, &x_quants_.q[at], &x_quants_.scale[at / 32],
                      &x_quants_.sums[at / 16]);
  });
}

// ---- memory

CpuExperts::Matrix CpuExperts::matrix_of(const Linear& linear) {
  return {linear.w, linear.bias.empty() ? nullptr : linear.bias.data()};
}

CpuExperts::Matrix CpuExperts::matrix_of(const ExpertMatrices& m, uint32_t expert) {
  const WeightView w = m.of(expert);
  return {w, m.biases.empty() ? nullptr : m.biases.data() + std::size_t{expert} * w.rows,
          m.scales.empty() ? 1.0f : m.scales[expert]};
}

// Rows [at, at + n) of x and of its quants.
Activations CpuExperts::rows_at(const float* x, const Quants& quants, std::size_t at, uint32_t n,
                                uint32_t cols) {
  return rows_of({0, cols, x, quants.q.get(), quants.scale.get(), quants.sums.get()}, at, n);
}

void CpuExperts::Quants::resize(std::size_t values) {
  q = {}, scale = {}, sums = {};
  q = make_buffer<int8_t>(values);
  scale = make_buffer<float>(ceil_div(values, 32));
  sums = make_buffer<int16_t>(ceil_div(values, 16));
}

void CpuExperts::resize(uint32_t n) {
  if (n <= capacity_) return;
  const Largest largest(model_);
  const auto grow = [](auto& array, std::size_t size) {
    array = {};  // never old and new together
    array = make_buffer<std::remove_reference_t<decltype(array[0])>>(size);
  };
  capacity_ = 0;
  const std::size_t used = n * largest.used;
  grow(logits_, n * largest.count);
  grow(scores_, 2 * largest.count * pool_->threads());
  grow(chosen_, used);
  grow(shared_, n);
  grow(slots_, used);
  grow(ends_, largest.count);
  grow(rows_, (used + n) * width_);
  grow(inner_, n * largest.inner);
  grow(up_, n * largest.inner);
  x_quants_.resize(std::size_t{n} * width_);
  rows_quants_.resize(used * width_);
  inner_quants_.resize(n * largest.inner);
  capacity_ = n;
}

}  // namespace kvasir
