#include "store/page_cache.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"

namespace kvasir {

namespace {

constexpr uint32_t none = UINT32_MAX;

// The cache's own limit is this share of the pages: with scales and bounds, which are read whole, the document then takes less than 15% of its
// keys' and values' size in memory at any head size, what a session needs besides included.
constexpr uint64_t share = 24;
// A step that would not find its pages again at the next one would be slower than without a cache: larger budgets make more room.
constexpr uint64_t room_for(uint64_t list) { return list + list / 4; }

}  // namespace

// The slots of all shards: [heads][slots][page_bytes]. Memory is touched where pages come.
struct PageCache::Room {
  uint32_t slots;  // of each head
  Buffer<int8_t> memory;
};

struct alignas(64) PageCache::Shard {
  struct Slot {
    uint32_t page = none;  // none: empty, or being read
    uint32_t pins = 0;
    bool used = false;     // since the hand passed
  };

  mutable std::mutex mutex;  // guards the rest; never held while reading
  std::shared_ptr<const Room> room;
  uint32_t room_number = 0;
  int8_t* memory = nullptr;  // [slots][page_bytes] in the room
  Array<uint32_t> slot_of;   // [pages] slot + 1, or 0
  Array<Slot> slots;         // those that were ever used
  uint32_t hand = 0;
  uint64_t pins = 0;         // of all slots
  uint64_t found = 0, read = 0;

  int8_t* data(uint32_t slot) const { return memory + std::size_t{slot} * page_bytes; }

  void pin(uint32_t slot, Array<uint32_t>* held) {
    slots[slot].used = true;
    ++slots[slot].pins;
    ++pins;
    held->push_back(slot);  // has been reserved
  }

  // An empty slot, or none when all are pinned.
  uint32_t take() {
    if (slots.size() < room->slots) {
      slots.emplace_back();  // has been reserved
      return static_cast<uint32_t>(slots.size() - 1);
    }
    for (std::size_t i = 0; i < 2 * slots.size(); ++i) {
      const uint32_t at = hand;
      hand = at + 1 < slots.size() ? at + 1 : 0;
      Slot& slot = slots[at];
      if (slot.pins || std::exchange(slot.used, false)) continue;
      if (slot.page != none) slot_of[std::exchange(slot.page, none)] = 0;
      return at;
    }
    return none;
  }

