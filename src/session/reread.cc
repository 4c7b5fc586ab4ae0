// Passages that an answer over several documents reads again.
//
// Documents were prefilled apart, so the second mention of something has not seen the first: "One
// of the numbers for harbor is" looks the same in each. An answer that lists them repeats or mixes
// them. So where a question is about several documents, the two blocks of each with the evidence
// (choose.cc) are prefilled again behind all documents, right before the question. The saved
// copies of these 128 tokens are not attended meanwhile.
//
//   document 1 | document 2 | ... | passage of 1 | passage of 2 | ... | question | answer
//
// They are read for the first turn of a conversation alone. Later ones would stand among questions
// and answers, where the bundled model takes them for the user's words: 32 numbers of 50 below. A
// kept turn is prefilled again without them.
//
// Measured with the bundled model: lists of two or three numbers, each in another document of 4,500
// tokens. Of 50 numbers over 8 documents it finds 43 (37 without this, 45 after one prefill of
// all), over 30 documents 43 (34 without).
#include "session/composition.h"

namespace kvasir {

// Puts the tokens of passages before a turn, if there is room. keeps: the turn is to stay.
void Session::read_again(std::vector<PageRange> passages, bool keeps, AskedTurn* turn) {
  ComposedState& composed = sequence_.composed;
  Array<Token> tokens;
  for (std::size_t i = 0; i < passages.size(); ++i) {
    const auto [first, end] = passages[i];
    const uint64_t page_tokens = sequence_.store.shape().page.page_tokens;
    const auto passage = document_tokens(composed.chosen[i])
                             .subspan(first * page_tokens, (end - first) * page_tokens);
    tokens.insert(tokens.end(), passage.begin(), passage.end());
  }
  const uint64_t after = composed.tokens + tokens.size() + turn->tokens.size();
  if (tokens.empty() || !sequence_.tokens.empty() ||
      after + options_.context / 8 > options_.context)
    return;
  log(2, ("the answer reads " + std::to_string(tokens.size()) + " tokens of " +
          std::to_string(passages.size()) + " documents again")
             .c_str());
  if (keeps && turn->kept.empty()) turn->kept = turn->tokens;
  turn->passage_tokens = tokens.size();
  tokens.insert(tokens.end(), turn->tokens.begin(), turn->tokens.end());
  turn->tokens = std::move(tokens);
  composed.passages = std::move(passages);
  documents_planned_ = false;
}

// Later steps attend the saved copies. What the answer attended of passages counts as that of their
// places in the documents.
void Session::end_passages() {
  std::vector<PageRange>& passages = sequence_.composed.passages;
  if (passages.empty()) return;
  const uint64_t page_tokens = sequence_.store.shape().page.page_tokens;
  uint64_t at = 0;
  for (std::size_t i = 0; i < passages.size(); ++i) {
    const uint64_t tokens = passages[i].count() * page_tokens;
    if (trace_ && i < document_traces_.size())
      document_traces_[i].take(*trace_, at, passages[i].first * page_tokens, tokens);
    at += tokens;
  }
  passages.clear();
  documents_planned_ = false;
}

}  // namespace kvasir
