// Tokenizers over any text, and any vocabulary: ids are tokens, byte-level BPE gives the bytes
// back, a call that fails changes nothing.
//
// The first byte of an input chooses: below 17 a family of pre-tokenizers, then SentencePiece with
// and without tokens across spaces (the rest is text); above, a vocabulary that the rest spells, a
// line an entry: "3<s>" a token of kind 3, "ma b" a merge, "i7" the unknown token's id, "xabc" a
// text to encode. A NUL in a line stands for a line feed. A first byte from 224 up chooses a family
// that was added later, or Gemma 4's BPE.
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../gguf/gguf_builder.h"
#include "../text/test_vocabulary.h"
#include "replay.h"
#include "text/chat.h"
#include "text/tokenizer.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr const char* kFamilies[] = {
    "default", "gpt-2",      "smollm",       "falcon",         "llama-bpe",  "qwen2",
    "qwen35",  "seed-coder", "bailingmoe",   "minicpm5",       "tekken",     "gpt-4o",
    "bloom",   "viking",     "deepseek-llm", "deepseek-coder", "deepseek-v3"};
constexpr std::size_t kFamilyCount = std::size(kFamilies);
constexpr uint8_t kFirstLater = 224;
constexpr const char* kLaterFamilies[] = {"afmoe", "tiny_aya", "kimi-k2", "exaone-moe",
                                          "youtu", "superbpe", "jais-2",  "laguna"};
constexpr std::size_t kLaterCount = std::size(kLaterFamilies);

struct Words : TestVocabulary {
  std::vector<std::string> texts;

  void add(std::string_view text, int32_t type) {
    TestVocabulary::add(text, type, -static_cast<float>((tokens.size() + 1) % 7));
  }
};

std::unique_ptr<const Tokenizer> load(const GgufBuilder& builder, ChatFormat* format) {
  const std::vector<std::byte> file = builder.build();
  Gguf gguf;
  require(Gguf::parse(file, &gguf).ok(), "the builder's files are GGUF");
  std::unique_ptr<const Tokenizer> tokenizer;
  if (!Tokenizer::load(gguf, &tokenizer).ok()) {
    require(!tokenizer, "a refused vocabulary leaves no tokenizer");
    return nullptr;
  }
  *format = recognise_chat_format(gguf, *tokenizer);
  return tokenizer;
}

GgufBuilder file_of(const Words& words, const char* pre) {
  GgufBuilder builder;
  builder.key("tokenizer.ggml.model", pre ? "gpt2" : "llama");
  if (pre) builder.key("tokenizer.ggml.pre", pre).key("tokenizer.ggml.merges", words.merges);
  builder.key("tokenizer.ggml.tokens", words.tokens).key("tokenizer.ggml.token_type", words.types);
  builder.key("tokenizer.ggml.scores", words.scores);
  return builder;
}

Words spm_words(bool across);

// The tokens of spm_words(), with merges in place of scores.
GgufBuilder gemma4_words() {
  Words words = spm_words(true);
  words.merges = {"a b",        "b a", "ab a", "\xE2\x96\x81 a", "\xE2\x96\x81 \xE2\x96\x81",
                  "\xC3\xA9 a", "x y"};
  return gemma4_file(words);
}

Words byte_words() {
  Words words{byte_vocabulary(), {}};
  for (const char* merge : {"a b", "a a", "aa aa", "ab ab", "e r", "\xC4\xA0 \xC4\xA0",
                            "\xC4\xA0 a", "1 2", "\xC3\xA9 x", "x y"}) {
    const std::string_view whole = merge;
    words.merges.emplace_back(whole);
    std::string result(whole);
    result.erase(result.find(' '), 1);
    if (whole != "x y") words.add(result, 1);  // one merge whose result is no token
  }
  words.add("<|im_start|>", 3);
  words.add("<|im_end|>", 3);
  words.add("<|im", 4);
  return words;
}

Words spm_words(bool across) {
  Words words{spm_vocabulary(), {}};
  for (const char* piece : {"\xE2\x96\x81", "a", "b", "ab", "ba",
                            "\xE2\x96\x81"
                            "a",
                            "\xE2\x96\x81\xE2\x96\x81", "aba", "\xC3\xA9",
                            "\xC3\xA9"
                            "a"})
    words.add(piece, 1);
  if (across)
    words.add(
        "a\xE2\x96\x81"
        "b",
        1);
  return words;
}

