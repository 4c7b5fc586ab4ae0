// `dipr-graph`: like `dipr`, every token whose score is within a range of the largest one, searched
// in the graph of `ood` (DIPRS, algorithm 1 of AlayaDB, arXiv 2504.10326). The range and not a
// number bounds the tokens that a search expands, so it ends where the range ends.
//
// The search starts with the largest score of sinks and window, as AlayaDB does with the window: a
// range that they set leaves little to find. Tokens that were rewound, or belong to a longer text,
// are skipped by way of their neighbours (select/graph/token_search.h).
#include "select/dipr.h"
#include "select/graph/token_search.h"

namespace kvasir {
namespace {

constexpr uint32_t capacity = 128;  // tokens that a search always expands: l0

class DiprGraphSelector final : public Selector {
 public:
  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    TokenSearch search(query, query.indexes->of(IndexKind::ood), scratch, out);
    for (uint32_t r = 0; r < query.rows.rows; ++r)
      search.within(r, query.breadth ? query.breadth : capacity, query.range, query.near_m[r]);
    search.score_rest();
    if (!search.intact()) return;
    const uint32_t n = search.finish();
    for (std::size_t i = 0; i < out->lists.size(); ++i)
      search.choose(i, count_in_range(query, i, scratch->scores.data(), n, n, scratch));
  }
};

}  // namespace

std::unique_ptr<const Selector> make_dipr_graph_selector() {
  return std::make_unique<DiprGraphSelector>();
}

}  // namespace kvasir
