// `ivf`: the tokens with the largest scores in the clusters nearest to a query: an inverted file
// (IVF), the index that RetrievalAttention (arXiv 2409.10516, section 4) and others compare with.
//
// Keys are clustered by k-means (Lloyd) per KV head, into as many clusters as the square root of
// their number, on at most 64 keys per cluster. A query reads the clusters whose centroids have the
// largest inner products with it: search_breadth clusters, or enough for a multiple of the budget.
// Centroids are stored in 8 bits with a scale, like keys.
#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "select/graph/index_build.h"
#include "select/graph/token_search.h"

namespace kvasir {
namespace {

constexpr uint32_t iterations = 10;
constexpr uint32_t sampled_keys = 64;  // per cluster
constexpr uint32_t batch_keys = 64;    // assigned per pass
// Tokens read per token of the budget: finds 0.9 of the best 100 of 32K tokens.
constexpr uint32_t tokens_per_chosen = 8;

class Clusters {
 public:
  explicit Clusters(const IndexInput& input)
      : input_(input), keys_(input.pages, input.kernels, input.layer, input.kv_head,
                             input.first_token, input.cancel),
        dim_(keys_.dim()), count_(static_cast<uint32_t>(std::ceil(std::sqrt(keys_.items())))),
        centroids_(std::size_t{count_} * dim_), q8_(centroids_.size()), scale_(count_),
        half_square_(count_), dots_(std::size_t{count_} * batch_keys) {}

  TokenIndex::Words build() {
    const uint32_t sampled = std::min(keys_.items(), count_ * sampled_keys);
    const auto sample = [&](uint32_t i) {
      return static_cast<uint32_t>(uint64_t{i} * keys_.items() / sampled);
    };
    for (uint32_t c = 0; c < count_; ++c) {
      const uint32_t item = static_cast<uint32_t>(uint64_t{c} * keys_.items() / count_);
      for (uint32_t d = 0; d < dim_; ++d)
        centroids_[c * dim_ + d] = keys_.scale(item) * keys_.row(item)[d];
    }
    Array<float> sums(centroids_.size());
    Array<uint32_t> sizes(count_);
    for (uint32_t step = 0; step < iterations; ++step) {
      round();
      std::fill(sums.begin(), sums.end(), 0.0f);
      std::fill(sizes.begin(), sizes.end(), 0u);
      assign(sampled, sample, [&](uint32_t item, uint32_t c) {
        for (uint32_t d = 0; d < dim_; ++d)
          sums[c * dim_ + d] += keys_.scale(item) * keys_.row(item)[d];
        ++sizes[c];
      });
      for (uint32_t c = 0; c < count_; ++c)  // an empty cluster keeps its centroid
        for (uint32_t d = 0; d < dim_ && sizes[c] > 0; ++d)
          centroids_[c * dim_ + d] = sums[c * dim_ + d] / static_cast<float>(sizes[c]);
    }
    round();
    TokenIndex::Lists clusters;
    clusters.lists.resize(count_);
    assign(
        keys_.items(), [](uint32_t i) { return i; },
        [&](uint32_t item, uint32_t c) { clusters.lists[c].push_back(item); });
    if (input_.cancel.fired()) return {};
    return TokenIndex::encode(0, {&clusters, 1}, centroids_);
  }

 private:
  // Rounds the centroids to 8 bits.
  void round() {
    input_.kernels.quantize_queries(centroids_.data(), count_, dim_, q8_.data(), nullptr,
                                    scale_.data());
    for (uint32_t c = 0; c < count_; ++c) {
      float square = 0;
      for (uint32_t d = 0; d < dim_; ++d) {
        const float x = scale_[c] * q8_[c * dim_ + d];
        centroids_[c * dim_ + d] = x;
        square += x * x;
      }
      half_square_[c] = square / 2;
    }
  }

  // Calls f(item, its nearest centroid) for the items number(0 .. n - 1), in order.
  template <class Number, class F>
  void assign(uint32_t n, Number&& number, F&& f) {
    const QueryRows rows{count_, dim_, nullptr, q8_.data(), nullptr, scale_.data()};
    for (uint32_t first = 0; first < n && !input_.cancel.fired(); first += batch_keys) {
      const uint32_t some = std::min(batch_keys, n - first);
      KeyRef refs[batch_keys];
      for (uint32_t i = 0; i < some; ++i) refs[i] = keys_.ref(number(first + i));
      input_.kernels.score_keys(rows, refs, some, 4, dots_.data(), batch_keys);
      for (uint32_t i = 0; i < some; ++i) {
        uint32_t best = 0;
        for (uint32_t c = 1; c < count_; ++c)
          if (dots_[c * batch_keys + i] - half_square_[c] >
              dots_[best * batch_keys + i] - half_square_[best])
            best = c;
        f(number(first + i), best);
      }
    }
  }

  const IndexInput& input_;
  const KeyRows keys_;
  const uint32_t dim_, count_;
  Array<float> centroids_;  // [count][dim]
  Array<int8_t> q8_;
  Array<float> scale_, half_square_, dots_;
};

class IvfSelector final : public Selector {
 public:
  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    TokenSearch search(query, query.indexes->of(IndexKind::ivf), scratch, out);
    if (const TokenIndex::Head* head = search.head())
      for (uint32_t r = 0; r < query.rows.rows; ++r)
        read_clusters(query, *head, r, scratch, &search);
    search.score_rest();
    out->summary_bytes += search.head() ? search.head()->floats.size_bytes() : 0;
    if (search.intact()) search.choose_best();
  }

 private:
  static void read_clusters(const SelectorQuery& query, const TokenIndex::Head& head, uint32_t r,
                            SelectorScratch* scratch, TokenSearch* search) {
    const TokenIndex::Level& clusters = head.levels[0];
    const uint32_t count = clusters.lists(), dim = query.rows.dim;
    const float* q = query.rows.f32 + std::size_t{r} * dim;
    scratch->query.resize(std::max<std::size_t>(scratch->query.size(), count));
    scratch->chosen.resize(std::max<std::size_t>(scratch->chosen.size(), count));
    for (uint32_t c = 0; c < count; ++c) {
      float dot = 0;
      for (uint32_t d = 0; d < dim; ++d) dot += q[d] * head.floats[std::size_t{c} * dim + d];
      scratch->query[c] = dot;
      scratch->chosen[c] = c;
    }
    const float* dots = scratch->query.data();
    std::sort(
        scratch->chosen.begin(), scratch->chosen.begin() + count,
        [&](uint32_t a, uint32_t b) { return dots[a] > dots[b] || (dots[a] == dots[b] && a < b); });
    const uint64_t wanted = query.budget_tokens * tokens_per_chosen;
    uint64_t read = 0;
    for (uint32_t i = 0; i < count && (query.breadth ? i < query.breadth : read < wanted); ++i) {
      const std::span<const uint32_t> items = clusters.list(scratch->chosen[i]);
      search->score_items(items, r);
      read += items.size();
    }
  }
};

}  // namespace

TokenIndex::Words build_ivf(const IndexInput& input) { return Clusters(input).build(); }

std::unique_ptr<const Selector> make_ivf_selector() { return std::make_unique<IvfSelector>(); }

}  // namespace kvasir
