// Asking: a question into its turn, an answer out of it. And how likely a given answer is.
#include <algorithm>
#include <cmath>
#include <string>

#include "session/session.h"
#include "text/utf8.h"

namespace kvasir {

// The sequence as it was when this was made, put back by the destructor unless released. What there
// was is shared and not written to, so what comes back is exact.
struct Session::Restore {
  explicit Restore(Session* s)
      : session(s), store(s->store_), queries(s->queries_), observed(s->observed_),
        tokens(s->tokens_.size()), turn(s->turn_), logits(s->logits_), logits_at(s->logits_at_) {}
  ~Restore() {
    if (!session) return;
    session->store_ = std::move(store);
    session->queries_ = std::move(queries);
    session->observed_ = std::move(observed);
    session->chosen_ = false;
    session->tokens_.resize(tokens);
    session->turn_ = turn;
    session->logits_ = std::move(logits);
    session->logits_at_ = logits_at;
  }
  void release() { session = nullptr; }

  Session* session;
  KvStore store;
  RecentQueries queries;
  Observed observed;
  std::size_t tokens;
  Turn turn;
  Array<float> logits;
  uint64_t logits_at;
};

// While it lives, what the tokens attend that choose the answer's is traced. What an answer before
// it attended is forgotten.
struct Session::Tracing {
  Tracing(Session* s, bool trace) : session(s) {
    s->trace_.reset();
    if (!trace) return;
    const uint64_t document = s->turn_ == Turn::answer ? s->document_tokens_ : s->tokens_.size();
    s->trace_ =
        std::make_unique<Trace>(s->model_->config().heads, s->store_.shape().page.block_tokens,
                                document, s->opening_tokens());
    s->tracing_ = true;
  }
  ~Tracing() { session->tracing_ = false; }

  Session* session;
};

// Bytes of tokens in, whole characters out, holding back what may be the beginning of a stop
// string.
class Session::AnswerStream {
 public:
  AnswerStream(const std::vector<std::string>& stop, const TextFn& on_text)
      : stop_(stop), on_text_(on_text) {}

  // Sets *stopped when a stop string is complete. False when the callback asked to stop.
  bool push(std::string_view bytes, bool* stopped) {
    utf8_.push(bytes, &held_);
    std::size_t end = held_.size();
    for (const std::string& s : stop_) {
      const std::size_t at = held_.find(s);
      if (!s.empty() && at < end) end = at, *stopped = true;
    }
    if (*stopped) return emit(end);
    return emit(held_.size() - longest_beginning());
  }
  bool finish() {
    utf8_.finish(&held_);
    return emit(held_.size());
  }

 private:
  // The longest end of held_ that begins a stop string.
  std::size_t longest_beginning() const {
    std::size_t longest = 0;
    for (const std::string& s : stop_)
      for (std::size_t n = std::min(held_.size(), s.size()); n > longest; --n)
        if (held_.compare(held_.size() - n, n, s, 0, n) == 0) longest = n;
    return longest;
  }
  bool emit(std::size_t size) {
    // A stop string may begin inside a character's bytes only if it is no UTF-8 itself; characters
    // stay whole otherwise.
    if (size == 0) return true;
    const std::string out = held_.substr(0, size);
    held_.erase(0, size);
    return !on_text_ || on_text_(out) == 0;
  }

  const std::vector<std::string>& stop_;
  const TextFn& on_text_;
  Utf8Stream utf8_;
  std::string held_;
};

Status Session::question_tokens(std::string_view question, bool parse_special, const Cancel* cancel,
                                Array<Token>* out) const {
  const Tokenizer& tokenizer = model_->tokenizer();
  const ChatMarks& marks = chat_marks(chat_);
  if (turn_ == Turn::empty && tokenizer.add_bos()) out->push_back(tokenizer.bos());
  const std::string_view close = turn_ == Turn::document ? marks.document_close
                                 : turn_ == Turn::answer ? marks.answer_close
                                                         : std::string_view();
  const bool instructed = turn_ == Turn::empty && !instructions().empty();
  const std::string_view open =
      turn_ == Turn::empty && !instructed ? marks.first_question_open : marks.question_open;
  const Tokenizer::Part parts[] = {{instructed ? marks.document_open : close, true},
                                   {instructed ? instructions() : std::string_view(), false},
                                   {instructed ? marks.instructions_question() : "", true},
                                   {open, true},
                                   {question, parse_special},
                                   {marks.question_close, true}};
  return tokenizer.encode(parts, turn_ == Turn::empty, out, {nullptr, cancel});
}

// Spills now what the question and its answer, of up to so many tokens, would have to. Meanwhile
// the sequence is held as it was, with all that is in memory of it, and what is spilled would be
// there again afterwards. The question has to fit into the budget, the answer may be shorter.
Status Session::make_room(uint64_t question, uint64_t answer, const Cancel* cancel) {
  const uint64_t now = tokens_.size() + question,
                 most = now + std::min(answer, options_.context - now);
  return store_.keep_within_budget(store_.check_budget(most).ok() ? most : now, 0, 0, cancel);
}

Status Session::generate(std::string_view question, const GenerateOptions& o, const TextFn& on_text,
                         Answer* answer) {
  *answer = {};
  if (Status s = check_sampling_options(o.sampling); !s.ok()) return s;
  const uint64_t begin = os::now_ns();
  Array<Token> tokens;
  if (Status s = question_tokens(question, o.parse_special, o.cancel, &tokens); !s.ok()) {
    if (s.code() == Code::cancelled) answer->reason = StopReason::cancelled;
    return s;
  }
  if (tokens.empty() && tokens_.empty())
    return Status::error(Code::bad_state,
                         "there is nothing to answer: the sequence and the question are empty");
  if (Status s = check_room(tokens.size()); !s.ok()) return s;

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
    s = append(tokens, Reading::question, nullptr, o.cancel, &progress, &done);
    // it was read as a document is: not by decode
    if (chooses_once()) forward_->attention().reset_counts();
  }
  answer->question_tokens = tokens.size();
  if (s.ok()) {
    if (turn_ != Turn::answer) document_tokens_ = restore.tokens, document_turn_ = turn_;
    turn_ = Turn::answer;
    if (o.keep) restore.release();  // whatever ends the answer, its whole tokens stay
    s = answer_loop(o, on_text, begin, answer);
  }
  if (s.code() == Code::cancelled) answer->reason = StopReason::cancelled;
  answer->total_ns = os::now_ns() - begin;
  answer->read = last_read_ = forward_->attention().counts();
  last_steps_ = answer->answer_tokens;
  last_decode_ns_ = answer->total_ns - std::min(answer->total_ns, answer->first_token_ns);
  return s;
}

