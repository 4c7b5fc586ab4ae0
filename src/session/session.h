// A session: one sequence of tokens, its KV cache, and the operations on it.
//
// An operation completes or leaves the sequence unchanged; only prefill keeps complete chunks. Not
// thread-safe; src/api serialises calls.
//
//   session.cc   open, fork, options             answer.cc   questions and answers
//   steps.cc     chunks of tokens, their plans   thought.cc  thoughts before answers
//   drafts.cc    drafts of an answer's tokens    drafter.cc  the MTP layer that makes them
//   lookup.cc    the text that makes them        score.cc    log-probabilities of given tokens
//   prefill.cc   documents, rewind               save.cc, load.cc
//   compose.cc   several saved documents         choose.cc   which of them an answer attends
//   saved_composition.cc   such a session in a file
//   prepare.cc   sketch, index, selections       stats.cc
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/status.h"
#include "engine/forward.h"
#include "model/model.h"
#include "select/graph/index_build.h"
#include "select/plan.h"
#include "session/answer.h"
#include "session/decode_strategy.h"
#include "session/draft_pace.h"
#include "session/drafter.h"
#include "session/layer_probe.h"
#include "session/lookup.h"
#include "session/saved_store.h"
#include "session/sequence.h"
#include "session/session_stats.h"
#include "session/spelling.h"
#include "store/kv_store.h"

namespace kvasir {

class ExternalStore;
class GivenCheckpoint;
struct ComposedDocument;
struct DocumentsToLoad;
struct FileStamp;
struct SavedSequence;

using LogFn = std::function<void(int level, const char* message)>;  // 1 warning, 2 information

struct SessionOptions {
  uint32_t threads = 0;              // 0: CPUs of the process
  uint64_t context = 0;              // tokens; 0: the model's
  bool full_precision = false;       // nothing is sealed
  uint32_t window = 64;              // tokens
  uint32_t prefill_chunk = 0;        // tokens; 0: chosen
  uint64_t span_tokens = 0;          // of Forward::force_spans(); 0: chosen
  uint64_t checkpoint_interval = 0;  // tokens of prefill between two checkpoints; 0: chosen
  SelectOptions select;
  CompareLevel compare = CompareLevel::none;
  ReadOptions read;
  uint32_t draft_tokens = 0;  // that the MTP layer drafts for a step of an answer; 0: none
  static constexpr uint32_t max_lookup_tokens = ForwardStep::max_open_tokens - 1;
  uint32_t lookup_tokens = max_lookup_tokens;  // drafted by lookup at most; 0: none
  bool drafts_always = false;  // whether or not drafts pay; only tests and measurements have a use
  uint64_t (*clock)() = nullptr;  // nanoseconds, by which drafts pay; null: os::now_ns()
  MemoryBudget memory;
  bool drafts_left_out = false;  // set by the session: there is no room for those of the MTP layer
  // The system text before the document. Nothing: none, or the loaded file's.
  std::optional<std::string> instructions;
  LogFn log;
};

class Session {
 public:
  static Status open(std::shared_ptr<const Model> model, const SessionOptions& options,
                     std::unique_ptr<Session>* out);
  // Loads the first `tokens` tokens of a file; 0: all. verify: verifies the whole file first.
  // prefill_progress: for the tokens that are prefilled again. Codes as kv_load_prefix.
  static Status load(const std::shared_ptr<const Model>& model, const std::string& path,
                     SessionOptions options, bool verify, const Cancel* cancel,
                     Progress::Report progress, std::unique_ptr<Session>* out, uint64_t tokens = 0,
                     Progress::Report prefill_progress = {});
  // Is called for a file that cannot be used, and says whether it is left out.
  using LeavesOut = std::function<bool(const std::string& path, const Status& why)>;
  struct ComposeRequest {
    std::span<const std::string> paths;
    uint32_t most = 0;
    const Cancel* cancel = nullptr;
    LeavesOut leaves_out;  // in the order of the paths, once all were opened; null: none is
  };
  // Creates a session over saved documents, which are mapped: nothing is copied or prefilled. One
  // document: as load(). most: documents that an answer attends; 0: up to 8. Codes as
  // kv_session_compose.
  static Status compose(const std::shared_ptr<const Model>& model, const ComposeRequest& request,
                        const SessionOptions& options, std::unique_ptr<Session>* out);
  // Replaces the documents of a composed session. The sequence after them stays.
  Status replace_documents(std::span<const std::string> paths, const Cancel* cancel);
  // Limits later answers to these documents, ascending; none: all.
  Status set_candidates(std::span<const uint32_t> documents);
  // Code::bad_state: the session was not composed. Code::not_found: it has fewer documents.
  Status document(std::size_t index, DocumentReport* out) const;
  std::vector<DocumentReport> documents() const;
  std::span<const Token> document_tokens(std::size_t index) const;  // of document()
  // Creates a session that shares the pages of a cache. Another engine has filled the cache with
  // these tokens of this model. The newest tokens are prefilled again. Codes as
  // kv_session_from_cache.
  struct Adopted {
    bool document = false;  // the tokens are those of encode_document()
    bool compared = true;   // keys of tokens prefilled again must equal those of the cache
    // Of a model with windows or recurrent layers: what they keep at an earlier token, from which
    // the rest is prefilled again, and at the end, to be compared (null: it is not).
    const GivenCheckpoint *from = nullptr, *end = nullptr;
  };
  static Status adopt(std::shared_ptr<const Model> model, ExternalStore& cache,
                      std::span<const Token> tokens, SessionOptions options, Adopted how,
                      const Cancel* cancel, Progress::Report progress,
                      std::unique_ptr<Session>* out);
  Status fork(std::unique_ptr<Session>* out);

