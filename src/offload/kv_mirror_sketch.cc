// The sketch of a sequence in the memory of a GPU: blocks that forks share.
#include <algorithm>
#include <utility>

#include "backend/first_failure.h"
#include "base/checked.h"
#include "offload/kv_mirror.h"

namespace kvasir {

// of an extent's sketch, that threads copy side by side
constexpr uint32_t copied_parts = 8;

// Copies the sketch of extents that changed. Sessions do so one after the other: forks that begin
// together find each other's blocks.
Status KvMirror::put_summaries(const UpdateRequest& request) {
  const KeySketch& sketch = request.store.sketch();
  const uint32_t extents = request.store.pages().extents();
  const auto same = [&] {
    for (uint32_t e = 0; e < extents; ++e)
      if (sketch_stamps_[e] != sketch.stamp(e)) return false;
    return true;
  };
  if (!blocks_moved_ && sketch_stamps_.size() == extents && same()) return {};
  RETURN_IF_ERROR(need_staging(request.cancel));
  sketch_stamps_.clear();
  if (const std::size_t count = ceil_div(extents, block_extents_); count != blocks_.size())
    blocks_.resize(count), blocks_moved_ = true;
  std::vector<uint32_t> copied;  // extents
  const std::vector<WantedBlock> wanted = wanted_blocks(request.store, &copied);
  std::size_t done = 0;
  Status s = put_sketch(request, copied, &done);
  if (!s.ok() && s.code() != Code::cancelled) return s;
  for (const auto& [b, stamps, end] : wanted) {
    if (end > done) break;
    std::shared_ptr<SketchBlock> added = sketches_->add(stamps, blocks_[b]);
    if (std::exchange(blocks_[b], added) != added) blocks_moved_ = true;
  }
  if (!s.ok()) return s;
  for (uint32_t e = 0; e < extents; ++e) sketch_stamps_.push_back(sketch.stamp(e));
  return blocks_moved_ ? put_sketch_addresses(request.streams.own) : Status();
}

// *extents: those that have to be copied for the blocks.
std::vector<KvMirror::WantedBlock> KvMirror::wanted_blocks(const KvStore& store,
                                                           std::vector<uint32_t>* extents) {
  const uint32_t count = store.pages().extents();
  std::vector<WantedBlock> wanted;
  for (uint32_t b = 0; b < blocks_.size(); ++b) {
    std::vector<uint64_t> stamps(block_extents_);
    const uint32_t first = b * block_extents_;
    for (uint32_t i = 0; i < block_extents_; ++i)
      stamps[i] = first + i < count ? store.sketch().stamp(first + i) : 0;
    if (blocks_[b] && blocks_[b]->has(stamps)) continue;
    if (find_block(b, stamps)) continue;
    SketchBlock* const block = blocks_[b].get();
    for (uint32_t i = 0; i < block_extents_; ++i) {
      if (!stamps[i] || (block && block->stamps[i] == stamps[i])) continue;
      extents->push_back(first + i);
      if (block) block->stamps[i] = 0;  // until all is there
    }
    wanted.push_back({b, std::move(stamps), extents->size()});
  }
  return wanted;
}

Status KvMirror::put_sketch_addresses(DeviceStream* stream) {
  auto* addresses = reinterpret_cast<uint64_t*>(staged_.data);
  for (uint32_t e = 0; e < extents_; ++e) {
    const SketchBlock* block =
        e / block_extents_ < blocks_.size() ? blocks_[e / block_extents_].get() : nullptr;
    addresses[e] =
        block ? address_of(block->memory.get() + e % block_extents_ * sketch_bytes()) : 0;
  }
  RETURN_IF_ERROR(send(stream, sketch_at_.get(), addresses, extents_ * sizeof(uint64_t)));
  blocks_moved_ = false;
  return {};
}

// Whether a session has it. A block that others may have is released before put_sketch() makes a
// new one. Where nobody has the old one any more, the new one finds its memory.
bool KvMirror::find_block(uint32_t b, const std::vector<uint64_t>& stamps) {
  std::shared_ptr<SketchBlock>& block = blocks_[b];
  if (std::shared_ptr<SketchBlock> found = sketches_->find(stamps)) {
    block = std::move(found);
    return blocks_moved_ = true;
  }
  if (!block || sketches_->take(block)) return false;
  block.reset();
  blocks_moved_ = true;
  return false;
}

Status KvMirror::make_block(uint32_t b) {
  auto fresh = std::make_shared<SketchBlock>();
  fresh->stamps.assign(block_extents_, 0);
  RETURN_IF_ERROR(fresh->memory.allocate(device_, block_extents_ * sketch_bytes(), purpose));
  return blocks_[b] = std::move(fresh), Status();
}

// One half of the staging memory is filled while the other is on its way. Large halves: what a
// device has just read is slow to write to (halves of 8 MB took 30 ms for 800 MB, halves of 32 MB
// 16). The device takes 0.2 ms for a block's memory: a thread waits for that while others copy.
Status KvMirror::put_sketch(const UpdateRequest& request, const std::vector<uint32_t>& extents,
                            std::size_t* done) {
  const Streams& streams = request.streams;
  const std::size_t size = sketch_bytes();
  const auto together = static_cast<uint32_t>(staged_.bytes / 2 / size),
             parts = std::min(copied_parts, static_cast<uint32_t>(heads_total()));
  const auto first = static_cast<uint32_t>(first_head()),
             heads = static_cast<uint32_t>(heads_total());
  int error = 0;
  Status s;
  // however it ends: what is under way is of memory that others get
  const StreamWait own{ops_, streams.own}, copies{ops_, streams.copies};
  for (std::size_t at = 0; at < extents.size() && s.ok() && !error; at += together) {
    if (request.cancel.fired()) {
      s = cancelled();
      break;
    }
    DeviceStream* const way = at / together % 2 ? streams.copies : streams.own;
    std::byte* const half = staged_.data + at / together % 2 * together * size;
    if ((error = ops_.wait(way))) break;
    const auto count = static_cast<uint32_t>(std::min<std::size_t>(together, extents.size() - at));
    const std::span<const uint32_t> its_extents(extents.data() + at, count);
    std::vector<uint32_t> missing;  // blocks
    for (const uint32_t e : its_extents)
      if (const uint32_t block = e / block_extents_;
          !blocks_[block] && (missing.empty() || missing.back() != block))
        missing.push_back(block);
    const auto makes = static_cast<uint32_t>(missing.size());
    FirstFailure failure;
    request.pool->run(makes + count * parts, [&](uint32_t task, uint32_t) {
      Status c;
      if (task < makes) {
        c = make_block(missing[task]);
      } else {
        const uint32_t i = (task - makes) / parts, part = (task - makes) % parts,
                       begin = heads * part / parts, end = heads * (part + 1) / parts;
        c = request.store.sketch().copy(its_extents[i], first + begin, end - begin,
                                        half + i * size + begin * shape_.page.sketch_bytes());
      }
      if (!c.ok()) failure.note(std::move(c));
    });
    blocks_moved_ = blocks_moved_ || makes > 0;
    s = std::move(failure).take();
    for (uint32_t i = 0, n; i < count && s.ok() && !error; i += n) {  // neighbours together
      const uint32_t e = its_extents[i], block = e / block_extents_;
      for (n = 1;
           i + n < count && its_extents[i + n] == e + n && (e + n) / block_extents_ == block;)
        ++n;
      error = ops_.upload(way, blocks_[block]->memory.get() + e % block_extents_ * size,
                          half + i * size, n * size);
    }
    if (s.ok() && !error) *done = at + count;
  }
  for (DeviceStream* way : {streams.own, streams.copies})
    if (const int last = ops_.wait(way); !error) error = last;
  if (error) *done = 0;
  return s.ok() ? device_->status(error, purpose) : std::move(s);
}

}  // namespace kvasir
