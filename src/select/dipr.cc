// `dipr`: every token whose score is within a range of the largest one (the dynamic inner product range query of AlayaDB,
// arXiv 2504.10326), found by a scan of all int8 keys. How many that are follows from the attention itself; the budget is a ceiling.
//
// The paper asks for q . k >= max q . k - beta, beta = -sqrt(d) ln alpha. Scores here have 1 / sqrt(d) in the queries already, so that is
// score >= largest + ln alpha: every token that has at least alpha of the largest token's attention. The largest is looked for in sinks
// and window too (there: the window's maximum as a seed), which often hold it. Heads that share a list attend what any of them asks for.
#include <algorithm>

#include "select/blocks.h"
#include "select/tokens.h"

namespace kvasir {
namespace {

class DiprSelector final : public Selector {
 public:
  void select(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    const uint32_t rows = query.rows.rows, page_tokens = query.pages.shape().page.page_tokens;
    const uint32_t first = query.first_page * page_tokens, tokens = query.pages.pages() * page_tokens, n = tokens - first;
    begin_selection(query.share ? 1 : rows, out);
    if (tokens <= first || !score_all_tokens(query, scratch, out)) return;
    const BlockRange range{1, first, tokens, tokens};
    float* scores = scratch->scores.data() + first;
    if (query.share && rows > 1) {
      scratch->chosen.assign(n, 0);
      for (uint32_t r = 0; r < rows; ++r) mark(scores + std::size_t{r} * tokens, n, least(query, scores, tokens, n, r), scratch->chosen.data());
      add_shares(query, 1, scores, tokens, n);
      for (uint32_t t = 0; t < n; ++t) scores[t] = scratch->chosen[t] ? scores[t] : -1;
      return choose_list(query, range, 0, count(query, scores, n, 0), scratch, out);
    }
    for (uint32_t r = 0; r < rows; ++r) {
      const float* row = scores + std::size_t{r} * tokens;
      choose_list(query, range, r, count(query, row, n, least(query, scores, tokens, n, r)), scratch, out);
    }
  }

 private:
  // The least score that row r asks for.
  static float least(const SelectorQuery& query, const float* scores, uint32_t stride, uint32_t n, uint32_t r) {
    const float* row = scores + std::size_t{r} * stride;
    float largest = query.near_m[r];
    for (uint32_t t = 0; t < n; ++t) largest = row[t] > largest ? row[t] : largest;
    return largest - query.range;
  }

  static void mark(const float* scores, uint32_t n, float least, uint32_t* marks) {
    for (uint32_t t = 0; t < n; ++t) marks[t] |= scores[t] >= least ? 1u : 0u;
  }

  // How many reach it, up to the budget.
  static uint32_t count(const SelectorQuery& query, const float* scores, uint32_t n, float least) {
    const auto reached = static_cast<uint64_t>(std::count_if(scores, scores + n, [=](float s) { return s >= least; }));
    return static_cast<uint32_t>(std::min(reached, query.budget_tokens));
  }
};

}  // namespace

std::unique_ptr<const Selector> make_dipr_selector() { return std::make_unique<DiprSelector>(); }

}  // namespace kvasir
