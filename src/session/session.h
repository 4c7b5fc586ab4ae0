// A session: one sequence of tokens, its keys and values, and what is done with it.
//
// Every operation either completes or leaves the sequence as it was, except that reading a document
// keeps whole chunks. Not thread-safe; src/api lets one call in at a time.
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
#include "session/sampler.h"
#include "session/saved_store.h"
#include "session/session_stats.h"
#include "session/spelling.h"
#include "store/kv_store.h"

namespace kvasir {

class ExternalStore;

using LogFn = std::function<void(int level, const char* message)>;  // 1 warning, 2 information

struct SessionOptions {
  uint32_t threads = 0;         // 0: processors of the process
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
  Progress::Report progress;  // while the question is read
  // while what the strategy needs is made, where the sequence does not have it
  Progress::Report prepare_progress;
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

// Returns non-zero to stop.
using TextFn = std::function<int(std::string_view text)>;

class Session {
 public:
  static Status open(std::shared_ptr<const Model> model, const SessionOptions& options,
                     std::unique_ptr<Session>* out);
  // Checks the whole file first when verify is set. Of the first `tokens` tokens alone, 0: of all;
  // `reading` tells of those that are read again. Codes as kv_load_prefix.
  static Status load(std::shared_ptr<const Model> model, const std::string& path,
                     SessionOptions options, bool verify, const Cancel* cancel,
                     Progress::Report progress, std::unique_ptr<Session>* out, uint64_t tokens = 0,
                     Progress::Report reading = {});
  // Over the pages of a cache that another engine has filled with these tokens, of this model; the
  // newest ones are read again. Codes as kv_session_from_cache.
  struct Adopted {
    bool document = false;  // the tokens are what encode_document() makes of a text
    bool compared = true;   // what is read again has to be what the cache has
  };
  static Status adopt(std::shared_ptr<const Model> model, ExternalStore& cache,
                      std::span<const Token> tokens, SessionOptions options, Adopted how,
                      const Cancel* cancel, Progress::Report progress,
                      std::unique_ptr<Session>* out);
  Status fork(std::unique_ptr<Session>* out) const;

  Status prefill(std::string_view text, bool parse_special, const Cancel* cancel,
                 Progress::Report progress, uint64_t* tokens_done, uint64_t* bytes_done);
  // The tokens that prefill() would read into a sequence that is empty, and the bytes of marks and
  // text that each stands for (null: not asked).
  static Status encode_first(const Model& model, ChatFormat chat, std::string_view text,
                             bool parse_special, const Cancel* cancel, Array<Token>* out,
                             Array<uint32_t>* lengths, std::string_view instructions = {});
  // The same for this sequence.
  Status encode_document(std::string_view text, bool parse_special, const Cancel* cancel,
                         Array<Token>* out, Array<uint32_t>* lengths) const;
  // Prefills tokens of encode_document(), all or those from some point on. lengths: [tokens] as
  // encode_document() has them.
  Status read_document(std::span<const Token> tokens, std::span<const uint32_t> lengths,
                       const Cancel* cancel, Progress::Report progress, uint64_t* tokens_done);
  bool in_document() const { return turn_ == Turn::document; }
  ChatFormat chat() const { return chat_; }
  // The system text of the sequence; empty: none.
  std::string_view instructions() const;
  bool reads_sparsely() const { return options_.read.strategy != "full"; }
  // A hash of all that keys and values depend on besides the tokens: model, window and precision,
  // and how it reads sparsely, or that it does not.
  uint64_t reading_key(bool sparsely) const;
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
  // Goes back to the first `tokens` tokens and to the state in which reading them leaves a
  // sequence: pages stay where they are, the tokens behind them are read again into the window.
  // After a failure the session is of no use but to be closed.
  Status shorten(uint64_t tokens, const Cancel* cancel, Progress::Report progress);
  // Makes now what the strategy needs beside the pages and the sequence does not have: a sketch, an
  // index. Afterwards no answer waits for it.
  Status prepare(const Cancel* cancel, Progress::Report progress);
  // And what devices need to attend, which answers otherwise make little by little.
  Status prepare_devices(const Cancel* cancel, Progress::Report report);
  // Makes the strategy's index first, as prepare() does; where the budget has no room for it,
  // without.
  Status save(const std::string& path, const Cancel* cancel, Progress::Report progress,
              Progress::Report prepare_progress = {},
              const AtomicFile::BeforeRename& before_rename = {});
  const SelectOptions& select() const { return options_.select; }
  Status set_select(const SelectOptions& select);

