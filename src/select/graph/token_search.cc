#include "select/graph/token_search.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "select/blocks.h"
#include "select/filter_layers.h"

namespace kvasir {

// Starts for a graph whose entry is a token that may not be found.
constexpr uint32_t spread_starts = 8;
constexpr float no_score = -std::numeric_limits<float>::infinity();

TokenSearch::TokenSearch(const SelectorQuery& query, const TokenIndexes::Entry& entry,
                         SelectorScratch* scratch, Selection* out)
    : query_(query), scratch_(scratch), s_(scratch->search), out_(out), rows_(query.rows.rows),
      page_tokens_(query.pages.shape().page.page_tokens), first_(query.first_page * page_tokens_),
      end_(query.pages.pages() * page_tokens_) {
  begin_selection(query.share ? 1 : rows_, out);
  out->found.resize(rows_);
  s_.tokens.clear();
  s_.visits.clear();
  s_.scores.clear();
  s_.fresh.clear();
  if (!entry.index) {
    first_item_ = first_;
    return;
  }
  heads_ = entry.index->heads(query.layer, query.kv_head);
  first_item_ = entry.index->first_token();
  items_ = std::min(entry.valid, end_) - first_item_;
  const uint32_t all = entry.index->items();
  if (s_.met.size() < all || s_.search == UINT32_MAX) {
    s_.met.assign(std::max<std::size_t>(all, s_.met.size()), 0);
    s_.places.resize(s_.met.size());
    s_.search = 0;
  }
  ++s_.search;
}

uint32_t TokenSearch::meet(uint32_t item) {
  if (s_.met[item] == s_.search) return s_.places[item];
  const auto place = static_cast<uint32_t>(s_.tokens.size());
  s_.met[item] = s_.search;
  s_.places[item] = place;
  s_.tokens.push_back(first_item_ + item);
  s_.visits.push_back(0);
  s_.scores.resize(s_.scores.size() + rows_, no_score);
  if (item < items_) s_.fresh.push_back(place);
  return place;
}

bool TokenSearch::visit(uint32_t place, uint32_t row) {
  if (s_.visits[place] == row + 1) return false;
  s_.visits[place] = row + 1;
  return true;
}

void TokenSearch::score_fresh() {
  const auto n = static_cast<uint32_t>(s_.fresh.size());
  if (n == 0) return;
  const PageShape& shape = query_.pages.shape().page;
  s_.keys.resize(n);
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t token = s_.tokens[s_.fresh[i]], page = token / page_tokens_,
                   t = token % page_tokens_;
    if (!query_.pages.intact_page(query_.layer, query_.kv_head, page)) out_->intact = false;
    const PageRef ref = query_.pages.page(query_.layer, query_.kv_head, page);
    s_.keys[i] = {ref.data + shape.key_at(t), std::bit_cast<float>(uint32_t{ref.scales[t]} << 16)};
    for (uint32_t d = 0; d < shape.dim; d += quad_tokens * 4)
      __builtin_prefetch(s_.keys[i].data + d * quad_tokens);
  }
  // Scores by row, then by index: the kernel's order transposed.
  scratch_->scores.resize(std::max<std::size_t>(scratch_->scores.size(), std::size_t{n} * rows_));
  query_.kernels.score_keys(query_.rows, s_.keys.data(), n, PageShape::key_stride,
                            scratch_->scores.data(), n);
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t r = 0; r < rows_; ++r)
      s_.scores[std::size_t{s_.fresh[i]} * rows_ + r] = scratch_->scores[std::size_t{r} * n + i];
  out_->keys_scanned += n;
  out_->summary_bytes += uint64_t{n} * (query_.rows.dim + sizeof(uint16_t));
  s_.fresh.clear();
}

// The neighbours of an item that this row has not met. A neighbour that may not be found is
// replaced by its neighbours.
void TokenSearch::collect(uint32_t item, uint32_t row) {
  s_.met_now.clear();
  const TokenIndex::Level& links = graph(row).levels[0];
  for (const uint32_t next : links.list(item)) {
    const uint32_t place = meet(next);
    if (!visit(place, row)) continue;
    if (next < items_) {
      s_.met_now.push_back(place);
      continue;
    }
    for (const uint32_t second : links.list(next)) {
      if (second >= items_) continue;
      const uint32_t index = meet(second);
      if (visit(index, row)) s_.met_now.push_back(index);
    }
  }
  score_fresh();
  for (const uint32_t place : s_.met_now) out_->found[row].push_back(s_.tokens[place]);
}

