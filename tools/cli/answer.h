// Answers: one question to a session, streamed, measured and described.
#pragma once

#include <string>
#include <vector>

#include "sessions.h"

namespace tool {

struct Answer {
  std::string text, thought;
  kv_answer facts = initialised<kv_answer>();
  kv_session_stats stats = initialised<kv_session_stats>();
  Json stats_json;
};

// A kv_text_fn that appends to a std::string.
int32_t append_text(const char* text, size_t size, void* string);

enum class Keep { no, yes };  // whether the turn stays in the sequence

// Streams the answer to standard output unless --json. With shows_thought, its thought comes first,
// between lines [thinking] and [answer]. `trace` records passages_of(). Throws Failure. After a
// Ctrl-C the answer has KV_STOP_CANCELLED.
Answer answer(Console& console, kv_session* session, const std::string& question,
              const SamplingFlags& flags, Keep keep, bool trace = false);

// The questions of the command line, or else one per line of standard input, unless that is the
// document. Throws Failure(exit_usage).
std::vector<std::string> questions_of(const std::vector<std::string>& given,
                                      const std::string& document);

// Answers each question on its own, with up to `passages` passages, and fills result["answers"].
// Throws Failure, also after a Ctrl-C.
void answer_each(Console& console, const kv_model* model, kv_session* session,
                 const std::vector<std::string>& questions, const SamplingFlags& flags,
                 uint32_t passages);

// "12 tokens, first after 84 ms, then 35.2 tokens/s; quest read 2.0% of the tokens, 3.1% of the
// pages"
std::string facts_line(const Answer& answer);
Json facts_json(const Answer& answer);

}  // namespace tool
