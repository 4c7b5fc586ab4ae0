// Passages of the document that an answer attended, as quotations.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sessions.h"

namespace tool {

struct AttendedPassage {
  kv_passage place{};
  double at = 0;         // its beginning in the sequence, 0 to 1
  std::string text;      // the passage within its sentences, as one line
  std::string document;  // of several, its name
};

// Quoted under an answer over several documents, unless the user says how many.
constexpr uint32_t default_sources = 3;

// The documents of a session over several; none: it is over one sequence alone.
std::vector<kv_session_document> session_documents(kv_session* session);

// Up to `max_count` passages of the session's last answer, which was traced, the largest share
// first. Throws Failure.
std::vector<AttendedPassage> passages_of(const kv_model* model, kv_session* session,
                                         size_t max_count);

// A line for each: share, place, quotation.
void print_passages(Console& console, const std::vector<AttendedPassage>& passages);
Json passages_json(const std::vector<AttendedPassage>& passages);

// text[begin, end) extended to whole sentences, or else to whole words, with single spaces.
// Characters stay whole.
std::string quoted(std::string_view text, size_t begin, size_t end);

}  // namespace tool
