// What an answer is asked with, and what it leaves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/cancel.h"
#include "base/progress.h"
#include "session/answer_stream.h"
#include "session/sampler.h"

namespace kvasir {

struct GenerateOptions {
  uint32_t max_tokens = 512;
  SamplingOptions sampling;
  bool keep = false;
  bool thinking = false;
  uint32_t thinking_tokens = 2048;  // of a thought at most
  bool keep_thinking = false;       // a kept turn has its thought
  TextFn on_thought;
  bool trace = false;  // for passages()
  bool parse_special = false;
  std::vector<std::string> stop;
  const Cancel* cancel = nullptr;
  Progress::Report progress;          // of the question's prefill
  Progress::Report prepare_progress;  // as Session::prepare()
};

enum class StopReason : uint32_t {
  none = 0,
  end_of_turn = 1,
  string = 2,
  max_tokens = 3,
  context_full = 4,
  cancelled = 5
};

struct Answer {
  StopReason reason = StopReason::none;
  uint64_t question_tokens = 0, thinking_tokens = 0, answer_tokens = 0;
  uint64_t first_token_ns = 0, total_ns = 0;
  ReadCounts read;
};

// A document of a composed session, for reports.
struct DocumentReport {
  const char* path = "";  // until the composition's last session is closed
  uint64_t tokens = 0;
  bool is_candidate = false, is_chosen = false;
  double score = -1;  // of the last choice; -1: there was none to make
};

// Neighbouring tokens of the document, and the bytes of its text that they spell.
struct Passage {
  uint64_t first = 0, tokens = 0;
  uint64_t first_byte = UINT64_MAX, bytes = 0;  // UINT64_MAX: unknown
  double share = 0;                             // of all recorded attention
  uint32_t document = 0;                        // of a composed session
};

}  // namespace kvasir
