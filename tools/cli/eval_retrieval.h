// Passages of documents, found by the words that they share with a question (BM25): what a program
// without a saved KV cache would put before the question.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "eval_text.h"

namespace tool {

struct FoundPassage {
  size_t document = 0, place = 0;  // its number in the document
  std::string text;
  size_t tokens = 0;
};

// Whole sentences and lines of about `tokens` tokens; parts of longer ones.
std::vector<std::string> split_passages(std::string_view text, size_t tokens,
                                        const CountTokens& count);

class PassageIndex {
 public:
  void add(size_t document, const std::vector<std::string>& passages, const CountTokens& count);

  // Of at most `tokens` tokens together, in the order of the documents; best first they are taken.
  std::vector<FoundPassage> find(std::string_view question, size_t tokens) const;

 private:
  struct Entry {
    FoundPassage passage;
    std::map<std::string, size_t> words;  // and how often
    size_t length = 0;                    // in words
  };
  std::vector<double> scores(std::string_view question) const;

  std::vector<Entry> entries_;
  std::map<std::string, size_t> holders_;  // entries that have a word
  size_t length_ = 0;                      // of all entries
};

}  // namespace tool