  // What is read to make an index of keys from its queries: passages of the sequence, evenly from
  // all of it, each as a question with the beginning of an answer, with their marks, all of one
  // size and together at most `count` tokens, but at least one. The sequence has 32 tokens or more.
  Status asked_passages(uint32_t count, std::vector<Array<Token>>* out) const;

  std::span<const Token> tokens() const { return tokens_; }
  const Model& model() const { return *model_; }
  const KvStore& store() const { return store_; }
  SessionStats stats() const;
  std::string stats_json() const;
  // What decode measures from now on.
  void set_measure(CompareLevel compare, bool certify);
  // Of the last generate(), the largest share first. Code::bad_state: it was not traced, or the
  // sequence has changed since.
  Status passages(std::vector<Passage>* out) const;

 private:
  // What the end of the sequence is, so that the next text gets the right marks. Values are
  // persisted.
  enum class Turn : uint32_t { empty = 0, tokens = 1, document = 2, answer = 3 };
  struct Restore;      // puts the sequence back unless told to keep it
  struct Tracing;      // notes what an answer attends
  class AnswerStream;  // tokens to whole characters, with stop strings held back
  class Counting;      // keeps account of what is read, however reading ends

  Session(std::shared_ptr<const Model> model, const SessionOptions& options, KvStore store);
  static Status resolve(const Model& model, SessionOptions* options);

  Status start();
  enum class Reading { document, question, answer };
  Status append(std::span<const Token> tokens, Reading reading, float* all_logits,
                const Cancel* cancel, Progress* progress, uint64_t* done);
  Status append_chunks(std::span<const Token> tokens, Reading reading, float* all_logits,
                       const Cancel* cancel, Progress* progress, uint64_t* done);
  // Takes back the newest `count` tokens and reads them: whole pages and what is behind them, or a
  // part of what is not sealed.
  Status read_newest_again(uint64_t count, const Cancel* cancel, Progress::Report report);
  Status check_has(uint64_t tokens) const;
  void forget_behind(uint64_t tokens);
  void plan_step(ForwardStep* step);
  Plan next_plan() const;
  static bool asks_together(const ForwardStep& step);
  bool probe_is_due() const;
  void plan_probe(ForwardStep* step, Array<float>* errors);
  Status plan_read(ForwardStep* step, uint64_t left, const Cancel* cancel);
  void note_probe(const Array<float>& errors);
  Status build_sketch(const Cancel* cancel);
  Status finish_sketch(const Cancel* cancel);
  bool sketch_is_due() const;
  Status prepare_strategy(const Cancel* cancel, Progress* progress);
  Status read_again(const Cancel* cancel, Progress* progress);
  bool chooses_once() const;
  Status choose_once(const Cancel* cancel);
  void forget_choice() { observed_ = {}, chosen_ = false; }
  Status prepare_index(bool make, const Cancel* cancel, Progress* progress);
  Status make_room_for_index(IndexKind kind, uint64_t bytes, const Cancel* cancel);
  Status make_index(IndexKind kind, uint32_t graphs, const TokenIndexes::Entry& known,
                    const Cancel* cancel, Progress* progress, std::shared_ptr<TokenIndex>* out);
  Status read_queries(uint32_t count, uint64_t steps, const Cancel* cancel, Progress* progress,
                      IndexQueries* out);
  Status question_tokens(std::string_view question, bool parse_special, const Cancel* cancel,
                         Array<Token>* out) const;
  Status answer_loop(const GenerateOptions& options, const TextFn& on_text, uint64_t begin_ns,
                     Answer* answer);
  RecentQueries* recorded_queries() { return options_.full_precision ? nullptr : &queries_; }
  Status check_room(uint64_t more) const;
  Status make_room(uint64_t question, uint64_t answer, const Cancel* cancel);
  Status check_tokens(std::span<const Token> tokens) const;
  Status refresh_logits(const Cancel* cancel);
  Status use_chat(const ChatRecord& record, const char* path);
  // Bytes of marks and instructions before the document's text.
  std::size_t opening_bytes() const;
  // Tokens of marks and instructions before the document's text.
  uint64_t opening_tokens() const;
  bool spells_document() const;
  bool has_marks() const { return turn_ == Turn::document || turn_ == Turn::answer; }
  Status load_spelling(const CacheFile& file, const SectionFacts& facts);
  Status load_observed(const CacheFile& file, const SectionFacts& facts, const Cancel* cancel);
  Status load_optional(const CacheFile& file, const SavedSequence& state, const Cancel* cancel);
  void log(int level, const char* message) const;

