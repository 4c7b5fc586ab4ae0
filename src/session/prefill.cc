// Reading: a document's text or tokens into the sequence, going back in it, and what the reading
// depends on.
#include <algorithm>
#include <cinttypes>
#include <string>

#include "base/checksum.h"
#include "session/session.h"

namespace kvasir {

constexpr uint32_t asked_tokens = 32;  // of a passage
// counts the ways in which a text has been read sparsely: what was read in another one is not taken
// for this one's
constexpr uint32_t sparse_way = 2;

Status Session::encode_document(std::string_view text, bool parse_special, const Cancel* cancel,
                                Array<Token>* out, Array<uint32_t>* lengths) const {
  if (turn_ == Turn::empty)
    return encode_first(*model_, chat_, text, parse_special, cancel, out, lengths, instructions());
  const Tokenizer& tokenizer = model_->tokenizer();
  const Tokenizer::Part part = {text, parse_special};
  return tokenizer.encode({&part, 1}, tokenizer.starts_text(tokens_.back()), out,
                          {lengths, cancel});
}

Status Session::encode_first(const Model& model, ChatFormat chat, std::string_view text,
                             bool parse_special, const Cancel* cancel, Array<Token>* out,
                             Array<uint32_t>* lengths, std::string_view instructions) {
  const Tokenizer& tokenizer = model.tokenizer();
  if (tokenizer.add_bos()) {
    out->push_back(tokenizer.bos());
    if (lengths) lengths->push_back(0);
  }
  const ChatMarks& marks = chat_marks(chat);
  const std::string_view close =
      instructions.empty() ? std::string_view() : marks.instructions_close;
  const Tokenizer::Part parts[] = {
      {marks.document_open, true}, {instructions, false}, {close, true}, {text, parse_special}};
  return tokenizer.encode(parts, true, out, {lengths, cancel});
}

std::string_view Session::instructions() const {
  return options_.instructions ? std::string_view(*options_.instructions) : std::string_view();
}

std::size_t Session::opening_bytes() const {
  const ChatMarks& marks = chat_marks(chat_);
  const std::size_t text = instructions().size();
  return marks.document_open.size() + (text ? text + marks.instructions_close.size() : 0);
}

// Whether the tokens show which bytes of the document they stand for.
bool Session::spells_document() const {
  const Turn turn = turn_ == Turn::answer ? document_turn_ : turn_;
  // swallowed blanks are known only if they were recorded
  const bool recorded = !model_->tokenizer().strips_after_special() || !spelling_.entries().empty();
  return turn == Turn::document && recorded;
}

uint64_t Session::opening_tokens() const {
  const uint64_t end = turn_ == Turn::answer ? document_tokens_ : tokens_.size();
  if (!spells_document()) return 0;
  const uint64_t begin = spelling_.token_at(model_->tokenizer(), tokens_, end, opening_bytes());
  return begin == end ? 0 : begin;
}

// The turn and the figures follow the tokens that were read, also where a callback ends its thread.
class Session::Counting {
 public:
  // turn: what the sequence is once one has been read.
  Counting(Session* session, Turn turn, const uint64_t* done)
      : session_(session), turn_(turn), done_(done), begin_ns_(os::now_ns()) {}
  ~Counting() {
    if (*done_ > 0) session_->turn_ = turn_;
    session_->spelling_.cut(session_->tokens_.size());
    session_->prefill_tokens_ += *done_;
    session_->prefill_ns_ += os::now_ns() - begin_ns_;
  }

