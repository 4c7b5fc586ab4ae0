// Searches of an index for single tokens, against the published algorithms, and the indexes against
// their definitions.
#include <algorithm>
#include <bit>
#include <limits>
#include <queue>

#include "helpers.h"

using namespace kvasir;
using test::build;
using test::chosen_tokens;
using test::pool;
using test::QueryCase;
using test::random_store;
using test::some_queries;

namespace {

using Graph = std::vector<std::vector<uint32_t>>;  // of each item

Graph random_graph(uint32_t items, uint32_t degree, uint32_t seed) {
  std::mt19937 random(seed);
  Graph graph(items);
  for (uint32_t i = 0; i < items; ++i)
    for (uint32_t d = 0; d < degree; ++d)
      if (const auto other = static_cast<uint32_t>(random() % items);
          other != i && !std::count(graph[i].begin(), graph[i].end(), other))
        graph[i].push_back(other);
  return graph;
}

TokenIndexes index_of(IndexKind kind, const PageStore& store, const Graph& graph, uint32_t entry,
                      uint32_t valid) {
  const uint32_t first = store.shape().page.page_tokens,
                 end = first + static_cast<uint32_t>(graph.size());
  std::vector<TokenIndex::Words> heads;
  TokenIndex::Lists level;
  level.lists = graph;
  for (uint32_t i = 0; i < store.shape().heads_total(); ++i)
    heads.push_back(TokenIndex::encode(entry, {&level, 1}, {}));
  TokenIndexes out;
  out.of(kind) = {TokenIndex::make(kind, store.shape(), {first, end, end, 1}, std::move(heads)),
                  valid};
  REQUIRE(out.of(kind).index);
  return out;
}

// The neighbours that may be found, and of those that may not, theirs: ascending by when they are
// met.
std::vector<uint32_t> next_to(const Graph& graph, uint32_t item, uint32_t items,
                              std::set<uint32_t>* visited) {
  std::vector<uint32_t> out;
  for (uint32_t n : graph[item]) {
    if (!visited->insert(n).second) continue;
    if (n < items) {
      out.push_back(n);
      continue;
    }
    for (uint32_t second : graph[n])
      if (second < items && visited->insert(second).second) out.push_back(second);
  }
  return out;
}

struct Walk {
  std::set<uint32_t> scored, kept;  // items
};

// HNSW, algorithm 2, with ef = breadth, from one entry.
Walk plain_nearest(const Graph& graph, uint32_t entry, uint32_t items, uint32_t breadth,
                   const std::function<float(uint32_t)>& score) {
  Walk walk;
  std::set<uint32_t> visited{entry};
  std::set<std::pair<float, uint32_t>> candidates{{score(entry), entry}}, best = candidates;
  walk.scored = {entry};
  while (!candidates.empty()) {
    const auto c = *candidates.rbegin();
    candidates.erase(c);
    if (best.size() == breadth && c.first < best.begin()->first) break;
    for (uint32_t n : next_to(graph, c.second, items, &visited)) {
      walk.scored.insert(n);
      if (best.size() < breadth || score(n) > best.begin()->first) {
        candidates.insert({score(n), n});
        best.insert({score(n), n});
        if (best.size() > breadth) best.erase(best.begin());
      }
    }
  }
  for (const auto& b : best) walk.kept.insert(b.second);
  return walk;
}

// DIPRS, AlayaDB's algorithm 1.
Walk plain_within(const Graph& graph, uint32_t entry, uint32_t items, uint32_t capacity,
                  float range, float seed, const std::function<float(uint32_t)>& score) {
  Walk walk;
  std::set<uint32_t> visited{entry};
  float largest = std::max(seed, score(entry));
  std::set<std::pair<float, uint32_t>> open{{score(entry), entry}};
  uint32_t listed = 1;
  walk.scored = {entry};
  while (!open.empty()) {
    const auto c = *open.rbegin();
    open.erase(c);
    for (uint32_t n : next_to(graph, c.second, items, &visited)) {
      walk.scored.insert(n);
      largest = std::max(largest, score(n));
      if (listed < capacity || score(n) >= largest - range) open.insert({score(n), n}), ++listed;
    }
  }
  for (uint32_t i : walk.scored)
    if (score(i) >= largest - range) walk.kept.insert(i);
  return walk;
}

// bit for bit what a search compares
float exact(const QueryCase& given, uint32_t row, uint32_t token) {
  const PageShape& page = given.store.shape().page;
  const PageRef ref = given.store.page(0, given.kv_head, token / page.page_tokens);
  Array<float> scores(page.page_tokens);
  Array<std::byte> scratch(cpu_kernels().attend_scratch(1, page.dim));
  const QueryRows one{1,       page.dim,
                      nullptr, given.q.data() + std::size_t{row} * page.dim,
                      nullptr, given.scale.data() + row};
  const PageRef all{ref.data, ref.scales, ~uint64_t{0}};
  cpu_kernels().score_tokens(one, &all, 1, scores.data(), page.page_tokens, scratch.data());
  return scores[token % page.page_tokens];
}

std::set<uint32_t> tokens_of(const std::set<uint32_t>& items, uint32_t first) {
  std::set<uint32_t> out;
  for (uint32_t i : items) out.insert(i + first);
  return out;
}

Array<std::byte> bytes_of(const TokenIndex& index) {
  Array<std::byte> out;
  REQUIRE(index
              .write(index.tokens(),
                     [&](const void* data, std::size_t size) {
                       const auto* from = static_cast<const std::byte*>(data);
                       out.insert(out.end(), from, from + size);
                       return Status();
                     })
              .ok());
  CHECK(out.size() == index.file_bytes());
  return out;
}

double recall(const std::set<uint32_t>& found, const QueryCase& given, uint32_t row,
              std::size_t k) {
  std::vector<uint32_t> tokens;
  for (uint32_t t = given.first(); t < given.tokens(); ++t) tokens.push_back(t);
  std::sort(tokens.begin(), tokens.end(),
            [&](uint32_t a, uint32_t b) { return given.score(row, a) > given.score(row, b); });
  std::size_t hits = 0;
  for (std::size_t i = 0; i < k; ++i) hits += found.count(tokens[i]);
  return static_cast<double>(hits) / static_cast<double>(k);
}

}  // namespace

