// `ood`: the tokens with the largest scores, searched in a graph that is built from queries
// (RetrievalAttention, arXiv 2409.10516, section 3.2). Queries and keys have different
// distributions, so the graph links keys that the same queries attend, not only keys near each
// other.
//
// The graph is RoarGraph's (VLDB 2024, arXiv 2408.08933, section 4), one per KV head, from the
// queries of all query heads of the group (as in AlayaDB, arXiv 2504.10326, section 6), or one per
// query head from its own:
//   bipartite graph   exact nearest keys of every sampled query, by inner product (4.1); a GPU
//                     finds them if there is one
//   projection        the nearest keys of a query are linked to each other (4.2)
//   connectivity      every key is searched in the graph so far and linked, both ways, to the keys
//                     found, chosen to lie in different directions (4.3, algorithm 2)
//
// Two things differ from the paper. Distances between keys are half Euclidean, half the difference
// of their scores for the sampled queries (query_metric(), stored with the graph for later
// insertions): of two keys that are alike for every query one leads to the other, wherever else
// they differ. And the paper links a query's nearest key to some of its others and leaves the rest
// to connectivity. Here each of a query's keys, best first, gets links from two better ones near
// it, unless two link to it already: a search among the best keys of a query finds the next ones
// through the best, and most queries find such links there. These links are separate from those of
// connectivity, which alone are chosen anew when they become too many. The entry, the key nearest
// to the mean, is linked to the best keys of queries from the whole sample.
//
// The sampled queries decide how much a search finds. They must have the positions of later
// queries, since rotated queries match other keys elsewhere, and they must be like them. Passages
// from the whole document are prefilled as questions with an answer, at its end
// (Session::read_queries), on a copy of any sequence. Of the best 100 tokens of questions' queries
// in two heads, 0.96 and 0.94 are among the best 100 of some query of such passages. For the newest
// 2048 tokens it is 0.74 and 0.64, for 4096 tokens at their own positions 0.70 and 0.84.
//
// With the bundled model, 121,362 tokens of a novel, questions about it, their answers and its last
// tokens, the hardest head but one (layer 8, KV head 0): the part of the best 100 tokens that a
// query head's own search finds, keeping 128, and the keys that it scores:
//   the paper's: 64 nearest keys, 24 links of each kind, 2025 tokens of passages    0.84 by 2.6%
//   with half of the metric by scores                                               0.89 by 2.1%
//   with links from better ones among 400 nearest keys, 12 of connectivity, instead 0.94 by 2.9%
//   with both                                                                       0.94 by 2.4%
//   and 4050 tokens of passages                                                     0.95 by 2.5%
//   and 6075                                                                        0.95 by 2.55%
// Over 128,314 tokens of it and a question, 6144 tokens found no more than 4096, and 64 links of
// the entry left a quarter of the searches that found fewer than 70 of the 100 (50 to 13 of 7860).
// 16 links of connectivity and a breadth of 48 in place of 12 and 32: 0.970 by 1.76% of the keys,
// the mean of all heads, in place of 0.966 by 1.8%. Sources that most queries of a key have in
// common, in place of near ones: 0.89 by 3.6% in the head above.
//
// A search keeps an eighth of the budget's tokens, at least 128: all that it scores may be
// attended, and the best 100 need no more. and the best 100 need no more.
#include <algorithm>
#include <limits>

#include "select/graph/index_build.h"
#include "select/graph/token_search.h"

namespace kvasir {

namespace {

constexpr uint32_t nearest_keys = 400;  // per query
// Links to each of them from better ones, if these have room.
constexpr uint32_t better_links = 2;
constexpr uint32_t max_projected = 40;   // links from a key to others of its queries
constexpr uint32_t starts = 64;          // best keys of queries that the entry links to
constexpr uint32_t links_per_item = 16;  // chosen for connectivity
constexpr uint32_t max_links = 2 * links_per_item;
constexpr uint32_t link_breadth = 48;
constexpr uint32_t batch_queries = 16;  // queries whose scores are in memory at once
constexpr uint32_t batch_pages = 256;   // pages scored per call
constexpr std::size_t compared = 8;     // neighbours compared with a candidate per call

class RoarGraph {
 public:
  RoarGraph(const IndexInput& input)
      : input_(input), keys_(input.pages, input.kernels, input.layer, input.kv_head,
                             input.first_token, input.cancel),
        links_(keys_.items()), projected_(keys_.items()), met_(keys_.items()) {
    if (input.known) {
      metric_.assign(input.known->floats.begin(), input.known->floats.end());
    } else {
      const QueryRows queries =
          input.queries.rows_of(input.layer, input.kv_head, input.first_query, input.query_count);
      by_device_ = input.search &&
                   input.search->find(keys_.view(), queries, nearest_keys, input.cancel, &found_);
      metric_ = query_metric(queries, input.cancel);
    }
    keys_.measure_by(metric_, input.cancel);
  }

