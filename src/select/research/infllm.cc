// `infllm`: the blocks of 128 tokens whose representative tokens score best (InfLLM, arXiv
// 2402.04617, section 3.2).
//
// The representatives of a block are the 4 of its tokens that the tokens after them attended most
// in prefill (store/representatives.h). Its relevance is the sum of q . k over them. Tokens that do
// not fill a block yet are attended, like sinks and window. Query heads of a group have a list
// each, or share one by the sum of their relevances. Differences to the paper: positions stay,
// where the paper moves all distant tokens to one distance; each token of a question selects for
// itself, where the paper selects once per chunk of 512; the limit of a question is the budget, not
// 32 blocks.
#include <algorithm>
#include <bit>

#include "select/blocks.h"

namespace kvasir {
namespace {

// Partial sums of a dot product: a fixed order that compilers vectorise.
constexpr uint32_t lanes = 16;

class InfLlmSelector final : public Selector {
 public:
  void choose(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const override {
    constexpr uint32_t block = Representatives::block_tokens;
    const PageShape& shape = query.pages.shape().page;
    const Representatives& representatives = *query.representatives;
    const uint32_t rows = query.rows.rows, dim = shape.dim, pages = query.pages.pages(),
                   lists = query.share ? 1 : rows;
    const uint32_t blocks = std::min(representatives.blocks(), pages * shape.page_tokens / block);
    begin_selection(lists, out);
    if (pages <= query.first_page) return;
    if (!representatives.intact()) {
      out->intact = false;
      return;
    }
    scratch->query.assign(query.rows.f32, query.rows.f32 + std::size_t{rows} * dim);
    // The sum of relevances is the relevance to the sum of the queries.
    for (uint32_t r = 1; query.share && r < rows; ++r)
      for (uint32_t d = 0; d < dim; ++d) scratch->query[d] += query.rows.f32[r * dim + d];
    scratch->scores.resize(std::size_t{lists} * blocks);
    for (uint32_t i = 0; i < lists; ++i)
      for (uint32_t b = 0; b < blocks; ++b)
        scratch->scores[i * blocks + b] =
            dot(scratch->query.data() + i * dim, representatives.key(query.layer, query.kv_head, b),
                dim);
    out->summary_bytes = uint64_t{blocks} * dim * sizeof(uint16_t);

    // Pages that are in no block yet.
    const uint32_t behind = std::max(query.first_page, blocks * block / shape.page_tokens);
    const uint64_t rest = uint64_t{pages - behind} * shape.page_tokens,
                   left = query.budget_tokens - std::min(query.budget_tokens, rest);
    const auto count =
        static_cast<uint32_t>(std::min<uint64_t>(blocks, (left + block - 1) / block));
    for (uint32_t i = 0; i < lists; ++i) {
      choose_list(query, {block, 0, blocks, blocks}, i, count, scratch, out);
      for (uint32_t p = behind; p < pages; ++p) {
        out->lists[i].push_back({nullptr, nullptr, ~uint64_t{0} >> (64 - shape.page_tokens)});
        out->page_numbers[i].push_back(p);
      }
      out->tokens += rest;
    }
  }

 private:
  static float dot(const float* q, const uint16_t* key, uint32_t dim) {
    float sums[lanes] = {}, sum = 0;
    for (uint32_t d = 0; d < dim; d += lanes)
      for (uint32_t i = 0; i < lanes; ++i)
        sums[i] += q[d + i] * std::bit_cast<float>(uint32_t{key[d + i]} << 16);
    for (const float s : sums) sum += s;
    return sum;
  }
};

}  // namespace

std::unique_ptr<const Selector> make_infllm_selector() {
  return std::make_unique<InfLlmSelector>();
}

}  // namespace kvasir