  Status prefill(std::string_view text, bool parse_special, const Cancel* cancel,
                 Progress::Report progress, uint64_t* tokens_done, uint64_t* bytes_done);
  // Computes the tokens that prefill() would append to an empty sequence. lengths: [tokens] bytes
  // of marks and text that each token spells, or null.
  static Status encode_first(const Model& model, const Chat& chat, std::string_view text,
                             bool parse_special, const Cancel* cancel, Array<Token>* out,
                             Array<uint32_t>* lengths, std::string_view instructions = {});
  // The same for this sequence.
  Status encode_document(std::string_view text, bool parse_special, const Cancel* cancel,
                         Array<Token>* out, Array<uint32_t>* lengths) const;
  // Prefills tokens of encode_document(): all, or a suffix. lengths: [tokens] of the same call.
  Status prefill_document(std::span<const Token> tokens, std::span<const uint32_t> lengths,
                          const Cancel* cancel, Progress::Report progress, uint64_t* tokens_done);
  bool in_document() const { return sequence_.turn == Turn::document; }
  const Chat& chat() const { return sequence_.chat; }
  // The system text of the sequence; empty: none.
  std::string_view instructions() const;
  bool prefills_sparsely() const { return options_.read.strategy != "full"; }
  // A hash of everything besides the tokens that determines keys and values: model, window,
  // precision and prefill strategy.
  uint64_t prefill_key(bool sparsely) const;
  // logits: [tokens][vocabulary] or null.
  Status prefill_tokens(std::span<const Token> tokens, float* logits, const Cancel* cancel,
                        Progress::Report progress, uint64_t* tokens_done);
  Status generate(std::string_view question, const GenerateOptions& options, const TextFn& on_text,
                  Answer* answer);
  // Drafts of later answers, in place of all others: appends at most `count` tokens that may follow
  // `next`. match: LookupMatch::length of the next step; none: the longest.
  using DraftFn = std::function<void(Token next, uint32_t count, Array<Token>* out)>;
  void draft_by(DraftFn propose, std::function<uint32_t()> match = {}) {
    propose_ = std::move(propose), proposed_match_ = std::move(match);
  }
  Status next(const SamplingOptions& sampling, const Cancel* cancel, Token* token, bool* end);
  // log_probabilities: [tokens], written only on success.
  Status score(std::span<const Token> tokens, float* log_probabilities, const Cancel* cancel,
               Progress::Report progress, Progress::Report prepare_progress = {});
  // Windows and recurrent states that cannot follow are prefilled again by the next step, save or
  // prepare().
  Status rewind(uint64_t tokens);
  // Rewinds to the first `tokens` tokens, in the state after their prefill: keeps their complete
  // pages, as far as the windows can follow, and prefills the tokens after these again. After a
  // failure the session must be closed.
  Status shorten(uint64_t tokens, const Cancel* cancel, Progress::Report progress);
  // Builds the strategy's sketch, representatives and index, so that no answer waits for them.
  Status prepare(const Cancel* cancel, Progress::Report progress);
  // Uploads the data that GPUs attend. Otherwise answers upload it incrementally.
  Status prepare_devices(const Cancel* cancel, Progress::Report report);
  // First builds the strategy's index, as prepare() does, if the memory budget has room for it.
  Status save(const std::string& path, const Cancel* cancel, Progress::Report progress,
              Progress::Report prepare_progress = {},
              const AtomicFile::BeforeRename& before_rename = {});
  const SelectOptions& select() const { return options_.select; }
  Status set_select(const SelectOptions& select);

