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
  Tracing(Session* s, bool trace, uint64_t passage_tokens) : session(s) {
    s->trace_.reset(), s->document_traces_.clear();
    if (!trace) return;
    const uint64_t document = s->sequence_.turn == Turn::answer
                                  ? s->sequence_.document_tokens
                                  : s->sequence_.tokens.size() + passage_tokens;
    s->trace_ = std::make_unique<Trace>(s->model_->config().heads,
                                        s->sequence_.store.shape().page.block_tokens, document,
                                        s->opening_tokens());
    s->trace_documents();
    s->tracing_ = true;
  }
  ~Tracing() { session->tracing_ = false; }

  Session* session;
};

// lead: marks before the answer.
Status Session::question_tokens(std::string_view question, const GenerateOptions& o,
                                std::string_view lead, Array<Token>* out, TokenRange* asked) const {
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
                                   {question, o.parse_special},
                                   {marks.question_close, true},
                                   {lead, true}};
  Array<uint32_t> lengths;  // bytes that each token spells
  lengths.resize(out->size());
  RETURN_IF_ERROR(tokenizer.encode(parts, sequence_.turn == Turn::empty, out,
                                   {asked ? &lengths : nullptr, o.cancel}));
  if (!asked) return {};
  uint64_t before = 0;  // bytes
  for (const Tokenizer::Part& part : std::span(parts).first(4)) before += part.text.size();
  const auto token_at = [&](uint64_t byte) {
    std::size_t t = 0;
    for (uint64_t at = 0; t < lengths.size() && at + lengths[t] <= byte; ++t) at += lengths[t];
    return t;
  };
  asked->begin = token_at(before);
  asked->end = question.empty() ? asked->begin : token_at(before + question.size() - 1) + 1;
  return {};
}

// Spills in advance the pages that question and answer would spill. During the answer the saved
// sequence keeps its pages in memory, so pages spilled then would return to memory afterwards. The
// question must fit the budget; an answer that does not may end early.
Status Session::make_room(uint64_t question, uint64_t answer, const Cancel* cancel) {
  const uint64_t now = sequence_.tokens.size() + question,
                 longest = now + std::min(answer, options_.context -
                                                      std::min(options_.context,
                                                               sequence_.composed.tokens + now));
  return fit_drafts([&] {
    return sequence_.store.keep_within_budget(
        sequence_.store.check_budget(longest).ok() ? longest : now, 0, 0, cancel);
  });
}

Status Session::answer_stopped() {
  return Status::error(Code::cancelled, "the answer was stopped");
}

Status Session::generate(std::string_view question, const GenerateOptions& o, const TextFn& on_text,
                         Answer* answer) {
  *answer = {};
  RETURN_IF_ERROR(check_sampling_options(o.sampling));
  AnswerState state{Sampler(o.sampling, model_->tokenizer().suppressed()), on_text, os::now_ns(),
                    answer};
  fetch_logits();
  if (question.empty() && sequence_.tokens.empty())
    return Status::error(Code::bad_state,
                         "there is nothing to answer: the sequence and the question are empty");
  AskedTurn turn;
  const uint64_t tokens = sequence_.tokens.size();
  const ComposedState before = sequence_.composed;
  Status s;
  try {
    s = ask(question, o, &turn);
    if (s.ok()) s = answer_turn(&turn, o, &state);
  } catch (const std::bad_alloc&) {
    s = Status::error(Code::no_memory, "out of memory");
  }
  end_passages(false);
  if (!s.ok() && sequence_.tokens.size() == tokens) take_back_choice(before);
  if (s.code() == Code::cancelled) answer->reason = StopReason::cancelled;
  return s;
}

