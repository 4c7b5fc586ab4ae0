// Attention of layers whose queries see a window, on a GPU. Each layer's newest keys and values are
// in a ring in GPU memory, in full precision. The host's store of windows stays the master: save,
// fork and rewind work from it. The step writes its own keys and values to the ring, and the caller
// writes them to the store. Where the store's stamp shows other tokens than the ring has (after a
// load, a fork, a rewind or a failed step), prepare() copies them from the store.
//
// Of a step of which only some tokens may stay each token is attended as if alone: set_rows()
// before prepare(), of a step of one token then, and set_row() before enqueue().
//
// A step of many tokens is attended by the kernels of prefill, on tensor cores, where they
// have the layer's head size and its scores are not capped.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device.h"
#include "backend/thread_pool.h"
#include "base/status.h"
#include "model/config.h"
#include "store/kv_store.h"

namespace kvasir {

class GpuWindowAttention {
 public:
  // Of `layers` layers of the store of windows, from `first` on.
  GpuWindowAttention(const std::shared_ptr<Device>& device, const ModelConfig& config,
                     uint32_t first, uint32_t layers);

  uint32_t layers() const { return layers_; }
  // Changes the layers, from another first one on. Nothing of theirs is copied yet.
  void move_to(uint32_t first) { first_ = first, stamp_ = 0; }
  // For a step of n tokens; waits for the stream. Code::no_memory: the caller must release().
  // Code::corrupt (a damaged page of a mapped file), Code::device, Code::cancelled. Throws
  // std::bad_alloc.
  Status prepare(const KvStore& store, uint32_t n, ThreadPool* pool, DeviceStream* stream,
                 const CancelLatch& cancel);
  // A step: begin(), then enqueue() for every layer. q, k, v and out in GPU memory, as
  // DeviceKernels::attend_window() has them; sinks: [heads] in GPU memory, or null. keeps: the
  // layer is the last one to attend these keys and values. Returns an error code of DeviceKernels.
  int begin(uint64_t position, DeviceStream* stream);
  void set_rows(uint32_t rows) { rows_ = rows, row_ = 0; }
  void set_row(uint32_t row) { row_ = row; }
  struct Rows {
    const float *q, *k, *v;
    float* out;
  };
  int enqueue(DeviceStream* stream, uint32_t layer, const float* sinks, const Rows& rows,
              bool keeps) const;
  // After the store has committed the step.
  void committed(const KvStore& store);

  void release();  // no work may be enqueued
  bool holds_memory() const { return ring_.get() || states_.get() || keys_.get(); }
  uint64_t generation() const { return generation_; }  // changes with the addresses

 private:
  bool lays_out(uint32_t n) const;
  Status make_room(uint32_t n);
  Status make_prefill_room(uint32_t n);
  void release_prefill();
  DevicePrefill prefill(uint32_t layer, const float* sinks) const;
  DeviceWindow window(uint32_t layer, const float* sinks) const;
  Status put_rows(const KvStore& store, ThreadPool* pool, DeviceStream* stream,
                  const CancelLatch& cancel);
  bool fill(const KvStore& store, uint32_t head, uint64_t first, float* unsealed, float* to) const;
  std::size_t head_floats() const { return std::size_t{2} * room_ * heads_.head_dim; }
  uint32_t heads_total() const { return layers_ * heads_.kv_heads; }

  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const HeadShape heads_;
  uint32_t first_;
  const uint32_t layers_, window_, room_;
  const bool chunked_;
  const float softcap_;
  uint32_t n_ = 0, rows_ = 1, row_ = 0;
  uint64_t position_of_step_ = 0;
  std::size_t states_room_ = 0;  // floats
  uint64_t stamp_ = 0;           // of the store's tokens that the ring has; 0: none
  bool under_way_ = false;       // a step has written to the ring
  uint64_t generation_ = 0;
  DeviceBuffer<float> ring_;    // [layers][kv_heads][2][room][head_dim]
  DeviceBuffer<float> states_;  // DeviceWindow::states
  DeviceBuffer<uint64_t> position_;
  uint32_t rows_room_ = 0, q_room_ = 0;       // of a prefill
  DeviceBuffer<uint16_t> keys_, values_, q_;  // as DevicePrefill has them
  DeviceBuffer<float> q_scale_, largest_, sink_scores_, lse_;
  PinnedBuffer<uint64_t> position_host_;
};

}  // namespace kvasir
