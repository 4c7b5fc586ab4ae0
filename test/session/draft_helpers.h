// What tests of answers with drafts share.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "session/session.h"

namespace kvasir::test {

// Drafts of which about so many of eight are what the answer has.
inline Session::DraftFn scripted_drafts(const Session& session, std::vector<Token> answer,
                                        uint32_t right) {
  return [&session, answer = std::move(answer), right, state = uint32_t{5}](
             Token, uint32_t count, Array<Token>* out) mutable {
    const std::size_t at = session.tokens().size() + 1;
    for (uint32_t i = 0; i < count; ++i) {
      state = state * 1664525 + 1013904223;
      const bool good = (state >> 24) % 8 < right && at + i < answer.size();
      out->push_back(good ? answer[at + i] : static_cast<Token>(3 + (state >> 16) % 200));
    }
  };
}

// Fails allocations within an answer that is not kept, and cancels it: the sequence stays, and the
// answer is `text` afterwards, with drafts.
void check_draft_faults(Session* session, GenerateOptions options, const std::string& text);

}  // namespace kvasir::test
