// `dipr`: every token whose score is within a range of the largest one (the dynamic inner product
// range query of AlayaDB, arXiv 2504.10326), found by a scan of all int8 keys. Their number follows
// from the attention itself; the budget is a ceiling.
//
// The paper requires q . k >= max q . k - beta with beta = -sqrt(d) ln alpha. Queries here include
// 1 / sqrt(d), so that is score >= largest + ln alpha: every token with at least alpha of the
// largest token's attention. The largest score may be in sinks and window, where it often is (in
// the paper the window's maximum is a seed). Heads that share a list attend the tokens of all of
// them.
#include "select/dipr.h"

#include <algorithm>

#include "select/blocks.h"
#include "select/tokens.h"

namespace kvasir {

static uint64_t count_at_least(const float* scores, uint32_t n, float threshold) {
  return static_cast<uint64_t>(
      std::count_if(scores, scores + n, [=](float s) { return s >= threshold; }));
}

uint32_t count_in_range(const SelectorQuery& query, std::size_t list, float* scores,
                        uint32_t stride, uint32_t n, SelectorScratch* scratch) {
  const auto threshold_of = [&](std::size_t r) {  // the least score in the range of row r
    const float* row = scores + r * stride;
    float largest = query.near_m[r];
    for (uint32_t t = 0; t < n; ++t) largest = row[t] > largest ? row[t] : largest;
    return largest - query.range;
  };
  uint64_t count = 0;
  if (query.share && query.rows.rows > 1) {
    scratch->chosen.assign(n, 0);
    for (uint32_t r = 0; r < query.rows.rows; ++r) {
      const float* row = scores + std::size_t{r} * stride;
      const float threshold = threshold_of(r);
      for (uint32_t t = 0; t < n; ++t) scratch->chosen[t] |= row[t] >= threshold ? 1u : 0u;
    }
    add_shares(query, 1, scores, stride, n);
    for (uint32_t t = 0; t < n; ++t) scores[t] = scratch->chosen[t] ? scores[t] : -1;
    count = count_at_least(scores, n, 0);
  } else {
    count = count_at_least(scores + list * stride, n, threshold_of(list));
  }
  return static_cast<uint32_t>(std::min(count, query.budget_tokens));
}

namespace {

class DiprSelector final : public Selector {
 public:
  Scanned scan(const SelectorQuery& query, SelectorScratch* scratch) const override {
    return score_all_tokens(query, scratch);
  }

  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    const uint32_t page_tokens = query.pages.shape().page.page_tokens;
    const uint32_t first = query.first_page * page_tokens,
                   tokens = query.pages.pages() * page_tokens, n = tokens - first;
    begin_selection(query.share ? 1 : query.rows.rows, out);
    if (tokens <= first) return;
    float* scores = scratch->scores.data() + first;
    for (std::size_t i = 0; i < out->lists.size(); ++i)
      choose_list(query, {1, first, tokens, tokens}, i,
                  count_in_range(query, i, scores, tokens, n, scratch), scratch, out);
  }
};

}  // namespace

std::unique_ptr<const Selector> make_dipr_selector() { return std::make_unique<DiprSelector>(); }

}  // namespace kvasir
