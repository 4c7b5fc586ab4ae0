// Byte-level BPE: text is split into words, and the bytes of each word merge by the file's list of
// merges.
//
// The vocabulary spells bytes as printable characters (the alphabet of GPT-2); only this file uses
// that spelling.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "text/pretokenizer.h"
#include "text/tokenizer_kinds.h"
#include "text/utf8.h"

namespace kvasir {
namespace {

// Bytes that are printable in Latin-1 spell themselves; the others are spelled, in order, by U+0100
// and up.
class ByteAlphabet {  // 10 KiB: on the heap
 public:
  ByteAlphabet() {
    bytes_.fill(-1);
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
      const unsigned code = printable ? byte : next++;
      bytes_[code] = static_cast<int>(byte);
      if (code < 0x80) spelling_[byte] = {static_cast<char>(code)};
      else
        spelling_[byte] = {static_cast<char>(0xC0 | code >> 6),
                           static_cast<char>(0x80 | (code & 0x3F))};
    }
  }

  const std::string& spell(unsigned char byte) const { return spelling_[byte]; }

  // *to = the bytes of `spelling`. Characters outside the alphabet stand for themselves.
  void decode(std::string_view spelling, std::string* to) const {
    std::string& out = *to;
    out.clear();
    std::size_t length;
    for (std::size_t i = 0; i < spelling.size(); i += length) {
      const bool valid = utf8_step(spelling.substr(i), &length) == Utf8::valid;
      const auto at = [&](std::size_t k) {
        return static_cast<unsigned>(static_cast<unsigned char>(spelling[i + k]));
      };
      unsigned code = kCodes;
      if (valid && length == 1) code = at(0);
      if (valid && length == 2) code = (at(0) & 0x1F) << 6 | (at(1) & 0x3F);
      if (code < kCodes && bytes_[code] >= 0) out.push_back(static_cast<char>(bytes_[code]));
      else out.append(spelling.substr(i, length));
    }
  }

 private:
  static constexpr unsigned kCodes = 0x100 + 68;  // 68 bytes are not printable
  std::array<std::string, 256> spelling_;
  std::array<int, kCodes> bytes_;  // -1: not in the alphabet
};

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(std::string name, std::unique_ptr<const Vocabulary> vocabulary, StringList pieces,
               std::unique_ptr<const ByteAlphabet> alphabet,
               std::unique_ptr<const Pretokenizer> pretokenizer)
      : Tokenizer(std::move(name), std::move(vocabulary), std::move(pieces)),
        alphabet_(std::move(alphabet)), pretokenizer_(std::move(pretokenizer)),
        model_(Tokenizer::vocabulary()) {}

  Status load_merges(const Gguf& gguf);

 private:
  Status encode_plain(std::string_view text, bool begins, EncodeScratch* scratch,
                      TokenSink* out) const override;
  Status encode_word(std::string_view word, EncodeScratch* scratch, TokenSink* out) const;
  Token whole_word(std::string_view word, EncodeScratch* scratch) const;

  std::unique_ptr<const ByteAlphabet> alphabet_;
  std::unique_ptr<const Pretokenizer> pretokenizer_;
  MergeModel model_;
  std::array<Symbol, 256> byte_symbols_{};
  std::size_t longest_text_ = 0;  // of any token, bytes
};

Status BpeTokenizer::load_merges(const Gguf& gguf) {
  RETURN_IF_ERROR(model_.load_list(gguf));
  const SymbolTable& symbols = model_.symbols();
  for (unsigned byte = 0; byte < 256; ++byte) {
    const std::string& spelling = alphabet_->spell(static_cast<unsigned char>(byte));
    byte_symbols_[byte] = symbols.find(spelling);
    model_.set_byte_token(static_cast<unsigned char>(byte), vocabulary().find_plain(spelling));
  }
  for (uint32_t i = 0; i < vocabulary().size(); ++i)
    longest_text_ = std::max(longest_text_, vocabulary().text(static_cast<Token>(i)).size());
  return {};
}

Status BpeTokenizer::encode_plain(std::string_view text, bool, EncodeScratch* scratch,
                                  TokenSink* out) const {
  return pretokenizer_->split(text, &scratch->cancel, [&](std::string_view word) {
    if (scratch->cancel.stop(word.size())) return scratch->cancelled();
    return scratch->cache.encode(word, out, [&] { return encode_word(word, scratch, out); });
  });
}

Token BpeTokenizer::whole_word(std::string_view word, EncodeScratch* scratch) const {
  if (!pretokenizer_->takes_whole_words() || word.size() > longest_text_) return -1;
  scratch->spelled.clear();
  for (const char c : word)
    scratch->spelled.append(alphabet_->spell(static_cast<unsigned char>(c)));
  return vocabulary().find_plain(scratch->spelled);
}

Status BpeTokenizer::encode_word(std::string_view word, EncodeScratch* scratch,
                                 TokenSink* out) const {
  if (const Token token = whole_word(word, scratch); token >= 0) {
    out->push(token, word.size());
    return {};
  }
  scratch->row.clear();
  for (std::size_t i = 0; i < word.size() && !scratch->cancel.stop(); ++i)
    scratch->row.push(byte_symbols_[static_cast<unsigned char>(word[i])], static_cast<uint32_t>(i));
  return model_.finish(word, scratch, out);
}

StringList decode_pieces(const Vocabulary& vocabulary, const ByteAlphabet& alphabet) {
  StringList pieces;
  pieces.reserve(vocabulary.size(),
                 vocabulary.text_bytes());  // a byte is not longer than its spelling
  std::string decoded;
  for (uint32_t i = 0; i < vocabulary.size(); ++i) {
    const auto token = static_cast<Token>(i);
    const std::string_view text = vocabulary.text(token);
    const TokenKind kind = vocabulary.kind(token);
    const int byte = kind == TokenKind::byte ? Vocabulary::byte_of(text) : -1;
    if (byte >= 0) pieces.add(std::string(1, static_cast<char>(byte)));
    else if (kind == TokenKind::normal || kind == TokenKind::unused || kind == TokenKind::byte)
      alphabet.decode(text, &decoded), pieces.add(decoded);
    else pieces.add(text);  // special tokens are spelled literally
  }
  return pieces;
}

}  // namespace

Status load_bpe(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out) {
  std::string_view name = "default";
  if (gguf.find("tokenizer.ggml.pre")) {
    const auto pre = gguf.get_string("tokenizer.ggml.pre");
    if (!pre) return Status::error(Code::corrupt, "tokenizer.ggml.pre is no string");
    name = *pre;
  }
  std::unique_ptr<const Pretokenizer> pretokenizer;
  if (Status status = Pretokenizer::create(name, &pretokenizer); !status.ok()) return status;
  auto vocabulary = std::make_unique<Vocabulary>();
  if (Status status = Vocabulary::load(gguf, {}, pretokenizer->adds_bos(), vocabulary.get());
      !status.ok())
    return status;
  auto alphabet = std::make_unique<const ByteAlphabet>();
  StringList pieces = decode_pieces(*vocabulary, *alphabet);
  auto tokenizer = std::make_unique<BpeTokenizer>("bpe/" + std::string(name), std::move(vocabulary),
                                                  std::move(pieces), std::move(alphabet),
                                                  std::move(pretokenizer));
  if (Status status = tokenizer->load_merges(gguf); !status.ok()) return status;
  *out = std::move(tokenizer);
  return {};
}

}  // namespace kvasir
