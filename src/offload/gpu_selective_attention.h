// Attention of a step's tokens on a GPU alone, for the layers of that GPU: by the strategy
// `bounded`, or of one token that attends everything. It computes what attention/attention.cc
// computes on the CPU, in one stream without a wait between layers. The GPU reads pages from pinned
// host memory, and keeps what it reads again: quads that are often chosen, or all. Until pages are
// pinned, the CPU stages those of each layer once they are chosen.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "backend/device.h"
#include "backend/query_groups.h"
#include "backend/thread_pool.h"
#include "base/status.h"
#include "offload/fallback.h"
#include "offload/kv_mirror.h"
#include "offload/staged_pages.h"
#include "select/plan.h"

namespace kvasir {

class GpuSelectiveAttention {
 public:
  // Of `layers` layers from `first` on. Layer numbers of the methods begin at `first`.
  GpuSelectiveAttention(const std::shared_ptr<Device>& device,
                        std::shared_ptr<DeviceSketches> sketches, const HeadShape& heads,
                        const StoreShape& shape, uint32_t first, uint32_t layers);

  // [layers] DeviceKv::sink_logits; empty: none.
  void set_sink_logits(const std::vector<const float*>& logits) {
    sequence_.set_sink_logits(logits);
  }

  // Why the CPU attends a step of n tokens. exact: every token is attended in every layer.
  Fallback refuses(const KvStore& store, const Plan& plan, bool exact, uint32_t n) const;
  // Updates the mirror and allocates memory. Errors as KvMirror::update().
  Status prepare(const KvMirror::UpdateRequest& request, const Plan& plan, bool exact, uint32_t n);
  // Before prepare(), of a step of one token: it has so many rows, of which each attends as the
  // token after those before it. set_row(): the row that the other functions are about.
  void set_rows(uint32_t rows) { rows_ = rows, row_ = 0; }
  void set_row(uint32_t row) { row_ = row; }
  // Whether stage_chosen() comes between enqueue_choice() and enqueue_chosen().
  bool needs_staging() const { return needs_staging_; }
  Fallback cannot_share() const { return sequence_.cannot_share(); }  // why later steps need it

  // After prepare(): allocates room for quads that stay from token to token. Leaves memory for a
  // fork of this length and for `reserve` bytes; fewer quads stay where less is left, or none where
  // all of them have to. Other quads are read from host memory. Code::device.
  Status keep_hot_quads(const KvStore& store, const Plan& plan, uint64_t reserve,
                        DeviceStream* stream);
  // True if that freed memory.
  bool drop_hot_quads();
  // Whether all quads stay, or there is room for it. Without that, the CPU helps to attend
  // everything.
  bool keeps_all(const KvStore& store) const;
  bool may_keep_all(const KvStore& store, uint64_t reserve) const;

  // Enqueue the two parts of a layer: the choice, and the attention of what was chosen, or of
  // everything. All device.
  // q: [n][heads * head_dim], k and v: [n][kv_heads * head_dim] after RoPE; out: as q, as
  // finish_attention() has it. An error of the table.
  int enqueue_choice(DeviceStream* stream, uint32_t layer, const float* q, const float* k,
                     const float* v);
  int enqueue_chosen(DeviceStream* stream, uint32_t layer, const DeviceActivations& out,
                     const DeviceCheck& check);
  // In place of both, of a row that is not attended: its keys and values are, by later ones.
  int enqueue_keys(DeviceStream* stream, uint32_t layer, const float* q, const float* k,
                   const float* v) {
    return ops_.begin_attention(stream, sequence_.layer(layer, row_), work(layer), q, k, v);
  }
  // Waits for the stream. After a cancel, nothing may be enqueued. Code::corrupt, Code::io,
  // Code::device; throws std::bad_alloc, and work may be under way then.
  Status stage_chosen(const KvStore& store, const Plan& plan, uint32_t layer,
                      const CancelLatch& cancel, ThreadPool* pool, DeviceStream* stream);
  // Uploads what prepare() has left in host memory, before a step's work or with its graph.
  int enqueue_counts(DeviceStream* stream) const;
  // Comes before a step's work, whether enqueued or replayed by a graph. first_row: rows before it
  // are not attended.
  void begin(uint32_t first_row) { under_way_ = true, first_row_ = first_row; }
  // Downloads what collect() checks, after the last layer.
  int enqueue_results(DeviceStream* stream);
  // After a wait for the stream: verifies the pages that were read. Code::corrupt: the step must be
  // dropped.
  Status collect(const KvStore& store, ThreadPool* pool, ReadCounts* counts) const;
  // [n or rows][heads]
  const float* lse_of(uint32_t layer) const {
    return lse_host_.get() + std::size_t{layer} * rows_ * n_ * heads_.heads;
  }

