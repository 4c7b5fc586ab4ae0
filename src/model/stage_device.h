// A stage on a device. Its work is given in order to one stream; the processor waits where it needs queries, keys and values, and at the end.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "compute/pieces.h"
#include "model/attention_device.h"
#include "model/beside_device.h"
#include "model/device_graphs.h"
#include "model/device_workspace.h"
#include "model/reading_device.h"
#include "model/stage.h"

namespace kvasir {

class DeviceStage final : public Stage {
 public:
  DeviceStage(const Model& model, const DeviceWeights& weights)
      : Stage(weights.first_layer(), weights.end_layer()),
        config_(model.config()),
        size_(widths_of(config_, model.rope().dim())),
        weights_(weights),
        device_(weights.device()),
        ops_(device_->kernels()),
        graphs_(ops_, 3 * std::size_t{layers()} + 3),
        attention_(device_, weights.sketches(), config_, model.store_shape(), first_layer(), layers()),
        beside_(device_, weights.sketches(), config_, model.store_shape(), first_layer(), layers()),
        reading_(device_, config_, model.store_shape(), first_layer(), layers()) {}

  ~DeviceStage() override {
    if (stream_) (void)ops_.wait(stream_);
    forget_graphs();
    for (DeviceStream* stream : {stream_, copies_})
      if (stream) (void)ops_.wait(stream), (void)ops_.close_stream(stream);
  }

  Status open() {
    if (Status s = bad_layer_.allocate(device_, 1); !s.ok()) return s;
    if (const int error = ops_.open_stream(device_->context(), &copies_)) return device_->status(error, "a stream");
    return device_->status(ops_.open_stream(device_->context(), &stream_), "a stream");
  }

  Status begin(const Step& step) override {
    step_ = step;
    error_ = 0;
    has_attended_ = has_logits_ = has_read_ = false;
    if (Status s = resize(step.n); !s.ok()) return s;
    *bad_layer_.get() = none;
    do_(ops_.upload(stream_, work_.first_bad, bad_layer_.get(), sizeof(uint32_t)));
    const std::size_t x = step.n * size_.width, half = step.n * size_.half;
    const bool by_host = x + 2 * half <= read_host_room_;  // a text's: large, and what is handed over comes later
    const auto give = [&](float* to, const float* from, std::size_t n, std::size_t at) {
      if (by_host) copy_by_pieces(from, n, read_host_.get() + at, step_.pool), from = read_host_.get() + at;
      do_(ops_.upload(stream_, to, from, n * sizeof(float)));
    };
    give(work_.x, step.x, x, 0);
    give(work_.cos, step.cos, half, x);
    give(work_.sin, step.sin, half, x + half);
    return by_host ? Status() : wait("a step");
  }

