// `bounded`: quads of tokens sampled by a sketch of their keys, so that what is not read is estimated, not dropped. Kvasir's own, the default.
//
//   score   a sketch of every key (store/key_sketch.h) estimates each token's q . k; a quad, four tokens, counts by its best one
//   choose  the heads of a group share a list: a quad counts with the sum of the shares of attention that it would have. Large shares are read for
//           certain, of the others a sample that stands for all of them (select/sampling.h). MagicPIG (arXiv 2410.16179) and vAttention (arXiv
//           2510.05688) sample too, by hashes and evenly
//   budget  layers get more of it the worse chosen tokens serve them, as measured while reading (select/plan.h)
//           or, with a coverage, each query and layer reads the fewest quads that keep the expected error of its sample below 1 - coverage
#include <algorithm>
#include <cmath>

#include "select/sampling.h"

namespace kvasir {
namespace {

constexpr float like_the_best = 2;  // a quad counts for as many tokens as its best one: between one match and an even quad

class BoundedSelector final : public Selector {
 public:
  Scanned scan(const SelectorQuery& query, SelectorScratch* scratch) const override {
    const PageShape& shape = query.pages.shape().page;
    const uint32_t extents = query.pages.extents(), rows = query.rows.rows, stride = extents * shape.extent_quads();
    if (query.pages.pages() <= query.first_page) return {};
    project(query, scratch);
    scratch->scores.resize(std::size_t{rows} * stride);
    for (uint32_t e = 0; e < extents; ++e) {
      if (!query.sketch.intact(query.layer, query.kv_head, e)) return {0, false};
      const int8_t* next = e + 1 < extents ? query.sketch.extent(query.layer, query.kv_head, e + 1) : nullptr;
      query.kernels.score_sketch(shape, rows, scratch->query8.data(), scratch->query_scale.data(),
                                 query.sketch.extent(query.layer, query.kv_head, e), next,
                                 scratch->scores.data() + std::size_t{e} * shape.extent_quads(), stride);
    }
    return {uint64_t{extents} * shape.sketch_bytes(), true};
  }

  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    const PageShape& shape = query.pages.shape().page;
    const uint32_t rows = query.rows.rows, stride = query.pages.extents() * shape.extent_quads();
    const uint32_t first = query.first_page * shape.page_quads(), end = query.pages.pages() * shape.page_quads();
    begin_selection(query.share ? 1 : rows, out);
    if (end <= first) return;
    float* scores = scratch->scores.data() + std::size_t{query.first_row} * stride + first;
    if (query.share && rows > 1)
      add_shares(query, like_the_best, scores, stride, end - first);
    else
      to_shares(query, like_the_best, scores, stride, end - first);
    const BlockRange range{quad_tokens, first, end, stride, query.first_row};
    const SampleSize size = sample_size(query.budget_tokens, query.coverage, query.share ? rows : 1);
    begin_samples(out);
    for (std::size_t i = 0; i < out->lists.size(); ++i) sample_list(query, range, i, size, scratch, out);
  }

 private:
  // The queries in the sketch's coordinates, in int8.
  static void project(const SelectorQuery& query, SelectorScratch* scratch) {
    const uint32_t dim = query.rows.dim, n = query.pages.shape().page.sketch_dim(), rows = query.rows.rows;
    const float* basis = query.sketch.query_basis(query.layer, query.kv_head);
    scratch->query.assign(std::size_t{rows} * n, 0.0f);
    scratch->query8.resize(std::size_t{rows} * n);
    scratch->query_scale.resize(rows);
    for (uint32_t r = 0; r < rows; ++r) {
      float* x = scratch->query.data() + std::size_t{r} * n;
      for (uint32_t d = 0; d < dim; ++d)
        for (uint32_t c = 0; c < n; c += 8)  // a constant 8: vectors without a loop's beginning and end
          for (uint32_t i = c; i < c + 8; ++i) x[i] += query.rows.f32[r * dim + d] * basis[d * n + i];
      float largest = 0;
      for (uint32_t c = 0; c < n; ++c) largest = std::max(largest, std::fabs(x[c]));
      const bool none = !(largest > 1e-30f && largest < 1e30f);
      scratch->query_scale[r] = none ? 0 : largest / 127;
      for (uint32_t c = 0; c < n; ++c)
        scratch->query8[r * n + c] = static_cast<int8_t>(none ? 0 : std::lrint(x[c] * (127 / largest)));
    }
  }
};

}  // namespace

std::unique_ptr<const Selector> make_bounded_selector() { return std::make_unique<BoundedSelector>(); }

}  // namespace kvasir
