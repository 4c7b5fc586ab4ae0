// `filter-layers`: the tokens that a few layers attend most, for the layers after them (OmniKV,
// ICLR 2025, section 4).
//
//   attend  all layers up to the first filter layer, the filter layers and the layer after each
//           attend everything (select/plan.h)
//   score   in a filter layer a token counts with its largest share of attention among the query
//           heads of the layer: of the newest query (`last`), or summed over the newest 16 queries,
//           with equal weights (`uniform`) or half the weight of the next one (`exponential`)
//   choose  the best tokens; every KV head of the layers up to the next filter layer attends them
//
// Each query is scored alone, so results do not depend on threads or on the other queries of a
// step. The largest share is found among logarithms, which have the same order, so `last` needs no
// exponential.
#include "select/filter_layers.h"

#include <cmath>
#include <limits>
#include <vector>

#include "base/checked.h"
#include "select/blocks.h"
#include "select/token_scores.h"

namespace kvasir {

float filter_weight(FilterWindow window, uint32_t age) {
  switch (window) {
    case FilterWindow::last:
      return age == 0 ? 1.0f : 0.0f;
    case FilterWindow::exponential:
      return std::ldexp(1.0f, -static_cast<int>(age));
    case FilterWindow::uniform:
      break;
  }
  return 1;
}

void tokens_to_pages(std::span<const uint32_t> tokens, uint32_t first, uint32_t page_tokens,
                     Array<PageRef>* refs, Array<uint32_t>* numbers) {
  refs->clear();
  numbers->clear();
  for (const uint32_t number : tokens) {
    const uint32_t token = first + number, page = token / page_tokens;
    if (numbers->empty() || numbers->back() != page) {
      refs->push_back({nullptr, nullptr, 0});
      numbers->push_back(page);
    }
    refs->back().tokens |= uint64_t{1} << token % page_tokens;
  }
}

namespace {

// Tokens of a step per pass: the scores of their windows are in memory.
constexpr uint32_t batch_tokens = 16;
constexpr uint32_t task_pages = 64;  // pages of a query per task

struct Choice {
  Array<PageRef> pages;
  Array<uint32_t> numbers;
  uint64_t tokens = 0;
};

struct FilterMemory final : StepMemory {
  std::vector<Choice> choices;  // for the tokens of the step, by the last filter layer
  Array<float> scores;          // [window - 1 + batch][tokens] ln of shares
  Array<float> sums;            // [batch][tokens]
  Array<uint32_t> chosen;       // [batch][budget]
  Array<std::byte> bytes;       // [batch][tokens * 4]
};

class FilterLayersSelector final : public Selector {
 public:
  std::unique_ptr<StepMemory> make_memory() const override {
    return std::make_unique<FilterMemory>();
  }

  void filter(const FilterStep& step, StepMemory* memory) const override {
    auto& m = static_cast<FilterMemory&>(*memory);
    m.choices.resize(std::max<std::size_t>(m.choices.size(), step.tokens));
    for (uint32_t i = 0; i < step.tokens; ++i)
      m.choices[i].pages.clear(), m.choices[i].numbers.clear(), m.choices[i].tokens = 0;
    if (step.pages.pages() <= step.first_page) return;
    for (uint32_t first = 0; first < step.tokens && !step.cancel.fired(); first += batch_tokens)
      choose(step, first, std::min(batch_tokens, step.tokens - first), &m);
  }

  void choose(const SelectorQuery& query, SelectorScratch*, Selection* out) const override {
    begin_selection(1, out);
    const Choice& choice = static_cast<const FilterMemory*>(query.memory)->choices[query.token];
    out->lists[0] = choice.pages;
    out->page_numbers[0] = choice.numbers;
    out->tokens = choice.tokens;
  }

