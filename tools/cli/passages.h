// What an answer attended of its document, as text to quote.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "console.h"

namespace tool {

struct AttendedPassage {
  kv_span span{};
  double at = 0;     // 0 to 1: where in the sequence it begins
  std::string text;  // of the span and what its sentence has around it, as one line
};

// Of the session's last answer, which was traced: the `most` with the largest shares, in that
// order. Throws Failure.
std::vector<AttendedPassage> passages_of(const kv_model* model, kv_session* session, size_t most);

// A line for each: share, place, quotation.
void print_passages(Console& console, const std::vector<AttendedPassage>& passages);
Json passages_json(const std::vector<AttendedPassage>& passages);

// The part of text from the beginning of the sentence, or else the word, in which `begin` lies to
// the end of that in which `end` does; what is space becomes single spaces, characters stay whole.
std::string quoted(std::string_view text, size_t begin, size_t end);

}  // namespace tool
