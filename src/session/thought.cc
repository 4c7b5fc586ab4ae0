// Thoughts: what a model writes before its answer, and turns that keep no thought.
#include <utility>

#include "session/restore.h"
#include "session/session.h"

namespace kvasir {

namespace {

// The token that a mark is; -1 if it is several, or none.
Token token_of(const Tokenizer& tokenizer, std::string_view mark) {
  const Token token = tokenizer.find(mark);
  return token >= 0 && tokenizer.starts_text(token) ? token : -1;
}

}  // namespace

// Decodes a thought and appends the marks between it and the answer. A thought that reaches its
// limit is cut. So is one in which the model ends its turn.
Status Session::think(const GenerateOptions& o, const ThinkingMarks& marks, AnswerState* state) {
  const Tokenizer& tokenizer = model_->tokenizer();
  const Token close = token_of(tokenizer, marks.close);
  const std::vector<std::string> ends(close < 0 ? 1u : 0u, std::string(marks.close));
  AnswerStream stream(ends, o.on_thought);
  Answer& answer = *state->answer;
  bool closed = false, go_on = true;
  const auto take = [&](Token token) {
    if (token != close && tokenizer.ends_turn(token)) return Next::end_before;
    if (sequence_.positions() + 1 >= options_.context) {
      answer.reason = StopReason::context_full;
      return Next::end_before;
    }
    closed = token == close;
    if (closed) return Next::end_after;
    ++answer.thinking_tokens;
    go_on = stream.push(tokenizer.piece(token, false), &closed);
    return closed || !go_on || answer.thinking_tokens >= o.thinking_tokens ? Next::end_after
                                                                           : Next::token;
  };
  if (o.thinking_tokens > 0) RETURN_IF_ERROR(decode(o, state, take));
  if (!go_on) return answer_stopped();
  const bool held_text_counts = !closed || close >= 0;
  if (held_text_counts && !stream.finish()) return answer_stopped();
  if (answer.reason != StopReason::none) return {};
  return append_marks(closed ? marks.after : marks.cut, o.cancel, &answer);
}

// Appends marks of a turn as decoded tokens.
Status Session::append_marks(std::string_view marks, const Cancel* cancel, Answer* answer) {
  const Tokenizer& tokenizer = model_->tokenizer();
  Array<Token> tokens;
  RETURN_IF_ERROR(
      tokenizer.encode(marks, true, tokenizer.starts_text(sequence_.tokens.back()), &tokens));
  if (tokens.empty()) return {};
  if (sequence_.positions() + tokens.size() >= options_.context) {
    answer->reason = StopReason::context_full;
    return {};
  }
  uint64_t done = 0;
  return append({.tokens = tokens, .kind = TextKind::answer, .cancel = cancel}, &done);
}

// Replaces the newest turn by these tokens. `before`: the sequence before it. After a failure the
// sequence is as before the turn.
Status Session::replace_turn(Restore* before, std::span<const Token> tokens, const Cancel* cancel) {
  // passages stay those of the answer
  std::unique_ptr<Trace> trace = std::move(trace_);
  tracing_ = false;
  before->apply();
  Restore again(this);
  uint64_t done = 0;
  RETURN_IF_ERROR(append({.tokens = tokens, .kind = TextKind::question, .cancel = cancel}, &done));
  again.release();
  begin_conversation(again.tokens);
  trace_ = std::move(trace);
  return {};
}

}  // namespace kvasir