  // Makes the passages from whose queries an index is built, evenly spread over the sequence. Each
  // is a question and the beginning of its answer, with marks. There is at least one. All have the
  // same size, and together at most `count` tokens. The sequence must have at least 32 tokens.
  Status question_passages(uint32_t count, std::vector<Array<Token>>* out) const;

  std::span<const Token> tokens() const { return sequence_.tokens; }
  const Model& model() const { return *model_; }
  const std::shared_ptr<const Model>& shared_model() const { return model_; }
  const KvStore& store() const { return sequence_.store; }
  const KvStore* windows() const { return sequence_.windows_or_null(); }  // null: none
  SessionStats stats() const;
  std::string stats_json() const;
  // Sets the measurements of all later decode.
  void set_measure(CompareLevel compare, bool certify);
  // Passages of the last generate(), the largest share first. Code::bad_state: it was not traced,
  // or the sequence has changed since.
  Status passages(std::vector<Passage>* out) const;

 private:
  struct Restore;  // restores the sequence in its destructor unless released
  struct Tracing;  // records the attention of an answer
  class Counting;  // counts tokens and time of a prefill, also of a failed one
  class Opening;   // removes an opening without a text

  Session(std::shared_ptr<const Model> model, const SessionOptions& options,
          SequenceState sequence);
  static Status resolve(const Model& model, SessionOptions* options);
  Status start(const Cancel* cancel = nullptr);
  void log(int level, const char* message) const;

  // ---- steps (steps.cc) ------------------------------------------------------------------------
  // A document uses the prefill strategy, an answer the decode strategy. A question uses the decode
  // strategy too, or exact attention if that strategy chooses once.
  enum class TextKind { document, question, answer };
  struct AppendRequest {
    std::span<const Token> tokens;
    TextKind kind;
    const Cancel* cancel = nullptr;
    Progress* progress = nullptr;
    float* all_logits = nullptr;  // [tokens][vocabulary]
    // Where set, `tokens` is a token of an answer and drafts after it, all of one step. Is called
    // with what follows token i, 0 first, until one is not followed by the next: the tokens up to
    // it stay. best: as ForwardStep has it, or the logits count.
    const std::function<bool(std::span<float> logits, Token best, uint32_t i)>* goes_on = nullptr;
    bool greedy = false;  // where a GPU finds what is best, the logits stay there
    // What prefilled_tokens becomes at most: tokens of an answer may be prefilled again.
    uint64_t max_prefilled = UINT64_MAX;
  };
  // Runs tokens at the end of the sequence, in chunks. After an error or a cancel, complete chunks
  // stay; *done counts their tokens.
  Status append(const AppendRequest& request, uint64_t* done);
  Status append_chunks(const AppendRequest& request, uint64_t* done);
  Status plan_chunk(const AppendRequest& request, uint64_t done, ForwardStep* step,
                    Array<float>* errors);
  void plan_span(const AppendRequest& request, uint64_t done, ForwardStep* step);
  void note_logits(Token best);
  Status run_step(const AppendRequest& request, ForwardStep* step);
  Status run_open_step(const AppendRequest& request, ForwardStep* step);
  Status run_span_step(ForwardStep* step);
  void note_chunk(const AppendRequest& request, const ForwardStep& step);
  void keep_checkpoint(const AppendRequest& request, uint64_t left);
  Status keep_document();
  void limit_checkpoints(uint64_t left);
  Status append_token(Token token, const Cancel* cancel, bool greedy = false);
  bool has_best() const { return best_ >= 0 && best_at_ == sequence_.tokens.size(); }
  void fetch_logits();
  Status plan_prefill(ForwardStep* step, uint64_t left, const Cancel* cancel);
  void plan_step(ForwardStep* step);
  Plan next_plan() const;
  static bool batches_queries(const ForwardStep& step);
  // report: of the tokens that a model with states prefills again.
  Status refresh_logits(const Cancel* cancel, Progress::Report report);
  RecentQueries* recorded_queries() {
    return options_.full_precision ? nullptr : &sequence_.queries;
  }
  Status check_room(uint64_t more) const;
  Status check_tokens(std::span<const Token> tokens) const;
  Status check_has_tokens() const;

