// SentencePiece-style BPE: spaces are spelled U+2581, characters merge into the token of the
// highest score, and text without a token falls back to bytes.
//
// The file has scores instead of merges. Every split of a token into two parts that can occur
// becomes a merge whose rank is the rank of the token's score, so that words merge by the code of
// byte-level BPE.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gguf/limits.h"
#include "text/character_bpe.h"

namespace kvasir {
namespace {

bool begins_with_space(std::string_view text) {
  return text[0] == ' ' || text.substr(0, kSpelledSpace.size()) == kSpelledSpace;
}

class SpmTokenizer final : public CharacterBpe {
 public:
  SpmTokenizer(std::unique_ptr<const Vocabulary> vocabulary, StringList pieces)
      : CharacterBpe("spm", std::move(vocabulary), std::move(pieces)) {}

  Status load_merges(const Gguf& gguf);

 private:
  void add_cuts(std::string_view text, MergeTable::Merge merge);

  Status encode_plain(std::string_view text, bool begins, EncodeScratch* scratch,
                      TokenSink* out) const override;
  std::size_t word_size(std::string_view text, CancelPoll* cancel) const;

  // No token has a space after another character, so no merge crosses the beginning of a word.
  bool words_are_separate_ = true;
};

Status SpmTokenizer::load_merges(const Gguf& gguf) {
  const Vocabulary& tokens = vocabulary();
  const auto scores = gguf.get_floats("tokenizer.ggml.scores");
  if (!scores)
    return Status::error(Code::corrupt, "tokenizer.ggml.scores is missing or no array of floats");
  if (scores->size() != tokens.size())
    return Status::error(Code::corrupt, "tokenizer.ggml.scores has %zu entries for %u tokens",
                         scores->size(), tokens.size());
  // distinct scores, best first: the index of a score is its rank
  std::vector<float> order = *scores;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (std::isnan(order[i]))
      return Status::error(Code::corrupt, "tokenizer.ggml.scores of token %zu is not a number", i);
  }
  std::sort(order.begin(), order.end(), std::greater<>());
  order.erase(std::unique(order.begin(), order.end()), order.end());
  for (uint32_t i = 0; i < tokens.size(); ++i) {
    const std::string_view text = tokens.text(static_cast<Token>(i));
    // special, or spelled like an earlier one
    if (tokens.find_plain(text) != static_cast<Token>(i)) continue;
    // Bounds the work of entering a piece's splits, which is quadratic in its length.
    if (text.size() > gguf_limits::special_bytes)
      return Status::error(Code::limit,
                           "tokenizer.ggml.tokens: token %u has %zu bytes: at most %" PRIu64
                           " can be read",
                           i, text.size(), gguf_limits::special_bytes);
    const auto rank = std::lower_bound(order.begin(), order.end(), (*scores)[i], std::greater<>()) -
                      order.begin();
    add_cuts(text, {static_cast<uint32_t>(rank), i});
  }
  load_bytes();
  const auto prefix = gguf.get_bool("tokenizer.ggml.add_space_prefix");
  space_prefix_ = prefix.value_or(true);
  // Phi-3's special tokens swallow the blanks after them, which the file does not say; its
  // vocabulary is recognised by its marks.
  strips_after_special_ =
      find("<|user|>") >= 0 && find("<|assistant|>") >= 0 && find("<|end|>") >= 0;
  return {};
}

void SpmTokenizer::add_cuts(std::string_view text, MergeTable::Merge merge) {
  SymbolTable& symbols = model_.symbols();
  const auto part = [&](std::string_view s) {
    return s.size() == character_size(s) ? symbols.find_or_add(s) : symbols.find(s);
  };
  bool after_other = false;  // a character other than a space was seen
  for (std::size_t at = 0; at < text.size(); at += character_size(text.substr(at))) {
    const bool space = begins_with_space(text.substr(at));
    if (space && after_other) words_are_separate_ = false;
    after_other |= !space;
    if (at == 0) continue;
    const Symbol left = part(text.substr(0, at)), right = part(text.substr(at));
    if (left != kNoSymbol && right != kNoSymbol) model_.merges().add(left, right, merge);
  }
}

// The size up to the next space that follows another character; all of `text` where tokens may
// cross words.
std::size_t SpmTokenizer::word_size(std::string_view text, CancelPoll* cancel) const {
  if (!words_are_separate_) return text.size();
  bool after_other = false;
  std::size_t at = 0;
  while (at < text.size() && !cancel->stop()) {
    const bool space = begins_with_space(text.substr(at));
    if (space && after_other) break;
    after_other |= !space;
    at += character_size(text.substr(at));
  }
  return at;
}

Status SpmTokenizer::encode_plain(std::string_view text, bool begins, EncodeScratch* scratch,
                                  TokenSink* out) const {
  bool prefix = begins && space_prefix_;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, word_size(text, &scratch->cancel));
    if (scratch->cancel.stop(word.size())) return scratch->cancelled();
    Status status =
        prefix ? encode_word(word, true, scratch, out) : encode_cached(word, scratch, out);
    if (!status.ok()) return status;
    prefix = false;
    text.remove_prefix(word.size());
  }
  return {};
}

}  // namespace

Status load_spm(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out) {
  // SentencePiece's own numbering, for files without these keys.
  constexpr SpecialIds standard = {.bos = 1, .eos = 2, .unknown = 0};
  auto vocabulary = std::make_unique<Vocabulary>();
  if (Status status = Vocabulary::load(gguf, standard, true, vocabulary.get()); !status.ok())
    return status;
  StringList pieces = CharacterBpe::decode_pieces(*vocabulary);
  auto tokenizer = std::make_unique<SpmTokenizer>(std::move(vocabulary), std::move(pieces));
  if (Status status = tokenizer->load_merges(gguf); !status.ok()) return status;
  *out = std::move(tokenizer);
  return {};
}

}  // namespace kvasir
