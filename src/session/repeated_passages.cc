// Passages that an answer over several documents prefills again.
//
// Documents were prefilled apart, so the second mention of something has not seen the first: "One
// of the numbers for harbor is" looks the same in each. An answer that lists them repeats or mixes
// them. So where a question is about several documents, the two blocks of each with the evidence
// (choose.cc), 128 tokens, are prefilled again behind all documents, right before the question.
// Their saved copies are not attended meanwhile.
//
//   document 1 | document 2 | ... | passage of 1 | passage of 2 | ... | question | answer
//
// That is done for the first turn of a conversation alone. Later passages would stand among
// questions and answers, where the bundled model takes them for the user's words. A kept turn has
// none, and is prefilled without them by the next call.
//
// Measured with the bundled model: lists of two or three numbers, each in another document of 4,500
// tokens. Of 50 numbers over 8 documents it finds 43: 37 without passages, 45 after one prefill of
// all, 32 with passages between the marks of the turn. Over 30 documents it finds 43, 34 without.
#include "session/composition.h"
#include "session/restore.h"

namespace kvasir {

// Puts the tokens of passages before a turn, unless they would take room that the turn and `more`
// tokens after it need.
void Session::insert_passages(std::vector<PageRange> passages, uint64_t more, AskedTurn* turn) {
  ComposedState& composed = sequence_.composed;
  const uint64_t page_tokens = sequence_.store.shape().page.page_tokens;
  if (!sequence_.tokens.empty()) return;
  uint64_t count = 0, documents = 0;
  for (const PageRange& passage : passages)
    count += passage.count() * page_tokens, documents += passage.count() > 0;
  if (count == 0) return;
  const uint64_t used = std::min(options_.context, composed.tokens + turn->tokens.size()),
                 left = options_.context - used;
  if (count + std::min(more, left) > left ||
      !sequence_.store.check_budget(count + turn->tokens.size() + more).ok())
    return log(2, "there is no room to prefill passages of the documents again");
  log(2, ("the answer prefills " + std::to_string(count) + " tokens of " +
          std::to_string(documents) + " documents again")
             .c_str());
  Array<Token> tokens;
  for (std::size_t i = 0; i < passages.size(); ++i) {
    const auto passage =
        document_tokens(composed.chosen[i])
            .subspan(passages[i].first * page_tokens, passages[i].count() * page_tokens);
    tokens.insert(tokens.end(), passage.begin(), passage.end());
  }
  tokens.insert(tokens.end(), turn->tokens.begin(), turn->tokens.end());
  turn->tokens = std::move(tokens);
  turn->passage_tokens = count;
  composed.passages = std::move(passages);
  documents_planned_ = false;
}

// Later steps attend the saved copies. were_prefilled: what the answer attended of passages counts
// for their places in the documents.
void Session::end_passages(bool were_prefilled) {
  std::vector<PageRange>& passages = sequence_.composed.passages;
  if (passages.empty()) return;
  const uint64_t page_tokens = sequence_.store.shape().page.page_tokens;
  uint64_t at = 0;
  for (std::size_t i = 0; were_prefilled && i < passages.size(); ++i) {
    const uint64_t tokens = passages[i].count() * page_tokens;
    if (trace_ && i < document_traces_.size())
      document_traces_[i].take(*trace_, at, passages[i].first * page_tokens, tokens);
    at += tokens;
  }
  passages.clear();
  documents_planned_ = false;
}

// Keeps a turn without its passages. The next call prefills it (prefill_missing).
void Session::keep_without_prefill(Restore* before, std::span<const Token> tokens) {
  const Array<Token> kept(tokens.begin(), tokens.end());
  std::unique_ptr<Trace> trace = std::move(trace_);
  before->apply();
  begin_conversation(before->tokens);
  sequence_.tokens.insert(sequence_.tokens.end(), kept.begin(), kept.end());
  trace_ = std::move(trace);  // passages stay those of the answer
}

}  // namespace kvasir