  Status project(uint32_t layer, Projected* out) override {
    const std::size_t n = step_.n, floats = n * (size_.q + 2 * size_.kv);
    if (Status s = resize_host(step_.n); !s.ok()) return s;
    together(local(layer), [&] {
      if (layer > first_layer()) complete_before(layer);
      give_projection(layer, work_.qkv);
      do_(ops_.download(stream_, host_qkv_.get(), work_.qkv, floats * sizeof(float)));
      do_(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
    });
    if (Status s = wait("a layer"); !s.ok()) return s;
    float* host = host_qkv_.get();
    *out = {host, host + n * size_.q, host + n * (size_.q + size_.kv), host_a_.get()};
    return {};
  }

  // What there is to do is given together with what comes next.
  Status complete(uint32_t, uint32_t) override { return {}; }

  Status can_attend(const Attending& of, uint32_t n, const char** why_not) override;

  bool attends_beside() const override { return attends_beside_; }
  bool wants_rate() const override { return beside_.wants_rate(pool_threads_); }
  Status measure(double processor, const CancelLatch& cancel) override { return beside_.measure(processor, pool_threads_, cancel, stream_); }
  std::string share() const override { return beside_.share(); }
  const char* hands() const override {
    const bool reads = attends_beside_ ? beside_.reads() : !attention_.hands();
    const char* cannot = attends_beside_ ? beside_.cannot_read() : attention_.cannot_share();
    return reads ? nullptr : cannot ? cannot : sharing;
  }

  Status attend(const Attending& of, const Pages& pages, ReadCounts* counts) override;

  Attended attended(uint32_t layer) const override {
    const float* host = attended_host_.get() + local(layer) * attended_floats();
    const float* totals = attends_beside_ ? beside_.totals_of(local(layer)) : attention_.totals(local(layer));
    return {host, host + step_.n * size_.q, host + step_.n * (size_.q + size_.kv), totals};
  }

  void committed(const KvStore& store) override {
    if (has_attended_) attends_beside_ ? beside_.committed(store) : attention_.committed(store);
    if (has_read_) reading_.committed(store);
  }
  void trim() override {
    release_reading();
    attention_.trim(), beside_.trim();
  }

  Status can_read(const Attending& of, uint32_t n, const char** why_not) override;

  // A layer is handed over while the next one is computed: there are two of what is handed over, and a stream of their copies.
  Status read(const Attending& of, uint32_t outputs, const Meanwhile& meanwhile, const Take& take) override;

  Status end() override {
    if (!has_attended_ && !has_read_)
      together(layers(), [&] {
        complete_before(end_layer());
        do_(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
      });
    if (!weights_.has_output()) do_(ops_.download(stream_, step_.x, work_.x, step_.n * size_.width * sizeof(float)));
    return wait("a step");
  }

  Status logits(uint32_t first, float* out) override {
    if (has_logits_ && first + 1 == step_.n) return std::copy_n(host_logits_.get(), size_.vocabulary, out), Status();
    for (uint32_t at = first; at < step_.n; at += logit_rows) {
      const uint32_t n = std::min(logit_rows, step_.n - at);
      give_logits(at, n);
      do_(ops_.download(stream_, out + (at - first) * size_.vocabulary, work_.logits, n * size_.vocabulary * sizeof(float)));
      if (Status s = wait("the output"); !s.ok()) return s;
      if (step_.cancel->fired()) break;
    }
    return {};
  }

 private:
  static constexpr uint32_t none = UINT32_MAX;
  uint32_t layers() const { return end_layer() - first_layer(); }
  uint32_t local(uint32_t layer) const { return layer - first_layer(); }  // its number among the stage's
  struct Product {
    const DeviceWeights::Matrix* matrix;
    float* y;
  };

  // The first error of a step stays; what is given to the stream after it does no harm.
  void do_(int error) { error_ = error_ ? error_ : error; }

  Status wait(const char* what, DeviceStream* stream = nullptr) {
    do_(ops_.wait(stream ? stream : stream_));
    if (error_) (void)ops_.wait(stream ? stream : stream_);  // nothing is on its way to memory that may go now
    if (Status s = device_->status(std::exchange(error_, 0), what); !s.ok()) return s;
    return *bad_layer_.get() == none ? Status() : not_a_number("layer " + std::to_string(*bad_layer_.get()));
  }

  // Gives work to the stream; part: of a step, as graphs_ has them.
  template <class F>
  void together(uint32_t part, F&& give) {
    step_.n == 1 ? graphs_.run(stream_, part, &error_, give) : give();
  }

  void forget_graphs() { graphs_.forget(stream_); }
  // q, k and v go to qkv, one behind the other. What the layer before has made is checked as the layer's input.
  void give_projection(uint32_t layer, float* qkv) {
    const DeviceWeights::Layer& w = weights_.layers()[local(layer)];
    float *k = qkv + step_.n * size_.q, *v = k + step_.n * size_.kv;
    const DeviceActivations normed = inputs(work_.h, size_.width, {&w.q, &w.k, &w.v});
    norm(w.attention_norm.get(), layer > first_layer() ? layer - 1 : layer, normed);
    multiply(normed, {{&w.q, qkv}, {&w.k, k}, {&w.v, v}});
    const DeviceHeads heads{step_.n, config_.heads, config_.kv_heads, config_.head_dim, qkv, w.q_norm.get(), w.k_norm.get(), config_.rms_epsilon,
                            static_cast<uint32_t>(2 * size_.half), config_.rope.neox, work_.cos, work_.sin};
    do_(ops_.rotate(stream_, heads, check(layer)));
  }

  // The rest of the layer before this one, whose attention is in host_a_.
  void complete_before(uint32_t layer) {
    do_(ops_.upload(stream_, work_.a, host_a_.get(), step_.n * size_.q * sizeof(float)));
    check_and_give_rest(layer - 1, work_.a);
  }

  // The output of a layer's attention, which is in a.
  DeviceActivations output_of(uint32_t layer, float* a) const {
    DeviceActivations x = inputs(a, size_.q, {&weights_.layers()[local(layer)].o});
    x.f32 = a;
    return x;
  }

  void check_and_give_rest(uint32_t layer, float* a) {
    do_(ops_.quantize(stream_, output_of(layer, a), check(layer)));
    give_rest(layer, output_of(layer, a));
  }

  // What comes after a layer's attention, whose output has been checked.
  void give_rest(uint32_t layer, const DeviceActivations& a) {
    const DeviceWeights::Layer& w = weights_.layers()[local(layer)];
    multiply(a, {{&w.o, work_.x}}, true);

    const DeviceActivations normed = inputs(work_.h, size_.width, {&w.gate, &w.up}), gated = inputs(work_.gate, size_.feed_forward, {&w.down});
    norm(w.ffn_norm.get(), layer, normed);
    multiply(normed, {{&w.gate, work_.gate}, {&w.up, work_.up}});
    do_(ops_.swiglu(stream_, work_.gate, work_.up, check(layer), gated));
    multiply(gated, {{&w.down, work_.x}}, true);
    if (layer + 1 < end_layer()) return;  // the next one looks at x
    do_(ops_.quantize(stream_, {step_.n, config_.width, work_.x}, check(layer)));
  }

  // The same at the end of a text's step: of a stage that has the output what it is computed from, and what goes to the next stage otherwise.
  void give_last_rest(uint32_t layer, float* a, uint32_t wanted);

  // Of n tokens from `first` on.
  void give_logits(uint32_t first, uint32_t n) {
    DeviceActivations normed = inputs(work_.h, size_.width, {&weights_.output()});
    normed.n = n;
    do_(ops_.rms_norm(stream_, work_.x + first * size_.width, weights_.output_norm(), config_.rms_epsilon, check(end_layer() - 1), normed));
    multiply(normed, {{&weights_.output(), work_.logits}});
  }

  DeviceActivations inputs(float* f32, std::size_t cols, std::initializer_list<const DeviceWeights::Matrix*> matrices) const {
    return work_.inputs(step_.n, f32, cols, matrices);
  }

  void multiply(const DeviceActivations& x, std::initializer_list<Product> products, bool add = false) {
    DeviceProduct given[3];
    DeviceProduct* end = given;
    for (const Product& p : products) *end++ = {p.matrix->w, p.matrix->bias.get(), p.y};
    do_(ops_.matmul(stream_, {given, end}, x, add));
  }

  void norm(const float* weight, uint32_t layer, const DeviceActivations& out) {
    do_(ops_.rms_norm(stream_, work_.x, weight, config_.rms_epsilon, check(layer), out));
  }

  DeviceCheck check(uint32_t layer) const { return {too_large, layer, work_.first_bad}; }

  // Attention makes room where there is none.
  Status resize(uint32_t n) {
    Status s = try_resize(n);
    if (s.code() == Code::no_memory && attention_.drop_hot_quads()) s = try_resize(n);
    if (s.code() == Code::no_memory && reading_.holds_memory()) release_reading(), s = try_resize(n);
    if (s.code() == Code::no_memory && beside_.holds_memory()) release_beside(), s = try_resize(n);
    if (s.code() != Code::no_memory || !attention_.holds_memory()) return s;
    release_attention();
    return try_resize(n);
  }

  // Blocks of the sketch that another session has too, even one that does nothing, stay: what is tried again afterwards may find no more room than before.
  void release_attention() {
    (void)ops_.wait(stream_), (void)ops_.wait(copies_);  // something may be on its way to it
    forget_graphs();
    attention_.release();
    attended_ = {};
  }

  void release_beside() {
    (void)ops_.wait(stream_), (void)ops_.wait(copies_);
    forget_graphs();
    beside_.release();
    attended_ = {};
  }

  void release_reading() {
    if (!reading_.holds_memory() && !read_.get()) return;
    (void)ops_.wait(stream_), (void)ops_.wait(copies_);  // after a failure something may be on its way
    reading_.release();
    read_ = {}, read_host_ = {}, read_outputs_ = {}, outputs_room_ = 0, read_host_room_ = 0;
  }

  // Of one of two layers: what is handed over of n tokens.
  std::size_t read_floats(uint32_t n) const { return n * (2 * size_.q + 2 * size_.kv) + totals_floats(n); }
  std::size_t totals_floats(uint32_t n) const { return round_up(std::size_t{n} * config_.heads, 4); }  // outputs are read 16 bytes at a time

  Status resize_read(uint32_t n);

  Status try_resize(uint32_t n) {
    if (n <= capacity_) return {};
    release_workspace();  // never old and new together
    gave_way_ = false;
    Status s = memory_.allocate(device_, work_.place(size_, n, nullptr), "a step's workspace");
    if (!s.ok()) return s;
    work_.place(size_, n, memory_.get());
    return capacity_ = n, Status();
  }

  void release_workspace() {
    capacity_ = 0;
    forget_graphs();
    memory_ = {};
  }

  // What preparing attention came to. Where memory is wanting: again, with a workspace that is no larger than the step needs it, until a text is read.
  template <class Prepare>
  Status or_with_less(Status s, uint32_t least, const Prepare& prepare) {
    if (s.code() != Code::no_memory || capacity_ <= least) return s;
    release_workspace();
    s = try_resize(least);
    gave_way_ = true;
    return s.ok() ? prepare() : std::move(s);
  }

  // What the processor attends comes down and goes up through.
  Status resize_host(uint32_t n) {
    if (n <= host_capacity_) return {};
    host_capacity_ = 0;
    forget_graphs();
    Status s = host_qkv_.allocate(device_, n * (size_.q + 2 * size_.kv));
    if (s.ok()) s = host_a_.allocate(device_, n * size_.q);
    if (s.ok()) host_capacity_ = n;
    return s;
  }

  std::size_t attended_floats() const { return step_.n * (size_.q + 2 * size_.kv); }  // of a layer

  Status resize_attended(uint32_t n) {
    const std::size_t floats = layers() * std::size_t{n} * (size_.q + 2 * size_.kv);
    if (floats * sizeof(float) <= attended_.bytes()) return {};
    forget_graphs();
    attended_ = {};
    Status s = attended_.allocate(device_, floats, "a step's queries, keys and values");
    if (s.ok()) s = attended_host_.allocate(device_, floats);
    if (!s.ok()) attended_ = {};
    return s;
  }

  const ModelConfig& config_;
  const Widths size_;
  const DeviceWeights& weights_;
  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  DeviceStream* stream_ = nullptr;
  int error_ = 0;
  Step step_;
  DeviceGraphs graphs_;  // [layers + 3] what comes before and with the projection of each, after the last; attend(), and with the output

  uint32_t capacity_ = 0;  // tokens
  bool gave_way_ = false;  // to attention, which then fitted
  DeviceBuffer<std::byte> memory_;
  Workspace work_{};
  PinnedBuffer<uint32_t> bad_layer_;         // the host's copy
  uint32_t host_capacity_ = 0;               // tokens that the next two have room for
  PinnedBuffer<float> host_qkv_, host_a_;

  Status can_attend_beside(const Attending& of, uint32_t n, const char** why_not);
  Status prepare_output(const Attending& of);
  Status attend_beside(const Attending& of, const Pages& pages, ReadCounts* counts);
  void give_rest_and_output();

  AttentionDevice attention_;
  BesideDevice beside_;
  bool attends_beside_ = false;  // the last step's, or the next one's
  uint32_t pool_threads_ = 0;
  uint64_t graph_generation_ = 0;
  bool has_attended_ = false, has_logits_ = false, has_read_ = false;
  static constexpr const char* no_room = "the GPU has no room for what its attention needs";
  uint32_t refused_beside_ = 0, refused_beside_n_ = 0;  // as the next two
  uint32_t refused_size_ = 0, refused_n_ = 0;  // how long the text and the step were that there was no room for, in extents from 1 on; 0: there was
  DeviceBuffer<float> attended_;      // [layers][n][q and k and v]
  PinnedBuffer<float> attended_host_, host_logits_;
  ReadingDevice reading_;
  DeviceStream* copies_ = nullptr;    // of what is handed over, and of sketches
  DeviceBuffer<float> read_;          // [2][q, k, v, totals, output of attention] of two layers
  PinnedBuffer<float> read_host_, read_outputs_;  // outputs: where they were asked for
  std::size_t read_host_room_ = 0, outputs_room_ = 0;  // floats; tokens
  uint32_t unread_size_ = 0, unread_n_ = 0;
};

}  // namespace kvasir
