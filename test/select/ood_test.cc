// The graph of `ood` against the algorithms of the RoarGraph paper (arXiv 2408.08933, section 4),
// and insertions into it.
#include <algorithm>
#include <cmath>

#include "helpers.h"

using namespace kvasir;
using test::build;
using test::chosen_tokens;
using test::QueryCase;
using test::random_store;
using test::some_queries;

namespace {

// select/graph/ood.cc
constexpr uint32_t nearest_keys = 400, better_links = 2, max_projected = 40, links = 16,
                   build_breadth = 48, starts = 64;

using Near = std::pair<double, uint32_t>;  // distance, item
using Lists = std::vector<std::vector<uint32_t>>;

// One head's keys in double precision and the graph over them, whose distances are of keys
// multiplied by the metric.
class PlainRoarGraph {
 public:
  PlainRoarGraph(const PageStore& store, uint32_t kv_head, std::span<const float> metric)
      : page_(store.shape().page) {
    const uint32_t dim = page_.dim;
    Array<float> k(std::size_t{page_.page_tokens} * dim), v(k.size()), measured(dim);
    Array<int8_t> rounded(dim);
    for (uint32_t p = 1; p < store.pages(); ++p) {  // the first page is no item
      const PageRef ref = store.page(0, kv_head, p);
      cpu_kernels().unseal_page(page_, ref.data, ref.scales, k.data(), v.data());
      for (uint32_t t = 0; t < page_.page_tokens; ++t) {
        const std::vector<double>& key =
            keys_.emplace_back(k.begin() + t * dim, k.begin() + (t + 1) * dim);
        measured_.push_back(key);
        if (metric.empty()) continue;
        for (uint32_t j = 0; j < dim; ++j) {
          double sum = 0;
          for (uint32_t d = 0; d < dim; ++d)
            sum += static_cast<double>(metric[d * dim + j]) * key[d];
          measured[j] = static_cast<float>(sum);
        }
        float scale = 0;
        cpu_kernels().quantize_queries(measured.data(), 1, dim, rounded.data(), nullptr, &scale);
        for (uint32_t j = 0; j < dim; ++j)
          measured_.back()[j] = static_cast<double>(scale) * rounded[j];
      }
    }
    lists_.resize(keys_.size());
    projected_.resize(keys_.size());
  }

  // Of the first `items` keys the one with links that is nearest to their mean.
  uint32_t central(uint32_t items) const {
    std::vector<double> mean(page_.dim);
    for (uint32_t i = 0; i < items; ++i)
      for (uint32_t d = 0; d < page_.dim; ++d)
        mean[d] += measured_[i][d] / static_cast<double>(items);
    std::vector<Near> linked;
    for (uint32_t i = 0; i < items; ++i)
      if (!lists_[i].empty()) linked.push_back({distance(mean, measured_[i]), i});
    return std::min_element(linked.begin(), linked.end())->second;
  }

  // 4.1, and 4.2 as select/graph/ood.cc has it: of each query's keys, best first, every one is
  // linked from better ones near it.
  void project(const QueryRows& queries) {
    std::vector<uint32_t> bests;
    for (uint32_t r = 0; r < queries.rows; ++r) {
      std::vector<Near> order;
      for (uint32_t i = 0; i < keys_.size(); ++i) {
        double dot = 0;
        for (uint32_t d = 0; d < page_.dim; ++d)
          dot += queries.q[std::size_t{r} * page_.dim + d] * keys_[i][d];
        order.push_back({-dot, i});
      }
      std::sort(order.begin(), order.end());
      bests.push_back(order[0].second);
      for (uint32_t rank = 1; rank < std::min<std::size_t>(nearest_keys, order.size()); ++rank) {
        const uint32_t item = order[rank].second;
        uint32_t there = 0;
        std::vector<Near> better;
        for (uint32_t i = 0; i < rank; ++i) {
          const uint32_t other = order[i].second;
          if (std::count(lists_[other].begin(), lists_[other].end(), item)) ++there;
          else if (lists_[other].size() < max_projected)
            better.push_back({between(item, other), other});
        }
        std::sort(better.begin(), better.end());
        for (std::size_t i = 0; i < better.size() && there < better_links; ++i, ++there)
          lists_[better[i].second].push_back(item);
      }
    }
    for (std::size_t i = 0; i < lists_.size(); ++i) projected_[i] = lists_[i].size();
    entry_ = central(static_cast<uint32_t>(keys_.size()));
    auto& first = lists_[entry_];  // begins with the best keys of queries from all of them
    for (uint32_t i = 0; i < starts; ++i) {
      const uint32_t best = bests[bests.size() * i / starts];
      if (best != entry_ && !std::count(first.begin(), first.end(), best)) first.push_back(best);
    }
    projected_[entry_] = first.size();
  }

