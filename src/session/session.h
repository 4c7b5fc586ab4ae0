// A session: one sequence of tokens, its keys and values, and the operations on it.
//
// Every operation either completes or leaves the sequence as it was, except that a prefill keeps
// whole chunks. Not thread-safe; src/api serialises calls.
//
//   session.cc   open, fork, options             answer.cc   questions and answers
//   steps.cc     chunks of tokens, their plans   score.cc    likelihood of given tokens
//   prefill.cc   documents; going back           save.cc, load.cc
//   prepare.cc   sketch, index, choices          stats.cc
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
#include "session/answer_stream.h"
#include "session/decode_strategy.h"
#include "session/layer_probe.h"
#include "session/sampler.h"
#include "session/saved_store.h"
#include "session/sequence.h"
#include "session/session_stats.h"
#include "session/spelling.h"
#include "store/kv_store.h"

namespace kvasir {

class ExternalStore;

using LogFn = std::function<void(int level, const char* message)>;  // 1 warning, 2 information

struct SessionOptions {
  uint32_t threads = 0;         // 0: CPUs of the process
  uint64_t context = 0;         // tokens; 0: the model's
  bool full_precision = false;  // nothing is sealed
  uint32_t window = 64;         // tokens
  uint32_t prefill_chunk = 0;   // tokens; 0: chosen
  SelectOptions select;
  CompareLevel compare = CompareLevel::none;
  ReadOptions read;
  MemoryBudget memory;
  // The system text before the document. Nothing: none, or the loaded file's.
  std::optional<std::string> instructions;
  LogFn log;
};

struct GenerateOptions {
  uint32_t max_tokens = 512;
  SamplingOptions sampling;
  bool keep = false;
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
  uint64_t question_tokens = 0, answer_tokens = 0;
  uint64_t first_token_ns = 0, total_ns = 0;
  ReadCounts read;
};

// Neighbouring tokens of the document, and the bytes of its text that they spell.
struct Passage {
  uint64_t first = 0, tokens = 0;
  uint64_t first_byte = UINT64_MAX, bytes = 0;  // UINT64_MAX: unknown
  double share = 0;                             // of all recorded attention
};

class Session {
 public:
  static Status open(std::shared_ptr<const Model> model, const SessionOptions& options,
                     std::unique_ptr<Session>* out);
  // Verifies the whole file first if verify is set. Loads the first `tokens` tokens; 0: all.
  // prefill_progress: of tokens that are prefilled again. Codes as kv_load_prefix.
  static Status load(std::shared_ptr<const Model> model, const std::string& path,
                     SessionOptions options, bool verify, const Cancel* cancel,
                     Progress::Report progress, std::unique_ptr<Session>* out, uint64_t tokens = 0,
                     Progress::Report prefill_progress = {});
  // A session over the pages of a cache that another engine has filled with these tokens, of this
  // model. The newest tokens are prefilled again. Codes as kv_session_from_cache.
  struct Adopted {
    bool document = false;  // the tokens are those of encode_document()
    bool compared = true;   // tokens that are prefilled again must equal those of the cache
  };
  static Status adopt(std::shared_ptr<const Model> model, ExternalStore& cache,
                      std::span<const Token> tokens, SessionOptions options, Adopted how,
                      const Cancel* cancel, Progress::Report progress,
                      std::unique_ptr<Session>* out);
  Status fork(std::unique_ptr<Session>* out) const;

