// A store of random keys, queries to it, and the terms of a choice in double precision.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "pool.h"
#include "select/graph/index_build.h"
#include "select/selector.h"

namespace kvasir::test {

// `pages` sealed pages of keys in clusters, of one layer and `heads` KV heads.
PageStore random_store(uint32_t head_dim, uint32_t pages, uint32_t heads, uint32_t seed);

// `rows` queries of a group near some keys of the store, with what sinks and window left of them.
struct QueryCase {
  QueryCase(const PageStore& store, uint32_t kv_head, uint32_t rows, uint32_t seed);
  SelectorQuery query(uint64_t budget, bool share) const;
  // Row r's exact score of a token, from int8 key and int8 query.
  double score(uint32_t r, uint32_t token) const;
  // Its share of attention among all sealed tokens from page 1 on, sinks and window.
  double share(uint32_t r, uint32_t token) const;
  uint32_t first() const { return store.shape().page.page_tokens; }
  uint32_t tokens() const { return store.pages() * store.shape().page.page_tokens; }

  const PageStore& store;
  const KeySketch sketch;
  uint32_t kv_head;
  Array<float> f32, scale, near_m, near_l;
  Array<int8_t> q, split;
  QueryRows rows;
  std::vector<std::vector<double>> scores;  // [rows][tokens]
  std::vector<double> totals;               // [rows] sums of exponentials, relative to near_m
};

// The tokens of list i; checks that pages ascend and fit the reference's bits.
std::set<uint32_t> chosen_tokens(const Selection& selection, std::size_t i, const PageShape& shape);

// Queries as prefill of `tokens` tokens records them, near random keys.
IndexQueries some_queries(const PageStore& store, uint32_t group, uint32_t tokens, uint32_t seed);

std::shared_ptr<TokenIndex> build(IndexKind kind, const PageStore& store,
                                  const IndexQueries& queries, uint32_t threads,
                                  uint32_t graphs = 1, const TokenIndexes::Entry& known = {});

}  // namespace kvasir::test
