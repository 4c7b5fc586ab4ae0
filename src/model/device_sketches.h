// The sketches of keys that a device has in its memory, in blocks of some extents that lie side by
// side. Forks of a sequence share the blocks that they have in common: where one writes on, it has
// the last block for itself.
//
// A block is known by the stamps of what it has (store/key_sketch.h). One that more than one
// session has had, or may find, does not change: who needs another lets go of it, when its own
// stream has been waited for, and the last one to do so gives the memory back. Threads: all
// functions of DeviceSketches may run together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/device.h"

namespace kvasir {

struct SketchBlock {
  DeviceBuffer<int8_t> memory;   // [extents of a block][layers][kv_heads][sketch_bytes]
  std::vector<uint64_t> stamps;  // [extents of a block]; 0: nothing is there
  // others than the first session have found it; guarded by DeviceSketches' mutex
  bool shared = false;

  // Whether it has all that is wanted; a wanted stamp of 0 is nothing.
  bool has(const std::vector<uint64_t>& wanted) const {
    for (std::size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i] && wanted[i] != stamps[i]) return false;
    return true;
  }
};

// Of the sessions of one model, and the layers that a device has.
class DeviceSketches {
 public:
  // That has these very stamps; null where none does.
  std::shared_ptr<SketchBlock> find(const std::vector<uint64_t>& stamps) {
    const std::lock_guard lock(mutex_);
    const auto at = blocks_.find(stamps);
    return at == blocks_.end() ? nullptr : mark_found(at->second);
  }
  // Whether the block is the caller's alone, who may write to it then: nobody finds it any more.
  bool take(const std::shared_ptr<SketchBlock>& block) {
    const std::lock_guard lock(mutex_);
    if (block->shared) return false;
    if (const auto at = blocks_.find(block->stamps);
        at != blocks_.end() && at->second.lock() == block)
      blocks_.erase(at);
    return true;
  }
  // The block has these stamps, and others find it from now on. What the caller is to have: this
  // one, or what another was first to add with the same. Throws std::bad_alloc, and nothing has
  // changed.
  std::shared_ptr<SketchBlock> add(const std::vector<uint64_t>& stamps,
                                   std::shared_ptr<SketchBlock> block) {
    const std::lock_guard lock(mutex_);
    std::erase_if(blocks_, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<SketchBlock>& there = blocks_[stamps];
    if (std::shared_ptr<SketchBlock> first = mark_found(there)) return first;
    std::copy(stamps.begin(), stamps.end(), block->stamps.begin());
    there = block;
    return block;
  }

 private:
  static std::shared_ptr<SketchBlock> mark_found(const std::weak_ptr<SketchBlock>& found) {
    std::shared_ptr<SketchBlock> block = found.lock();
    if (block) block->shared = true;
    return block;
  }

  std::mutex mutex_;
  std::map<std::vector<uint64_t>, std::weak_ptr<SketchBlock>> blocks_;
};

}  // namespace kvasir
