#include "engine/altup.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/cpu_tasks.h"

namespace kvasir {
namespace {

double length_of(const float* x, uint32_t n) {
  double sum = 0;
  for (uint32_t i = 0; i < n; ++i) sum += double{x[i]} * double{x[i]};
  return std::sqrt(sum);
}

// Scales x to the length of `as`.
void match_length(float* x, const float* as, uint32_t n) {
  constexpr double smallest = 1e-5;
  const double factor = length_of(as, n) / std::max(length_of(x, n), smallest);
  for (uint32_t i = 0; i < n; ++i) x[i] *= static_cast<float>(factor);
}

Linear matrix_of(const ExpertMatrices& all, uint32_t i) {
  Linear linear;
  linear.w = all.of(i);
  return linear;
}

}  // namespace

AltUp::AltUp(const Model& model, ThreadPool* pool, CpuProducts* products)
    : model_(model), kernels_(cpu_kernels()), pool_(pool), products_(products),
      width_(model.config().width), count_(model.config().streams) {}

void AltUp::resize(uint32_t n) {
  if (n <= capacity_) return;
  uint32_t rank = 0;
  for (const LayerWeights& w : model_.weights().layers)
    rank = std::max(rank, w.altup.laurel_down.w.rows);
  const auto grow = [](Buffer<float>& array, std::size_t size) {
    array = {};  // never old and new together
    array = make_buffer<float>(size);
  };
  capacity_ = 0;
  const std::size_t size = std::size_t{n} * width_;
  grow(streams_, (count_ - 1) * size);
  grow(predicted_, size), grow(h_, size), grow(laurel_, size);
  grow(low_, std::size_t{n} * rank);
  grow(routed_, std::size_t{n} * count_);
  capacity_ = n;
}

void AltUp::begin(const float* x, uint32_t n, const CancelLatch& cancel) {
  cancel_ = &cancel, n_ = n;
  for (uint32_t i = 1; i < count_; ++i) {
    const Linear in = matrix_of(model_.weights().stream_in, i - 1);
    products_->multiply(x, n, width_, {{&in, stream(i)}});
    for_rows(pool_, *cancel_, 0, n,
             [&](std::size_t t) { match_length(stream(i) + t * width_, x + t * width_, width_); });
  }
}

// routed_ = tanh(W norm(x) / width)
void AltUp::route(uint32_t layer, const float* x, uint32_t n) {
  const AltUpWeights& w = model_.weights().layers[layer].altup;
  for_rows(pool_, *cancel_, 0, n, [&](std::size_t t) {
    kernels_.rms_norm(x + t * width_, w.router_norm.weight.data(), model_.config().norm_epsilon, 1,
                      width_, h_.get() + t * width_);
    for (uint32_t d = 0; d < width_; ++d) h_[t * width_ + d] /= static_cast<float>(width_);
  });
  products_->multiply(h_.get(), n, width_, {{&w.router, routed_.get()}});
  for_rows(pool_, *cancel_, 0, n, [&](std::size_t t) {
    for (uint32_t i = 0; i < count_; ++i)
      routed_[t * count_ + i] = std::tanh(routed_[t * count_ + i]);
  });
}

void AltUp::predict(uint32_t layer, float* x) {
  const Array<float>& weights = model_.weights().layers[layer].altup.predict;
  route(layer, x, n_);
  for_rows(pool_, *cancel_, 0, n_, [&](std::size_t t) {
    const float* routed = routed_.get() + t * count_;
    std::array<float, max_streams * max_streams> c{};
    std::array<float, max_streams> old;
    for (std::size_t i = 0; i < std::size_t{count_} * count_; ++i)
      for (uint32_t j = 0; j < count_; ++j) c[i] += weights[i * count_ + j] * routed[j];
    for (uint32_t d = 0; d < width_; ++d) {
      const auto at = [&](uint32_t i) -> float& {
        return i == 0 ? x[t * width_ + d] : stream(i)[t * width_ + d];
      };
      for (uint32_t i = 0; i < count_; ++i) old[i] = at(i);
      for (uint32_t i = 0; i < count_; ++i)
        for (uint32_t j = 0; j < count_; ++j) at(i) += c[i * count_ + j] * old[j];
    }
    std::copy_n(x + t * width_, width_, predicted_.get() + t * width_);
  });
}

const float* AltUp::laurel(uint32_t layer, const float* y) {
  const AltUpWeights& w = model_.weights().layers[layer].altup;
  const uint32_t rank = w.laurel_down.w.rows;
  products_->multiply(y, n_, width_, {{&w.laurel_down, low_.get()}});
  products_->multiply(low_.get(), n_, rank, {{&w.laurel_up, laurel_.get()}});
  for_rows(pool_, *cancel_, 0, n_, [&](std::size_t t) {
    float* out = laurel_.get() + t * width_;
    kernels_.rms_norm(out, w.laurel_norm.weight.data(), model_.config().norm_epsilon, 1, width_,
                      out);
    kernels_.add(out, y + t * width_, width_);
  });
  return laurel_.get();
}

void AltUp::correct(uint32_t layer, uint32_t first, float* x) {
  const Array<float>& weights = model_.weights().layers[layer].altup.correct;
  const uint32_t n = n_ - first;
  route(layer, x, n);
  for_rows(pool_, *cancel_, 0, n, [&](std::size_t t) {
    const float* routed = routed_.get() + t * count_;
    const float* predicted = predicted_.get() + (first + t) * width_;
    std::array<float, max_streams> c;
    c.fill(1);
    for (uint32_t i = 0; i < count_; ++i)
      for (uint32_t j = 0; j < count_; ++j) c[i] += weights[i * count_ + j] * routed[j];
    for (uint32_t d = 0; d < width_; ++d) {
      const float difference = x[t * width_ + d] - predicted[d];
      x[t * width_ + d] = predicted[d] + c[0] * difference;
      for (uint32_t i = 1; i < count_; ++i)
        stream(i)[(first + t) * width_ + d] += c[i] * difference;
    }
  });
}

void AltUp::add(uint32_t first, const float* g) {
  for_rows(pool_, *cancel_, 0, n_ - first, [&](std::size_t t) {
    for (uint32_t i = 1; i < count_; ++i)
      kernels_.add(stream(i) + (first + t) * width_, g + t * width_, width_);
  });
}

void AltUp::scale(uint32_t layer, uint32_t first, const float* x, float* y) {
  const Array<float>& factors = model_.weights().layers[layer].altup.scale;
  for_rows(pool_, *cancel_, 0, n_ - first, [&](std::size_t t) {
    for (uint32_t d = 0; d < width_; ++d) y[t * width_ + d] = x[t * width_ + d] * factors[d];
  });
}

void AltUp::merge(uint32_t first, float* x) {
  const uint32_t n = n_ - first;
  for (uint32_t i = 1; i < count_; ++i) {
    const float* from = stream(i) + std::size_t{first} * width_;
    const Linear out = matrix_of(model_.weights().stream_out, i - 1);
    products_->multiply(from, n, width_, {{&out, h_.get()}});
    for_rows(pool_, *cancel_, 0, n, [&](std::size_t t) {
      match_length(h_.get() + t * width_, x + t * width_, width_);
      std::copy_n(h_.get() + t * width_, width_, stream(i) + (first + t) * width_);
    });
  }
  for_rows(pool_, *cancel_, 0, n, [&](std::size_t t) {
    for (uint32_t d = 0; d < width_; ++d) {
      float sum = x[t * width_ + d];
      for (uint32_t i = 1; i < count_; ++i) sum += stream(i)[(first + t) * width_ + d];
      x[t * width_ + d] = sum / static_cast<float>(count_);
    }
  });
}

}  // namespace kvasir
