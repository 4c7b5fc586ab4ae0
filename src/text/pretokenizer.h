// Cuts text into the words that byte-level BPE merges within, by the regular expressions that each
// model family was trained with.
//
// Text may hold any bytes: for cutting, a byte that is not UTF-8 counts as a control character; the
// words keep it as it is.
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

  // Calls `word` for consecutive pieces of `text` that together are all of it; stops at the first
  // failure and returns it. Linear in the text: a cut that took the matcher more than a fixed
  // effort a byte is refused (Code::limit). Before the first word the token is looked at
  // (Code::cancelled); from then on that is for `word` to do.
  using Word = std::function<Status(std::string_view)>;
  Status split(std::string_view text, CancelPoll* cancel, const Word& word) const;

  bool adds_bos() const;  // unless the metadata say otherwise
  // a word that is a token becomes it, even if merges would lead elsewhere
  bool takes_whole_words() const;

 private:
  struct Steps;
  explicit Pretokenizer(std::unique_ptr<const Steps> steps);
  std::unique_ptr<const Steps> steps_;
};

}  // namespace kvasir
