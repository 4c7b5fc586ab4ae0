// Which parts of a piece of memory are free: the first that is large enough is taken, neighbours
// that are given back become one. Not for several threads.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>

namespace kvasir {

class FreeSpace {
 public:
  static constexpr std::size_t alignment = 256;

  FreeSpace() = default;
  explicit FreeSpace(std::size_t bytes) {
    if (bytes > 0) free_.emplace(0, bytes);
  }
  // bytes > 0, in whole alignments. False: no part is large enough. Throws std::bad_alloc; then, as
  // when it is false, nothing has changed.
  bool take(std::size_t bytes, std::size_t* at) {
    for (auto part = free_.begin(); part != free_.end(); ++part) {
      if (part->second < bytes) continue;
      if (part->second > bytes) free_.emplace(part->first + bytes, part->second - bytes);
      *at = part->first;
      free_.erase(part);
      return true;
    }
    return false;
  }
  // What was taken. A part that there is no memory to note is lost.
  void give(std::size_t at, std::size_t bytes) noexcept {
    const auto after = free_.lower_bound(at);
    const bool joins = after != free_.end() && after->first == at + bytes;
    if (joins) bytes += after->second;
    if (after != free_.begin()) {
      if (const auto before = std::prev(after); before->first + before->second == at) {
        before->second += bytes;
        if (joins) free_.erase(after);
        return;
      }
    }
    if (joins) {  // its note becomes the whole part's
      auto note = free_.extract(after);
      note.key() = at, note.mapped() = bytes;
      free_.insert(std::move(note));
      return;
    }
    try {
      free_.emplace(at, bytes);
    } catch (...) {
    }
  }
  bool whole(std::size_t bytes) const {
    return free_.size() == 1 && free_.begin()->first == 0 && free_.begin()->second == bytes;
  }

 private:
  std::map<std::size_t, std::size_t> free_;  // where, bytes
};

}  // namespace kvasir
