// A long text in sentences, and parts of it with hidden sentences.
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
  Haystack(std::string text, CountTokens count);

  const std::string& text() const { return text_; }
  size_t sentences() const { return starts_.size() - 1; }
  // With the space after it.
  std::string_view sentence(size_t index) const { return between(index, index + 1); }
  std::string_view between(size_t first, size_t end) const {
    return std::string_view(text_).substr(starts_[first], starts_[end] - starts_[first]);
  }
  // Approximate: sentences are counted one by one.
  size_t tokens_between(size_t first, size_t end) const {
    return tokens_before_[end] - tokens_before_[first];
  }
  // One past the sentence that ends `tokens` after the beginning of `first`, or past the last one.
  size_t end_after(size_t first, size_t tokens) const;
  // A random beginning for a part of `tokens` tokens. Throws Failure where the text has fewer.
  size_t random_start(size_t tokens, Random* random) const;
  size_t count(std::string_view text) const { return count_(text); }

 private:
  std::string text_;
  CountTokens count_;
  std::vector<size_t> starts_;         // [sentences + 1] bytes
  std::vector<size_t> tokens_before_;  // [sentences + 1]
};

// A sentence that is hidden between two others.
struct Needle {
  std::string sentence;
  double depth = 0;  // requested place in the document, 0 to 1
};

struct Passage {
  std::string text;            // without space at its end
  std::vector<double> depths;  // [needles] beginning of each, as a part of the text's bytes
  size_t first = 0, end = 0;   // sentences of the haystack
  std::vector<size_t> before;  // [needles] sentence of the haystack after each
};

// Sentences from `first` on with the needles, `tokens` tokens to within half a percent where
// sentences are short enough. Throws Failure.
Passage hide(const Haystack& haystack, size_t first, size_t tokens,
             std::span<const Needle> needles);

}  // namespace tool