// Makes the tokens of the question's turn and the room for it, and prepares the strategy.
Status Session::ask(std::string_view question, const GenerateOptions& o, AskedTurn* turn) {
  RETURN_IF_ERROR(check_measure());
  RETURN_IF_ERROR(check_instructions());
  turn->marks = model_->thinking(sequence_.chat);
  const ThinkingMarks& marks = turn->marks;
  if (o.thinking && !marks.exist())
    return Status::error(Code::unsupported,
                         "the model does not think in the chat format '%s'; nothing was appended",
                         sequence_.chat.name());
  TokenRange asked;
  RETURN_IF_ERROR(
      question_tokens(question, o, o.thinking ? marks.open : marks.skip, &turn->tokens, &asked));
  if (o.thinking && o.keep && !o.keep_thinking)
    RETURN_IF_ERROR(question_tokens(question, o, marks.skip, &turn->kept));
  const uint64_t thought = o.thinking ? o.thinking_tokens : 0;
  RETURN_IF_ERROR(prefill_missing(o.cancel, o.progress));  // the choice runs the question after it
  std::vector<PageRange> passages;
  RETURN_IF_ERROR(
      choose_documents({turn->tokens, asked, thought + o.max_tokens, o.cancel}, &passages));
  if (!passages.empty() && !(o.thinking && o.keep))
    insert_passages(std::move(passages), thought + o.max_tokens, turn);
  RETURN_IF_ERROR(check_room(turn->tokens.size()));
  // of a model with states before Restore, so that the next call needs no prefill
  if (sequence_.states && turn->tokens.empty() && !knows_next(o.sampling))
    RETURN_IF_ERROR(refresh_logits(o.cancel, o.progress));
  RETURN_IF_ERROR(prepare(o.cancel, o.prepare_progress));
  return make_room(turn->tokens.size(), thought + o.max_tokens, o.cancel);
}

Status Session::answer_turn(AskedTurn* turn, const GenerateOptions& o, AnswerState* state) {
  Answer& answer = *state->answer;
  Restore restore(this);
  forward_->attention().reset_counts();
  drafts_ = {}, no_device_room_ = false;
  pace_.begin_answer();
  const struct Ended {  // however it ends
    DraftPace& pace;
    ~Ended() { pace.end_answer(); }
  } ended{pace_};
  const Tracing tracing(this, o.trace, turn->passage_tokens);
  state->passage_tokens = turn->passage_tokens;
  Status s;
  if (turn->tokens.empty()) {
    if (!knows_next(o.sampling)) s = refresh_logits(o.cancel, {});
  } else {
    Progress progress(o.progress);
    uint64_t done = 0;
    s = append({.tokens = turn->tokens,
                .kind = TextKind::question,
                .cancel = o.cancel,
                .progress = &progress},
               &done);
    // the question was prefilled exactly: its reads are not those of decode
    if (chooses_once()) forward_->attention().reset_counts();
  }
  answer.question_tokens = turn->tokens.size() - turn->passage_tokens;
  std::size_t first = 0;  // token of the answer
  if (s.ok()) {
    begin_conversation(restore.tokens);
    // complete tokens stay, also on an error
    if (o.keep && turn->kept.empty() && turn->passage_tokens == 0) restore.release();
    if (o.thinking) s = think(o, turn->marks, state);
    first = sequence_.tokens.size();
    if (s.ok() && answer.reason == StopReason::none) s = answer_loop(o, state);
  }
  answer.read = forward_->attention().counts();
  end_passages(true);
  if (o.keep && turn->passage_tokens > 0 && first > 0)
    keep_without_prefill(&restore,
                         std::span<const Token>(sequence_.tokens).subspan(turn->passage_tokens));
  const bool has_answer = first > 0 && sequence_.tokens.size() > first;
  if (!turn->kept.empty() && (s.ok() || (has_answer && !is_cancelled(o.cancel)))) {
    turn->kept.insert(turn->kept.end(),
                      sequence_.tokens.begin() + static_cast<std::ptrdiff_t>(first),
                      sequence_.tokens.end());
    if (Status kept = replace_turn(&restore, turn->kept, o.cancel); s.ok()) s = std::move(kept);
  }
  answer.total_ns = os::now_ns() - state->begin_ns;
  last_ = {answer.read, answer.answer_tokens + answer.thinking_tokens,
           answer.total_ns - std::min(answer.total_ns, answer.first_token_ns)};
  return s;
}

void Session::begin_conversation(uint64_t tokens_before) {
  if (sequence_.turn != Turn::answer)
    sequence_.document_tokens = tokens_before, sequence_.document_turn = sequence_.turn;
  sequence_.turn = Turn::answer;
}

// best: -1, or what a GPU has found in place of the logits.
Status Session::sample(const GenerateOptions& o, AnswerState* state, std::span<float> logits,
                       Token best, Token* token) {
  if (is_cancelled(o.cancel)) return answer_stopped();
  if (best >= 0) *token = best;
  else
    RETURN_IF_ERROR(state->sampler.sample(
        logits, std::span<const Token>(sequence_.tokens).subspan(state->passage_tokens), token));
  note_sampled(state);
  return {};
}

