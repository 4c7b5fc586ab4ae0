// The text of an answer, as it is streamed.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "text/utf8.h"

namespace kvasir {

// Returns non-zero to stop.
using TextFn = std::function<int(std::string_view text)>;

// Converts bytes of tokens to whole characters. Holds back text that may begin a stop string.
class AnswerStream {
 public:
  AnswerStream(const std::vector<std::string>& stop, const TextFn& on_text)
      : stop_(stop), on_text_(on_text) {}

  // Sets *stopped when a stop string is complete. Returns false if the callback stops the answer.
  bool push(std::string_view bytes, bool* stopped) {
    utf8_.push(bytes, &held_);
    std::size_t end = held_.size();
    for (const std::string& s : stop_) {
      const std::size_t at = held_.find(s);
      if (!s.empty() && at < end) end = at, *stopped = true;
    }
    if (*stopped) return emit(end);
    return emit(held_.size() - longest_beginning());
  }
  bool finish() {
    utf8_.finish(&held_);
    return emit(held_.size());
  }

 private:
  // Length of the longest suffix of held_ that begins a stop string.
  std::size_t longest_beginning() const {
    std::size_t longest = 0;
    for (const std::string& s : stop_)
      for (std::size_t n = std::min(held_.size(), s.size()); n > longest; --n)
        if (held_.compare(held_.size() - n, n, s, 0, n) == 0) longest = n;
    return longest;
  }
  bool emit(std::size_t size) {
    // Characters stay whole, unless a stop string that is not UTF-8 begins inside one.
    if (size == 0) return true;
    const std::string out = held_.substr(0, size);
    held_.erase(0, size);
    return !on_text_ || on_text_(out) == 0;
  }

  const std::vector<std::string>& stop_;
  const TextFn& on_text_;
  Utf8Stream utf8_;
  std::string held_;
};

}  // namespace kvasir