  // kept: tokens that the store has committed.
  void committed(const KvStore& store, uint32_t kept) {
    sequence_.committed(store, kept);
    under_way_ = false;
    if (exact_) kept_step_ = sequence_.step(), kept_quads_ = read_quads_;
  }

  // After a wait for the stream. trim() unregisters host memory that the store has freed; release()
  // frees everything.
  void trim() { sequence_.trim(); }
  void release();
  bool holds_memory() const { return sequence_.holds_memory(); }

  // A graph is valid as long as this number is the same.
  uint64_t generation() const { return sequence_.generation() + generation_; }

 private:
  DeviceBudget budget_of(const Plan& plan, uint32_t layer) const;
  std::vector<uint32_t> hot_ends(const KvStore& store, const Plan& plan, uint32_t lists) const;
  uint64_t hot_bytes(uint64_t quads) const;
  bool intact(const KvStore& store, ThreadPool* pool) const;
  void count_all(const KvStore& store, ReadCounts* counts) const;
  Status make_room(const Plan& plan, uint32_t n, uint32_t extents);
  void forget_hot_quads();
  uint32_t hot_before(uint32_t layer) const {
    return layer > 0 && !hot_ends_.empty() ? hot_ends_[layer - 1] : 0;
  }
  uint32_t hot_room(uint32_t layer) const {
    return hot_ends_.empty() ? 0 : hot_ends_[layer] - hot_before(layer);
  }
  uint32_t blocks() const { return query_groups(n_, heads_.group()); }
  std::size_t lists() const { return std::size_t{shape_.kv_heads} * blocks(); }  // of a layer
  std::size_t place_of(uint32_t layer) const { return std::size_t{layer} * rows_ + row_; }
  DeviceAttention work(uint32_t layer) const;

  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const HeadShape heads_;
  const StoreShape shape_;
  const uint32_t first_, layers_;
  KvMirror sequence_;
  uint64_t generation_ = 0;
  // tokens of the step, and what there is room for
  uint32_t n_ = 0, room_ = 0, extents_ = 0, list_quads_ = 0;
  uint32_t rows_ = 1, row_ = 0, first_row_ = 0;
  DeviceBuffer<float> q_, q_scale_, projected_scale_, scores_, score_sums_, thresholds_, biases_,
      states_, lse_, mass_;
  DeviceBuffer<int8_t> q8_, projected_;
  DeviceBuffer<uint32_t> share_counts_, part_counts_;
  DeviceBuffer<unsigned long long> share_sums_;
  DeviceBuffer<uint32_t> lists_, list_counts_;  // of all layers and rows
  DeviceBuffer<uint8_t> gathered_;              // of one; of steps of several tokens
  auto buffers() {                              // all but those of quads that stay
    return std::tie(q_, q_scale_, projected_scale_, scores_, score_sums_, thresholds_, biases_,
                    states_, lse_, mass_, q8_, projected_, share_counts_, part_counts_, share_sums_,
                    lists_, list_counts_, gathered_);
  }
  uint64_t hot_tried_ = 0;  // quads of a KV head of all layers, that room was last looked for
  // [layers] the sum of what these and the layers before have room for, of a KV head's quads;
  // empty: none stay
  std::vector<uint32_t> hot_ends_;
  bool needs_staging_ = false, exact_ = false;
  StagedPages staged_pages_;
  PinnedBuffer<uint32_t> found_host_;  // of a layer
  // of a KV head: the quads of a step that reads all, and those that the last such step kept
  uint32_t read_quads_ = 0, kept_quads_ = 0, kept_step_ = 0;
  // a step that may have kept quads; one that fails may have kept some that it has not read
  bool under_way_ = false;
  DeviceBuffer<uint8_t> hot_quads_;
  DeviceBuffer<unsigned long long> hot_entries_;
  DeviceBuffer<uint32_t> found_;
  PinnedBuffer<float> lse_host_, mass_host_;
  PinnedBuffer<uint32_t> lists_host_, list_counts_host_;
  PinnedBuffer<DeviceBudget> budgets_host_;
};

}  // namespace kvasir
