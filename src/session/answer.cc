// Questions and answers.
#include <algorithm>
#include <string>

#include "session/answer_stream.h"
#include "session/restore.h"
#include "session/session.h"

namespace kvasir {

// While it exists, traces the attention of the tokens whose logits choose the answer's tokens. The
// constructor drops the trace of an earlier answer.
struct Session::Tracing {
  Tracing(Session* s, bool trace) : session(s) {
    s->trace_.reset();
    if (!trace) return;
    const uint64_t document = s->sequence_.turn == Turn::answer ? s->sequence_.document_tokens
                                                                : s->sequence_.tokens.size();
    s->trace_ = std::make_unique<Trace>(s->model_->config().heads,
                                        s->sequence_.store.shape().page.block_tokens, document,
                                        s->opening_tokens());
    s->tracing_ = true;
  }
  ~Tracing() { session->tracing_ = false; }

  Session* session;
};

Status Session::question_tokens(std::string_view question, bool parse_special, const Cancel* cancel,
                                Array<Token>* out) const {
  const Tokenizer& tokenizer = model_->tokenizer();
  const ChatMarks& marks = sequence_.chat.marks();
  const std::string_view close = sequence_.turn == Turn::document ? marks.document_close
                                 : sequence_.turn == Turn::answer ? marks.answer_close
                                                                  : std::string_view();
  const bool instructed = sequence_.turn == Turn::empty && !instructions().empty();
  const std::string_view open = sequence_.turn == Turn::empty && !instructed
                                    ? marks.first_question_open
                                    : marks.question_open;
  if (sequence_.turn == Turn::empty &&
      wants_bos(tokenizer, instructed ? marks.document_open : open))
    out->push_back(tokenizer.bos());
  const Tokenizer::Part parts[] = {{instructed ? marks.document_open : close, true},
                                   {instructed ? instructions() : std::string_view(), false},
                                   {instructed ? marks.instructions_question() : "", true},
                                   {open, true},
                                   {question, parse_special},
                                   {marks.question_close, true}};
  return tokenizer.encode(parts, sequence_.turn == Turn::empty, out, {nullptr, cancel});
}

// Spills in advance the pages that question and answer would spill. During the answer the saved
// sequence keeps its pages in memory, so pages spilled then would return to memory afterwards. The
// question must fit the budget; an answer that does not may end early.
Status Session::make_room(uint64_t question, uint64_t answer, const Cancel* cancel) {
  const uint64_t now = sequence_.tokens.size() + question,
                 longest = now + std::min(answer, options_.context - now);
  return sequence_.store.keep_within_budget(
      sequence_.store.check_budget(longest).ok() ? longest : now, 0, 0, cancel);
}

Status Session::generate(std::string_view question, const GenerateOptions& o, const TextFn& on_text,
                         Answer* answer) {
  *answer = {};
  RETURN_IF_ERROR(check_sampling_options(o.sampling));
  const uint64_t begin = os::now_ns();
  if (question.empty() && sequence_.tokens.empty())
    return Status::error(Code::bad_state,
                         "there is nothing to answer: the sequence and the question are empty");
  RETURN_IF_ERROR(check_instructions());
  Array<Token> tokens;
  if (Status s = question_tokens(question, o.parse_special, o.cancel, &tokens); !s.ok()) {
    if (s.code() == Code::cancelled) answer->reason = StopReason::cancelled;
    return s;
  }
  RETURN_IF_ERROR(check_room(tokens.size()));

  if (Status s = prefill_missing(o.cancel, o.progress); !s.ok()) {
    if (s.code() == Code::cancelled) answer->reason = StopReason::cancelled;
    return s;
  }
  if (Status s = prepare(o.cancel, o.prepare_progress); !s.ok()) {
    if (s.code() == Code::cancelled) answer->reason = StopReason::cancelled;
    return s;
  }
  if (Status s = make_room(tokens.size(), o.max_tokens, o.cancel); !s.ok()) {
    if (s.code() == Code::cancelled) answer->reason = StopReason::cancelled;
    return s;
  }
  Restore restore(this);
  forward_->attention().reset_counts();
  const Tracing tracing(this, o.trace);
  Status s;
  if (tokens.empty()) {
    s = refresh_logits(o.cancel);
  } else {
    Progress progress(o.progress);
    uint64_t done = 0;
    s = append(
        {.tokens = tokens, .kind = TextKind::question, .cancel = o.cancel, .progress = &progress},
        &done);
    // the question was prefilled exactly: its reads are not those of decode
    if (chooses_once()) forward_->attention().reset_counts();
  }
  answer->question_tokens = tokens.size();
  if (s.ok()) {
    if (sequence_.turn != Turn::answer)
      sequence_.document_tokens = restore.tokens, sequence_.document_turn = sequence_.turn;
    sequence_.turn = Turn::answer;
    if (o.keep) restore.release();  // complete tokens stay, also after an error
    s = answer_loop(o, on_text, begin, answer);
  }
  if (s.code() == Code::cancelled) answer->reason = StopReason::cancelled;
  answer->total_ns = os::now_ns() - begin;
  answer->read = forward_->attention().counts();
  last_ = {answer->read, answer->answer_tokens,
           answer->total_ns - std::min(answer->total_ns, answer->first_token_ns)};
  return s;
}

// The special token with which the mark after an answer begins; -1: it begins
// with text. It ends an answer as the vocabulary's own tokens do.
Token Session::answer_end() const {
  const Tokenizer& tokenizer = model_->tokenizer();
  Array<Token> tokens;
  const bool encoded =
      tokenizer.encode(sequence_.chat.marks().answer_close, true, false, &tokens).ok();
  if (!encoded || tokens.empty() || !tokenizer.starts_text(tokens[0])) return -1;
  // a run of blanks may be a token too
  const std::string_view text = tokenizer.piece(tokens[0], true);
  return text.find_first_not_of(" \t\r\n") == text.npos ? -1 : tokens[0];
}

Status Session::answer_loop(const GenerateOptions& o, const TextFn& on_text, uint64_t begin_ns,
                            Answer* answer) {
  const Tokenizer& tokenizer = model_->tokenizer();
  Sampler sampler(o.sampling, tokenizer.suppressed());
  AnswerStream stream(o.stop, on_text);
  const Token end = answer_end();
  const auto stopped = [] { return Status::error(Code::cancelled, "the answer was stopped"); };
  while (answer->reason == StopReason::none) {
    if (is_cancelled(o.cancel)) return stopped();
    Token token = 0;
    sequence_.logits_at = 0;  // sampling overwrites the logits
    RETURN_IF_ERROR(sampler.sample(sequence_.logits, sequence_.tokens, &token));
    if (answer->answer_tokens == 0) answer->first_token_ns = os::now_ns() - begin_ns;
    if (token == end || tokenizer.ends_turn(token)) {
      answer->reason = StopReason::end_of_turn;
      break;
    }
    ++answer->answer_tokens;
    bool complete = false;
    const bool go_on = stream.push(tokenizer.piece(token, false), &complete);
    if (complete) answer->reason = StopReason::string;
    else if (answer->answer_tokens >= o.max_tokens) answer->reason = StopReason::max_tokens;
    else if (sequence_.tokens.size() + 1 >= options_.context)
      answer->reason = StopReason::context_full;
    const bool last = answer->reason != StopReason::none || !go_on;
    if (!last || (o.keep && sequence_.tokens.size() < options_.context)) {
      RETURN_IF_ERROR(append_token(token, o.cancel));
    }
    if (!go_on) return stopped();
  }
  const bool held_text_counts = answer->reason != StopReason::string;
  return held_text_counts && !stream.finish() ? stopped() : Status();
}

Status Session::passages(std::vector<Passage>* out) const {
  if (!trace_ || trace_->steps() == 0)
    return Status::error(
        Code::bad_state,
        "the last answer has no trace, or the sequence has changed since: call kv_generate with "
        "KV_TRACE_PASSAGES");
  out->clear();
  const Tokenizer& tokenizer = model_->tokenizer();
  const uint64_t opening = opening_bytes();
  Array<uint64_t> offsets;  // [tokens + 1]
  if (spells_document())
    sequence_.spelling.offsets(tokenizer, std::span(sequence_.tokens).first(trace_->document()),
                               &offsets);
  for (const Trace::Passage& p : trace_->passages()) {
    Passage& passage = out->emplace_back();
    passage = {.first = p.first, .tokens = p.tokens, .share = p.share};
    const uint64_t end = p.first + p.tokens;
    if (offsets.empty() || offsets[end] == Spelling::unknown || offsets[end] < opening) continue;
    const auto document = std::span<const Token>(sequence_.tokens).first(trace_->document());
    const uint64_t from = std::max(
        opening, offsets[p.first] -
                     std::min<uint64_t>(offsets[p.first],
                                        bytes_to_character_begin(tokenizer, document, p.first)));
    passage.first_byte = from - opening;
    passage.bytes = offsets[end] + bytes_to_character_end(tokenizer, document, end) - from;
  }
  return {};
}

}  // namespace kvasir
