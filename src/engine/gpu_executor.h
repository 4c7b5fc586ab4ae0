// A run of layers on a GPU. Its work is enqueued in order to one stream. The CPU waits where it
// needs queries, keys and values, and at the end, but for chunks of a span (gpu_span.cc).
//
// The plan has one of four modes of attention; each has its own project(), attend() and end():
//   cpu            gpu_cpu_attention.cc   the CPU attends each layer, between two waits
//   gpu_selective  gpu_selective.cc       the GPU attends alone what it chooses, or everything: no
//                                         wait between layers, one graph for all layers of a token.
//                                         Their keys and values go to the store while the GPU
//                                         computes the output
//   co_execution   gpu_hybrid.cc          CPU and GPU attend a layer together
//   gpu_prefill    gpu_prefill.cc         a layer goes to the store behind the next ones
// Layers whose queries see a window are attended by the GPU in every mode (gpu_windows.cc), where
// their keys and values fit. Recurrent layers are computed by the GPU in every mode
// (gpu_recurrent.cc); their states stay in its memory.
// W_o and the feed-forward network of layer l are enqueued with project(l + 1): a graph holds both.
// The tokens of an open step (ForwardStep::open) are multiplied together, in the order of one, and
// attend one after another, as in steps of their own; so do the states of recurrent layers.
// The CPU computes routed experts that are not on the GPU: the residual stream comes down and the
// experts' outputs go up, without graphs.
#pragma once

#include <array>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "engine/cpu_experts.h"
#include "engine/gpu_graphs.h"
#include "engine/kept_halves.h"
#include "engine/layer_executor.h"
#include "model/gpu_expert_workspace.h"
#include "model/weight_stream.h"
#include "offload/gpu_hybrid_attention.h"
#include "offload/gpu_prefill_attention.h"
#include "offload/gpu_selective_attention.h"
#include "offload/gpu_states.h"
#include "offload/gpu_window_attention.h"

namespace kvasir {

class GpuExecutor final : public LayerExecutor {
 public:
  // streamed: of the executor of spans; null: of one that keeps its weights on the GPU.
  GpuExecutor(const Model& model, int number, HostAttention* attention,
              std::unique_ptr<WeightStream> streamed = nullptr);
  ~GpuExecutor() override;
  Status open();

  Status plan(const StepContext& step, const Request& request, LayerRun* run) override;
  float* pinned_inputs(const StepContext& step) override;
  void bring_ahead(const float* x, uint32_t n) override;
  void end_text() noexcept override;
  Status begin(const StepContext& step) override;
  Status mixer(uint32_t layer) override;
  Status feed_forward(uint32_t) override { return {}; }
  Status end() override;
  void abandon() noexcept override;
  uint64_t recordings() const override { return graphs_.recordings(); }
  Status logits(uint32_t first, float* out) override;
  const float* finished_logits(uint32_t n) const override {
    return logits_ == n && !finds_best_ ? host_logits_.get() : nullptr;
  }
  Token best(uint32_t i) const override {
    if (!finds_best_) return -1;
    const uint32_t index = largest_of(host_best_.get() + i * largest_parts).index;
    return index == no_largest ? -1 : static_cast<Token>(index);
  }
  bool last_logits(float* out) override;
  void committed(const StepContext& step, uint32_t kept) override;
  Status begin_layer(const SpanLayer& span) override;
  void rest() noexcept override;

