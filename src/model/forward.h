// The forward pass: tokens in, logits out, keys and values into the store. One object a session: it owns the workspace.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"
#include "compute/thread_pool.h"
#include "model/attention.h"
#include "model/model.h"
#include "select/index_build.h"
#include "select/plan.h"
#include "store/kv_store.h"

namespace kvasir {

struct ForwardStep {
  std::span<const Token> tokens;      // 1 .. the chunk size that the caller chose
  const Selector* selector = nullptr; // null: every layer is exact
  Plan plan;                          // dense layers and budget, where there is a selector
  StepMemory* memory = nullptr;       // the selector's own, where it has one
  RecentQueries* queries = nullptr;   // where set, the step's newest queries are added to it
  IndexQueries* asked = nullptr;      // where set, the step's queries are written to it, from this token on
  uint32_t asked_at = 0;
  enum class Logits { none, last, all } want = Logits::none;
  float* logits = nullptr;            // [vocabulary] or [tokens][vocabulary]
  const Cancel* cancel = nullptr;

  // Where set, probe_tokens of an exact step's tokens also go through this selector, and errors[layer] receives how far its
  // attention output is from the exact one, relative L2. What is computed does not change.
  const Selector* probe = nullptr;
  uint32_t probe_tokens = 0;
  float* errors = nullptr;  // [layers]
};

class Forward {
 public:
  Forward(std::shared_ptr<const Model> model, ThreadPool* pool);

  // Runs the tokens at the end of the store and commits them. On any failure the store is as before.
  // Code::cancelled, Code::corrupt (damaged page; weights that make numbers that are none); throws std::bad_alloc.
  Status run(const ForwardStep& step, KvStore* store);

  Attention& attention() { return attention_; }

 private:
  struct Product {
    const Linear* linear;
    float* y;  // [n][rows]
  };
  void resize(uint32_t n);
  void quantize(const float* x, uint32_t n, uint32_t cols);
  void multiply(const float* x, uint32_t n, uint32_t cols, std::initializer_list<Product> products);
  void norm(const float* x, const Array<float>& weight, uint32_t n, float* y);
  void rotate(float* x, uint32_t n, uint32_t heads, const Array<float>& head_norm);
  void add(float* x, const float* y, uint32_t n);
  void gate(float* gate, const float* up, uint32_t n);
  Status probe(const ForwardStep& step, uint32_t layer, const KvStore& store);
  Status write_logits(const ForwardStep& step, uint32_t n);
  Status check_layer(uint32_t layer, uint32_t n);
  template <class F>
  void by_rows(uint32_t n, F&& f);

  std::shared_ptr<const Model> model_;
  const Kernels& kernels_;
  ThreadPool* pool_;
  Attention attention_;

  const CancelLatch* cancel_ = nullptr;  // of the running step
  uint32_t capacity_ = 0;          // tokens the workspace holds; not cleared, which would take long where it is large
  Buffer<float> x_, h_;             // [n][width] residual stream; its normalised copy
  Buffer<float> q_, k_, v_;         // [n][heads * head_dim], [n][kv_heads * head_dim] twice
  Buffer<float> a_;                 // [n][heads * head_dim] attention's output
  Buffer<float> totals_;            // [n][heads] as RecentQueries::totals
  Buffer<float> gate_, up_;         // [n][feed_forward]
  Buffer<float> cos_, sin_;         // [n][rope dim / 2]
  Buffer<int8_t> quants_;           // [n][widest input]
  Buffer<float> scales_;            // [n][widest input / 32]
  Buffer<int16_t> sums_;            // [n][widest input / 16]
  Array<std::byte> scratch_;       // [threads][scratch of the largest matrix]
  std::size_t scratch_size_ = 0;   // of one thread
};

}  // namespace kvasir
