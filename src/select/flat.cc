// `flat`: the tokens whose exact scores are largest, found by a scan of all int8 keys (top-k attention, arXiv 2502.06766, with an
// exact search in place of the vector index; Memorizing Transformers, arXiv 2203.08913, attends by such a search too).
//
// The query heads of a group either choose a list each, by score, or share one: then a token counts with the sum over heads of its exact
// share of attention.
#include "select/blocks.h"
#include "select/tokens.h"

namespace kvasir {
namespace {

class FlatSelector final : public Selector {
 public:
  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    const uint32_t rows = query.rows.rows, page_tokens = query.pages.shape().page.page_tokens;
    const uint32_t first = query.first_page * page_tokens, tokens = query.pages.pages() * page_tokens;
    begin_selection(query.share ? 1 : rows, out);
    if (tokens <= first || !score_all_tokens(query, scratch, out)) return;
    if (query.share && rows > 1) add_shares(query, 1, scratch->scores.data() + first, tokens, tokens - first);
    choose_blocks(query, {1, first, tokens, tokens}, scratch, out);
  }
};

}  // namespace

std::unique_ptr<const Selector> make_flat_selector() { return std::make_unique<FlatSelector>(); }

}  // namespace kvasir
