#include "select/blocks.h"

#include <algorithm>

#include "base/checked.h"

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

}  // namespace

void choose_blocks(const SelectorQuery& query, uint32_t first, uint32_t blocks, uint32_t stride, SelectorScratch* scratch, Selection* out) {
  const uint32_t n = blocks - first;
  const auto budget = static_cast<uint32_t>(std::min<uint64_t>(n, ceil_div(query.budget_tokens, query.pages.shape().page.block_tokens)));
  scratch->chosen.resize(n);
  scratch->bytes.resize(std::size_t{n} * 4);
  for (std::size_t i = 0; i < out->lists.size(); ++i) {
    const float* scores = scratch->scores.data() + i * stride + first;
    const uint32_t count = query.kernels.top_k(scores, n, budget, scratch->chosen.data(), scratch->bytes.data());
    for (uint32_t c = 0; c < count; ++c) scratch->chosen[c] += first;
    blocks_to_pages(query, scratch->chosen.data(), count, &out->lists[i], &out->page_numbers[i], out);
  }
}

}  // namespace kvasir
