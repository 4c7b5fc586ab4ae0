// Common parts of all tokenizers: special tokens around plain text, pieces, roles.
#include "text/tokenizer.h"

#include <algorithm>
#include <cinttypes>

#include "base/checksum.h"
#include "base/quoted.h"
#include "gguf/limits.h"
#include "text/special_matcher.h"
#include "text/tokenizer_kinds.h"
#include "text/vocabulary.h"

namespace kvasir {
namespace {

bool is_hidden(TokenKind kind) { return kind == TokenKind::control || kind == TokenKind::unknown; }

constexpr bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Offsets are 32 bits wide during encoding, and a space may be spelled by three bytes.
constexpr std::size_t kLongestText = std::size_t{1} << 30;

// Bytes between tests of the cancel token: a few ms.
constexpr std::size_t kCopiedTogether = std::size_t{1} << 24;

struct ModelKind {
  std::string_view name;  // the value of tokenizer.ggml.model
  const char* meaning;
};
constexpr ModelKind kUnsupported[] = {
    {"bert", "WordPiece"}, {"t5", "Unigram"},       {"rwkv", "RWKV World"},
    {"plamo2", "PLaMo-2"}, {"no_vocab", "no text"}, {"none", "no text"},
};

}  // namespace

Tokenizer::Tokenizer(std::string name, std::unique_ptr<const Vocabulary> vocabulary,
                     StringList pieces)
    : name_(std::move(name)), vocabulary_(std::move(vocabulary)),
      pieces_(std::make_unique<const StringList>(std::move(pieces))),
      specials_(std::make_unique<const SpecialMatcher>(*vocabulary_)) {}

Tokenizer::~Tokenizer() = default;

Status Tokenizer::load(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out) {
  const auto model = gguf.get_string("tokenizer.ggml.model");
  if (!model)
    return Status::error(Code::unsupported,
                         "the file has no tokenizer (tokenizer.ggml.model is missing)");
  if (*model == "gpt2") return load_bpe(gguf, out);
  if (*model == "llama") return load_spm(gguf, out);
  if (*model == "gemma4") return load_gemma4(gguf, out);
  for (const ModelKind& kind : kUnsupported) {
    if (*model == kind.name)
      return Status::error(Code::unsupported,
                           "the tokenizer \"%s\" (tokenizer.ggml.model: %s) is not supported",
                           kind.name.data(), kind.meaning);
  }
  return Status::error(Code::unsupported,
                       "the tokenizer \"%s\" (tokenizer.ggml.model) is not known",
                       Quoted(*model).text());
}

// One encode() call: finds special tokens and encodes the plain runs between them.
class Tokenizer::Run {
 public:
  Run(const Tokenizer& tokenizer, std::string_view text, bool begins, const Cancel* cancel,
      TokenSink* out)
      : tokenizer_(tokenizer), text_(text), scratch_(text.size(), cancel), begins_(begins),
        out_(out) {}

  // Adds the text up to `end`. Text after the last special token is kept for later.
  Status add(std::size_t end, bool parse_special) {
    SpecialMatcher::Match match{};
    while (tokenizer_.specials_->find(text_.substr(0, end), scanned_, parse_special,
                                      &scratch_.cancel, &match)) {
      if (Status status = flush(match.begin); !status.ok()) return status;
      begins_ = true;
      plain_ = match.end;
      if (tokenizer_.strips_after(match.token)) {
        while (plain_ < text_.size() && is_blank(text_[plain_])) ++plain_;
      }
      out_->push(match.token, plain_ - match.begin);
      scanned_ = plain_;
    }
    if (scratch_.cancel.stopped()) return scratch_.cancelled();
    scanned_ = std::max(end, plain_);
    return {};
  }

  // Encodes the kept text before `end`.
  Status flush(std::size_t end) {
    if (end <= plain_) return {};
    Status status =
        tokenizer_.encode_plain(text_.substr(plain_, end - plain_), begins_, &scratch_, out_);
    begins_ = false;
    return status;
  }

