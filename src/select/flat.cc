// `flat`: the tokens with the largest exact scores, found by a scan of all int8 keys (top-k
// attention, arXiv 2502.06766, with an exact search in place of the vector index; Memorizing
// Transformers, arXiv 2203.08913, also attends by such a search).
//
// The query heads of a group have a list each, by score, or share one. A token of a shared list
// counts with the sum over heads of its exact share of attention.
#include "select/blocks.h"
#include "select/tokens.h"

namespace kvasir {
namespace {

class FlatSelector final : public Selector {
 public:
  Scanned scan(const SelectorQuery& query, SelectorScratch* scratch) const override {
    return score_all_tokens(query, scratch);
  }

  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    const uint32_t rows = query.rows.rows;
    begin_selection(query.share ? 1 : rows, out);
    if (query.share && rows > 1) sum(query, scratch);
    choose_lists(query, scratch, out);
  }

 protected:
  void sum(const SelectorQuery& query, SelectorScratch* scratch) const override {
    const BlockRange range = tokens_of(query);
    if (range.end > range.first)
      add_shares(query, 1, scratch->scores.data() + range.first, range.stride,
                 range.end - range.first);
  }

  void choose_together(const SelectorQuery& query, SelectorScratch* scratch,
                       Selection* out) const override {
    begin_selection(1, out);
    choose_lists(query, scratch, out);
  }

 private:
  static BlockRange tokens_of(const SelectorQuery& query) {
    const uint32_t page_tokens = query.pages.shape().page.page_tokens,
                   tokens = query.pages.pages() * page_tokens;
    return {1, query.first_page * page_tokens, tokens, tokens};
  }
  static void choose_lists(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) {
    if (const BlockRange range = tokens_of(query); range.end > range.first)
      choose_blocks(query, range, scratch, out);
  }
};

}  // namespace

std::unique_ptr<const Selector> make_flat_selector() { return std::make_unique<FlatSelector>(); }

}  // namespace kvasir
