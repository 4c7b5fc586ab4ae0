// The state of a sequence: tokens, KV cache, turns, and data for later steps.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "engine/step.h"
#include "model/model.h"
#include "select/plan.h"
#include "session/drafter.h"
#include "session/spelling.h"
#include "store/kv_store.h"
#include "store/recurrent_state.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace kvasir {

// Kind of text at the end of a sequence; it determines the marks of the next text. Values are
// persisted.
enum class Turn : uint32_t { empty = 0, tokens = 1, document = 2, answer = 3 };

// Checkpoints of a sequence at most, as many as its memory has room for. Windows and states have
// them at the same positions. budget: bytes of the sequence; 0: no limit.
uint32_t choose_checkpoints(const Model& model, uint32_t window_tokens, uint64_t budget);
// Bytes that checkpoints may take, where the pages of layers that keep all tokens take page_bytes:
// 15% of them, or 192 MiB if that is more. So a file of a long document is not much larger.
uint64_t checkpoint_room(uint64_t page_bytes);
// How many of `most` checkpoints a sequence of so many tokens has before its end: as many as have
// room, and at least one.
uint32_t checkpoints_of(const Model& model, uint32_t window_tokens, uint64_t tokens, uint32_t most);
// Tokens of prefill between two of them.
uint64_t choose_checkpoint_interval(const Model& model);

// An empty store of the model's layers that see a window; nothing: it has none.
std::optional<KvStore> make_windows(const Model& model, uint32_t window_tokens,
                                    uint32_t checkpoints);
// The state of a sequence without tokens of a model's recurrent layers; nothing: it has none.
std::optional<RecurrentState> make_states(const ModelConfig& config, uint32_t checkpoints);

struct Composition;

// What a sequence attends of the documents before it.
struct ComposedState {
  std::shared_ptr<const Composition> documents;  // null: the sequence has all of its text
  std::vector<uint32_t> candidates;              // documents that answers may attend, ascending
  std::vector<uint32_t> chosen;                  // that the newest step attends, ascending
  std::vector<float> scores;                     // [candidates] of the last choice, or empty
  uint64_t tokens = 0;                           // of the chosen ones
  bool is_apart = false;                         // false: the only document is the sequence itself
  // [chosen] passages that the running answer prefills again, behind the documents; empty: none.
  std::vector<PageRange> passages = {};
};

// A fork is a copy that shares the pages; both write only their own tails.
struct SequenceState {
  SequenceState(const ModelConfig& config, Chat turns, KvStore kv, std::optional<KvStore> windowed,
                std::optional<RecurrentState> recurrent)
      : store(std::move(kv)), windows(std::move(windowed)), states(std::move(recurrent)),
        queries(config.layers, config.heads, config.head_dim), chat(std::move(turns)) {}

  bool has_marks() const { return turn == Turn::document || turn == Turn::answer; }
  bool has_logits() const { return logits_at == tokens.size() && logits_at > 0; }

  // Tokens that take positions of the context: its own, and those of chosen documents.
  uint64_t positions() const { return composed.tokens + tokens.size(); }
  bool is_composed() const { return composed.documents != nullptr && composed.is_apart; }

  StepStores stores() {
    return {store, windows ? &*windows : nullptr, states ? &*states : nullptr};
  }
  // Where the document ends, for the checkpoints.
  uint64_t document_end() const {
    return prefilled_tokens > 0 ? prefilled_tokens : CheckpointLimits::none;
  }
  // The last position <= `tokens` at which windows and states can go on after a rewind.
  uint64_t resume_point(uint64_t tokens) const;
  // Tokens that the stores lack, because windows or states could not follow a rewind: they are
  // prefilled again before the next step.
  uint64_t missing() const { return tokens.size() - store.tokens(); }
  KvStore* windows_or_null() { return windows ? &*windows : nullptr; }
  const KvStore* windows_or_null() const { return windows ? &*windows : nullptr; }

  KvStore store;
  std::optional<KvStore> windows;  // of the layers that see a window; as many tokens as `store`
  std::optional<RecurrentState> states;  // of the recurrent layers; as many tokens as `store`
  std::optional<DraftState> drafts;      // of the MTP layer; nothing: the session does not draft
  RecentQueries queries;                 // of the newest tokens; empty in full precision
  // The queries by which a strategy that chooses once has selected: those at the end of the
  // prefill. Set from the first selection until the next prefill.
  struct Observed {
    RecentQueries queries;
    uint32_t pages = 0;  // sealed then
  } observed;

  Array<Token> tokens;
  Spelling spelling;  // of tokens
  Turn turn = Turn::empty;
  Chat chat;                         // of the turns; the model's if there are none yet
  uint64_t document_tokens = 0;      // tokens before the conversation, if turn is answer
  Turn document_turn = Turn::empty;  // turn of these tokens, which rewind restores

  Array<float> logits;     // after the last token, valid if logits_at == tokens.size()
  uint64_t logits_at = 0;  // tokens before these logits
  // Those at the end of the document, of a model with recurrent layers: no token can be taken out
  // of a state to compute them again.
  Array<float> document_logits;
  uint64_t document_logits_at = 0;

  Array<float> layer_errors;      // [layers] largest of all probes (layer_probe.h); may be empty
  uint64_t probed_at = 0;         // sealed tokens at the last probe
  uint64_t prefilled_tokens = 0;  // tokens before the first token of an answer
  ComposedState composed;         // documents before the first token
  uint64_t sparse_tokens = 0;     // length up to the last token of a sparse prefill
};

}  // namespace kvasir
