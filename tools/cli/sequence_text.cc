#include "sequence_text.h"

#include <string_view>
#include <vector>

#include "failure.h"

namespace tool {
namespace {

std::string text_of(const kv_model* model, const kv_session* session) {
  const std::vector<int32_t> tokens = tokens_of(session);
  return detokenize(model, tokens.data(), tokens.size(), KV_TOKENIZE_SPECIAL);
}

std::string_view first_character(std::string_view text) {
  size_t size = 1;
  while (size < text.size() && size < 4 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80)
    ++size;
  return text.substr(0, size);
}

// The text before a document: the instructions and the marks of the chat format. The prefill of one
// character yields them.
std::string opening_marks(Console& console, kv_model* model, const SessionFlags& flags,
                          std::string_view document) {
  SessionFlags small;
  small.threads = 1;
  small.instructions = instructions_of(flags);
  const Session session = open_session(console, model, small);
  const std::string_view probe = first_character(document);
  kv_error error{};
  const kv_control control = control_of(console);
  check(kv_prefill(session.get(), probe.data(), probe.size(), &control, nullptr, nullptr, &error),
        error);
  std::string text = text_of(model, session.get());
  if (text.ends_with(probe)) text.resize(text.size() - probe.size());
  return text;
}

}  // namespace

Overlap compare(Console& console, kv_model* model, const kv_session* session,
                const SessionFlags& flags, const std::string& document) {
  const std::string text = text_of(model, session);
  const std::string marks = opening_marks(console, model, flags, document);
  if (!text.starts_with(marks)) return {};
  const std::string_view saved = std::string_view(text).substr(marks.size());
  if (saved == document) return {Overlap::whole, document.size()};
  if (std::string_view(document).starts_with(saved)) return {Overlap::beginning, saved.size()};
  if (saved.starts_with(document)) return {Overlap::longer, document.size()};
  return {};
}

}  // namespace tool