  // Forgets every page. Nothing is pinned.
  void leave_room() {
    for (const Slot& slot : slots)
      if (slot.page != none) slot_of[slot.page] = 0;
    slots.clear();
    room.reset();
    room_number = 0;
    hand = 0;
  }
};

PageCache::PageCache(std::shared_ptr<const CacheFile> file, uint32_t heads, uint32_t pages)
    : file_(std::move(file)),
      section_(*file_->find(format::SectionKind::pages)),
      heads_(heads),
      pages_(pages),
      shards_(std::make_unique<Shard[]>(heads)) {}

PageCache::~PageCache() = default;

// room_change_ is locked.
void PageCache::build_room(uint64_t slots) {
  slots = std::min<uint64_t>(slots, pages_);
  room_ = std::make_shared<const Room>(Room{static_cast<uint32_t>(slots), make_buffer<int8_t>(slots * heads_ * page_bytes)});
  ++room_number_;
}

void PageCache::set_limit(uint64_t bytes) {
  {
    const std::lock_guard lock(room_change_);
    build_room(bytes == by_itself ? ceil_div(pages_, share) : bytes / page_bytes / heads_);
    own_slots_ = bytes == by_itself ? room_->slots : UINT64_MAX;
  }
  for (uint32_t i = 0; i < heads_; ++i) {
    const std::lock_guard lock(shards_[i].mutex);
    if (shards_[i].pins == 0) shards_[i].leave_room();
  }
}

void PageCache::make_room_for(uint64_t list) {
  const uint64_t wanted = std::min<uint64_t>(room_for(list), pages_);
  if (wanted <= own_slots_) return;
  const std::lock_guard lock(room_change_);
  if (wanted <= own_slots_) return;
  build_room(std::max(wanted, ceil_div(pages_, share)));
  own_slots_ = room_->slots;
}

// The shard is locked and nothing in it is pinned.
void PageCache::enter_room(uint32_t head) {
  Shard& shard = shards_[head];
  const std::lock_guard lock(room_change_);
  shard.slot_of.resize(pages_);
  shard.leave_room();
  shard.slots.reserve(room_->slots);
  shard.room = room_;
  shard.room_number = room_number_;
  shard.memory = room_->memory.get() + std::size_t{head} * room_->slots * page_bytes;
}

Status PageCache::fetch(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs, PageHold* hold) {
  hold->release();
  if (numbers.empty()) return {};
  make_room_for(numbers.size());
  Shard& shard = shards_[head];
  hold->begin(this, &shard, numbers.size());
  {
    const std::lock_guard lock(shard.mutex);
    if (shard.room_number != room_number_ && shard.pins == 0) enter_room(head);
    for (uint32_t i = 0; i < numbers.size(); ++i) {
      const uint32_t slot = shard.slot_of[numbers[i]];
      if (slot == 0) {
        hold->missing_.push_back({i, none});
        continue;
      }
      refs[i].data = shard.data(slot - 1);
      shard.pin(slot - 1, &hold->slots_);
    }
    shard.found += hold->slots_.size();
    shard.read += hold->missing_.size();
    for (PageHold::Missing& m : hold->missing_) {  // after all that is there is pinned
      m.slot = shard.take();
      if (m.slot == none) break;
      shard.pin(m.slot, &hold->slots_);
    }
  }
  if (hold->missing_.empty()) return {};
  if (Status s = read_missing(head, numbers, refs, hold); !s.ok()) {
    hold->release();
    return s;
  }
  publish(numbers, refs, hold);
  return {};
}

// Into the slots that were taken, or beside them. Adjacent pages lie one after the other in the file.
Status PageCache::read_missing(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs, PageHold* hold) {
  const Array<PageHold::Missing>& missing = hold->missing_;
  const auto without = std::count_if(missing.begin(), missing.end(), [](const PageHold::Missing& m) { return m.slot == none; });
  if (without) hold->beside_ = make_buffer<int8_t>(static_cast<std::size_t>(without) * page_bytes);
  int8_t* beside = hold->beside_.get();
  const auto block_of = [&](std::size_t i) {
    const uint64_t page = numbers[missing[i].index];
    return (page / extent_pages * heads_ + head) * extent_pages + page % extent_pages;
  };
  for (std::size_t i = 0; i < missing.size();) {
    std::byte* to[extent_pages];
    const uint64_t first = block_of(i);
    uint32_t count = 0;
    do {
      int8_t* at = missing[i].slot == none ? std::exchange(beside, beside + page_bytes) : hold->shard_->data(missing[i].slot);
      refs[missing[i].index].data = at;
      to[count++] = reinterpret_cast<std::byte*>(at);
      ++i;
    } while (i < missing.size() && count < extent_pages && block_of(i) == first + count);
    if (Status s = file_->read(section_, first, {to, count}); !s.ok()) return s;
  }
  return {};
}

// From now on others find what was read. Where another thread was first, its page is used.
void PageCache::publish(std::span<const uint32_t> numbers, PageRef* refs, PageHold* hold) {
  Shard& shard = *hold->shard_;
  const std::lock_guard lock(shard.mutex);
  for (const PageHold::Missing& m : hold->missing_) {
    if (m.slot == none) break;
    const uint32_t page = numbers[m.index], there = shard.slot_of[page];
    if (there == 0) {
      shard.slots[m.slot].page = page;
      shard.slot_of[page] = m.slot + 1;
    } else {
      refs[m.index].data = shard.data(there - 1);
      shard.pin(there - 1, &hold->slots_);
    }
  }
}

PageCache::Counts PageCache::counts() const {
  Counts counts;
  for (uint32_t i = 0; i < heads_; ++i) {
    const Shard& shard = shards_[i];
    const std::lock_guard lock(shard.mutex);
    counts.found += shard.found;
    counts.read += shard.read;
    counts.kept += shard.slots.size();
    counts.bytes += shard.slots.size() * (page_bytes + sizeof(Shard::Slot)) + shard.slot_of.size() * sizeof(uint32_t);
  }
  return counts;
}

void PageHold::begin(PageCache* cache, PageCache::Shard* shard, std::size_t pages) {
  slots_.reserve(2 * pages);  // those that were read and, where another thread was first, its own too
  missing_.clear();
  missing_.reserve(pages);
  cache_ = cache;
  shard_ = shard;
}

void PageHold::release() {
  if (!slots_.empty()) {
    const std::lock_guard lock(shard_->mutex);
    for (uint32_t slot : slots_) --shard_->slots[slot].pins;
    shard_->pins -= slots_.size();
    if (shard_->pins == 0 && shard_->room_number != cache_->room_number_) shard_->leave_room();
  }
  slots_.clear();
  beside_.reset();
}

}  // namespace kvasir
