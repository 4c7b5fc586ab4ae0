// A stage on a device. Its work is given in order to one stream; the processor waits where it needs queries, keys and values, and at the end.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "model/stage.h"

namespace kvasir {
namespace {

constexpr uint32_t logit_rows = 16;  // at a time: a row is as long as the vocabulary

struct Widths {
  std::size_t width, q, kv, feed_forward, widest, half, vocabulary;
};
Widths widths_of(const ModelConfig& c, uint32_t rope_dim) {
  return {c.width, c.q_width(), c.kv_width(), c.feed_forward, std::max({c.width, c.q_width(), c.feed_forward}), rope_dim / 2, c.vocabulary};
}

class DeviceStage final : public Stage {
 public:
  DeviceStage(const Model& model, const DeviceWeights& weights)
      : Stage(0, static_cast<uint32_t>(weights.layers().size())),
        config_(model.config()),
        size_(widths_of(config_, model.rope().dim())),
        weights_(weights),
        device_(weights.device()),
        ops_(device_->kernels()),
        bad_layer_(ops_, 1) {}

  ~DeviceStage() override {
    if (stream_) (void)ops_.wait(stream_);
    forget_graphs();
    if (stream_) (void)ops_.close_stream(stream_);
  }

  Status open() {
    graphs_.resize(end_layer() + 1);
    return device_->status(ops_.open_stream(device_->index(), &stream_), "opening a stream");
  }

  Status begin(const Step& step) override {
    step_ = step;
    error_ = 0;
    if (Status s = resize(step.n); !s.ok()) return s;
    *bad_layer_.get() = none;
    do_(ops_.upload(stream_, first_bad_.get(), bad_layer_.get(), sizeof(uint32_t)));
    do_(ops_.upload(stream_, x_.get(), step.x, step.n * size_.width * sizeof(float)));
    do_(ops_.upload(stream_, cos_.get(), step.cos, step.n * size_.half * sizeof(float)));
    do_(ops_.upload(stream_, sin_.get(), step.sin, step.n * size_.half * sizeof(float)));
    return wait("beginning a step");
  }

  Status project(uint32_t layer, Projected* out) override {
    const std::size_t n = step_.n, floats = n * (size_.q + 2 * size_.kv);
    together(layer, [&] {
      if (layer > 0) complete_before(layer);
      give_projection(layer);
      do_(ops_.download(stream_, host_qkv_.get(), qkv_.get(), floats * sizeof(float)));
      do_(ops_.download(stream_, bad_layer_.get(), first_bad_.get(), sizeof(uint32_t)));
    });
    if (Status s = wait("computing a layer"); !s.ok()) return s;
    float* host = host_qkv_.get();
    *out = {host, host + n * size_.q, host + n * (size_.q + size_.kv), host_a_.get()};
    return {};
  }

  // What there is to do is given together with what comes next.
  Status complete(uint32_t) override { return {}; }

  Status end() override {
    together(end_layer(), [&] {
      complete_before(end_layer());
      do_(ops_.download(stream_, bad_layer_.get(), first_bad_.get(), sizeof(uint32_t)));
    });
    if (!weights_.has_output()) do_(ops_.download(stream_, step_.x, x_.get(), step_.n * size_.width * sizeof(float)));
    return wait("ending a step");
  }

  Status logits(uint32_t first, float* out) override {
    for (uint32_t at = first; at < step_.n; at += logit_rows) {
      const uint32_t n = std::min(logit_rows, step_.n - at);
      do_(ops_.rms_norm(stream_, x_.get() + at * size_.width, weights_.output_norm(), config_.rms_epsilon, n, config_.width, h_.get()));
      const DeviceActivations input = activations(h_.get(), n, size_.width);
      do_(ops_.quantize(stream_, input));
      do_(ops_.matmul(stream_, weights_.output().w, input, weights_.output().bias.get(), logits_.get(), size_.vocabulary));
      do_(ops_.download(stream_, out + (at - first) * size_.vocabulary, logits_.get(), n * size_.vocabulary * sizeof(float)));
      if (Status s = wait("computing the output"); !s.ok()) return s;
      if (step_.cancel->fired()) break;
    }
    return {};
  }