Status Session::answer_loop(const GenerateOptions& o, const TextFn& on_text, uint64_t begin_ns,
                            Answer* answer) {
  const Tokenizer& tokenizer = model_->tokenizer();
  Sampler sampler(o.sampling);
  AnswerStream stream(o.stop, on_text);
  const auto stopped = [] { return Status::error(Code::cancelled, "the answer was stopped"); };
  while (answer->reason == StopReason::none) {
    if (is_cancelled(o.cancel)) return stopped();
    Token token = 0;
    logits_at_ = 0;  // sampling changes them
    if (Status s = sampler.sample(logits_, tokens_, &token); !s.ok()) return s;
    if (answer->answer_tokens == 0) answer->first_token_ns = os::now_ns() - begin_ns;
    if (tokenizer.ends_turn(token)) {
      answer->reason = StopReason::end_of_turn;
      break;
    }
    ++answer->answer_tokens;
    bool complete = false;
    const bool go_on = stream.push(tokenizer.piece(token, false), &complete);
    if (complete) answer->reason = StopReason::string;
    else if (answer->answer_tokens >= o.max_tokens) answer->reason = StopReason::max_tokens;
    else if (tokens_.size() + 1 >= options_.context) answer->reason = StopReason::context_full;
    const bool last = answer->reason != StopReason::none || !go_on;
    if (!last || (o.keep && tokens_.size() < options_.context)) {
      uint64_t done = 0;
      if (Status s = append({&token, 1}, Reading::answer, nullptr, o.cancel, nullptr, &done);
          !s.ok())
        return s;
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
        "no answer was traced, or the sequence has changed since: call kv_generate "
        "with KV_TRACE_PASSAGES");
  out->clear();
  const Tokenizer& tokenizer = model_->tokenizer();
  const uint64_t opening = opening_bytes();
  Array<uint64_t> offsets;  // [tokens + 1]
  if (spells_document())
    spelling_.offsets(tokenizer, std::span(tokens_).first(trace_->document()), &offsets);
  for (const Trace::Passage& p : trace_->passages()) {
    Passage& passage = out->emplace_back();
    passage = {.first = p.first, .tokens = p.tokens, .share = p.share};
    const uint64_t end = p.first + p.tokens;
    if (offsets.empty() || offsets[end] == Spelling::unknown || offsets[end] < opening) continue;
    const auto document = std::span<const Token>(tokens_).first(trace_->document());
    const uint64_t from = std::max(
        opening, offsets[p.first] -
                     std::min<uint64_t>(offsets[p.first],
                                        bytes_to_character_begin(tokenizer, document, p.first)));
    passage.first_byte = from - opening;
    passage.bytes = offsets[end] + bytes_to_character_end(tokenizer, document, end) - from;
  }
  return {};
}

// Of the softmax; summed in double, because a large vocabulary has many small terms.
static double log_probability(std::span<const float> logits, Token token) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x - top));
  return static_cast<double>(logits[static_cast<std::size_t>(token)] - top) - std::log(sum);
}

Status Session::score(std::span<const Token> tokens, float* log_probabilities, const Cancel* cancel,
                      Progress::Report report, Progress::Report prepare_report) {
  if (tokens_.empty())
    return Status::error(Code::bad_state, "the sequence is empty: read something first");
  if (Status s = check_tokens(tokens); !s.ok()) return s;
  if (Status s = check_room(tokens.size()); !s.ok()) return s;
  if (tokens.empty()) return {};
  trace_.reset();
  const uint64_t begin = os::now_ns();
  Progress progress(std::move(report));
  if (Status s = prepare(cancel, std::move(prepare_report)); !s.ok()) return s;
  if (Status s = make_room(tokens.size(), 0, cancel); !s.ok()) return s;
  Restore restore(this);
  Array<float> found(tokens.size());
  forward_->attention().reset_counts();
  if (Status s = refresh_logits(cancel); !s.ok()) return s;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled");
    const double logarithm = log_probability(logits_, tokens[i]);
    if (std::isnan(logarithm)) return not_a_number();
    found[i] = static_cast<float>(logarithm);
    const bool last = i + 1 == tokens.size();  // nothing follows that would have to know of it
    uint64_t done = 0;
    if (!last)
      if (Status s = append(tokens.subspan(i, 1), Reading::answer, nullptr, cancel, nullptr, &done);
          !s.ok())
        return s;
    if (!progress.update(i + 1, tokens.size()) && !last)
      return Status::error(Code::cancelled, "stopped by the progress callback");
  }
  std::copy(found.begin(), found.end(), log_probabilities);
  last_read_ = forward_->attention().counts();
  last_steps_ = tokens.size();
  last_decode_ns_ = os::now_ns() - begin;
  return {};
}

}  // namespace kvasir
