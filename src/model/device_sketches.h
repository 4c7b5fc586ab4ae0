// Sketches of keys in GPU memory, in blocks of some neighbouring extents. Forks of a sequence share
// their common blocks. A fork that writes has its own last block.
//
// The stamps of its extents identify a block (store/key_sketch.h). A block that several sessions
// have had, or may find, does not change. A session that needs another one releases it after a wait
// for its own stream; the last session frees the memory. Threads: all functions of DeviceSketches
// may run together.
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
  std::vector<uint64_t> stamps;  // [extents of a block]; 0: empty
  // another session than the first has found it; guarded by the mutex of DeviceSketches
  bool shared = false;

  // Whether it has all wanted extents; a wanted stamp of 0 is no extent.
  bool has(const std::vector<uint64_t>& wanted) const {
    for (std::size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i] && wanted[i] != stamps[i]) return false;
    return true;
  }
};

// The blocks of all sessions of a model on one GPU.
class DeviceSketches {
 public:
  // The block with exactly these stamps, or null.
  std::shared_ptr<SketchBlock> find(const std::vector<uint64_t>& stamps) {
    const std::lock_guard lock(mutex_);
    const auto at = blocks_.find(stamps);
    return at == blocks_.end() ? nullptr : mark_found(at->second);
  }
  // True if the block is the caller's alone. It may then write to the block, which no other session
  // finds any more.
  bool take(const std::shared_ptr<SketchBlock>& block) {
    const std::lock_guard lock(mutex_);
    if (block->shared) return false;
    if (const auto at = blocks_.find(block->stamps);
        at != blocks_.end() && at->second.lock() == block)
      blocks_.erase(at);
    return true;
  }
  // Adds a block with these stamps: others find it from now on. Returns the block to use: this one,
  // or an earlier one with the same stamps. Throws std::bad_alloc and changes nothing.
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
