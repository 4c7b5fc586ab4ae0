// Quads that a GPU chose and that it does not read from host memory, or not yet. The CPU fetches
// them as for its own attention and copies them into a pinned buffer, layer by layer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/layer_scales.h"
#include "backend/device.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/status.h"
#include "store/page_store.h"

namespace kvasir {

class StagedPages {
 public:
  StagedPages(const std::shared_ptr<Device>& device, const StoreShape& shape)
      : device_(device), shape_(shape) {}

  // Room for lists of at most so many quads, of one layer. Code::no_memory, also where that is a
  // sixteenth of the memory; Code::device. It is empty then.
  Status make_room(std::size_t quads);
  void release();

  // Reads ahead while the GPU chooses about so many pages.
  void begin(const PageStore& pages, uint32_t layer, uint64_t wanted, const CancelLatch& cancel,
             ThreadPool* pool);
  // As DeviceAttention has them, of the layer: [first, end) of them.
  struct Lists {
    uint32_t first, end, blocks, capacity;
    const uint32_t *quads, *counts;
    const uint32_t* found;  // null: the GPU has none
  };
  // Copies verified pages into data(). keeps: pages of a file stay in memory for later steps. Quads
  // that the GPU has are left out. After a cancel, data() is meaningless. Code::corrupt, Code::io;
  // throws std::bad_alloc.
  Status fetch(const PageStore& pages, uint32_t layer, const Lists& lists, bool keeps,
               const CancelLatch& cancel, ThreadPool* pool);
  // as DeviceAttention::gathered; the GPU can read it
  uint8_t* data() const { return quads_.get(); }

 private:
  struct Worker {
    PageStore::Hold hold;
    Array<uint32_t> numbers;
    Array<PageRef> pages;
    uint64_t missed = 0;
  };
  struct Part {
    uint32_t list, begin, end;
  };
  Status fetch_part(const PageStore& pages, uint32_t layer, const Lists& lists, const Part& part,
                    Worker* w) const;

  const std::shared_ptr<Device> device_;
  const StoreShape shape_;
  LayerScales scales_;
  std::vector<Worker> workers_;
  std::vector<Part> parts_;
  uint64_t missed_ = 0;  // pages of the layer that had to be read
  bool has_fetched_ = false;
  std::size_t room_ = 0;
  PinnedBuffer<uint8_t> quads_;
};

}  // namespace kvasir