// After the last token of the sequence.
Status Session::sample_next(const GenerateOptions& o, AnswerState* state, Token* token) {
  return sample(o, state, sequence_.logits, knows_next(o.sampling) ? best_ : -1, token);
}

void Session::note_sampled(AnswerState* state) {
  Answer& answer = *state->answer;
  if (answer.thinking_tokens + answer.answer_tokens == 0)
    answer.first_token_ns = os::now_ns() - state->begin_ns;
}

bool Session::knows_next(const SamplingOptions& sampling) const {
  return takes_largest(sampling) && has_best();
}

// Whether the sampler takes the largest logit of the output matrix. A factor or a cap may round
// several to the same one. A strategy that chooses once may compute the last token again.
bool Session::takes_largest(const SamplingOptions& sampling) const {
  const ModelConfig& config = model_->config();
  return sampling.temperature == 0 && sampling.repetition_penalty == 1 && config.logit_scale == 1 &&
         config.final_softcap == 0 && !chooses_once();
}

Status Session::decode(const GenerateOptions& o, AnswerState* state, const TakeFn& take) {
  Token token = 0;
  RETURN_IF_ERROR(sample_next(o, state, &token));
  Next next = take(token);
  Status s;
  while (s.ok() && next == Next::token) s = decode_timed(o, state, take, &token, &next);
  if (s.ok() && next == Next::end_after) return append_token(token, o.cancel);
  fetch_logits();
  return s;
}

// The special token with which the mark after an answer begins; -1: it begins with text. It ends an
// answer as the vocabulary's own tokens do.
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

Status Session::answer_loop(const GenerateOptions& o, AnswerState* state) {
  const Tokenizer& tokenizer = model_->tokenizer();
  const Token end = answer_end();
  AnswerStream stream(o.stop, state->on_text);
  Answer& answer = *state->answer;
  bool go_on = true;
  const auto take = [&](Token token) {
    if (token == end || tokenizer.ends_turn(token)) {
      answer.reason = StopReason::end_of_turn;
      return Next::end_before;
    }
    ++answer.answer_tokens;
    bool complete = false;
    go_on = stream.push(tokenizer.piece(token, false), &complete);
    if (complete) answer.reason = StopReason::string;
    else if (answer.answer_tokens >= o.max_tokens) answer.reason = StopReason::max_tokens;
    else if (sequence_.positions() + 1 >= options_.context)
      answer.reason = StopReason::context_full;
    if (answer.reason == StopReason::none && go_on) return Next::token;
    return o.keep && sequence_.positions() < options_.context ? Next::end_after : Next::end_before;
  };
  RETURN_IF_ERROR(decode(o, state, take));
  if (!go_on) return answer_stopped();
  const bool held_text_counts = answer.reason != StopReason::string;
  return held_text_counts && !stream.finish() ? answer_stopped() : Status();
}

Status Session::passages(std::vector<Passage>* out) const {
  if (!trace_ || trace_->steps() == 0)
    return Status::error(
        Code::bad_state,
        "the last answer has no trace, or the sequence has changed since: call kv_generate with "
        "KV_TRACE_PASSAGES");
  out->clear();
  if (sequence_.is_composed()) return add_document_passages(out);
  add_passages(*trace_, {trace_->sum(), trace_->largest()}, out);
  return {};
}

// of: all passages that are listed, of this and other documents.
void Session::add_passages(const Trace& trace, Trace::Scale of, std::vector<Passage>* out) const {
  const Tokenizer& tokenizer = model_->tokenizer();
  const uint64_t opening = opening_bytes();
  Array<uint64_t> offsets;  // [tokens + 1]
  if (spells_document())
    sequence_.spelling.offsets(tokenizer, std::span(sequence_.tokens).first(trace.document()),
                               &offsets);
  for (const Trace::Passage& p : trace.passages(of)) {
    Passage& passage = out->emplace_back();
    passage = {.first = p.first, .tokens = p.tokens, .share = p.share};
    const uint64_t end = p.first + p.tokens;
    if (offsets.empty() || offsets[end] == Spelling::unknown || offsets[end] < opening) continue;
    const auto document = std::span<const Token>(sequence_.tokens).first(trace.document());
    const uint64_t from = std::max(
        opening, offsets[p.first] -
                     std::min<uint64_t>(offsets[p.first],
                                        bytes_to_character_begin(tokenizer, document, p.first)));
    passage.first_byte = from - opening;
    passage.bytes = offsets[end] + bytes_to_character_end(tokenizer, document, end) - from;
  }
}

}  // namespace kvasir
