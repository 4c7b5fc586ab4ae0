// `ood`: the tokens with the largest scores, looked for in a graph that knows what is asked (RetrievalAttention, arXiv 2409.10516, section 3.2):
// queries lie elsewhere than keys, so keys are linked that the same queries attend, not only keys that are near each other.
//
// The graph is RoarGraph's (VLDB 2024, arXiv 2408.08933, section 4), one a KV head, from the queries of all query heads of the group (as AlayaDB
// has it, arXiv 2504.10326, section 6), or one a query head from its own:
//   bipartite graph   exact nearest keys of every sampled query, by inner product (4.1)
//   projection        the query's nearest key becomes a neighbour of its other ones, chosen so that they lie in different directions (4.2,
//                     algorithm 2)
//   connectivity      every key is searched in the graph so far and linked, both ways, to what is found (4.3)
//
// Distances between keys are Euclidean. What the sampled queries are like decides how much a search finds: they have to stand where those that will
// search stand, since rotated queries ask for other keys elsewhere, and to ask as they do. Passages from all of the document are asked, as questions
// with an answer, at its end (Session::read_queries), on a copy of any timeline. With the bundled model and 121,362 tokens of a novel, questions about
// it and their answers, and its last tokens, two heads (layers 4 and 8), searches that keep 150 tokens: the share of the best 100 tokens that a query
// head's own search finds, and the keys that it scores:
//   2048 newest tokens                                    0.88 by 1.7%, 0.81 by 2.9%
//   2048 tokens of passages read again at the end         0.92 by 1.6%, 0.83 by 2.9%
//   2025 tokens of such passages, asked                   0.95 by 1.6%, 0.87 by 3.0%
// Of the best 100 tokens of the questions' queries, 0.74 and 0.64 are among the best 100 of some query of the newest tokens, 0.96 and 0.94 of the
// passages that are asked (4096 tokens read in their own places, all over the document: 0.70 and 0.84).
// A search keeps an eighth of the budget's tokens, at least 128: all that it scores may be read, and the best 100 need no more. In the graph of
// layer 4 from the newest tokens, 300 tokens kept found 0.95 of them by 2.6% of the keys, 1200 found all but 0.4% by 7.1%.
#include <algorithm>
#include <limits>

#include "select/index_build.h"
#include "select/token_search.h"

namespace kvasir {

namespace {

constexpr uint32_t nearest_keys = 64;      // of each query
constexpr uint32_t links_an_item = 24;     // chosen in each of the two steps
constexpr uint32_t most_links = 2 * links_an_item;
constexpr uint32_t build_breadth = 64;
constexpr uint32_t batch_queries = 16;     // whose scores are in memory together
constexpr uint32_t batch_pages = 256;      // that are scored by one call
constexpr std::size_t compared = 8;        // neighbours that a candidate is compared with together

class RoarGraph {
 public:
  RoarGraph(const IndexInput& input)
      : input_(input), keys_(input.pages, input.kernels, input.layer, input.kv_head, input.first_token), links_(keys_.items()),
        met_(keys_.items()) {}

  TokenIndex::Words build() {
    if (input_.known) {
      adopt(*input_.known, input_.known_items);
      connect(input_.known_items);
    } else {
      find_entry(keys_.items());
      project();
      connect(0);
    }
    if (input_.cancel.fired()) return {};
    TokenIndex::Lists level;
    level.lists = std::move(links_);
    return TokenIndex::encode(entry_, {&level, 1}, {});
  }

 private:
  struct Near {
    float distance;
    uint32_t item;
    bool operator<(const Near& o) const { return distance < o.distance || (distance == o.distance && item < o.item); }
  };

  // Goes on from a graph, of whose items the first ones are there still: what is behind them is inserted by connectivity enhancement alone.
  void adopt(const TokenIndex::Head& graph, uint32_t items) {
    for (uint32_t i = 0; i < items; ++i)
      for (const uint32_t other : graph.levels[0].list(i))
        if (other < items) links_[i].push_back(other);
    entry_ = graph.entry;
    if (entry_ >= items) find_entry(items);
  }

