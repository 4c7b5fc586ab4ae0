// Merges neighbouring symbols: the algorithm of byte-level BPE and of SentencePiece-style BPE.
//
// A word begins as a row of symbols (bytes or characters). While two neighbours have a merge, the
// pair of the lowest rank, and among equals the leftmost, becomes one symbol. A heap of candidate
// pairs over a linked row makes that O(n log n) in the symbols.
#pragma once

#include <cstdint>
#include <span>

#include "base/cancel.h"
#include "base/memory.h"

namespace kvasir {

// A token id; or a number from the vocabulary's size upwards, for a text that takes part in merges
// but is no token.
using Symbol = uint32_t;
constexpr Symbol kNoSymbol = UINT32_MAX;  // takes part in no merge

class MergeTable {
 public:
  struct Merge {
    uint32_t rank;  // lower merges first
    Symbol result;
  };

  MergeTable();
  // Makes room for so many merges, which the caller has seen in the file.
  void reserve(std::size_t merges);
  // The first merge of a pair counts; later ones of the same pair are dropped. Neither symbol may
  // be kNoSymbol.
  void add(Symbol left, Symbol right, Merge merge);
  // What add() reads first. The table exceeds the cache: prefetch it before.
  const void* first_slot(Symbol left, Symbol right) const {
    return &slots_[first_place(pair_of(left, right))];
  }
  const Merge* find(Symbol left, Symbol right) const;  // null when the two do not merge

 private:
  struct Slot {
    uint64_t pair;
    Merge merge;
  };
  void grow(std::size_t capacity);
  static uint64_t pair_of(Symbol left, Symbol right) { return uint64_t{left} << 32 | right; }
  // Multiplies by an odd number of this process, so that nobody can choose pairs that collide. Then
  // Fibonacci hashing separates values that an unlucky number leaves close: the highest bits of the
  // product with the golden ratio's multiplier are well mixed.
  std::size_t first_place(uint64_t pair) const {
    const uint64_t mixed = pair * multiplier_;
    return static_cast<std::size_t>((mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15u >> shift_);
  }
  std::size_t place(uint64_t pair) const;  // its slot, or the free slot for it

  Array<Slot> slots_;    // open addressing, a power of two, at most half full
  unsigned shift_;       // leaves as many bits of a hash as the slots need
  uint64_t multiplier_;  // odd
  std::size_t used_ = 0;
};

// The row of one word; reused for the next.
class MergeRow {
 public:
  void clear();
  // Appends a symbol that covers the word's bytes from `start` to the next symbol's start.
  void push(Symbol symbol, uint32_t start);
  // After cancel->stop() the content is meaningless.
  void merge(const MergeTable& table, CancelPoll* cancel);

  // After merge(): the remaining symbols in order, each with the offset at which it begins.
  std::size_t size() const { return symbols_.size(); }
  Symbol symbol(std::size_t i) const { return symbols_[i]; }
  uint32_t start(std::size_t i) const { return starts_[i]; }

 private:
  void consider(const MergeTable& table, uint32_t left);  // queues the pair that begins at `left`
  void compact();

  // [symbols], parallel
  Array<Symbol> symbols_;
  Array<uint32_t> starts_;
  Array<uint32_t> next_, previous_;  // index of the neighbour; UINT32_MAX at the ends
  // Of the pair that begins here; UINT32_MAX without a merge.
  Array<uint32_t> ranks_;
  Array<Symbol> results_;  // of that merge
  // Rank in the high half, index of the left symbol in the low half; may be outdated.
  Array<uint64_t> heap_;
};

}  // namespace kvasir
