// What a GPU holds of a sequence to attend it: window, sinks and sketch of its layers in its own
// memory, and the addresses of the pages in pinned host memory. A session has a mirror; forks share
// the sketch.
//
// update() copies what changed, by the stamps of the store. Pages of a mapped file are not verified
// here: the caller verifies with the store the pages that a step read.
//
// kv_mirror_sketch.cc copies the sketch, kv_mirror_pages.cc registers the pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/device.h"
#include "backend/thread_pool.h"
#include "base/memory.h"
#include "base/status.h"
#include "model/config.h"
#include "model/device_sketches.h"
#include "offload/fallback.h"
#include "store/kv_store.h"

namespace kvasir {

class KvMirror {
 public:
  // Of `layers` layers from `first` on; heads: query heads.
  KvMirror(const std::shared_ptr<Device>& device, std::shared_ptr<DeviceSketches> sketches,
           const StoreShape& shape, uint32_t first, uint32_t layers, uint32_t heads);
  ~KvMirror();

  // of a step: a question's. A prefill has more: gpu_prefill_attention.h
  static constexpr uint32_t max_tokens = max_selective_tokens;

  // Why no GPU can mirror the sequence; none: one can.
  static Fallback unfit(const KvStore& store, const HeadShape& heads);

  // Of a session, which nothing else uses meanwhile. Two, so that one copies while the CPU prepares
  // the next copy.
  struct Streams {
    DeviceStream *own, *copies;
  };
  // What update() works with. devices: those that share pages in the same step.
  struct UpdateRequest {
    const KvStore& store;
    uint32_t devices;
    ThreadPool* pool;
    Streams streams;
    const CancelLatch& cancel;
  };
  // What the device needs besides the window.
  struct Wants {
    bool sketch = true, pages = true;
  };
  // For the next step. Waits for the streams, however it ends. *reads: whether the GPU reads the
  // pages from pinned host memory. Pinning many pages takes long: several calls share the work, and
  // the first does next to nothing. Code::no_memory: the device has no room for it: release() comes
  // next, or another try. Code::cancelled: what has come stays, and the next call brings the rest.
  // Code::corrupt (a damaged summary of a mapped file); Code::device. Throws std::bad_alloc.
  Status update(const UpdateRequest& request, const Wants& wants, bool* reads);
  // Why the GPU will not read them, as far as is known; none: it does, or will.
  Fallback cannot_share() const { return cannot_share_; }
  // Then: notes the counts of pages and of the window, which enqueue_counts() uploads. Of several
  // rows each is a step of one token after those before it.
  void begin_step(const KvStore& store, uint32_t rows);
  int enqueue_counts(uint32_t rows, DeviceStream* stream) const;
  // The number of the step that began last, of its last row.
  uint32_t step() const { return step_; }
  // How many of a head's first quads, which that step has kept, are valid in the current step.
  uint32_t valid_quads(uint32_t step, uint32_t quads) const {
    if (step == 0 || step < kept_since_) return 0;
    return step < changed_since_ ? std::min(quads, changed_from_) : quads;
  }
  // Drops all quads that earlier steps kept (DeviceHotQuads).
  void forget_kept() { kept_since_ = step_ + 1, changed_from_ = UINT32_MAX, kept_end_ = 0; }
  // After the step: the store has committed n of the keys and values that the GPU wrote to its
  // window.
  void committed(const KvStore& store, uint32_t n);

  // While no work is under way. trim() unregisters host memory that the store has freed; release()
  // frees everything.
  void trim();
  void release();

  // [layers] DeviceKv::sink_logits; empty: none.
  void set_sink_logits(std::vector<const float*> logits) { sink_logits_ = std::move(logits); }
  // As of the last update(); layer: from `first` on. Where its memory is changes with generation().
  DeviceKv layer(uint32_t layer, uint32_t row = 0) const;
  // device, [layers]; written by the step
  DeviceBudget* budgets() const { return budgets_.get(); }
  uint32_t extents() const { return extents_; }  // that there is room for
  bool holds_memory() const { return extents_ > 0 || !regions_.empty() || !blocks_.empty(); }
  // What a fork of this length allocates besides what it shares: of the sketch, the block that it
  // writes to and the next one.
  uint64_t bytes_of_fork();
  uint64_t generation() const { return generation_; }

