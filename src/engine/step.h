// A step of the forward pass: what the caller asks for, and what its executors share.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "attention/request.h"
#include "attention/trace.h"
#include "backend/kernels.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/status.h"
#include "select/graph/index_build.h"
#include "select/plan.h"
#include "store/kv_store.h"
#include "store/recurrent_state.h"
#include "text/tokenizer.h"

namespace kvasir {

struct ForwardStep {
  std::span<const Token> tokens;       // 1 to the chunk size that the caller chose
  const Selector* selector = nullptr;  // null: every layer is exact
  Plan plan;                           // dense layers and budget, where there is a selector
  StepMemory* memory = nullptr;        // the selector's own, where it has one
  RecentQueries* queries = nullptr;    // where set, receives the step's newest queries
  IndexQueries* asked = nullptr;       // where set, receives the step's queries,
  uint32_t asked_at = 0;               // from this token on
  Trace* trace = nullptr;              // where set, receives what the last token attends
  // Documents before the sequence, first to last; on CPUs only.
  std::span<const AttendedDocument> documents;
  // Where set, its documents are scored in its layers, by the queries of this step.
  DocumentScores* scores = nullptr;
  uint64_t follows = 0;  // tokens of the text after the step
  enum class Logits { none, last, all } want = Logits::none;
  float* logits = nullptr;   // [vocabulary] or [tokens][vocabulary]
  float* hidden = nullptr;   // where set, [tokens][width]: what the output matrix multiplies
  bool last_hidden = false;  // `hidden` and the logits are of the last token alone
  // Where set, [logits_wanted()] become the tokens with the largest of these logits where a GPU
  // finds them; the logits are not written then. The first one is -1: they are.
  Token* best = nullptr;
  std::span<const Token> never_best;  // tokens that it is not
  // Of a model of one layer: only keys and values are wanted, so that nothing is attended.
  bool keys_only = false;
  const float* inputs = nullptr;  // where set, [tokens][width] in place of the embeddings
  // Tokens that the next step is likely to have: a GPU may get their embeddings ahead.
  std::span<const Token> next;
  // Where set, is called before the commit and says how many tokens stay, 1 to all: the first ones.
  // An error ends the step as any other. A step of which not all may stay names it and has at most
  // max_open_tokens.
  std::function<Status(uint32_t* kept)> accept;
  bool open = false;  // not all tokens may stay
  const Cancel* cancel = nullptr;

  // Where set, layers of a prefill on a GPU are added to it while later ones are computed.
  // It may have pages of earlier steps. The step has at least RecentQueries::capacity tokens. Of a
  // span: its layers are added after their last chunk.
  KeySketch::Build* sketch = nullptr;

  // A span: its tokens go through a layer in chunks of so many, all of them before they go through
  // the next layer. 0: no span. Only where Forward::span_tokens() allows it.
  uint32_t chunk = 0;
  // Of a span: is called after each chunk of a layer; false: the span is cancelled.
  std::function<bool(uint64_t done, uint64_t all)> progress;
  // Of a span, where set: is called at its end, before the commit, with `hidden` of n tokens from
  // `first` on, of all of them in order. An error ends the span as any other.
  std::function<Status(uint32_t first, uint32_t n, const float* hidden)> take_hidden;

  // Where set, probe_tokens of the first probe_span tokens also go through this selector, by this
  // plan. errors[layer] receives the relative L2 error of its attention. The result of an exact
  // step is the same. In a sparse step these tokens attend every token, and where a CPU attends, so
  // do all tokens. Of a span: of its first chunk.
  const Selector* probe = nullptr;
  Plan probe_plan;
  uint32_t probe_tokens = 0, probe_span = 0;
  float* errors = nullptr;  // [layers]

  // The most tokens of a step that may end before its last one. They have the bits of one token
  // alone each.
  static constexpr uint32_t max_open_tokens = 16;
  static constexpr uint32_t max_device_open_tokens = 8;  // where GPUs have layers

  uint32_t size() const { return static_cast<uint32_t>(tokens.size()); }
  // Tokens at the end of the step whose logits are wanted.
  uint32_t logits_wanted() const {
    return want == Logits::all ? size() : want == Logits::last ? 1 : 0;
  }
  uint32_t hidden_wanted() const { return !hidden ? 0 : last_hidden ? 1 : size(); }
};

// What a step appends to, all of them with the same tokens.
struct StepStores {
  KvStore& store;                    // of the layers whose queries see every token
  KvStore* windows = nullptr;        // of the layers whose queries see a window; null: none
  RecurrentState* states = nullptr;  // of the recurrent layers; null: none
};

// What the executors of a step share. It lives as long as the step.
struct StepContext {
  const ForwardStep& step;
  const CancelLatch& cancel;  // once it has fired, results are meaningless
  KvStore& store;             // of the layers whose queries see every token
  KvStore* windows;           // of the layers whose queries see a window, or null
  RecurrentState* states;     // of the recurrent layers, or null
  ThreadPool* pool;
  float* x = nullptr;                          // [tokens][width] residual stream, between executors
  const float *cos = nullptr, *sin = nullptr;  // [RoPE sets][tokens][rope dim / 2]
  uint32_t gpus = 0;                           // GPUs that have layers
  const float* layer_inputs = nullptr;         // LayerInputs::get()
  bool is_pinned = false;                      // x, cos and sin are in pinned memory
  // Of each document, then of each scored one: cos, then sin, [angles of the model] by which
  // queries are turned.
  const float* turns = nullptr;
  // Where set, other work of the CPU, for while a GPU computes: may be called any number of times.
  const std::function<void()>* meanwhile = nullptr;

  uint32_t tokens() const { return step.size(); }
  // Of the first token, with the documents before the sequence.
  uint64_t position() const {
    return store.tokens() + (step.documents.empty() ? 0 : step.documents.front().tokens_before);
  }
  // Whether a CPU attends every token, in all layers.
  bool attends_everything() const { return !step.selector || lacks_sketch() || step.probe; }
  // No sketch is made for a sparse prefill by GPUs. If one lacks room, the CPU attends every token.
  bool lacks_sketch() const {
    return step.plan.by_blocks && step.plan.strategy->has(StrategyInfo::needs_sketch) &&
           !store.sketch().built();
  }
  // Of the step's products. An open step has the method of one token.
  ProductMethod product_method() const {
    return step.open ? ProductMethod::few : ProductMethod::by_count;
  }
};

}  // namespace kvasir
