// `quest`: the blocks whose upper bound of q . k is largest (Quest, arXiv 2406.10774, section 3.3, algorithm 1).
//
// A block is 16 tokens, the paper's page. Its bound is sum over channels of max(q * min, q * max), from int8 minima and maxima rounded
// outwards. The query heads of a group either choose a list each, as the paper does for multi-head attention, or share one: then a
// block counts with the sum over heads of the share of attention that it would have if all its tokens reached the bound.
#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "select/selector.h"

namespace kvasir {
namespace {

// Merges chosen blocks of a page into one reference with their tokens' bits.
void blocks_to_pages(const SelectorQuery& query, const uint32_t* blocks, uint32_t count, Array<PageRef>* refs,
                     Array<uint32_t>* numbers, Selection* out) {
  const PageShape& shape = query.pages.shape().page;
  const uint32_t page_blocks = shape.page_blocks();
  const uint64_t block_mask = ~uint64_t{0} >> (64 - shape.block_tokens);
  refs->clear();
  numbers->clear();
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t page = blocks[i] / page_blocks;
    const uint64_t bits = block_mask << (blocks[i] % page_blocks * shape.block_tokens);
    if (numbers->empty() || numbers->back() != page) {
      refs->push_back({nullptr, nullptr, 0});
      numbers->push_back(page);
    }
    refs->back().tokens |= bits;
  }
  out->tokens += uint64_t{count} * shape.block_tokens;
}

class QuestSelector final : public Selector {
 public:
  void select(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    const PageShape& shape = query.pages.shape().page;
    const uint32_t extents = query.pages.extents(), rows = query.rows.rows;
    const uint32_t stride = extents * shape.extent_blocks();
    const uint32_t first = query.first_page * shape.page_blocks();
    const uint32_t blocks = query.pages.pages() * shape.page_blocks();
    const uint32_t lists = query.share ? 1 : rows;
    out->lists.resize(lists);
    out->page_numbers.resize(lists);
    out->tokens = 0;
    out->summary_bytes = 0;
    out->intact = true;

    scratch->scores.resize(std::size_t{rows} * stride);
    for (uint32_t e = 0; e < extents; ++e) {
      if (e + 1 < extents) prefetch(query.pages.extent(query.layer, query.kv_head, e + 1).bounds, shape.bounds_bytes());
      out->intact = out->intact && query.pages.intact_bounds(query.layer, query.kv_head, e);
      query.kernels.score_bounds(shape, query.rows, query.pages.extent(query.layer, query.kv_head, e).bounds,
                                 scratch->scores.data() + std::size_t{e} * shape.extent_blocks(), stride);
    }
    out->summary_bytes = uint64_t{extents} * shape.bounds_bytes();
    if (blocks <= first || !out->intact) {
      for (uint32_t i = 0; i < lists; ++i) out->lists[i].clear(), out->page_numbers[i].clear();
      return;
    }
    const uint32_t n = blocks - first;
    const auto budget = static_cast<uint32_t>(std::min<uint64_t>(n, ceil_div(query.budget_tokens, shape.block_tokens)));
    scratch->chosen.resize(n);
    scratch->bytes.resize(std::size_t{n} * 4);
    if (query.share && rows > 1) add_shares(query, scratch->scores.data() + first, stride, n);
    for (uint32_t i = 0; i < lists; ++i) {
      const float* scores = scratch->scores.data() + std::size_t{i} * stride + first;
      const uint32_t count = query.kernels.top_k(scores, n, budget, scratch->chosen.data(), scratch->bytes.data());
      for (uint32_t c = 0; c < count; ++c) scratch->chosen[c] += first;
      blocks_to_pages(query, scratch->chosen.data(), count, &out->lists[i], &out->page_numbers[i], out);
    }
  }

 private:
  // Extents lie slabs apart, where the processor does not guess the next one.
  static void prefetch(const int8_t* data, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at, 0, 2);
  }

  // The heads' shares of attention that the bounds promise each block, beside sinks and window; their sum, into the first row.
  static void add_shares(const SelectorQuery& query, float* scores, uint32_t stride, uint32_t n) {
    const float log_tokens = std::log(static_cast<float>(query.pages.shape().page.block_tokens));
    for (uint32_t r = 0; r < query.rows.rows; ++r) {
      float* row = scores + std::size_t{r} * stride;
      query.kernels.attention_shares(row, n, query.near_m[r] - log_tokens, query.near_l[r]);
      if (r > 0) query.kernels.add(scores, row, n);
    }
  }
};

}  // namespace

std::unique_ptr<const Selector> make_quest_selector() { return std::make_unique<QuestSelector>(); }

}  // namespace kvasir
