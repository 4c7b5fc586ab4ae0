// Any chat template and any text between its marks: a template is recognised, never executed, and
// what stands between marks never becomes one.
//
// An input is a byte for the tokenizer, two for the special tokens it has, then the template, the
// document, the question and the answer, each with its length before it.
#include <array>
#include <map>
#include <memory>

#include "text/chat.h"
#include "text/tokenizer.h"
#include "tiny_model.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr const char* marks_of_formats[] = {
    "<|im_start|>",      "<|im_end|>",    "<|im_sep|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>",    "[INST]",     "[/INST]",
    "<|user|>",          "<|assistant|>", "<|system|>", "<|end|>",
    "<start_of_turn>",   "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>"};
static_assert(std::size(marks_of_formats) == 16);
enum Family : uint8_t { plain, tekken, spm, families };

std::unique_ptr<const Tokenizer> make_tokenizer(uint8_t family, uint32_t specials, int32_t kind) {
  TestVocabulary words = family == spm ? spm_vocabulary() : byte_vocabulary();
  if (family == spm) {
    for (const char* piece : {"\xE2\x96\x81", "\n", "<", "|", ">", "[", "\xE2\x96\x81["})
      words.add(piece, 1, -static_cast<float>(words.tokens.size()));
  } else {
    words.merge("<", "|"), words.merge("|", ">"), words.merge("\n", "\n"), words.merge("[", "I");
    words.add("<s>", 3), words.add("</s>", 3);
  }
  for (std::size_t i = 0; i < std::size(marks_of_formats); ++i)
    if (specials >> i & 1) words.add(marks_of_formats[i], kind);
  GgufBuilder builder =
      family == spm ? spm_file(words) : bpe_file(words, family == tekken ? "tekken" : "gpt-2");
  const std::vector<std::byte> file = builder.build();
  Gguf gguf;
  std::unique_ptr<const Tokenizer> out;
  require(Gguf::parse(file, &gguf).ok() && Tokenizer::load(gguf, &out).ok(),
          "the target's own vocabularies load");
  return out;
}

// Made once; most inputs change the text only.
const Tokenizer* tokenizer_of(uint8_t family, uint32_t specials, int32_t kind) {
  static std::map<std::array<uint32_t, 3>, std::unique_ptr<const Tokenizer>> made;
  if (made.size() > 1000) made.clear();
  std::unique_ptr<const Tokenizer>& out = made[{family, specials, static_cast<uint32_t>(kind)}];
  if (!out) out = make_tokenizer(family, specials, kind);
  return out.get();
}

ChatFormat recognise(const Tokenizer& tokenizer, const std::string* chat_template, bool is_text) {
  GgufBuilder builder;
  if (chat_template && is_text) builder.key("tokenizer.chat_template", *chat_template);
  if (chat_template && !is_text)
    builder.key("tokenizer.chat_template", std::vector<std::string>{*chat_template});
  const std::vector<std::byte> file = builder.build();
  Gguf gguf;
  require(Gguf::parse(file, &gguf).ok(), "the builder's files are GGUF");
  Allocations allocations;
  const ChatFormat format = recognise_chat_format(gguf, tokenizer);
  require(allocations.largest() == 0, "a template is looked at where it is");
  return format;
}

std::size_t controls(const Tokenizer& tokenizer, std::span<const Token> ids) {
  return static_cast<std::size_t>(std::count_if(
      ids.begin(), ids.end(), [&](Token id) { return tokenizer.kind(id) == TokenKind::control; }));
}

// A turn of marks and texts, as a session encodes it: the control tokens in it are the marks' own.
void check_turn(const Tokenizer& tokenizer, std::span<const Tokenizer::Part> parts,
                bool gives_back) {
  Array<Token> whole = {7};
  Array<uint32_t> lengths = {3};
  Tokenizer::EncodeExtras extras;
  extras.lengths = &lengths;
  require(tokenizer.encode(parts, true, &whole, extras).ok(), "bytes have tokens");
  require(whole.size() == lengths.size() && whole[0] == 7 && lengths[0] == 3,
          "what stood in the outputs stays");
  whole.erase(whole.begin());
  std::size_t marked = 0, size = 0, counted = 0;
  std::string text;
  for (const Tokenizer::Part& part : parts) {
    size += part.text.size();
    text += part.text;
    if (!part.parse_special) continue;
    Array<Token> alone;
    require(tokenizer.encode(part.text, true, true, &alone).ok(), "marks have tokens");
    marked += controls(tokenizer, alone);
  }
  require(controls(tokenizer, whole) == marked, "no text becomes a mark, and every mark is one");
  for (std::size_t i = 1; i < lengths.size(); ++i) counted += lengths[i];
  require(counted == size, "lengths are the text's");
  if (!gives_back) return;
  std::string back;
  for (const Token id : whole) back += tokenizer.piece(id, true);
  require(back == text, "text comes back");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  Recipe recipe(data, size);
  const uint8_t choice = recipe.byte();
  const auto family = static_cast<uint8_t>(choice % families);
  const int32_t kind = choice / families % 4 == 3 ? 4 : 3;
  const auto specials = static_cast<uint32_t>(recipe.number(2));
  const uint8_t given = recipe.byte();
  const std::string chat_template(recipe.bytes(recipe.number(2)));
  const std::string document(recipe.text()), question(recipe.text()), answer(recipe.text());

  const Tokenizer* const tokenizer = tokenizer_of(family, specials, kind);
  const ChatFormat format =
      recognise(*tokenizer, given % 4 == 0 ? nullptr : &chat_template, given % 4 != 1);
  const std::string_view name = chat_format_name(format);
  require(!name.empty() && name.size() <= 15 && chat_format_by_name(name) == format,
          "a recognised format has a name");
  if (const auto named = chat_format_by_name(chat_template))
    require(chat_format_name(*named) == chat_template, "a name is of one format");

  // Formats that a model was not trained on can be asked for by name.
  // The text of a template may be a custom format too.
  constexpr auto named_formats = static_cast<uint32_t>(ChatFormat::custom);
  Chat chat(given & 64 ? static_cast<ChatFormat>(given % named_formats) : format);
  if (given & 128 && Chat::parse(chat_template, &chat).ok() && chat.format() == ChatFormat::custom)
    require(chat.text() == chat_template, "a custom format keeps its text");
  const ChatMarks& marks = chat.marks();
  if (chat.own_thinking() && chat.own_thinking()->exist())
    require(chat.own_thinking()->cut.find(chat.own_thinking()->close) != std::string_view::npos,
            "the mark that ends a thought is what is put after a cut one");
  const bool gives_back = family != spm;
  const Tokenizer::Part first[] = {
      {marks.document_open, true}, {document, false}, {marks.document_close, true},
      {marks.question_open, true}, {question, false}, {marks.question_close, true}};
  const Tokenizer::Part bare[] = {
      {marks.first_question_open, true}, {question, false}, {marks.question_close, true}};
  const Tokenizer::Part next[] = {{answer, false},
                                  {marks.answer_close, true},
                                  {marks.question_open, true},
                                  {question, false},
                                  {marks.question_close, true}};
  check_turn(*tokenizer, first, gives_back);
  check_turn(*tokenizer, bare, gives_back);
  check_turn(*tokenizer, next, gives_back);
  return 0;
}
