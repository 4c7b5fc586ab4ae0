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

void tokens_to_pages(const uint32_t* tokens, uint32_t count, uint32_t first, uint32_t page_tokens,
                     Array<PageRef>* refs, Array<uint32_t>* numbers) {
  refs->clear();
  numbers->clear();
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t token = first + tokens[i], page = token / page_tokens;
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
  // Chooses for the tokens first .. first + count - 1 of the step.
  static void choose(const FilterStep& step, uint32_t first, uint32_t count, FilterMemory* m) {
    const uint32_t page_tokens = step.pages.shape().page.page_tokens,
                   head_dim = step.pages.shape().page.head_dim;
    const uint32_t pages = step.pages.pages() - step.first_page,
                   begin = step.first_page * page_tokens;
    const std::size_t n = std::size_t{pages} * page_tokens;  // tokens to choose from
    const uint32_t window = step.window == FilterWindow::last ? 1 : filter_window_tokens;
    // The positions of the queries are oldest .. newest - 1.
    const uint64_t newest = step.first_token + first + count;
    const bool has_recent = step.recent && step.recent->end() == step.first_token;
    const uint64_t known = has_recent ? step.recent->begin() : step.first_token;
    const uint64_t before = std::min<uint64_t>(window - 1, step.first_token + first - known);
    const uint64_t oldest = step.first_token + first - before;
    const auto queries = static_cast<uint32_t>(newest - oldest),
               parts = static_cast<uint32_t>(ceil_div(pages, task_pages));
    const auto budget = static_cast<uint32_t>(std::min<uint64_t>(n, step.budget_tokens));

    m->scores.resize(std::max(m->scores.size(), queries * n));
    step.pool->run(queries * parts, [&](uint32_t task, uint32_t) {
      if (step.cancel.fired()) return;
      const uint32_t j = task % queries, part = task / queries;
      const uint64_t position = oldest + j,
                     from = begin + uint64_t{part} * task_pages * page_tokens;
      const uint64_t to = std::min<uint64_t>(begin + n, from + uint64_t{task_pages} * page_tokens);
      const bool of_step = position >= step.first_token;
      const std::size_t i = of_step ? position - step.first_token : 0;
      const float* q =
          of_step ? step.q + i * step.heads * head_dim : step.recent->query(step.layer, position);
      const float* lse =
          of_step ? step.lse + i * step.heads : step.recent->lse(step.layer, position);
      float* out = m->scores.data() + j * n + (from - begin);
      best_shares(step.kernels, step.pages, step.layer, step.heads, q, lse, from, to, out);
      // Tokens after the query have no share.
      for (uint64_t t = std::max(from, position + 1); t < to; ++t)
        out[t - from] = -std::numeric_limits<float>::infinity();
    });

    m->sums.resize(std::max(m->sums.size(), count * n));
    m->chosen.resize(std::max(m->chosen.size(), std::size_t{count} * budget));
    m->bytes.resize(std::max(m->bytes.size(), count * n * 4));
    step.pool->run(count, [&](uint32_t i, uint32_t) {
      if (step.cancel.fired()) return;
      const uint32_t own = queries - count + i;  // its index among the scored queries
      const float* scores = m->scores.data() + own * n;
      if (window > 1) {
        float* sums = m->sums.data() + i * n;
        std::fill_n(sums, n, 0.0f);
        for (uint32_t age = std::min(own, window - 1) + 1; age-- > 0;) {
          const float weight = filter_weight(step.window, age);
          const float* of_query = m->scores.data() + (own - age) * n;
          for (std::size_t t = 0; t < n; ++t) sums[t] += weight * std::exp(of_query[t]);
        }
        scores = sums;
      }
      uint32_t* chosen = m->chosen.data() + std::size_t{i} * budget;
      Choice& choice = m->choices[first + i];
      choice.tokens = step.kernels.top_k(scores, static_cast<uint32_t>(n), budget, chosen,
                                         m->bytes.data() + i * n * 4);
      tokens_to_pages(chosen, static_cast<uint32_t>(choice.tokens), begin, page_tokens,
                      &choice.pages, &choice.numbers);
    });
  }
};

}  // namespace

std::unique_ptr<const Selector> make_filter_layers_selector() {
  return std::make_unique<FilterLayersSelector>();
}

}  // namespace kvasir