 private:
  static constexpr uint32_t no_layer = UINT32_MAX;
  struct Product {
    const DeviceWeights::Matrix* matrix;
    float* y;
  };
  uint32_t layers() const { return end_layer() - first_layer(); }
  uint32_t local(uint32_t layer) const { return layer - first_layer(); }
  // Layers of a store that the executor has.
  struct KvLayers {
    uint32_t first = 0, count = 0;
  };
  static KvLayers kv_layers(const ModelConfig& config, const DeviceWeights& weights, bool windowed);
  static KvLayers state_layers(const ModelConfig& config, const DeviceWeights& weights);
  uint32_t local_kv(uint32_t layer) const { return config_.layer(layer).kv - kv_.first; }
  // Whether the GPU attends the layer through a window.
  bool attends_window(uint32_t layer) const {
    return has_windows_ && has_attention(layer) && config_.layer(layer).is_windowed();
  }
  const DeviceWeights::Layer& weights_of(uint32_t layer) const {
    return streamed_ ? streamed_->layer(layer) : weights_.layers()[local(layer)];
  }
  const DeviceWeights::Experts::Routed& routed_of(uint32_t layer) const {
    return streamed_ ? streamed_->routed(layer) : weights_of(layer).experts.routed;
  }
  bool has_end() const { return weights_.has_output() && !streamed_; }  // of the model
  // Whether the step's last layer leaves logits, and nothing for another executor or the caller.
  bool ends_model() const { return has_end() && !step_->step.hidden; }
  // Whether of a step's tokens, which attend as if alone, only the last one is attended.
  bool attends_last() const {
    return rows_ > 1 && step_->step.last_hidden && mode_ == AttentionMode::gpu_selective;
  }
  bool has_attention(uint32_t layer) const { return config_.layer(layer).has_attention(); }
  // A layer's arrays in one of n_ tokens.
  struct Projected {
    float *q, *k, *v;
  };
  Projected projected(uint32_t layer, float* qkv) const {
    const LayerConfig& c = config_.layer(layer);
    return {qkv, qkv + n_ * c.q_width(), qkv + n_ * (c.q_width() + c.kv_width())};
  }
  // Tokens of a step that attend as if alone, or 1.
  static uint32_t rows_of(const StepContext& c) { return c.step.open ? c.tokens() : 1; }
  // Of one of them.
  Projected row_of(uint32_t layer, float* qkv, uint32_t row) const {
    const LayerConfig& c = config_.layer(layer);
    const Projected p = projected(layer, qkv);
    const std::size_t q = row * c.q_width(), kv = row * c.kv_width();
    return {p.q + q, p.k + kv, p.v + kv};
  }
  DeviceActivations attended_row(const DeviceActivations& all, uint32_t row) const {
    return rows_ == 1 ? all : input_of(all, attends_last() ? 0 : row);
  }

  // ---- the plan --------------------------------------------------------------------------------
  Status plan_states(const StepContext& c);
  Status plan_windows(const StepContext& c, Fallback* why);
  Status plan_selective(const StepContext& c, Fallback* why);
  Status without_selective(const StepContext& c, bool exact, Fallback* why);
  Status plan_hybrid(const StepContext& c, Fallback* why);
  Status plan_prefill(const StepContext& c, Fallback* why);
  Status plan_decode(const StepContext& c, Fallback* why);
  Status measure_rate(const StepContext& c);
  Fallback staging() const;
  KvMirror::UpdateRequest update_request(const StepContext& c) const {
    return {c.store, c.gpus, c.pool, {stream_, copies_}, c.cancel};
  }
  void trim();

  // ---- the four modes of attention ------------------------------------------------------------
  Status keep_keys(uint32_t layer);
  Status mix_without_attention(uint32_t layer);
  Status mix_window(uint32_t layer);
  Status mix_window_for_cpu(uint32_t layer);
  void enqueue_window(uint32_t layer, float* qkv, float* out);
  Status project(uint32_t layer);
  Status attend(uint32_t layer);
  Status project_for_cpu(uint32_t layer);
  Status project_hybrid(uint32_t layer);
  Status attend_on_cpu(uint32_t layer);
  Status attend_selective(uint32_t layer);
  Status attend_hybrid(uint32_t layer);
  Status attend_prefill(uint32_t layer);
  Status end_on_cpu();
  Status end_selective();
  Status end_hybrid();
  Status end_prefill();
  Status advance_weights();
  bool moves_stream() const { return step_->is_pinned && span_x_; }
  bool takes_stream();
  bool runs_on() const;
  Status catch_up();
  void make_second_stream(uint64_t besides);
  void bring(const float* x, uint32_t n);
  void release_stream();
  void enqueue_stream();
  void enqueue_next_stream();
  Status end_chunk();

