// The state of a sequence: tokens, keys and values, turns, and what later steps need of them.
#pragma once

#include <cstdint>
#include <utility>

#include "base/memory.h"
#include "model/config.h"
#include "select/plan.h"
#include "session/spelling.h"
#include "store/kv_store.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace kvasir {

// What the end of a sequence is, so that the next text gets the right marks. Values are persisted.
enum class Turn : uint32_t { empty = 0, tokens = 1, document = 2, answer = 3 };

// A fork is a copy: pages are shared until one of the two writes.
struct SequenceState {
  SequenceState(const ModelConfig& config, ChatFormat format, KvStore kv)
      : store(std::move(kv)), queries(config.layers, config.heads, config.head_dim), chat(format) {}

  bool has_marks() const { return turn == Turn::document || turn == Turn::answer; }
  bool has_logits() const { return logits_at == tokens.size() && logits_at > 0; }

  KvStore store;
  RecentQueries queries;  // of the newest tokens, where pages are sealed
  // What a strategy that chooses once chose by: the queries at the end of the prefill, from the
  // first choice on until the next prefill.
  struct Observed {
    RecentQueries queries;
    uint32_t pages = 0;  // sealed then
  } observed;

  Array<Token> tokens;
  Spelling spelling;  // of tokens
  Turn turn = Turn::empty;
  ChatFormat chat;                   // of the turns; the model's where there are none yet
  uint64_t document_tokens = 0;      // where the conversation began, once turn is answer,
  Turn document_turn = Turn::empty;  // and the turn there: going back restores it

  Array<float> logits;     // after the last token, valid where logits_at == tokens.size()
  uint64_t logits_at = 0;  // tokens

  Array<float> layer_errors;      // [layers] largest of all probes (layer_probe.h); may be empty
  uint64_t probed_at = 0;         // sealed tokens at the last probe
  uint64_t prefilled_tokens = 0;  // tokens before the first of an answer
  uint64_t sparse_tokens = 0;     // tokens up to the last one of a sparse prefill
};

}  // namespace kvasir