  // Goes on from a graph, of which the first items are there still.
  void adopt(const Lists& lists, uint32_t items, uint32_t entry) {
    for (uint32_t i = 0; i < items; ++i) {
      lists_[i] = lists[i];
      std::erase_if(lists_[i], [&](uint32_t other) { return other >= items; });
      projected_[i] = std::min<std::size_t>(i == entry ? max_projected + starts : max_projected,
                                            lists_[i].size());
    }
    entry_ = entry < items ? entry : central(items);
  }

  // 4.3: every key from this one on is searched and linked.
  void connect(uint32_t first) {
    for (uint32_t i = first; i < keys_.size(); ++i) link_all(i, acquire(search(i)));
  }

  Lists lists_;
  uint32_t entry_ = 0;

 private:
  static double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (std::size_t d = 0; d < a.size(); ++d) sum += (a[d] - b[d]) * (a[d] - b[d]);
    return sum;
  }
  double between(uint32_t a, uint32_t b) const { return distance(measured_[a], measured_[b]); }

  std::vector<Near> from(uint32_t item, const std::vector<uint32_t>& others) const {
    std::vector<Near> out;
    for (uint32_t o : others) out.push_back({between(item, o), o});
    std::sort(out.begin(), out.end());
    return out;
  }

  // Algorithm 2: those nearer to the item than to any that was taken; then as many of the others as
  // there is room for.
  std::vector<uint32_t> acquire(const std::vector<Near>& near) const {
    std::vector<uint32_t> chosen, left;
    for (const auto& [d, n] : near) {
      if (chosen.size() == links) break;
      const bool alone = std::all_of(chosen.begin(), chosen.end(),
                                     [&, d = d, n = n](uint32_t c) { return between(n, c) > d; });
      (alone ? chosen : left).push_back(n);
    }
    for (std::size_t i = 0; i < left.size() && chosen.size() < links; ++i)
      chosen.push_back(left[i]);
    return chosen;
  }

  void link(uint32_t a, uint32_t b) {
    std::vector<uint32_t>& list = lists_[a];
    if (std::count(list.begin(), list.end(), b)) return;
    list.push_back(b);
    const auto chosen_of = list.begin() + static_cast<std::ptrdiff_t>(projected_[a]);
    if (list.size() <= projected_[a] + 2 * links) return;
    const std::vector<uint32_t> chosen = acquire(from(a, {chosen_of, list.end()}));
    list.resize(projected_[a]);
    list.insert(list.end(), chosen.begin(), chosen.end());
  }
  void link_all(uint32_t item, const std::vector<uint32_t>& chosen) {
    for (uint32_t c : chosen) link(item, c);
    for (uint32_t c : chosen) link(c, item);
  }

  std::vector<Near> search(uint32_t item) const {
    std::set<Near> open{{between(item, entry_), entry_}}, best = open;
    std::set<uint32_t> met{entry_};
    while (!open.empty()) {
      const Near next = *open.begin();
      if (best.size() == build_breadth && *best.rbegin() < next) break;
      open.erase(next);
      for (uint32_t n : lists_[next.second]) {
        if (!met.insert(n).second) continue;
        const Near found{between(item, n), n};
        if (best.size() == build_breadth && !(found < *best.rbegin())) continue;
        open.insert(found);
        best.insert(found);
        if (best.size() > build_breadth) best.erase(std::prev(best.end()));
      }
    }
    std::vector<Near> out;
    for (const Near& n : best)
      if (n.second != item) out.push_back(n);
    return out;
  }

  PageShape page_;
  std::vector<std::vector<double>> keys_, measured_;
  std::vector<std::size_t> projected_;  // of an item's links the first ones, which stay
};

// L L^T = I + C dim / trace C, C the second moment of the queries.
void check_metric(std::span<const float> l, const QueryRows& queries) {
  const uint32_t dim = queries.dim;
  REQUIRE(l.size() == dim * dim);
  std::vector<double> moment(dim * dim);
  for (uint32_t r = 0; r < queries.rows; ++r)
    for (uint32_t i = 0; i < dim; ++i)
      for (uint32_t j = 0; j < dim; ++j)
        moment[i * dim + j] += std::pow(static_cast<double>(queries.scale[r]), 2) *
                               queries.q[r * dim + i] * queries.q[r * dim + j];
  double trace = 0;
  for (uint32_t i = 0; i < dim; ++i) trace += moment[i * dim + i];
  for (uint32_t i = 0; i < dim; ++i)
    for (uint32_t j = 0; j < dim; ++j) {
      double product = 0;
      for (uint32_t k = 0; k < dim; ++k)
        product += static_cast<double>(l[i * dim + k]) * static_cast<double>(l[j * dim + k]);
      CHECK(product ==
            doctest::Approx((i == j ? 1 : 0) + moment[i * dim + j] * dim / trace).epsilon(1e-5));
      if (j > i) CHECK(l[i * dim + j] == 0);
    }
}

// Items that following links from the entry meets, itself among them.
std::size_t reached(const Lists& lists, uint32_t entry) {
  std::vector<bool> met(lists.size());
  std::vector<uint32_t> open{entry};
  met[entry] = true;
  std::size_t count = 0;
  for (; !open.empty(); ++count) {
    const uint32_t item = open.back();
    open.pop_back();
    for (const uint32_t next : lists[item])
      if (!met[next]) met[next] = true, open.push_back(next);
  }
  return count;
}

