#include "store/page_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "os/os.h"

namespace kvasir {

namespace {

constexpr uint32_t no_slot = UINT32_MAX;
constexpr uint64_t no_page = UINT64_MAX;

// Heads of a part, at least: enough that some select many pages and others few.
constexpr uint32_t part_heads = 16, max_parts = 16;

// The default limit is one page in `share`. With the summaries, which are in memory as a whole, the
// document then takes less than 15% of the size of its keys and values. Measured over 130,000
// tokens of a book with a budget of 2048 tokens, with all heads in one part: pages of an answer
// that were cached. 96% with 20, 88% with 24, 97% with 16; 93% when each head had slots of its own.
constexpr uint64_t share = 22;
// Slots for a step. With fewer than 1.4 times its pages the next step finds few of them cached, so
// larger budgets make more room.
constexpr uint64_t room_of_step(uint64_t pages) { return pages + pages * 2 / 5; }

}  // namespace

// The slots of a part and their table. A room that became too small lives on for holds with its
// pages.
struct PageCache::Room {
  struct Slot {
    uint64_t page = no_page;  // index in slot_of; none: empty or being read
    uint32_t pins = 0;
    bool used = false;  // found since the clock hand passed
  };

  const uint64_t pages;     // of a head, at most
  const uint32_t capacity;  // slots
  const std::size_t page_size;
  const uint32_t scales;           // per page
  std::mutex mutex;                // guards the rest except memory; never held during a read
  Buffer<int8_t> memory;           // [capacity][page_size], used as pages arrive
  Buffer<uint16_t> scales_memory;  // [capacity][scales]
  // [heads][pages] slot + 1, or 0; a list reads some KiB, those of one head
  Array<uint32_t> slot_of;
  Array<Slot> slots;  // that were ever in use
  uint32_t hand = 0;

  Room(uint32_t head_count, uint64_t pages_of_head, uint32_t slot_count, std::size_t bytes_of_page,
       uint32_t scales_of_page)
      : pages(pages_of_head), capacity(slot_count), page_size(bytes_of_page),
        scales(scales_of_page), memory(make_buffer<int8_t>(slot_count * bytes_of_page)),
        scales_memory(make_buffer<uint16_t>(std::size_t{slot_count} * scales_of_page)),
        slot_of(head_count * pages_of_head) {
    slots.reserve(slot_count);
    os::prefer_huge_pages(memory.get(), slot_count * page_size);
  }

  int8_t* data(uint32_t slot) const { return memory.get() + slot * page_size; }
  uint16_t* scales_of(uint32_t slot) const {
    return scales_memory.get() + std::size_t{slot} * scales;
  }
  void point(PageRef* ref, uint32_t slot) const {
    ref->data = data(slot);
    if (scales) ref->scales = scales_of(slot);
  }

  // Pins a slot: its content stays while `held`, which has room, names it.
  void pin(uint32_t slot, Array<uint32_t>* held) {
    ++slots[slot].pins;
    held->push_back(slot);
  }

  // An empty slot, or none when all are pinned.
  uint32_t take() {
    if (slots.size() < capacity) {
      slots.emplace_back();
      return static_cast<uint32_t>(slots.size() - 1);
    }
    for (std::size_t i = 0; i < 2 * slots.size(); ++i) {
      const uint32_t at = hand;
      hand = at + 1 < slots.size() ? at + 1 : 0;
      Slot& slot = slots[at];
      if (slot.pins || std::exchange(slot.used, false)) continue;
      if (slot.page != no_page) slot_of[std::exchange(slot.page, no_page)] = 0;
      return at;
    }
    return no_slot;
  }

  // Pins the cached pages of a head, `head` counted within the part, and slots for missing ones
  // while slots are left and pages are to be kept.
  void look_up(uint32_t head, std::span<const uint32_t> numbers, bool keeps, PageRef* refs,
               Array<uint32_t>* held, Array<PageHold::Missing>* missing) {
    const uint32_t* const head_slots = slot_of.data() + head * pages;
    const std::lock_guard lock(mutex);
    for (uint32_t i = 0; i < numbers.size(); ++i) {
      const uint32_t there = head_slots[numbers[i]];
      if (there == 0) {
        missing->push_back({i, no_slot});
        continue;
      }
      point(&refs[i], there - 1);
      slots[there - 1].used = true;
      pin(there - 1, held);
    }
    if (!keeps) return;
    for (PageHold::Missing& m : *missing) {
      m.slot = take();
      if (m.slot == no_slot) return;
      pin(m.slot, held);
    }
  }

