// Prefill of documents and tokens, rewind, and the key of a prefill.
#include <algorithm>
#include <cinttypes>
#include <new>
#include <optional>
#include <string>

#include "base/checksum.h"
#include "session/session.h"

namespace kvasir {

// Version of sparse prefill in prefill_key(). It increases when sparse prefill computes another KV
// cache, so that documents of another version do not match. A GPU's and a CPU's match.
constexpr uint32_t sparse_version = 2;

Status Session::encode_document(std::string_view text, bool parse_special, const Cancel* cancel,
                                Array<Token>* out, Array<uint32_t>* lengths) const {
  if (sequence_.turn == Turn::empty || sequence_.tokens.empty())
    return encode_first(*model_, sequence_.chat, text, parse_special, cancel, out, lengths,
                        instructions());
  const Tokenizer& tokenizer = model_->tokenizer();
  const Tokenizer::Part part = {text, parse_special};
  return tokenizer.encode({&part, 1}, tokenizer.starts_text(sequence_.tokens.back()), out,
                          {lengths, cancel});
}

Status Session::encode_first(const Model& model, const Chat& chat, std::string_view text,
                             bool parse_special, const Cancel* cancel, Array<Token>* out,
                             Array<uint32_t>* lengths, std::string_view instructions) {
  const Tokenizer& tokenizer = model.tokenizer();
  const ChatMarks& marks = chat.marks();
  if (wants_bos(tokenizer, marks.document_open)) {
    out->push_back(tokenizer.bos());
    if (lengths) lengths->push_back(0);
  }
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
  const ChatMarks& marks = sequence_.chat.marks();
  const std::size_t text = instructions().size();
  return marks.document_open.size() + (text ? text + marks.instructions_close.size() : 0);
}

// True if the bytes of the document that each token spells are known.
bool Session::spells_document() const {
  const Turn turn = sequence_.turn == Turn::answer ? sequence_.document_turn : sequence_.turn;
  // removed blanks are known only if they were recorded
  const bool recorded =
      !model_->tokenizer().strips_after_special() || !sequence_.spelling.entries().empty();
  return turn == Turn::document && recorded;
}

uint64_t Session::opening_tokens() const {
  const uint64_t end =
      sequence_.turn == Turn::answer ? sequence_.document_tokens : sequence_.tokens.size();
  if (!spells_document()) return 0;
  const uint64_t begin =
      sequence_.spelling.token_at(model_->tokenizer(), sequence_.tokens, end, opening_bytes());
  return begin == end && sequence_.spelling.ends_unknown() ? 0 : begin;
}

// True if a rewind has left only a part of the opening, so that the next text does not follow it.
bool Session::is_within_opening() const {
  const std::size_t opening = opening_bytes();
  if (sequence_.turn != Turn::document || opening == 0) return false;
  const uint64_t end = sequence_.tokens.size();
  return sequence_.spelling.token_at(model_->tokenizer(), sequence_.tokens, end, opening - 1) ==
         end;
}

// Refuses text after a part of the instructions, which a rewind or the load of a prefix may leave.
Status Session::check_instructions() const {
  if (!sequence_.has_marks() || instructions().empty() || sequence_.is_composed()) return {};
  const ChatMarks& marks = sequence_.chat.marks();
  const bool has_document =
      sequence_.turn == Turn::document || sequence_.document_turn == Turn::document;
  const std::string_view close =
      has_document ? marks.instructions_close : marks.instructions_question();
  const uint64_t end = sequence_.tokens.size(),
                 bytes = marks.document_open.size() + instructions().size() + close.size();
  if (sequence_.spelling.token_at(model_->tokenizer(), sequence_.tokens, end, bytes - 1) < end)
    return {};
  return Status::error(Code::bad_state,
                       "the sequence ends within the instructions: rewind it to 0 tokens first");
}

// Updates turn, spelling and statistics by the prefilled tokens, also if a callback ends its
// thread.
class Session::Counting {
 public:
  // turn: of the sequence after at least one prefilled token.
  Counting(Session* session, Turn turn, const uint64_t* done)
      : session_(session), end_turn_(turn), done_(done), begin_ns_(os::now_ns()) {}
  ~Counting() {
    if (*done_ > 0) session_->sequence_.turn = end_turn_;
    session_->sequence_.spelling.cut(session_->sequence_.tokens.size());
    session_->prefill_tokens_ += *done_;
    session_->prefill_ns_ += os::now_ns() - begin_ns_;
  }

