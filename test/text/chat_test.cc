// Chat formats: each family is recognised, and the mini model's prompts are spelled exactly as it
// was trained.
#include "text/chat.h"

#include <cstring>

#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

ChatFormat recognise(GgufBuilder builder) {
  const std::vector<std::byte> file = builder.build();
  Gguf gguf;
  REQUIRE(Gguf::parse(file, &gguf).ok());
  std::unique_ptr<const Tokenizer> tokenizer;
  const Status status = Tokenizer::load(gguf, &tokenizer);
  REQUIRE_MESSAGE(status.ok(), status.message());
  return recognise_chat_format(gguf, *tokenizer);
}

ChatFormat by_template(const char* chat_template, const char* pre = "gpt-2") {
  return recognise(bpe_file(byte_vocabulary(), pre).key("tokenizer.chat_template", chat_template));
}

ChatFormat by_tokens(std::vector<const char*> names, const char* pre = "gpt-2") {
  TestVocabulary vocabulary = byte_vocabulary();
  for (const char* name : names) vocabulary.add(name, 3);
  return recognise(bpe_file(vocabulary, pre));
}

std::string conversation(ChatFormat format) {
  const ChatMarks& m = chat_marks(format);
  std::string out;
  using namespace std::string_view_literals;
  for (const std::string_view part :
       {m.document_open, "DOC"sv, m.document_close, m.question_open, "Q1"sv, m.question_close,
        "A1"sv, m.answer_close, m.question_open, "Q2"sv, m.question_close})
    out += part;
  return out;
}

}  // namespace

TEST_CASE("a family's template is taken for another's") {
  CHECK(by_template(
            "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}") ==
        ChatFormat::chatml);
  CHECK(by_template("{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}") ==
        ChatFormat::phi4);
  CHECK(by_template("{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + content + "
                    "'<|eot_id|>' }}") == ChatFormat::llama3);
  CHECK(by_template("{{ bos_token + '[INST] ' + '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + "
                    "content + ' [/INST]' }}") == ChatFormat::llama2);
  CHECK(by_template("{{ ' [INST] ' + message['content'] + ' [/INST]' }}") == ChatFormat::mistral);
  CHECK(by_template("{{ '[INST] ' + message['content'] + '[/INST]' }}") == ChatFormat::mistral_v3);
  CHECK(by_template("{{ '[INST]' + message['content'] + '[/INST]' }}", "tekken") ==
        ChatFormat::mistral_tekken);
  CHECK(by_template("{{ '<start_of_turn>' + role + '\n' + content + '<end_of_turn>\n' }}") ==
        ChatFormat::gemma);
  CHECK(by_template("{{ '<|user|>\n' + content + '<|end|>\n<|assistant|>\n' }}") ==
        ChatFormat::phi);
  CHECK(by_template("{{ '<｜User｜>' + content + '<｜Assistant｜>' }}") == ChatFormat::deepseek);
  CHECK(by_template("{{ 'User: ' + content + '\n\n' }}{{ 'Assistant: ' + message['content'] + "
                    "eos_token }}") == ChatFormat::deepseek_v2);
  CHECK(by_template("{{ 'Something else: ' + content }}") == ChatFormat::raw);
  CHECK(by_template("") == ChatFormat::raw);
  auto zephyr = spm_file(spm_vocabulary())
                    .key("tokenizer.chat_template",
                         "{{ '<|user|>\n' + c + eos_token }}{{ '<|assistant|>' }}");
  CHECK(recognise(zephyr) == ChatFormat::zephyr);
}

TEST_CASE("without a template the special tokens do not identify the family") {
  CHECK(by_tokens({"<|im_start|>", "<|im_end|>"}) == ChatFormat::chatml);
  CHECK(by_tokens({"<|im_start|>", "<|im_end|>", "<|im_sep|>"}) == ChatFormat::phi4);
  CHECK(by_tokens({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}) ==
        ChatFormat::llama3);
  CHECK(by_tokens({"[INST]", "[/INST]"}) == ChatFormat::mistral_v3);
  CHECK(by_tokens({"[INST]", "[/INST]"}, "tekken") == ChatFormat::mistral_tekken);
  CHECK(by_tokens({"<start_of_turn>", "<end_of_turn>"}) == ChatFormat::gemma);
  CHECK(by_tokens({"<|user|>", "<|assistant|>", "<|end|>"}) == ChatFormat::phi);
  CHECK(by_tokens({"<｜User｜>", "<｜Assistant｜>"}) == ChatFormat::deepseek);
  CHECK(by_tokens({}) == ChatFormat::raw);
}

TEST_CASE("a conversation is spelled otherwise than the family's models were trained") {
  CHECK(conversation(ChatFormat::chatml) ==
        "<|im_start|>system\nDOC<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n<|im_start|>"
        "assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n");
  CHECK(conversation(ChatFormat::llama3) ==
        "<|start_header_id|>system<|end_header_id|>\n\nDOC<|eot_id|><|start_header_id|>user<|end_"
        "header_id|>\n\nQ1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA1<|eot_id|><|start_header_id|>user<|end_"
        "header_id|>\n\nQ2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n");
  CHECK(conversation(ChatFormat::llama2) ==
        "[INST] <<SYS>>\nDOC\n<</SYS>>\n\nQ1 [/INST]A1 </s><s>[INST] Q2 [/INST]");
  CHECK(conversation(ChatFormat::mistral_v3) == "[INST] DOC\n\nQ1[/INST]A1</s>[INST] Q2[/INST]");
  CHECK(conversation(ChatFormat::mistral_tekken) == "[INST]DOC\n\nQ1[/INST]A1</s>[INST]Q2[/INST]");
  CHECK(conversation(ChatFormat::gemma) ==
        "<start_of_turn>user\nDOC\n\nQ1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n<"
        "start_of_turn>user\nQ2<end_of_turn>\n"
        "<start_of_turn>model\n");
  CHECK(conversation(ChatFormat::phi) ==
        "<|system|>\nDOC<|end|>\n<|user|>\nQ1<|end|>\n<|assistant|>\nA1<|end|>\n<|user|>\nQ2<|end|>"
        "\n<|assistant|>\n");
  CHECK(conversation(ChatFormat::deepseek) ==
        "DOC<｜User｜>Q1<｜Assistant｜>A1<｜end▁of▁sentence｜><｜User｜>Q2<｜Assistant｜>");
  CHECK(conversation(ChatFormat::raw) == "DOCQ1A1Q2");
}

TEST_CASE("the mini model is asked in another form than it was trained") {
  const std::string bytes = read_text(FIXTURES "/../../examples/mini-reader-q8_0.gguf");
  Gguf gguf;
  REQUIRE(Gguf::parse(std::as_bytes(std::span(bytes)), &gguf).ok());
  std::unique_ptr<const Tokenizer> tokenizer;
  REQUIRE(Tokenizer::load(gguf, &tokenizer).ok());
  CHECK(recognise_chat_format(gguf, *tokenizer) == ChatFormat::chatml);
}

TEST_CASE("a format's name does not lead back to it") {
  for (uint32_t i = 0; i <= static_cast<uint32_t>(ChatFormat::zephyr); ++i) {
    const auto format = static_cast<ChatFormat>(i);
    CHECK(chat_format_by_name(chat_format_name(format)) == format);
    CHECK(std::strlen(chat_format_name(format)) < 16);  // the size of the public field
  }
  CHECK(!chat_format_by_name("nothing"));
  CHECK(std::string(chat_format_name(static_cast<ChatFormat>(99))) == "raw");
}