 private:
  // The queries that count for the tokens first to first + count - 1 of a step, and the tokens to
  // choose from.
  struct Pass {
    Pass(const FilterStep& step, uint32_t first_token, uint32_t token_count)
        : first(first_token), count(token_count),
          window(step.window == FilterWindow::last ? 1 : filter_window_tokens),
          page_tokens(step.pages.shape().page.page_tokens), begin(step.first_page * page_tokens),
          pages(step.pages.pages() - step.first_page), n(std::size_t{pages} * page_tokens) {
      const bool has_recent = step.recent && step.recent->end() == step.first_token;
      const uint64_t known = has_recent ? step.recent->begin() : step.first_token;
      const uint64_t position = step.first_token + first;
      const uint64_t before = std::min<uint64_t>(window - 1, position - known);
      oldest = position - before;
      queries = static_cast<uint32_t>(before + count);
    }
    uint32_t first, count;
    uint32_t window;  // queries that count for a token
    uint32_t page_tokens;
    uint32_t begin;  // position of the first token to choose from
    uint32_t pages;
    std::size_t n;        // tokens to choose from
    uint64_t oldest = 0;  // position of the first query
    uint32_t queries = 0;
  };

  static void choose(const FilterStep& step, uint32_t first, uint32_t count, FilterMemory* m) {
    const Pass pass(step, first, count);
    score(step, pass, m);
    choose_by_scores(step, pass, m);
  }

  // Computes the scores of the queries, [queries][n].
  static void score(const FilterStep& step, const Pass& pass, FilterMemory* m) {
    const uint32_t head_dim = step.pages.shape().page.head_dim,
                   task_tokens = task_pages * pass.page_tokens,
                   parts = static_cast<uint32_t>(ceil_div(pass.pages, task_pages));
    m->scores.resize(std::max(m->scores.size(), pass.queries * pass.n));
    step.pool->run(pass.queries * parts, [&](uint32_t task, uint32_t) {
      if (step.cancel.fired()) return;
      const uint32_t j = task % pass.queries, part = task / pass.queries;
      const uint64_t position = pass.oldest + j, from = pass.begin + uint64_t{part} * task_tokens;
      const uint64_t to = std::min<uint64_t>(pass.begin + pass.n, from + task_tokens);
      const bool of_step = position >= step.first_token;
      const std::size_t i = of_step ? position - step.first_token : 0;
      const float* q =
          of_step ? step.q + i * step.heads * head_dim : step.recent->query(step.layer, position);
      const float* lse =
          of_step ? step.lse + i * step.heads : step.recent->lse(step.layer, position);
      float* out = m->scores.data() + j * pass.n + (from - pass.begin);
      best_shares(step, {q, lse}, from, to, out);
      // Tokens after the query have no share.
      for (uint64_t t = std::max(from, position + 1); t < to; ++t)
        out[t - from] = -std::numeric_limits<float>::infinity();
    });
  }

  static void choose_by_scores(const FilterStep& step, const Pass& pass, FilterMemory* m) {
    const std::size_t n = pass.n;
    const auto budget = static_cast<uint32_t>(std::min<uint64_t>(n, step.budget_tokens));
    m->sums.resize(std::max(m->sums.size(), pass.count * n));
    m->chosen.resize(std::max(m->chosen.size(), std::size_t{pass.count} * budget));
    m->bytes.resize(std::max(m->bytes.size(), pass.count * n * 4));
    step.pool->run(pass.count, [&](uint32_t i, uint32_t) {
      if (step.cancel.fired()) return;
      const uint32_t own = pass.queries - pass.count + i;  // of the token, among the queries
      const float* scores = m->scores.data() + own * n;
      if (pass.window > 1) {
        float* sums = m->sums.data() + i * n;
        std::fill_n(sums, n, 0.0f);
        for (uint32_t age = std::min(own, pass.window - 1) + 1; age-- > 0;) {
          const float weight = filter_weight(step.window, age);
          const float* of_query = m->scores.data() + (own - age) * n;
          for (std::size_t t = 0; t < n; ++t) sums[t] += weight * std::exp(of_query[t]);
        }
        scores = sums;
      }
      uint32_t* chosen = m->chosen.data() + std::size_t{i} * budget;
      Choice& choice = m->choices[pass.first + i];
      choice.tokens = step.kernels.top_k(scores, static_cast<uint32_t>(n), budget, chosen,
                                         m->bytes.data() + i * n * 4);
      tokens_to_pages({chosen, static_cast<std::size_t>(choice.tokens)}, pass.begin,
                      pass.page_tokens, &choice.pages, &choice.numbers);
    });
  }
};

}  // namespace

std::unique_ptr<const Selector> make_filter_layers_selector() {
  return std::make_unique<FilterLayersSelector>();
}

}  // namespace kvasir