TEST_CASE(
    "a graph's search is HNSW's: it scores and finds what the algorithm does, also where later "
    "tokens may not be found") {
  for (uint32_t head_dim : {48u, 128u}) {
    const PageStore store = random_store(head_dim, 40, 2, head_dim);
    const QueryCase given(store, 1, 2, 5);
    const uint32_t first = given.first(), items = given.tokens() - first;
    const Graph graph = random_graph(items, 6, 3);
    SelectorScratch scratch;
    Selection out;
    for (uint32_t valid : {items, items / 2})
      for (uint32_t breadth : {64u, 90u}) {
        CAPTURE(head_dim);
        CAPTURE(valid);
        TokenIndexes indexes = index_of(IndexKind::ood, store, graph, 5, first + items);
        PageStore shorter = store;
        const uint32_t pages = (first + valid) / first;
        shorter.truncate(pages);
        indexes.truncate(uint64_t{pages} * first);
        const uint32_t known = pages * first - first;
        SelectorQuery asks = given.query(30, false);
        SelectorQuery query{.kernels = asks.kernels,
                            .pages = shorter,
                            .sketch = asks.sketch,
                            .layer = 0,
                            .kv_head = asks.kv_head,
                            .rows = asks.rows,
                            .near_m = asks.near_m,
                            .near_l = asks.near_l,
                            .first_page = 1,
                            .budget_tokens = 30,
                            .share = false,
                            .range = asks.range};
        query.indexes = &indexes;
        query.breadth = breadth;
        strategy_info("ood")->make()->select(query, &scratch, &out);
        std::set<uint32_t> scored;
        for (uint32_t r = 0; r < 2; ++r) {
          const Walk walk = plain_nearest(graph, 5, known, breadth,
                                          [&](uint32_t i) { return exact(given, r, first + i); });
          scored.insert(walk.scored.begin(), walk.scored.end());
          CHECK(out.found[r].size() == walk.scored.size());
          std::set<uint32_t> own;
          for (uint32_t i : walk.scored) own.insert(first + i);
          CHECK(std::set<uint32_t>(out.found[r].begin(), out.found[r].end()) == own);
        }
        CHECK(out.keys_scanned == scored.size());
        for (uint32_t r = 0; r < 2; ++r) {  // the best of all that were scored
          std::vector<uint32_t> best(scored.begin(), scored.end());
          std::sort(best.begin(), best.end(), [&](uint32_t a, uint32_t b) {
            return exact(given, r, first + a) > exact(given, r, first + b);
          });
          const std::set<uint32_t> want(best.begin(), best.begin() + 30);
          CHECK(chosen_tokens(out, r, store.shape().page) == tokens_of(want, first));
        }
      }
  }
}

