// The attention half of a table for one Isa.
#pragma once

#include "attention_pages-inl.h"
#include "attention_rows-inl.h"
#include "attention_state-inl.h"
#include "store_keys-inl.h"
#include "store_sample-inl.h"
#include "store_scores-inl.h"
#include "store_seal-inl.h"
#include "store_sketch-inl.h"
#include "store_top_k-inl.h"

namespace kvasir {
namespace {

template <class Isa>
std::size_t attend_scratch(uint32_t rows, uint32_t dim) {
  const std::size_t pages = sizeof(PageTile) + QuadQueries<Isa>::scratch_bytes(rows, dim);
  const std::size_t tokens = sizeof(RowsTile) + std::size_t{dim} * rows_tile_tokens * sizeof(float);
  return round_up(pages > tokens ? pages : tokens, 64);
}

template <class Isa>
void fill_attention(Kernels& k) {
  k.quantize_queries = quantize_queries<Isa>;
  k.attend_pages = attend_pages<Isa>;
  k.score_tokens = score_tokens<Isa>;
  k.raise_by_pages = raise_by_pages<Isa>;
  k.score_keys = score_keys<Isa>;
  k.attend_rows = attend_rows<Isa>;
  k.attend_scratch = attend_scratch<Isa>;
  k.merge = merge<Isa>;
  k.finish = finish<Isa>;
  k.seal_page = seal_page<Isa>;
  k.unseal_page = unseal_page<Isa>;
  k.score_bounds = score_bounds<Isa>;
  k.multiply = multiply<Isa>;
  k.seal_sketch = seal_sketch<Isa>;
  k.score_sketch = score_sketch<Isa>;
  k.raise_by_sketch = raise_by_sketch<Isa>;
  k.attention_shares = attention_shares<Isa>;
  k.sum_shares = sum_shares<Isa>;
  k.sample = sample<Isa>;
  k.top_k = top_k<Isa>;
}

}  // namespace
}  // namespace kvasir
