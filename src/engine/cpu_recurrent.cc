#include "engine/cpu_recurrent.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "base/checked.h"
#include "base/magnitude.h"
#include "engine/cpu_tasks.h"
#include "engine/layer_executor.h"

namespace kvasir {

namespace {

constexpr uint32_t channels_together = 256;  // of a convolution's task
constexpr uint32_t panels_together = 4;      // of a state's task

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

CpuRecurrent::CpuRecurrent(const Model& model, ThreadPool* pool, CpuProducts* products)
    : model_(model), config_(model.config().recurrent), kernels_(cpu_kernels()), pool_(pool),
      products_(products) {
  // The norm of the kernels divides by the root of the mean, not of the sum.
  const float length = 1 / std::sqrt(static_cast<float>(std::max(1u, config_.key_dim)));
  key_factor_.assign(config_.key_dim, length);
  query_factor_.assign(config_.key_dim, length * length);
}

void CpuRecurrent::resize(uint32_t n) {
  const auto grow = [&](Buffer<float>& array, std::size_t cols) {
    array = {};  // never old and new together
    array = make_buffer<float>(n * cols);
  };
  const bool convolves = config_.kind == RecurrentKind::convolution;
  grow(mixed_, config_.channels);
  grow(gate_, config_.inner());
  grow(o_, convolves ? 0 : config_.inner());
  grow(alpha_, config_.heads);
  grow(beta_, convolves ? config_.channels : 2 * config_.heads);
  if (config_.joint) grow(joint_, config_.channels + config_.inner());
}

void CpuRecurrent::begin(uint32_t n, bool open, RecurrentState* states, const CancelLatch& cancel) {
  n_ = n, open_ = open, states_ = states, cancel_ = &cancel;
  layers_.clear();
  if (!states) return;
  layers_.reserve(states->layers());
  const std::size_t each = n * (config_.channels + 2 * std::size_t{config_.heads}),
                    size = (open ? states->layers() : 1) * each;
  if (size <= inputs_size_) return;
  inputs_size_ = 0, inputs_ = {};  // never old and new together
  inputs_ = make_buffer<float>(size);
  inputs_size_ = size;
}

CpuRecurrent::Inputs CpuRecurrent::inputs_of(uint32_t layer, uint32_t n) const {
  const std::size_t channels = n * std::size_t{config_.channels},
                    heads = n * std::size_t{config_.heads},
                    place = open_ ? model_.config().layer(layer).state : 0;
  float* const in = inputs_.get() + place * (channels + 2 * heads);
  return {in, in + channels, in + channels + heads};
}

// To the end, even if the step is cancelled now: the commit follows.
void CpuRecurrent::keep_first(uint32_t n) {
  static const CancelLatch never(nullptr);
  const uint32_t all = std::exchange(n_, n);
  cancel_ = &never;
  for (const uint32_t layer : layers_) x_ = inputs_of(layer, all), next_state(layer);
}

// From x_: mixed_, o_ and the next state.
void CpuRecurrent::next_state(uint32_t layer) {
  convolve(layer, config_.kind != RecurrentKind::convolution);
  const std::size_t keys = std::size_t{config_.key_heads} * config_.key_dim;
  switch (config_.kind) {
    case RecurrentKind::none:
    case RecurrentKind::convolution:
      return;
    case RecurrentKind::mamba:
      return advance(layer, 0, config_.inner(), config_.inner() + keys);
    case RecurrentKind::delta_net:
      normalise_keys();
      return advance(layer, 2 * keys, keys, 0);
  }
}

bool CpuRecurrent::run(uint32_t layer, const float* y, uint32_t first, float* out) {
  const RecurrentWeights& w = model_.weights().layers[layer].recurrent;
  const std::size_t inner = config_.inner();
  const float* result = gate_.get();
  x_ = inputs_of(layer, n_);
  if (open_) layers_.push_back(layer);
  bool good = true;
  switch (config_.kind) {
    case RecurrentKind::none:
      return false;
    case RecurrentKind::convolution:
      short_convolution(layer, y);
      good = is_good(mixed_.get(), inner, first);
      for_rows(pool_, *cancel_, first, n_, [&](std::size_t t) {
        for (std::size_t i = t * inner; i < (t + 1) * inner; ++i) gate_[i] *= mixed_[i];
      });
      break;
    case RecurrentKind::mamba:
      mamba(layer, y);
      good = is_good(o_.get(), inner, first);
      gate_mamba(w, first);
      break;
    case RecurrentKind::delta_net:
      delta_net(layer, y);
      good = is_good(o_.get(), inner, first);
      gate_delta(w, first);
      break;
  }
  products_->multiply(result + first * inner, n_ - first, config_.inner(), {{&w.out, out}});
  return good;
}

// The output of the last token has met every number of the state after the step: it is NaN where
// one of them is NaN or infinity.
bool CpuRecurrent::is_good(const float* rows, std::size_t cols, uint32_t first) {
  std::atomic<bool> good{true};
  for_rows(pool_, *cancel_, first, n_, [&](std::size_t t) {
    if (!all_below({rows + t * cols, cols}, LayerExecutor::too_large))
      good.store(false, std::memory_order_relaxed);
  });
  return good;
}

void CpuRecurrent::convolve(uint32_t layer, bool silu) {
  const RecurrentWeights& w = model_.weights().layers[layer].recurrent;
  const uint32_t state = model_.config().layer(layer).state;
  const Convolution c = {n_,
                         config_.taps,
                         config_.channels,
                         x_.in,
                         w.convolution.data(),
                         w.bias.empty() ? nullptr : w.bias.data(),
                         states_->now(state),
                         states_->next(state),
                         mixed_.get(),
                         silu};
  const auto tasks = static_cast<uint32_t>(ceil_div(config_.channels, channels_together));
  pool_->run(tasks, [&](uint32_t task, uint32_t) {
    if (cancel_->fired()) return;
    const uint32_t begin = task * channels_together,
                   end = std::min(config_.channels, begin + channels_together);
    kernels_.convolve(c, begin, end);
  });
}

void CpuRecurrent::short_convolution(uint32_t layer, const float* y) {
  const RecurrentWeights& w = model_.weights().layers[layer].recurrent;
  products_->multiply(y, n_, model_.config().width,
                      {{&w.in, x_.in}, {&w.gate, gate_.get()}, {&w.beta, beta_.get()}});
  const std::size_t cols = config_.channels;
  for_rows(pool_, *cancel_, 0, n_, [&](std::size_t t) {
    for (std::size_t i = t * cols; i < (t + 1) * cols; ++i) x_.in[i] *= beta_[i];
  });
  next_state(layer);
}

void CpuRecurrent::mamba(uint32_t layer, const float* y) {
  const RecurrentWeights& w = model_.weights().layers[layer].recurrent;
  products_->multiply(y, n_, model_.config().width,
                      {{&w.in, x_.in}, {&w.gate, gate_.get()}, {&w.alpha, alpha_.get()}});
  mamba_rates(w);
  next_state(layer);
  const std::size_t dim = config_.value_dim;
  for_rows(pool_, *cancel_, 0, n_, [&](std::size_t t) {
    const float* x = mixed_.get() + t * config_.channels;
    float* o = o_.get() + t * config_.inner();
    for (std::size_t h = 0; h < config_.heads; ++h)
      for (std::size_t i = h * dim; i < (h + 1) * dim; ++i) o[i] += w.skip[h] * x[i];
  });
}

void CpuRecurrent::delta_net(uint32_t layer, const float* y) {
  const RecurrentWeights& w = model_.weights().layers[layer].recurrent;
  const uint32_t width = model_.config().width;
  const bool joint = config_.joint, apart = w.alpha.w.data;
  const CpuProducts::Product in{&w.in, joint ? joint_.get() : x_.in}, gate{&w.gate, gate_.get()},
      beta{&w.beta, beta_.get()}, alpha{&w.alpha, alpha_.get()};
  if (joint) {
    apart ? products_->multiply(y, n_, width, {in, beta, alpha})
          : products_->multiply(y, n_, width, {in, beta});
    split_joint();
  } else {
    apart ? products_->multiply(y, n_, width, {in, gate, beta, alpha})
          : products_->multiply(y, n_, width, {in, gate, beta});
  }
  delta_rates(w);
  next_state(layer);
}

// Of each key head: its query, its key, the values of its heads and their gates.
void CpuRecurrent::split_joint() {
  const std::size_t key = config_.key_dim, keys = config_.key_heads * key,
                    value = config_.inner() / config_.key_heads, head = 2 * (key + value);
  for_rows(pool_, *cancel_, 0, n_, [&](std::size_t t) {
    const float* from = joint_.get() + t * config_.key_heads * head;
    float *in = x_.in + t * config_.channels, *gate = gate_.get() + t * config_.inner();
    for (std::size_t h = 0; h < config_.key_heads; ++h, from += head) {
      std::copy_n(from, key, in + h * key);
      std::copy_n(from + key, key, in + keys + h * key);
      std::copy_n(from + 2 * key, value, in + 2 * keys + h * value);
      std::copy_n(from + 2 * key + value, value, gate + h * value);
    }
  });
}

void CpuRecurrent::mamba_rates(const RecurrentWeights& w) {
  for_rows(pool_, *cancel_, 0, n_, [&](std::size_t t) {
    for (std::size_t h = 0, i = t * config_.heads; h < config_.heads; ++h, ++i) {
      x_.rate[i] = softplus(alpha_[i] + w.decay_bias[h]);
      x_.decay[i] = std::exp(x_.rate[i] * w.decay[h]);
    }
  });
}

void CpuRecurrent::delta_rates(const RecurrentWeights& w) {
  const std::size_t heads = config_.heads, group = heads / config_.key_heads;
  const bool both = !w.alpha.w.data;  // a key head's betas, then its alphas
  for_rows(pool_, *cancel_, 0, n_, [&](std::size_t t) {
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t i = t * heads + h, at = 2 * (t * heads + h / group * group) + h % group;
      const float beta = beta_[both ? at : i], alpha = both ? beta_[at + group] : alpha_[i];
      x_.rate[i] = sigmoid(beta);
      x_.decay[i] = std::exp(w.decay[h] * softplus(alpha + w.decay_bias[h]));
    }
  });
}

void CpuRecurrent::normalise_keys() {
  const uint32_t dim = config_.key_dim, heads = config_.key_heads;
  const float epsilon = l2_epsilon / static_cast<float>(dim);
  for_rows(pool_, *cancel_, 0, n_, [&](std::size_t t) {
    float *q = mixed_.get() + t * config_.channels, *k = q + std::size_t{heads} * dim;
    kernels_.rms_norm(q, query_factor_.data(), epsilon, heads, dim, q);
    kernels_.rms_norm(k, key_factor_.data(), epsilon, heads, dim, k);
  });
}

// The states of all heads. values, keys, queries: where they begin among a token's channels.
void CpuRecurrent::advance(uint32_t layer, std::size_t values, std::size_t keys,
                           std::size_t queries) {
  const uint32_t state = model_.config().layer(layer).state;
  const uint32_t panels = state_panels(config_.value_dim),
                 tasks = static_cast<uint32_t>(ceil_div(panels, panels_together));
  pool_->run(config_.heads * tasks, [&](uint32_t task, uint32_t) {
    if (cancel_->fired()) return;
    const uint32_t head = task / tasks, begin = task % tasks * panels_together;
    const std::size_t matrix = config_.inputs_size() + head * config_.matrix_size(),
                      key = std::size_t{config_.key_head(head)} * config_.key_dim,
                      value = std::size_t{head} * config_.value_dim;
    StateStep s;
    s.keys = config_.key_dim, s.values = config_.value_dim;
    s.from = states_->now(state) + matrix;
    s.k = mixed_.get() + keys + key, s.q = mixed_.get() + queries + key;
    s.v = mixed_.get() + values + value, s.out = o_.get() + value;
    s.decay = x_.decay + head, s.rate = x_.rate + head;
    s.key_stride = s.value_stride = config_.channels;
    s.rate_stride = config_.heads, s.out_stride = config_.inner();
    s.corrects = config_.kind == RecurrentKind::delta_net;
    s.to = states_->next(state) + matrix;
    s.n = n_;
    kernels_.advance_state(s, begin, std::min(panels, begin + panels_together));
  });
}

// gate_ = norm(silu(gate_) * o_), by groups
void CpuRecurrent::gate_mamba(const RecurrentWeights& w, uint32_t first) {
  const std::size_t inner = config_.inner(), group = inner / config_.key_heads;
  for_rows(pool_, *cancel_, first, n_, [&](std::size_t t) {
    float* z = gate_.get() + t * inner;
    kernels_.activate(Activation::silu, z, o_.get() + t * inner, inner);
    if (w.norm.empty()) return;
    for (std::size_t at = 0; at < inner; at += group)
      kernels_.rms_norm(z + at, w.norm.data() + at, model_.config().norm_epsilon, 1,
                        static_cast<uint32_t>(group), z + at);
  });
}

// gate_ = silu(gate_) * norm(o_), by heads
void CpuRecurrent::gate_delta(const RecurrentWeights& w, uint32_t first) {
  const std::size_t inner = config_.inner();
  for_rows(pool_, *cancel_, first, n_, [&](std::size_t t) {
    float* o = o_.get() + t * inner;
    kernels_.rms_norm(o, w.norm.data(), model_.config().norm_epsilon, config_.heads,
                      config_.value_dim, o);
    kernels_.activate(Activation::silu, gate_.get() + t * inner, o, inner);
  });
}

}  // namespace kvasir