  // ---- work of the stream ---------------------------------------------------------------------
  void enqueue(int error) { error_ = error_ ? error_ : error; }  // keeps the step's first error
  Status wait(const char* what, DeviceStream* stream = nullptr);
  // Enqueues a part of the step, by f() or by its graph; part: an index of graphs_.
  template <class F>
  void as_graph(uint32_t part, F&& f) {
    if (!has_graphs()) return f();
    const GpuGraphs::Turn turn = graphs_.begin(stream_, graph_of(part), graph_wait(), &error_);
    if (turn == GpuGraphs::Turn::launched) return;
    f();
    if (turn == GpuGraphs::Turn::recorded && !graphs_.end(stream_, graph_of(part), &error_)) f();
  }
  // A fork that has drafts in a few steps is done sooner without graphs of them.
  uint32_t graph_wait() const { return n_ > 1 ? 2 : 0; }
  // Of steps of one token, and of open ones of each size.
  bool has_graphs() const { return (n_ == 1 || open_) && !waits_for_experts_ && !streamed_; }
  std::size_t graph_parts() const { return 3 * std::size_t{layers()} + 1 + 2 * kinds_of_step; }
  // By what is computed with a step.
  static constexpr uint32_t kinds_of_step = 8;
  uint32_t kind_of_step() const {
    return (logits_ > 0 ? 1u : 0u) + (hidden_ > 0 ? 2u : 0u) + (finds_best_ ? 4u : 0u);
  }
  // Of all layers of a step, and of its output.
  uint32_t step_part() const { return layers() + 1 + kind_of_step(); }
  uint32_t output_part() const { return layers() + 1 + kinds_of_step + kind_of_step(); }
  // Of co-execution.
  uint32_t hybrid_part(uint32_t layer) const {
    return layers() + 1 + 2 * kinds_of_step + local(layer);
  }
  std::size_t graph_of(uint32_t part) const { return (n_ - 1) * graph_parts() + part; }
  bool records_step() const { return has_graphs() && !selective_.needs_staging(); }
  void begin_recording(uint32_t part);
  void end_recording();
  void enqueue_projection(uint32_t layer, float* qkv);
  void enqueue_heads(uint32_t layer, const DeviceActivations& y, float* qkv);
  void enqueue_recurrent(uint32_t layer, const DeviceActivations& y);
  void enqueue_states(uint32_t layer);
  void add_recurrent(uint32_t layer);
  DeviceActivations rounded_gates(const DeviceWeights::Matrix& out) const;
  void enqueue_attended(uint32_t layer);  // feed-forward of the layer before, and the projection
  void enqueue_rest(uint32_t layer);      // of a layer that the GPU has attended
  void enqueue_feed_forward(uint32_t layer, const DeviceActivations& a);
  void check_and_feed_forward(uint32_t layer, float* a);
  void enqueue_experts(uint32_t layer);
  void enqueue_routers(uint32_t layer, const DeviceActivations& h, bool routed, bool shared);
  void enqueue_routed(uint32_t layer, const DeviceActivations& h);
  void enqueue_shared(uint32_t layer, const DeviceActivations& h);
  void enqueue_sum(uint32_t layer);
  void enqueue_host_copy();
  Status run_experts(uint32_t layer);
  DeviceActivations enqueue_gated(uint32_t layer);
  DeviceActivations expert_norm(const float* weight, uint32_t layer);
  DeviceActivations expert_inputs(uint32_t n, std::size_t cols, float* f32,
                                  std::initializer_list<const DeviceMatrix*> matrices) const;
  DeviceExpertRows expert_rows(uint32_t layer) const;
  bool joins_shared(uint32_t layer) const;
  void complete_before(uint32_t layer);
  void keep_inputs(float* pinned);
  Status enqueue_inputs(float* pinned, bool has_more);
  Status enqueue_joined(float* pinned);
  void enqueue_layer_inputs(std::vector<float>* staged);
  void finish_layer(uint32_t layer);
  void enqueue_end();
  void enqueue_kept(DeviceStream* stream);
  void enqueue_output();
  void enqueue_logits(uint32_t first, uint32_t n, bool keeps_hidden = false);
  void enqueue_copy(uint32_t layer);
  void enqueue_last_feed_forward(uint32_t layer, float* a);
  // f() of the step's tokens from `first` on, whose rows of the workspace come first then.
  template <class F>
  void of_last_rows(uint32_t first, F&& f) {
    const uint32_t n = n_;
    const bool open = open_;
    n_ -= first, first_row_ = first, open_ = open && n_ > 1;
    work_.x += first * size_.width, work_.y += first * size_.parallel;
    f();
    work_.x -= first * size_.width, work_.y -= first * size_.parallel;
    n_ = n, first_row_ = 0, open_ = open;
  }
  Status begin_delivery();
  Status project_prefill(uint32_t layer);
  Status copy_down(uint32_t layer);
  Status deliver_all_but(std::size_t left, uint32_t end);
  Status deliver(uint32_t layer);
  Status store_selective(ReadCounts* counts);
  Status finish_decode();
  DeviceActivations output_of(uint32_t layer, float* a) const;
  DeviceActivations attended_output(uint32_t layer) const;
  DeviceActivations inputs(float* f32, std::size_t cols,
                           std::initializer_list<const DeviceWeights::Matrix*> matrices) const {
    DeviceActivations to = work_.inputs(n_, f32, cols, matrices);
    if (n_ <= halves_room_) to.halves = halves_.get();
    return to;
  }
  std::span<DeviceProduct> prepare(const DeviceActivations& x,
                                   std::initializer_list<Product> products,
                                   std::span<DeviceProduct> room);
  void multiply(const DeviceActivations& x, std::initializer_list<Product> products,
                bool add = false);
  DeviceActivations norm(const DeviceWeights::Norm& weights, float* h, const DeviceCheck& check,
                         std::initializer_list<const DeviceWeights::Matrix*> matrices);
  void enqueue_norm(const float* x, const DeviceWeights::Norm& weights, const DeviceCheck& check,
                    const DeviceActivations& out);
  DeviceHeads heads_of(uint32_t layer, float* qkv) const;
  void norm_in_place(float* x, const float* weight, uint32_t cols, const DeviceCheck& check);
  void add_product(const DeviceActivations& a, const DeviceWeights::Matrix& w,
                   const DeviceWeights::Norm& post_norm, uint32_t layer);
  DeviceCheck check(uint32_t layer) const { return {too_large, layer, work_.first_bad}; }

