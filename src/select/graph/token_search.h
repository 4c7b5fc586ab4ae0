// Searches for single tokens by an index: the tokens met, their scores, and best-first search of a
// graph.
//
// A key is read once per search, by the first of the group's query heads that meets it, and scored
// for all of them, so one head may select tokens that another found. Tokens that are not in the
// index (sealed since the build) are all scored.
#pragma once

#include "select/selector.h"

namespace kvasir {

class TokenSearch {
 public:
  // entry: of the strategy's index; without an index no token is known.
  TokenSearch(const SelectorQuery& query, const TokenIndexes::Entry& entry,
              SelectorScratch* scratch, Selection* out);

  // Null without an index.
  const TokenIndex::Head* head() const { return heads_.empty() ? nullptr : &heads_[0]; }
  // Items that may be found: the first ones of the index.
  uint32_t items() const { return items_; }

  // Best-first search of the graph for one row (HNSW, arXiv 1603.09320, algorithm 2): expands the
  // best token not yet expanded, until `breadth` better tokens are found.
  void nearest(uint32_t row, uint32_t breadth);
  // The range query (DIPRS of AlayaDB, arXiv 2504.10326, algorithm 1): expands every token that,
  // when it is met, is within `range` of the largest score so far (`seed` included), and always the
  // first `capacity`.
  void within(uint32_t row, uint32_t capacity, float range, float seed);
  // Scores the items that have no scores yet, for a row's search.
  void score_items(std::span<const uint32_t> items, uint32_t row);
  // Scores the tokens that are not in the index.
  void score_rest();

  // Ends the search: writes the scores of all scored tokens, [rows][tokens], to scratch->scores.
  uint32_t finish();
  // Selects the `count` largest by row `list`, as pages of that list.
  void choose(std::size_t list, uint32_t count);
  // Selects as many as the budget has for every list; for a shared list by the sum of the rows'
  // shares.
  void choose_best();

  bool intact() const { return out_->intact; }

 private:
  using Scored = SearchScratch::Scored;
  uint32_t meet(uint32_t item);              // returns its index
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
  std::span<const TokenIndex::Head> heads_;  // one, or one per row
  uint32_t rows_, page_tokens_, first_, end_;
  uint32_t items_ = 0, first_item_ = 0;  // first_item_: the token of item 0
};

// The breadth of a graph search: search_breadth, or a part of the budget, but at least a minimum.
// The selection is the best of all scored tokens, which are many more than a search keeps.
struct Breadth {
  uint64_t part = 1, min_breadth = 64;
};
std::unique_ptr<const Selector> make_nearest_selector(IndexKind graph, const Breadth& breadth = {});

}  // namespace kvasir
