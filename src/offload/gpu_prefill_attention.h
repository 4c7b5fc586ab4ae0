// Exact attention of prefill on a GPU. The GPU keeps a copy of the sealed pages, which grows with
// the text. Window and sinks are copied with every step. The store's stamps identify the copy.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device.h"
#include "backend/thread_pool.h"
#include "base/status.h"
#include "model/config.h"
#include "offload/fallback.h"
#include "store/kv_store.h"

namespace kvasir {

class GpuPrefillAttention {
 public:
  // As GpuSelectiveAttention.
  GpuPrefillAttention(const std::shared_ptr<Device>& device, const HeadShape& heads,
                      const StoreShape& shape, uint32_t first, uint32_t layers);

  // Why the CPU attends a step of n tokens.
  Fallback refuses(const KvStore& store, uint32_t n) const;
  // Updates the copy; waits for the stream. Code::no_memory: there is no room for the text, and
  // release() comes next. Code::corrupt (a damaged page of a mapped file);
  // Code::device; Code::cancelled: what has come stays.
  Status prepare(const KvStore& store, uint32_t n, ThreadPool* pool, DeviceStream* stream,
                 const CancelLatch& cancel);
  // Enqueues a layer. All device; as in GpuSelectiveAttention. lse: [n][heads]. An error of the
  // table.
  int enqueue(DeviceStream* stream, uint32_t layer, const float* q, const float* k, const float* v,
              float* out, float* lse) const;
  // Copies pages of a layer that the store sealed ahead of its commit(), once the stream has
  // computed that layer: the next prepare() then has less to copy. Does not wait; before the next
  // layer's call the caller waits for the stream. committed(): it was the whole step. An error of
  // the table.
  int put_ahead(const KvStore& store, uint32_t layer, ThreadPool* pool, DeviceStream* stream);
  void committed(const KvStore& store);
  // While no work is under way: frees everything.
  void release();
  bool holds_memory() const { return !blocks_.empty() || window_.get(); }

 private:
  Status make_room(const KvStore& store, uint32_t n);
  Status put_pages(const KvStore& store, ThreadPool* pool, DeviceStream* stream,
                   const CancelLatch& cancel);
  Status put_rows(const KvStore& store, ThreadPool* pool, DeviceStream* stream);
  std::size_t heads_total() const { return std::size_t{layers_} * shape_.kv_heads; }
  std::size_t first_head() const { return std::size_t{first_} * shape_.kv_heads; }
  std::size_t pages_size() const { return heads_total() * PageShape::pages_bytes(); }
  std::size_t scales_size() const { return heads_total() * shape_.page.scales_bytes(); }

  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const HeadShape heads_;
  const StoreShape shape_;
  const uint32_t first_, layers_;
  uint32_t n_ = 0, pages_ = 0, window_count_ = 0;  // of the step
  bool centred_ = false;
  // some extents' pages, then their scales, of all the layers' heads
  std::vector<DeviceBuffer<std::byte>> blocks_;
  std::vector<uint64_t> addresses_;  // [extents] of their pages
  std::vector<uint64_t> stamps_;     // [extents] of what was copied; 0: nothing yet
  std::size_t placed_ = 0;           // addresses that the GPU has
  uint32_t ahead_ = 0;               // layers of the step whose pages were put ahead
  DeviceBuffer<uint64_t> pages_at_, scales_at_;
  uint32_t room_ = 0, q_room_ = 0, window_room_ = 0, extents_room_ = 0;
  uint64_t sinks_stamp_ = 0;
  DeviceBuffer<uint16_t> keys_, values_, q_;
  DeviceBuffer<float> q_scale_, largest_, sinks_, centre_, window_;
  PinnedBuffer<std::byte> staging_;  // two halves: one is filled while the other is on its way
  std::size_t staging_half_ = 0;
};

}  // namespace kvasir
