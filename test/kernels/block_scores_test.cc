// The best scores of blocks of pages.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "attention_inputs.h"

using namespace kvasir;
using test::Guarded;
using test::Pages;
using test::Queries;
using test::Random;

TEST_CASE("the best score of a block of pages has the bits of the best of its tokens") {
  for (const Kernels* k : test::all_kernels()) {
    CAPTURE(k->name);
    for (uint32_t dim : test::padded_dims) {
      CAPTURE(dim);
      Random random(dim + 2);
      const uint32_t page_tokens = page_bytes / 2 / dim, block_pages = 64 / page_tokens;
      for (uint32_t rows : {1u, 15u, 16u, 33u})
        for (uint32_t n : {1u, 3 * block_pages - 1, 2 * block_pages + 1}) {
          Pages pages(dim, n, random);
          Queries q(*k, rows, dim, random, 0.2f);
          const uint32_t count = n * page_tokens, blocks = (count + 63) / 64, stride = blocks + 3;
          std::vector<float> scores(std::size_t{rows} * count);
          Guarded<float> found(std::size_t{rows - 1} * stride + blocks);
          std::vector<float> want(found.size(), -2.0f);
          Guarded<std::byte> scratch(k->attend_scratch(rows, dim));
          k->score_tokens(q.view, pages.refs.data(), n, scores.data(), count, scratch.data());
          for (std::size_t r = 0; r < rows; ++r)
            for (uint32_t t = 0; t < count; ++t)
              want[r * stride + t / 64] =
                  std::max(want[r * stride + t / 64], scores[r * count + t]);
          std::fill_n(found.data(), found.size(), -2.0f);
          k->raise_by_pages(q.view, pages.refs.data(), n, block_pages, found.data(), stride,
                            scratch.data());
          CHECK(std::equal(want.begin(), want.end(), found.data()));
          CHECK(found.guards_intact());
          CHECK(scratch.guards_intact());
        }
    }
  }
}