 private:
  Session* session_;
  Turn turn_;
  const uint64_t* done_;
  uint64_t begin_ns_;
};

Status Session::prefill(std::string_view text, bool parse_special, const Cancel* cancel,
                        Progress::Report report, uint64_t* tokens_done, uint64_t* bytes_done) {
  *tokens_done = *bytes_done = 0;
  if (turn_ == Turn::answer)
    return Status::error(Code::bad_state,
                         "a conversation has begun: a document is read before the first question");
  const bool first = turn_ == Turn::empty;
  const std::size_t marks = first ? opening_bytes() : 0;
  Array<Token> tokens;
  Array<uint32_t> lengths;  // bytes of marks and text that each stands for
  if (Status s = encode_document(text, parse_special, cancel, &tokens, &lengths); !s.ok()) return s;
  if (Status s = check_room(tokens.size()); !s.ok()) return s;

  Status s = read_document(tokens, lengths, cancel, std::move(report), tokens_done);
  uint64_t read = 0;
  for (std::size_t i = 0; i < *tokens_done; ++i) read += lengths[i];
  if (!s.ok() && first && read <= marks) {  // a turn that nothing was read into is none
    if (Status e = rewind(0); !e.ok()) return e;
    *tokens_done = 0;
    return s;
  }
  *bytes_done = read - marks;
  return s;
}

Status Session::read_document(std::span<const Token> tokens, std::span<const uint32_t> lengths,
                              const Cancel* cancel, Progress::Report report,
                              uint64_t* tokens_done) {
  *tokens_done = 0;
  if (Status s = check_room(tokens.size()); !s.ok()) return s;
  const Counting counting(this, Turn::document, tokens_done);
  if (turn_ == Turn::tokens) spelling_.add_unknown(0);
  spelling_.add(model_->tokenizer(), tokens_.empty() ? -1 : tokens_.back(), tokens_.size(), tokens,
                lengths);
  Progress progress(std::move(report));
  return append(tokens, Reading::document, nullptr, cancel, &progress, tokens_done);
}

Status Session::check_tokens(std::span<const Token> tokens) const {
  const auto vocabulary = static_cast<Token>(model_->config().vocabulary);
  const auto bad =
      std::find_if(tokens.begin(), tokens.end(), [&](Token t) { return t < 0 || t >= vocabulary; });
  if (bad == tokens.end()) return {};
  return Status::error(Code::bad_argument, "token %zd is %d: the vocabulary has %d",
                       bad - tokens.begin(), *bad, vocabulary);
}

Status Session::prefill_tokens(std::span<const Token> tokens, float* logits, const Cancel* cancel,
                               Progress::Report report, uint64_t* tokens_done) {
  *tokens_done = 0;
  if (Status s = check_tokens(tokens); !s.ok()) return s;
  if (turn_ == Turn::empty && !instructions().empty())
    return Status::error(Code::bad_state,
                         "the session has instructions: begin with kv_prefill or kv_generate");
  if (Status s = check_room(tokens.size()); !s.ok()) return s;
  const Counting counting(this, turn_ == Turn::empty ? Turn::tokens : turn_, tokens_done);
  if (turn_ == Turn::document) spelling_.add_unknown(tokens_.size());
  Progress progress(std::move(report));
  return append(tokens, Reading::document, logits, cancel, &progress, tokens_done);
}

Status Session::check_has(uint64_t tokens) const {
  if (tokens <= tokens_.size()) return {};
  return Status::error(Code::bad_argument,
                       "cannot go back to token %" PRIu64
                       ": the sequence holds %zu; it is unchanged",
                       tokens, tokens_.size());
}

Status Session::rewind(uint64_t tokens) {
  if (Status s = check_has(tokens); !s.ok()) return s;
  if (tokens == tokens_.size()) return {};
  if (Status s = store_.rewind(tokens, cpu_kernels()); !s.ok()) return s;
  forget_behind(tokens);
  return {};
}

// Of all but the store, which has gone back already.
void Session::forget_behind(uint64_t tokens) {
  trace_.reset();
  queries_.rewind(tokens);
  if (tokens < observed_.queries.end()) forget_choice();
  tokens_.resize(tokens);
  spelling_.cut(tokens);
  read_tokens_ = std::min(read_tokens_, tokens);
  sparse_tokens_ = std::min(sparse_tokens_, tokens);
  logits_at_ = 0;
  if (tokens == 0) turn_ = Turn::empty;
  // they were of text that is gone
  if (store_.sealed_tokens() < probed_at_) layer_errors_.clear(), probed_at_ = 0;
  if (turn_ == Turn::answer && tokens <= document_tokens_) turn_ = document_turn_;
  if (!has_marks()) chat_ = model_->chat();
}

Status Session::shorten(uint64_t tokens, const Cancel* cancel, Progress::Report report) {
  if (Status s = check_has(tokens); !s.ok()) return s;
  const uint32_t pages = store_.pages_after(tokens);
  if (pages >= store_.pages().pages()) return rewind(tokens);  // the window has them all
  forget_behind(tokens);                                       // the store follows
  return read_newest_again(tokens - uint64_t{pages} * store_.shape().page.page_tokens, cancel,
                           std::move(report));
}

Status Session::read_newest_again(uint64_t count, const Cancel* cancel, Progress::Report report) {
  const Array<Token> again(tokens_.end() - static_cast<std::ptrdiff_t>(count), tokens_.end());
  const uint64_t kept = tokens_.size() - count;
  if (kept <= store_.sealed_tokens()) {
    store_.cut(static_cast<uint32_t>(kept / store_.shape().page.page_tokens));
  } else if (Status s = store_.rewind(kept, cpu_kernels()); !s.ok()) {
    return s;
  }
  const Turn turn = turn_;
  const ChatFormat chat = chat_;
  Spelling spelling = spelling_;
  forget_behind(kept);
  Progress progress(std::move(report));
  uint64_t done = 0;
  if (Status s = append(again, Reading::document, nullptr, cancel, &progress, &done); !s.ok())
    return s;
  turn_ = turn, chat_ = chat;
  spelling_ = std::move(spelling);
  return {};
}

uint64_t Session::reading_key(bool sparsely) const {
  std::string facts(reinterpret_cast<const char*>(model_->fingerprint().data()),
                    model_->fingerprint().size());
  const auto add = [&](const auto& value) {
    facts.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  add(options_.window);
  add(uint32_t{options_.full_precision});
  if (sparsely) {
    add(sparse_way);
    facts += options_.read.strategy;
    add(options_.read.budget_fraction);
    add(options_.read.exact_tokens);
    if (strategy_info(options_.read.strategy)->has(StrategyInfo::filters))
      for (const uint32_t layer : options_.read.filter_layers) add(layer);
  }
  facts += instructions();
  return checksum(facts.data(), facts.size(), 0);
}

// The first half of a passage is the question, and what follows it in the text the answer.
Status Session::asked_passages(uint32_t count, std::vector<Array<Token>>* out) const {
  const Tokenizer& tokenizer = model_->tokenizer();
  const ChatMarks& marks = chat_marks(chat_);
  Array<Token> open, close;
  const Tokenizer::Part opens[] = {{marks.document_close, true}, {marks.question_open, true}},
                        closes[] = {{marks.question_close, true}};
  if (Status s = tokenizer.encode(opens, false, &open); !s.ok()) return s;
  if (Status s = tokenizer.encode(closes, false, &close); !s.ok()) return s;
  const auto size = static_cast<uint32_t>(open.size() + close.size()) + asked_tokens,
             pieces = std::max(1u, count / size);
  const uint64_t from = tokens_.size() - asked_tokens;
  for (uint32_t p = 0; p < pieces; ++p) {
    const Token* passage = tokens_.data() + from * p / pieces;
    Array<Token>& piece = out->emplace_back(open);
    piece.insert(piece.end(), passage, passage + asked_tokens / 2);
    piece.insert(piece.end(), close.begin(), close.end());
    piece.insert(piece.end(), passage + asked_tokens / 2, passage + asked_tokens);
  }
  return {};
}

}  // namespace kvasir
