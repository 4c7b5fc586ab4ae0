// The choice of `infllm` with given representatives, against the definition.
#include <bit>

#include "samples.h"
#include "store/kv_store.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

KvStore random_text(uint32_t head_dim, uint32_t tokens) {
  KvStore store(sample_shape(head_dim), 64);
  const auto k = normals(std::size_t{tokens} * sample_kv_heads * head_dim, 5),
             q = normals(std::size_t{tokens} * sample_heads * head_dim, 6);
  REQUIRE(store.prepare(tokens).ok());
  for (uint32_t l = 0; l < sample_layers; ++l) {
    store.write(l, tokens, k.data(), k.data());
    store.observe(l, tokens, q.data(), sample_heads);
  }
  store.commit(tokens, cpu_kernels(), &pool());
  return store;
}

Selection choose(const KvStore& store, const Array<float>& q, uint64_t budget, bool share) {
  const uint32_t dim = store.shape().page.dim;
  const QueryRows rows{sample_group, dim, q.data(), nullptr, nullptr, nullptr};
  Selection selection;
  SelectorScratch scratch;
  make_infllm_selector()->select(
      {cpu_kernels(), store.pages(), store.sketch(), 1, 1, rows, nullptr, nullptr, 1, budget, share,
       std::numeric_limits<float>::infinity(), 0, nullptr, 0, &store.representatives()},
      &scratch, &selection);
  return selection;
}

}  // namespace

TEST_CASE(
    "infllm reads the blocks whose representatives score best, for each head or for their sum, and "
    "what fills no block yet") {
  for (uint32_t head_dim : {40u, 64u, 128u, 256u})
    for (uint32_t tokens : {100u, 180u, 1500u}) {
      const KvStore store = random_text(head_dim, tokens);
      const PageShape& page = store.shape().page;
      const auto sealed = static_cast<uint32_t>(store.sealed_tokens());
      const uint32_t blocks = sealed / 128, first = page.page_tokens;
      Array<float> q(std::size_t{sample_group} * page.dim);
      const auto numbers = normals(q.size(), 9);
      for (std::size_t i = 0; i < q.size(); ++i) q[i] = i % page.dim < head_dim ? numbers[i] : 0;
      for (const bool share : {true, false})
        for (uint64_t budget : {1u, 129u, 500u, 100000u}) {
          CAPTURE(head_dim);
          CAPTURE(tokens);
          CAPTURE(budget);
          const Selection selection = choose(store, q, budget, share);
          REQUIRE(selection.intact);
          REQUIRE(selection.lists.size() == (share ? 1 : sample_group));
          uint64_t counted = 0;
          for (uint32_t i = 0; i < selection.lists.size(); ++i) {
            std::vector<std::pair<double, uint32_t>> order;
            for (uint32_t b = 0; b < blocks; ++b) {
              double relevance = 0;
              for (uint32_t r = share ? 0 : i; r < (share ? sample_group : i + 1); ++r)
                for (uint32_t d = 0; d < page.dim; ++d)
                  relevance += static_cast<double>(q[r * page.dim + d]) *
                               static_cast<double>(std::bit_cast<float>(
                                   uint32_t{store.representatives().key(1, 1, b)[d]} << 16));
              order.push_back({-relevance, b});
            }
            std::sort(order.begin(), order.end());
            const uint64_t rest =
                sealed - std::max(first, std::max(blocks * 128, std::min(first, sealed)));
            const uint64_t left = sealed > first ? budget - std::min(budget, rest) : 0;
            const std::size_t count = std::min<std::size_t>(blocks, (left + 127) / 128);
            std::vector<uint32_t> want;
            for (uint32_t t = first; t < sealed; ++t) {
              const auto is_chosen = [&](const auto& o) { return o.second == t / 128; };
              const auto end = order.begin() + static_cast<std::ptrdiff_t>(count);
              if (t / 128 >= blocks || std::find_if(order.begin(), end, is_chosen) != end)
                want.push_back(t);
            }
            CHECK(tokens_of(selection, i, page.page_tokens) == want);
            counted += want.size();
          }
          CHECK(selection.tokens == counted);
        }
    }
}
