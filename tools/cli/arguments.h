// The parsed command line as plain values. Zero and empty mean the library's default.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "eval_tasks.h"
#include "kvasir_experimental.h"

namespace tool {

struct Console;

struct GlobalFlags {
  bool json = false;
  bool quiet = false;
  std::string command;  // all arguments, as given
};

struct ModelFlags {
  std::string path;
  std::string chat_format;
  std::string chat_format_file;  // its text in a file
  std::string device;            // empty: the CPU
  uint64_t device_memory = 0;    // bytes; 0: all free memory
  bool vocabulary_only = false;
  bool drafts = false;  // KV_PLAN_DRAFTS
};

struct Budget {  // at most one is not 0
  uint64_t tokens = 0;
  double fraction = 0;
};

struct SessionFlags {
  uint32_t threads = 0;
  uint64_t context_tokens = 0;
  uint32_t window_tokens = 0;
  uint32_t prefill_chunk = 0;
  uint32_t draft_tokens = 0;
  bool no_lookup = false;       // KV_NO_LOOKUP
  bool full_precision = false;  // KV_PRECISION_F32
  uint64_t memory_limit = 0;    // bytes
  std::string spill_directory;
  std::string instructions;       // the system text
  std::string instructions_file;  // the same, in a file; read_instructions() reads it

  // decode
  std::string strategy;  // empty: "auto"
  Budget budget;
  std::optional<uint32_t> dense_layers;
  bool separate_heads = false;
  kv_budget_schedule schedule = KV_BUDGET_UNIFORM;
  uint32_t search_breadth = 0;
  bool head_graphs = false;
  double coverage = 0;
  uint32_t select_tokens = 0;
  std::string filter_layers;   // "2,8,18"
  uint32_t filter_window = 0;  // kv_filter_window

  // prefill
  std::string prefill;  // empty: exact
  double prefill_budget = 0;
  uint64_t prefill_exact = 0;  // tokens
};

struct SourceFlags {
  std::string document;  // "-": standard input
  std::string cache;
  std::string save;
  bool force = false;
};

struct SamplingFlags {
  uint32_t max_tokens = 0;
  float temperature = 0;
  uint32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  uint64_t seed = 0;
  std::vector<std::string> stop;
  bool thinks = false;         // before it answers
  bool shows_thought = false;  // and the thought is printed
  uint32_t thinking_tokens = 0;
};

struct AskArguments {
  ModelFlags model;
  SourceFlags source;
  SessionFlags session;
  SamplingFlags sampling;
  uint32_t passages = 0;          // quoted under an answer
  std::string library;            // folder, all of whose documents are asked; "": none
  std::vector<std::string> only;  // of its documents, names or beginnings with *; none: all
  uint32_t max_documents = 0;     // that an answer attends; 0: as kv_compose_options
  std::vector<std::string> questions;
};

struct PrefillArguments {
  ModelFlags model;
  SourceFlags source;  // document, save, force
  SessionFlags session;
};

struct LibraryFlags {
  std::string folder;
  uint64_t max_bytes = 0;
};

struct LibraryListArguments {
  LibraryFlags library;
};

struct LibraryAddArguments {
  LibraryFlags library;
  ModelFlags model;
  SessionFlags session;
  std::string document;
  std::string name;      // empty: the document's file name
  bool replace = false;  // a document of that name
  bool verify = false;
};

struct LibraryAskArguments {
  LibraryAddArguments add;  // document may be empty: then the first of `words` is a name
  SamplingFlags sampling;
  uint32_t passages = 0;           // quoted under an answer
  std::vector<std::string> words;  // [NAME] and questions
};

struct LibraryChatArguments {
  LibraryAddArguments add;  // document may be empty: then document_name is given
  SamplingFlags sampling;
  std::string document_name;
};

struct LibraryRenameArguments {
  LibraryFlags library;
  std::string from, to;
};

struct LibraryRemoveArguments {
  LibraryFlags library;
  std::vector<std::string> names;
};

struct ChatArguments {
  ModelFlags model;
  SourceFlags source;
  SessionFlags session;
  SamplingFlags sampling;
  uint32_t passages = 0;  // as AskArguments, and so on
  std::string library;
  std::vector<std::string> only;
  uint32_t max_documents = 0;
};

struct FileArguments {
  std::string path;
};

struct PackArguments {
  std::string path;
  std::string output;
  uint32_t level = 0;
  bool force = false;
};

struct BenchArguments {
  ModelFlags model;
  SessionFlags session;  // without a strategy
  std::vector<uint64_t> depths = {0, 4096};
  uint64_t prompt = 512;
  uint64_t generate = 32;
  std::vector<std::string> strategies = {"full", "quest"};
  uint32_t repetitions = 3;
  std::string text;        // file of the tokens; empty: seeded random tokens
  bool synthetic = false;  // synthetic KV cache before the measured tokens
  uint64_t seed = 1;
  bool mapped = false;
  std::string folder;           // of the cache files of `mapped`
  std::string cache;            // saved document before the measured tokens; empty: none
  bool reuse = false;           // also the use of that file
  std::string compare;          // llama.cpp's llama-bench; empty: no comparison
  std::string compare_options;  // more of its options
};

struct NamedBudget {
  std::string name;  // as given; empty: none
  Budget value;
};

struct EvalArguments {
  ModelFlags model;
  SessionFlags session;  // without strategy and budget
  std::vector<std::string> texts;
  std::vector<Task> tasks;
  std::vector<uint64_t> lengths = {8192};  // tokens
  std::vector<std::string> strategies = {"all"};
  std::vector<NamedBudget> budgets;  // none: 1%, 2%, 5%
  uint32_t documents = 0;            // of each kind and length; 0: 2, of a collection 8
  uint32_t questions = 10;           // of each task per document
  uint32_t depths = 0;               // 0: 5
  uint64_t seed = 1;
  std::vector<std::string> ways;  // to ask a collection; none: all
  uint32_t attend = 0;            // documents of a collection that an answer attends
  uint64_t retrieve = 0;          // tokens of passages before a question; 0: 1024
  std::string work = "kvasir-eval";
  std::string output;  // empty: results.json in the work folder
  bool force = false;
};

struct RecallArguments {
  ModelFlags model;
  SourceFlags source;
  SessionFlags session;  // without strategy and budget
  std::vector<std::string> strategies = {"all"};
  std::vector<NamedBudget> budgets;
  uint32_t steps = 128;  // tokens at the document's end that are decoded one at a time
  std::vector<std::string> questions;
  std::string output = "recall.json";
};

struct CalibrateArguments {
  ModelFlags model;
  SessionFlags session;  // threads
  std::vector<std::string> texts;
  uint64_t length = 8192;
  uint32_t questions = 2;  // of each task
  uint32_t filters = 0;    // filter layers; 0: as many as the library's default
  uint64_t seed = 1;
  std::string output;  // empty: next to the model
  bool force = false;
};

struct TokenizeArguments {
  ModelFlags model;
  std::string file;
  bool special = false;
  bool bos = false;
};

struct LogitsArguments {
  ModelFlags model;
  SessionFlags session;
  std::string tokens;
  std::string output;
  bool force = false;
};

struct Invocation {
  GlobalFlags global;
  std::function<void(Console&)> command;  // empty: print `text` and end
  std::string text;                       // of --help, --version and describe
};

// Throws Failure(exit_usage).
Invocation parse_arguments(int count, const char* const* values);

}  // namespace tool