  // Of the first `items` keys the one next to their mean. Searches begin there, so it has to be one that is linked to what they look for: of a
  // graph that is gone on from, one of its own.
  void find_entry(uint32_t items) {
    const uint32_t dim = keys_.dim();
    std::vector<double> mean(dim);
    for (uint32_t i = 0; i < items; ++i)
      for (uint32_t d = 0; d < dim; ++d) mean[d] += static_cast<double>(keys_.scale(i)) * keys_.row(i)[d] / items;
    double best = std::numeric_limits<double>::infinity();
    for (uint32_t i = 0; i < items; ++i) {
      double dot = 0;
      for (uint32_t d = 0; d < dim; ++d) dot += mean[d] * keys_.row(i)[d];
      const double distance = static_cast<double>(keys_.square(i)) - 2 * dot * static_cast<double>(keys_.scale(i));
      if (distance < best) best = distance, entry_ = i;
    }
  }

  // Squared distances from `item` to others, into near_, ascending.
  void measure(uint32_t item, std::span<const uint32_t> others) {
    dots_.resize(others.size());
    keys_.dots(item, others, &refs_, dots_.data());
    near_.clear();
    for (std::size_t i = 0; i < others.size(); ++i)
      near_.push_back({keys_.square(item) + keys_.square(others[i]) - 2 * dots_[i], others[i]});
    std::sort(near_.begin(), near_.end());
  }

  // Of near_, which are near `item`, those that are nearer to it than to any that was taken before; then the nearest others (algorithm 2: acquire
  // neighbours).
  std::vector<uint32_t> choose() {
    std::vector<uint32_t> chosen;
    left_.clear();
    for (const Near& n : near_) {
      if (chosen.size() == links_an_item) break;
      bool alone = true;
      for (std::size_t at = 0; at < chosen.size() && alone; at += compared) {
        const auto some = std::span<const uint32_t>(chosen).subspan(at, std::min(compared, chosen.size() - at));
        float dots[compared];
        keys_.dots(n.item, some, &refs_, dots);
        for (std::size_t i = 0; i < some.size() && alone; ++i) alone = keys_.square(n.item) + keys_.square(some[i]) - 2 * dots[i] > n.distance;
      }
      if (alone) chosen.push_back(n.item);
      else left_.push_back(n.item);
    }
    for (std::size_t i = 0; i < left_.size() && chosen.size() < links_an_item; ++i) chosen.push_back(left_[i]);
    return chosen;
  }

  void link(uint32_t from, uint32_t to) {
    std::vector<uint32_t>& list = links_[from];
    if (std::find(list.begin(), list.end(), to) != list.end()) return;
    list.push_back(to);
    if (list.size() <= most_links) return;
    measure(from, list);
    list = choose();
  }

  void link_both(uint32_t item, const std::vector<uint32_t>& chosen) {
    for (const uint32_t other : chosen) link(item, other);
    for (const uint32_t other : chosen) link(other, item);
  }

  // The nearest keys of queries [first, first + n) of this head: nearest_[query][found].
  void nearest(uint32_t first, uint32_t n) {
    const uint32_t page_tokens = input_.pages.shape().page.page_tokens, begin = input_.first_token / page_tokens;
    const uint32_t pages = input_.pages.pages() - begin, items = keys_.items();
    const QueryRows rows = input_.queries.rows_of(input_.layer, input_.kv_head, first, n);
    scores_.resize(std::size_t{n} * items);
    bytes_.resize(std::max<std::size_t>(input_.kernels.attend_scratch(n, rows.dim), std::size_t{items} * 4));
    page_refs_.resize(batch_pages);
    for (uint32_t p = 0; p < pages && !input_.cancel.fired(); p += batch_pages) {
      const uint32_t some = std::min(batch_pages, pages - p);
      for (uint32_t i = 0; i < some; ++i) page_refs_[i] = input_.pages.page(input_.layer, input_.kv_head, begin + p + i);
      input_.kernels.score_tokens(rows, page_refs_.data(), some, scores_.data() + std::size_t{p} * page_tokens, items, bytes_.data());
    }
    chosen_.resize(nearest_keys);
    nearest_.clear();
    for (uint32_t r = 0; r < n && !input_.cancel.fired(); ++r) {
      const float* scores = scores_.data() + std::size_t{r} * items;
      const uint32_t found = input_.kernels.top_k(scores, items, nearest_keys, chosen_.data(), bytes_.data());
      nearest_.emplace_back(chosen_.begin(), chosen_.begin() + found);
      std::sort(nearest_.back().begin(), nearest_.back().end(),
                [&](uint32_t a, uint32_t b) { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); });
    }
  }