  // ---- memory ---------------------------------------------------------------------------------
  Status resize(uint32_t n);
  Status try_resize(uint32_t n);
  Status resize_host(uint32_t n);
  Status resize_experts(uint32_t n);
  Status resize_attended(uint32_t n);
  Status resize_prefill(const StepContext& c);
  void resize_halves(uint32_t n);
  bool keeps_halves(const StepContext& step) const;
  void release_halves();
  void give_up_halves() { wait_for_streams(), kept_halves_.give_up(); }
  Status prepare_output();
  float* small_inputs();
  Status write_hidden();
  void forget_moved_graphs();
  uint64_t reserve() const;
  // Where memory is short: once more with a workspace no larger than the step's, until a prefill.
  template <class Prepare>
  Status or_with_less(Status s, uint32_t least, const Prepare& prepare) {
    if (s.code() != Code::no_memory || capacity_ <= least) return s;
    release_workspace();
    s = try_resize(least);
    gave_way_ = true;
    return s.ok() ? prepare() : std::move(s);
  }
  void release_windows();
  void release_workspace();
  uint64_t workspace_bytes(uint32_t n) const {
    return device_workspace_bytes(size_, experts_size_, n);
  }
  void release_selective();
  void release_hybrid();
  void release_prefill();
  bool release_one();
  void wait_for_streams() noexcept;
  void forget_graphs() { graphs_.forget(stream_); }
  std::size_t attended_floats() const { return n_ * (size_.q + 2 * size_.kv); }  // of a layer
  std::size_t attended_at(uint32_t layer) const {
    return attention_number_[local(layer)] * attended_floats();
  }
  float* attended(uint32_t layer) const { return attended_.get() + attended_at(layer); }
  std::size_t lse_floats(uint32_t n) const;
  std::size_t prefill_floats(uint32_t n) const;
  // Layers with attention use the slots in turn.
  std::size_t slot_of(uint32_t layer) const { return attention_number_[local(layer)] % slots(); }
  std::size_t slots() const { return streamed_ ? 1 : slots_; }  // a span: one layer
  float* prefill_slot(uint32_t layer) const {
    return prefill_.get() + slot_of(layer) * prefill_floats(n_);
  }
  float* prefill_output(uint32_t layer) const;

