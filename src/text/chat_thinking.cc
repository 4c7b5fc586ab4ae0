// How models think: fixed by the format, or recognised by marks in the
// template.
#include <string>

#include "gguf/limits.h"
#include "text/chat.h"

namespace kvasir {
namespace {

constexpr ThinkingMarks kHarmony = {.open = "<|channel|>analysis<|message|>",
                                    .close = "<|end|>",
                                    .after = "<|start|>assistant<|channel|>final<|message|>",
                                    .cut = "<|end|><|start|>assistant<|channel|>final<|message|>",
                                    .skip = "<|channel|>final<|message|>"};
constexpr ThinkingMarks kGemma4 = {.open = "<|channel>thought\n",
                                   .close = "<channel|>",
                                   .after = "",
                                   .cut = "<channel|>",
                                   .skip = "<|channel>thought\n<channel|>"};
constexpr ThinkingMarks kCommandR7b = {
    .open = "<|START_THINKING|>",
    .close = "<|END_THINKING|>",
    .after = "<|START_RESPONSE|>",
    .cut = "<|END_THINKING|><|START_RESPONSE|>",
    .skip = "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>"};
constexpr ThinkingMarks kSeed = {.open = "<seed:think>",
                                 .close = "</seed:think>",
                                 .after = "",
                                 .cut = "</seed:think>",
                                 .skip = "<seed:think></seed:think>"};

// Models that write <think>. They skip a thought by an empty one.
constexpr ThinkingMarks kQwen = {.open = "<think>\n",
                                 .close = "</think>",
                                 .after = "\n\n",
                                 .cut = "\n</think>\n\n",
                                 .skip = "<think>\n\n</think>\n\n"};
constexpr ThinkingMarks kSmollm3 = {.open = "<think>\n",
                                    .close = "</think>",
                                    .after = "\n",
                                    .cut = "\n</think>\n",
                                    .skip = "<think>\n\n</think>\n"};
constexpr ThinkingMarks kGlm = {.open = "<think>",
                                .close = "</think>",
                                .after = "\n",
                                .cut = "</think>\n",
                                .skip = "<think></think>\n"};
// V3.1; R1 is as Qwen.
constexpr ThinkingMarks kDeepseek = {
    .open = "<think>", .close = "</think>", .after = "", .cut = "</think>", .skip = "</think>"};
// Thinks only on request, so that an answer needs no mark.
constexpr ThinkingMarks kGranite = {
    .open = "<think>\n", .close = "</think>", .after = "\n\n", .cut = "\n</think>\n\n", .skip = ""};

// Whether a template has a text, as it is or with its newlines as escapes.
bool has(std::string_view chat_template, std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '\n') escaped += "\\n";
    else escaped += c;
  }
  return chat_template.find(text) != text.npos || chat_template.find(escaped) != text.npos;
}

ThinkingMarks from_template(std::string_view chat_template, ChatFormat format) {
  if (!has(chat_template, "<think>")) return {};
  if (format == ChatFormat::granite) return kGranite;
  if (format == ChatFormat::glm4) return kGlm;
  if (format == ChatFormat::deepseek && !has(chat_template, "<think>\n")) return kDeepseek;
  if (has(chat_template, kQwen.skip)) return kQwen;
  return has(chat_template, kSmollm3.skip) ? kSmollm3 : kQwen;
}

}  // namespace

ThinkingMarks recognise_thinking(const Gguf& gguf, const Chat& chat) {
  switch (chat.format()) {
    case ChatFormat::raw:
      return {};
    case ChatFormat::custom:
      return *chat.own_thinking();
    case ChatFormat::gpt_oss:
    case ChatFormat::gpt_oss_low:
    case ChatFormat::gpt_oss_high:
      return kHarmony;
    case ChatFormat::gemma4:
      return kGemma4;
    case ChatFormat::command_r7b:
      return kCommandR7b;
    case ChatFormat::seed_oss:
      return kSeed;
    default:
      break;
  }
  const auto chat_template = gguf.get_string("tokenizer.chat_template");
  if (!chat_template) return {};
  return from_template(chat_template->substr(0, gguf_limits::chat_template_bytes), chat.format());
}

}  // namespace kvasir