  void project() {
    const uint32_t queries = input_.query_count;
    std::vector<std::vector<uint32_t>> candidates(keys_.items());
    for (uint32_t q = 0; q < queries && !input_.cancel.fired(); q += batch_queries) {
      nearest(input_.first_query + q, std::min(batch_queries, queries - q));
      for (const auto& found : nearest_)
        if (!found.empty()) candidates[found[0]].insert(candidates[found[0]].end(), found.begin() + 1, found.end());
    }
    for (uint32_t i = 0; i < keys_.items() && !input_.cancel.fired(); ++i) {
      auto& some = candidates[i];
      if (some.empty()) continue;
      std::sort(some.begin(), some.end());
      some.erase(std::unique(some.begin(), some.end()), some.end());
      measure(i, some);
      link_both(i, choose());
    }
  }

  // The build_breadth nearest keys that a search of the graph so far meets, into near_, without the item itself.
  void search(uint32_t item) {
    ++search_;
    best_.clear();
    open_.clear();
    batch_.assign(1, entry_);
    met_[entry_] = search_;
    const auto farther = [](const Near& a, const Near& b) { return b < a; };
    for (;;) {
      dots_.resize(batch_.size());
      keys_.dots(item, batch_, &refs_, dots_.data());
      for (std::size_t i = 0; i < batch_.size(); ++i) {
        const Near n{keys_.square(item) + keys_.square(batch_[i]) - 2 * dots_[i], batch_[i]};
        if (best_.size() == build_breadth) {
          if (!(n < best_.front())) continue;
          std::pop_heap(best_.begin(), best_.end());
          best_.pop_back();
        }
        best_.push_back(n);
        std::push_heap(best_.begin(), best_.end());
        open_.push_back(n);
        std::push_heap(open_.begin(), open_.end(), farther);
      }
      if (open_.empty()) break;
      const Near next = open_.front();
      if (best_.size() == build_breadth && best_.front() < next) break;
      std::pop_heap(open_.begin(), open_.end(), farther);
      open_.pop_back();
      batch_.clear();
      for (const uint32_t other : links_[next.item])
        if (met_[other] != search_) met_[other] = search_, batch_.push_back(other);
    }
    near_.clear();
    for (const Near& n : best_)
      if (n.item != item) near_.push_back(n);
    std::sort(near_.begin(), near_.end());
  }

  void connect(uint32_t first) {
    for (uint32_t i = first; i < keys_.items() && !input_.cancel.fired(); ++i) {
      search(i);
      link_both(i, choose());
    }
  }

  const IndexInput& input_;
  const KeyRows keys_;
  std::vector<std::vector<uint32_t>> links_;
  uint32_t entry_ = 0;
  Array<uint32_t> met_;
  uint32_t search_ = 0;
  std::vector<Near> near_, best_, open_;
  std::vector<uint32_t> left_, batch_;
  std::vector<std::vector<uint32_t>> nearest_;
  Array<KeyRef> refs_;
  Array<float> dots_, scores_;
  Array<uint32_t> chosen_;
  Array<PageRef> page_refs_;
  Array<std::byte> bytes_;
};

}  // namespace

TokenIndex::Words build_ood(const IndexInput& input) { return RoarGraph(input).build(); }

std::unique_ptr<const Selector> make_ood_selector() { return make_nearest_selector(IndexKind::ood, {8, 128}); }

}  // namespace kvasir
