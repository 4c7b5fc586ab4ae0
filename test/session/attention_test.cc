// Selected attention: tokens of a step that share a scan of the summaries have the same results as
// each alone.
#include "attention/attention.h"
#include "pool.h"
#include "select/blocks.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace kvasir;
using kvasir::test::pool;

namespace {

// tokens; those that are asked for seal no page, whatever its size
constexpr uint32_t window = 96, sealed = 1216, asked = 13;

// One layer that has read `sealed + window` tokens, and what `asked` more bring.
struct Reading {
  HeadShape heads;
  KvStore store;
  std::vector<float> k, v, q;  // of the tokens that are asked for

  explicit Reading(const HeadShape& shape)
      : heads(shape), store({1, shape.kv_heads, PageShape::of(shape.head_dim)}, window) {
    std::mt19937 random(shape.head_dim);
    std::normal_distribution<float> normal;
    const auto numbers = [&](std::size_t count) {
      std::vector<float> out(count);
      for (float& x : out) x = normal(random);
      return out;
    };
    for (uint32_t n = window; store.tokens() < sealed + window;) {
      REQUIRE(store.prepare(n).ok());
      store.write(0, n, numbers(n * shape.kv_width()).data(), numbers(n * shape.kv_width()).data());
      store.commit(n, cpu_kernels(), &pool(1));
      n = std::min<uint32_t>(n, static_cast<uint32_t>(sealed + window - store.tokens()));
    }
    REQUIRE(store.sealed_tokens() == sealed);
    REQUIRE(store.build_sketch(nullptr, cpu_kernels(), &pool(1), nullptr).ok());
    k = numbers(asked * shape.kv_width()), v = numbers(asked * shape.kv_width()),
    q = numbers(asked * shape.q_width());
  }

  // What the first `tokens` of them attend, so many a step, in each step those from `first` on.
  // scans: bytes of summaries that were read.
  std::vector<float> attend(const SelectOptions& select, uint32_t tokens, uint32_t together,
                            uint32_t threads, uint64_t* scans = nullptr, uint32_t first = 0,
                            std::vector<float>* totals = nullptr, float cap = 0) const {
    const Plan plan = make_plan(select, sealed, 1, {});
    const auto selector = plan.strategy->make ? plan.strategy->make() : nullptr;
    return attend_by(plan, selector.get(), tokens, together, threads, scans, first, totals, cap);
  }
  std::vector<float> attend_by(const Plan& plan, const Selector* selector, uint32_t tokens,
                               uint32_t together, uint32_t threads, uint64_t* scans = nullptr,
                               uint32_t first = 0, std::vector<float>* totals = nullptr,
                               float cap = 0) const {
    KvStore sequence(store);
    const CancelLatch never(nullptr);
    Attention attention(heads, store.shape().page, cpu_kernels(), &pool(threads));
    attention.set_softcap(cap);
    std::vector<float> out(std::size_t{tokens} * heads.q_width());
    if (totals) totals->assign(std::size_t{tokens} * heads.heads, 0);
    for (std::size_t at = 0; at < tokens; at += together) {
      REQUIRE(sequence.prepare(together).ok());
      sequence.write(0, together, k.data() + at * heads.kv_width(),
                     v.data() + at * heads.kv_width());
      REQUIRE(attention
                  .run({.first = first,
                        .tokens = together,
                        .q = q.data() + at * heads.q_width(),
                        .store = sequence,
                        .selector = selector,
                        .plan = plan,
                        .cancel = never},
                       out.data() + at * heads.q_width(),
                       totals ? totals->data() + at * heads.heads : nullptr)
                  .ok());
      sequence.commit(together, cpu_kernels(), &pool(1));
    }
    REQUIRE(sequence.sealed_tokens() == sealed);
    if (scans) *scans = attention.counts().summary_bytes;
    return out;
  }
};

SelectOptions select_by(const char* strategy, bool share) {
  SelectOptions o;
  o.strategy = strategy;
  o.budget_tokens = 64;
  o.dense_layers = 0;
  o.share_heads = share;
  return o;
}

// Of `quest` by its blocks and by larger ones, of `bounded` by a budget and by a coverage, and of
// one that scans nothing.
std::vector<SelectOptions> choices() {
  std::vector<SelectOptions> all;
  for (const bool share : {true, false}) {
    for (const char* strategy : {"quest", "bounded", "flat"})
      all.push_back(select_by(strategy, share));
    all.push_back(select_by("quest", share));
    all.back().unit_tokens = 64;
    all.push_back(select_by("bounded", share));
    all.back().coverage = 0.5f;
  }
  return all;
}

}  // namespace