  // ---- prefill and rewind (prefill.cc) ---------------------------------------------------------
  // Truncates the stores to `kept` tokens, or to the last position before it from which windows and
  // states can go on. The tokens stay, to be prefilled again by prefill_missing().
  Status cut_stores(uint64_t kept, const Cancel* cancel);
  Status cut_store(uint64_t kept);
  Status prefill_missing(const Cancel* cancel, Progress::Report report);
  class Again;
  Status check_has(uint64_t tokens) const;
  void forget_behind(uint64_t tokens);
  // Bytes and tokens of the marks and instructions before the document's text.
  std::size_t opening_bytes() const;
  uint64_t opening_tokens() const;
  bool is_within_opening() const;
  Status check_instructions() const;
  bool spells_document() const;

  // ---- sequences of other engines (adopt.cc) ---------------------------------------------------
  Status begin_again(const KvStore& given, const GivenCheckpoint* from, const Cancel* cancel);
  Status check_adopted(const KvStore& given, uint64_t again, const Adopted& how,
                       const Cancel* cancel);

  // ---- sketch, representatives, index and single selection of a strategy (prepare.cc) ----------
  Status build_sketch(const Cancel* cancel);
  Status finish_sketch(const Cancel* cancel);
  bool sketch_is_due(uint64_t more = 0) const;
  void plan_sketch(KeySketch::Build* sketch, ForwardStep* step) const;
  Status prepare_strategy(const Cancel* cancel, Progress* progress);
  Status prefill_again(const Cancel* cancel, Progress* progress);
  bool chooses_once() const;
  Status choose_once(const Cancel* cancel);
  void forget_choice() { sequence_.observed = {}, decode_.set_chosen(false); }
  Status prepare_index(bool make, const Cancel* cancel, Progress* progress);
  Status make_room_for_index(IndexKind kind, uint64_t bytes, const Cancel* cancel);
  struct IndexRequest {
    IndexKind kind;
    uint32_t graphs;
    const TokenIndexes::Entry& known;
    const Cancel* cancel;
    Progress* progress;
  };
  Status make_index(const IndexRequest& request, std::shared_ptr<TokenIndex>* out);
  Status collect_queries(uint32_t count, uint64_t steps, const Cancel* cancel, Progress* progress,
                         IndexQueries* out);

  // ---- answers (answer.cc) ---------------------------------------------------------------------
  struct TokenRange {
    std::size_t begin = 0, end = 0;
  };
  // A question with the marks of its turn, up to the answer.
  struct AskedTurn {
    ThinkingMarks marks;
    Array<Token> tokens;
    Array<Token> kept;  // in place of `tokens` and a thought once the answer is complete, if any
    uint64_t passage_tokens = 0;  // of them, before the question's marks (repeated_passages.cc)
  };
  // The answer that is being decoded.
  struct AnswerState {
    Sampler sampler;
    const TextFn& on_text;
    uint64_t begin_ns;
    Answer* answer;
    uint64_t passage_tokens = 0;  // of the sequence, its first ones: no text of the conversation
  };
  Status question_tokens(std::string_view question, const GenerateOptions& options,
                         std::string_view lead, Array<Token>* out,
                         TokenRange* asked = nullptr) const;
  Status ask(std::string_view question, const GenerateOptions& options, AskedTurn* turn);
  Status answer_turn(AskedTurn* turn, const GenerateOptions& options, AnswerState* state);
  Status answer_loop(const GenerateOptions& options, AnswerState* state);
  // What follows a token that was sampled: another one, or nothing, with the token appended or not.
  enum class Next { token, end_after, end_before };
  using TakeFn = std::function<Next(Token)>;
  // Samples tokens and appends them until `take` ends it.
  Status decode(const GenerateOptions& options, AnswerState* state, const TakeFn& take);
  Status decode_step(const GenerateOptions& options, AnswerState* state, const TakeFn& take,
                     Token* token, Next* next);
  Status decode_timed(const GenerateOptions& options, AnswerState* state, const TakeFn& take,
                      Token* token, Next* next);
  Status sample(const GenerateOptions& options, AnswerState* state, std::span<float> logits,
                Token best, Token* token);
  Status sample_next(const GenerateOptions& options, AnswerState* state, Token* token);
  static void note_sampled(AnswerState* state);
  bool takes_largest(const SamplingOptions& sampling) const;
  bool knows_next(const SamplingOptions& sampling) const;

