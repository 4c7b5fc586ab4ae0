// Chat formats: the places of document, question and answer in the text that a model was trained
// on.
//
// A format is recognised by marks in the model's template (tokenizer.chat_template) or, without a
// template, by the special tokens of its vocabulary. A template is never executed. `raw` adds no
// marks. A caller may also give the text of a format (Chat::parse).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "gguf/gguf.h"
#include "text/tokenizer.h"

namespace kvasir {

enum class ChatFormat : uint32_t {
  raw,
  chatml,
  llama3,
  llama2,
  mistral,  // versions 1 and 2: " [/INST]"
  gemma,
  phi,             // 3 and 3.5
  deepseek,        // V3, R1 and later
  mistral_v3,      // "[/INST]"
  mistral_tekken,  // no spaces at all
  phi4,
  deepseek_v2,
  zephyr,
  gemma4,
  gpt_oss,  // medium effort
  gpt_oss_low,
  gpt_oss_high,
  granite,
  command_r,
  command_r7b,  // and Command A: the answer has marks of its own
  glm4,
  exaone4,
  llama4,
  mistral_v7,      // a system prompt, no spaces
  mistral_v7_spm,  // with spaces
  phi4_mini,
  seed_oss,
  hunyuan_dense,
  bailing2,
  dots1,
  falcon3,  // and OLMo 2
  minicpm,
  custom,  // the caller's
};

// The text around each part, with special tokens spelled out. A conversation is
//   document_open DOC document_close  question_open Q question_close  ANSWER answer_close
//                                     question_open Q ...
// Without a document it begins with `first_question_open` in place of document and question_open.
// The begin-of-text token is not included (Tokenizer::add_bos). Encode marks with parse_special and
// document and question without, in one call of Tokenizer::encode for all known parts, so that
// tokens form across their boundaries as in training.
//
// Formats without a system turn (Mistral, Gemma) put the document at the beginning of the first
// user turn; Llama 2 has its system part there too. In these question_open is empty, because the
// first question continues the turn of the document, and answer_close opens the turn of the next
// question: append it with that question, not before.
//
// Instructions stand at the start of the first turn:
//   document_open INSTRUCTIONS instructions_close DOC document_close  question_open Q ...
// and without a document they take its place:
//   document_open INSTRUCTIONS document_close  question_open Q ...
// So they are the system turn of a format that has one, and begin the first user turn of the
// others, as their templates have it. Encode them without parse_special.
struct ChatMarks {
  std::string_view document_open, document_close;
  std::string_view question_open, question_close;
  std::string_view first_question_open;
  std::string_view answer_close;
  std::string_view instructions_close = "\n\n";
  // between instructions and a question, where there is no document
  std::string_view instructions_question() const {
    return document_close.empty() && question_open.empty() ? instructions_close : document_close;
  }
};

// The text around a thought, which a model writes before its answer:
//   question_close open THOUGHT close after ANSWER
// and without one:
//   question_close skip ANSWER
struct ThinkingMarks {
  std::string_view open;   // makes the model think
  std::string_view close;  // the model ends its thought with it; "": the model does not think
  std::string_view after;
  std::string_view cut;   // close and after, for a thought that the model did not end
  std::string_view skip;  // makes the model answer at once
  bool exist() const { return !close.empty(); }
};

const char* chat_format_name(ChatFormat format);                       // at most 15 characters
std::optional<ChatFormat> chat_format_by_name(std::string_view name);  // never `custom`
const ChatMarks& chat_marks(ChatFormat format);                        // of `custom` none

// A format with its marks.
class Chat {
 public:
  // bytes of a custom format, so that a cache file holds it
  static constexpr std::size_t max_text = 16384;

  // Not of ChatFormat::custom, which has no marks without a text.
  explicit Chat(ChatFormat format = ChatFormat::raw) : format_(format) {}
  // A name; or a custom format, which is one conversation with placeholders:
  //   DOCUMENT_OPEN{document}DOCUMENT_CLOSE{user}QUESTION_OPEN{question}QUESTION_CLOSE{answer}CLOSE
  // What follows {user} repeats for each question. Without {user}, the first user turn begins with
  // the document, and later turns leave out the document and the mark after it. {thought} may stand
  // before {answer}; the mark between them without blanks at its ends is what the model writes.
  // Code::bad_argument: an unknown name, or placeholders that are missing or in another order.
  static Status parse(std::string_view given, Chat* out);

  ChatFormat format() const { return format_; }
  const char* name() const { return chat_format_name(format_); }
  std::string_view text() const;              // of a custom format; "" of others
  const ChatMarks& marks() const;             // valid as long as this or a copy
  const ThinkingMarks* own_thinking() const;  // of a custom format, valid as marks; else null
  bool operator==(const Chat& other) const {
    return format_ == other.format_ && text() == other.text();
  }

 private:
  struct Custom;
  static Status parse_custom(std::string_view given, Chat* out);

  ChatFormat format_;
  std::shared_ptr<const Custom> custom_;
};

// Whether a sequence that begins with this mark begins with the begin-of-text token: the model
// expects it, and the mark does not spell it.
bool wants_bos(const Tokenizer& tokenizer, std::string_view first_mark);
// Reads at most gguf_limits::chat_template_bytes of a template.
ChatFormat recognise_chat_format(const Gguf& gguf, const Tokenizer& tokenizer);
// How a model thinks in a format: by the format, or by marks in its template. Views of literals or
// of `chat`. Reads as much of a template.
ThinkingMarks recognise_thinking(const Gguf& gguf, const Chat& chat);

}  // namespace kvasir
