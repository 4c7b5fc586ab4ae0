// Certificates: a lower bound of the attention that a step has read.
#include <algorithm>
#include <bit>
#include <cmath>

#include "attention/worker.h"

namespace kvasir {

// Computes for each row the minimum share of attention that it has read, valid for any keys. The
// score of an unread token is at most the bound of its block (Quest, arXiv 2406.10774, section 3.3;
// here from extremes of the int8 keys, rounded outwards). So the unread attention is at most the
// sum of e^bound over unread tokens. Sampled tokens count as unread. Returns false if a summary of
// a mapped file is damaged.
bool Attention::certify(const HeadQueries& queries, std::size_t list, const AttentionState& state,
                        Worker* w) const {
  constexpr double rounding = 1.001;  // maximum error factor of float sums and products, both ways
  const PageStore& pages = queries.req.store.pages();
  const QueryRows& rows = queries.rows;
  const uint32_t layer = queries.req.layer, head = queries.head;
  const uint32_t stride = pages.extents() * shape_.extent_blocks(),
                 page_blocks = shape_.page_blocks();
  w->bounds.resize(std::size_t{rows.rows} * stride);
  for (uint32_t e = 0; e < pages.extents(); ++e) {
    if (!pages.intact_bounds(layer, head, e)) return false;
    const int8_t* next =
        e + 1 < pages.extents() ? pages.extent(layer, head, e + 1).bounds : nullptr;
    kernels_.score_bounds(shape_, rows, pages.extent(layer, head, e).bounds, next,
                          w->bounds.data() + std::size_t{e} * shape_.extent_blocks(), stride);
  }
  w->unread_tokens.assign(stride, 0);
  // page 0 holds the sinks
  for (uint32_t b = page_blocks; b < pages.pages() * page_blocks; ++b)
    w->unread_tokens[b] = shape_.block_tokens;
  for (std::size_t p = 0; p < w->selection.lists[list].size(); ++p)
    for (uint32_t b = 0; b < page_blocks; ++b) {
      const uint64_t block = (~uint64_t{0} >> (64 - shape_.block_tokens))
                             << b * shape_.block_tokens;
      w->unread_tokens[w->selection.page_numbers[list][p] * page_blocks + b] -=
          static_cast<uint32_t>(std::popcount(w->selection.lists[list][p].tokens & block));
    }
  for (uint32_t r = 0; r < rows.rows; ++r) {
    const float* bounds = w->bounds.data() + std::size_t{r} * stride;
    double unread = 0;
    for (uint32_t b = 0; b < stride; ++b)
      if (w->unread_tokens[b])
        unread += w->unread_tokens[b] *
                  std::exp(static_cast<double>(bounds[b]) - static_cast<double>(state.m[r]));
    const double read = static_cast<double>(state.l[r]), share = read / (read + unread * rounding);
    w->counts.certified += 1;
    w->counts.certificate += share;
    w->counts.min_certificate = std::min(w->counts.min_certificate, share);
    w->compare.certified.push_back(share);
  }
  return true;
}

}  // namespace kvasir
