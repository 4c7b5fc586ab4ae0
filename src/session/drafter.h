// Drafts tokens of an answer by the model's MTP layer (model/mtp.h).
//
// The layer has a KV cache of its own. Its row of a token follows from the token and from what the
// output matrix multiplied for the token before. Rows that are not computed yet are pending; they
// are computed together, when there are many, at the end of a document or a question, or before a
// draft. Of one layer keys and values follow from the row alone: nothing is attended but for the
// newest row, when there is a draft.
//
// It is computed where MtpLayer is: on the CPU, or on the GPU that has the model's output. On a GPU
// a draft reads tokens that a sketch of the keys chooses (`bounded`). It is found at the end of a
// document, or by the first draft.
//
//   tokens   0 | first ........ end() ........ next_row()
//              | rows in `store` | pending
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"
#include "engine/cpu_products.h"
#include "engine/forward.h"
#include "model/mtp.h"
#include "select/selector.h"
#include "session/sampler.h"
#include "store/kv_store.h"

namespace kvasir {

// The MTP layer's part of a sequence. A copy is that of a fork.
struct DraftState {
  explicit DraftState(KvStore kv) : store(std::move(kv)) {}

  uint64_t end() const { return first + store.tokens(); }
  uint64_t next_row() const { return end() + tokens.size(); }
  bool knows_last(std::size_t width) const { return hidden.size() > tokens.size() * width; }

  uint64_t private_bytes() const {
    return store.private_bytes() + hidden.size() * sizeof(float) + tokens.size() * sizeof(Token);
  }

  KvStore store;
  uint64_t first = 1;   // the token of its first row; token 0 has none
  Array<Token> tokens;  // of pending rows
  // [tokens][width] of the token before each; then that of the newest token, where it is known.
  Array<float> hidden;
  Token ahead = -1;  // the newest row's token, which a draft computed before the sequence had it
};

class Drafter {
 public:
  static constexpr uint32_t max_tokens = 3;  // of a draft

  // selects: there is memory for a sketch. Code::unsupported, Code::corrupt: as MtpLayer::open().
  // Code::cancelled.
  static Status create(const std::shared_ptr<const Model>& model, uint64_t context, bool selects,
                       ThreadPool* pool, std::unique_ptr<Drafter>* out,
                       const Cancel* cancel = nullptr);

  // The shape of what the MTP layer of a model keeps.
  static StoreShape shape_of(const Model& model);
  // Of a sequence of `tokens` tokens whose rows nobody has.
  DraftState make_state(uint64_t tokens, uint32_t window_tokens) const;

  // Prepares a step of the model at the end of a sequence of `at` tokens: cuts rows that the
  // sequence has no more, and makes room. Throws std::bad_alloc; Code::corrupt.
  Status begin_step(uint64_t at, DraftState* state, ForwardStep* step);
  // Before the commit of such a step, of which the first `kept` tokens stay. Errors of a forward
  // pass; then the state has no row of them.
  Status end_step(const ForwardStep& step, uint32_t kept, DraftState* state);
  // In place of both, of tokens that follow a sequence of `at` tokens, all of which stay. hidden:
  // [tokens][width]. Errors as for both; then the state is of no use.
  Status take(uint64_t at, const ForwardStep& tokens, const float* hidden, DraftState* state);
  // After a step that computed the sequence's last token again. hidden: [width].
  void note_last(uint64_t tokens, std::span<const float> hidden, DraftState* state);

  // Appends at most `count` tokens that may follow `next`, which follows the sequence's last token.
  // None where what the layer needs of that token is unknown. Errors of a forward pass.
  Status draft(uint64_t at, Token next, uint32_t count, const Cancel* cancel, DraftState* state,
               Array<Token>* out);
  // At the end of a document: finds the sketch that drafts and those of forks will want. Without
  // memory for it the first draft tries again. Code::cancelled.
  Status finish(const Cancel* cancel, DraftState* state) {
    Status s = find_sketch(cancel, &state->store);
    return s.code() == Code::no_memory ? Status() : std::move(s);
  }
  // Computes the pending rows of a sequence of `at` tokens, as far as they are known. Errors of a
  // forward pass.
  Status complete(uint64_t at, const Cancel* cancel, DraftState* state);
  // "cpu", or the GPU that has the layer; why it is the former though the model is on GPUs.
  std::string device_names() const { return mtp_->device_names(); }
  const std::string& why_cpu() const { return mtp_->why_cpu; }
  // What takes time once: graphs that were recorded, sketches that were found, steps that pinned
  // pages.
  uint64_t preparations() const { return forward_->recordings() + sketches_ + pinning_; }
  // By which the last token of a draft was chosen: [vocabulary], unless a GPU has chosen it.
  std::span<const float> logits() const { return logits_; }
  // For tests: logits come from a GPU, and the CPU chooses by them.
  void choose_on_cpu() { chooses_on_cpu_ = true; }

 private:
  Drafter(std::shared_ptr<const MtpLayer> mtp, bool selects, ThreadPool* pool);
  struct Rows {
    std::span<const Token> tokens;
    const float* hidden;
    bool drafts =
        false;  // the last row leaves best_ or logits_, and last_; otherwise none is attended
  };
  Status run(const Rows& rows, const Cancel* cancel, KvStore* store);
  bool on_gpu() const { return !mtp_->layer.device_weights().empty(); }
  Status find_sketch(const Cancel* cancel, KvStore* store);
  void join(const Rows& rows);
  void plan(const KvStore& store, ForwardStep* step);
  Status compute_pending(const Cancel* cancel, DraftState* state);
  Status cut(uint64_t at, DraftState* state) const;

  std::shared_ptr<const MtpLayer> mtp_;
  ThreadPool* pool_;
  std::unique_ptr<Forward> forward_;
  CpuProducts products_;
  Sampler sampler_;
  const bool selects_;
  std::unique_ptr<const Selector> selector_;
  uint64_t sketches_ = 0, pinning_ = 0;
  Token best_ = -1;  // of the last row, where a GPU has found it
  bool chooses_on_cpu_ = false;
  uint64_t at_ = 0;        // tokens before the step that begin_step() prepared
  uint32_t capacity_ = 0;  // rows that the workspace holds
  Buffer<float> joined_;   // [n][2 * width]
  Buffer<float> inputs_;   // [n][width]
  Buffer<float> hidden_;   // [n][width] of a step of the model
  uint32_t hidden_capacity_ = 0;
  Array<float> logits_, last_;  // [vocabulary], [width]
};

}  // namespace kvasir