  // Makes the pages that were read visible. Where another thread was first, uses its page.
  void publish(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs,
               Array<uint32_t>* held, const Array<PageHold::Missing>& missing) {
    const std::lock_guard lock(mutex);
    for (const PageHold::Missing& m : missing) {
      if (m.slot == no_slot) return;
      const uint64_t page = head * pages + numbers[m.index];
      if (const uint32_t there = slot_of[page]) {
        point(&refs[m.index], there - 1);
        pin(there - 1, held);
      } else {
        slots[m.slot].page = page;
        slot_of[page] = m.slot + 1;
      }
    }
  }

  void unpin(const Array<uint32_t>& held) {
    const std::lock_guard lock(mutex);
    for (uint32_t slot : held) --slots[slot].pins;
  }
};

PageCache::PageCache(std::shared_ptr<const PageSource> source, uint32_t heads)
    : source_(std::move(source)), page_size_(source_->page_size()),
      scale_bytes_(source_->scale_bytes()), heads_(heads),
      parts_(std::clamp(heads / part_heads, 1u, max_parts)) {
  for (uint32_t p = 0; p < parts(); ++p)
    parts_[p].lists.resize((heads - p + parts() - 1) / parts());
}

PageCache::~PageCache() = default;

void PageCache::set_limit(uint64_t bytes) {
  limit_ = bytes;
  for (Part& part : parts_) {
    const std::lock_guard lock(part.mutex);
    part.room.reset();
  }
}

// Slots of a part by its number of heads; together the parts have all. Earlier parts have the heads
// of lower numbers.
uint64_t PageCache::slots_of(uint32_t part, uint64_t slots) const {
  const auto before = [&](uint64_t p) {
    return slots * (p * (heads_ / parts()) + std::min<uint64_t>(p, heads_ % parts())) / heads_;
  };
  return before(part + 1) - before(part);
}

// The room for a list of a head, replaced by a larger one when the last lists of the part's heads
// need it.
std::shared_ptr<PageCache::Room> PageCache::room_for(uint32_t head, uint64_t list) {
  const uint32_t p = head % parts();
  Part& part = parts_[p];
  const std::lock_guard lock(part.mutex);
  uint64_t& last = part.lists[head / parts()];
  part.step += list - std::exchange(last, list);
  const auto heads = static_cast<uint32_t>(part.lists.size());
  const uint64_t limit = limit_;
  uint64_t pages = source_->extents() * extent_pages, slots = limit / page_size_;
  if (limit == by_itself) {
    slots = std::max(heads * pages / share, room_of_step(part.step));
    // Rare: the new room is empty.
    if (part.room && slots > part.room->capacity)
      slots = std::max<uint64_t>(slots, part.room->capacity + part.room->capacity / 4);
  } else {
    slots = slots_of(p, std::min(slots, heads_ * pages));
  }
  slots = std::min({slots, heads * pages, uint64_t{no_slot - 1}});
  if (part.room && pages > part.room->pages) pages += pages / 2;  // the file grew: rare too
  if (!part.room || slots > part.room->capacity || pages > part.room->pages)
    part.room = std::make_shared<Room>(heads, pages, static_cast<uint32_t>(slots), page_size_,
                                       static_cast<uint32_t>(scale_bytes_ / sizeof(uint16_t)));
  return part.room;
}

Status PageCache::fetch(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs,
                        PageHold* hold) {
  hold->release();
  if (numbers.empty()) return {};
  hold->begin(room_for(head, numbers.size()), numbers.size());
  Part& part = parts_[head % parts()];
  const uint32_t in_part = head / parts();
  hold->room_->look_up(in_part, numbers, hold->keeps_, refs, &hold->slots_, &hold->missing_);
  part.found.fetch_add(numbers.size() - hold->missing_.size(), std::memory_order_relaxed);
  if (hold->missing_.empty()) return {};
  part.read.fetch_add(hold->missing_.size(), std::memory_order_relaxed);
  Status s = read_missing(head, numbers, refs, hold);
  if (s.ok() && scale_bytes_) s = read_scales(head, numbers, refs, *hold);
  if (!s.ok()) {
    hold->release();
    return s;
  }
  hold->room_->publish(in_part, numbers, refs, &hold->slots_, hold->missing_);
  return {};
}

uint64_t PageCache::page_of(uint32_t head, uint32_t number) const {
  return (uint64_t{number} / extent_pages * heads_ + head) * extent_pages + number % extent_pages;
}

// Reads into the slots, or into memory of the hold. Adjacent pages are contiguous in the file.
// Announcing all pages of a list to the system before the first read (POSIX_FADV_WILLNEED) was not
// faster: first answers over 130,000 uncached tokens took 174 ms with it and 149 ms without.
Status PageCache::read_missing(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs,
                               PageHold* hold) const {
  const Array<PageHold::Missing>& missing = hold->missing_;
  const auto without = std::count_if(missing.begin(), missing.end(),
                                     [](const PageHold::Missing& m) { return m.slot == no_slot; });
  const std::size_t scales = scale_bytes_ / sizeof(uint16_t);
  hold->make_own_room(static_cast<std::size_t>(without), page_size_, scales);
  int8_t* own_pages = hold->own_pages_.get();
  uint16_t* own_scales = hold->own_scales_.get();
  const auto block_of = [&](std::size_t i) { return page_of(head, numbers[missing[i].index]); };
  for (std::size_t i = 0; i < missing.size();) {
    std::byte* to[extent_pages];
    const uint64_t first = block_of(i);
    uint32_t count = 0;
    do {
      PageRef* ref = &refs[missing[i].index];
      if (missing[i].slot == no_slot) {
        ref->data = std::exchange(own_pages, own_pages + page_size_);
        if (scales) ref->scales = std::exchange(own_scales, own_scales + scales);
      } else {
        hold->room_->point(ref, missing[i].slot);
      }
      to[count++] = reinterpret_cast<std::byte*>(const_cast<int8_t*>(ref->data));
      ++i;
    } while (i < missing.size() && count < extent_pages && block_of(i) == first + count);
    RETURN_IF_ERROR(source_->read(first, {to, count}));
  }
  return {};
}

// Reads the scales to where the references point. A block of the file has the scales of several
// pages, so neighbours need one read.
Status PageCache::read_scales(uint32_t head, std::span<const uint32_t> numbers, const PageRef* refs,
                              const PageHold& hold) const {
  for (const PageHold::Missing& m : hold.missing_) {
    if (!hold.scales_) break;
    const uint32_t number = numbers[m.index];
    const uint16_t* from = hold.scales_ + number / extent_pages * hold.scales_stride_ +
                           number % extent_pages * (scale_bytes_ / sizeof *from);
    std::memcpy(const_cast<uint16_t*>(refs[m.index].scales), from, scale_bytes_);
  }
  if (hold.scales_) return {};
  alignas(64) std::byte block[page_bytes];
  uint64_t there = UINT64_MAX;
  for (const PageHold::Missing& m : hold.missing_) {
    const uint64_t offset = page_of(head, numbers[m.index]) * scale_bytes_;
    if (offset / sizeof block != there) {
      there = offset / sizeof block;
      RETURN_IF_ERROR(source_->read_scales(there, block));
    }
    std::memcpy(const_cast<uint16_t*>(refs[m.index].scales), block + offset % sizeof block,
                scale_bytes_);
  }
  return {};
}

PageCache::Counts PageCache::counts() const {
  Counts counts;
  for (const Part& part : parts_) {
    counts.found += part.found.load(std::memory_order_relaxed);
    counts.read += part.read.load(std::memory_order_relaxed);
    const std::lock_guard lock(part.mutex);
    if (!part.room) continue;
    const Room& room = *part.room;
    const std::lock_guard room_lock(part.room->mutex);
    counts.kept += room.slots.size();
    counts.bytes += room.slots.size() * (page_size_ + scale_bytes_ + sizeof(Room::Slot)) +
                    room.slot_of.size() * sizeof(uint32_t);
  }
  return counts;
}

void PageHold::begin(std::shared_ptr<PageCache::Room> room, std::size_t pages) {
  // Cached pages, pages read, and own pages where another thread was first.
  slots_.reserve(2 * pages);
  missing_.clear();
  missing_.reserve(pages);
  room_ = std::move(room);
}

void PageHold::release() {
  if (!slots_.empty()) room_->unpin(slots_);
  slots_.clear();
  missing_.clear();
  room_.reset();
}

// Frees the old memory first, so that the two never exist at once.
void PageHold::make_own_room(std::size_t pages, std::size_t page_size, std::size_t scales) {
  if (pages <= own_room_) return;
  own_room_ = 0;
  own_pages_.reset(), own_scales_.reset();
  own_pages_ = make_buffer<int8_t>(pages * page_size);
  own_scales_ = make_buffer<uint16_t>(pages * scales);
  own_room_ = pages;
}

}  // namespace kvasir