TEST_CASE(
    "tokens of a step that choose by one scan attend the same bits as one at a time, on any number "
    "of threads") {
  // Groups of three heads, of five and of two; three sizes of a page.
  for (const HeadShape& shape :
       {HeadShape{1, 6, 2, 64}, HeadShape{1, 5, 1, 32}, HeadShape{1, 4, 2, 128}}) {
    const Reading reading(shape);
    for (const SelectOptions& select : choices()) {
      CAPTURE(shape.head_dim);
      CAPTURE(select.strategy);
      CAPTURE(select.share_heads);
      CAPTURE(select.unit_tokens);
      CAPTURE(select.coverage);
      for (const uint32_t tokens : {6u, asked}) {
        const auto alone = reading.attend(select, tokens, 1, 1);
        for (const uint32_t threads : {1u, 3u, 8u}) {
          CAPTURE(threads);
          CHECK(reading.attend(select, tokens, tokens, threads) == alone);
        }
      }
    }
  }
}

TEST_CASE("a question shares scans of the summaries, but leaves no thread without work") {
  const Reading reading({1, 6, 2, 64});
  const auto scans = [&](uint32_t tokens, uint32_t together, uint32_t threads) {
    uint64_t bytes = 0;
    reading.attend(select_by("quest", true), tokens, together, threads, &bytes);
    return bytes;
  };
  const uint64_t one = scans(1, 1, 1);
  CHECK(scans(6, 1, 1) == 6 * one);
  CHECK(scans(6, 6, 1) == one);
  CHECK(scans(6, 6, 3) == 2 * one);
  CHECK(scans(6, 6, 8) == 4 * one);
  CHECK(scans(2, 2, 8) == 2 * one);
  CHECK(scans(13, 13, 1) == 2 * one);
}

TEST_CASE("the last tokens of a step attend the same alone and among all") {
  const Reading reading({1, 6, 2, 64});
  std::vector<SelectOptions> all = choices();
  all.push_back(select_by("full", true));
  for (const SelectOptions& select : all) {
    CAPTURE(select.strategy);
    for (const uint32_t first : {1u, 8u, asked - 1}) {
      for (const float cap : {0.0f, 2.0f}) {
        CAPTURE(cap);
        std::vector<float> totals, whole_totals;
        auto whole = reading.attend(select, asked, asked, 3, nullptr, 0, &whole_totals, cap);
        // what is not wanted is not written
        std::fill_n(whole.begin(), first * reading.heads.q_width(), 0.0f);
        std::fill_n(whole_totals.begin(), first * reading.heads.heads, 0.0f);
        CHECK(reading.attend(select, asked, asked, 3, nullptr, first, &totals, cap) == whole);
        CHECK(totals == whole_totals);
      }
    }
  }
}

namespace {

// Chooses the same for all, a list and samples, and notes by which queries.
class Fixed final : public Selector {
 public:
  struct Row {
    uint32_t kv_head;
    std::vector<float> query;
    float total;  // of sinks and window
  };
  explicit Fixed(const PageShape& shape) : shape_(shape) {}
  Scanned scan(const SelectorQuery& query, SelectorScratch* scratch) const override {
    scratch->scores.assign(std::size_t{query.rows.rows} * 4, 1.0f);
    const std::lock_guard lock(mutex_);
    for (uint32_t r = 0; r < query.rows.rows; ++r) {
      const float* row = query.rows.f32 + std::size_t{r} * query.rows.dim;
      rows_.push_back({query.kv_head,
                       {row, row + query.rows.dim},
                       query.near_m[r] + std::log(query.near_l[r])});
    }
    return {100, true};
  }
  void choose(const SelectorQuery& query, SelectorScratch*, Selection* out) const override {
    choose_fixed(query.kv_head, out);
  }
  std::vector<Row> take_rows() const {
    std::sort(rows_.begin(), rows_.end(), [](const Row& a, const Row& b) {
      return std::tie(a.kv_head, a.query) < std::tie(b.kv_head, b.query);
    });
    return std::exchange(rows_, {});
  }
  mutable std::vector<float> sums_;  // by which was chosen, one a head
  mutable std::vector<uint32_t> chosen_for_;

 protected:
  void sum(const SelectorQuery& query, SelectorScratch* scratch) const override {
    for (uint32_t i = 0; i < 4; ++i) scratch->scores[i] = static_cast<float>(query.rows.rows);
  }
  void choose_together(const SelectorQuery& query, SelectorScratch* scratch,
                       Selection* out) const override {
    choose_fixed(query.kv_head, out);
    const std::lock_guard lock(mutex_);
    sums_.push_back(scratch->scores.at(3));
    chosen_for_.push_back(query.rows.rows);
  }