// Writes the starts of a row's search to s_.met_now: from the graph's entry down its levels, each
// time to the best neighbour until none is better.
void TokenSearch::start(uint32_t row) {
  s_.met_now.clear();
  s_.open.clear();
  s_.best.clear();
  const TokenIndex::Head& head = graph(row);
  uint32_t at = head.entry;
  if (at >= items_) {
    for (uint32_t i = 0; i < std::min(spread_starts, items_); ++i)
      s_.met_now.push_back(meet(static_cast<uint32_t>(uint64_t{items_} * i / spread_starts)));
    score_fresh();
  } else {
    uint32_t place = meet(at);
    score_fresh();
    for (std::size_t l = head.levels.size() - 1; l > 0; --l) {
      const TokenIndex::Level& level = head.levels[l];
      for (bool moved = true; moved;) {
        moved = false;
        const auto found = std::lower_bound(level.items.begin(), level.items.end(), at);
        if (found == level.items.end() || *found != at) break;
        const auto list = level.list(static_cast<uint32_t>(found - level.items.begin()));
        for (const uint32_t next : list)
          if (next < items_) meet(next), out_->found[row].push_back(first_item_ + next);
        score_fresh();
        for (const uint32_t next : list) {
          if (next >= items_) continue;
          const uint32_t index = meet(next);
          if (score(index, row) > score(place, row)) place = index, at = next, moved = true;
        }
      }
    }
    s_.met_now.push_back(place);
  }
  for (const uint32_t place : s_.met_now)
    visit(place, row), out_->found[row].push_back(s_.tokens[place]);
}

void TokenSearch::nearest(uint32_t row, uint32_t breadth) {
  if (heads_.empty() || items_ == 0) return;
  start(row);
  // Of equal scores the one met earlier is better, so that the order is total.
  const auto better = [](const Scored& a, const Scored& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  };
  const auto worse = [&](const Scored& a, const Scored& b) { return better(b, a); };
  for (;;) {
    for (const uint32_t place : s_.met_now) {
      const Scored candidate{score(place, row), place};
      if (s_.best.size() == breadth && !better(candidate, s_.best.front())) continue;
      s_.open.push_back(candidate);
      std::push_heap(s_.open.begin(), s_.open.end(), worse);
      if (s_.best.size() == breadth) {
        std::pop_heap(s_.best.begin(), s_.best.end(), better);
        s_.best.pop_back();
      }
      s_.best.push_back(candidate);
      std::push_heap(s_.best.begin(), s_.best.end(), better);
    }
    if (s_.open.empty() || !out_->intact) return;
    const Scored next = s_.open.front();
    if (s_.best.size() == breadth && better(s_.best.front(), next)) return;
    std::pop_heap(s_.open.begin(), s_.open.end(), worse);
    s_.open.pop_back();
    collect(s_.tokens[next.second] - first_item_, row);
  }
}

void TokenSearch::within(uint32_t row, uint32_t capacity, float range, float seed) {
  if (heads_.empty() || items_ == 0) return;
  start(row);
  const auto worse = [](const Scored& a, const Scored& b) {
    return a.first < b.first || (a.first == b.first && a.second > b.second);
  };
  float largest = seed;
  uint32_t added = 0;
  for (;;) {
    for (const uint32_t place : s_.met_now) {
      const float candidate_score = score(place, row);
      largest = std::max(largest, candidate_score);
      if (added >= capacity && candidate_score < largest - range) continue;
      ++added;
      s_.open.push_back({candidate_score, place});
      std::push_heap(s_.open.begin(), s_.open.end(), worse);
    }
    if (s_.open.empty() || !out_->intact) return;
    const Scored next = s_.open.front();
    std::pop_heap(s_.open.begin(), s_.open.end(), worse);
    s_.open.pop_back();
    collect(s_.tokens[next.second] - first_item_, row);
  }
}

void TokenSearch::score_items(std::span<const uint32_t> items, uint32_t row) {
  for (const uint32_t item : items)
    if (item < items_) meet(item), out_->found[row].push_back(first_item_ + item);
  score_fresh();
}