// has_all_bytes: whatever a text is cut into can be encoded. Otherwise a token that the user
// defined may be all that spells its bytes, and it is not looked for across parts.
Array<Token> check_text(const Tokenizer& tokenizer, std::string_view text, bool parse_special,
                        bool text_start, bool has_all_bytes) {
  Array<Token> ids = {7};
  const bool ok = tokenizer.encode(text, parse_special, text_start, &ids).ok();
  require(ids.size() >= 1 && ids[0] == 7, "what stood in the output stays");
  require(ok || ids.size() == 1, "a failed call adds nothing");
  ids.erase(ids.begin());
  for (const Token id : ids)
    require(id >= 0 && static_cast<uint32_t>(id) < tokenizer.size(), "ids are tokens");
  const std::size_t cut = text.size() / 2;
  const Tokenizer::Part parts[] = {{text.substr(0, cut), false}, {text.substr(cut), false}};
  Array<Token> joined, whole;
  const bool joined_ok = tokenizer.encode(parts, text_start, &joined).ok();
  const bool whole_ok = tokenizer.encode(text, false, text_start, &whole).ok();
  require(!has_all_bytes || (joined_ok && whole_ok),
          "what has a token for every byte encodes every text");
  return ids;
}

void check_bytes(const Tokenizer& tokenizer, std::string_view text, const Array<Token>& ids,
                 std::string_view prefix) {
  std::string back;
  for (const Token id : ids) back += tokenizer.piece(id, true);
  require(back == std::string(text.empty() ? "" : prefix).append(text), "text comes back");
}

void run_text(std::size_t choice, std::string_view text) {
  static std::unique_ptr<const Tokenizer> tokenizers[kFamilyCount + 2];
  std::unique_ptr<const Tokenizer>& tokenizer = tokenizers[choice];
  const bool bpe = choice < kFamilyCount;
  ChatFormat format;
  if (!tokenizer) {
    tokenizer = load(bpe ? file_of(byte_words(), kFamilies[choice])
                         : file_of(spm_words(choice > kFamilyCount), nullptr),
                     &format);
  }
  require(tokenizer != nullptr, "the target's own vocabularies load");
  const Array<Token> plain = check_text(*tokenizer, text, false, true, true);
  const Array<Token> special = check_text(*tokenizer, text, true, false, true);
  if (bpe) {
    check_bytes(*tokenizer, text, plain, "");
    check_bytes(*tokenizer, text, special, "");
  } else if (text.find("\xE2\x96\x81") == std::string_view::npos) {  // which comes back as a space
    check_bytes(*tokenizer, text, plain, " ");
  }
}

void run_later(std::size_t choice, std::string_view text) {
  static std::unique_ptr<const Tokenizer> tokenizers[kLaterCount + 1];
  std::unique_ptr<const Tokenizer>& tokenizer = tokenizers[choice];
  const bool bpe = choice < kLaterCount;
  ChatFormat format;
  if (!tokenizer)
    tokenizer = load(bpe ? file_of(byte_words(), kLaterFamilies[choice]) : gemma4_words(), &format);
  require(tokenizer != nullptr, "the target's own vocabularies load");
  const Array<Token> plain = check_text(*tokenizer, text, false, true, true);
  // U+2581 comes back as a space
  const bool comes_back = bpe || text.find('\xE2') == std::string_view::npos;
  if (comes_back) check_bytes(*tokenizer, text, plain, "");
}

void run_vocabulary(bool bpe, std::string_view lines) {
  Words words = bpe ? Words() : spm_words(false);
  int64_t unknown = -1;
  while (!lines.empty()) {
    const std::size_t end = std::min(lines.find('\n'), lines.size());
    std::string line(lines.substr(0, end));
    lines.remove_prefix(std::min(end + 1, lines.size()));
    std::replace(line.begin(), line.end(), '\0', '\n');
    if (line.empty()) continue;
    const std::string rest = line.substr(1);
    if (line[0] >= '0' && line[0] <= '9') words.add(rest, line[0] - '0');
    if (line[0] == 'm') words.merges.push_back(rest);
    if (line[0] == 'i') unknown = rest.empty() ? 0 : static_cast<unsigned char>(rest[0]) - '0';
    if (line[0] == 'x') words.texts.push_back(rest);
  }
  GgufBuilder builder =
      file_of(words, bpe ? kFamilies[words.tokens.size() % kFamilyCount] : nullptr);
  if (unknown >= 0) builder.key("tokenizer.ggml.unknown_token_id", static_cast<uint32_t>(unknown));
  ChatFormat format;
  const auto tokenizer = load(builder, &format);
  if (!tokenizer) return;
  require(chat_format_by_name(chat_format_name(format)) == format,
          "a recognised format has a name");
  for (uint32_t i = 0; i < tokenizer->size(); ++i) {
    (void)tokenizer->piece(static_cast<Token>(i), true);
    (void)tokenizer->ends_turn(static_cast<Token>(i));
  }
  for (const std::string& text : words.texts) {
    check_text(*tokenizer, text, false, true, false);
    check_text(*tokenizer, text, true, false, false);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] >= kFirstLater) {
    run_later((data[0] - kFirstLater) % (kLaterCount + 1), rest);
    return 0;
  }
  const std::size_t choice = data[0] % (kFamilyCount + 4);
  if (choice < kFamilyCount + 2) run_text(choice, rest);
  else run_vocabulary(choice == kFamilyCount + 2, rest);
  return 0;
}
