// A run of layers on the CPU.
//
//   cpu_executor.cc      a step, its workspace, norms, logits and checks
//   cpu_mixers.cc        x += mixer(norm(x)): attention, latent attention, recurrent layers
//   cpu_feed_forward.cc  x += network(norm(x)): the dense network, experts, the end of a layer
#pragma once

#include <initializer_list>
#include <memory>

#include "base/memory.h"
#include "engine/altup.h"
#include "engine/cpu_experts.h"
#include "engine/cpu_latent.h"
#include "engine/cpu_products.h"
#include "engine/cpu_recurrent.h"
#include "engine/cpu_tasks.h"
#include "engine/layer_executor.h"

namespace kvasir {

class CpuExecutor final : public LayerExecutor {
 public:
  CpuExecutor(const Model& model, uint32_t first_layer, HostAttention* attention, ThreadPool* pool);

  Status plan(const StepContext& step, const Request& request, LayerRun* run) override;
  Status begin(const StepContext& step) override;
  Status mixer(uint32_t layer) override;
  Status feed_forward(uint32_t layer) override;
  Status end() override;
  void keep_first(uint32_t kept) override {
    if (recurrent_) recurrent_->keep_first(kept);
  }
  Status logits(uint32_t first, float* out) override;

 private:
  Status attention(uint32_t layer, const float* h);
  Status latent(uint32_t layer, const float* h);
  Status recurrent(uint32_t layer, const float* h);
  void project(uint32_t layer, const float* h);
  void gate_output(const LayerConfig& c, uint32_t first);
  void dense(uint32_t layer, const float* h, uint32_t n);
  Status experts(uint32_t layer, CpuExperts::Input input, float* out);
  Status add_experts(uint32_t layer, const float* x, uint32_t n);
  void resize(uint32_t n);
  void multiply(const float* x, uint32_t n, uint32_t cols,
                std::initializer_list<CpuProducts::Product> products) {
    products_.multiply(x, n, cols, products);
  }
  const float* norm(const float* x, const Norm& weights, uint32_t n, float* out);
  void normalise(const float* x, const Norm& weights, uint32_t n, float* y) const;
  void rotate(const LayerConfig& c, float* x, uint32_t heads, const Array<float>& weight);
  void normalise_heads(const LayerConfig& c, float* row, uint32_t heads,
                       const Array<float>& weight) const;
  void add_laurel(const float* laurel, uint32_t first);
  void make_values(const LayerConfig& c);
  void scale_queries(const LayerConfig& c);
  void add(float* x, const Norm& post_norm, uint32_t n);
  void activate(const LayerConfig& c, uint32_t n);
  void finish_layer(uint32_t layer, uint32_t first);
  void add_layer_input(float* x, const Norm& post_norm, uint32_t n, uint32_t first);
  Status check_layer(uint32_t layer, uint32_t first);
  template <class F>
  void by_rows(uint32_t n, F&& f) {
    for_blocks(pool_, *cancel_, 0, n,
               [&](std::size_t first, uint32_t count, uint32_t) { f(first, count); });
  }

  const Model& model_;
  const Kernels& kernels_;
  HostAttention* const attention_;
  ThreadPool* const pool_;
  // Of the step.
  const StepContext* step_ = nullptr;
  const CancelLatch* cancel_ = nullptr;
  uint32_t n_ = 0;  // tokens

  uint32_t capacity_ = 0;  // tokens that the workspace holds
  Buffer<float> h_;        // [n][width] a normalised input, or an output
  // [n][width] the input of a parallel layer's mixer and network; twice: of experts, and of their
  // router
  Buffer<float> y_;
  Buffer<float> q_, k_, v_, a_;  // [n][heads or kv_heads][head_dim]; a: attention's output
  Buffer<float> query_gates_;    // [n][heads][2][head_dim]: queries and their output's gates
  Buffer<float> gate_, up_;      // [n][feed_forward]
  CpuProducts products_;
  std::unique_ptr<AltUp> altup_;             // of a model with several streams
  std::unique_ptr<CpuExperts> experts_;      // null where no layer has experts
  std::unique_ptr<CpuRecurrent> recurrent_;  // null where no layer is recurrent
  std::unique_ptr<CpuLatent> latent_;        // likewise
};

}  // namespace kvasir
