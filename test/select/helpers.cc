#include "helpers.h"

#include <bit>

namespace kvasir::test {

PageStore random_store(uint32_t head_dim, uint32_t pages, uint32_t heads, uint32_t seed) {
  const StoreShape shape{1, heads, PageShape::of(head_dim)};
  const uint32_t dim = shape.page.dim, page_tokens = shape.page.page_tokens;
  PageStore store(shape);
  REQUIRE(store.reserve(pages).ok());
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> centres(std::size_t{12} * head_dim);
  for (float& x : centres) x = normal(random);
  Array<float> k(page_tokens * dim), v(page_tokens * dim);
  for (uint32_t h = 0; h < heads; ++h)
    for (uint32_t p = 0; p < pages; ++p) {
      for (uint32_t t = 0; t < page_tokens; ++t) {
        const uint32_t cluster = static_cast<uint32_t>(random() % 12);
        for (uint32_t d = 0; d < head_dim; ++d) {
          k[t * dim + d] = centres[cluster * head_dim + d] + 0.7f * normal(random);
          v[t * dim + d] = normal(random);
        }
      }
      store.seal(cpu_kernels(), 0, h, p, k.data(), v.data());
    }
  store.commit(pages);
  return store;
}

QueryCase::QueryCase(const PageStore& s, uint32_t head, uint32_t n, uint32_t seed)
    : store(s), sketch(s.shape()), kv_head(head) {
  const PageShape& shape = store.shape().page;
  const uint32_t dim = shape.dim, page_tokens = shape.page_tokens;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  f32.resize(std::size_t{n} * dim);
  q.resize(f32.size());
  split.resize(2 * f32.size());
  scale.resize(n);
  Array<float> k(std::size_t{tokens()} * dim), v(page_tokens * dim);
  for (uint32_t p = 0; p < store.pages(); ++p) {
    const PageRef ref = store.page(0, head, p);
    cpu_kernels().unseal_page(shape, ref.data, ref.scales,
                              k.data() + std::size_t{p} * page_tokens * dim, v.data());
  }
  for (uint32_t r = 0; r < n; ++r) {
    const uint32_t near = static_cast<uint32_t>(random() % tokens());
    for (uint32_t d = 0; d < shape.head_dim; ++d)
      f32[r * dim + d] = (k[std::size_t{near} * dim + d] + normal(random)) * 2 /
                         std::sqrt(static_cast<float>(shape.head_dim));
  }
  cpu_kernels().quantize_queries(f32.data(), n, dim, q.data(), split.data(), scale.data());
  rows = {n, dim, f32.data(), q.data(), split.data(), scale.data()};
  scores.assign(n, std::vector<double>(tokens()));
  for (uint32_t r = 0; r < n; ++r) {
    double best = -1e30;
    for (uint32_t t = 0; t < tokens(); ++t) {
      double sum = 0;
      for (uint32_t d = 0; d < dim; ++d)
        sum += q[r * dim + d] * static_cast<double>(k[std::size_t{t} * dim + d]);
      scores[r][t] = sum * static_cast<double>(scale[r]);
      best = std::max(best, scores[r][t]);
    }
    near_m.push_back(static_cast<float>(best) - 3);
    near_l.push_back(2);
    double total = 2;
    for (uint32_t t = first(); t < tokens(); ++t)
      total += std::exp(scores[r][t] - static_cast<double>(near_m[r]));
    totals.push_back(total);
  }
}

SelectorQuery QueryCase::query(uint64_t budget, bool share) const {
  return {.kernels = cpu_kernels(),
          .pages = store,
          .sketch = sketch,
          .layer = 0,
          .kv_head = kv_head,
          .rows = rows,
          .near_m = near_m.data(),
          .near_l = near_l.data(),
          .first_page = 1,
          .budget_tokens = budget,
          .share = share};
}

double QueryCase::score(uint32_t r, uint32_t token) const { return scores[r][token]; }

double QueryCase::share(uint32_t r, uint32_t token) const {
  return std::exp(scores[r][token] - static_cast<double>(near_m[r])) / totals[r];
}

std::set<uint32_t> chosen_tokens(const Selection& selection, std::size_t i,
                                 const PageShape& shape) {
  std::set<uint32_t> out;
  REQUIRE(selection.lists[i].size() == selection.page_numbers[i].size());
  for (std::size_t p = 0; p < selection.lists[i].size(); ++p) {
    const uint64_t bits = selection.lists[i][p].tokens;
    if (p > 0) CHECK(selection.page_numbers[i][p - 1] < selection.page_numbers[i][p]);
    CHECK(bits != 0);
    for (uint64_t left = bits; left; left &= left - 1) {
      const auto t = static_cast<uint32_t>(std::countr_zero(left));
      CHECK(t < shape.page_tokens);
      out.insert(selection.page_numbers[i][p] * shape.page_tokens + t);
    }
  }
  return out;
}

IndexQueries some_queries(const PageStore& store, uint32_t group, uint32_t tokens, uint32_t seed) {
  const StoreShape& shape = store.shape();
  const uint32_t heads = shape.kv_heads * group, head_dim = shape.page.head_dim;
  IndexQueries out(shape, heads, tokens);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(std::size_t{heads} * head_dim);
  for (uint32_t t = 0; t < tokens; ++t) {
    const QueryCase near(store, t % shape.kv_heads, 1, seed + t);
    for (uint32_t h = 0; h < heads; ++h)
      for (uint32_t d = 0; d < head_dim; ++d)
        q[h * head_dim + d] = near.f32[d] * 5 + 0.3f * normal(random);
    out.write(cpu_kernels(), 0, t, 1, q.data());
  }
  return out;
}

std::shared_ptr<TokenIndex> build(IndexKind kind, const PageStore& store,
                                  const IndexQueries& queries, uint32_t threads, uint32_t graphs,
                                  const TokenIndexes::Entry& known) {
  std::shared_ptr<TokenIndex> index;
  Progress none;
  const Status s = build_index({kind, store, queries, graphs, known}, cpu_kernels(), &pool(threads),
                               nullptr, &none, &index);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return index;
}

}  // namespace kvasir::test
