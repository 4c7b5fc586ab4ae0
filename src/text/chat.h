// Chat formats: where the document, the question and the answer stand in the text that a model was trained on.
//
// A format is recognised from marks in the model's template (tokenizer.chat_template) or, without a template, from the special
// tokens of its vocabulary; a template is never executed. `raw` puts nothing around anything.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "gguf/gguf.h"
#include "text/tokenizer.h"

namespace kvasir {

enum class ChatFormat : uint32_t { raw, chatml, llama3, llama2, mistral, gemma, phi, deepseek };

// The text around each part, special tokens spelled out (tokenize with parse_special). A conversation is
//   document_open DOC document_close  question_open Q question_close  ANSWER answer_close  question_open Q ...
// and one without a document begins with `first_question_open` instead of document and question_open.
// Formats without a system turn (Mistral, Llama-2's own markers, Gemma) put the document at the head of the first user turn.
struct ChatMarks {
  std::string_view document_open, document_close;
  std::string_view question_open, question_close;
  std::string_view first_question_open;
  std::string_view answer_close;
};

const char* chat_format_name(ChatFormat format);
std::optional<ChatFormat> chat_format_by_name(std::string_view name);
ChatFormat recognise_chat_format(const Gguf& gguf, const Tokenizer& tokenizer);
const ChatMarks& chat_marks(ChatFormat format);

}  // namespace kvasir
