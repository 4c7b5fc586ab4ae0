// The device's side of what it attends beside the CPU (attention/hybrid_gpu.h): by every strategy
// that chooses on the CPU, and where all is attended. It has sinks and window, and reads as large a
// part of one token's pages, where they lie in host memory, as it reads fast beside what the CPU
// attends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include "attention/attention.h"
#include "attention/hybrid_gpu.h"
#include "backend/device.h"
#include "backend/thread_pool.h"
#include "base/status.h"
#include "offload/fallback.h"
#include "offload/filter_group_cache.h"
#include "offload/kv_mirror.h"
#include "select/plan.h"

namespace kvasir {

class GpuHybridAttention final : public HybridGpu {
 public:
  // As GpuSelectiveAttention has them.
  GpuHybridAttention(const std::shared_ptr<Device>& device,
                     std::shared_ptr<DeviceSketches> sketches, const HeadShape& heads,
                     const StoreShape& shape, uint32_t first, uint32_t layers);

  // Why the CPU attends a step of n tokens. exact: every token is attended in every layer.
  Fallback refuses(const KvStore& store, const Plan& plan, bool exact, uint32_t n) const;
  // As GpuSelectiveAttention::prepare(); reserve: bytes that packed layers leave. Then what is read
  // where is known.
  Status prepare(const KvStore& store, const Plan& plan, bool exact, uint32_t n, uint32_t devices,
                 uint64_t reserve, ThreadPool* pool, const KvMirror::Streams& streams,
                 const CancelLatch& cancel);
  bool reads() const { return reads_; }
  // Why it does not read pages, as far as is known; none: it does, or will. And in words how the
  // pages are shared.
  Fallback cannot_read() const;
  std::string share() const;

  // With how much the CPU attends a second, rates are known from then on. Code::device.
  bool wants_rate(uint32_t threads) const { return !device_->page_rates(threads).known(); }
  Status measure(double processor, uint32_t threads, const CancelLatch& cancel,
                 DeviceStream* stream);

  // A step: begin(), then of every layer give_projected(), enqueue_near() with what Beside has or
  // give_packed(), and give_finish(); then give_end(). q, k, v, out, check: as
  // GpuSelectiveAttention has them. An error of the table.
  void begin(const KvStore& store, ThreadPool* pool, DeviceStream* stream, DeviceStream* beside);
  bool is_packed(uint32_t layer) const { return packs_ && packed_.has(first_ + layer); }
  int give_projected(DeviceStream* stream, uint32_t layer, const float* q, const float* k,
                     const float* v);
  // to the other stream, so that it is done while the CPU chooses
  int enqueue_near(uint32_t layer);
  int give_packed(DeviceStream* stream, uint32_t layer);
  // the packed layers' quads: comes before the first of them
  int wait_for_packed(DeviceStream* stream);
  int give_finish(DeviceStream* stream, uint32_t layer, bool packed, const DeviceActivations& out,
                  const DeviceCheck& check);
  int give_end(DeviceStream* stream);
  // What was read for certain, of layers where the strategy samples.
  void collect(const Plan& plan, bool exact, ReadCounts* counts) const;
  const float* lse_of(uint32_t layer) const {
    return lse_host_.get() + std::size_t{layer} * n_ * heads_.heads;
  }
  void committed(const KvStore& store);

  // The layer that is under way.
  struct UnderWay {
    uint32_t layer = 0;
    DeviceActivations out;
    DeviceCheck check;
  };
  void set_layer(const UnderWay& of) { of_ = of, has_parts_ = is_finished_ = false; }
  bool is_finished() const { return is_finished_; }

  Status near(const float** sums) override;
  uint32_t sixteenths() const override { return n_ == 1 ? sixteenths_ : 0; }
  Lists lists() override;
  Status give_lists() override;
  Status give_pages(uint32_t first) override;
  float* states() override { return states_host_.get(); }
  Status totals(const float** totals) override;
  bool packs() const override { return packs_ && packed_.chooses(first_ + of_.layer); }
  Status pack(uint32_t filter_layer, const Selection& choice) override;

  void trim() { sequence_.trim(); }
  void release();
  bool holds_memory() const { return sequence_.holds_memory(); }
  uint64_t generation() const {
    return sequence_.generation() + packed_.generation() + generation_;
  }

 private:
  Status make_room(uint32_t n, uint32_t most);
  DeviceAttention work() const;

  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const HeadShape heads_;
  const StoreShape shape_;
  const uint32_t first_, layers_;
  KvMirror sequence_;
  FilterGroupCache packed_;
  bool packs_ = false, wants_packed_ = false;
  Fallback why_not_packed_ = Fallback::none;
  uint64_t generation_ = 0;
  // tokens of the step; those that there is room for, and quads of a list
  uint32_t n_ = 0, room_ = 0, most_ = 0;
  PageRates rates_;
  uint32_t sixteenths_ = 0;
  bool reads_ = false;
  bool under_way_ = false;

  UnderWay of_;
  bool has_parts_ = false, is_finished_ = false;
  DeviceStream *stream_ = nullptr, *beside_ = nullptr;  // of the step, and so are
  const KvStore* store_ = nullptr;
  ThreadPool* pool_ = nullptr;
  ReadCounts counts_;              // of what filter groups read
  bool waits_for_packed_ = false;  // what was given to the other stream

  DeviceBuffer<float> q_, q_scale_, states_, lse_, mass_;
  DeviceBuffer<int8_t> q8_;
  auto buffers() { return std::tie(q_, q_scale_, states_, lse_, mass_, q8_); }
  PinnedBuffer<float> near_sums_, states_host_, lse_host_, mass_host_, biases_;
  PinnedBuffer<uint32_t> quads_, list_counts_;
  PinnedBuffer<uint8_t> present_;
};

}  // namespace kvasir
