// What strategies share that look for single tokens by an index: the tokens met and their scores,
// and best-first search of a graph.
//
// A key is read once a search, whichever of the group's query heads meets it first, and scored for
// all of them: what one head has found another may choose. Tokens that the index does not know
// (sealed since it was built) are all scored.
#pragma once

#include "select/selector.h"

namespace kvasir {

class TokenSearch {
 public:
  // entry: of the strategy's index, whose index may be null: then nothing is known of any token.
  TokenSearch(const SelectorQuery& query, const TokenIndexes::Entry& entry,
              SelectorScratch* scratch, Selection* out);

  // null where there is no index
  const TokenIndex::Head* head() const { return heads_.empty() ? nullptr : &heads_[0]; }
  // those that may be found: the first ones of the index
  uint32_t items() const { return items_; }

  // Best-first search of the graph for one row (HNSW, arXiv 1603.09320, algorithm 2): goes on from
  // the best token that was not gone on from, until `breadth` tokens are found that are better than
  // it.
  void nearest(uint32_t row, uint32_t breadth);
  // The range query (DIPRS of AlayaDB, arXiv 2504.10326, algorithm 1): goes on from every token
  // that is, when it is met, within `range` of the largest score met so far (`seed` included), and
  // from the first `capacity` in any case.
  void within(uint32_t row, uint32_t capacity, float range, float seed);
  // Scores all of these items that have not been scored, for a row's search.
  void score_items(std::span<const uint32_t> items, uint32_t row);
  // Scores the tokens that are not in the index.
  void score_rest();

  // Ends the search: the scores of all tokens that were scored, [rows][tokens] in scratch->scores.
  uint32_t finish();
  // The `count` largest by row `list` of these, as that list's pages.
  void choose(std::size_t list, uint32_t count);
  // As many as the budget has for every list, or by the sum of the rows' shares where they have one
  // list.
  void choose_best();

  bool intact() const { return out_->intact; }

 private:
  using Scored = SearchScratch::Scored;
  uint32_t meet(uint32_t item);              // its place
  bool visit(uint32_t place, uint32_t row);  // false: this row has been there
  void score_fresh();
  const TokenIndex::Head& graph(uint32_t row) const { return heads_[row % heads_.size()]; }
  void collect(uint32_t item, uint32_t row);
  void start(uint32_t row);
  float score(uint32_t place, uint32_t row) const {
    return s_.scores[std::size_t{place} * rows_ + row];
  }

  const SelectorQuery& query_;
  SelectorScratch* scratch_;
  SearchScratch& s_;
  Selection* out_;
  std::span<const TokenIndex::Head> heads_;  // one, or one a row
  uint32_t rows_, page_tokens_, first_, end_;
  uint32_t items_ = 0, first_item_ = 0;  // first_item_: token of item 0
};

// For strategies that read what a search of a graph finds nearest: as broad as is asked, or as this
// part of the budget, but not less than so many tokens. What is read is the best of all that were
// scored, many more than a search keeps.
struct Breadth {
  uint64_t part = 1, least = 64;
};
std::unique_ptr<const Selector> make_nearest_selector(IndexKind graph, const Breadth& breadth = {});

}  // namespace kvasir
