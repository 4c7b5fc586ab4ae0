#include "select/tokens.h"

#include <algorithm>

namespace kvasir {

Scanned score_all_tokens(const SelectorQuery& query, SelectorScratch* scratch) {
  const PageShape& shape = query.pages.shape().page;
  const uint32_t pages = query.pages.pages(), stride = pages * shape.page_tokens;
  if (pages <= query.first_page) return scratch->scores.clear(), Scanned();
  scratch->scores.resize(std::size_t{query.rows.rows} * stride);
  scratch->bytes.resize(query.kernels.attend_scratch(query.rows.rows, shape.dim));
  PageRef refs[extent_pages];
  for (uint32_t p = query.first_page; p < pages; p += extent_pages) {
    const uint32_t n = std::min(extent_pages, pages - p);
    for (uint32_t i = 0; i < n; ++i) {
      if (!query.pages.intact_page(query.layer, query.kv_head, p + i)) return {0, false};
      refs[i] = query.pages.page(query.layer, query.kv_head, p + i);
    }
    query.kernels.score_tokens(query.rows, refs, n, scratch->scores.data() + p * shape.page_tokens,
                               stride, scratch->bytes.data());
  }
  const uint64_t read = pages - query.first_page;
  return {read * (shape.page_size() / shape.planes() + shape.page_tokens * sizeof(uint16_t)), true,
          read * shape.page_tokens};
}

}  // namespace kvasir
