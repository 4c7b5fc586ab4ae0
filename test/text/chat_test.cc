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

std::string conversation(const ChatMarks& m) {
  std::string out;
  using namespace std::string_view_literals;
  for (const std::string_view part :
       {m.document_open, "DOC"sv, m.document_close, m.question_open, "Q1"sv, m.question_close,
        "A1"sv, m.answer_close, m.question_open, "Q2"sv, m.question_close})
    out += part;
  return out;
}

std::string conversation(ChatFormat format) { return conversation(chat_marks(format)); }

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

TEST_CASE("a newer family's template is taken for another's") {
  CHECK(by_template("{{ '<|turn>' + role + '\n' }}{{ content }}{{ '<turn|>\n' }}") ==
        ChatFormat::gemma4);
  CHECK(by_template("{{ '<|start|>user<|message|>' + content + '<|end|>' }}"
                    "{{ '<|start|>assistant<|channel|>final<|message|>' }}") ==
        ChatFormat::gpt_oss);
  CHECK(
      by_template("{{ '<|start_of_role|>user<|end_of_role|>' + content + '<|end_of_text|>\n' }}") ==
      ChatFormat::granite);
  const char* command_r =
      "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content + '<|END_OF_TURN_TOKEN|>' }}";
  CHECK(by_template(command_r) == ChatFormat::command_r);
  CHECK(by_template((std::string(command_r) + "<|START_RESPONSE|>").c_str()) ==
        ChatFormat::command_r7b);
  CHECK(by_template("[gMASK]<sop><|user|>\n{{ content }}<|assistant|>") == ChatFormat::glm4);
  CHECK(by_template("{{ '[|system|]' }}{{ '[|assistant|]' }}{{ '[|tool|]' }}") ==
        ChatFormat::exaone4);
  CHECK(by_template("{{ '<|header_start|>' + role + '<|header_end|>\n\n' }}") ==
        ChatFormat::llama4);
  const char* v7 = "{{ '[SYSTEM_PROMPT]' + s + '[/SYSTEM_PROMPT]' }}{{ '[INST]' + c + '[/INST]' }}";
  CHECK(by_template(v7, "tekken") == ChatFormat::mistral_v7);
  CHECK(by_template(v7) == ChatFormat::mistral_v7_spm);
  CHECK(by_template("{{ '<|' + role + '|>' + content + '<|end|>' }}{{ '<|assistant|>' }}",
                    "gpt-4o") == ChatFormat::phi4_mini);
  CHECK(by_template("{{ '<seed:bos>' + role + '\n' + content + '<seed:eos>' }}") ==
        ChatFormat::seed_oss);
  CHECK(by_template("<｜hy_User｜>{{ c }}<｜hy_Assistant｜><｜hy_place▁holder▁no▁3｜>") ==
        ChatFormat::hunyuan_dense);
  CHECK(by_template("{{ '<role>HUMAN</role>' + content + '<|role_end|>' }}") ==
        ChatFormat::bailing2);
  CHECK(by_template("{{ '<|userprompt|>' + content + '<|endofuserprompt|>' }}") ==
        ChatFormat::dots1);
  CHECK(by_template("{{ '<用户>' + content + '<AI>' }}") == ChatFormat::minicpm);
  const auto by_end_of_text = [](const char* chat_template) {
    TestVocabulary vocabulary = byte_vocabulary();
    const Token end = vocabulary.add("<|endoftext|>", 3);
    return recognise(bpe_file(vocabulary)
                         .key("tokenizer.ggml.eos_token_id", static_cast<uint32_t>(end))
                         .key("tokenizer.chat_template", chat_template));
  };
  CHECK(by_end_of_text(
            "{{ '<|user|>\n' + content + '\n' }}{{ '<|assistant|>\n' + c + eos_token }}") ==
        ChatFormat::falcon3);
  // StableLM's, which closes both turns by the end-of-text token
  CHECK(by_end_of_text("{{ '<|user|>\n' + content + eos_token + '\n' }}{{ '<|assistant|>\n' }}") ==
        ChatFormat::raw);
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
  CHECK(by_tokens({"<|turn>", "<turn|>"}) == ChatFormat::gemma4);
  CHECK(by_tokens({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}) == ChatFormat::gpt_oss);
  CHECK(by_tokens({"[gMASK]", "<sop>", "<|user|>", "<|assistant|>"}) == ChatFormat::glm4);
  CHECK(by_tokens({"<|user|>", "<|assistant|>", "<|end|>"}, "gpt-4o") == ChatFormat::phi4_mini);
  CHECK(by_tokens({"[INST]", "[/INST]", "[SYSTEM_PROMPT]"}, "tekken") == ChatFormat::mistral_v7);
  CHECK(by_tokens({"[INST]", "[/INST]", "<|im_start|>"}) == ChatFormat::chatml);
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

TEST_CASE("a newer family's conversation is spelled otherwise than its template has it") {
  CHECK(conversation(ChatFormat::gemma4) ==
        "<|turn>system\nDOC<turn|>\n<|turn>user\nQ1<turn|>\n<|turn>model\nA1<turn|>\n"
        "<|turn>user\nQ2<turn|>\n<|turn>model\n");
  CHECK(conversation(ChatFormat::gpt_oss_low) ==
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\n\nReasoning: low\n\n# Valid channels: analysis, commentary, "
        "final. Channel must be included for every message.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nDOC<|end|>"
        "<|start|>user<|message|>Q1<|end|><|start|>assistantA1<|end|>"
        "<|start|>user<|message|>Q2<|end|><|start|>assistant");
  for (const auto& [format, effort] : {std::pair{ChatFormat::gpt_oss, "Reasoning: medium\n"},
                                       std::pair{ChatFormat::gpt_oss_high, "Reasoning: high\n"}}) {
    CHECK(chat_marks(format).document_open.find(effort) != std::string_view::npos);
    CHECK(chat_marks(format).first_question_open.find(effort) != std::string_view::npos);
  }
  CHECK(conversation(ChatFormat::command_r) ==
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>DOC<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Q1<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A1<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Q2<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>");
  CHECK(conversation(ChatFormat::glm4) ==
        "[gMASK]<sop><|system|>\nDOC<|user|>\nQ1<|assistant|>\nA1<|user|>\nQ2<|assistant|>\n");
  CHECK(conversation(ChatFormat::exaone4) ==
        "[|system|]\nDOC[|endofturn|]\n[|user|]\nQ1[|endofturn|]\n[|assistant|]\nA1"
        "[|endofturn|]\n[|user|]\nQ2[|endofturn|]\n[|assistant|]\n");
  CHECK(conversation(ChatFormat::mistral_v7) ==
        "[SYSTEM_PROMPT]DOC[/SYSTEM_PROMPT][INST]Q1[/INST]A1</s>[INST]Q2[/INST]");
  CHECK(conversation(ChatFormat::minicpm) == "<用户>DOC\n\nQ1<AI>A1<用户>Q2<AI>");
}

TEST_CASE("a caller's format loses a mark, or repeats the document's") {
  const auto spelled = [](const char* text) {
    Chat chat;
    const Status status = Chat::parse(text, &chat);
    REQUIRE_MESSAGE(status.ok(), status.message());
    CHECK(chat.format() == ChatFormat::custom);
    CHECK(chat.text() == text);
    const Chat copy = chat;
    chat = Chat();
    return std::pair{conversation(copy.marks()), std::string(copy.marks().first_question_open)};
  };
  CHECK(spelled("<S>{document}</S>{user}<U>{question}</U><A>{answer}</A>") ==
        std::pair<std::string, std::string>{"<S>DOC</S><U>Q1</U><A>A1</A><U>Q2</U><A>", "<U>"});
  CHECK(spelled("<U>{document}\n{question}</U><A>{answer}</A>") ==
        std::pair<std::string, std::string>{"<U>DOC\nQ1</U><A>A1</A><U>Q2</U><A>", "<U>"});
  CHECK(spelled("{document} {question} {answer}{x}").first == "DOC Q1 A1{x}Q2 ");
}

TEST_CASE("a caller's format without its parts, or with them in another order, is accepted") {
  for (const char* text :
       {"{document}", "{question}{answer}", "{document}{answer}", "{document}{question}",
        "{question}{document}{answer}", "{document}{question}{user}{answer}",
        "{document}{question}{answer}{question}", "{document}{document}{question}{answer}",
        "{user}{document}{question}{answer}", "{", "chatml2", "custom", ""}) {
    CAPTURE(text);
    Chat chat(ChatFormat::gemma);
    CHECK(Chat::parse(text, &chat).code() == Code::bad_argument);
    CHECK(chat.format() == ChatFormat::gemma);
  }
  Chat chat;
  const std::string parts = "{document}{question}{answer}",
                    long_text = parts + std::string(Chat::max_text - parts.size(), 'x');
  CHECK(Chat::parse(long_text, &chat).ok());
  CHECK(Chat::parse(long_text + "x", &chat).code() == Code::bad_argument);
  CHECK(Chat::parse(parts + std::string(1, '\0'), &chat).code() == Code::bad_argument);
}

namespace {

ThinkingMarks thinking(ChatFormat format, const char* chat_template) {
  static std::vector<std::byte> file;
  file = bpe_file(byte_vocabulary()).key("tokenizer.chat_template", chat_template).build();
  Gguf gguf;
  REQUIRE(Gguf::parse(file, &gguf).ok());
  return recognise_thinking(gguf, Chat(format));
}

}  // namespace

TEST_CASE("a family thinks, or skips its thought, otherwise than its template has it") {
  struct {
    ChatFormat format;
    const char* chat_template;
    const char* skip;
    const char* on;   // open, a thought and what follows it when the model closes it
    const char* cut;  // and when it does not
  } const families[] = {
      {ChatFormat::chatml, "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}",
       "<think>\n\n</think>\n\n", "<think>\nT</think>\n\n", "\n</think>\n\n"},
      {ChatFormat::chatml, "<|im_start|>assistant\n<think>\n\n</think>\n\n",  // no escapes
       "<think>\n\n</think>\n\n", "<think>\nT</think>\n\n", "\n</think>\n\n"},
      {ChatFormat::chatml, "{{ \"<|im_start|>assistant\\n<think>\\n\\n</think>\\n\" }}",
       "<think>\n\n</think>\n", "<think>\nT</think>\n", "\n</think>\n"},
      {ChatFormat::deepseek, "{{'<｜Assistant｜><think>\\n'}}", "<think>\n\n</think>\n\n",
       "<think>\nT</think>\n\n", "\n</think>\n\n"},
      {ChatFormat::deepseek,
       "{% if not thinking %}{{'</think>'}}{% else %}{{'<think>'}}{% endif %}", "</think>",
       "<think>T</think>", "</think>"},
      {ChatFormat::glm4, "<|assistant|>{{ '\\n<think></think>' }}", "<think></think>\n",
       "<think>T</think>\n", "</think>\n"},
      {ChatFormat::granite, "between <think></think> and <response></response>", "",
       "<think>\nT</think>\n\n", "\n</think>\n\n"},
      {ChatFormat::gpt_oss_high, "", "<|channel|>final<|message|>",
       "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>",
       "<|end|><|start|>assistant<|channel|>final<|message|>"},
      {ChatFormat::gemma4, "", "<|channel>thought\n<channel|>", "<|channel>thought\nT<channel|>",
       "<channel|>"},
      {ChatFormat::command_r7b, "", "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>",
       "<|START_THINKING|>T<|END_THINKING|><|START_RESPONSE|>",
       "<|END_THINKING|><|START_RESPONSE|>"},
      {ChatFormat::seed_oss, "", "<seed:think></seed:think>", "<seed:think>T</seed:think>",
       "</seed:think>"},
  };
  for (const auto& f : families) {
    CAPTURE(std::string(f.chat_template));
    const ThinkingMarks m = thinking(f.format, f.chat_template);
    CHECK(m.exist());
    CHECK(m.skip == f.skip);
    CHECK(std::string(m.open) + "T" + std::string(m.close) + std::string(m.after) == f.on);
    CHECK(m.cut == f.cut);
  }
  for (const ChatFormat format :
       {ChatFormat::chatml, ChatFormat::glm4, ChatFormat::command_r, ChatFormat::granite})
    CHECK(!thinking(format, "{{ '<|im_start|>' }}").exist());
  CHECK(!thinking(ChatFormat::raw, "<think>\n\n</think>").exist());
}

TEST_CASE("a caller's format thinks without a mark, or by blanks") {
  Chat chat;
  REQUIRE(Chat::parse("{document}{question}<A>\n<t>{thought}\n</t>\n{answer}", &chat).ok());
  CHECK(chat.marks().question_close == "<A>\n<t>");
  const ThinkingMarks* m = chat.own_thinking();
  CHECK(m->open == "");
  CHECK(m->close == "</t>");
  CHECK(m->after == "\n");
  CHECK(m->cut == "\n</t>\n");
  CHECK(m->skip == "\n</t>\n");
  REQUIRE(Chat::parse("{document}{question}{answer}", &chat).ok());
  CHECK(!chat.own_thinking()->exist());
  for (const char* text :
       {"{document}{question}{thought}\n{answer}", "{document}{thought}x{question}{answer}",
        "{document}{question}{answer}{thought}x"})
    CHECK(Chat::parse(text, &chat).code() == Code::bad_argument);
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
  for (uint32_t i = 0; i < static_cast<uint32_t>(ChatFormat::custom); ++i) {
    const auto format = static_cast<ChatFormat>(i);
    CHECK(chat_format_by_name(chat_format_name(format)) == format);
    CHECK(std::strlen(chat_format_name(format)) < 16);  // the size of the public field
  }
  CHECK(!chat_format_by_name("nothing"));
  CHECK(!chat_format_by_name("custom"));  // it needs a text
  CHECK(std::string(chat_format_name(static_cast<ChatFormat>(99))) == "raw");
}
