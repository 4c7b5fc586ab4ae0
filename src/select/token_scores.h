// Exact scores of the store's tokens from their int8 keys, for strategies that select tokens.
#pragma once

#include <cstdint>

#include "backend/kernels.h"
#include "base/memory.h"
#include "select/selector.h"
#include "store/page_store.h"

namespace kvasir {

// The queries of one token for one KV head, [group][head_dim], scaled and quantised for the store.
class TokenQueries {
 public:
  TokenQueries(const Kernels& kernels, const PageShape& shape) : kernels_(kernels), shape_(shape) {}
  const QueryRows& set(const float* q, uint32_t group);

 private:
  const Kernels& kernels_;
  const PageShape& shape_;
  QueryRows rows_;
  Array<float> f32_, scale_;
  Array<int8_t> q8_;
};

// One token's queries in a filter layer.
struct FilterQuery {
  const float* q;    // [heads][head_dim]
  const float* lse;  // [heads]
};
// Writes best[0 .. end - begin) for the tokens begin .. end - 1 of the store: the largest score -
// lse[head] over all query heads, ln of the head's share of attention. begin and end are multiples
// of a page. The pages of the layer are verified.
void best_shares(const FilterStep& step, const FilterQuery& query, uint64_t begin, uint64_t end,
                 float* best);

}  // namespace kvasir
