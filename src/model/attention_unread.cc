// What a step does not read: its estimate, which takes part, and its bound, which certifies the rest.
#include <algorithm>
#include <bit>
#include <cmath>

#include "model/attention_worker.h"

namespace kvasir {

// The pages of which list i of the choice has nothing, as list `at` of the task.
void Attention::mark_unread(const PageStore& pages, std::size_t i, std::size_t at, Worker* w) const {
  const uint32_t extents = pages.extents();
  if (w->unread.size() < (at + 1) * extents) w->unread.resize((at + 1) * extents);
  uint32_t* unread = w->unread.data() + at * extents;
  std::fill_n(unread, extents, (1u << extent_pages) - 1);
  if (extents == 0) return;
  unread[0] &= ~1u;  // the sinks
  if (const uint32_t last = pages.pages() % extent_pages; last != 0) unread[extents - 1] &= (1u << last) - 1;
  for (uint32_t p : w->selection.page_numbers[i]) unread[p / extent_pages] &= ~(1u << p % extent_pages);
}

// Adds the pages that were marked, by their means, which are read once for all rows; a list is `list_rows` of them. False: a summary of a mapped
// file is damaged.
bool Attention::attend_tails(uint32_t layer, uint32_t head, const QueryRows& rows, uint32_t list_rows, const KvStore& store,
                             const AttentionState& state, Worker* w) const {
  const PageStore& pages = store.pages();
  const uint32_t extents = pages.extents();
  if (extents == 0) return true;
  w->read_m.assign(state.m, state.m + rows.rows);
  w->read_l.assign(state.l, state.l + rows.rows);
  w->means.resize(extents);
  for (uint32_t e = 0; e < extents; ++e) {
    if (!pages.intact_means(layer, head, e)) return false;
    w->means[e] = pages.extent(layer, head, e).means;
  }
  w->means_scratch.resize(kernels_.attend_means_scratch(extents));
  kernels_.attend_means(shape_, rows, w->means.data(), extents, w->unread.data(), list_rows, state, w->means_scratch.data());
  w->counts.summary_bytes += uint64_t{extents} * shape_.means_bytes();
  w->counts.queries += rows.rows;
  for (uint32_t r = 0; r < rows.rows; ++r) {
    const double read = state.l[r] > 0 ? static_cast<double>(w->read_l[r] / state.l[r]) * std::exp(static_cast<double>(w->read_m[r] - state.m[r])) : 0;
    w->counts.mass += read;
    w->compare.estimated.push_back(read);
  }
  return true;
}

// How much of its attention each row has read at least, whatever the keys are: a token that was not read scores at most its block's bound (Quest,
// arXiv 2406.10774, section 3.3; here from extremes of the int8 keys, rounded outwards), so the rest is at most the sum of e^bound over such
// tokens. False: a summary of a mapped file is damaged.
bool Attention::certify(uint32_t layer, uint32_t head, const QueryRows& rows, const KvStore& store, std::size_t i, const AttentionState& state,
                        Worker* w) const {
  constexpr double rounding = 1.001;  // of float sums and products, on either side
  const PageStore& pages = store.pages();
  const uint32_t stride = pages.extents() * shape_.extent_blocks(), page_blocks = shape_.page_blocks();
  w->bounds.resize(std::size_t{rows.rows} * stride);
  for (uint32_t e = 0; e < pages.extents(); ++e) {
    if (!pages.intact_bounds(layer, head, e)) return false;
    const int8_t* next = e + 1 < pages.extents() ? pages.extent(layer, head, e + 1).bounds : nullptr;
    kernels_.score_bounds(shape_, rows, pages.extent(layer, head, e).bounds, next, w->bounds.data() + std::size_t{e} * shape_.extent_blocks(), stride);
  }
  w->unread_tokens.assign(stride, 0);
  for (uint32_t b = page_blocks; b < pages.pages() * page_blocks; ++b) w->unread_tokens[b] = shape_.block_tokens;  // page 0 holds the sinks
  for (std::size_t p = 0; p < w->selection.lists[i].size(); ++p)
    for (uint32_t b = 0; b < page_blocks; ++b) {
      const uint64_t block = (~uint64_t{0} >> (64 - shape_.block_tokens)) << b * shape_.block_tokens;
      w->unread_tokens[w->selection.page_numbers[i][p] * page_blocks + b] -= static_cast<uint32_t>(std::popcount(w->selection.lists[i][p].tokens & block));
    }
  for (uint32_t r = 0; r < rows.rows; ++r) {
    const float* bounds = w->bounds.data() + std::size_t{r} * stride;
    double unread = 0;
    for (uint32_t b = 0; b < stride; ++b)
      if (w->unread_tokens[b]) unread += w->unread_tokens[b] * std::exp(static_cast<double>(bounds[b]) - static_cast<double>(state.m[r]));
    const double read = static_cast<double>(state.l[r]), share = read / (read + unread * rounding);
    w->counts.certified += 1;
    w->counts.certificate += share;
    w->counts.least_certificate = std::min(w->counts.least_certificate, share);
    w->compare.certified.push_back(share);
  }
  return true;
}

}  // namespace kvasir
