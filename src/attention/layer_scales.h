// The scales of a layer's pages in a mapped file. If many pages are needed, their scales are read
// first. One read serves the pages of all heads; otherwise each page would read a disk block for
// its scales.
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
  // Begins a layer. Returns the number of tasks of read(). It is 0 if `wanted`, or the pages that
  // the last layer had to read, are fewer than the extents of the file. Throws std::bad_alloc.
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
  // Runs a task. Different tasks may overlap. Ignores read errors, because perhaps no page needs
  // these scales; the fetch of a page that does returns the error.
  void read(const PageStore& pages, uint32_t task) {
    const uint32_t first = task * task_extents,
                   end = std::min(pages.mapped_extents(), first + task_extents);
    if (!pages.read_scales(layer_, first, end, scales_.get()).ok()) there_ = false;
  }
  // After all tasks: sets the hold of a thread to use the scales of a head.
  void hand(const PageStore& pages, uint32_t head, PageHold* hold) const {
    const std::size_t of_head = pages.layer_scales() / pages.shape().kv_heads;
    hold->set_scales(there_ ? scales_.get() + head * of_head : nullptr, pages.layer_scales());
  }
  void release() { room_ = 0, scales_.reset(), there_ = false; }
  // Sets the number of pages that the layer had to read from the file.
  void note_missed(uint64_t pages) { missed_ = pages; }

 private:
  static constexpr uint32_t task_extents = 16;  // extents per task
  Buffer<uint16_t> scales_;                     // [extents][kv_heads][scales of an extent]
  uint32_t room_ = 0, layer_ = 0;
  std::atomic<bool> there_{false};
  uint64_t missed_ = UINT64_MAX;
};

}  // namespace kvasir
