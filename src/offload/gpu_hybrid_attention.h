// The GPU's part of co-execution (attention/hybrid_gpu.h): for every strategy that chooses on the
// CPU, and for full attention. The GPU attends sinks and window. It also reads a part of one
// token's pages from pinned host memory; the two measured rates set how large the part is.
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

  // [layers] DeviceKv::sink_logits; empty: none.
  void set_sink_logits(const std::vector<const float*>& logits) {
    sequence_.set_sink_logits(logits);
  }

  // Why the CPU attends a step of n tokens. exact: every token is attended in every layer.
  Fallback refuses(const KvStore& store, const Plan& plan, bool exact, uint32_t n) const;
  // As GpuSelectiveAttention::prepare(); reserve: bytes that packed layers leave free.
  Status prepare(const KvMirror::UpdateRequest& request, const Plan& plan, bool exact, uint32_t n,
                 uint64_t reserve);
  // As GpuSelectiveAttention has them.
  void set_rows(uint32_t rows) { rows_ = rows, row_ = 0; }
  void set_row(uint32_t row) { row_ = row; }
  bool reads() const { return reads_; }
  // Why the GPU does not read pages, as far as is known; none: it does, or will.
  Fallback cannot_read() const;
  std::string share() const;  // how CPU and GPU split the pages, for people

  // Measures the GPU's rate. cpu_rate: bytes of pages that the CPU attends a second.
  // Code::device.
  bool needs_rate(uint32_t threads) const { return !device_->page_rates(threads).known(); }
  Status measure(double cpu_rate, uint32_t threads, const CancelLatch& cancel,
                 DeviceStream* stream);

  // A step: begin(). For every layer enqueue_projected(), then either enqueue_near() and the calls
  // of HybridGpu or enqueue_packed(), then enqueue_finish(). At last enqueue_end(). q, k, v, out
  // and check as in GpuSelectiveAttention. An error of the table.
  void begin(const KvStore& store, ThreadPool* pool, DeviceStream* stream, DeviceStream* copies);
  bool is_packed(uint32_t layer) const { return packs_ && packed_.has(first_ + layer); }
  int enqueue_projected(DeviceStream* stream, uint32_t layer, const float* q, const float* k,
                        const float* v);
  // to the second stream, so that it runs while the CPU chooses
  int enqueue_near(uint32_t layer);
  int enqueue_packed(DeviceStream* stream, uint32_t layer);
  // the packed layers' quads: comes before the first of them
  int wait_for_packed(DeviceStream* stream);
  int enqueue_finish(DeviceStream* stream, uint32_t layer, bool packed,
                     const DeviceActivations& out, const DeviceCheck& check);
  int enqueue_end(DeviceStream* stream);
  // Adds what the step read.
  void collect(const Plan& plan, bool exact, ReadCounts* counts) const;
  const float* lse_of(uint32_t layer) const {
    return lse_host_.get() + std::size_t{layer} * rows_ * n_ * heads_.heads;
  }
  void committed(const KvStore& store, uint32_t kept);

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
  Status enqueue_lists() override;
  Status enqueue_pages(uint32_t first) override;
  float* states() override { return states_host_.get(); }
  Status lse(const float** lse) override;
  bool packs() const override { return packs_ && packed_.chooses(first_ + of_.layer); }
  Status pack(uint32_t filter_layer, const Selection& choice) override;

  void trim() { sequence_.trim(); }
  void release();
  bool holds_memory() const { return sequence_.holds_memory(); }
  uint64_t generation() const {
    return sequence_.generation() + packed_.generation() + generation_;
  }

 private:
  Status make_room(uint32_t n, uint32_t list_quads);
  DeviceAttention work() const;
  DeviceKv kv_of(uint32_t layer) const { return sequence_.layer(layer, row_); }
  std::size_t rows_before(uint32_t layer) const {  // of lse and mass
    return (std::size_t{layer} * rows_ + row_) * n_ * heads_.heads;
  }

  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const HeadShape heads_;
  const StoreShape shape_;
  const uint32_t first_, layers_;
  KvMirror sequence_;
  FilterGroupCache packed_;
  bool packs_ = false, needs_packed_ = false;
  Fallback why_not_packed_ = Fallback::none;
  uint64_t generation_ = 0;
  // tokens of the step; those that there is room for, and quads of a list
  uint32_t n_ = 0, room_ = 0, list_quads_ = 0;
  uint32_t rows_ = 1, row_ = 0;
  PageRates rates_;
  uint32_t sixteenths_ = 0;
  bool reads_ = false;
  bool under_way_ = false;

  UnderWay of_;
  bool has_parts_ = false, is_finished_ = false;
  DeviceStream *stream_ = nullptr, *copies_ = nullptr;  // of the step, and so are
  const KvStore* store_ = nullptr;
  ThreadPool* pool_ = nullptr;
  ReadCounts counts_;              // of what filter groups read
  bool waits_for_packed_ = false;  // quads that the second stream reads

  DeviceBuffer<float> q_, q_scale_, states_, lse_, mass_;
  DeviceBuffer<int8_t> q8_;
  auto buffers() { return std::tie(q_, q_scale_, states_, lse_, mass_, q8_); }
  PinnedBuffer<float> near_sums_, states_host_, lse_host_, mass_host_, biases_;
  PinnedBuffer<uint32_t> quads_, list_counts_;
  PinnedBuffer<uint8_t> present_;
};

}  // namespace kvasir