TEST_CASE(
    "a search of a graph is as broad as its strategy makes of the budget, and reads as many tokens "
    "as that has all the same") {
  const PageStore store = random_store(64, 120, 1, 9);
  const QueryCase given(store, 0, 1, 5);
  const uint32_t first = given.first(), items = given.tokens() - first;
  const Graph graph = random_graph(items, 12, 3);
  const auto choose = [&](IndexKind kind, uint64_t budget, uint32_t breadth) {
    const TokenIndexes indexes = index_of(kind, store, graph, 5, first + items);
    SelectorQuery query = given.query(budget, false);
    query.indexes = &indexes;
    query.breadth = breadth;
    SelectorScratch scratch;
    Selection out;
    strategy_info(name_of(kind))->make()->select(query, &scratch, &out);
    CHECK(out.tokens == budget);
    return out.keys_scanned;
  };
  CHECK(choose(IndexKind::ood, 100, 0) == choose(IndexKind::ood, 100, 128));  // not less than 128
  CHECK(choose(IndexKind::ood, 100, 0) > choose(IndexKind::ood, 100, 100));
  CHECK(choose(IndexKind::ood, 1200, 0) == choose(IndexKind::ood, 1200, 150));  // an eighth
  CHECK(choose(IndexKind::ood, 1200, 0) < choose(IndexKind::ood, 1200, 300));
  CHECK(choose(IndexKind::hnsw, 300, 0) == choose(IndexKind::hnsw, 300, 300));
}

TEST_CASE(
    "a range query on the graph is DIPRS: it ends where the range ends, which the window's largest "
    "score sets too") {
  const PageStore store = random_store(64, 40, 1, 8);
  QueryCase given(store, 0, 1, 6);
  const uint32_t first = given.first(), items = given.tokens() - first;
  const Graph graph = random_graph(items, 8, 4);
  const TokenIndexes indexes = index_of(IndexKind::ood, store, graph, 7, first + items);
  SelectorScratch scratch;
  Selection out;
  uint64_t before = 0;
  for (float more : {0.0f, 4.0f})
    for (float range : {1.0f, 3.0f, 6.0f}) {
      QueryCase raised = given;
      raised.near_m[0] += more;
      SelectorQuery query = raised.query(100000, false);
      query.range = range;
      query.indexes = &indexes;
      query.breadth = 20;
      strategy_info("dipr-graph")->make()->select(query, &scratch, &out);
      const Walk walk = plain_within(graph, 7, items, 20, range, raised.near_m[0],
                                     [&](uint32_t i) { return exact(given, 0, first + i); });
      CHECK(out.keys_scanned == walk.scored.size());
      CHECK(chosen_tokens(out, 0, store.shape().page) == tokens_of(walk.kept, first));
      if (more == 0 && range == 6.0f) before = out.keys_scanned;
      if (more > 0 && range == 6.0f) CHECK(out.keys_scanned <= before);
    }
}

