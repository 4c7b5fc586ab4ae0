// The KV cache of one sequence for an engine with its own weights. It has the pages, window,
// strategies and file of a session. The engine computes everything between the layers.
//
// A step of 1 .. max_step tokens is update() of every layer, in any order, each with an optional
// attention() after it. The step is complete when every layer has its update. The next step, or an
// operation on the whole sequence, commits it; then it can no longer be attended. truncate() drops
// an incomplete step, and the removed tokens of a complete one. Steps of one token use the
// strategy; longer steps are exact. An operation completes or leaves the cache unchanged, but it
// may have committed a complete step. Not thread-safe; src/api serialises calls.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/status.h"
#include "select/plan.h"
#include "session/number_arrays.h"
#include "session/saved_store.h"
#include "session/session_stats.h"
#include "store/kv_store.h"

namespace kvasir {

struct BareOptions {
  HeadShape shape;
  uint64_t max_tokens = 0;
  std::array<uint8_t, 32> identity{};  // of the engine's model; load compares it
  uint32_t threads = 0;
  bool full_precision = false;
  uint32_t window = 64;
  SelectOptions select;
  MemoryBudget memory;  // it limits the size of a step
};

struct BareQuery {
  uint32_t layer = 0, tokens = 0;
  Numbers type = Numbers::f32;
  const void* q = nullptr;  // [tokens][heads][head_dim] after RoPE
  void* out = nullptr;      // likewise
  float scale = 0;          // of scores; 0: 1 / sqrt(head_dim)
  float softcap = 0;        // scores are softcap * tanh(score / softcap); 0: no cap
  const Cancel* cancel = nullptr;
};

class ExternalStore {
 public:
  static constexpr uint32_t max_step = 4096;  // tokens

  static Status open(const BareOptions& options, std::unique_ptr<ExternalStore>* out);
  // Window and precision come from the file.
  static Status load(const std::string& path, BareOptions options, bool verify,
                     const Cancel* cancel, Progress::Report progress,
                     std::unique_ptr<ExternalStore>* out);
  Status fork(const Cancel* cancel, std::unique_ptr<ExternalStore>* out);

  // k, v: [tokens][kv_heads][head_dim], K after RoPE. q: [tokens][heads][head_dim] likewise or
  // null.
  Status update(uint32_t layer, Numbers type, const void* k, const void* v, const void* q,
                uint32_t tokens);
  Status attention(const BareQuery& query);
  Status truncate(uint64_t tokens);
  Status save(const std::string& path, const Cancel* cancel, Progress::Report progress);
  const HeadShape& shape() const { return options_.shape; }
  // Commits and returns the whole sequence, valid until the next call. Code::bad_state: the step is
  // incomplete.
  Status finish(const KvStore** out);
  uint64_t tokens() const { return store_.tokens() + (complete() ? step_tokens_ : 0); }
  ExternalStats stats() const;
  std::string stats_json() const;

 private:
  ExternalStore(const BareOptions& options, KvStore store);
  static Status resolve(BareOptions* options);
  static StoreShape store_shape(const BareOptions& options);
  Status start();
  bool complete() const { return step_tokens_ > 0 && updated_ == options_.shape.layers; }
  Status begin_step(uint32_t tokens);
  Status settle(const char* what, const Cancel* cancel);
  Status commit_complete(const char* what);
  void commit();
  Status prepare_sketch(const Plan& plan, const Cancel* cancel);
  void plan_step(uint32_t tokens);
  Status check_choice(uint32_t layer) const;

  BareOptions options_;
  std::shared_ptr<ThreadPool> pool_;  // shared by the cache and its forks
  std::unique_ptr<Attention> attention_;
  const StrategyInfo* planned_ = nullptr;  // of selector and memory
  std::unique_ptr<const Selector> selector_;
  std::unique_ptr<StepMemory> memory_;
  KvStore store_;
  Plan plan_;                                // of the open step or the last one
  const Selector* step_selector_ = nullptr;  // null: the step is exact
  static constexpr uint32_t no_layer = UINT32_MAX;
  uint32_t chosen_by_ = no_layer;  // filter layer of this step whose selection is in memory_

  uint32_t step_tokens_ = 0;         // of the open step; 0: none is open
  uint32_t updated_ = 0;             // layers of the step with an update
  std::vector<bool> layer_updated_;  // [layers]
  bool committed_ = false;           // the newest step is in the store, and no other has begun
  Array<float> k_, v_, q_, out_, lse_;
};

}  // namespace kvasir
