// Recognition of formats, and formats of the caller.
#include "text/chat.h"

#include <array>

#include "base/quoted.h"
#include "gguf/limits.h"

namespace kvasir {
namespace {

std::string_view name_of(const Tokenizer& tokenizer) { return tokenizer.name(); }

// Whether the first user turn of a template closes by the end-of-text token, as Zephyr's.
bool closes_user_by_eos(std::string_view chat_template) {
  const std::string_view turn = chat_template.substr(chat_template.find("<|user|>"));
  return turn.substr(0, turn.find('}')).find("eos_token") != turn.npos;
}

ChatFormat mistral_of(bool system, bool space, const Tokenizer& tokenizer) {
  const bool tekken = name_of(tokenizer) == "bpe/tekken";
  if (system) return tekken ? ChatFormat::mistral_v7 : ChatFormat::mistral_v7_spm;
  if (tekken) return ChatFormat::mistral_tekken;
  return space ? ChatFormat::mistral : ChatFormat::mistral_v3;
}

// Phi-4-mini has the marks of Phi-3, whose tokenizer is SentencePiece, without newlines.
ChatFormat phi_of(const Tokenizer& tokenizer) {
  return name_of(tokenizer) == "bpe/gpt-4o" ? ChatFormat::phi4_mini : ChatFormat::phi;
}

// Formats that their marks alone identify. The first row of which all marks exist counts: later
// ones may have some of them too.
struct Recognised {
  ChatFormat format;
  std::array<std::string_view, 3> marks;  // "": none
};
constexpr Recognised kByMarks[] = {
    {ChatFormat::gpt_oss, {"<|start|>", "<|channel|>"}},
    {ChatFormat::granite, {"<|start_of_role|>"}},
    {ChatFormat::llama4, {"<|header_start|>"}},
    {ChatFormat::gemma4, {"<|turn>", "<turn|>"}},
    {ChatFormat::gemma, {"<start_of_turn>"}},
    {ChatFormat::command_r7b, {"<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|START_RESPONSE|>"}},
    {ChatFormat::command_r, {"<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"}},
    {ChatFormat::deepseek, {"<｜User｜>", "<｜Assistant｜>"}},
    {ChatFormat::exaone4, {"[|system|]", "[|assistant|]", "[|tool|]"}},
    {ChatFormat::seed_oss, {"<seed:bos>"}},
    {ChatFormat::hunyuan_dense, {"<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁3｜>"}},
    {ChatFormat::bailing2, {"<role>", "<|role_end|>"}},
    {ChatFormat::dots1, {"<|userprompt|>", "<|endofuserprompt|>"}},
    {ChatFormat::minicpm, {"<用户>"}},
};

// has(mark): whether the template or the vocabulary has it. space: the template closes questions by
// " [/INST]".
template <class Has>
std::optional<ChatFormat> by_marks(Has has, bool space, const Tokenizer& tokenizer) {
  if (has("<|im_start|>")) return has("<|im_sep|>") ? ChatFormat::phi4 : ChatFormat::chatml;
  if (has("<|start_header_id|>") && has("<|end_header_id|>")) return ChatFormat::llama3;
  if (has("[INST]") && has("<<SYS>>")) return ChatFormat::llama2;
  if (has("[INST]") && has("[/INST]")) return mistral_of(has("[SYSTEM_PROMPT]"), space, tokenizer);
  if (has("[gMASK]") && has("<sop>") && has("<|user|>")) return ChatFormat::glm4;
  if (has("<|assistant|>") && has("<|end|>")) return phi_of(tokenizer);
  for (const Recognised& row : kByMarks) {
    bool all = true;
    for (const std::string_view mark : row.marks) all = all && (mark.empty() || has(mark));
    if (all) return row.format;
  }
  return std::nullopt;
}

ChatFormat from_template(std::string_view text, const Tokenizer& tokenizer) {
  const auto has = [&](std::string_view mark) { return text.find(mark) != text.npos; };
  if (const auto format = by_marks(has, has(" [/INST]"), tokenizer)) return *format;
  if (has("User: ") && has("'Assistant: ' + message['content'] + eos_token"))
    return ChatFormat::deepseek_v2;
  if (!has("<|user|>") || !has("<|assistant|>")) return ChatFormat::raw;
  // others share these role marks but close their turns in other ways
  const std::string_view eos = tokenizer.piece(tokenizer.eos(), true);
  if (closes_user_by_eos(text)) return eos == "</s>" ? ChatFormat::zephyr : ChatFormat::raw;
  return eos == "<|endoftext|>" ? ChatFormat::falcon3 : ChatFormat::raw;
}

ChatFormat from_vocabulary(const Tokenizer& tokenizer) {
  const auto has = [&](std::string_view mark) {
    const Token token = tokenizer.find(mark);
    return token >= 0 && (tokenizer.kind(token) == TokenKind::control ||
                          tokenizer.kind(token) == TokenKind::user_defined);
  };
  return by_marks(has, false, tokenizer).value_or(ChatFormat::raw);
}

}  // namespace

ChatFormat recognise_chat_format(const Gguf& gguf, const Tokenizer& tokenizer) {
  if (const auto chat_template = gguf.get_string("tokenizer.chat_template"))
    return from_template(chat_template->substr(0, gguf_limits::chat_template_bytes), tokenizer);
  return from_vocabulary(tokenizer);
}

bool wants_bos(const Tokenizer& tokenizer, std::string_view first_mark) {
  return tokenizer.add_bos() && !first_mark.starts_with(tokenizer.piece(tokenizer.bos(), true));
}

// The marks are views of the text, or of what is made of it.
struct Chat::Custom {
  std::string text, answer_close;
  ChatMarks marks;
  ThinkingMarks thinking;
};

std::string_view Chat::text() const { return custom_ ? std::string_view(custom_->text) : ""; }
const ChatMarks& Chat::marks() const { return custom_ ? custom_->marks : chat_marks(format_); }
const ThinkingMarks* Chat::own_thinking() const { return custom_ ? &custom_->thinking : nullptr; }

namespace {

// The text before `placeholder` in *rest, which then begins after it; nothing if it has none.
std::optional<std::string_view> take_before(std::string_view placeholder, std::string_view* rest) {
  const std::size_t at = rest->find(placeholder);
  if (at == rest->npos) return std::nullopt;
  const std::string_view before = rest->substr(0, at);
  rest->remove_prefix(at + placeholder.size());
  return before;
}

// Of a custom format, whose mark before a thought always stands behind a question. `mark` stands
// between thought and answer.
ThinkingMarks thinking_before(std::string_view mark) {
  constexpr std::string_view blanks = " \t\r\n";
  const std::size_t begin = mark.find_first_not_of(blanks);
  if (begin == mark.npos) return {};
  const std::size_t end = mark.find_last_not_of(blanks) + 1;
  return {.open = "",
          .close = mark.substr(begin, end - begin),
          .after = mark.substr(end),
          .cut = mark,
          .skip = mark};
}

bool has_placeholder(std::string_view text) {
  for (const std::string_view name :
       {"{document}", "{user}", "{question}", "{thought}", "{answer}"}) {
    if (text.find(name) != text.npos) return true;
  }
  return false;
}

}  // namespace

Status Chat::parse(std::string_view given, Chat* out) {
  if (given.find('{') != given.npos) return parse_custom(given, out);
  const auto format = chat_format_by_name(given);
  if (!format)
    return Status::error(Code::bad_argument, "chat format '%s' is not known", Quoted(given).text());
  *out = Chat(*format);
  return {};
}

Status Chat::parse_custom(std::string_view given, Chat* out) {
  if (given.size() > max_text || given.find('\0') != given.npos)
    return Status::error(Code::bad_argument,
                         "the chat format has %zu bytes: use up to %zu, without a NUL",
                         given.size(), max_text);
  auto custom = std::make_shared<Custom>();
  custom->text = given;
  std::string_view rest = custom->text;
  const auto open = take_before("{document}", &rest), user = take_before("{user}", &rest),
             question = take_before("{question}", &rest), thought = take_before("{thought}", &rest),
             answer = take_before("{answer}", &rest);
  bool again = has_placeholder(rest);
  for (const auto& mark : {open, user, question, thought, answer})
    again |= mark && has_placeholder(*mark);
  if (!open || !question || !answer || again)
    return Status::error(Code::bad_argument,
                         "chat format '%s': it needs {document}, {question} and {answer}, once and "
                         "in this order; {user} may stand before {question}, {thought} after it",
                         Quoted(given).text());
  if (thought) custom->thinking = thinking_before(*answer);
  if (thought && !custom->thinking.exist())
    return Status::error(Code::bad_argument, "chat format '%s': no mark follows {thought}",
                         Quoted(given).text());
  ChatMarks& marks = custom->marks;
  marks.document_open = *open;
  marks.document_close = user ? *user : *question;
  marks.question_open = user ? *question : "";
  marks.first_question_open = user ? *question : *open;
  marks.question_close = thought ? *thought : *answer;
  custom->answer_close.append(rest).append(user ? "" : *open);
  marks.answer_close = custom->answer_close;
  out->format_ = ChatFormat::custom;
  out->custom_ = std::move(custom);
  return {};
}

}  // namespace kvasir
