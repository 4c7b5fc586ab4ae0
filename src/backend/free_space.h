// The free parts of a piece of memory: first fit; neighbouring free parts are joined. Not thread
// safe.
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
  // bytes: a positive multiple of `alignment`. False where no part is large enough. Throws
  // std::bad_alloc. Neither changes anything.
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
  // Returns a taken part. Where memory for its entry is missing, the part is lost.
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
    if (joins) {  // its entry is used again
      auto entry = free_.extract(after);
      entry.key() = at, entry.mapped() = bytes;
      free_.insert(std::move(entry));
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
  std::map<std::size_t, std::size_t> free_;  // offset: bytes
};

}  // namespace kvasir