  const Model& model_;
  const ModelConfig& config_;
  const Widths size_;
  const int number_;
  const DeviceWeights& weights_;
  const std::unique_ptr<WeightStream> streamed_;
  // Of a span's layer, while it is computed: LayerExecutor::SpanLayer, and its chunk.
  std::span<const uint32_t> chunks_;
  std::size_t chunk_ = 0;
  float* span_x_ = nullptr;
  bool is_last_layer_ = false;
  bool is_behind_ = false;    // the GPU may still compute the chunk before
  KvLayers kv_, windows_kv_;  // without and with a window
  // [layers + 1] layers with attention before each: its place among what a step leaves
  std::vector<uint32_t> attention_number_;
  // The layer whose keys and values later layers with a window attend, and the last of those.
  uint32_t source_ = no_layer, last_sharing_ = no_layer;
  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  HostAttention* const host_;
  DeviceStream* stream_ = nullptr;
  // of attention by both, of experts' inputs, and of what a decode step leaves for the store
  DeviceStream* copies_ = nullptr;
  static constexpr std::size_t max_slots = GpuPrefillAttention::turns;
  std::size_t slots_ = max_slots;                      // fewer where memory is short
  std::array<DeviceStream*, max_slots> deliveries_{};  // copies of a slot to the store
  // [tokens] of a step, 1 to max_alone:
  // [layers + 1] the projection of each layer, the end;
  // [kinds_of_step] the layers of a step, by what is computed with it: logits, hidden states,
  // ForwardStep::best; and as many times the output;
  // [2 layers] co-execution: a layer's projection; a layer whose pages were read before
  GpuGraphs graphs_;
  uint64_t graph_generation_ = 0;

  // Of the step.
  const StepContext* step_ = nullptr;
  AttentionMode mode_ = AttentionMode::cpu;
  uint32_t n_ = 0;     // tokens
  bool open_ = false;  // ForwardStep::open
  uint32_t rows_ = 1;  // tokens that attend as if alone, or 1
  int error_ = 0;
  bool replays_ = false;        // the step's graph does all that is asked for
  bool records_ = false;        // what is enqueued goes to a graph
  bool graph_uploads_ = false;  // the step's graph has enqueue_inputs()
  uint32_t logits_ = 0;         // of the last tokens, computed with the step
  uint32_t hidden_ = 0;         // ForwardStep::hidden of the last tokens, computed with the step
  bool finds_best_ = false;     // ForwardStep::best, computed with the step
  bool logits_stay_ = false;    // last_logits() finds those of that step

