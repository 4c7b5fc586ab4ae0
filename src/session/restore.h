// Restores a session's sequence. Included by answer.cc, thought.cc and score.cc.
#pragma once

#include <utility>

#include "session/session.h"

namespace kvasir {

// Copies the sequence; the destructor restores it unless applied or released. The copy shares pages
// that are never written again, so the restored sequence is exact.
struct Session::Restore {
  explicit Restore(Session* s)
      : session(s), store(s->sequence_.store), windows(s->sequence_.windows),
        states(s->sequence_.states), drafts(s->sequence_.drafts), queries(s->sequence_.queries),
        observed(s->sequence_.observed), tokens(s->sequence_.tokens.size()),
        prefilled_tokens(s->sequence_.prefilled_tokens), turn(s->sequence_.turn),
        logits(s->sequence_.logits), logits_at(s->sequence_.logits_at) {}
  ~Restore() { apply(); }
  void apply() {
    if (!session) return;
    SequenceState& sequence = session->sequence_;
    sequence.store = std::move(store);
    sequence.windows = std::move(windows);
    sequence.states = std::move(states);
    sequence.drafts = std::move(drafts);
    if (session->options_.drafts_left_out) sequence.drafts.reset(), sequence.store.count_drafts({});
    sequence.queries = std::move(queries);
    sequence.observed = std::move(observed);
    session->decode_.set_chosen(false);
    sequence.tokens.resize(tokens);
    sequence.prefilled_tokens = prefilled_tokens;
    sequence.turn = turn;
    sequence.logits = std::move(logits);
    sequence.logits_at = logits_at;
    session = nullptr;
  }
  void release() { session = nullptr; }

  Session* session;
  KvStore store;
  std::optional<KvStore> windows;
  std::optional<RecurrentState> states;
  std::optional<DraftState> drafts;
  RecentQueries queries;
  SequenceState::Observed observed;
  std::size_t tokens;
  uint64_t prefilled_tokens;
  Turn turn;
  Array<float> logits;
  uint64_t logits_at;
};

}  // namespace kvasir