  TokenIndex::Words build() {
    if (device_failed() || input_.cancel.fired()) return {};
    if (input_.known) {
      adopt(*input_.known, input_.known_items);
      connect(input_.known_items);
    } else {
      project();
      if (input_.cancel.fired()) return {};
      find_entry(keys_.items());
      open_entry();
      connect(0);
    }
    if (input_.cancel.fired()) return {};
    TokenIndex::Lists level;
    level.lists = std::move(links_);
    return TokenIndex::encode(entry_, {&level, 1}, metric_);
  }

 private:
  struct Near {
    float distance;
    uint32_t item;
    bool operator<(const Near& o) const {
      return distance < o.distance || (distance == o.distance && item < o.item);
    }
  };

  bool device_failed() const { return input_.search && input_.search->failed(); }

  // Continues a graph whose first `items` items still exist: later ones are inserted by
  // connectivity enhancement alone. It is unknown which old links were projected: as many as may
  // have been are not chosen anew.
  void adopt(const TokenIndex::Head& graph, uint32_t items) {
    for (uint32_t i = 0; i < items; ++i) {
      for (const uint32_t other : graph.levels[0].list(i))
        if (other < items) links_[i].push_back(other);
      projected_[i] = std::min(i == graph.entry ? max_projected + starts : max_projected,
                               static_cast<uint32_t>(links_[i].size()));
    }
    entry_ = graph.entry;
    if (entry_ >= items) find_entry(items);
  }

  // Of the first `items` keys with links, or of all if none has any, the one nearest to the mean.
  // Searches begin there, so it must have links to their targets: a continued graph needs one of
  // its own items.
  void find_entry(uint32_t items) {
    const uint32_t dim = keys_.dim();
    std::vector<double> mean(dim);
    for (uint32_t i = 0; i < items; ++i)
      for (uint32_t d = 0; d < dim; ++d)
        mean[d] += static_cast<double>(keys_.scale(i)) * keys_.row(i)[d] / items;
    const bool linked = std::any_of(links_.begin(), links_.begin() + items,
                                    [](const auto& list) { return !list.empty(); });
    double best = std::numeric_limits<double>::infinity();
    for (uint32_t i = 0; i < items; ++i) {
      if (linked && links_[i].empty()) continue;
      double dot = 0;
      for (uint32_t d = 0; d < dim; ++d) dot += mean[d] * keys_.row(i)[d];
      const double distance =
          static_cast<double>(keys_.square(i)) - 2 * dot * static_cast<double>(keys_.scale(i));
      if (distance < best) best = distance, entry_ = i;
    }
  }

  // Links the entry to the best keys of all kinds of queries: an unusual search might find no way
  // from the mean.
  void open_entry() {
    std::vector<uint32_t>& list = links_[entry_];
    for (std::size_t i = 0; i < starts && !bests_.empty(); ++i) {
      const uint32_t best = bests_[bests_.size() * i / starts];
      if (best != entry_ && std::find(list.begin(), list.end(), best) == list.end())
        list.push_back(best);
    }
    projected_[entry_] = static_cast<uint32_t>(list.size());
  }

  // Writes the squared distances from `item` to others to near_, ascending.
  void measure(uint32_t item, std::span<const uint32_t> others) {
    dots_.resize(others.size());
    keys_.dots(item, others, &refs_, dots_.data());
    near_.clear();
    for (std::size_t i = 0; i < others.size(); ++i)
      near_.push_back({keys_.square(item) + keys_.square(others[i]) - 2 * dots_[i], others[i]});
    std::sort(near_.begin(), near_.end());
  }

  // From near_, the keys near `item`: those nearer to it than to any key taken before; then the
  // nearest others (algorithm 2: acquire neighbours).
  std::vector<uint32_t> choose() {
    std::vector<uint32_t> chosen;
    left_.clear();
    for (const Near& n : near_) {
      if (chosen.size() == links_per_item) break;
      bool alone = true;
      for (std::size_t at = 0; at < chosen.size() && alone; at += compared) {
        const auto some =
            std::span<const uint32_t>(chosen).subspan(at, std::min(compared, chosen.size() - at));
        float dots[compared];
        keys_.dots(n.item, some, &refs_, dots);
        for (std::size_t i = 0; i < some.size() && alone; ++i)
          alone = keys_.square(n.item) + keys_.square(some[i]) - 2 * dots[i] > n.distance;
      }
      if (alone) chosen.push_back(n.item);
      else left_.push_back(n.item);
    }
    for (std::size_t i = 0; i < left_.size() && chosen.size() < links_per_item; ++i)
      chosen.push_back(left_[i]);
    return chosen;
  }

  // Chooses the links that are not projected anew when they become too many.
  void link(uint32_t from, uint32_t to) {
    std::vector<uint32_t>& list = links_[from];
    if (std::find(list.begin(), list.end(), to) != list.end()) return;
    list.push_back(to);
    const uint32_t projected = projected_[from];
    if (list.size() <= projected + max_links) return;
    measure(from, std::span(list).subspan(projected));
    const std::vector<uint32_t> chosen = choose();
    list.resize(projected);
    list.insert(list.end(), chosen.begin(), chosen.end());
  }

