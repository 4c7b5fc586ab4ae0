#include "model/forward.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"

namespace kvasir {

constexpr uint32_t tasks_per_thread = 4;  // of a matrix product: threads that start late still find work
constexpr uint32_t rows_together = 16;    // activations normalised or rotated by one task

Forward::Forward(std::shared_ptr<const Model> model, ThreadPool* pool)
    : model_(std::move(model)),
      kernels_(cpu_kernels()),
      pool_(pool),
      attention_(model_->config(), model_->store_shape().page, kernels_, pool) {
  const auto consider = [&](const Linear& linear) {
    scratch_size_ = std::max(scratch_size_, round_up(kernels_.matmul_scratch(linear.w.type, linear.w.cols), 64));
  };
  for (const LayerWeights& w : model_->weights().layers)
    for (const Linear* linear : {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down}) consider(*linear);
  consider(model_->weights().output);
  scratch_.resize(scratch_size_ * pool->threads());
}

Status Forward::run(const ForwardStep& step, KvStore* store) {
  const ModelConfig& c = model_->config();
  const Weights& weights = model_->weights();
  const auto n = static_cast<uint32_t>(step.tokens.size());
  const CancelLatch cancel(step.cancel);
  cancel_ = &cancel;
  resize(n);
  if (Status s = store->prepare(n); !s.ok()) return s;
  model_->rope().angles(store->tokens(), n, cos_.data(), sin_.data());

  for (uint32_t i = 0; i < n; ++i)
    kernels_.dequantize_row(weights.embedding, static_cast<uint32_t>(step.tokens[i]), x_.data() + std::size_t{i} * c.width);

  for (uint32_t l = 0; l < c.layers; ++l) {
    const LayerWeights& w = weights.layers[l];

    norm(x_.data(), w.attention_norm, n, h_.data());
    multiply(h_.data(), n, c.width, {{&w.q, q_.data()}, {&w.k, k_.data()}, {&w.v, v_.data()}});
    rotate(q_.data(), n, c.heads, w.q_norm);
    rotate(k_.data(), n, c.kv_heads, w.k_norm);
    store->write(l, n, k_.data(), v_.data());
    const Selector* selector = step.plan.is_dense(l) ? nullptr : step.selector;
    if (Status s = attention_.run(l, n, q_.data(), *store, selector, step.plan, cancel, a_.data()); !s.ok()) return s;
    if (step.probe)
      if (Status s = probe(step, l, *store); !s.ok()) return s;
    multiply(a_.data(), n, c.q_width(), {{&w.o, h_.data()}});
    add(x_.data(), h_.data(), n);

    norm(x_.data(), w.ffn_norm, n, h_.data());
    multiply(h_.data(), n, c.width, {{&w.gate, gate_.data()}, {&w.up, up_.data()}});
    gate(gate_.data(), up_.data(), n);
    multiply(gate_.data(), n, c.feed_forward, {{&w.down, h_.data()}});
    add(x_.data(), h_.data(), n);

    if (cancel.fired()) return Status::error(Code::cancelled, "cancelled; the timeline is as it was before the chunk");
  }
  write_logits(step, n);
  if (cancel.fired()) return Status::error(Code::cancelled, "cancelled; the timeline is as it was before the chunk");
  store->commit(n, kernels_, pool_);
  return {};
}

Status Forward::probe(const ForwardStep& step, uint32_t layer, const KvStore& store) {
  const auto n = static_cast<uint32_t>(step.tokens.size());
  double difference = 0, norm = 0;
  if (Status s = attention_.probe(layer, n, std::min(n, step.probe_tokens), q_.data(), store, *step.probe, step.plan, a_.data(),
                                  &difference, &norm);
      !s.ok())
    return s;
  step.errors[layer] = norm > 0 ? static_cast<float>(std::sqrt(difference / norm)) : 0.0f;
  return {};
}

void Forward::write_logits(const ForwardStep& step, uint32_t n) {
  if (step.want == ForwardStep::Logits::none) return;
  const ModelConfig& c = model_->config();
  const uint32_t first = step.want == ForwardStep::Logits::last ? n - 1 : 0;
  norm(x_.data() + std::size_t{first} * c.width, model_->weights().output_norm, n - first, h_.data());
  multiply(h_.data(), n - first, c.width, {{&model_->weights().output, step.logits}});
}

// f(first, count) over blocks of the step's rows, in parallel.
template <class F>
void Forward::by_rows(uint32_t n, F&& f) {
  pool_->run(static_cast<uint32_t>(ceil_div(n, rows_together)), [&](uint32_t task, uint32_t) {
    const uint32_t first = task * rows_together;
    f(std::size_t{first}, std::min(rows_together, n - first));
  });
}

void Forward::norm(const float* x, const Array<float>& weight, uint32_t n, float* y) {
  const auto cols = static_cast<uint32_t>(weight.size());
  by_rows(n, [&](std::size_t first, uint32_t count) {
    kernels_.rms_norm(x + first * cols, weight.data(), model_->config().rms_epsilon, count, cols, y + first * cols);
  });
}

// The norm of each head where the architecture has one (Qwen 3), then RoPE.
void Forward::rotate(float* x, uint32_t n, uint32_t heads, const Array<float>& head_norm) {
  const ModelConfig& c = model_->config();
  const uint32_t half = model_->rope().dim() / 2;
  by_rows(n, [&](std::size_t first, uint32_t count) {
    for (std::size_t t = first; t < first + count; ++t) {
      float* row = x + t * heads * c.head_dim;
      if (!head_norm.empty()) kernels_.rms_norm(row, head_norm.data(), c.rms_epsilon, heads, c.head_dim, row);
      kernels_.rope(row, heads, c.head_dim, 2 * half, cos_.data() + t * half, sin_.data() + t * half, c.rope.neox);
    }
  });
}

void Forward::add(float* x, const float* y, uint32_t n) {
  const std::size_t cols = model_->config().width;
  by_rows(n, [&](std::size_t first, uint32_t count) { kernels_.add(x + first * cols, y + first * cols, count * cols); });
}

void Forward::gate(float* gate, const float* up, uint32_t n) {
  const std::size_t cols = model_->config().feed_forward;
  by_rows(n, [&](std::size_t first, uint32_t count) { kernels_.swiglu(gate + first * cols, up + first * cols, count * cols); });
}

void Forward::quantize(const float* x, uint32_t n, uint32_t cols) {
  by_rows(n, [&](std::size_t first, uint32_t count) {
    kernels_.quantize(x + first * cols, count, cols, quants_.data() + first * cols, scales_.data() + first * (cols / 32),
                      sums_.data() + first * (cols / 16));
  });
}

// y = W x + b for matrices that share their input, in one parallel loop over all their rows.
void Forward::multiply(const float* x, uint32_t n, uint32_t cols, std::initializer_list<Product> products) {
  const auto is_float = [](const Product& p) { return tensor_type_info(p.linear->w.type)->block_elements == 1; };
  if (!std::all_of(products.begin(), products.end(), is_float)) quantize(x, n, cols);
  const Activations input{n, cols, x, quants_.data(), scales_.data(), sums_.data()};

  uint64_t rows = 0;
  for (const Product& p : products) rows += p.linear->w.rows;
  const auto per_task = static_cast<uint32_t>(
      round_up(ceil_div(rows, uint64_t{pool_->threads()} * tasks_per_thread), kernels_.matmul_rows));
  uint32_t tasks = 0;
  for (const Product& p : products) tasks += static_cast<uint32_t>(ceil_div(p.linear->w.rows, per_task));

  pool_->run(tasks, [&](uint32_t task, uint32_t worker) {
    if (cancel_->fired()) return;
    const Product* p = products.begin();
    for (uint32_t own; task >= (own = static_cast<uint32_t>(ceil_div(p->linear->w.rows, per_task))); ++p) task -= own;
    const WeightView& w = p->linear->w;
    const uint32_t begin = task * per_task, end = std::min(w.rows, begin + per_task);
    kernels_.matmul(w, input, p->y, w.rows, begin, end, scratch_.data() + worker * scratch_size_);
    if (p->linear->bias.empty()) return;
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t r = begin; r < end; ++r) p->y[std::size_t{i} * w.rows + r] += p->linear->bias[r];
  });
}

void Forward::resize(uint32_t n) {
  if (n <= capacity_) return;
  const ModelConfig& c = model_->config();
  const std::size_t widest = std::max({c.width, c.q_width(), c.feed_forward});
  const auto grow = [](auto& array, std::size_t size) { array = {}, array.resize(size); };  // never old and new together
  capacity_ = 0;
  grow(x_, std::size_t{n} * c.width);
  grow(h_, std::size_t{n} * c.width);
  grow(q_, std::size_t{n} * c.q_width());
  grow(k_, std::size_t{n} * c.kv_width());
  grow(v_, std::size_t{n} * c.kv_width());
  grow(a_, std::size_t{n} * c.q_width());
  grow(gate_, std::size_t{n} * c.feed_forward);
  grow(up_, std::size_t{n} * c.feed_forward);
  grow(cos_, std::size_t{n} * (model_->rope().dim() / 2));
  grow(sin_, std::size_t{n} * (model_->rope().dim() / 2));
  grow(quants_, n * widest);
  grow(scales_, n * ceil_div(widest, 32));
  grow(sums_, n * ceil_div(widest, 16));
  capacity_ = n;
}

}  // namespace kvasir
