// Splits text into the words within which byte-level BPE merges, by the regular expressions of each
// model family.
//
// Text may hold any bytes. For splitting, a byte that is not UTF-8 counts as a control character;
// words keep it unchanged.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "base/cancel.h"
#include "base/status.h"

namespace kvasir {

class Pretokenizer {
 public:
  // `name` is the value of tokenizer.ggml.pre. Refuses an unknown one by name.
  static Status create(std::string_view name, std::unique_ptr<const Pretokenizer>* out);
  ~Pretokenizer();

  // Calls `word` for consecutive pieces that together are all of `text`; stops at the first failure
  // and returns it. Linear in the text: a split beyond a fixed effort per byte is refused
  // (Code::limit). Tests the token before the first word (Code::cancelled); later `word` does.
  using Word = std::function<Status(std::string_view)>;
  Status split(std::string_view text, CancelPoll* cancel, const Word& word) const;

  bool adds_bos() const;  // unless the metadata differ
  // A word that is a token becomes it, even if merges would give other tokens.
  bool takes_whole_words() const;

 private:
  struct Steps;
  explicit Pretokenizer(std::unique_ptr<const Steps> steps);
  std::unique_ptr<const Steps> steps_;
};

}  // namespace kvasir
