// Scores of single keys, wherever they are. A vector of keys is gathered, four bytes at a time, and
// multiplied like keys of a page.
#pragma once

#include "attention_common.h"

namespace kvasir {
namespace {

// A key with contiguous dimensions. The compiler's vectors do: two rows meet only once.
inline int32_t dot_row(const int8_t* a, const int8_t* b, uint32_t dim) {
  int32_t sum = 0;
  for (uint32_t d = 0; d < dim; ++d) sum += a[d] * b[d];
  return sum;
}

template <class Isa>
void score_keys(const QueryRows& q, const KeyRef* keys, uint32_t n, uint32_t stride, float* scores,
                std::size_t score_stride) {
  if (stride == 4 && q.rows < 8) {
    for (uint32_t r = 0; r < q.rows; ++r)
      for (uint32_t i = 0; i < n; ++i) {
        const int32_t sum = dot_row(q.q + std::size_t{r} * q.dim, keys[i].data, q.dim);
        scores[r * score_stride + i] = static_cast<float>(sum) * (keys[i].scale * q.scale[r]);
      }
    return;
  }
  alignas(64) int8_t tile[max_dim * Isa::lanes];  // [dim / 4][lanes][4]
  int32_t sums[Isa::lanes];
  const uint32_t groups = q.dim / 4;
  for (uint32_t first = 0; first < n; first += Isa::lanes) {
    const uint32_t count = smaller(Isa::lanes, n - first);
    for (uint32_t t = 0; t < Isa::lanes; ++t) {
      const int8_t* from = keys[first + smaller(t, count - 1)].data;
      for (uint32_t i = 0; i < groups; ++i)
        std::memcpy(tile + (i * Isa::lanes + t) * 4, from + std::size_t{i} * stride, 4);
    }
    for (uint32_t r = 0; r < q.rows; ++r) {
      const int8_t* row = q.q + std::size_t{r} * q.dim;
      int32_t start;
      key_offsets<Isa>(row, 1, q.dim, &start);
      auto acc = Isa::iset(start);
      for (uint32_t i = 0; i < groups; ++i)
        acc = Isa::dot_keys(acc, Isa::keys(tile + i * Isa::lanes * 4),
                            Isa::four(load_four(row + i * 4)));
      Isa::istore(sums, acc);
      for (uint32_t t = 0; t < count; ++t)
        scores[r * score_stride + first + t] =
            static_cast<float>(sums[t]) * (keys[first + t].scale * q.scale[r]);
    }
  }
}

}  // namespace
}  // namespace kvasir