  Status prefill(std::string_view text, bool parse_special, const Cancel* cancel,
                 Progress::Report progress, uint64_t* tokens_done, uint64_t* bytes_done);
  // The tokens that prefill() would append to an empty sequence. lengths: [tokens] bytes of marks
  // and text of each, or null.
  static Status encode_first(const Model& model, ChatFormat chat, std::string_view text,
                             bool parse_special, const Cancel* cancel, Array<Token>* out,
                             Array<uint32_t>* lengths, std::string_view instructions = {});
  // The same for this sequence.
  Status encode_document(std::string_view text, bool parse_special, const Cancel* cancel,
                         Array<Token>* out, Array<uint32_t>* lengths) const;
  // Prefills tokens of encode_document(), all or those from some point on. lengths: [tokens] as
  // encode_document() has them.
  Status prefill_document(std::span<const Token> tokens, std::span<const uint32_t> lengths,
                          const Cancel* cancel, Progress::Report progress, uint64_t* tokens_done);
  bool in_document() const { return sequence_.turn == Turn::document; }
  ChatFormat chat() const { return sequence_.chat; }
  // The system text of the sequence; empty: none.
  std::string_view instructions() const;
  bool prefills_sparsely() const { return options_.read.strategy != "full"; }
  // A hash of all that keys and values depend on besides the tokens: model, window, precision and
  // the prefill strategy.
  uint64_t prefill_key(bool sparsely) const;
  // logits: [tokens][vocabulary] or null.
  Status prefill_tokens(std::span<const Token> tokens, float* logits, const Cancel* cancel,
                        Progress::Report progress, uint64_t* tokens_done);
  Status generate(std::string_view question, const GenerateOptions& options, const TextFn& on_text,
                  Answer* answer);
  Status next(const SamplingOptions& sampling, const Cancel* cancel, Token* token, bool* end);
  // log_probabilities: [tokens], written when all are known.
  Status score(std::span<const Token> tokens, float* log_probabilities, const Cancel* cancel,
               Progress::Report progress, Progress::Report prepare_progress = {});
  Status rewind(uint64_t tokens);
  // Goes back to the first `tokens` tokens and to the state that their prefill leaves: pages stay,
  // and the tokens behind them are prefilled again. After a failure the session must be closed.
  Status shorten(uint64_t tokens, const Cancel* cancel, Progress::Report progress);
  // Makes what the strategy needs besides the pages: a sketch, an index. Afterwards no answer waits
  // for it.
  Status prepare(const Cancel* cancel, Progress::Report progress);
  // Makes what GPUs need to attend. Otherwise answers make it little by little.
  Status prepare_devices(const Cancel* cancel, Progress::Report report);
  // Makes the strategy's index first, as prepare() does, if the memory budget has room for it.
  Status save(const std::string& path, const Cancel* cancel, Progress::Report progress,
              Progress::Report prepare_progress = {},
              const AtomicFile::BeforeRename& before_rename = {});
  const SelectOptions& select() const { return options_.select; }
  Status set_select(const SelectOptions& select);

  // Passages whose queries make an index of keys. They come evenly from the whole sequence, each as
  // a question with the beginning of an answer, with marks. All have one size and together at most
  // `count` tokens; there is at least one. The sequence has 32 tokens or more.
  Status asked_passages(uint32_t count, std::vector<Array<Token>>* out) const;

  std::span<const Token> tokens() const { return sequence_.tokens; }
  const Model& model() const { return *model_; }
  const KvStore& store() const { return sequence_.store; }
  SessionStats stats() const;
  std::string stats_json() const;
  // Sets what decode measures from now on.
  void set_measure(CompareLevel compare, bool certify);
  // Passages of the last generate(), the largest share first. Code::bad_state: it was not traced,
  // or the sequence has changed since.
  Status passages(std::vector<Passage>* out) const;

 private:
  struct Restore;  // puts the sequence back unless released
  struct Tracing;  // records what an answer attends
  class Counting;  // keeps account of prefill, however it ends
  class Opening;   // takes back an opening without a text

  Session(std::shared_ptr<const Model> model, const SessionOptions& options,
          SequenceState sequence);
  static Status resolve(const Model& model, SessionOptions* options);
  Status start();
  void log(int level, const char* message) const;