  // ---- drafts (drafts.cc) ----------------------------------------------------------------------
  struct Lookup {
    LookupMatch match;
    DraftPace::Offer offer;
  };
  Status draft(const Cancel* cancel, Array<Token>* tokens);
  Status draft_by_source(uint32_t room, const Cancel* cancel, Array<Token>* tokens);
  DraftsOff why_left_out() const {
    return no_drafter_room_ ? DraftsOff::device_memory : DraftsOff::memory;
  }
  Status or_without_drafts(Status s, bool* lost);
  void drop_drafts();
  bool may_draft() const { return drafter_ || propose_ || options_.lookup_tokens > 0; }
  DraftsOff why_no_drafts() const;
  uint32_t draft_room() const;
  uint32_t lookup_room(uint32_t room) const;
  Lookup look_up(Token next, uint32_t room);
  DraftPace::Choice choose_drafts(const DraftPace::Offer& offer) const;
  static Status set_budget(SessionOptions* o, const std::function<Status()>& set);
  Status fit_drafts(const std::function<Status()>& fit);
  Token answer_end() const;
  void begin_conversation(uint64_t tokens_before);
  Status make_room(uint64_t question, uint64_t answer, const Cancel* cancel);
  static Status answer_stopped();

  // ---- thoughts (thought.cc) -------------------------------------------------------------------
  Status think(const GenerateOptions& options, const ThinkingMarks& marks, AnswerState* state);
  Status append_marks(std::string_view marks, const Cancel* cancel, Answer* answer);
  Status replace_turn(Restore* before, std::span<const Token> tokens, const Cancel* cancel);

  // ---- documents before the sequence (compose.cc, choose.cc) ------------------------------------
  static Status check_composed_strategy(const SelectOptions& select);
  static Status check_composable(const Model& model, const SessionOptions& options);
  Status add_documents(std::span<const std::string> paths, const Cancel* cancel,
                       const LeavesOut& leaves_out, Composition* to);
  Status add_document(const std::string& path, const FileStamp& stamp,
                      std::unique_ptr<Session> document, Composition* to);
  Status limit_documents(Composition* documents, uint64_t limit, const Cancel* cancel);
  // saved_composition.cc
  Status save_documents(const std::string& path, Array<std::byte>* out) const;
  Status load_documents(const DocumentsToLoad& to);
  Status restore_choice(const DocumentsToLoad& to, std::shared_ptr<const Composition> documents);
  struct KeptTurns;
  Status map_documents(std::span<const std::string> paths, const Cancel* cancel,
                       std::shared_ptr<Composition>* out);
  struct Choice {
    std::span<const Token> turn;  // a question with its marks
    TokenRange question;          // of them
    uint64_t more;                // tokens after it
    const Cancel* cancel;
  };
  void take_back_choice(const ComposedState& before);
  Status choose_documents(const Choice& choice, std::vector<PageRange>* passages);
  struct Ranking {
    std::vector<uint32_t> order;   // documents, the best first
    std::vector<float> evidence;   // [documents of the composition], 0 of those without
    std::vector<uint32_t> blocks;  // [same] b of the evidence
    bool stands_out = false;       // the best one's is enough
  };
  struct Scoring;
  Status begin_scoring(const Choice& choice, std::span<const uint32_t> documents,
                       const Selector* estimates, Scoring* out) const;
  Status score_question(const Choice& choice, bool sees, DocumentScores* scores);
  Status rank_documents(const Choice& choice, bool sees, Ranking* ranking);
  Status fit_documents(std::span<const uint32_t> order, uint32_t most, uint64_t own, bool logs,
                       std::vector<uint32_t>* out) const;
  Status find_documents(const Choice& choice, uint64_t own, Ranking* ranking);
  std::vector<PageRange> passages_of(const Ranking& ranking) const;
  // repeated_passages.cc
  void insert_passages(std::vector<PageRange> passages, uint64_t more, AskedTurn* turn);
  void end_passages(bool were_prefilled);
  void keep_without_prefill(Restore* before, std::span<const Token> tokens);
  bool all_fit(std::span<const uint32_t> documents, uint64_t own) const;
  void attend(std::vector<uint32_t> documents);
  void plan_documents();
  void fill_documents(bool traced, bool batches, ForwardStep* step);
  Status refuse_composed(const char* what) const;
  Status check_measure() const;
  void trace_documents();
  void add_documents(SessionStats* stats) const;
  Status add_document_passages(std::vector<Passage>* out) const;
  void add_passages(const Trace& trace, Trace::Scale of, std::vector<Passage>* out) const;