Lists lists_of(const TokenIndex::Head& head) {
  Lists out;
  for (uint32_t i = 0; i < head.levels[0].lists(); ++i) {
    const auto list = head.levels[0].list(i);
    out.emplace_back(list.begin(), list.end());
  }
  return out;
}

}  // namespace

TEST_CASE("ood: the graph is RoarGraph's, from the queries of a whole group or of each query head" *
          doctest::test_suite("slow")) {
  for (uint32_t head_dim : {48u, 64u}) {
    // no two distances differ by a rounding to float
    const PageStore store = random_store(head_dim, 24, 2, head_dim + 2);
    const IndexQueries queries = some_queries(store, 3, 50, 9);
    for (uint32_t graphs : {1u, 3u}) {
      const auto index = build(IndexKind::ood, store, queries, 2, graphs);
      CHECK(index->graphs() == graphs);
      for (uint32_t head = 0; head < 2; ++head)
        for (uint32_t g = 0; g < graphs; ++g) {
          CAPTURE(head);
          CAPTURE(g);
          const QueryRows rows =
              queries.rows_of(0, head, g * queries.rows() / graphs, queries.rows() / graphs);
          check_metric(index->heads(0, head)[g].floats, rows);
          PlainRoarGraph plain(store, head, index->heads(0, head)[g].floats);
          plain.project(rows);
          plain.connect(0);
          CHECK(index->heads(0, head)[g].entry == plain.entry_);
          CHECK(lists_of(index->heads(0, head)[g]) == plain.lists_);
        }
    }
  }
}

TEST_CASE(
    "ood: a token is inserted by connectivity enhancement, also behind tokens that were taken "
    "back") {
  const PageStore store = random_store(64, 40, 1, 3);
  PageStore part = store;
  part.truncate(30);
  const IndexQueries queries = some_queries(part, 2, 40, 5);
  const auto made = build(IndexKind::ood, part, queries, 1);
  const uint32_t middle = made->heads(0, 0)[0].entry;
  // The last one takes the entry back, and the key next to the mean of all that there are then is
  // inserted only now.
  for (uint32_t pages : {30u, 21u, middle / 32 + 1}) {
    CAPTURE(pages);
    const uint32_t known = (pages - 1) * 32;
    const auto grown = build(IndexKind::ood, store, {}, 2, 1, {made, pages * 32});
    CHECK(grown->tokens() == 40 * 32);
    CHECK(grown->built() == pages * 32);
    const std::span<const float> metric = grown->heads(0, 0)[0].floats;
    CHECK(std::ranges::equal(metric, made->heads(0, 0)[0].floats));
    PlainRoarGraph plain(store, 0, metric);
    plain.adopt(lists_of(made->heads(0, 0)[0]), known, middle);
    plain.connect(known);
    CHECK(grown->heads(0, 0)[0].entry == plain.entry_);
    CHECK(lists_of(grown->heads(0, 0)[0]) == plain.lists_);
    CHECK(reached(lists_of(grown->heads(0, 0)[0]), grown->heads(0, 0)[0].entry) == 39 * 32);
  }
}

TEST_CASE("ood: a query head searches its own graph") {
  const PageStore store = random_store(64, 120, 1, 17);
  const IndexQueries queries = some_queries(store, 2, 128, 3);
  const auto apart = build(IndexKind::ood, store, queries, 2, 2);
  const auto shared = build(IndexKind::ood, store, queries, 2, 1);
  CHECK(apart->bytes() > shared->bytes() * 3 / 2);
  const QueryCase given(store, 0, 2, 7);
  SelectorScratch scratch;
  Selection out;
  const auto scanned = [&](const std::shared_ptr<TokenIndex>& index) {
    TokenIndexes indexes;
    indexes.of(IndexKind::ood) = {index, 120 * 32};
    SelectorQuery query = given.query(64, false);
    query.indexes = &indexes;
    strategy_info("ood")->make()->select(query, &scratch, &out);
    return out.keys_scanned;
  };
  // The second graph with links to nothing: only the first head's search goes anywhere.
  std::vector<TokenIndex::Words> words;
  TokenIndex::Lists nowhere;
  nowhere.lists.resize(apart->items());
  TokenIndex::Lists first;
  first.lists = lists_of(apart->heads(0, 0)[0]);
  words.push_back(TokenIndex::encode(apart->heads(0, 0)[0].entry, {&first, 1}, {}));
  words.push_back(TokenIndex::encode(5, {&nowhere, 1}, {}));
  const auto lame = TokenIndex::make(IndexKind::ood, store.shape(), {32, 120 * 32, 120 * 32, 2},
                                     std::move(words));
  REQUIRE(lame);
  CHECK(scanned(lame) < scanned(apart));
  CHECK(scanned(lame) > 64);
}
