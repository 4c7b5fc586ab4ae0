// The scales of a layer's pages in a mapped file, read before the pages where many of them are
// wanted: one read has those of all heads, and of each page alone it would be a block.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/checked.h"
#include "base/memory.h"
#include "store/page_store.h"

namespace kvasir {

class LayerScales {
 public:
  // How many tasks read() has for the layer: none where fewer pages are wanted, or had to be read
  // of the last one, than the file has extents. Throws std::bad_alloc.
  uint32_t begin(const PageStore& pages, uint32_t layer, uint64_t wanted) {
    const uint32_t extents = pages.mapped_extents();
    there_ = extents > 0 && std::min(wanted, missed_) >= extents;
    layer_ = layer;
    if (!there_) return 0;
    if (extents > room_) {
      room_ = 0, scales_.reset();
      scales_ = make_buffer<uint16_t>(extents * pages.layer_scales());
      room_ = extents;
    }
    return static_cast<uint32_t>(ceil_div(extents, task_extents));
  }
  // Different ones may run together. What cannot be read may be wanted by nobody: who does want it
  // meets it again.
  void read(const PageStore& pages, uint32_t task) {
    const uint32_t first = task * task_extents,
                   end = std::min(pages.mapped_extents(), first + task_extents);
    if (!pages.read_scales(layer_, first, end, scales_.get()).ok()) there_ = false;
  }
  // Lets what a thread holds take a head's from here, when all tasks have run.
  void hand(const PageStore& pages, uint32_t head, PageHold* hold) const {
    const std::size_t of_head = pages.layer_scales() / pages.shape().kv_heads;
    hold->set_scales(there_ ? scales_.get() + head * of_head : nullptr, pages.layer_scales());
  }
  void release() { room_ = 0, scales_.reset(), there_ = false; }
  // How many pages of the layer's had to be read.
  void note_missed(uint64_t pages) { missed_ = pages; }

 private:
  static constexpr uint32_t task_extents = 16;  // whose scales a task reads
  Buffer<uint16_t> scales_;                     // [extents][kv_heads][scales of an extent]
  uint32_t room_ = 0, layer_ = 0;
  std::atomic<bool> there_{false};
  uint64_t missed_ = UINT64_MAX;
};

}  // namespace kvasir
