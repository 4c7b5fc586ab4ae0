// Documents of evaluations: each is prefilled once, into a cache file of the work folder. An
// interrupt saves the finished part.
#pragma once

#include <functional>
#include <string>

#include "eval_progress.h"
#include "sessions.h"

namespace tool {

// The model and what of the command line a prefill depends on, for names and keys.
std::string model_identity_of(Console& console, const ModelFlags& flags, kv_model* model);
std::string prefill_identity_of(const SessionFlags& flags);
// The flags of a strategy and a budget.
SessionFlags eval_flags(const SessionFlags& flags, const std::string& strategy,
                        const Budget& budget = {});

// A text that questions are asked over.
struct EvalDocument {
  const std::string& name;  // of its cache file, without .kv
  std::string label;        // for the progress line
  uint64_t tokens = 0;      // about
  const std::string& text;
};

class EvalDocuments {
 public:
  struct Parts {
    Console& console;
    kv_model* model = nullptr;
    std::string folder;
    SessionFlags flags;  // of prefill
    Estimate& estimate;  // expects prefill_cost(tokens) of each document
    EvalProgress& progress;
    std::function<void()> stopped;  // called after an interrupt: throws
  };
  explicit EvalDocuments(Parts parts) : p_(std::move(parts)) {}

  std::string path_of(const std::string& name) const { return p_.folder + "/" + name + ".kv"; }
  void prefill(const EvalDocument& document);
  // A session over a document that was prefilled.
  Session load(const std::string& name, const SessionFlags& flags);
  // Prefills a text and reports its progress. Returns the number of tokens; *interrupted instead of
  // a call of `stopped`.
  uint64_t append(kv_session* session, std::string_view text, uint64_t before, bool* interrupted);
  // Builds what the strategy needs. Throws.
  void prepare(kv_session* session);

 private:
  Session resume(const EvalDocument& document, size_t* bytes, uint64_t* tokens);

  Parts p_;
};

}  // namespace tool