  // ---- steps (steps.cc) ------------------------------------------------------------------------
  // A document is attended exactly or as its prefill strategy says, an answer by the decode
  // strategy. A question is attended as an answer, or exactly where the strategy chooses once.
  enum class TextKind { document, question, answer };
  struct AppendRequest {
    std::span<const Token> tokens;
    TextKind kind;
    const Cancel* cancel = nullptr;
    Progress* progress = nullptr;
    float* all_logits = nullptr;  // [tokens][vocabulary]
  };
  // Runs tokens at the end of the sequence, in chunks. Complete chunks stay, whatever stops it;
  // *done counts their tokens.
  Status append(const AppendRequest& request, uint64_t* done);
  Status append_chunks(const AppendRequest& request, uint64_t* done);
  Status plan_chunk(const AppendRequest& request, uint64_t done, ForwardStep* step,
                    Array<float>* errors);
  void note_chunk(const AppendRequest& request, const ForwardStep& step);
  Status append_token(Token token, const Cancel* cancel);
  Status plan_prefill(ForwardStep* step, uint64_t left, const Cancel* cancel);
  void plan_step(ForwardStep* step);
  Plan next_plan() const;
  static bool batches_queries(const ForwardStep& step);
  Status refresh_logits(const Cancel* cancel);
  RecentQueries* recorded_queries() {
    return options_.full_precision ? nullptr : &sequence_.queries;
  }
  Status check_room(uint64_t more) const;
  Status check_tokens(std::span<const Token> tokens) const;

  // ---- prefill and going back (prefill.cc) -----------------------------------------------------
  // Takes back the newest `count` tokens and prefills them: whole pages and what is behind them,
  // or a part of what is not sealed.
  Status prefill_newest_again(uint64_t count, const Cancel* cancel, Progress::Report report);
  Status check_has(uint64_t tokens) const;
  void forget_behind(uint64_t tokens);
  // Bytes, and tokens, of marks and instructions before the document's text.
  std::size_t opening_bytes() const;
  uint64_t opening_tokens() const;
  bool is_within_opening() const;
  bool spells_document() const;

  // ---- what a strategy needs besides keys and values (prepare.cc) ------------------------------
  Status build_sketch(const Cancel* cancel);
  Status finish_sketch(const Cancel* cancel);
  bool sketch_is_due() const;
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
  Status question_tokens(std::string_view question, bool parse_special, const Cancel* cancel,
                         Array<Token>* out) const;
  Status answer_loop(const GenerateOptions& options, const TextFn& on_text, uint64_t begin_ns,
                     Answer* answer);
  Status make_room(uint64_t question, uint64_t answer, const Cancel* cancel);

  // ---- saved sequences (load.cc) ---------------------------------------------------------------
  Status use_chat(const ChatRecord& record, const char* path);
  Status load_spelling(const CacheFile& file, const SectionFacts& facts);
  Status load_observed(const CacheFile& file, const SectionFacts& facts, const Cancel* cancel);
  Status load_optional(const CacheFile& file, const SavedSequence& state, const Cancel* cancel);

  std::shared_ptr<const Model> model_;
  SessionOptions options_;
  std::shared_ptr<ThreadPool> pool_;  // of the session and its forks
  std::unique_ptr<Forward> forward_;
  SequenceState sequence_;
  Array<float> next_logits_;  // of the step that runs: it may fail

  DecodeStrategy decode_;
  LayerProbe probe_;
  std::unique_ptr<const Selector> prefill_selector_;  // of a sparse prefill
  // the log says that the index has other graphs than the options
  bool graphs_logged_ = false;

  std::unique_ptr<Trace> trace_;  // of the last answer, where it was traced
  bool tracing_ = false;          // while it is made

  // For stats.
  struct Decoded {
    ReadCounts read;
    uint64_t steps = 0, ns = 0;
  } last_;  // of the last generate(), score() or next()
  uint64_t prefill_tokens_ = 0, prefill_ns_ = 0;
  uint64_t load_ns_ = 0;
  uint64_t index_ns_ = 0;  // that making the last index took,
  NearestBy nearest_by_;   // and what found its nearest keys
};

}  // namespace kvasir
