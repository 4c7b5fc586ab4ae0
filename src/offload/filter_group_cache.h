// Quads that a filter layer chose for the layers after it, in GPU memory. One launch reads them
// from host memory for all those layers and all KV heads (OmniKV, ICLR 2025, section 4). They are
// kept for the next token, which chooses many of them again.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "backend/device.h"
#include "backend/thread_pool.h"
#include "base/memory.h"
#include "base/status.h"
#include "offload/fallback.h"
#include "select/plan.h"
#include "store/page_store.h"

namespace kvasir {

class FilterGroupCache {
 public:
  // Of `layers` layers from `first` on.
  FilterGroupCache(const std::shared_ptr<Device>& device, const StoreShape& shape, uint32_t first,
                   uint32_t layers)
      : device_(device), shape_(shape), first_(first), layers_(layers) {}

  // For the next step, of one token; while no work is under way. Leaves `reserve` bytes free.
  // *fallback: none, or why each layer reads its own pages. Code::device, Code::no_memory; throws
  // std::bad_alloc.
  Status prepare(const PageStore& pages, const Plan& plan, uint64_t reserve, Fallback* fallback);
  void release();
  bool holds_memory() const { return quads_.get() != nullptr; }
  // A graph is valid as long as this number is the same.
  uint64_t generation() const { return generation_; }
  // After a step that failed: it may not have read all quads that it placed.
  void forget();

  // Enqueues the reads of what a filter layer chose; kv_of(layer), numbered from the first one on.
  // chooses(): whether that layer chooses for any of these layers. Code::corrupt.
  bool chooses(uint32_t filter_layer) const { return group_of(filter_layer) != nullptr; }
  template <class KvOf>
  Status enqueue(DeviceStream* stream, uint32_t filter_layer, const Selection& choice,
                 const PageStore& pages, KvOf&& kv_of, ThreadPool* pool, ReadCounts* counts) {
    Group* const group = group_of(filter_layer);
    RETURN_IF_ERROR(place(choice, pages, pool, group, counts));
    const DeviceGroup quads{group->end - group->begin,
                            room_,
                            group->fresh.get(),
                            group->fresh.get() + 1,
                            group->fresh.get() + 1 + room_,
                            room_,
                            quads_.get() + bytes_before(*group)};
    group->is_enqueued = true;
    return device_->status(
        device_->kernels().gather_group(stream, kv_of(group->begin - first_), quads),
        "pages that a filter layer chose");
  }
  void begin_step();
  // Whether the quads of a layer were enqueued in this step. The model's layer number.
  bool has(uint32_t layer) const;
  // Sets what `to` attends in such a layer.
  void fill(uint32_t layer, DeviceAttention* to) const;

 private:
  // Layers [begin, end) for which one chooses.
  struct Group {
    uint32_t filter, begin, end, before;     // before: layers of the groups before it
    bool is_enqueued = false;                // in this step
    uint32_t hand = 0;                       // the place that is looked at first when one is wanted
    std::vector<uint32_t> place_of;          // [quads of the store] + 1; 0: it has none
    std::vector<uint32_t> quad_at, used_at;  // [room] + 1; 0: none; and the step that chose it last
    // [kv_heads][room] as DeviceHotQuads; [kv_heads][2] as DeviceAttention
    PinnedBuffer<uint32_t> found, counts;
    PinnedBuffer<uint8_t> present;  // [kv_heads][room] likewise
    // how many are to be read; [room] their quads, and their places
    PinnedBuffer<uint32_t> fresh;
  };
  Group* group_of(uint32_t filter_layer) const;
  void find_groups(const Plan& plan);
  Status place(const Selection& choice, const PageStore& pages, ThreadPool* pool, Group* group,
               ReadCounts* counts);
  void forget(Group* group, uint32_t quad);
  std::size_t bytes_before(const Group& group) const {
    return std::size_t{group.before} * layer_bytes();
  }
  std::size_t layer_bytes() const {
    return std::size_t{shape_.kv_heads} * room_ * quad_bytes_of(shape_.page.dim);
  }

  const std::shared_ptr<Device> device_;
  const StoreShape shape_;
  const uint32_t first_, layers_;
  uint64_t generation_ = 0;
  // room_: places of a KV head; tried_: those that there was no room for
  uint32_t step_ = 0, room_ = 0, tried_ = 0;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<uint64_t> stamps_;  // of the extents whose quads the groups have
  // [layers of the groups][kv_heads][room][quad_bytes_of(dim)]
  DeviceBuffer<uint8_t> quads_;
};

}  // namespace kvasir