  uint32_t capacity_ = 0;  // tokens that work_ has room for
  bool gave_way_ = false;  // to attention, which fitted then
  DeviceBuffer<std::byte> memory_;
  DeviceBuffer<std::byte> halves_;  // DeviceActivations::halves, for prefill
  uint32_t halves_room_ = 0;        // tokens
  KeptHalves kept_halves_;
  bool keeps_halves_ = false;  // in this step
  bool expects_more_ = false;  // attention has room for tokens that follow
  Workspace work_{};
  // The place of the residual stream that comes next, a chunk's or a step's, which takes turns with
  // work_.x; and where it comes from, or null.
  float* next_x_ = nullptr;
  bool lacks_second_x_ = false;
  const float* coming_ = nullptr;
  DeviceBuffer<float> second_x_;
  PinnedBuffer<uint32_t> bad_layer_;  // the host's copy
  uint32_t host_capacity_ = 0;        // tokens that the next two have room for
  PinnedBuffer<float> host_qkv_, host_a_;
  uint32_t pool_threads_ = 0;

  const bool has_experts_;        // of its layers
  const bool waits_for_experts_;  // the CPU computes routed experts of some layers
  const ExpertWidths experts_size_;
  ExpertWorkspace experts_work_{};  // behind work_
  std::unique_ptr<CpuExperts> experts_;
  Status experts_status_;          // of the step
  uint32_t experts_capacity_ = 0;  // tokens that the next two have room for
  PinnedBuffer<float> experts_x_;  // [n][width] the residual stream, then the experts' outputs
  Buffer<float> experts_h_;        // [2][n][width]

  GpuStates states_;
  uint32_t first_row_ = 0;  // the first token whose mixers' outputs are added to the stream
  GpuWindowAttention windows_;
  bool has_windows_ = false;  // the GPU attends them in this step
  GpuSelectiveAttention selective_;
  GpuHybridAttention hybrid_;
  GpuPrefillAttention prefill_attention_;
  // What did not fit: sequence length in extents, from 1 on, and tokens of the step; 0: it fits.
  struct Refused {
    uint32_t size = 0, tokens = 0;
    bool is(uint32_t now, uint32_t n) const { return size == now && n >= tokens; }
  } refused_selective_, refused_all_, refused_hybrid_, refused_prefill_;

  DeviceBuffer<std::byte> joined_;  // joined_inputs()
  DeviceBuffer<float> attended_;    // [layers with attention][n][q and k and v]
  static constexpr std::size_t best_bytes = largest_parts * sizeof(DeviceLargest);
  DeviceBuffer<DeviceLargest> best_;  // [logits_][largest_parts]
  PinnedBuffer<DeviceLargest> host_best_;
  PinnedBuffer<float> small_inputs_;  // of a step of a few tokens
  PinnedBuffer<float> keys_host_;     // ForwardStep::keys_only
  std::size_t keys_host_room_ = 0;    // floats
  PinnedBuffer<float> attended_host_, host_logits_, host_hidden_;
  uint32_t host_logits_room_ = 0;                       // tokens
  DeviceBuffer<float> prefill_;                         // [slots()][q, k, v, lse, output] of layers
  PinnedBuffer<float> prefill_host_, prefill_outputs_;  // outputs: where they are wanted
  std::size_t prefill_host_room_ = 0, host_slot_ = 0;   // floats: in all, of a layer
  // prefill_host_ has the queries of the tokens from first_query_ on, and of the first
  // probed_queries_ tokens.
  uint32_t first_query_ = 0, probed_queries_ = 0;
  uint32_t outputs_ = 0, outputs_room_ = 0;  // tokens whose outputs are wanted; and fit
  HostAttention::Probed probed_;
  uint32_t undelivered_ = 0;  // the first layer that did not go to the store
};

}  // namespace kvasir
