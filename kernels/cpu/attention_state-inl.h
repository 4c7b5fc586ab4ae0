// Quantises query rows, merges partials, normalises them.
#pragma once

#include "attention_common.h"

namespace kvasir {
namespace {

// A row of zeros, or of NaNs and infinities, gets scale 0 and q 0.
template <class Isa>
void quantize_queries(const float* f32, uint32_t rows, uint32_t dim, int8_t* q, int8_t* split,
                      float* scale) {
  for (uint32_t r = 0; r < rows; ++r) {
    const float* row = f32 + r * std::size_t{dim};
    int8_t* bytes = q + r * std::size_t{dim};
    const float largest = largest_magnitude<Isa>(row, dim);
    const bool zero = largest < tiny_magnitude;
    scale[r] = zero ? 0 : largest / 127.0f;
    const auto inverse = Isa::set(zero ? 0 : 127.0f / largest);
    for (uint32_t d = 0; d < dim; d += Isa::lanes) {
      Isa::store_bytes(bytes + d,
                       Isa::to_int(Isa::mul(Isa::finite_or_zero(Isa::load(row + d)), inverse)));
    }
    if (!split) continue;
    int8_t* parts = split + r * std::size_t{dim} * 2;
    for (uint32_t d = 0; d < dim; ++d) parts[d] = bytes[d] > 0 ? bytes[d] : int8_t{0};
    for (uint32_t d = 0; d < dim; ++d) parts[dim + d] = bytes[d] < 0 ? bytes[d] : int8_t{0};
  }
}

template <class Isa>
void merge(AttentionState a, AttentionState b, uint32_t rows, uint32_t dim) {
  for (uint32_t r = 0; r < rows; ++r) {
    if (b.m[r] == minus_infinity) continue;
    float* o = a.o + r * std::size_t{dim};
    const float* other = b.o + r * std::size_t{dim};
    if (a.m[r] == minus_infinity) {
      std::memcpy(o, other, dim * sizeof(float));
      a.m[r] = b.m[r];
      a.l[r] = b.l[r];
      continue;
    }
    const float m = a.m[r] > b.m[r] ? a.m[r] : b.m[r];
    const float keep = exp_negative_one<Isa>(a.m[r] - m), take = exp_negative_one<Isa>(b.m[r] - m);
    for (uint32_t d = 0; d < dim; d += Isa::lanes) {
      const auto kept = Isa::mul(Isa::load(o + d), Isa::set(keep));
      Isa::store(o + d, Isa::fma(Isa::load(other + d), Isa::set(take), kept));
    }
    a.l[r] = a.l[r] * keep + b.l[r] * take;
    a.m[r] = m;
  }
}

template <class Isa>
void finish(AttentionState a, uint32_t rows, uint32_t dim, uint32_t head_dim, float* out,
            std::size_t out_stride) {
  for (uint32_t r = 0; r < rows; ++r) {
    const float* o = a.o + r * std::size_t{dim};
    float* to = out + r * out_stride;
    const float inverse = a.l[r] > 0 ? 1.0f / a.l[r] : 0.0f;
    if (inverse == 0) {
      std::memset(to, 0, head_dim * sizeof(float));
      continue;
    }
    uint32_t d = 0;
    for (; d + Isa::lanes <= head_dim; d += Isa::lanes)
      Isa::store(to + d, Isa::mul(Isa::load(o + d), Isa::set(inverse)));
    for (; d < head_dim; ++d) to[d] = o[d] * inverse;
  }
}

}  // namespace
}  // namespace kvasir
