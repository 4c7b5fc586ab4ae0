// Sealing: a page's tokens from float to int8, with the summaries for selectors. And the reverse.
//
// The scale of a token is the smallest bf16 >= (largest magnitude) / 127.492. Then its largest
// value has magnitude 127, never less and never more (bf16 steps are at most 1/128 and at least
// 1/256 of a value, and 126.5 / 127.492 < 128 / 129, 127 / 127.492 > 255 / 256), so that sealing an
// unsealed page gives the same bytes and scales. Infinities, NaNs and tokens of magnitude under
// 1e-30 become 0.
//
// Summaries are computed from the int8 values and their scales, so they bound the attended values,
// not the original ones.
#pragma once

#include "attention_common.h"

namespace kvasir {
namespace {

constexpr uint32_t page_values = page_bytes / 2;  // of K, and of V
constexpr float scale_divisor = 127.492f;

// Tokens of a latent page that are sealed together: a block.
constexpr uint32_t latent_part_tokens = 16;
static_assert(latent_page_tokens % latent_part_tokens == 0 &&
              latent_part_tokens % quad_tokens == 0);
constexpr uint32_t part_values = larger(page_values, latent_part_tokens* max_latent_dim);

inline uint16_t bf16_upwards(float x) {  // x >= 0
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0xffff) >> 16);
}

// out: [tokens][dim]
template <class Isa>
void quantize_tokens(const float* x, uint32_t tokens, uint32_t dim, uint16_t* scales, int8_t* out) {
  for (uint32_t t = 0; t < tokens; ++t) {
    const float* row = x + t * dim;
    const float largest = largest_magnitude<Isa>(row, dim);
    scales[t] = largest < tiny_magnitude ? uint16_t{0} : bf16_upwards(largest / scale_divisor);
    const float scale = from_bf16(scales[t]);
    const auto inverse = Isa::set(scale > 0 ? 1.0f / scale : 0.0f);
    for (uint32_t d = 0; d < dim; d += Isa::lanes) {
      const auto q = Isa::to_int(Isa::mul(Isa::finite_or_zero(Isa::load(row + d)), inverse));
      Isa::store_bytes(out + t * dim + d, q);
    }
  }
}

// bytes [tokens][dim] to K's order [tokens / 4][dim / 4][4][4].
inline void interleave_keys(const int8_t* bytes, uint32_t tokens, uint32_t dim, int8_t* out) {
  for (uint32_t quad = 0; quad < tokens; quad += quad_tokens, bytes += quad_tokens * dim) {
    for (uint32_t d = 0; d < dim; d += 4) {
      for (uint32_t t = 0; t < quad_tokens; ++t, out += 4) std::memcpy(out, bytes + t * dim + d, 4);
    }
  }
}

// bytes [tokens][dim] to V's order [tokens / 4][dim][4].
inline void interleave_values(const int8_t* bytes, uint32_t tokens, uint32_t dim, int8_t* out) {
  for (uint32_t t = 0; t < tokens; t += 4, bytes += 4 * dim) {
    for (uint32_t d = 0; d < dim; ++d, out += 4) {
      out[0] = bytes[d];
      out[1] = bytes[dim + d];
      out[2] = bytes[2 * dim + d];
      out[3] = bytes[3 * dim + d];
    }
  }
}

// The smallest integer b with b * scale >= x, exactly: the sign of an exact residue corrects the
// rounding of the quotient.
template <class Isa>
typename Isa::F upper_multiple(typename Isa::F x, typename Isa::F scale, typename Isa::F inverse) {
  const auto b = Isa::ceil(Isa::mul(x, inverse));
  const auto zero = Isa::set(0), above = Isa::add(b, Isa::set(1.0f)),
             below = Isa::add(b, Isa::set(-1.0f));
  const auto lowered = Isa::select_less(Isa::residue(below, scale, x), zero, b, below);
  return Isa::select_less(Isa::residue(b, scale, x), zero, above, lowered);
}

// The smallest float with 127 * scale >= magnitude, exactly.
inline float bound_scale(float magnitude) {
  float scale = magnitude / 127.0f;
  if (127.0 * double{scale} < double{magnitude}) {  // the product is exact in double
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    ++bits;
    std::memcpy(&scale, &bits, sizeof scale);
  }
  return scale;
}

// Sealed values of a token, as they are attended. Exact: 7 bits times 8.
template <class Isa>
typename Isa::F sealed_values(const int8_t* bytes, uint16_t scale) {
  alignas(64) float x[Isa::lanes];
  for (uint32_t i = 0; i < Isa::lanes; ++i) x[i] = static_cast<float>(bytes[i]) * from_bf16(scale);
  return Isa::load(x);
}