void TokenSearch::score_rest() {
  const uint32_t begin = (first_item_ + items_) / page_tokens_, pages = query_.pages.pages();
  scratch_->bytes.resize(std::max<std::size_t>(
      scratch_->bytes.size(), query_.kernels.attend_scratch(rows_, query_.rows.dim)));
  scratch_->scores.resize(
      std::max<std::size_t>(scratch_->scores.size(), std::size_t{rows_} * page_tokens_));
  for (uint32_t p = begin; p < pages; ++p) {
    if (!query_.pages.intact_page(query_.layer, query_.kv_head, p)) {
      out_->intact = false;
      return;
    }
    const PageRef ref = query_.pages.page(query_.layer, query_.kv_head, p);
    query_.kernels.score_tokens(query_.rows, &ref, 1, scratch_->scores.data(), page_tokens_,
                                scratch_->bytes.data());
    for (uint32_t t = 0; t < page_tokens_; ++t) {
      s_.tokens.push_back(p * page_tokens_ + t);
      for (auto& found : out_->found) found.push_back(p * page_tokens_ + t);
      for (uint32_t r = 0; r < rows_; ++r)
        s_.scores.push_back(scratch_->scores[std::size_t{r} * page_tokens_ + t]);
    }
  }
  out_->keys_scanned += uint64_t{pages - begin} * page_tokens_;
  out_->summary_bytes +=
      uint64_t{pages - begin} * (page_tokens_ * query_.rows.dim + page_tokens_ * sizeof(uint16_t));
}

uint32_t TokenSearch::finish() {
  uint32_t kept = 0;
  for (std::size_t i = 0; i < s_.tokens.size(); ++i) {
    if (s_.scores[i * rows_] == no_score) continue;  // met and not scored
    s_.tokens[kept] = s_.tokens[i];
    std::copy_n(s_.scores.data() + i * rows_, rows_, s_.scores.data() + std::size_t{kept} * rows_);
    ++kept;
  }
  s_.tokens.resize(kept);
  scratch_->scores.resize(
      std::max<std::size_t>(scratch_->scores.size(), std::size_t{rows_} * kept));
  for (uint32_t r = 0; r < rows_; ++r)
    for (uint32_t i = 0; i < kept; ++i)
      scratch_->scores[std::size_t{r} * kept + i] = s_.scores[std::size_t{i} * rows_ + r];
  return kept;
}

void TokenSearch::choose(std::size_t list, uint32_t count) {
  const auto n = static_cast<uint32_t>(s_.tokens.size());
  scratch_->chosen.resize(n);
  scratch_->bytes.resize(std::max<std::size_t>(scratch_->bytes.size(), std::size_t{n} * 4));
  uint32_t* chosen = scratch_->chosen.data();
  const uint32_t found = query_.kernels.top_k(scratch_->scores.data() + list * n, n,
                                              std::min(count, n), chosen, scratch_->bytes.data());
  for (uint32_t i = 0; i < found; ++i) chosen[i] = s_.tokens[chosen[i]];
  std::sort(chosen, chosen + found);
  tokens_to_pages({chosen, found}, 0, page_tokens_, &out_->lists[list], &out_->page_numbers[list]);
  out_->tokens += found;
}

void TokenSearch::choose_best() {
  const uint32_t n = finish();
  if (n == 0) return;
  if (query_.share && rows_ > 1) add_shares(query_, 1, scratch_->scores.data(), n, n);
  const auto count = static_cast<uint32_t>(std::min<uint64_t>(n, query_.budget_tokens));
  for (std::size_t i = 0; i < out_->lists.size(); ++i) choose(i, count);
}

namespace {

constexpr uint32_t min_breadth = 64;  // of a search

class NearestSelector final : public Selector {
 public:
  NearestSelector(IndexKind graph, const Breadth& breadth) : graph_(graph), breadth_(breadth) {}
  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    TokenSearch search(query, query.indexes->of(graph_), scratch, out);
    const uint64_t by_budget = std::max(query.budget_tokens / breadth_.part, breadth_.min_breadth);
    const auto breadth = static_cast<uint32_t>(std::min<uint64_t>(
        UINT32_MAX, query.breadth ? std::max(query.breadth, min_breadth) : by_budget));
    for (uint32_t r = 0; r < query.rows.rows; ++r) search.nearest(r, breadth);
    search.score_rest();
    if (search.intact()) search.choose_best();
  }

 private:
  IndexKind graph_;
  Breadth breadth_;
};

}  // namespace

std::unique_ptr<const Selector> make_nearest_selector(IndexKind graph, const Breadth& breadth) {
  return std::make_unique<NearestSelector>(graph, breadth);
}

}  // namespace kvasir
