// The bytes of the text that each token stands for, by which a text that was read in part is taken
// up again.
#include <numeric>
#include <random>

#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

struct Encoded {
  std::vector<Token> ids;
  std::vector<uint32_t> lengths;
};

Encoded encode(const Tokenizer& tokenizer, std::vector<Tokenizer::Part> parts,
               bool text_start = true) {
  Array<Token> ids = {-7};  // what stood there before stays
  Array<uint32_t> lengths = {99, 98};
  const Status status = tokenizer.encode(parts, text_start, &ids, {&lengths, nullptr});
  REQUIRE_MESSAGE(status.ok(), status.message());
  REQUIRE(ids.front() == -7);
  REQUIRE(lengths[1] == 98);
  return {{ids.begin() + 1, ids.end()}, {lengths.begin() + 2, lengths.end()}};
}

Encoded encode(const Tokenizer& tokenizer, std::string_view text, bool parse_special = true,
               bool text_start = true) {
  return encode(tokenizer, {{text, parse_special}}, text_start);
}

using Lengths = std::vector<uint32_t>;

// Words, numbers, blanks, other scripts, special tokens and bytes that are no UTF-8.
std::string some_text(std::mt19937& random, const std::vector<std::string>& specials) {
  static const std::vector<std::string> units = {"the",
                                                 " quick",
                                                 " brown",
                                                 "  ",
                                                 "\n",
                                                 "\n\n",
                                                 "\t",
                                                 " 1234567",
                                                 "don't",
                                                 "...",
                                                 "\xE4\xB8\xAD\xE6\x96\x87",
                                                 " \xC3\xA9t\xC3\xA9",
                                                 "\xFF",
                                                 "\xE2\x96",
                                                 S,
                                                 " ",
                                                 "A",
                                                 "\xF0\x9F\x98\x80",
                                                 "<0x41>",
                                                 "\xC2\xA0",
                                                 "wordswordswords"};
  std::string text;
  for (auto n = random() % 60; n > 0; --n)
    text += random() % 8 == 0 && !specials.empty() ? specials[random() % specials.size()]
                                                   : units[random() % units.size()];
  return text;
}

void check_lengths(const Tokenizer& tokenizer, const std::vector<std::string>& specials) {
  CAPTURE(tokenizer.name());
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    const std::string text = some_text(random, specials);
    CAPTURE(text);
    const bool text_start = random() % 2;
    const Encoded all = encode(tokenizer, text, true, text_start);
    REQUIRE(all.ids == ids_of(tokenizer, text, true, text_start));
    REQUIRE(all.ids.size() == all.lengths.size());
    CHECK(std::accumulate(all.lengths.begin(), all.lengths.end(), std::size_t{0}) == text.size());
    std::size_t at = 0;
    for (std::size_t i = 0; i < all.ids.size(); ++i) {
      const std::string_view source = std::string_view(text).substr(at, all.lengths[i]);
      std::string piece(tokenizer.piece(all.ids[i], true));
      // the space before a text
      if (piece.size() > source.size() && piece[0] == ' ') piece.erase(0, 1);
      // U+2581 of the text is read as a space
      if (source.find(S) == std::string_view::npos) CHECK(source == piece);
      at += all.lengths[i];
      if (i + 1 == all.ids.size()) continue;
      // Taking the text up here gives the rest, where a word begins here anyway.
      const Encoded rest = encode(tokenizer, std::string_view(text).substr(at), true,
                                  tokenizer.starts_text(all.ids[i]));
      const bool word_begins = at > 0 && text[at] == ' ' && text[at - 1] > ' ' &&
                               static_cast<unsigned char>(text[at - 1]) < 0x80 &&
                               at + 1 < text.size() && text[at + 1] > ' ';
      if (word_begins || tokenizer.starts_text(all.ids[i])) {
        CAPTURE(at);
        CHECK(std::vector<Token>(all.ids.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                                 all.ids.end()) == rest.ids);
      }
    }
  }
}

}  // namespace

