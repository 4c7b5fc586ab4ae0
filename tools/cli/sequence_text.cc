#include "sequence_text.h"

#include <string_view>
#include <vector>

#include "failure.h"

namespace tool {
namespace {

std::string text_of(const kv_model* model, const kv_session* session) {
  const std::vector<int32_t> tokens = tokens_of(session);
  kv_error error{};
  size_t size = 0;
  kv_status status = kv_detokenize(model, tokens.data(), tokens.size(), KV_TOKENIZE_SPECIAL,
                                   nullptr, 0, &size, &error);
  if (status != KV_LIMIT) check(status, error);
  std::string text(size, '\0');
  status = kv_detokenize(model, tokens.data(), tokens.size(), KV_TOKENIZE_SPECIAL, text.data(),
                         text.size(), &size, &error);
  check(status, error);
  return text;
}

std::string_view first_character(std::string_view text) {
  size_t size = 1;
  while (size < text.size() && size < 4 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80)
    ++size;
  return text.substr(0, size);
}

// The marks that the model's chat format puts before a document, as the library itself puts them:
// by reading one character.
std::string opening_marks(Console& console, kv_model* model, std::string_view document) {
  SessionFlags small;
  small.threads = 1;
  const Session session = open_session(console, model, small);
  const std::string_view probe = first_character(document);
  kv_error error{};
  const kv_call_options options = call_options(console, nullptr);
  check(kv_prefill(session.get(), probe.data(), probe.size(), &options, nullptr, nullptr, &error),
        error);
  std::string text = text_of(model, session.get());
  if (text.ends_with(probe)) text.resize(text.size() - probe.size());
  return text;
}

}  // namespace

Holdings compare(Console& console, kv_model* model, const kv_session* session,
                 const std::string& document) {
  const std::string text = text_of(model, session);
  const std::string marks = opening_marks(console, model, document);
  if (!text.starts_with(marks)) return {};
  const std::string_view held = std::string_view(text).substr(marks.size());
  if (held == document) return {Holdings::whole, document.size()};
  if (std::string_view(document).starts_with(held)) return {Holdings::beginning, held.size()};
  if (held.starts_with(document)) return {Holdings::more, document.size()};
  return {};
}

}  // namespace tool