 private:
  // Memory of the CPU's that the device reads.
  struct Region {
    uint64_t begin = 0, end = 0;  // addresses
    uint64_t seen = 0;            // where the device has the first byte
    bool used = false;
    std::shared_ptr<const void> keep;
  };
  Status make_room(const KvStore& store);
  Status share_pages(const KvStore& store, uint32_t devices, uint32_t* extents);
  // Blocks whose sketch is to be copied.
  struct WantedBlock {
    uint32_t block;
    std::vector<uint64_t> stamps;  // of the sketch that the block gets
    std::size_t end;               // of the extents that are copied for it
  };
  Status put_summaries(const UpdateRequest& request);
  std::vector<WantedBlock> wanted_blocks(const KvStore& store, std::vector<uint32_t>* extents);
  Status put_sketch_addresses(DeviceStream* stream);
  bool find_block(uint32_t b, const std::vector<uint64_t>& stamps);
  Status make_block(uint32_t b);  // of different ones several at a time
  // done: how many of the extents have come, the first ones
  Status put_sketch(const UpdateRequest& request, const std::vector<uint32_t>& extents,
                    std::size_t* done);
  Status need_staging(const CancelLatch& cancel);
  Status put_window(const UpdateRequest& request);
  Status put_addresses(const UpdateRequest& request);
  bool has_rows(const KvStore& store);
  void copy_last_extent(const PageStore& pages, ThreadPool* pool);
  void note_changes(const PageStore& pages);
  void forget_regions();
  Status share(std::span<const std::byte> memory, const std::shared_ptr<const void>& keep,
               uint64_t* allowance);
  uint64_t seen(const void* p);                                     // 0: in no region
  static constexpr const char* purpose = "a sequence's summaries";  // of memory, for errors
  static uint64_t address_of(const void* p) { return reinterpret_cast<uint64_t>(p); }
  static Status cancelled() {
    return Status::error(Code::cancelled, "cancelled; the sequence is as it was");
  }
  // from pinned memory; waits
  Status send(DeviceStream* stream, void* to, const void* from, std::size_t size);
  std::size_t heads_total() const { return std::size_t{layers_} * shape_.kv_heads; }
  // of an extent
  std::size_t sketch_bytes() const { return heads_total() * shape_.page.sketch_bytes(); }
  std::size_t first_head() const { return std::size_t{first_} * shape_.kv_heads; }

  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const std::shared_ptr<DeviceSketches> sketches_;
  const StoreShape shape_;
  const uint32_t first_, layers_, heads_;
  std::vector<const float*> sink_logits_;
  const uint32_t block_extents_;            // of a SketchBlock
  uint32_t extents_ = 0, window_rows_ = 0;  // room
  bool has_begun_ = false;                  // to share pages,
  Fallback cannot_share_ = Fallback::none;  // why that cannot be done, of this text,
  // or not for want of memory as long as it has so many; 0: it can
  uint32_t refused_extents_ = 0;
  uint32_t step_ = 0, kept_since_ = 0;                      // as DeviceCounts has them, and so are
  uint32_t changed_from_ = UINT32_MAX, changed_since_ = 0;  // these
  uint32_t kept_end_ = 0;  // no quad from this one on has been kept
  uint64_t generation_ = 0;
  std::vector<std::shared_ptr<SketchBlock>> blocks_;         // of the sketch
  bool blocks_moved_ = false;                                // since sketch_at_ was written
  DeviceBuffer<uint64_t> sketch_at_, pages_at_, scales_at_;  // [extents]
  DeviceBuffer<float> basis_, sinks_, centre_, window_;
  DeviceBuffer<DeviceCounts> counts_;
  DeviceBuffer<DeviceBudget> budgets_;
  auto buffers() {
    return std::tie(sketch_at_, pages_at_, scales_at_, basis_, sinks_, centre_, window_, counts_,
                    budgets_);
  }
  PinnedBuffer<DeviceCounts> known_;  // what counts_ gets
  Device::Staging staged_;            // while update() needs it
  // a copy of the extent that is being filled: pages, then scales, of the layers
  PinnedBuffer<int8_t> last_;
  uint64_t last_stamp_ = 0;
  uint32_t last_pages_ = 0;  // pages of the extent that are in it

  // of the pages, and of the sketch that is in blocks_, at the last update
  std::vector<uint64_t> page_stamps_, sketch_stamps_;
  uint64_t basis_stamp_ = 0, sinks_stamp_ = 0;
  // KvStore::window_stamp() of windows whose rows are there, of each the first ones of the next: a
  // copy of the sequence may have gone on.
  static constexpr std::size_t max_windows = 8;
  std::vector<uint64_t> windows_;
  uint32_t first_row_ = 0;  // DeviceCounts::first_row of all of them
  // of so many extents, the first ones, the device has the addresses as they still are
  uint32_t addressed_ = 0;
  std::vector<Region> regions_;
  std::size_t last_seen_ = 0;  // of regions_; may be past its end
};

}  // namespace kvasir