 private:
  Session* session_;
  Turn end_turn_;
  const uint64_t* done_;
  uint64_t begin_ns_;
};

// Removes an opening without text after it, also if a callback ends its thread.
class Session::Opening {
 public:
  // session: null if there is no opening to remove. bytes: of the opening. lengths: [tokens] bytes
  // that each token spells.
  Opening(Session* session, std::size_t bytes, std::span<const uint32_t> lengths, uint64_t* done)
      : session_(session), bytes_(bytes), lengths_(lengths), done_(done) {}
  ~Opening() {
    if (!session_ || bytes_done() > 0) return;
    try {
      if (session_->rewind(0).ok()) *done_ = 0;
    } catch (const std::bad_alloc&) {  // the sequence keeps what was prefilled
    }
  }
  void release() { session_ = nullptr; }
  uint64_t bytes_done() const {  // of the text
    uint64_t bytes = 0;
    for (std::size_t i = 0; i < *done_; ++i) bytes += lengths_[i];
    return bytes - std::min<uint64_t>(bytes, bytes_);
  }

 private:
  Session* session_;
  std::size_t bytes_;
  std::span<const uint32_t> lengths_;
  uint64_t* done_;
};

Status Session::prefill(std::string_view text, bool parse_special, const Cancel* cancel,
                        Progress::Report report, uint64_t* tokens_done, uint64_t* bytes_done) {
  *tokens_done = *bytes_done = 0;
  RETURN_IF_ERROR(refuse_composed("takes no more text: save it as a document and compose it too"));
  if (sequence_.turn == Turn::answer)
    return Status::error(
        Code::bad_state,
        "a conversation has begun: prefill the document before the first question");
  RETURN_IF_ERROR(check_instructions());
  const bool first = sequence_.turn == Turn::empty;
  Array<Token> tokens;
  Array<uint32_t> lengths;  // [tokens] bytes of marks and text that each spells
  RETURN_IF_ERROR(encode_document(text, parse_special, cancel, &tokens, &lengths));
  RETURN_IF_ERROR(check_room(tokens.size()));

  if (is_within_opening()) {
    sequence_.spelling.cut(0);
    sequence_.spelling.add_unknown(0);
  }
  Opening opening(first ? this : nullptr, first ? opening_bytes() : 0, lengths, tokens_done);
  Status s = prefill_document(tokens, lengths, cancel, std::move(report), tokens_done);
  *bytes_done = opening.bytes_done();
  if (s.ok()) opening.release();
  return s;
}

Status Session::prefill_document(std::span<const Token> tokens, std::span<const uint32_t> lengths,
                                 const Cancel* cancel, Progress::Report report,
                                 uint64_t* tokens_done) {
  *tokens_done = 0;
  RETURN_IF_ERROR(check_room(tokens.size()));
  RETURN_IF_ERROR(prefill_missing(cancel, report));
  const Counting counting(this, Turn::document, tokens_done);
  if (sequence_.turn == Turn::tokens) sequence_.spelling.add_unknown(0);
  sequence_.spelling.add(model_->tokenizer(),
                         sequence_.tokens.empty() ? -1 : sequence_.tokens.back(),
                         sequence_.tokens.size(), tokens, lengths);
  Progress progress(std::move(report));
  return append(
      {.tokens = tokens, .kind = TextKind::document, .cancel = cancel, .progress = &progress},
      tokens_done);
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
  RETURN_IF_ERROR(refuse_composed("takes no more text: save it as a document and compose it too"));
  RETURN_IF_ERROR(check_tokens(tokens));
  if (sequence_.turn == Turn::empty && !instructions().empty())
    return Status::error(Code::bad_state,
                         "the session has instructions: begin with kv_prefill or kv_generate");
  RETURN_IF_ERROR(check_room(tokens.size()));
  RETURN_IF_ERROR(prefill_missing(cancel, report));
  const Counting counting(this, sequence_.turn == Turn::empty ? Turn::tokens : sequence_.turn,
                          tokens_done);
  if (sequence_.turn == Turn::document) sequence_.spelling.add_unknown(sequence_.tokens.size());
  Progress progress(std::move(report));
  return append({.tokens = tokens,
                 .kind = TextKind::document,
                 .cancel = cancel,
                 .progress = &progress,
                 .all_logits = logits},
                tokens_done);
}

Status Session::check_has(uint64_t tokens) const {
  if (tokens <= sequence_.tokens.size()) return {};
  return Status::error(Code::bad_argument,
                       "cannot rewind to %" PRIu64 " tokens: the sequence has %zu; it is unchanged",
                       tokens, sequence_.tokens.size());
}

Status Session::rewind(uint64_t tokens) {
  RETURN_IF_ERROR(check_has(tokens));
  if (tokens == sequence_.tokens.size()) return {};
  RETURN_IF_ERROR(sequence_.store.check_file());
  uint64_t kept = std::min(tokens, sequence_.store.tokens());
  kept = sequence_.resume_point(kept);
  std::optional<KvStore> windows(sequence_.windows);
  std::optional<RecurrentState> states(sequence_.states);
  if (windows) RETURN_IF_ERROR(windows->rewind(kept, cpu_kernels()));
  if (states) RETURN_IF_ERROR(states->rewind(kept));
  if (kept < sequence_.store.tokens()) RETURN_IF_ERROR(sequence_.store.rewind(kept, cpu_kernels()));
  sequence_.windows = std::move(windows);
  sequence_.states = std::move(states);
  forget_behind(tokens);
  return {};
}

// Rewinds everything but the store, which the caller rewinds.
void Session::forget_behind(uint64_t tokens) {
  trace_.reset();
  sequence_.queries.rewind(tokens);
  if (tokens < sequence_.observed.queries.end()) forget_choice();
  sequence_.tokens.resize(tokens);
  sequence_.spelling.cut(tokens);
  sequence_.prefilled_tokens = std::min(sequence_.prefilled_tokens, tokens);
  sequence_.sparse_tokens = std::min(sequence_.sparse_tokens, tokens);
  sequence_.logits_at = 0;
  if (tokens < sequence_.document_logits_at) sequence_.document_logits_at = 0;
  const Array<float>& kept = sequence_.document_logits;
  if (tokens > 0 && tokens == sequence_.document_logits_at &&
      sequence_.logits.size() == kept.size()) {  // a copy without an allocation
    std::copy(kept.begin(), kept.end(), sequence_.logits.begin());
    sequence_.logits_at = tokens;
  }
  if (tokens == 0) sequence_.turn = sequence_.is_composed() ? sequence_.document_turn : Turn::empty;
  // the errors were measured in removed text
  if (sequence_.store.sealed_tokens() < sequence_.probed_at)
    sequence_.layer_errors.clear(), sequence_.probed_at = 0;
  if (sequence_.turn == Turn::answer && tokens <= sequence_.document_tokens)
    sequence_.turn = sequence_.document_turn;
  if (!sequence_.has_marks()) sequence_.chat = model_->chat();
}

Status Session::shorten(uint64_t tokens, const Cancel* cancel, Progress::Report report) {
  RETURN_IF_ERROR(check_has(tokens));
  const uint32_t pages = sequence_.store.pages_after(tokens);
  if (pages >= sequence_.store.pages().pages()) {  // all in the window
    RETURN_IF_ERROR(rewind(tokens));
  } else {
    forget_behind(tokens);
    RETURN_IF_ERROR(cut_stores(uint64_t{pages} * sequence_.store.shape().page.page_tokens, cancel));
  }
  return prefill_missing(cancel, std::move(report));
}

// Truncates the store of the layers that keep every token.
Status Session::cut_store(uint64_t kept) {
  KvStore& store = sequence_.store;
  const uint32_t page = store.shape().page.page_tokens;
  if (kept > store.sealed_tokens() || kept % page > 0) return store.rewind(kept, cpu_kernels());
  store.cut(static_cast<uint32_t>(kept / page));
  return {};
}

Status Session::cut_stores(uint64_t kept, const Cancel* cancel) {
  kept = sequence_.resume_point(kept);
  std::optional<KvStore> windows(sequence_.windows);
  std::optional<RecurrentState> states(sequence_.states);
  if (windows) RETURN_IF_ERROR(windows->rewind(kept, cpu_kernels()));
  if (states) RETURN_IF_ERROR(states->rewind(kept, cancel));
  RETURN_IF_ERROR(cut_store(kept));
  sequence_.windows = std::move(windows);
  sequence_.states = std::move(states);
  return {};
}

// The facts of a sequence whose newest tokens are prefilled again. The destructor restores the
// tokens that were not, and what only the tokens determine. Where the document ends does not
// change, though tokens of answers behind it are prefilled with it.
class Session::Again {
 public:
  Again(Session* session, uint64_t kept)
      : sequence_(session->sequence_), tokens_(sequence_.tokens), spelling_(sequence_.spelling),
        turn_(sequence_.turn), chat_(sequence_.chat), kept_(kept),
        prefilled_(sequence_.prefilled_tokens) {}
  ~Again() {
    sequence_.prefilled_tokens = prefilled_;
    sequence_.tokens = std::move(tokens_);
    sequence_.spelling = std::move(spelling_);
    sequence_.turn = turn_, sequence_.chat = chat_;
  }
  std::span<const Token> tokens() const { return std::span(tokens_).subspan(kept_); }
  uint64_t prefilled() const { return prefilled_; }