 private:
  void choose_fixed(uint32_t kv_head, Selection* out) const {
    begin_selection(1, out);
    out->samples.assign(1, {}), out->sample_numbers.assign(1, {});
    out->sampled = true;
    for (uint32_t page = 1 + kv_head; page < sealed / shape_.page_tokens; page += 2) {
      out->lists[0].push_back({nullptr, nullptr, 0x5});
      out->page_numbers[0].push_back(page);
      if (page % 4 == 1) continue;
      out->samples[0].push_back({nullptr, nullptr, 0xf0, 1.5f});
      out->sample_numbers[0].push_back(page);
    }
    out->tokens = 2 * out->lists[0].size() + 4 * out->samples[0].size();
  }
  const PageShape shape_;
  mutable std::mutex mutex_;
  mutable std::vector<Row> rows_;
};

}  // namespace

TEST_CASE(
    "tokens that choose together attend what is chosen for them as they would alone, by the "
    "queries of every fourth one") {
  for (const HeadShape& shape : {HeadShape{1, 6, 2, 64}, HeadShape{1, 5, 1, 32},
                                 HeadShape{1, 40, 1, 32}, HeadShape{1, 4, 2, 128}}) {
    const Reading reading(shape);
    const Fixed selector(reading.store.shape().page);
    Plan plan = make_plan(select_by("bounded", true), sealed, 1, {});
    for (const uint32_t tokens : {2u, 6u, asked}) {
      for (const float cap : {0.0f, 2.0f}) {
        CAPTURE(shape.head_dim);
        CAPTURE(tokens);
        CAPTURE(cap);
        plan.query_batch = false;
        std::vector<float> totals, its_totals;
        const auto alone =
            reading.attend_by(plan, &selector, tokens, tokens, 2, nullptr, 0, &totals, cap);
        const std::vector<Fixed::Row> all = selector.take_rows();
        plan.query_batch = true;
        selector.sums_.clear(), selector.chosen_for_.clear();
        const auto together =
            reading.attend_by(plan, &selector, tokens, tokens, 1, nullptr, 0, &its_totals, cap);
        const std::vector<Fixed::Row> asking = selector.take_rows();
        for (std::size_t i = 0; i < alone.size(); ++i)
          REQUIRE(together[i] == doctest::Approx(alone[i]).epsilon(1e-4));
        for (std::size_t i = 0; i < totals.size(); ++i)
          REQUIRE(its_totals[i] == doctest::Approx(totals[i]).epsilon(1e-5));
        const uint32_t block = std::max(1u, 128 / shape.group()),
                       blocks = (tokens + block - 1) / block;
        if (blocks == 1) CHECK(asking.size() == std::size_t{(tokens + 3) / 4} * shape.heads);
        std::size_t found = 0;
        for (const Fixed::Row& row : asking)
          for (const Fixed::Row& of : all)
            if (of.kv_head == row.kv_head && of.query == row.query) {
              ++found;
              CHECK(row.total == doctest::Approx(of.total).epsilon(1e-5));
            }
        CHECK(found == asking.size());
        // the last token's queries are among them
        for (const uint32_t d : {0u, shape.head_dim - 1}) {
          const float last = reading.q[(tokens - 1) * shape.q_width() + d] /
                             std::sqrt(static_cast<float>(shape.head_dim));
          CHECK(std::any_of(asking.begin(), asking.end(), [&](const Fixed::Row& row) {
            return row.query[d] == doctest::Approx(last);
          }));
        }
        float sum = 0, rows = 0;
        for (float s : selector.sums_) sum += s;
        for (uint32_t n : selector.chosen_for_) rows += static_cast<float>(n);
        CHECK(sum == static_cast<float>(asking.size()));
        CHECK(rows == sum);
        for (const uint32_t threads : {3u, 8u})
          CHECK(reading.attend_by(plan, &selector, tokens, tokens, threads, nullptr, 0, nullptr,
                                  cap) == together);
        (void)selector.take_rows();
      }
    }
  }
}

TEST_CASE("tokens that choose together, with a budget of everything, attend everything") {
  const Reading reading({1, 6, 2, 64});
  SelectOptions select = select_by("bounded", true);
  const auto full = reading.attend(select_by("full", true), asked, asked, 1);
  select.budget_tokens = sealed;
  Plan plan = make_plan(select, sealed, 1, {});
  plan.query_batch = true;
  const auto selector = plan.strategy->make();
  const auto all = reading.attend_by(plan, selector.get(), asked, asked, 3);
  for (std::size_t i = 0; i < full.size(); ++i)
    REQUIRE(all[i] == doctest::Approx(full[i]).epsilon(1e-3));
}