 private:
  static constexpr uint32_t none = UINT32_MAX;
  struct Product {
    const DeviceWeights::Matrix* matrix;
    float* y;
  };

  // The first error of a step stays; what is given to the stream after it does no harm.
  void do_(int error) {
    if (!error_) error_ = error;
  }

  Status wait(const char* what) {
    do_(ops_.wait(stream_));
    if (Status s = device_->status(std::exchange(error_, 0), what); !s.ok()) return s;
    return *bad_layer_.get() == none ? Status() : not_a_number("layer " + std::to_string(*bad_layer_.get()));
  }

  // Gives work to the stream. A step of one token gives the same every time: it is kept, and given by one call.
  template <class F>
  void together(uint32_t part, F&& give) {
    if (step_.n != 1) return give();
    if (!graphs_[part]) {
      do_(ops_.begin_graph(stream_));
      give();
      do_(ops_.end_graph(stream_, &graphs_[part]));
    }
    if (!error_) do_(ops_.run_graph(stream_, graphs_[part]));
  }

  void forget_graphs() {
    for (DeviceGraph*& graph : graphs_)
      if (DeviceGraph* old = std::exchange(graph, nullptr)) (void)ops_.release_graph(old);
  }

  void give_projection(uint32_t layer) {
    const DeviceWeights::Layer& w = weights_.layers()[layer];
    const std::size_t n = step_.n;
    float *q = qkv_.get(), *k = q + n * size_.q, *v = k + n * size_.kv;
    norm(x_.get(), w.attention_norm.get(), h_.get());
    multiply(h_.get(), size_.width, {{&w.q, q}, {&w.k, k}, {&w.v, v}});
    rotate(q, config_.heads, w.q_norm.get());
    rotate(k, config_.kv_heads, w.k_norm.get());
    check(layer, q, n * (size_.q + 2 * size_.kv));
  }

  // The rest of the layer before this one, whose attention is in host_a_.
  void complete_before(uint32_t layer) {
    const DeviceWeights::Layer& w = weights_.layers()[layer - 1];
    const std::size_t n = step_.n;
    do_(ops_.upload(stream_, a_.get(), host_a_.get(), n * size_.q * sizeof(float)));
    check(layer - 1, a_.get(), n * size_.q);
    multiply(a_.get(), size_.q, {{&w.o, h_.get()}});
    do_(ops_.add(stream_, x_.get(), h_.get(), n * size_.width));

    norm(x_.get(), w.ffn_norm.get(), h_.get());
    multiply(h_.get(), size_.width, {{&w.gate, gate_.get()}, {&w.up, up_.get()}});
    do_(ops_.swiglu(stream_, gate_.get(), up_.get(), n * size_.feed_forward));
    check(layer - 1, gate_.get(), n * size_.feed_forward);
    multiply(gate_.get(), size_.feed_forward, {{&w.down, h_.get()}});
    do_(ops_.add(stream_, x_.get(), h_.get(), n * size_.width));
    check(layer - 1, x_.get(), n * size_.width);
  }

  DeviceActivations activations(const float* x, uint32_t n, std::size_t cols) const {
    return {n, static_cast<uint32_t>(cols), x, quants_.get(), scales_.get(), sums_.get()};
  }

  void multiply(const float* x, std::size_t cols, std::initializer_list<Product> products) {
    const DeviceActivations input = activations(x, step_.n, cols);
    const auto is_float = [](const Product& p) { return tensor_type_info(p.matrix->w.type)->block_elements == 1; };
    if (!std::all_of(products.begin(), products.end(), is_float)) do_(ops_.quantize(stream_, input));
    for (const Product& p : products) do_(ops_.matmul(stream_, p.matrix->w, input, p.matrix->bias.get(), p.y, p.matrix->w.rows));
  }

  void norm(const float* x, const float* weight, float* y) {
    do_(ops_.rms_norm(stream_, x, weight, config_.rms_epsilon, step_.n, config_.width, y));
  }

