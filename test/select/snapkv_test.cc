// The choice of `snapkv`, against the definition.
#include "samples.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

struct ObservedCase {
  PageStore store;
  RecentQueries recent;
  std::vector<float> q, lse;  // of the observed tokens
  uint32_t count;

  // `behind`: tokens between the pages and the newest observed query.
  ObservedCase(uint32_t head_dim, uint32_t pages, uint32_t observed, uint32_t behind)
      : store(sample_shape(head_dim)), recent(sample_layers, sample_heads, head_dim),
        count(observed) {
    if (pages) seal_pages(&store, pages, 1);
    q = normals(std::size_t{count} * sample_heads * head_dim, 2, 0, 3);
    lse = normals(std::size_t{count} * sample_heads, 3, 5, 1);
    const uint64_t first = uint64_t{pages} * store.shape().page.page_tokens + behind - count;
    for (uint32_t t = 0; t < count; ++t) {
      recent.prepare(first + t, 1);
      for (uint32_t l = 0; l < sample_layers; ++l) recent.write(l, 1, query(t), lse_of(t), nullptr);
      recent.commit(first + t, 1, nullptr);
    }
  }
  const float* query(uint32_t t) const {
    return q.data() + std::size_t{t} * sample_heads * store.shape().page.head_dim;
  }
  const float* lse_of(uint32_t t) const { return lse.data() + std::size_t{t} * sample_heads; }

  Selection choose(uint32_t layer, uint32_t head, uint64_t budget, bool share, uint32_t end_page,
                   uint32_t threads) const {
    const auto selector = make_snapkv_selector();
    const auto memory = selector->make_memory();
    const CancelLatch never(nullptr);
    const uint64_t budgets[sample_layers] = {budget, budget};
    REQUIRE(selector->observe({cpu_kernels(), store, &pool(threads), never, recent, sample_heads, 1,
                               end_page, budgets, share},
                              memory.get()));
    Selection selection;
    SelectorScratch scratch;
    const KeySketch none(store.shape());
    selector->select({cpu_kernels(),
                      store,
                      none,
                      layer,
                      head,
                      {},
                      nullptr,
                      nullptr,
                      1,
                      budget,
                      share,
                      std::numeric_limits<float>::infinity(),
                      0,
                      memory.get()},
                     &scratch, &selection);
    return selection;
  }

  // SnapKV, section 4: the sum over the window's queries of the softmax, of these query heads, max
  // pooled over 7 tokens; -1 outside.
  std::vector<double> plain(uint32_t layer, uint32_t first_head, uint32_t heads,
                            uint32_t end_page) const {
    const uint32_t page_tokens = store.shape().page.page_tokens;
    std::vector<double> votes(std::size_t{end_page} * page_tokens), pooled(votes.size());
    for (uint64_t p = recent.begin(); p < recent.end(); ++p)
      for (uint32_t h = first_head; h < first_head + heads; ++h) {
        const auto scores = plain_scores(store, layer, h, recent.query(layer, p));
        const auto lse_score = static_cast<double>(recent.lse(layer, p)[h]);
        for (std::size_t t = page_tokens; t < votes.size() && t <= p; ++t)
          votes[t] += std::exp(scores[t] - lse_score);
      }
    for (std::size_t t = page_tokens; t < votes.size(); ++t)
      for (std::size_t i = std::max<std::size_t>(page_tokens, t - 3);
           i < std::min(votes.size(), t + 4); ++i)
        pooled[t] = std::max(pooled[t], votes[i]);
    return pooled;
  }
};

}  // namespace

TEST_CASE(
    "snapkv keeps the tokens near which the newest 32 queries attend most, for each head or for a "
    "group, and all that came later") {
  for (uint32_t head_dim : {40u, 128u})
    for (uint32_t observed : {1u, 40u}) {
      const ObservedCase c(head_dim, 40, observed, observed + 30);
      const uint32_t page_tokens = c.store.shape().page.page_tokens, end = 37;
      for (uint64_t budget : {50u, 100000u})
        for (uint32_t head : {0u, 1u}) {
          CAPTURE(head_dim);
          CAPTURE(observed);
          CAPTURE(budget);
          const auto check = [&](const Selection& s, std::size_t list,
                                 const std::vector<double>& plain) {
            auto chosen = tokens_of(s, list, page_tokens);
            REQUIRE(chosen.size() >= 3 * page_tokens);
            for (uint32_t i = 0; i < 3 * page_tokens; ++i)
              CHECK(chosen[chosen.size() - 1 - i] == 40 * page_tokens - 1 - i);
            chosen.resize(chosen.size() - 3 * page_tokens);
            CHECK(are_best(chosen, plain, page_tokens, budget, 1e-4));
          };
          const Selection shared = c.choose(1, head, budget, true, end, 2);
          REQUIRE(shared.lists.size() == 1);
          check(shared, 0, c.plain(1, head * sample_group, sample_group, end));
          CHECK(tokens_of(c.choose(1, head, budget, true, end, 1), 0, page_tokens) ==
                tokens_of(shared, 0, page_tokens));
          const Selection each = c.choose(0, head, budget, false, end, 3);
          REQUIRE(each.lists.size() == sample_group);
          uint64_t tokens = 0;
          for (uint32_t r = 0; r < sample_group; ++r) {
            check(each, r, c.plain(0, head * sample_group + r, 1, end));
            tokens += tokens_of(each, r, page_tokens).size();
          }
          CHECK(each.tokens == tokens);
        }
    }
}

