// `bounded`: samples quads of tokens by a sketch of their keys. The sample estimates the attention
// of unread quads. Kvasir's own method, and the default.
//
//   score   estimates q . k of each token by a sketch of every key (store/key_sketch.h). The score
//           of a quad is that of its best token
//   choose  makes one list per group of heads, by the sum of a quad's estimated shares of
//           attention over the heads. Quads with large shares are always read. A sample of the
//           others represents all of them (select/sampling.h). MagicPIG (arXiv 2410.16179) samples
//           by hashes, vAttention (arXiv 2510.05688) uniformly
//   budget  is larger for layers with a larger measured error (select/plan.h). With a coverage,
//           each query and layer reads the fewest quads that keep the expected error of its sample
//           below 1 - coverage
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "select/sampling.h"

namespace kvasir {
namespace {

// A quad's estimated attention is that of so many tokens like its best one: between 1, a single
// match, and 4, a uniform quad.
constexpr float best_tokens_of_quad = 2;

class BoundedSelector final : public Selector {
 public:
  Scanned scan(const SelectorQuery& query, SelectorScratch* scratch) const override {
    const PageShape& shape = query.pages.shape().page;
    const uint32_t extents = query.pages.extents(), rows = query.rows.rows,
                   stride = extents * shape.extent_quads();
    if (query.pages.pages() <= query.first_page) return scratch->scores.clear(), Scanned();
    project(query, scratch);
    scratch->scores.resize(std::size_t{rows} * stride);
    return by_extents(query, [&](uint32_t e, const int8_t* sketch, const int8_t* next) {
      query.kernels.score_sketch(
          shape, rows, scratch->query8.data(), scratch->query_scale.data(), sketch, next,
          scratch->scores.data() + std::size_t{e} * shape.extent_quads(), stride);
    });
  }

  Scanned raise_blocks(const SelectorQuery& query, const BlockScores& out,
                       SelectorScratch* scratch) const override {
    const PageShape& shape = query.pages.shape().page;
    const uint32_t quads = shape.extent_quads(), tiles = shape.quad_tiles(),
                   first = query.first_page * shape.page_quads(),
                   end = query.pages.pages() * shape.page_quads();
    if (end <= first) return {};
    project(query, scratch);
    return by_extents(query, [&](uint32_t e, const int8_t* sketch, const int8_t* next) {
      const uint32_t at = e * quads;
      query.kernels.raise_by_sketch(
          shape, query.rows.rows, scratch->query8.data(), scratch->query_scale.data(), sketch, next,
          first - std::min(first, at), std::min(end - std::min(end, at), quads),
          out.scores + std::size_t{e} * tiles, out.stride);
    });
  }

  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    const uint32_t rows = query.rows.rows;
    begin_selection(query.share ? 1 : rows, out);
    const BlockRange range = quads_of(query);
    if (range.end <= range.first) return;
    if (query.share && rows > 1) sum(query, scratch);
    else
      to_shares(query, best_tokens_of_quad,
                scratch->scores.data() + std::size_t{range.row} * range.stride + range.first,
                range.stride, range.end - range.first);
    sample(query, range, query.share ? rows : 1, scratch, out);
  }

 protected:
  void sum(const SelectorQuery& query, SelectorScratch* scratch) const override {
    const BlockRange range = quads_of(query);
    if (range.end <= range.first) return;
    add_shares(query, best_tokens_of_quad,
               scratch->scores.data() + std::size_t{range.row} * range.stride + range.first,
               range.stride, range.end - range.first);
  }

  void choose_together(const SelectorQuery& query, SelectorScratch* scratch,
                       Selection* out) const override {
    begin_selection(1, out);
    const BlockRange range = quads_of(query);
    if (range.end <= range.first) return;
    // If a share is too small for one of many rows, its sample weighs too much in all of them. So
    // the weight of a sample is at most ten times that of a uniform sample.
    float* shares = scratch->scores.data() + range.first;
    const uint32_t n = range.end - range.first;
    const auto min_share = static_cast<float>(
        0.1 * query.kernels.sum_shares(shares, n, std::numeric_limits<float>::max()).below / n);
    for (uint32_t i = 0; i < n; ++i) shares[i] = std::max(shares[i], min_share);
    sample(query, range, query.rows.rows, scratch, out);
  }

 private:
  // Calls f(extent, its sketch, that of the next call or null).
  template <class F>
  static Scanned by_extents(const SelectorQuery& query, F&& f) {
    const uint32_t extents = query.pages.extents();
    for (uint32_t i = 0, e = query.first_extent % extents; i < extents; ++i) {
      if (!query.sketch.intact(query.layer, query.kv_head, e)) return {0, false};
      const uint32_t after = e + 1 < extents ? e + 1 : 0;
      f(e, query.sketch.extent(query.layer, query.kv_head, e),
        i + 1 < extents ? query.sketch.extent(query.layer, query.kv_head, after) : nullptr);
      e = after;
    }
    return {uint64_t{extents} * query.pages.shape().page.sketch_bytes(), true};
  }

  static BlockRange quads_of(const SelectorQuery& query) {
    const PageShape& shape = query.pages.shape().page;
    return {quad_tokens, query.first_page * shape.page_quads(),
            query.pages.pages() * shape.page_quads(), query.pages.extents() * shape.extent_quads(),
            query.first_row};
  }

  // Samples each list by its row of shares, each the sum over `heads` heads.
  static void sample(const SelectorQuery& query, const BlockRange& range, uint32_t heads,
                     SelectorScratch* scratch, Selection* out) {
    const SampleSize size = sample_size(query.budget_tokens, query.coverage, heads);
    begin_samples(out);
    for (std::size_t i = 0; i < out->lists.size(); ++i)
      sample_list(query, range, i, size, scratch, out);
  }

  // Projects the queries to the sketch's coordinates, as int8.
  static void project(const SelectorQuery& query, SelectorScratch* scratch) {
    const uint32_t n = query.pages.shape().page.sketch_dim(), rows = query.rows.rows;
    scratch->query.resize(std::size_t{rows} * n);
    scratch->query8.resize(std::size_t{rows} * n);
    scratch->query_scale.resize(rows);
    const uint32_t dim = query.rows.dim;
    query.kernels.multiply(query.rows.f32, dim, 1, rows,
                           query.sketch.query_basis(query.layer, query.kv_head), n, n, dim,
                           scratch->query.data(), n);
    for (uint32_t r = 0; r < rows; ++r) {
      const float* x = scratch->query.data() + std::size_t{r} * n;
      float largest = 0;
      for (uint32_t c = 0; c < n; ++c) largest = std::max(largest, std::fabs(x[c]));
      const bool none = !(largest > 1e-30f && largest < 1e30f);
      scratch->query_scale[r] = none ? 0 : largest / 127;
      for (uint32_t c = 0; c < n; ++c)
        scratch->query8[r * n + c] =
            static_cast<int8_t>(none ? 0 : std::lrint(x[c] * (127 / largest)));
    }
  }
};

}  // namespace

std::unique_ptr<const Selector> make_bounded_selector() {
  return std::make_unique<BoundedSelector>();
}

}  // namespace kvasir
