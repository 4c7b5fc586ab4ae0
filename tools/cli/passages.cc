#include "passages.h"

#include <algorithm>

#include "failure.h"
#include "number_text.h"

namespace tool {
namespace {

// tokens on each side in which the ends of a sentence are looked for
constexpr size_t around = 32;
constexpr size_t longest_quote = 240;  // bytes

std::string text_of(const kv_model* model, const int32_t* tokens, size_t count) {
  kv_error error{};
  size_t size = 0;
  kv_status status = kv_detokenize(model, tokens, count, 0, nullptr, 0, &size, &error);
  if (status != KV_LIMIT) check(status, error);
  std::string text(size, '\0');
  check(kv_detokenize(model, tokens, count, 0, text.data(), text.size(), &size, &error), error);
  return text;
}

std::vector<kv_span> spans_of(kv_session* session) {
  kv_error error{};
  size_t count = 0;
  const kv_status status = kv_trace(session, nullptr, 0, &count, &error);
  if (status != KV_LIMIT) check(status, error);
  std::vector<kv_span> spans(count);
  check(kv_trace(session, spans.data(), spans.size(), &count, &error), error);
  return spans;
}

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// That a sentence has ended right before this place: a mark and a space, or an empty line.
bool begins_sentence(std::string_view text, size_t at) {
  if (at < 2 || !is_space(text[at - 1])) return false;
  const char before = text[at - 2];
  return before == '.' || before == '!' || before == '?' ||
         (before == '\n' && text[at - 1] == '\n');
}

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// That no character goes on behind this place, or would if there were more.
bool ends_character(std::string_view text, size_t at) {
  if (at < text.size()) return !continues_character(text[at]);
  size_t lead = at;
  while (lead > 0 && at - lead < 4 && continues_character(text[lead - 1])) --lead;
  if (lead == 0) return true;
  const auto first = static_cast<unsigned char>(text[lead - 1]);
  const size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
  return at - lead + 1 >= size;
}

// Cut to the longest quote, by whole characters.
std::string cut(std::string text) {
  if (text.size() <= longest_quote) return text;
  size_t size = longest_quote;
  while (size > 0 && continues_character(text[size])) --size;
  return text.substr(0, size) + "...";
}

}  // namespace

std::string quoted(std::string_view text, size_t begin, size_t end) {
  while (begin < end && is_space(text[begin])) ++begin;
  size_t from = begin, to = end;
  while (from > 0 && !begins_sentence(text, from)) --from;
  if (from == 0) {  // no sentence begins: a word does
    from = begin;
    while (from > 0 && !is_space(text[from - 1])) --from;
  }
  while (to < text.size() && !begins_sentence(text, to)) ++to;
  if (to == text.size()) {
    to = end;
    while (to < text.size() && !is_space(text[to])) ++to;
  }
  while (from < to && continues_character(text[from])) ++from;
  while (to > from && !ends_character(text, to)) --to;
  std::string line;
  for (const char c : text.substr(from, to - from))
    if (!is_space(c)) line += c;
    else if (!line.empty() && line.back() != ' ') line += ' ';
  if (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

std::vector<AttendedPassage> passages_of(const kv_model* model, kv_session* session, size_t most) {
  const std::vector<int32_t> tokens = tokens_of(session);
  std::vector<kv_span> spans = spans_of(session);
  spans.resize(std::min(spans.size(), most));
  std::vector<AttendedPassage> passages;
  for (const kv_span& span : spans) {
    const size_t first = span.first_token, end = first + span.tokens;
    const size_t from = first - std::min(first, around), to = std::min(tokens.size(), end + around);
    const int32_t* at = tokens.data() + from;
    const std::string text = text_of(model, at, to - from);
    // A text's size does not depend on what follows: these are places in it.
    const size_t begin = text_of(model, at, first - from).size(),
                 stop = text_of(model, at, end - from).size();
    passages.push_back({span, static_cast<double>(first) / static_cast<double>(tokens.size()),
                        quoted(text, begin, stop)});
  }
  return passages;
}

void print_passages(Console& console, const std::vector<AttendedPassage>& passages) {
  if (console.json) return;
  for (const AttendedPassage& p : passages)
    console.terminal.print("  " + percent(static_cast<double>(p.span.share), 1) + " at " +
                           percent(p.at, 1) + ": \"" + cut(p.text) + "\"\n");
}

Json passages_json(const std::vector<AttendedPassage>& passages) {
  Json list = Json::array();
  for (const AttendedPassage& p : passages)
    list.push_back({{"share", p.span.share},
                    {"at", p.at},
                    {"first_token", p.span.first_token},
                    {"tokens", p.span.tokens},
                    {"text", p.text}});
  return list;
}

}  // namespace tool
