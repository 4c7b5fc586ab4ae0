#include "passages.h"

#include <algorithm>

#include "failure.h"
#include "number_text.h"
#include "system.h"

namespace tool {
namespace {

// tokens on each side that are searched for the ends of a sentence
constexpr size_t around = 32;
constexpr size_t max_quote_bytes = 240;

std::string text_of(const kv_model* model, const int32_t* tokens, size_t count) {
  return detokenize(model, tokens, count, 0);
}

std::vector<kv_passage> places_of(kv_session* session) {
  kv_error error{};
  size_t count = 0;
  const kv_status status = kv_session_passages(session, nullptr, 0, &count, &error);
  if (status != KV_LIMIT) check(status, error);
  std::vector<kv_passage> places(count);
  check(kv_session_passages(session, places.data(), places.size(), &count, &error), error);
  return places;
}

bool is_blank_char(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// Whether a sentence ends right before this place: with a mark and a space, or an empty line.
bool begins_sentence(std::string_view text, size_t at) {
  if (at < 2 || !is_blank_char(text[at - 1])) return false;
  const char before = text[at - 2];
  return before == '.' || before == '!' || before == '?' ||
         (before == '\n' && text[at - 1] == '\n');
}

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Whether no character continues at this place.
bool ends_character(std::string_view text, size_t at) {
  if (at < text.size()) return !continues_character(text[at]);
  size_t lead = at;
  while (lead > 0 && at - lead < 4 && continues_character(text[lead - 1])) --lead;
  if (lead == 0) return true;
  const auto first = static_cast<unsigned char>(text[lead - 1]);
  const size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
  return at - lead + 1 >= size;
}

// At most max_quote_bytes, in whole characters.
std::string cut(std::string text) {
  if (text.size() <= max_quote_bytes) return text;
  size_t size = max_quote_bytes;
  while (size > 0 && continues_character(text[size])) --size;
  return text.substr(0, size) + "...";
}

// The name of a document of several, and its tokens in place of the sequence's; "": there is one.
std::string document_of(kv_session* session, uint32_t index, std::vector<int32_t>* tokens) {
  kv_session_document document = initialised<kv_session_document>();
  kv_error error{};
  const kv_status status = kv_session_get_document(session, index, &document, &error);
  if (status == KV_BAD_STATE) return "";
  check(status, error);
  size_t count = 0;
  tokens->resize(document.tokens);
  check(kv_session_document_tokens(session, index, tokens->data(), tokens->size(), &count, &error),
        error);
  return system::text(system::path(document.path).stem());
}

}  // namespace

std::vector<kv_session_document> session_documents(kv_session* session) {
  std::vector<kv_session_document> documents;
  for (;;) {
    kv_session_document document = initialised<kv_session_document>();
    kv_error error{};
    const kv_status status = kv_session_get_document(
        session, static_cast<uint32_t>(documents.size()), &document, &error);
    if (status == KV_NOT_FOUND || status == KV_BAD_STATE) return documents;
    check(status, error);
    documents.push_back(document);
  }
}

std::string quoted(std::string_view text, size_t begin, size_t end) {
  while (begin < end && is_blank_char(text[begin])) ++begin;
  size_t from = begin, to = end;
  while (from > 0 && !begins_sentence(text, from)) --from;
  if (from == 0) {  // no beginning of a sentence: take whole words
    from = begin;
    while (from > 0 && !is_blank_char(text[from - 1])) --from;
  }
  while (to < text.size() && !begins_sentence(text, to)) ++to;
  if (to == text.size()) {
    to = end;
    while (to < text.size() && !is_blank_char(text[to])) ++to;
  }
  while (from < to && continues_character(text[from])) ++from;
  while (to > from && !ends_character(text, to)) --to;
  std::string line;
  for (const char c : text.substr(from, to - from))
    if (!is_blank_char(c)) line += c;
    else if (!line.empty() && line.back() != ' ') line += ' ';
  if (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

std::vector<AttendedPassage> passages_of(const kv_model* model, kv_session* session,
                                         size_t max_count) {
  std::vector<int32_t> tokens = tokens_of(session);
  std::vector<kv_passage> places = places_of(session);
  places.resize(std::min(places.size(), max_count));
  std::vector<AttendedPassage> passages;
  for (const kv_passage& place : places) {
    const std::string document = document_of(session, place.document, &tokens);
    const size_t first = place.first_token, end = first + place.tokens;
    const size_t from = first - std::min(first, around), to = std::min(tokens.size(), end + around);
    const int32_t* at = tokens.data() + from;
    const std::string text = text_of(model, at, to - from);
    // A token's text does not depend on the tokens after it.
    const size_t begin = text_of(model, at, first - from).size(),
                 stop = text_of(model, at, end - from).size();
    passages.push_back({place, static_cast<double>(first) / static_cast<double>(tokens.size()),
                        quoted(text, begin, stop), document});
  }
  return passages;
}

void print_passages(Console& console, const std::vector<AttendedPassage>& passages) {
  if (console.json) return;
  for (const AttendedPassage& p : passages)
    console.terminal.print("  " + percent(static_cast<double>(p.place.share), 1) +
                           (p.document.empty() ? "" : " " + p.document) + " at " +
                           percent(p.at, 1) + ": \"" + cut(p.text) + "\"\n");
}

Json passages_json(const std::vector<AttendedPassage>& passages) {
  Json list = Json::array();
  for (const AttendedPassage& p : passages) {
    list.push_back(
        {{"share", p.place.share},
         {"at", p.at},
         {"first_token", p.place.first_token},
         {"tokens", p.place.tokens},
         {"first_byte", p.place.first_byte == UINT64_MAX ? Json() : Json(p.place.first_byte)},
         {"bytes", p.place.bytes},
         {"text", p.text}});
    if (!p.document.empty()) list.back()["document"] = p.document;
  }
  return list;
}

}  // namespace tool