 private:
  SequenceState& sequence_;
  Array<Token> tokens_;
  Spelling spelling_;
  Turn turn_;
  Chat chat_;
  uint64_t kept_, prefilled_;
};

Status Session::prefill_missing(const Cancel* cancel, Progress::Report report) {
  if (sequence_.missing() == 0) return {};
  const uint64_t kept = sequence_.store.tokens();
  const Again again(this, kept);
  forget_behind(kept);
  Progress progress(std::move(report));
  uint64_t done = 0;
  Status s = append({.tokens = again.tokens(),
                     .kind = TextKind::document,
                     .cancel = cancel,
                     .progress = &progress,
                     .max_prefilled = again.prefilled()},
                    &done);
  prefilled_again_ += done;
  return s;
}

uint64_t Session::prefill_key(bool sparsely) const {
  std::string facts(reinterpret_cast<const char*>(model_->fingerprint().data()),
                    model_->fingerprint().size());
  const auto add = [&](const auto& value) {
    facts.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  add(options_.window);
  add(uint32_t{options_.full_precision});
  if (model_->has_long_ropes(options_.context)) facts += "longrope";
  if (sparsely) {
    add(sparse_version);
    facts += options_.read.strategy;
    add(options_.read.budget_fraction);
    add(options_.read.exact_tokens);
    if (strategy_info(options_.read.strategy)->has(StrategyInfo::filters))
      for (const uint32_t layer : options_.read.filter_layers) add(layer);
  }
  facts += instructions();
  return checksum(facts.data(), facts.size(), 0);
}

}  // namespace kvasir
