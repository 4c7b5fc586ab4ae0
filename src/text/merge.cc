// The table is a flat hash map; the row is a doubly linked list in arrays, with a binary heap.
#include "text/merge.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "os/os.h"

namespace kvasir {
namespace {

constexpr uint64_t kFreePair = UINT64_MAX;  // (kNoSymbol, kNoSymbol) is never added
constexpr uint32_t kEnd = UINT32_MAX;

}  // namespace

static unsigned shift_for(std::size_t capacity) {
  return static_cast<unsigned>(std::countl_zero(capacity)) + 1;
}

MergeTable::MergeTable() : multiplier_(os::hash_seed() | 1) {
  constexpr std::size_t capacity = 1024;
  slots_.assign(capacity, Slot{kFreePair, {}});
  shift_ = shift_for(capacity);
}

std::size_t MergeTable::place(uint64_t pair) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t i = first_place(pair);
  while (slots_[i].pair != pair && slots_[i].pair != kFreePair) i = (i + 1) & mask;
  return i;
}

void MergeTable::grow(std::size_t capacity) {
  Array<Slot> old(capacity, Slot{kFreePair, {}});
  old.swap(slots_);
  shift_ = shift_for(capacity);
  for (const Slot& slot : old) {
    if (slot.pair != kFreePair) slots_[place(slot.pair)] = slot;
  }
}

void MergeTable::reserve(std::size_t merges) {
  std::size_t capacity = slots_.size();
  while (capacity < merges * 2) capacity *= 2;
  if (capacity > slots_.size()) grow(capacity);
}

void MergeTable::add(Symbol left, Symbol right, Merge merge) {
  if ((used_ + 1) * 2 > slots_.size()) grow(slots_.size() * 2);
  const uint64_t pair = pair_of(left, right);
  Slot& slot = slots_[place(pair)];
  if (slot.pair == pair) return;
  slot = Slot{pair, merge};
  ++used_;
}

const MergeTable::Merge* MergeTable::find(Symbol left, Symbol right) const {
  if (left == kNoSymbol || right == kNoSymbol) return nullptr;
  const Slot& slot = slots_[place(pair_of(left, right))];
  return slot.pair == kFreePair ? nullptr : &slot.merge;
}

void MergeRow::clear() {
  symbols_.clear();
  starts_.clear();
}

void MergeRow::push(Symbol symbol, uint32_t start) {
  symbols_.push_back(symbol);
  starts_.push_back(start);
}

void MergeRow::consider(const MergeTable& table, uint32_t left) {
  const uint32_t right = next_[left];
  const MergeTable::Merge* merge =
      right == kEnd ? nullptr : table.find(symbols_[left], symbols_[right]);
  ranks_[left] = merge ? merge->rank : kEnd;
  if (!merge) return;
  results_[left] = merge->result;
  heap_.push_back(uint64_t{merge->rank} << 32 | left);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

void MergeRow::merge(const MergeTable& table, CancelPoll* cancel) {
  const auto n = static_cast<uint32_t>(symbols_.size());
  if (n < 2) return;
  next_.resize(n);
  previous_.resize(n);
  ranks_.resize(n);
  results_.resize(n);
  heap_.clear();
  for (uint32_t i = 0; i < n; ++i) {
    next_[i] = i + 1 < n ? i + 1 : kEnd;
    previous_[i] = i > 0 ? i - 1 : kEnd;
  }
  for (uint32_t i = 0; i < n && !cancel->stop(); ++i) consider(table, i);

  while (!heap_.empty() && !cancel->stop()) {
    const uint64_t best = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    heap_.pop_back();
    const auto left = static_cast<uint32_t>(best);
    // An entry is outdated when its left symbol was merged or now forms another pair. An entry of
    // the same rank at the same place is as good as the one queued for it, which will be found
    // outdated later.
    if (ranks_[left] != best >> 32) continue;
    const uint32_t right = next_[left];
    symbols_[left] = results_[left];
    ranks_[right] = kEnd;
    starts_[right] = kEnd;
    next_[left] = next_[right];
    if (next_[left] != kEnd) previous_[next_[left]] = left;
    consider(table, left);
    if (previous_[left] != kEnd) consider(table, previous_[left]);
  }
  compact();
}

void MergeRow::compact() {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < symbols_.size(); ++i) {
    if (starts_[i] == kEnd) continue;
    symbols_[kept] = symbols_[i];
    starts_[kept++] = starts_[i];
  }
  symbols_.resize(kept);
  starts_.resize(kept);
}

}  // namespace kvasir
