// SentencePiece-style BPE: spaces are spelled U+2581, characters merge into the token of the
// highest score, and text without a token falls back to bytes.
//
// The file has scores instead of merges. Every split of a token into two parts that can occur
// becomes a merge whose rank is the rank of the token's score, so that words merge by the code of
// byte-level BPE.
#include <algorithm>
#include <array>
#include <cinttypes>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gguf/limits.h"
#include "text/tokenizer_kinds.h"
#include "text/utf8.h"

namespace kvasir {
namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581

// The size of the first character of `text`; a byte that is not UTF-8 counts as one.
std::size_t character_size(std::string_view text) {
  std::size_t length;
  return utf8_step(text, &length) == Utf8::valid ? length : 1;
}

bool begins_with_space(std::string_view text) {
  return text[0] == ' ' || text.substr(0, kSpace.size()) == kSpace;
}

class SpmTokenizer final : public Tokenizer {
 public:
  SpmTokenizer(std::unique_ptr<const Vocabulary> vocabulary, StringList pieces)
      : Tokenizer("spm", std::move(vocabulary), std::move(pieces)),
        model_(Tokenizer::vocabulary()) {}

  Status load_merges(const Gguf& gguf);

 private:
  void add_cuts(std::string_view text, MergeTable::Merge merge);
  void load_bytes();

  Status encode_plain(std::string_view text, bool begins, EncodeScratch* scratch,
                      TokenSink* out) const override;
  Status encode_cached(std::string_view word, EncodeScratch* scratch, TokenSink* out) const;
  Status encode_word(std::string_view word, bool prefix, EncodeScratch* scratch,
                     TokenSink* out) const;
  std::size_t word_size(std::string_view text, CancelPoll* cancel) const;

  MergeModel model_;
  std::array<Symbol, 128> ascii_{};
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

void SpmTokenizer::load_bytes() {
  for (unsigned byte = 0; byte < 256; ++byte) {
    const std::string spelling(1, static_cast<char>(byte));
    if (byte < 128) ascii_[byte] = model_.symbols().find(spelling);
    model_.set_byte_token(static_cast<unsigned char>(byte), vocabulary().find_plain(spelling));
  }
  for (uint32_t i = vocabulary().size(); i-- > 0;) {  // of equal ones the first counts
    const auto token = static_cast<Token>(i);
    const int byte = vocabulary().kind(token) == TokenKind::byte
                         ? Vocabulary::byte_of(vocabulary().text(token))
                         : -1;
    if (byte >= 0) model_.set_byte_token(static_cast<unsigned char>(byte), token);
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

Status SpmTokenizer::encode_cached(std::string_view word, EncodeScratch* scratch,
                                   TokenSink* out) const {
  return scratch->cache.encode(word, out, [&] { return encode_word(word, false, scratch, out); });
}

// Converts the lengths of a word's tokens in its spelling to lengths in the word. A space of the
// word is spelled by three bytes, and the space before a text by three that are not in it.
void unspell_lengths(std::string_view word, bool prefix, std::span<uint32_t> lengths) {
  // `spelled` bytes stand for word[0, at)
  std::size_t token_end = 0, spelled = prefix ? kSpace.size() : 0, at = 0;
  for (uint32_t& length : lengths) {
    token_end += length;
    const std::size_t begin = at;
    while (at < word.size()) {
      const std::size_t next = spelled + (word[at] == ' ' ? kSpace.size() : 1);
      if (next > token_end) break;
      spelled = next;
      ++at;
    }
    length = static_cast<uint32_t>(at - begin);
  }
}

Status SpmTokenizer::encode_word(std::string_view word, bool prefix, EncodeScratch* scratch,
                                 TokenSink* out) const {
  std::string& spelled = scratch->spelled;
  spelled.assign(prefix ? kSpace : "");
  for (const char c : word) {
    if (scratch->cancel.stop()) break;
    if (c == ' ') spelled.append(kSpace);
    else spelled.push_back(c);
  }
  scratch->row.clear();
  std::size_t size;
  for (std::size_t at = 0; at < spelled.size() && !scratch->cancel.stop(); at += size) {
    const std::string_view rest = std::string_view(spelled).substr(at);
    size = character_size(rest);
    const auto lead = static_cast<unsigned char>(rest[0]);
    const Symbol symbol = lead < 128 ? ascii_[lead] : model_.symbols().find(rest.substr(0, size));
    scratch->row.push(symbol, static_cast<uint32_t>(at));
  }
  const std::size_t first = out->size();
  Status status = model_.finish(spelled, scratch, out);
  unspell_lengths(word, prefix, out->lengths_from(first));
  return status;
}

StringList decode_pieces(const Vocabulary& vocabulary) {
  StringList pieces;
  std::string piece;
  for (uint32_t i = 0; i < vocabulary.size(); ++i) {
    const auto token = static_cast<Token>(i);
    const std::string_view text = vocabulary.text(token);
    const TokenKind kind = vocabulary.kind(token);
    piece.clear();
    if (const int byte = kind == TokenKind::byte ? Vocabulary::byte_of(text) : -1; byte >= 0) {
      piece.push_back(static_cast<char>(byte));
    } else if (kind == TokenKind::normal || kind == TokenKind::unused || kind == TokenKind::byte) {
      for (std::size_t at = 0; at < text.size();) {
        const bool space = text.substr(at, kSpace.size()) == kSpace;
        piece.push_back(space ? ' ' : text[at]);
        at += space ? kSpace.size() : 1;
      }
    } else {
      piece = text;  // special tokens are spelled literally
    }
    pieces.add(piece);
  }
  return pieces;
}

}  // namespace

Status load_spm(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out) {
  // SentencePiece's own numbering, for files without these keys.
  constexpr SpecialIds standard = {.bos = 1, .eos = 2, .unknown = 0};
  auto vocabulary = std::make_unique<Vocabulary>();
  if (Status status = Vocabulary::load(gguf, standard, true, vocabulary.get()); !status.ok())
    return status;
  StringList pieces = decode_pieces(*vocabulary);
  auto tokenizer = std::make_unique<SpmTokenizer>(std::move(vocabulary), std::move(pieces));
  if (Status status = tokenizer->load_merges(gguf); !status.ok()) return status;
  *out = std::move(tokenizer);
  return {};
}

}  // namespace kvasir
