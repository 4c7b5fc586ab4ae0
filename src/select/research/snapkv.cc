// `snapkv`: the tokens that the end of the prompt attends most, selected once for the whole answer
// (SnapKV, arXiv 2404.14469, section 4).
//
//   prefill  a question is prefilled exactly, as the end of the prompt
//   vote     the newest 32 queries, the observation window, give every token its share of their
//            attention; the votes of a head are their sum
//   pool     a token counts with the largest vote within three tokens of it (max pooling, kernel
//            7), so that neighbours are kept with it
//   choose   the best tokens of each head. The answer attends them, the sinks, and everything after
//            the pages that were sealed at the choice
//
// Query heads of a group share a list by the sum of their votes, or have one each, as in the paper.
// The paper drops the other tokens; here they stay in the store, and the next question selects
// anew.
#include <algorithm>
#include <cmath>
#include <vector>

#include "select/blocks.h"
#include "select/filter_layers.h"
#include "select/token_scores.h"

namespace kvasir {
namespace {

constexpr uint32_t reach = 3;  // tokens on each side in a pool
// A logarithm; smaller shares count as nothing, as in Kernels::attention_shares.
constexpr float smallest_share = -24;

struct PageChoice {
  Array<PageRef> pages;
  Array<uint32_t> numbers;
  uint64_t tokens = 0;
};

struct SnapMemory final : StepMemory {
  std::vector<PageChoice> choices;  // [layers][kv_heads][lists]
  uint32_t lists = 1;
  uint32_t end_page = 0;  // everything from here on is attended
};

class SnapSelector final : public Selector {
 public:
  std::unique_ptr<StepMemory> make_memory() const override {
    return std::make_unique<SnapMemory>();
  }

  bool observe(const Observation& seen, StepMemory* memory) const override {
    auto& m = static_cast<SnapMemory&>(*memory);
    const StoreShape& shape = seen.pages.shape();
    m.lists = seen.share ? 1 : seen.heads / shape.kv_heads;
    m.end_page = seen.end_page;
    m.choices.assign(std::size_t{shape.heads_total()} * m.lists, {});
    if (seen.end_page <= seen.first_page) return true;
    std::atomic<bool> intact{true};
    seen.pool->run(shape.heads_total(), [&](uint32_t at, uint32_t) {
      const uint32_t layer = at / shape.kv_heads;
      if (seen.budgets[layer] > 0 && !choose(seen, layer, at % shape.kv_heads, m.lists,
                                             m.choices.data() + std::size_t{at} * m.lists))
        intact = false;
    });
    return intact;
  }

  void choose(const SelectorQuery& query, SelectorScratch*, Selection* out) const override {
    const auto& m = static_cast<const SnapMemory&>(*query.memory);
    const PageShape& shape = query.pages.shape().page;
    const uint64_t whole = ~uint64_t{0} >> (64 - shape.page_tokens);
    begin_selection(m.lists, out);
    // Nothing to select; also for sequences that are never sealed.
    if (query.pages.pages() <= query.first_page) return;
    for (uint32_t i = 0; i < m.lists; ++i) {
      const PageChoice& choice =
          m.choices[(std::size_t{query.layer} * query.pages.shape().kv_heads + query.kv_head) *
                        m.lists +
                    i];
      out->lists[i] = choice.pages;
      out->page_numbers[i] = choice.numbers;
      out->tokens += choice.tokens;
      for (uint32_t p = std::max(m.end_page, query.first_page); p < query.pages.pages(); ++p) {
        out->lists[i].push_back({nullptr, nullptr, whole});
        out->page_numbers[i].push_back(p);
        out->tokens += shape.page_tokens;
      }
    }
  }

 private:
  // For one KV head; false: a page of a mapped file is damaged.
  static bool choose(const Observation& seen, uint32_t layer, uint32_t head, uint32_t lists,
                     PageChoice* choices) {
    const uint32_t page_tokens = seen.pages.shape().page.page_tokens,
                   begin = seen.first_page * page_tokens;
    const uint32_t n = seen.end_page * page_tokens - begin;
    for (uint32_t p = seen.first_page; p < seen.end_page; ++p) {
      if (seen.cancel.fired()) return true;
      if (!seen.pages.intact_page(layer, head, p)) return false;
    }
    Array<float> votes(std::size_t{lists} * n), pooled(n);
    add_votes(seen, layer, head, lists, n, votes.data());
    const auto budget = static_cast<uint32_t>(std::min<uint64_t>(n, seen.budgets[layer]));
    Array<uint32_t> chosen(budget);
    Array<std::byte> scratch(std::size_t{n} * 4);
    for (uint32_t i = 0; i < lists && !seen.cancel.fired(); ++i) {
      const float* row = votes.data() + std::size_t{i} * n;
      for (uint32_t t = 0; t < n; ++t)
        pooled[t] =
            *std::max_element(row + (t < reach ? 0 : t - reach), row + std::min(n, t + reach + 1));
      choices[i].tokens =
          seen.kernels.top_k(pooled.data(), n, budget, chosen.data(), scratch.data());
      tokens_to_pages({chosen.data(), static_cast<std::size_t>(choices[i].tokens)}, begin,
                      page_tokens, &choices[i].pages, &choices[i].numbers);
    }
    return true;
  }

  // votes: [lists][n] for the tokens from first_page on.
  static void add_votes(const Observation& seen, uint32_t layer, uint32_t head, uint32_t lists,
                        uint32_t n, float* votes) {
    const PageShape& shape = seen.pages.shape().page;
    const uint32_t group = seen.heads / seen.pages.shape().kv_heads, stride = shape.extent_tokens(),
                   begin = seen.first_page * shape.page_tokens;
    TokenQueries queries(seen.kernels, shape);
    Array<float> scores(std::size_t{group} * stride);
    Array<std::byte> scratch(seen.kernels.attend_scratch(group, shape.dim));
    PageRef refs[extent_pages];
    for (uint64_t position = seen.queries.begin();
         position < seen.queries.end() && !seen.cancel.fired(); ++position) {
      const QueryRows& rows = queries.set(
          seen.queries.query(layer, position) + std::size_t{head} * group * shape.head_dim, group);
      const float* lse = seen.queries.lse(layer, position) + head * group;
      const auto before = static_cast<uint32_t>(
          std::min<uint64_t>(n, position + 1 - std::min<uint64_t>(position + 1, begin)));
      for (uint32_t at = 0; at < before; at += stride) {  // up to the query itself
        const uint32_t count = std::min(stride, before - at),
                       first = (begin + at) / shape.page_tokens;
        const auto pages =
            static_cast<uint32_t>((count + shape.page_tokens - 1) / shape.page_tokens);
        for (uint32_t p = 0; p < pages; ++p) refs[p] = seen.pages.page(layer, head, first + p);
        seen.kernels.score_tokens(rows, refs, pages, scores.data(), stride, scratch.data());
        for (uint32_t r = 0; r < group; ++r) {
          float* to = votes + std::size_t{lists == 1 ? 0 : r} * n + at;
          for (uint32_t t = 0; t < count; ++t)
            if (const float share = scores[r * stride + t] - lse[r]; share > smallest_share)
              to[t] += std::exp(share);
        }
      }
    }
  }
};

}  // namespace

std::unique_ptr<const Selector> make_snapkv_selector() { return std::make_unique<SnapSelector>(); }

}  // namespace kvasir