  // ---- saved sequences (save.cc, load.cc) ------------------------------------------------------
  Status prepare_save(const std::string& path, const Cancel* cancel, Progress* progress);
  Status complete_drafts(const Cancel* cancel, std::optional<DraftState>* out);
  Status load_saved_drafts(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                           const Cancel* cancel);
  Status use_chat(const ChatRecord& record, const char* path);
  Status load_spelling(const CacheFile& file, const SectionFacts& facts);
  Status load_observed(const CacheFile& file, const SectionFacts& facts, const Cancel* cancel);
  Status load_last_step(const CacheFile& file, const SavedSequence& state, const Cancel* cancel);
  Status load_optional(const CacheFile& file, const SavedSequence& state, const Cancel* cancel);
  // A mapped file: a session that cannot run before start().
  struct MappedFile;
  struct MapRequest;
  static Status open_checked(const Model& model, const MapRequest& request, SessionOptions* options,
                             CachePeek* peek, MappedFile* out);
  static Status map_file(const std::shared_ptr<const Model>& model, const MapRequest& request,
                         SessionOptions options, MappedFile* out);
  Status map_document(const std::string& path, const Cancel* cancel, MappedFile* out) const;
  Status load_text(const CacheFile& file, const SavedSequence& state, const ChatRecord& chat,
                   const Cancel* cancel);

  std::shared_ptr<const Model> model_;
  SessionOptions options_;
  std::shared_ptr<ThreadPool> pool_;  // shared by the session and its forks
  std::unique_ptr<Forward> forward_;
  std::unique_ptr<Drafter> drafter_;  // of the MTP layer, or null
  DraftFn propose_;                   // draft_by(), or nothing
  std::function<uint32_t()> proposed_match_;
  SequenceState sequence_;
  Array<float> next_logits_;  // of the running step; kept apart because it may fail
  // The token with the largest logit after the last one, found by a GPU, and the number of tokens
  // before it; -1: none. The GPU keeps the logits until its next step.
  Token best_ = -1;
  uint64_t best_at_ = 0;
  Array<float> open_logits_;  // of a step with drafts

  DecodeStrategy decode_;
  LayerProbe probe_;
  std::unique_ptr<const Selector> prefill_selector_;  // of a sparse prefill
  bool graphs_logged_ = false;  // logged that the index has other graphs than the options

  std::unique_ptr<Trace> trace_;  // of the last answer; null if it was not traced
  bool tracing_ = false;          // the running answer is traced

  // Of the chosen documents of a composed session: what steps attend, and its parts.
  std::vector<AttendedDocument> attended_;
  std::vector<Plan> document_plans_;
  std::vector<std::unique_ptr<const Selector>> document_selectors_;
  std::vector<Trace> document_traces_;      // of the last answer, if it was traced
  std::vector<uint32_t> traced_documents_;  // [document_traces_.size()]
  bool documents_planned_ = false;

  // For stats.
  struct Decoded {
    ReadCounts read;
    uint64_t steps = 0, ns = 0;
  } last_;                        // of the last generate(), score() or next()
  bool no_device_room_ = false;   // for steps of this answer with drafts
  bool no_drafter_room_ = false;  // on the GPU: drafts_left_out follows from that
  DraftCounts drafts_;            // of the last generate()
  DraftPace pace_;
  DraftPace::Offer offer_;     // of the running step: whose drafts it has, or that it passes over
  uint32_t scans_passed_ = 0;  // steps that go without a lookup's scan
  Token passed_ = -1;          // the first draft of an offer that the step passes over; -1: none
  uint64_t prefill_tokens_ = 0, prefill_ns_ = 0;
  uint64_t prefilled_again_ = 0;
  uint64_t spans_ = 0, span_tokens_ = 0;
  uint64_t load_ns_ = 0;
  uint64_t index_ns_ = 0;  // time of the last index build
  NearestBy nearest_by_;   // devices that found its nearest keys, and why
};

}  // namespace kvasir
