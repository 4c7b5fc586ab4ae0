// The table of formats and the marks that identify them.
#include "text/chat.h"

#include <cstddef>
#include <iterator>

#include "gguf/limits.h"

namespace kvasir {
namespace {

struct Format {
  const char* name;
  ChatMarks marks;
};

// By ChatFormat.
constexpr Format kFormats[] = {
    {"raw", {}},
    {"chatml",
     {.document_open = "<|im_start|>system\n",
      .document_close = "<|im_end|>\n",
      .question_open = "<|im_start|>user\n",
      .question_close = "<|im_end|>\n<|im_start|>assistant\n",
      .first_question_open = "<|im_start|>user\n",
      .answer_close = "<|im_end|>\n"}},
    {"llama3",
     {.document_open = "<|start_header_id|>system<|end_header_id|>\n\n",
      .document_close = "<|eot_id|>",
      .question_open = "<|start_header_id|>user<|end_header_id|>\n\n",
      .question_close = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
      .first_question_open = "<|start_header_id|>user<|end_header_id|>\n\n",
      .answer_close = "<|eot_id|>"}},
    {"llama2",
     {.document_open = "[INST] <<SYS>>\n",
      .document_close = "\n<</SYS>>\n\n",
      .question_open = "",
      .question_close = " [/INST]",
      .first_question_open = "[INST] ",
      .answer_close = " </s><s>[INST] "}},
    {"mistral",
     {.document_open = "[INST] ",
      .document_close = "\n\n",
      .question_open = "",
      .question_close = " [/INST]",
      .first_question_open = "[INST] ",
      .answer_close = "</s> [INST] "}},
    {"gemma",
     {.document_open = "<start_of_turn>user\n",
      .document_close = "\n\n",
      .question_open = "",
      .question_close = "<end_of_turn>\n<start_of_turn>model\n",
      .first_question_open = "<start_of_turn>user\n",
      .answer_close = "<end_of_turn>\n<start_of_turn>user\n"}},
    {"phi",
     {.document_open = "<|system|>\n",
      .document_close = "<|end|>\n",
      .question_open = "<|user|>\n",
      .question_close = "<|end|>\n<|assistant|>\n",
      .first_question_open = "<|user|>\n",
      .answer_close = "<|end|>\n"}},
    {"deepseek",
     {.document_open = "",
      .document_close = "",
      .question_open = "<｜User｜>",
      .question_close = "<｜Assistant｜>",
      .first_question_open = "<｜User｜>",
      .answer_close = "<｜end▁of▁sentence｜>"}},
    {"mistral-v3",
     {.document_open = "[INST] ",
      .document_close = "\n\n",
      .question_open = "",
      .question_close = "[/INST]",
      .first_question_open = "[INST] ",
      .answer_close = "</s>[INST] "}},
    {"mistral-tekken",
     {.document_open = "[INST]",
      .document_close = "\n\n",
      .question_open = "",
      .question_close = "[/INST]",
      .first_question_open = "[INST]",
      .answer_close = "</s>[INST]"}},
    {"phi4",
     {.document_open = "<|im_start|>system<|im_sep|>",
      .document_close = "<|im_end|>",
      .question_open = "<|im_start|>user<|im_sep|>",
      .question_close = "<|im_end|><|im_start|>assistant<|im_sep|>",
      .first_question_open = "<|im_start|>user<|im_sep|>",
      .answer_close = "<|im_end|>"}},
    {"deepseek-v2",
     {.document_open = "",
      .document_close = "\n\n",
      .question_open = "User: ",
      .question_close = "\n\nAssistant:",
      .first_question_open = "User: ",
      .answer_close = "<｜end▁of▁sentence｜>"}},
    {"zephyr",
     {.document_open = "<|system|>\n",
      .document_close = "</s>\n",
      .question_open = "<|user|>\n",
      .question_close = "</s>\n<|assistant|>\n",
      .first_question_open = "<|user|>\n",
      .answer_close = "</s>\n"}},
};
static_assert(std::size(kFormats) == static_cast<std::size_t>(ChatFormat::zephyr) + 1);

const Format& format_of(ChatFormat format) {
  const auto i = static_cast<std::size_t>(format);
  return kFormats[i < std::size(kFormats) ? i : 0];
}

bool is_tekken(const Tokenizer& tokenizer) {
  return std::string_view(tokenizer.name()) == "bpe/tekken";
}

ChatFormat from_template(std::string_view chat_template, const Tokenizer& tokenizer) {
  const auto has = [&](std::string_view mark) {
    return chat_template.find(mark) != std::string_view::npos;
  };
  if (has("<|im_start|>")) return has("<|im_sep|>") ? ChatFormat::phi4 : ChatFormat::chatml;
  if (has("[INST]")) {
    if (has("<<SYS>>")) return ChatFormat::llama2;
    if (is_tekken(tokenizer)) return ChatFormat::mistral_tekken;
    return has(" [/INST]") ? ChatFormat::mistral : ChatFormat::mistral_v3;
  }
  if (has("<|start_header_id|>") && has("<|end_header_id|>")) return ChatFormat::llama3;
  if (has("<|assistant|>") && has("<|end|>")) return ChatFormat::phi;
  if (has("<start_of_turn>")) return ChatFormat::gemma;
  if (has("<｜User｜>") && has("<｜Assistant｜>")) return ChatFormat::deepseek;
  if (has("User: ") && has("'Assistant: ' + message['content'] + eos_token"))
    return ChatFormat::deepseek_v2;
  // Others share the role marks of Zephyr but close their turns in other ways.
  if (has("<|user|>") && has("<|assistant|>") && has("eos_token") &&
      tokenizer.piece(tokenizer.eos(), true) == "</s>")
    return ChatFormat::zephyr;
  return ChatFormat::raw;
}

ChatFormat from_vocabulary(const Tokenizer& tokenizer) {
  const auto has = [&](std::string_view mark) {
    const Token token = tokenizer.find(mark);
    return token >= 0 && (tokenizer.kind(token) == TokenKind::control ||
                          tokenizer.kind(token) == TokenKind::user_defined);
  };
  if (has("<|im_start|>") && has("<|im_end|>"))
    return has("<|im_sep|>") ? ChatFormat::phi4 : ChatFormat::chatml;
  if (has("<|start_header_id|>") && has("<|eot_id|>")) return ChatFormat::llama3;
  if (has("[INST]") && has("[/INST]"))
    return is_tekken(tokenizer) ? ChatFormat::mistral_tekken : ChatFormat::mistral_v3;
  if (has("<|user|>") && has("<|assistant|>") && has("<|end|>")) return ChatFormat::phi;
  if (has("<start_of_turn>") && has("<end_of_turn>")) return ChatFormat::gemma;
  if (has("<｜User｜>") && has("<｜Assistant｜>")) return ChatFormat::deepseek;
  return ChatFormat::raw;
}

}  // namespace

const char* chat_format_name(ChatFormat format) { return format_of(format).name; }

std::optional<ChatFormat> chat_format_by_name(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kFormats); ++i) {
    if (name == kFormats[i].name) return static_cast<ChatFormat>(i);
  }
  return std::nullopt;
}

ChatFormat recognise_chat_format(const Gguf& gguf, const Tokenizer& tokenizer) {
  if (const auto chat_template = gguf.get_string("tokenizer.chat_template"))
    return from_template(chat_template->substr(0, gguf_limits::chat_template_bytes), tokenizer);
  return from_vocabulary(tokenizer);
}

const ChatMarks& chat_marks(ChatFormat format) { return format_of(format).marks; }

}  // namespace kvasir