 private:
  const Tokenizer& tokenizer_;
  std::string_view text_;
  EncodeScratch scratch_;
  bool begins_;
  // Bytes of the text that are encoded, and that were searched for special tokens.
  std::size_t plain_ = 0, scanned_ = 0;
  TokenSink* out_;
};

Status Tokenizer::encode(std::string_view text, bool parse_special, bool text_start,
                         Array<Token>* out) const {
  const Part part = {text, parse_special};
  return encode(std::span(&part, 1), text_start, out, {});
}

Status Tokenizer::encode(std::span<const Part> parts, bool text_start, Array<Token>* out,
                         const EncodeExtras& extras) const {
  std::size_t size = 0;
  for (const Part& part : parts) {
    if (part.text.size() > kLongestText - size)
      return Status::error(
          Code::limit, "a text of more than %zu bytes is too long to encode at once", kLongestText);
    size += part.text.size();
  }
  Array<char> joined;
  if (parts.size() > 1) {
    joined.reserve(size);
    for (const Part& part : parts) {
      for (std::size_t at = 0; at < part.text.size(); at += kCopiedTogether) {
        if (is_cancelled(extras.cancel)) return EncodeScratch::cancelled();
        const std::string_view piece = part.text.substr(at, kCopiedTogether);
        joined.insert(joined.end(), piece.begin(), piece.end());
      }
    }
  }
  const std::string_view text =
      parts.size() == 1 ? parts[0].text : std::string_view(joined.data(), joined.size());

  TokenSink sink(out, extras.lengths);
  Run run(*this, text, text_start, extras.cancel, &sink);
  Status status;
  std::size_t end = 0;
  for (const Part& part : parts) {
    if (status.ok()) status = run.add(end += part.text.size(), part.parse_special);
  }
  if (status.ok()) status = run.flush(text.size());
  if (!status.ok()) sink.clear();
  return status;
}

bool Tokenizer::strips_after(Token token) const {
  return strips_after_special_ && is_hidden(kind(token)) && token != bos();
}

std::string_view Tokenizer::piece(Token token, bool special) const {
  if (!vocabulary_->contains(token) || (!special && is_hidden(kind(token)))) return {};
  return (*pieces_)[static_cast<std::size_t>(token)];
}

uint32_t Tokenizer::size() const { return vocabulary_->size(); }
TokenKind Tokenizer::kind(Token token) const {
  return vocabulary_->contains(token) ? vocabulary_->kind(token) : TokenKind::unused;
}
Token Tokenizer::find(std::string_view token_text) const { return vocabulary_->find(token_text); }
Token Tokenizer::bos() const { return vocabulary_->special().bos; }
Token Tokenizer::eos() const { return vocabulary_->special().eos; }
bool Tokenizer::add_bos() const { return vocabulary_->adds_bos(); }
bool Tokenizer::add_eos() const { return vocabulary_->adds_eos(); }
bool Tokenizer::ends_turn(Token token) const { return vocabulary_->ends_turn(token); }
std::span<const Token> Tokenizer::suppressed() const { return vocabulary_->suppressed(); }
bool Tokenizer::starts_text(Token token) const {
  return kind(token) == TokenKind::control || kind(token) == TokenKind::user_defined;
}

WordCache::WordCache(std::size_t text_size) {
  // About a slot per distinct word of a long text; few for a short text, which must clear them too.
  std::size_t capacity = 64;
  while (capacity < text_size / 16 && capacity < 16384) capacity *= 2;
  entries_.resize(capacity);
}

WordCache::Entry& WordCache::at(std::string_view word) {
  return entries_[static_cast<std::size_t>(checksum(word.data(), word.size(), 0)) &
                  (entries_.size() - 1)];
}

Status MergeModel::load_list(const Gguf& gguf) {
  const auto list = gguf.get_strings("tokenizer.ggml.merges");
  if (!list)
    return Status::error(Code::corrupt, "tokenizer.ggml.merges is missing or no array of strings");
  if (list->size() > gguf_limits::merges ||
      list->bytes() - 8 * list->size() > gguf_limits::all_merges_bytes)
    return Status::error(Code::limit,
                         "tokenizer.ggml.merges has %" PRIu64 " merges of %" PRIu64
                         " bytes: at most %" PRIu64 " of %" PRIu64 " can be read",
                         list->size(), list->bytes() - 8 * list->size(), gguf_limits::merges,
                         gguf_limits::all_merges_bytes);
  const auto parts_of = [](std::string_view merge) {
    const std::size_t space = std::min(merge.find(' ', 1), merge.size());
    return std::pair(merge.substr(0, space), merge.substr(std::min(space + 1, merge.size())));
  };
  // A merge without two parts is refused: a count in a file is no reason to reserve memory.
  std::size_t spelled = 0;
  for (const std::string_view merge : *list) spelled += merge.size() >= 3 ? 1u : 0u;
  merges_.reserve(spelled);
  constexpr std::size_t distance = 16;  // merges between a prefetch and its use
  auto ahead = list->begin();
  for (std::size_t i = 0; i < distance && ahead != list->end(); ++i) ++ahead;
  struct {
    Symbol left, right;
    MergeTable::Merge merge;
  } pending[distance] = {};
  const auto add = [&](std::size_t rank) {
    const auto& p = pending[rank % distance];
    merges_.add(p.left, p.right, p.merge);
  };
  std::string whole;
  std::size_t rank = 0;
  Symbol merged = kNoSymbol;
  for (const std::string_view merge : *list) {
    if (ahead != list->end()) {
      const auto [left, right] = parts_of(*ahead);
      __builtin_prefetch(symbols_.first_slot(left));
      __builtin_prefetch(symbols_.first_slot(right));
      ++ahead;
    }
    const auto [left, right] = parts_of(merge);
    if (right.empty())
      return Status::error(Code::corrupt,
                           "tokenizer.ggml.merges: merge %zu is not two parts with a space between",
                           rank);
    whole.assign(left).append(right);
    const Symbol left_symbol = symbols_.find_or_add(left),
                 right_symbol = symbols_.find_or_add(right);
    // in most files tokens have the order of the merges that make them
    merged = symbols_.find_or_add(whole, merged == kNoSymbol ? merged : merged + 1);
    if (rank >= distance) add(rank - distance);
    __builtin_prefetch(merges_.first_slot(left_symbol, right_symbol));
    pending[rank % distance] = {left_symbol, right_symbol, {static_cast<uint32_t>(rank), merged}};
    ++rank;
  }
  for (std::size_t i = rank - std::min(rank, distance); i < rank; ++i) add(i);
  return {};
}

Status MergeModel::finish(std::string_view word, EncodeScratch* scratch, TokenSink* out) const {
  MergeRow& row = scratch->row;
  row.merge(merges_, &scratch->cancel);
  if (scratch->cancel.stopped()) return scratch->cancelled();
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::size_t begin = row.start(i);
    const std::size_t end = i + 1 < row.size() ? row.start(i + 1) : word.size();
    if (symbols_.is_token(row.symbol(i))) {
      out->push(static_cast<Token>(row.symbol(i)), end - begin);
      continue;
    }
    if (Status status = append_bytes(word.substr(begin, end - begin), out); !status.ok())
      return status;
  }
  return {};
}

Status MergeModel::append_bytes(std::string_view bytes, TokenSink* out) const {
  const auto token_of = [&](char c) { return byte_tokens_[static_cast<unsigned char>(c)]; };
  const auto missing =
      std::find_if(bytes.begin(), bytes.end(), [&](char c) { return token_of(c) < 0; });
  if (missing == bytes.end()) {
    for (const char c : bytes) out->push(token_of(c), 1);
    return {};
  }
  const Token unknown = vocabulary_.special().unknown;
  if (unknown < 0)
    return Status::error(Code::unsupported,
                         "the vocabulary has neither a token for byte 0x%02X nor an unknown token",
                         static_cast<unsigned>(static_cast<unsigned char>(*missing)));
  out->push(unknown, bytes.size());
  return {};
}

}  // namespace kvasir
