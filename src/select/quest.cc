// `quest`: the blocks with the largest upper bounds of q . k (Quest, arXiv 2406.10774, section 3.3,
// algorithm 1).
//
// A block is 16 tokens, the paper's page, or unit_tokens (the paper's figure 9 has 16 to 64). Its
// bound is the sum over channels of max(q * min, q * max), from int8 minima and maxima rounded
// outwards. The query heads of a group have a list each, as in the paper for multi-head attention,
// or share one. A block of a shared list counts with the sum over heads of the share of attention
// that it would have if all its tokens reached the bound. A larger block has the largest bound of
// its parts: from the same summaries, and never looser than the bound from the minima and maxima
// over all its tokens.
#include <algorithm>

#include "select/blocks.h"

namespace kvasir {
namespace {

class QuestSelector final : public Selector {
 public:
  Scanned scan(const SelectorQuery& query, SelectorScratch* scratch) const override {
    const PageShape& shape = query.pages.shape().page;
    const uint32_t extents = query.pages.extents(), stride = extents * shape.extent_blocks();
    scratch->scores.resize(std::size_t{query.rows.rows} * stride);
    for (uint32_t e = 0; e < extents; ++e) {
      if (!query.pages.intact_bounds(query.layer, query.kv_head, e)) return {0, false};
      const int8_t* next =
          e + 1 < extents ? query.pages.extent(query.layer, query.kv_head, e + 1).bounds : nullptr;
      query.kernels.score_bounds(
          shape, query.rows, query.pages.extent(query.layer, query.kv_head, e).bounds, next,
          scratch->scores.data() + std::size_t{e} * shape.extent_blocks(), stride);
    }
    return {uint64_t{extents} * shape.bounds_bytes(), true};
  }

  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    const uint32_t rows = query.rows.rows;
    begin_selection(query.share ? 1 : rows, out);
    const BlockRange range = units_of(query);
    if (range.end <= range.first) return;
    if (query.share && rows > 1) sum(query, scratch);
    else merge_rows(query, range, scratch);
    choose_blocks(query, range, scratch, out);
  }

 protected:
  void sum(const SelectorQuery& query, SelectorScratch* scratch) const override {
    const BlockRange range = units_of(query);
    if (range.end <= range.first) return;
    float* scores = merge_rows(query, range, scratch);
    add_shares(query, static_cast<float>(range.block_tokens), scores + range.first, range.stride,
               range.end - range.first);
  }

  void choose_together(const SelectorQuery& query, SelectorScratch* scratch,
                       Selection* out) const override {
    begin_selection(1, out);
    if (const BlockRange range = units_of(query); range.end > range.first)
      choose_blocks(query, range, scratch, out);
  }

 private:
  static uint32_t unit_blocks(const SelectorQuery& query) {
    const uint32_t block_tokens = query.pages.shape().page.block_tokens;
    return std::max(query.unit_tokens, block_tokens) / block_tokens;
  }
  // The units that may be selected, from the page of first_page on.
  static BlockRange units_of(const SelectorQuery& query) {
    const PageShape& shape = query.pages.shape().page;
    const uint32_t parts = unit_blocks(query), blocks = query.pages.pages() * shape.page_blocks(),
                   first = query.first_page * shape.page_blocks();
    return {parts * shape.block_tokens, first / parts, (blocks + parts - 1) / parts,
            query.pages.extents() * shape.extent_blocks(), query.first_row};
  }
  // The query's rows of scores, per unit.
  static float* merge_rows(const SelectorQuery& query, const BlockRange& range,
                           SelectorScratch* scratch) {
    const PageShape& shape = query.pages.shape().page;
    const uint32_t parts = unit_blocks(query), first = query.first_page * shape.page_blocks(),
                   blocks = query.pages.pages() * shape.page_blocks();
    float* scores = scratch->scores.data() + std::size_t{query.first_row} * range.stride;
    for (uint32_t r = 0; parts > 1 && r < query.rows.rows; ++r)
      merge_parts(parts, first, blocks, scores + std::size_t{r} * range.stride);
    return scores;
  }

  // Reduces the scores of blocks first .. end - 1 to those of units of `parts` blocks, in place.
  static void merge_parts(uint32_t parts, uint32_t first, uint32_t end, float* scores) {
    for (uint32_t i = first; i < end; ++i)
      scores[i / parts] =
          i == first || i % parts == 0 ? scores[i] : std::max(scores[i / parts], scores[i]);
  }
};

}  // namespace

std::unique_ptr<const Selector> make_quest_selector() { return std::make_unique<QuestSelector>(); }

}  // namespace kvasir
