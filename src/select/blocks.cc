#include "select/blocks.h"

#include <algorithm>
#include <bit>

#include "base/checked.h"

namespace kvasir {
namespace {

// Merges selected blocks into one reference per page with the bits of their tokens, without sinks
// and unsealed tokens.
void blocks_to_pages(const SelectorQuery& query, uint32_t block_tokens,
                     std::span<const uint32_t> blocks, Array<PageRef>* refs,
                     Array<uint32_t>* numbers, Selection* out) {
  const uint32_t page_tokens = query.pages.shape().page.page_tokens;
  const uint32_t first = query.first_page * page_tokens, last = query.pages.pages() * page_tokens;
  refs->clear();
  numbers->clear();
  for (const uint32_t block : blocks) {
    const uint32_t end = std::min(last, (block + 1) * block_tokens);
    for (uint32_t t = std::max(first, block * block_tokens), stop; t < end; t = stop) {
      const uint32_t page = t / page_tokens;
      stop = std::min(end, (page + 1) * page_tokens);
      if (numbers->empty() || numbers->back() != page) {
        refs->push_back({nullptr, nullptr, 0});
        numbers->push_back(page);
      }
      refs->back().tokens |= ~uint64_t{0} >> (64 - (stop - t)) << t % page_tokens;
      out->tokens += stop - t;
    }
  }
}

}  // namespace

void remove_pages(uint32_t first, uint32_t end, Selection* out) {
  const auto remove = [&](Array<PageRef>* refs, Array<uint32_t>* numbers, auto&& tokens_of) {
    const auto begin = std::lower_bound(numbers->begin(), numbers->end(), first),
               after = std::lower_bound(begin, numbers->end(), end);
    const auto removed = refs->begin() + (begin - numbers->begin()),
               kept = removed + (after - begin);
    for (auto ref = removed; ref != kept; ++ref) out->tokens -= tokens_of(*ref);
    refs->erase(removed, kept), numbers->erase(begin, after);
  };
  for (std::size_t i = 0; i < out->lists.size(); ++i) {
    remove(&out->lists[i], &out->page_numbers[i],
           [](const PageRef& page) { return static_cast<uint64_t>(std::popcount(page.tokens)); });
    if (out->sampled)
      remove(&out->samples[i], &out->sample_numbers[i],
             [](const PageRef&) { return uint64_t{quad_tokens}; });
  }
}

void choose_list(const SelectorQuery& query, const BlockRange& range, std::size_t list,
                 uint32_t count, SelectorScratch* scratch, Selection* out) {
  const uint32_t n = range.end - range.first;
  scratch->chosen.resize(n);
  scratch->bytes.resize(std::size_t{n} * 4);
  const float* scores = scratch->scores.data() + (range.row + list) * range.stride + range.first;
  const uint32_t found =
      query.kernels.top_k(scores, n, count, scratch->chosen.data(), scratch->bytes.data());
  for (uint32_t c = 0; c < found; ++c) scratch->chosen[c] += range.first;
  blocks_to_pages(query, range.block_tokens, {scratch->chosen.data(), found}, &out->lists[list],
                  &out->page_numbers[list], out);
}

void choose_blocks(const SelectorQuery& query, const BlockRange& range, SelectorScratch* scratch,
                   Selection* out) {
  const auto count = static_cast<uint32_t>(std::min<uint64_t>(
      range.end - range.first, ceil_div(query.budget_tokens, range.block_tokens)));
  for (std::size_t i = 0; i < out->lists.size(); ++i)
    choose_list(query, range, i, count, scratch, out);
}

}  // namespace kvasir
