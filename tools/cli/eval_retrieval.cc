#include "eval_retrieval.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tool {
namespace {

// The usual parameters of BM25 (Robertson and Zaragoza, 2009).
constexpr double saturation = 1.2, length_weight = 0.75;

bool is_word_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || static_cast<unsigned char>(c) >= 0x80;
}

// Lower-case words.
std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words(1);
  for (char c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (is_word_char(c)) words.back() += c;
    else if (!words.back().empty()) words.emplace_back();
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

// One past the sentence or line that begins at `at`, with the spaces after it.
size_t end_of_piece(std::string_view text, size_t at) {
  for (size_t i = at; i + 1 < text.size(); ++i) {
    const bool ends = text[i] == '.' || text[i] == '!' || text[i] == '?';
    if (text[i] == '\n' || (ends && (text[i + 1] == ' ' || text[i + 1] == '\n')))
      return std::min(text.find_first_not_of(" \n", i + 1), text.size());
  }
  return text.size();
}

}  // namespace

std::vector<std::string> split_passages(std::string_view text, size_t tokens,
                                        const CountTokens& count) {
  std::vector<std::string> passages;
  size_t held = 0;  // tokens of the last one
  const auto add = [&](std::string_view piece, size_t size) {
    if (passages.empty() || held + size > tokens) passages.emplace_back(), held = 0;
    passages.back() += piece, held += size;
  };
  for (size_t at = 0; at < text.size();) {
    const std::string_view piece = text.substr(at, end_of_piece(text, at) - at);
    at += piece.size();
    const size_t size = count(piece);
    if (size <= tokens) {
      add(piece, size);
      continue;
    }
    for (size_t from = 0; from < piece.size();) {  // word by word
      const size_t end = std::min(piece.find(' ', from), piece.size() - 1) + 1;
      add(piece.substr(from, end - from), count(piece.substr(from, end - from)));
      from = end;
    }
  }
  return passages;
}

void PassageIndex::add(size_t document, const std::vector<std::string>& passages,
                       const CountTokens& count) {
  for (size_t i = 0; i < passages.size(); ++i) {
    Entry entry{{document, i, passages[i], count(passages[i])}, {}, 0};
    for (const std::string& word : words_of(passages[i])) ++entry.words[word], ++entry.length;
    for (const auto& [word, times] : entry.words) ++holders_[word];
    length_ += entry.length;
    entries_.push_back(std::move(entry));
  }
}

std::vector<double> PassageIndex::scores(std::string_view question) const {
  const auto all = static_cast<double>(entries_.size());
  const double mean = static_cast<double>(length_) / std::max(all, 1.0);
  std::vector<double> scores(entries_.size());
  for (const std::string& word : words_of(question)) {
    const auto found = holders_.find(word);
    if (found == holders_.end()) continue;
    const auto holders = static_cast<double>(found->second);
    const double weight = std::log(1 + (all - holders + 0.5) / (holders + 0.5));
    for (size_t i = 0; i < entries_.size(); ++i) {
      const auto at = entries_[i].words.find(word);
      if (at == entries_[i].words.end()) continue;
      const auto times = static_cast<double>(at->second);
      const double length = static_cast<double>(entries_[i].length) / mean;
      scores[i] += weight * times * (saturation + 1) /
                   (times + saturation * (1 - length_weight + length_weight * length));
    }
  }
  return scores;
}

std::vector<FoundPassage> PassageIndex::find(std::string_view question, size_t tokens) const {
  const std::vector<double> score = scores(question);
  std::vector<size_t> order(entries_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return score[a] > score[b]; });
  std::vector<FoundPassage> found;
  size_t held = 0;
  for (const size_t i : order) {
    const FoundPassage& passage = entries_[i].passage;
    if (score[i] <= 0 || held + passage.tokens > tokens) break;
    held += passage.tokens;
    found.push_back(passage);
  }
  std::sort(found.begin(), found.end(), [](const FoundPassage& a, const FoundPassage& b) {
    return a.document != b.document ? a.document < b.document : a.place < b.place;
  });
  return found;
}

}  // namespace tool
