// A long text cut into sentences, and parts of it with other sentences hidden in them.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eval_random.h"

namespace tool {

using CountTokens = std::function<size_t(std::string_view)>;

class Haystack {
 public:
  // What is wrong with the text or its length is thrown as Failure.
  Haystack(std::string text, CountTokens count);

  const std::string& text() const { return text_; }
  size_t sentences() const { return starts_.size() - 1; }
  // With the space behind it.
  std::string_view sentence(size_t index) const { return between(index, index + 1); }
  std::string_view between(size_t first, size_t end) const {
    return std::string_view(text_).substr(starts_[first], starts_[end] - starts_[first]);
  }
  // About: sentences are counted each for itself.
  size_t tokens_between(size_t first, size_t end) const {
    return tokens_before_[end] - tokens_before_[first];
  }
  // The sentence that ends `tokens` after the beginning of `first`, one further; the last one if
  // there are fewer.
  size_t end_after(size_t first, size_t tokens) const;
  // Where a part of so many tokens may begin, at random; throws Failure when the text has fewer.
  size_t random_start(size_t tokens, Random* random) const;
  size_t count(std::string_view text) const { return count_(text); }

 private:
  std::string text_;
  CountTokens count_;
  std::vector<size_t> starts_;         // [sentences + 1] bytes
  std::vector<size_t> tokens_before_;  // [sentences + 1]
};

// Something put between two sentences.
struct Needle {
  std::string sentence;
  double depth = 0;  // wished for, of the document: 0 to 1
};

struct Passage {
  std::string text;            // without space at its end
  std::vector<double> depths;  // [needles] where each begins, of the text's bytes
  size_t first = 0, end = 0;   // sentences of the haystack
  std::vector<size_t> before;  // [needles] the haystack's sentence that each stands before
};

// About `tokens` tokens, half a percent off at most where sentences are short enough: sentences
// from `first` on, with the needles.
Passage hide(const Haystack& haystack, size_t first, size_t tokens,
             std::span<const Needle> needles);

}  // namespace tool