// With hidden pages a merge by log-sum-exp must give what all pages give: those of a half, those of
// the other one, and sinks and window once.
TEST_CASE("hidden pages are not attended, and all others are") {
  const Reading reading({1, 6, 2, 64});
  const uint32_t pages = sealed / reading.store.shape().page.page_tokens, middle = pages / 3;
  SelectOptions select = select_by("bounded", true);
  select.budget_tokens = sealed;
  Plan plan = make_plan(select, sealed, 1, {});
  const auto selector = plan.strategy->make();
  const CancelLatch never(nullptr);
  struct Result {
    std::vector<float> out, lse;
  };
  const auto attend = [&](PageRange hidden, const Selector* by) {
    Attention attention(reading.heads, reading.store.shape().page, cpu_kernels(), &pool(2));
    Result r;
    r.out.resize(asked * reading.heads.q_width()), r.lse.resize(asked * reading.heads.heads);
    REQUIRE(attention
                .run({.tokens = asked,
                      .q = reading.q.data(),
                      .store = reading.store,
                      .selector = by,
                      .plan = plan,
                      .is_apart = true,
                      .hidden = hidden,
                      .cancel = never},
                     r.out.data(), r.lse.data())
                .ok());
    return r;
  };
  for (const Selector* by : {static_cast<const Selector*>(nullptr), selector.get()})
    for (const bool together : {false, true}) {
      plan.query_batch = together;
      const Result all = attend({}, by), none = attend({1, pages}, by),
                   first = attend({middle, pages}, by), second = attend({1, middle}, by);
      for (std::size_t i = 0; i < all.lse.size(); ++i) {
        const double a = std::exp(static_cast<double>(first.lse[i])),
                     b = std::exp(static_cast<double>(second.lse[i])),
                     twice = std::exp(static_cast<double>(none.lse[i])),
                     sum = std::exp(static_cast<double>(all.lse[i]));
        CHECK(a + b - twice == doctest::Approx(sum).epsilon(1e-3));
        CHECK((a < sum && b < sum && twice < a));
        for (uint32_t d = 0; d < reading.heads.head_dim; ++d) {
          const std::size_t at = i * reading.heads.head_dim + d;
          const double merged =
              (a * static_cast<double>(first.out[at]) + b * static_cast<double>(second.out[at]) -
               twice * static_cast<double>(none.out[at])) /
              sum;
          REQUIRE(std::abs(merged - static_cast<double>(all.out[at])) < 2e-3);
        }
      }
    }
}

TEST_CASE("pages are removed from all lists and samples of a selection, with their tokens") {
  Selection s;
  begin_selection(2, &s);
  s.samples.assign(2, {}), s.sample_numbers.assign(2, {});
  s.sampled = true;
  for (const std::size_t list : {0u, 1u})
    for (uint32_t page = 1; page < 9; ++page) {
      s.lists[list].push_back({nullptr, nullptr, 0x7});
      s.page_numbers[list].push_back(page);
      s.tokens += 3;
      for (int i = 0; i < 2; ++i) {
        s.samples[list].push_back({nullptr, nullptr, 0xf, 1.0f});
        s.sample_numbers[list].push_back(page);
        s.tokens += quad_tokens;
      }
    }
  const uint64_t before = s.tokens;
  remove_pages(3, 5, &s);
  CHECK(s.tokens == before - 2 * 2 * (3 + 2 * quad_tokens));
  for (const std::size_t list : {0u, 1u}) {
    CHECK((s.page_numbers[list].size() == 6 && s.lists[list].size() == 6));
    CHECK((s.sample_numbers[list].size() == 12 && s.samples[list].size() == 12));
    for (const auto* numbers : {&s.page_numbers[list], &s.sample_numbers[list]})
      for (std::size_t i = 0; i < numbers->size(); ++i) {
        CHECK(((*numbers)[i] < 3 || (*numbers)[i] >= 5));
        if (i > 0) CHECK((*numbers)[i] >= (*numbers)[i - 1]);
      }
  }
  remove_pages(9, 20, &s);
  CHECK(s.page_numbers[0].size() == 6);
  remove_pages(0, 20, &s);
  CHECK((s.tokens == 0 && s.lists[1].empty() && s.samples[1].empty()));
}