TEST_CASE(
    "snapkv: a query does not vote for what came after it, and where nothing was sealed nothing is "
    "chosen") {
  const ObservedCase c(128, 20, 32, 0);  // the queries are of tokens in the newest pages
  const auto shared = c.choose(1, 1, 40, true, 20, 2);
  CHECK(
      are_best(tokens_of(shared, 0, 16), c.plain(1, sample_group, sample_group, 20), 16, 40, 1e-4));
  CHECK(ObservedCase(64, 0, 3, 3).choose(0, 0, 50, true, 0, 2).lists.at(0).empty());
  // all are later than the choice
  CHECK(tokens_of(ObservedCase(64, 4, 3, 3).choose(0, 0, 50, true, 0, 2), 0, 32).size() == 96);
}

TEST_CASE("a copy of recent queries has the original's until the one or the other learns more") {
  ObservedCase c(128, 4, 20, 0);
  const uint64_t newest = c.recent.end() - 1;
  const float* row = c.recent.query(1, newest);
  const RecentQueries copy(c.recent);
  CHECK(copy.query(1, newest) == row);
  const Array<float> before = copy.floats();
  // those that are added to what there is, and those that take its place
  for (const uint32_t n : {3u, RecentQueries::capacity}) {
    RecentQueries other(c.recent);
    const auto q = normals(std::size_t{n} * sample_heads * 128, n, 0, 3),
               lse = normals(std::size_t{n} * sample_heads, n + 1, 5, 1);
    for (uint32_t step = 0; step < 2; ++step) {
      other.prepare(other.end(), n);
      for (uint32_t l = 0; l < sample_layers; ++l)
        other.write(l, n, q.data(), lse.data(), &pool(2));
      other.commit(other.end(), n, &pool(2));
      CHECK(std::equal(q.begin(), q.begin() + 128, other.query(1, other.end() - n)));
      CHECK(copy.floats() == before);
      CHECK(c.recent.floats() == before);
    }
    if (n < RecentQueries::capacity) CHECK(std::equal(row, row + 128, other.query(1, newest)));
    c.recent = RecentQueries(copy);
    CHECK(c.recent.floats() == before);
  }
}

TEST_CASE("a step of recent queries changes none that are visible before its commit") {
  ObservedCase c(128, 4, 40, 0);
  const uint32_t width = sample_heads * 128;
  const auto q = normals(8 * std::size_t{width}, 7, 0, 3),
             lse = normals(8 * std::size_t{sample_heads}, 8, 5, 1);
  const auto write = [&](uint64_t first, uint32_t n) {
    c.recent.prepare(first, n);
    for (uint32_t l = 0; l < sample_layers; ++l)
      c.recent.write(l, n, q.data(), lse.data(), &pool(2));
  };
  const auto has = [&](uint64_t first, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t l = 0; l < sample_layers; ++l)
        if (!std::equal(&q[i * width], &q[i * width] + width, c.recent.query(l, first + i)) ||
            !std::equal(&lse[i * sample_heads], &lse[i * sample_heads] + sample_heads,
                        c.recent.lse(l, first + i)))
          return false;
    return true;
  };
  for (uint32_t n = 1; n <= 8; ++n) {
    CAPTURE(n);
    // Steps that fail: behind the newest one, over the newest ones, and behind unknown ones.
    const Array<float> before = c.recent.floats();
    const uint64_t end = c.recent.end();
    for (const uint64_t first : {end, end - 3, end + 3}) {
      write(first, n);
      CHECK(c.recent.floats() == before);
    }
    // One of which only the first tokens stay, then one that replaces the newest token.
    write(end, n);
    const uint32_t kept = (n + 1) / 2;
    c.recent.keep_first(kept, n);
    c.recent.commit(end, kept, &pool(2));
    CHECK(has(end, kept));
    CHECK(c.recent.count() == RecentQueries::capacity);
    const Array<float> after = c.recent.floats();
    const std::size_t row = c.recent.width(), old = (RecentQueries::capacity - kept) * row;
    for (uint32_t l = 0; l < sample_layers; ++l) {
      const std::size_t layer = l * RecentQueries::capacity * row;
      const auto *a = after.data() + layer, *b = before.data() + layer;
      CHECK(std::equal(a, a + old, b + kept * row));
    }
    write(c.recent.end() - 1, n);
    c.recent.commit(c.recent.end() - 1, n, &pool(2));
    CHECK(has(end + kept - 1, n));
    CHECK(c.recent.end() == end + kept - 1 + n);
  }
}