// The bounds of one block: channel maxima rounded up, then minima rounded down, in units of the
// returned scale. bytes: [tokens][dim]; scales: [tokens]; out: 2 * dim.
template <class Isa>
float bound_block(const int8_t* bytes, const uint16_t* scales, uint32_t tokens, uint32_t dim,
                  int8_t* out) {
  float maxima[max_dim], minima[max_dim];
  auto largest = Isa::set(0);
  for (uint32_t d = 0; d < dim; d += Isa::lanes) {
    auto high = sealed_values<Isa>(bytes + d, scales[0]),
         low = Isa::sub(Isa::set(0), high);  // the maximum of -x
    for (uint32_t t = 1; t < tokens; ++t) {
      const auto x = sealed_values<Isa>(bytes + t * dim + d, scales[t]);
      high = Isa::max(high, x);
      low = Isa::max(low, Isa::sub(Isa::set(0), x));
    }
    Isa::store(maxima + d, high);
    Isa::store(minima + d, low);
    largest = Isa::max(largest, Isa::max(high, low));
  }
  const float magnitude = Isa::largest(largest);
  if (magnitude == 0) {
    std::memset(out, 0, 2 * dim);
    return 0;
  }
  const float scale = bound_scale(magnitude);
  const auto unit = Isa::set(scale), inverse = Isa::set(1.0f / scale);
  for (uint32_t d = 0; d < dim; d += Isa::lanes) {
    const auto low = upper_multiple<Isa>(Isa::load(minima + d), unit, inverse);
    Isa::store_bytes(out + d,
                     Isa::to_int(upper_multiple<Isa>(Isa::load(maxima + d), unit, inverse)));
    Isa::store_bytes(out + dim + d, Isa::to_int(Isa::sub(Isa::set(0), low)));
  }
  return scale;
}

inline void store_float(int8_t* at, float x) { std::memcpy(at, &x, sizeof x); }

// The bounds of the tokens that are sealed together: blocks from number `first` of the extent on.
template <class Isa>
void seal_bounds(const PageShape& shape, const int8_t* bytes, const uint16_t* token_scales,
                 uint32_t first, int8_t* bounds) {
  const uint32_t dim = shape.dim, n = shape.block_tokens,
                 blocks = (shape.latent ? latent_part_tokens : shape.page_tokens) / n;
  const uint32_t page_blocks = shape.page_tokens / shape.block_tokens;
  const std::size_t tile_bytes = std::size_t{2} * dim * tile_blocks;
  // f32 [tiles][16 blocks]
  int8_t* scales = bounds + page_blocks * extent_pages / tile_blocks * tile_bytes;
  for (uint32_t i = 0; i < blocks; ++i) {
    const uint32_t block = first + i;
    alignas(64) int8_t channels[2 * max_dim];
    const float scale =
        bound_block<Isa>(bytes + i * n * dim, token_scales + i * n, n, dim, channels);
    int8_t* tile = bounds + block / tile_blocks * tile_bytes + block % tile_blocks * 4;
    for (uint32_t c = 0; c < 2 * dim; c += 4) std::memcpy(tile + c * tile_blocks, channels + c, 4);
    store_float(scales + block * sizeof(float), scale);
  }
}

template <class Isa>
void seal_page(const PageShape& shape, const float* k, const float* v, uint32_t page, int8_t* pages,
               uint16_t* scales, int8_t* bounds) {
  const uint32_t tokens = shape.page_tokens, dim = shape.dim;
  const uint32_t part = shape.latent ? latent_part_tokens : tokens;
  int8_t* data = pages + page * shape.page_size();
  uint16_t* page_scales = scales + page * 2 * tokens;
  alignas(64) int8_t sealed[part_values];  // [tokens][dim]
  for (uint32_t t = 0; t < tokens; t += part) {
    quantize_tokens<Isa>(k + t * dim, part, dim, page_scales + t, sealed);
    interleave_keys(sealed, part, dim, data + t * dim);
    if (bounds)
      seal_bounds<Isa>(shape, sealed, page_scales + t, (page * tokens + t) / shape.block_tokens,
                       bounds);
  }
  if (shape.latent) {
    std::memcpy(page_scales + tokens, page_scales, tokens * sizeof *page_scales);
    return;
  }
  quantize_tokens<Isa>(v, tokens, dim, page_scales + tokens, sealed);
  interleave_values(sealed, tokens, dim, data + page_values);
}

template <class Isa>
void unseal_page(const PageShape& shape, const int8_t* data, const uint16_t* scales, float* k,
                 float* v) {
  const uint32_t tokens = shape.page_tokens, dim = shape.dim;
  const int8_t *key = data, *values = data + page_values;
  // Four dimensions of the four tokens of a quad are neighbours.
  for (uint32_t t = 0; t < tokens; t += quad_tokens)
    for (uint32_t d = 0; d < dim; d += 4, key += PageShape::key_stride)
      for (uint32_t i = 0; i < PageShape::key_stride; ++i)
        k[(t + i / 4) * dim + d + i % 4] =
            static_cast<float>(key[i]) * from_bf16(scales[t + i / 4]);
  if (shape.latent || !v) return;
  for (uint32_t t = 0; t < tokens; ++t) {
    const float v_scale = from_bf16(scales[tokens + t]);
    for (uint32_t d = 0; d < dim; ++d)
      v[t * dim + d] = static_cast<float>(values[(t / 4 * dim + d) * 4 + t % 4]) * v_scale;
  }
}

}  // namespace
}  // namespace kvasir