  std::shared_ptr<const Model> model_;
  SessionOptions options_;
  std::shared_ptr<ThreadPool> pool_;          // of the session and its forks
  std::unique_ptr<const Selector> selector_;  // of the strategy planned last,
  std::unique_ptr<StepMemory> memory_;        // and its own, where it has one
  std::unique_ptr<Forward> forward_;
  KvStore store_;
  RecentQueries queries_;  // of the sequence's newest tokens, where pages are sealed
  // What a strategy that chooses once chose by: the queries of the end of what was read, from its
  // first choice on until something is read again.
  struct Observed {
    RecentQueries queries;
    uint32_t pages = 0;  // sealed then
  } observed_;
  bool chosen_ = false;  // memory_ holds that choice
  // that an index is searched whose graphs are not those that were asked for
  bool graphs_logged_ = false;
  Array<Token> tokens_;
  Spelling spelling_;  // of tokens_
  Turn turn_ = Turn::empty;
  ChatFormat chat_;               // of the turns; where there are none yet the model's
  uint64_t document_tokens_ = 0;  // where the conversation began, once turn_ is answer,
  // and what the sequence ended in there: going back restores it
  Turn document_turn_ = Turn::empty;
  Array<float> logits_;  // after the last token, valid where logits_at_ == tokens_.size()
  uint64_t logits_at_ = 0;
  Array<float> next_logits_;  // of the step that runs: it may fail

  Array<float> layer_errors_;  // [layers] largest of all probes, empty before the first
  uint64_t probed_at_ = 0;     // sealed tokens then
  std::unique_ptr<const Selector> probe_selector_;
  std::unique_ptr<const Selector> read_selector_;  // where documents are read sparsely

  std::unique_ptr<Trace> trace_;  // of the last answer, where it was traced
  bool tracing_ = false;          // while it is made

  // For stats.
  Plan plan_;
  bool planned_ = false;
  ReadCounts last_read_;     // of the last generate or next
  uint64_t last_steps_ = 0;  // tokens decoded by it
  uint64_t last_decode_ns_ = 0;
  uint64_t prefill_tokens_ = 0, prefill_ns_ = 0;
  // of the sequence, those before the first that was not read as a document is: an answer's
  uint64_t read_tokens_ = 0;
  uint64_t sparse_tokens_ = 0;  // of the sequence, up to the last one that was read sparsely
  uint64_t load_ns_ = 0;
  uint64_t index_ns_ = 0;  // that making the last index took,
  NearestBy nearest_by_;   // and who looked for what it is made from
};

}  // namespace kvasir