TEST_CASE("tokens that were sealed since the index was built are found, and those before it") {
  const PageStore store = random_store(64, 60, 1, 12);
  PageStore part = store;
  part.truncate(50);
  for (IndexKind kind : all_index_kinds) {
    CAPTURE(std::string(name_of(kind)));
    TokenIndexes indexes;
    const IndexQueries queries = some_queries(part, 2, 64, 3);
    indexes.of(kind) = {build(kind, part, queries, 2), 50 * 32};
    for (uint32_t seed = 0; seed < 5; ++seed) {
      const QueryCase given(store, 0, 2, seed);
      SelectorQuery query = given.query(100, false);
      query.indexes = &indexes;
      query.breadth = kind == IndexKind::ivf ? 1000 : 400;
      SelectorScratch scratch;
      Selection out;
      strategy_info(name_of(kind))->make()->select(query, &scratch, &out);
      CHECK(out.intact);
      for (uint32_t r = 0; r < 2; ++r) {
        const double found = recall(chosen_tokens(out, r, store.shape().page), given, r, 100);
        CHECK(found >= (kind == IndexKind::ivf ? 1.0 : 0.9));
      }
      query.share = true;
      strategy_info(name_of(kind))->make()->select(query, &scratch, &out);
      CHECK(out.lists.size() == 1);
      CHECK(chosen_tokens(out, 0, store.shape().page).size() == 100);
      CHECK(out.tokens == 100);
    }
  }
}

TEST_CASE(
    "an index is the same whatever the number of threads, and does not depend on the other heads") {
  const PageStore store = random_store(64, 40, 2, 5);
  const IndexQueries queries = some_queries(store, 2, 40, 3);
  for (IndexKind kind : all_index_kinds)
    CHECK(bytes_of(*build(kind, store, queries, 1)) == bytes_of(*build(kind, store, queries, 3)));
}

TEST_CASE("a search reads a part of the keys") {
  const PageStore store = random_store(64, 300, 1, 21);
  const IndexQueries queries = some_queries(store, 2, 256, 3);
  for (IndexKind kind : all_index_kinds) {
    TokenIndexes indexes;
    indexes.of(kind) = {build(kind, store, queries, 2), 300 * 32};
    const QueryCase given(store, 0, 1, 77);
    SelectorQuery query = given.query(20, false);
    query.indexes = &indexes;
    SelectorScratch scratch;
    Selection out;
    strategy_info(name_of(kind))->make()->select(query, &scratch, &out);
    CAPTURE(std::string(name_of(kind)));
    CHECK(out.keys_scanned > 20);
    CHECK(out.keys_scanned < given.tokens() / 4);
    CHECK(recall(chosen_tokens(out, 0, store.shape().page), given, 0, 20) >= 0.4);
  }
}

