// The choice of filter layers, against the definition.
#include "select/filter_layers.h"
#include "samples.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

struct Case {
  PageStore store;
  RecentQueries recent;
  uint64_t position;          // of the step's first token
  std::vector<float> q, lse;  // of all tokens: RecentQueries' first, then the step's
  uint32_t before, tokens;

  Case(uint32_t head_dim, uint32_t pages, uint32_t before_step, uint32_t step_tokens)
      : store(sample_shape(head_dim)), recent(sample_layers, sample_heads, head_dim),
        before(before_step), tokens(step_tokens) {
    if (pages) seal_pages(&store, pages, 1);
    const uint32_t n = before + tokens;
    position = uint64_t{pages} * store.shape().page.page_tokens + before;
    q = normals(std::size_t{n} * sample_heads * head_dim, 2, 0, 3);
    lse = normals(std::size_t{n} * sample_heads, 3, 5, 1);
    for (uint32_t t = 0; t < before; ++t) {  // as decode adds them, one by one
      recent.prepare(position - before + t, 1);
      for (uint32_t l = 0; l < sample_layers; ++l) recent.write(l, 1, query(t), lse_of(t), nullptr);
      recent.commit(position - before + t, 1, nullptr);
    }
  }
  uint32_t head_dim() const { return store.shape().page.head_dim; }
  const float* query(uint32_t t) const {
    return q.data() + std::size_t{t} * sample_heads * head_dim();
  }
  const float* lse_of(uint32_t t) const { return lse.data() + std::size_t{t} * sample_heads; }

  std::vector<std::vector<uint32_t>> choose(FilterWindow window, uint64_t budget,
                                            uint32_t threads) const {
    const auto selector = make_filter_layers_selector();
    const auto memory = selector->make_memory();
    const CancelLatch never(nullptr);
    selector->filter({cpu_kernels(), store, &pool(threads), never, 1, tokens, sample_heads,
                      position, query(before), lse_of(before), &recent, 1, budget, window},
                     memory.get());
    std::vector<std::vector<uint32_t>> out;
    for (uint32_t t = 0; t < tokens; ++t) {
      Selection selection;
      SelectorScratch scratch;
      const KeySketch none(store.shape());
      selector->select({cpu_kernels(),
                        store,
                        none,
                        1,
                        0,
                        {},
                        nullptr,
                        nullptr,
                        1,
                        budget,
                        true,
                        std::numeric_limits<float>::infinity(),
                        t,
                        memory.get()},
                       &scratch, &selection);
      out.push_back(tokens_of(selection, 0, store.shape().page.page_tokens));
      CHECK(selection.tokens == out.back().size());
    }
    return out;
  }

  // OmniKV: the sum over the window's queries of weight * max over heads of the share of attention.
  std::vector<double> plain(FilterWindow window, uint32_t token) const {
    std::vector<double> sums;
    const uint32_t newest = before + token, length = window == FilterWindow::last ? 1 : 16;
    for (uint32_t age = 0; age < length && age <= newest; ++age) {
      std::vector<double> best;
      for (uint32_t h = 0; h < sample_heads; ++h) {
        const auto scores = plain_scores(store, 1, h, query(newest - age));
        best.resize(scores.size());
        for (std::size_t i = 0; i < scores.size(); ++i)
          best[i] =
              std::max(best[i], std::exp(scores[i] - static_cast<double>(lse_of(newest - age)[h])));
      }
      sums.resize(best.size());
      const double weight = window == FilterWindow::exponential ? std::pow(0.5, age) : 1;
      for (std::size_t i = 0; i < best.size(); ++i) sums[i] += weight * best[i];
    }
    return sums;
  }
};

}  // namespace

TEST_CASE(
    "filter layers choose the tokens with the largest share of attention that any head gives, over "
    "each window, for each token of a step" *
    doctest::test_suite("slow")) {
  for (uint32_t head_dim : {40u, 128u, 256u})
    for (uint32_t before : {0u, 5u, 40u}) {
      const Case c(head_dim, 70, before, 19);  // two batches
      const uint32_t page_tokens = c.store.shape().page.page_tokens;
      for (FilterWindow window :
           {FilterWindow::last, FilterWindow::exponential, FilterWindow::uniform})
        for (uint64_t budget : {1u, 37u}) {
          const auto chosen = c.choose(window, budget, 2);
          CHECK(chosen == c.choose(window, budget, 1));
          CHECK(chosen == c.choose(window, budget, 3));
          for (uint32_t t : {0u, 3u, 15u, 16u, 18u}) {
            CAPTURE(head_dim);
            CAPTURE(before);
            CAPTURE(t);
            CHECK(are_best(chosen[t], c.plain(window, t), page_tokens, budget, 1e-4));
          }
        }
    }
}

TEST_CASE(
    "a filter layer's window leaves out what was forgotten, and tokens that come after a query") {
  Case c(128, 20, 20, 1);
  const auto whole = c.choose(FilterWindow::uniform, 30, 2);
  c.recent.rewind(c.position - 3);  // those are of another text now
  c.recent.prepare(c.position - 3, 3);
  for (uint32_t l = 0; l < sample_layers; ++l)
    c.recent.write(l, 3, c.query(0), c.lse_of(0), nullptr);
  c.recent.commit(c.position - 3, 3, nullptr);
  CHECK(c.choose(FilterWindow::uniform, 30, 2) != whole);
  CHECK(c.choose(FilterWindow::last, 30, 2) ==
        Case(128, 20, 20, 1).choose(FilterWindow::last, 30, 2));

  c.position -= 40;  // a small window: 20 pages of 16 tokens reach beyond the older queries
  c.recent.rewind(0);
  for (uint32_t t = 0; t < c.before; ++t) {
    c.recent.prepare(c.position - c.before + t, 1);
    for (uint32_t l = 0; l < sample_layers; ++l)
      c.recent.write(l, 1, c.query(t), c.lse_of(t), nullptr);
    c.recent.commit(c.position - c.before + t, 1, nullptr);
  }
  const auto chosen = c.choose(FilterWindow::uniform, 100, 2);
  CHECK(chosen[0].size() == 100);
  for (uint32_t token : chosen[0]) CHECK(token <= c.position);
}

TEST_CASE(
    "filter layers choose nothing where nothing is sealed, and everything where the budget "
    "allows") {
  CHECK(Case(64, 0, 3, 2).choose(FilterWindow::uniform, 50, 2)[1].empty());
  CHECK(Case(64, 1, 3, 2).choose(FilterWindow::uniform, 50, 2)[1].empty());  // the sinks' page
  CHECK(Case(64, 3, 3, 2).choose(FilterWindow::uniform, 5000, 2)[1].size() == 64);
}