TEST_CASE(
    "lengths of byte-level BPE do not add up to the text, or a text taken up between words goes on "
    "otherwise") {
  check_lengths(*tokenizer_of_file(FIXTURES "/tokenizers/vocab-gpt-2.gguf"), {"<|endoftext|>"});
  check_lengths(*tokenizer_of_file(FIXTURES "/tokenizers/vocab-llama-bpe.gguf"),
                {"<|begin_of_text|>", "<|eot_id|>"});
  check_lengths(*tokenizer_of_file(FIXTURES "/tokenizers/vocab-qwen2.gguf"),
                {"<|im_start|>", "<|im_end|>"});
}

TEST_CASE(
    "lengths of SentencePiece do not add up to the text, or a text taken up between words goes on "
    "otherwise") {
  check_lengths(*tokenizer_of_file(FIXTURES "/tokenizers/ggml-vocab-llama-spm.gguf"),
                {"<s>", "</s>"});
}

TEST_CASE(
    "lengths of Gemma 4's BPE do not add up to the text, or a text taken up between words goes on "
    "otherwise") {
  check_lengths(*tokenizer_of_file(FIXTURES "/tokenizers/gemma4.gguf"), {"<bos>", "<eos>"});
}

TEST_CASE(
    "a space counts as the three bytes that spell it, or the space before a text as one of its "
    "bytes") {
  TestVocabulary vocabulary = spm_vocabulary();
  const Token space = vocabulary.add(S, 1, -9), a = vocabulary.add("a", 1, -9),
              sa = vocabulary.add(S + "a", 1, -3);
  auto file = spm_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(encode(*tokenizer, "a a").ids == std::vector<Token>{sa, sa});
  CHECK(encode(*tokenizer, "a a").lengths == Lengths{1, 2});
  CHECK(encode(*tokenizer, "a a", true, false).lengths == Lengths{1, 2});
  CHECK(encode(*tokenizer, "\xC3\xA9").ids == std::vector<Token>{space, 3 + 0xC3, 3 + 0xA9});
  CHECK(encode(*tokenizer, "\xC3\xA9").lengths == Lengths{0, 1, 1});
  CHECK(encode(*tokenizer, S + "a").lengths == Lengths{0, 4});
  CHECK(encode(*tokenizer, "a<s>a").ids == std::vector<Token>{sa, 1, sa});
  CHECK(encode(*tokenizer, "a<s>a").lengths == Lengths{1, 3, 1});
  CHECK(encode(*tokenizer, "a a a a").lengths == Lengths{1, 2, 2, 2});  // words seen before
  CHECK(a > space);
  auto bytes_only = spm_file(spm_vocabulary());  // nothing spells a space but its three bytes
  CHECK(encode(*tokenizer_of(bytes_only), "a b").lengths == Lengths{0, 0, 0, 1, 0, 0, 1, 1});
}

TEST_CASE("an unknown character or the blanks that a special token swallows are not counted") {
  TestVocabulary none;
  none.add("<unk>", 2);
  none.add("<s>", 3);
  none.add("</s>", 3);
  none.add("a");
  auto without_bytes = spm_file(none);
  CHECK(encode(*tokenizer_of(without_bytes),
               "a\xE4\xB8\xAD"
               "a",
               true, false)
            .lengths == Lengths{1, 3, 1});

  TestVocabulary phi = spm_vocabulary();
  phi.add(S);
  phi.add("a");
  phi.add("<|user|>", 3);
  phi.add("<|end|>", 3);
  phi.add("<|assistant|>", 3);
  auto file = spm_file(phi);
  const auto tokenizer = tokenizer_of(file);
  CHECK(encode(*tokenizer, "<|user|>\n \ta<|end|>\n").lengths == Lengths{11, 0, 1, 8});
  CHECK(encode(*tokenizer, {{"<|user|>\n", true}, {"\n\na", false}, {"<|end|>", true}}).lengths ==
        Lengths{11, 0, 1, 7});
}

TEST_CASE("a call that fails leaves lengths behind") {
  TestVocabulary vocabulary;  // neither bytes nor an unknown token
  vocabulary.add("a");
  auto file = bpe_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  Array<Token> ids = {5};
  Array<uint32_t> lengths;
  const Tokenizer::Part part = {"aab", false};
  CHECK(tokenizer->encode({&part, 1}, true, &ids, {&lengths, nullptr}).code() == Code::unsupported);
  CHECK(ids.size() == 1);
  CHECK(lengths.empty());
}
