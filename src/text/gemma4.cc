// Gemma 4's BPE: characters merge by the file's list of merges, within lines.
//
// The text is divided only at runs of newlines. A run that is a token becomes it.
#include <algorithm>

#include "text/character_bpe.h"

namespace kvasir {
namespace {

class Gemma4Tokenizer final : public CharacterBpe {
 public:
  explicit Gemma4Tokenizer(std::unique_ptr<const Vocabulary> vocabulary, StringList pieces)
      : CharacterBpe("gemma4", std::move(vocabulary), std::move(pieces)) {}

  Status load_merges(const Gguf& gguf) {
    RETURN_IF_ERROR(model_.load_list(gguf));
    load_bytes();
    return {};
  }

 private:
  Status encode_plain(std::string_view text, bool, EncodeScratch* scratch,
                      TokenSink* out) const override;
};

Status Gemma4Tokenizer::encode_plain(std::string_view text, bool, EncodeScratch* scratch,
                                     TokenSink* out) const {
  while (!text.empty()) {
    const bool newlines = text[0] == '\n';
    const std::size_t end = newlines ? text.find_first_not_of('\n') : text.find('\n');
    const std::string_view word = text.substr(0, end);
    if (scratch->cancel.stop(word.size())) return scratch->cancelled();
    if (const Token token = newlines ? vocabulary().find_plain(word) : -1; token >= 0)
      out->push(token, word.size());
    else RETURN_IF_ERROR(encode_cached(word, scratch, out));
    text.remove_prefix(word.size());
  }
  return {};
}

}  // namespace

Status load_gemma4(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out) {
  auto vocabulary = std::make_unique<Vocabulary>();
  RETURN_IF_ERROR(Vocabulary::load(gguf, {}, true, vocabulary.get()));
  StringList pieces = CharacterBpe::decode_pieces(*vocabulary);
  auto tokenizer = std::make_unique<Gemma4Tokenizer>(std::move(vocabulary), std::move(pieces));
  RETURN_IF_ERROR(tokenizer->load_merges(gguf));
  *out = std::move(tokenizer);
  return {};
}

}  // namespace kvasir