  void link_both(uint32_t item, const std::vector<uint32_t>& chosen) {
    for (const uint32_t other : chosen) link(item, other);
    for (const uint32_t other : chosen) link(other, item);
  }

  // The nearest keys of queries [first, first + n) of this head: nearest_[query][found].
  void nearest(uint32_t first, uint32_t n) {
    const uint32_t page_tokens = input_.pages.shape().page.page_tokens,
                   begin = input_.first_token / page_tokens;
    const uint32_t pages = input_.pages.pages() - begin, items = keys_.items();
    const QueryRows rows = input_.queries.rows_of(input_.layer, input_.kv_head, first, n);
    scores_.resize(std::size_t{n} * items);
    bytes_.resize(
        std::max<std::size_t>(input_.kernels.attend_scratch(n, rows.dim), std::size_t{items} * 4));
    page_refs_.resize(batch_pages);
    for (uint32_t p = 0; p < pages && !input_.cancel.fired(); p += batch_pages) {
      const uint32_t some = std::min(batch_pages, pages - p);
      for (uint32_t i = 0; i < some; ++i)
        page_refs_[i] = input_.pages.page(input_.layer, input_.kv_head, begin + p + i);
      input_.kernels.score_tokens(rows, page_refs_.data(), some,
                                  scores_.data() + std::size_t{p} * page_tokens, items,
                                  bytes_.data());
    }
    chosen_.resize(nearest_keys);
    nearest_.clear();
    for (uint32_t r = 0; r < n && !input_.cancel.fired(); ++r) {
      const float* scores = scores_.data() + std::size_t{r} * items;
      const uint32_t found =
          input_.kernels.top_k(scores, items, nearest_keys, chosen_.data(), bytes_.data());
      nearest_.emplace_back(chosen_.begin(), chosen_.begin() + found);
      std::sort(nearest_.back().begin(), nearest_.back().end(), [&](uint32_t a, uint32_t b) {
        return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
      });
    }
  }

  void project() {
    linked_from_.resize(keys_.items());
    const std::size_t k = std::min(nearest_keys, keys_.items());
    for (uint32_t q = 0; by_device_ && q < input_.query_count && !input_.cancel.fired(); ++q)
      lead(std::span(found_).subspan(q * k, k));
    for (uint32_t q = 0; !by_device_ && q < input_.query_count && !input_.cancel.fired();
         q += batch_queries) {
      nearest(input_.first_query + q, std::min(batch_queries, input_.query_count - q));
      for (const auto& found : nearest_) lead(found);
    }
    for (uint32_t i = 0; i < keys_.items(); ++i)
      projected_[i] = static_cast<uint32_t>(links_[i].size());
    linked_from_ = {};
    found_ = {};
  }

  // Links the keys of one query, best first, each from better ones.
  void lead(std::span<const uint32_t> found) {
    ++search_;
    if (!found.empty()) bests_.push_back(found[0]);
    for (std::size_t rank = 0; rank < found.size(); ++rank) {
      const uint32_t item = found[rank];
      std::vector<uint32_t>& from = linked_from_[item];
      auto there = static_cast<std::size_t>(std::count_if(
          from.begin(), from.end(), [&](uint32_t other) { return met_[other] == search_; }));
      met_[item] = search_;
      if (there >= better_links) continue;
      batch_.clear();
      for (std::size_t i = 0; i < rank; ++i)
        if (links_[found[i]].size() < max_projected &&
            std::find(from.begin(), from.end(), found[i]) == from.end())
          batch_.push_back(found[i]);
      measure(item, batch_);
      for (std::size_t i = 0; i < near_.size() && there < better_links; ++i, ++there) {
        links_[near_[i].item].push_back(item);
        from.push_back(near_[i].item);
      }
    }
  }

  // Writes the link_breadth nearest keys that a search of the graph so far meets to near_, without
  // the item itself.
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
        if (best_.size() == link_breadth) {
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
      if (best_.size() == link_breadth && best_.front() < next) break;
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
  KeyRows keys_;
  Array<float> metric_;
  std::vector<std::vector<uint32_t>> links_, linked_from_;
  std::vector<uint32_t> bests_;  // the best key of each query
  Array<uint32_t> projected_;    // per item, how many of its first links are projected
  uint32_t entry_ = 0;
  Array<uint32_t> met_;
  uint32_t search_ = 0;
  std::vector<Near> near_, best_, open_;
  std::vector<uint32_t> left_, batch_;
  std::vector<std::vector<uint32_t>> nearest_;
  bool by_device_ = false;
  Array<uint32_t> found_;  // by the device: the nearest keys of each query
  Array<KeyRef> refs_;
  Array<float> dots_, scores_;
  Array<uint32_t> chosen_;
  Array<PageRef> page_refs_;
  Array<std::byte> bytes_;
};

}  // namespace

TokenIndex::Words build_ood(const IndexInput& input) { return RoarGraph(input).build(); }

std::unique_ptr<const Selector> make_ood_selector() {
  return make_nearest_selector(IndexKind::ood, {8, 128});
}

}  // namespace kvasir
