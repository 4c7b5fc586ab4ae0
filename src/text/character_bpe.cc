#include "text/character_bpe.h"

#include "text/utf8.h"

namespace kvasir {

std::size_t character_size(std::string_view text) {
  std::size_t length;
  return utf8_step(text, &length) == Utf8::valid ? length : 1;
}

void CharacterBpe::load_bytes() {
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

// Converts the lengths of a word's tokens in its spelling to lengths in the word. A space of the
// word is spelled by three bytes, and the space before a text by three that are not in it.
static void unspell_lengths(std::string_view word, bool prefix, std::span<uint32_t> lengths) {
  // `spelled` bytes stand for word[0, at)
  std::size_t token_end = 0, spelled = prefix ? kSpelledSpace.size() : 0, at = 0;
  for (uint32_t& length : lengths) {
    token_end += length;
    const std::size_t begin = at;
    while (at < word.size()) {
      const std::size_t next = spelled + (word[at] == ' ' ? kSpelledSpace.size() : 1);
      if (next > token_end) break;
      spelled = next;
      ++at;
    }
    length = static_cast<uint32_t>(at - begin);
  }
}

Status CharacterBpe::encode_word(std::string_view word, bool prefix, EncodeScratch* scratch,
                                 TokenSink* out) const {
  std::string& spelled = scratch->spelled;
  spelled.assign(prefix ? kSpelledSpace : "");
  for (const char c : word) {
    if (scratch->cancel.stop()) break;
    if (c == ' ') spelled.append(kSpelledSpace);
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

StringList CharacterBpe::decode_pieces(const Vocabulary& vocabulary) {
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
        const bool space = text.substr(at, kSpelledSpace.size()) == kSpelledSpace;
        piece.push_back(space ? ' ' : text[at]);
        at += space ? kSpelledSpace.size() : 1;
      }
    } else {
      piece = text;  // special tokens are spelled literally
    }
    pieces.add(piece);
  }
  return pieces;
}

}  // namespace kvasir
