// Conversations in the terminal, or line by line from a pipe.
#pragma once

#include <functional>
#include <string>

#include "sessions.h"

namespace tool {

// Throws Failure(exit_usage) with --json, or where the document is standard input.
void expect_chat_possible(const Console& console, const std::string& document);

struct Conversation {
  const SamplingFlags& sampling;
  uint32_t passages = 0;  // quoted under an answer; 0: none, of several documents default_sources
  // Called before each question, where set. True: the session has other documents.
  std::function<bool(kv_session*)> refresh = {};
};
// Answers the lines of standard input until its end. `start` has the document or documents, if any.
void converse(Console& console, kv_model* model, Session start, Conversation conversation);

}  // namespace tool
