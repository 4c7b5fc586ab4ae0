// One question to a session: streams the answer, measures, and puts both into words.
#pragma once

#include <string>
#include <vector>

#include "console.h"

namespace tool {

struct Answer {
  std::string text;
  kv_answer facts{};
  Json stats;
};

// For kv_generate: appends what is said to a std::string.
int32_t append_text(const char* text, size_t size, void* string);

enum class Keep { no, yes };  // whether the turn stays in the sequence

// trace: for passages_of(). Streams to standard output unless --json. Throws Failure; a Ctrl-C
// returns an answer with KV_STOP_CANCELLED.
Answer answer(Console& console, kv_session* session, const std::string& question,
              const SamplingFlags& flags, Keep keep, bool trace = false);

// The questions of the command line; none: one a line from standard input, unless that is the
// document. Throws Failure(exit_usage).
std::vector<std::string> questions_of(const std::vector<std::string>& given,
                                      const std::string& document);

// Asks each on its own, prints and puts all into console.result["answers"], with the `passages`
// that each answer attended most. Throws Failure, also after a Ctrl-C.
void answer_each(Console& console, const kv_model* model, kv_session* session,
                 const std::vector<std::string>& questions, const SamplingFlags& flags,
                 uint32_t passages);

// "12 tokens, first after 84 ms, then 35.2 tokens/s; quest read 2.0% of the tokens, 3.1% of the
// pages"
std::string facts_line(const Answer& answer);
Json facts_json(const Answer& answer);

}  // namespace tool
