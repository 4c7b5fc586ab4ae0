#include "model/forward.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>

#include "base/checked.h"
#include "base/magnitude.h"

namespace kvasir {

constexpr uint32_t tasks_per_thread = 4;  // of a matrix product: threads that start late still find work
constexpr uint32_t rows_together = 16;    // activations normalised or rotated by one task

// Between two looks at the cancel token: a task multiplies at most so much (or the rows that are computed together), which takes
// 0.2 ms with AVX-512, 0.6 ms with AVX2 and 20 ms in scalar code, measured on Zen 5 with Q4_0.
constexpr uint64_t task_products = uint64_t{1} << 25;
constexpr uint32_t task_inputs = 512;  // a block of inputs; more than eight, as matmul then rounds the same whatever the block

constexpr float too_large = 1e30f;  // keys, values and residuals below it keep their sums and differences finite

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

static Status cancelled() { return Status::error(Code::cancelled, "cancelled; the timeline is as it was before the chunk"); }

static Status not_a_number(const std::string& where) {
  return Status::error(Code::corrupt, "%s made a number that is not finite: the model's file, or the cache that was loaded, is damaged; "
                       "compare it with its source or fetch it again; the timeline is as it was before the chunk", where.c_str());
}

Status Forward::run(const ForwardStep& step, KvStore* store) {
  const ModelConfig& c = model_->config();
  const Weights& weights = model_->weights();
  const auto n = static_cast<uint32_t>(step.tokens.size());
  const CancelLatch cancel(step.cancel);
  cancel_ = &cancel;
  resize(n);
  if (Status s = store->prepare(n); !s.ok()) return s;
  if (step.queries) step.queries->prepare();
  model_->rope().angles(store->tokens(), n, cos_.get(), sin_.get());

  for (uint32_t i = 0; i < n; ++i)
    kernels_.dequantize_row(weights.embedding, static_cast<uint32_t>(step.tokens[i]), x_.get() + std::size_t{i} * c.width);

  for (uint32_t l = 0; l < c.layers; ++l) {
    const LayerWeights& w = weights.layers[l];

    norm(x_.get(), w.attention_norm, n, h_.get());
    multiply(h_.get(), n, c.width, {{&w.q, q_.get()}, {&w.k, k_.get()}, {&w.v, v_.get()}});
    rotate(q_.get(), n, c.heads, w.q_norm);
    rotate(k_.get(), n, c.kv_heads, w.k_norm);
    store->write(l, n, k_.get(), v_.get());
    store->observe(l, n, q_.get(), c.heads);
    const Selector* selector = step.plan.is_dense(l) ? nullptr : step.selector;
    if (Status s = attention_.run(l, n, q_.get(), *store, selector, step.plan, step.memory, cancel, a_.get(), totals_.get()); !s.ok()) return s;
    if (step.plan.by_blocks && step.plan.is_filter(l))
      if (Status s = attention_.filter_blocks(l, n, q_.get(), *store, *step.selector, step.plan, cancel); !s.ok()) return s;
    if (step.memory && step.plan.is_filter(l))
      attention_.filter(l, n, q_.get(), totals_.get(), *store, step.queries, *step.selector, step.plan, cancel, step.memory);
    if (step.queries) step.queries->write(l, n, q_.get(), totals_.get());
    if (step.asked) step.asked->write(kernels_, l, step.asked_at, n, q_.get());
    if (step.probe)
      if (Status s = probe(step, l, *store); !s.ok()) return s;
    if (!selector || step.plan.strategy->has(StrategyInfo::reads_keys)) store->let_go(l);
    multiply(a_.get(), n, c.q_width(), {{&w.o, h_.get()}});
    add(x_.get(), h_.get(), n);

    norm(x_.get(), w.ffn_norm, n, h_.get());
    multiply(h_.get(), n, c.width, {{&w.gate, gate_.get()}, {&w.up, up_.get()}});
    gate(gate_.get(), up_.get(), n);
    multiply(gate_.get(), n, c.feed_forward, {{&w.down, h_.get()}});
    add(x_.get(), h_.get(), n);

    if (cancel.fired()) return cancelled();
    if (Status s = check_layer(l, n); !s.ok()) return s;
  }
  if (Status s = write_logits(step, n); !s.ok()) return s;
  if (cancel.fired()) return cancelled();
  if (step.queries) step.queries->commit(store->tokens(), n);
  const bool was_centred = !store->centre().empty();
  store->commit(n, kernels_, pool_);
  if (step.queries && !was_centred && !store->centre().empty()) step.queries->centre(store->centre(), c.kv_heads, store->shape().page.dim);
  return {};
}

Status Forward::probe(const ForwardStep& step, uint32_t layer, const KvStore& store) {
  const auto n = static_cast<uint32_t>(step.tokens.size());
  double difference = 0, norm = 0;
  if (Status s = attention_.probe(layer, n, std::min(n, step.probe_tokens), q_.get(), store, *step.probe, step.plan, a_.get(),
                                  &difference, &norm);
      !s.ok())
    return s;
  // Where nearly nothing comes out of a layer, nearly anything is a large error: it has to stay a number.
  step.errors[layer] = norm > 0 ? static_cast<float>(std::min(std::sqrt(difference / norm), 1e6)) : 0.0f;
  return {};
}

// What is not finite would lie in a saved timeline for good, or be lost where a product rounds its inputs and leave nonsense.
Status Forward::check_layer(uint32_t layer, uint32_t n) {
  const ModelConfig& c = model_->config();
  std::atomic<bool> good{true};
  by_rows(n, [&](std::size_t first, uint32_t count) {
    const auto check = [&](const Buffer<float>& x, std::size_t cols) {
      if (!all_below({x.get() + first * cols, count * cols}, too_large)) good.store(false, std::memory_order_relaxed);
    };
    check(q_, c.q_width());
    check(k_, c.kv_width());
    check(v_, c.kv_width());
    check(a_, c.q_width());
    check(gate_, c.feed_forward);
    check(x_, c.width);
  });
  return good ? Status() : not_a_number("layer " + std::to_string(layer));
}

Status Forward::write_logits(const ForwardStep& step, uint32_t n) {
  if (step.want == ForwardStep::Logits::none) return {};
  const ModelConfig& c = model_->config();
  const uint32_t first = step.want == ForwardStep::Logits::last ? n - 1 : 0;
  norm(x_.get() + std::size_t{first} * c.width, model_->weights().output_norm, n - first, h_.get());
  multiply(h_.get(), n - first, c.width, {{&model_->weights().output, step.logits}});
  if (cancel_->fired() || all_finite({step.logits, std::size_t{n - first} * c.vocabulary})) return {};
  return not_a_number("the output");
}

// f(first, count) over blocks of the step's rows, in parallel.
template <class F>
void Forward::by_rows(uint32_t n, F&& f) {
  pool_->run(static_cast<uint32_t>(ceil_div(n, rows_together)), [&](uint32_t task, uint32_t) {
    if (cancel_->fired()) return;
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
      kernels_.rope(row, heads, c.head_dim, 2 * half, cos_.get() + t * half, sin_.get() + t * half, c.rope.neox);
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
    kernels_.quantize(x + first * cols, count, cols, quants_.get() + first * cols, scales_.get() + first * (cols / 32),
                      sums_.get() + first * (cols / 16));
  });
}

static Activations block_of(const Activations& x, std::size_t first, uint32_t count) {
  return {count, x.cols, x.f32 + first * x.cols, x.q + first * x.cols, x.scale + first * (x.cols / 32), x.sums + first * (x.cols / 16)};
}

// y = W x + b for matrices that share their input, in one parallel loop over all their rows.
void Forward::multiply(const float* x, uint32_t n, uint32_t cols, std::initializer_list<Product> products) {
  const auto is_float = [](const Product& p) { return tensor_type_info(p.linear->w.type)->block_elements == 1; };
  if (!std::all_of(products.begin(), products.end(), is_float)) quantize(x, n, cols);
  const Activations input{n, cols, x, quants_.get(), scales_.get(), sums_.get()};

  uint64_t rows = 0;
  for (const Product& p : products) rows += p.linear->w.rows;
  const uint32_t blocks = std::max(1u, n / task_inputs);  // the last one takes what is left
  const uint64_t most = task_products / (uint64_t{std::min(n, task_inputs)} * cols);
  const uint64_t even = ceil_div(rows, uint64_t{pool_->threads()} * tasks_per_thread);
  const auto per_task = static_cast<uint32_t>(round_up(std::clamp<uint64_t>(most, 1, even), kernels_.matmul_rows));
  uint32_t tasks = 0;
  for (const Product& p : products) tasks += static_cast<uint32_t>(ceil_div(p.linear->w.rows, per_task));

  pool_->run(tasks * blocks, [&](uint32_t task, uint32_t worker) {
    if (cancel_->fired()) return;
    const uint32_t block = task % blocks, first = block * task_inputs, count = block + 1 == blocks ? n - first : task_inputs;
    task /= blocks;
    const Product* p = products.begin();
    for (uint32_t own; task >= (own = static_cast<uint32_t>(ceil_div(p->linear->w.rows, per_task))); ++p) task -= own;
    const WeightView& w = p->linear->w;
    const uint32_t begin = task * per_task, end = std::min(w.rows, begin + per_task);
    float* y = p->y + std::size_t{first} * w.rows;
    kernels_.matmul(w, block_of(input, first, count), y, w.rows, begin, end, scratch_.data() + worker * scratch_size_);
    if (p->linear->bias.empty()) return;
    for (uint32_t i = 0; i < count; ++i, y += w.rows)
      for (uint32_t r = begin; r < end; ++r) y[r] += p->linear->bias[r];
  });
}

void Forward::resize(uint32_t n) {
  if (n <= capacity_) return;
  const ModelConfig& c = model_->config();
  const std::size_t widest = std::max({c.width, c.q_width(), c.feed_forward});
  const auto grow = [](auto& array, std::size_t size) {
    array = {};  // never old and new together
    array = make_buffer<std::remove_reference_t<decltype(array[0])>>(size);
  };
  capacity_ = 0;
  grow(x_, std::size_t{n} * c.width);
  grow(h_, std::size_t{n} * c.width);
  grow(q_, std::size_t{n} * c.q_width());
  grow(k_, std::size_t{n} * c.kv_width());
  grow(v_, std::size_t{n} * c.kv_width());
  grow(a_, std::size_t{n} * c.q_width());
  grow(totals_, std::size_t{n} * c.heads);
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