TEST_CASE(
    "ivf: every key is in the cluster whose centroid is nearest, and clusters are read by inner "
    "product") {
  const PageStore store = random_store(48, 50, 1, 31);
  const uint32_t dim = store.shape().page.dim, page_tokens = store.shape().page.page_tokens,
                 items = 49 * page_tokens;
  TokenIndexes indexes;
  indexes.of(IndexKind::ivf) = {build(IndexKind::ivf, store, {}, 2), 50 * page_tokens};
  const TokenIndex::Head& head = indexes.of(IndexKind::ivf).index->heads(0, 0)[0];
  const TokenIndex::Level& clusters = head.levels[0];
  REQUIRE(clusters.lists() == static_cast<uint32_t>(std::ceil(std::sqrt(items))));
  Array<float> k(std::size_t{50} * page_tokens * dim), v(page_tokens * dim);
  for (uint32_t p = 0; p < 50; ++p) {
    const PageRef ref = store.page(0, 0, p);
    cpu_kernels().unseal_page(store.shape().page, ref.data, ref.scales,
                              k.data() + std::size_t{p} * page_tokens * dim, v.data());
  }
  std::set<uint32_t> seen;
  for (uint32_t c = 0; c < clusters.lists(); ++c)
    for (uint32_t item : clusters.list(c)) {
      CHECK(seen.insert(item).second);
      const auto distance = [&](uint32_t other) {
        double sum = 0;
        for (uint32_t d = 0; d < dim; ++d)
          sum += std::pow(static_cast<double>(k[(std::size_t{item} + page_tokens) * dim + d] -
                                              head.floats[std::size_t{other} * dim + d]),
                          2);
        return sum;
      };
      double nearest = 1e300;
      for (uint32_t other = 0; other < clusters.lists(); ++other)
        nearest = std::min(nearest, distance(other));
      CHECK(distance(c) <= nearest * (1 + 1e-4) + 1e-4);
    }
  CHECK(seen.size() == items);

  const QueryCase given(store, 0, 1, 3);
  std::vector<std::pair<double, uint32_t>> order;
  for (uint32_t c = 0; c < clusters.lists(); ++c) {
    double dot = 0;
    for (uint32_t d = 0; d < dim; ++d)
      dot += static_cast<double>(given.f32[d] * head.floats[std::size_t{c} * dim + d]);
    order.push_back({-dot, c});
  }
  std::sort(order.begin(), order.end());
  for (uint32_t probes : {1u, 5u}) {
    std::set<uint32_t> want;
    for (uint32_t i = 0; i < probes; ++i)
      for (uint32_t item : clusters.list(order[i].second)) want.insert(item + page_tokens);
    SelectorQuery query = given.query(100000, false);
    query.indexes = &indexes;
    query.breadth = probes;
    SelectorScratch scratch;
    Selection out;
    strategy_info("ivf")->make()->select(query, &scratch, &out);
    CHECK(chosen_tokens(out, 0, store.shape().page) == want);
    CHECK(out.keys_scanned == want.size());
  }
}

TEST_CASE("an index with invalid items is refused") {
  const PageStore store = random_store(64, 4, 1, 1);
  TokenIndex::Lists level;
  level.lists.assign(96, {0, 1, 2});
  const auto made = [&](const TokenIndex::Words& words, IndexKind kind = IndexKind::ood) {
    return TokenIndex::make(kind, store.shape(), {32, 128, 128, 1}, {words}) != nullptr;
  };
  const TokenIndex::Words good = TokenIndex::encode(0, {&level, 1}, {});
  CHECK(made(good));
  CHECK_FALSE(made(good, IndexKind::ivf));  // no centroids
  std::vector<float> metric(64 * 64);
  const auto measured = [&] { return made(TokenIndex::encode(0, {&level, 1}, metric)); };
  CHECK(measured());
  // distances would be none
  for (const float x : {65.0f, -65.0f, std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN()}) {
    metric[70] = x;
    CHECK_FALSE(measured());
  }
  metric.assign(64 * 63, 0.0f);
  CHECK_FALSE(measured());
  for (std::size_t i = 0; i < good.size(); ++i) {
    TokenIndex::Words bad = good;
    bad[i] = UINT32_MAX;
    CHECK_FALSE(made(bad));
    bad.assign(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(i));
    CHECK_FALSE(made(bad));
  }
}

TEST_CASE("the size of an index is estimated before it is built, rather too low than too high") {
  const PageStore store = random_store(64, 80, 2, 23);
  const IndexQueries queries = some_queries(store, 2, 64, 3);
  for (IndexKind kind : {IndexKind::hnsw, IndexKind::ood, IndexKind::ivf}) {
    CAPTURE(std::string(name_of(kind)));
    const uint64_t bytes = build(kind, store, queries, 2)->bytes(),
                   said = index_bytes(kind, store.shape(), 1, 80 * 32);
    CHECK(said <= bytes);
    CHECK(said >= bytes / 2);
  }
}