  // The norm of each head where the architecture has one (Qwen 3), then RoPE.
  void rotate(float* x, uint32_t heads, const float* head_norm) {
    if (head_norm) do_(ops_.rms_norm(stream_, x, head_norm, config_.rms_epsilon, step_.n * heads, config_.head_dim, x));
    do_(ops_.rope(stream_, x, step_.n, heads, config_.head_dim, static_cast<uint32_t>(2 * size_.half), cos_.get(), sin_.get(), config_.rope.neox));
  }

  void check(uint32_t layer, const float* x, std::size_t n) { do_(ops_.check(stream_, x, n, too_large, layer, first_bad_.get())); }

  Status resize(uint32_t n) {
    if (n <= capacity_) return {};
    capacity_ = 0;
    forget_graphs();
    const auto grow = [&](auto* buffer, std::size_t count) {
      *buffer = {};  // never old and new together
      return buffer->allocate(device_, count);
    };
    const std::size_t widest = size_.widest;
    if (!(grow(&x_, n * size_.width) && grow(&h_, n * size_.width) && grow(&qkv_, n * (size_.q + 2 * size_.kv)) && grow(&a_, n * size_.q) &&
          grow(&gate_, n * size_.feed_forward) && grow(&up_, n * size_.feed_forward) && grow(&cos_, n * size_.half) && grow(&sin_, n * size_.half) &&
          grow(&quants_, n * widest) && grow(&scales_, n * ceil_div(widest, 32)) && grow(&sums_, n * ceil_div(widest, 16)) && grow(&first_bad_, 1) &&
          grow(&logits_, weights_.has_output() ? logit_rows * size_.vocabulary : 1)))
      return Status::error(Code::no_memory, "%s: no memory for steps of %u tokens, which take %llu bytes; %llu are left", device_->name().c_str(), n,
                           static_cast<unsigned long long>(device_workspace_bytes(config_, static_cast<uint32_t>(2 * size_.half), n)),
                           static_cast<unsigned long long>(device_->left()));
    host_qkv_ = PinnedBuffer<float>(ops_, n * (size_.q + 2 * size_.kv));
    host_a_ = PinnedBuffer<float>(ops_, n * size_.q);
    capacity_ = n;
    return {};
  }

  const ModelConfig& config_;
  const Widths size_;
  const DeviceWeights& weights_;
  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  DeviceStream* stream_ = nullptr;
  int error_ = 0;
  Step step_;
  std::vector<DeviceGraph*> graphs_;  // [layers + 1] what comes before and with the projection of each, and after the last

  uint32_t capacity_ = 0;  // tokens
  DeviceBuffer<float> x_, h_, qkv_, a_, gate_, up_, cos_, sin_, scales_, logits_;
  DeviceBuffer<int8_t> quants_;
  DeviceBuffer<int16_t> sums_;
  DeviceBuffer<uint32_t> first_bad_;     // layer in which a number was too large
  PinnedBuffer<uint32_t> bad_layer_;     // and the host's copy
  PinnedBuffer<float> host_qkv_, host_a_;
};

}  // namespace

Status make_device_stage(const Model& model, std::unique_ptr<Stage>* out) {
  auto stage = std::make_unique<DeviceStage>(model, *model.device_weights());
  if (Status s = stage->open(); !s.ok()) return s;
  *out = std::move(stage);
  return {};
}

uint64_t device_workspace_bytes(const ModelConfig& config, uint32_t rope_dim, uint32_t n) {
  const Widths s = widths_of(config, rope_dim);
  const uint64_t floats = 2 * s.width + 2 * s.q + 2 * s.kv + 2 * s.feed_forward + 2 * s.half;
  return n * (floats * sizeof(float) + s.widest + ceil_div(s.widest, 32) * sizeof(float) + ceil_div(s.widest, 16) * sizeof(int16_t)) +
         logit_rows * s.vocabulary * sizeof(float) + sizeof(uint32_t);
}

}  // namespace kvasir
