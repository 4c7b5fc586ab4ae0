// Products of quantised weights with many inputs by AMX. All else is AVX-512's.
//
// Scaled weights and scaled inputs are rounded to bf16, so that a tile register adds up the
// products of all columns in float. Each pass converts its weights once, for all its inputs.
#include "fill-inl.h"
#include "matmul_avx512-inl.h"

namespace kvasir {
namespace {

constexpr uint32_t side = 16;        // rows and columns of a tile of sums
constexpr uint32_t tile_cols = 32;   // columns of weights that a product of tiles adds up
constexpr uint32_t block_side = 32;  // inputs and rows whose sums are in registers
// What a pass takes at most: its scratch memory fits the second-level cache, and an operand of a
// block the first-level cache.
constexpr uint32_t pass_rows = 256, pass_cols = group_weights, pass_inputs = 512;
constexpr uint32_t pass_steps = pass_cols / tile_cols;

using Tile = uint16_t[side][tile_cols];  // bf16: inputs, or pairs of columns of 16 weights each

struct alignas(64) AmxScratch {
  Tile weights[pass_rows / side][pass_steps];
  Tile inputs[block_side / side][pass_steps];
  float sums[pass_inputs / block_side][pass_rows / block_side][block_side * block_side];
  uint16_t rows[side][pass_cols];  // weights before their transposition
  Group group;
};

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Registers 0 to 3 have sums, 4 and 5 inputs, 6 and 7 weights.
void configure() {
  TileConfig c;
  for (int i = 0; i < 8; ++i) c.rows[i] = side, c.row_bytes[i] = 64;
  // GCC before 12.4 and 13.3 takes only its first 8 bytes as read.
  __asm__ volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}

template <int locality>
[[gnu::always_inline]] inline void prefetch(const void* p, uint32_t bytes) {
  for (uint32_t b = 0; b < bytes; b += 64)
    __builtin_prefetch(static_cast<const char*>(p) + b, 0, locality);
}

// Stores scaled(0) and scaled(1), 16 floats each, as bf16.
template <class Scaled>
[[gnu::always_inline]] inline void store_rounded(uint16_t* to, Scaled&& scaled) {
  const __m512bh rounded = _mm512_cvtne2ps_pbh(scaled(1), scaled(0));
  std::memcpy(to, &rounded, sizeof rounded);
}

// The first `cols` columns of a group, times `factor`.
template <class Kind>
void round_group(const Group& from, uint32_t cols, float factor, uint16_t* to) {
  const __m128i zero = _mm_set1_epi8(Kind::is_signed ? 0 : static_cast<char>(Kind::zero));
  for (uint32_t c = 0; c < cols; c += tile_cols, to += tile_cols) {
    store_rounded(to, [&](uint32_t half) {
      const uint32_t at = c + 16 * half, scale = at / Kind::width;
      const __m128i q =
          _mm_sub_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(from.u + at)), zero);
      __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)),
                               _mm512_set1_ps(from.scale[scale] * factor));
      if constexpr (Kind::has_offset)
        x = _mm512_add_ps(x, _mm512_set1_ps(from.offset[scale] * factor));
      return x;
    });
  }
}

const uint8_t* weights_at(const WeightView& w, const Decoder& format, std::size_t row,
                          uint32_t col) {
  return reinterpret_cast<const uint8_t*>(w.data) + row * w.row_bytes +
         std::size_t{col} / format.block * format.block_bytes;
}

// Writes `cols` columns of weights as tiles. The last row repeats in the place of missing ones.
template <class Kind>
void round_weights(const WeightView& w, const Decoder& format, RowRange range, uint32_t col,
                   uint32_t cols, AmxScratch& s) {
  alignas(64) uint8_t last[max_group_bytes] = {};
  for (uint32_t row = range.begin, t = 0; row < range.end; row += side, ++t) {
    for (uint32_t r = 0; r < side; ++r) {
      const uint8_t* p = weights_at(w, format, row + r < range.end ? row + r : range.end - 1, col);
      prefetch<3>(p + side * w.row_bytes, format.group_bytes + 63);
      if (cols < pass_cols) {
        std::memcpy(last, p, cols / format.block * format.block_bytes);
        p = last;
      }
      format.decode(p, s.group);
      round_group<Kind>(s.group, cols, w.scale, s.rows[r]);
    }
    for (uint32_t k = 0; k < cols / tile_cols; ++k)
      Avx512::transpose(reinterpret_cast<const uint8_t*>(s.rows[0] + k * tile_cols),
                        sizeof s.rows[0], reinterpret_cast<uint8_t*>(s.weights[t][k]), 64);
  }
}

// Writes n <= block_side inputs as tiles.
void round_inputs(const Activations& x, uint32_t first, uint32_t n, uint32_t col, uint32_t steps,
                  AmxScratch& s) {
  for (uint32_t i = 0; i < n; ++i) {
    const std::size_t at = std::size_t{first + i} * x.cols + col;
    const int8_t* q = x.q + at;
    const float* scale = x.scale + at / 32;
    for (uint32_t k = 0; k < steps; ++k, q += 32) {
      const __m512 by = _mm512_set1_ps(scale[k]);
      store_rounded(s.inputs[i / side][k][i % side], [&](uint32_t half) {
        const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + 16 * half));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v)), by);
      });
    }
  }
}

// The sums of 32 rows with 16 inputs, or with 32. Adds those of earlier columns, [32][32], unless
// `from` is null.
template <bool both>
void multiply_block(const Tile (&inputs)[2][pass_steps], const Tile (*weights)[pass_steps],
                    uint32_t steps, const float* from, float* to, std::size_t stride) {
  constexpr std::size_t row = block_side * sizeof(float);
  __asm__ volatile("" : : "r"(inputs), "r"(weights), "r"(from) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (from) {
    _tile_loadd(0, from, row);
    _tile_loadd(1, from + side, row);
    if (both) _tile_loadd(2, from + side * block_side, row);
    if (both) _tile_loadd(3, from + side * block_side + side, row);
  }
  for (uint32_t k = 0; k < steps; ++k) {
    _tile_loadd(4, inputs[0][k], 64);
    _tile_loadd(6, weights[0][k], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights[1][k], 64);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, inputs[1][k], 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to, stride * sizeof(float));
  _tile_stored(1, to + side, stride * sizeof(float));
  if (both) _tile_stored(2, to + side * stride, stride * sizeof(float));
  if (both) _tile_stored(3, to + side * stride + side, stride * sizeof(float));
  __asm__ volatile("" : : : "memory");
}

// Prefetches what later calls of the functions above read: columns from `col` on of `n` inputs, or
// of the first `n` rows, where there are so many.
void prefetch_inputs(const Activations& x, uint32_t first, uint32_t n, uint32_t col) {
  for (uint32_t i = first; i < first + n && i < x.n; ++i) {
    const std::size_t at = std::size_t{i} * x.cols + col;
    prefetch<2>(x.q + at, pass_cols);
    prefetch<2>(x.scale + at / 32, pass_cols / 8);
  }
}

void prefetch_weights(const WeightView& w, const Decoder& format, RowRange range, uint32_t n,
                      uint32_t col) {
  for (uint32_t r = range.begin; r < range.begin + n && r < range.end; ++r)
    prefetch<2>(weights_at(w, format, r, col), format.group_bytes + 63);
}

// At most pass_rows rows and pass_inputs inputs.
template <class Kind>
void tile_pass(const WeightView& w, const Decoder& format, const Activations& x, Output out,
               RowRange range, AmxScratch& s) {
  for (uint32_t col = 0; col < w.cols; col += pass_cols) {
    const uint32_t left = w.cols - col, cols = left < pass_cols ? left : pass_cols;
    const bool is_last = left == cols;
    round_weights<Kind>(w, format, range, col, cols, s);
    for (uint32_t i = 0; i < x.n; i += block_side) {
      const uint32_t n = x.n - i < block_side ? x.n - i : block_side;
      round_inputs(x, i, n, col, cols / tile_cols, s);
      const auto multiply = n > side ? multiply_block<true> : multiply_block<false>;
      for (uint32_t r = range.begin; r < range.end; r += block_side) {
        const uint32_t block = (r - range.begin) / block_side,
                       rows = range.end - r < block_side ? range.end - r : block_side;
        prefetch_inputs(x, i + block_side + 4 * block, 4, col);
        if (!is_last)
          prefetch_weights(w, format, {range.begin + i / 2 + 2 * block, range.end}, 2, col + cols);
        float* const sums = s.sums[i / block_side][block];
        float* const y = out.y + i * out.stride + r;
        const bool in_place = is_last && rows == block_side && n % side == 0;
        multiply(s.inputs, s.weights + 2 * block, cols / tile_cols, col ? sums : nullptr,
                 in_place ? y : sums, in_place ? out.stride : block_side);
        for (uint32_t k = 0; is_last && !in_place && k < n; ++k)
          std::memcpy(y + k * out.stride, sums + k * block_side, rows * sizeof(float));
      }
    }
  }
}

template <class Kind>
void tile_products(const WeightView& w, const Decoder& format, const Activations& x, Output out,
                   RowRange range, AmxScratch& s) {
  configure();
  for (uint32_t row = range.begin; row < range.end; row += pass_rows) {
    const uint32_t end = range.end - row < pass_rows ? range.end : row + pass_rows;
    for (uint32_t i = 0; i < x.n; i += pass_inputs) {
      const uint32_t n = x.n - i < pass_inputs ? x.n - i : pass_inputs;
      tile_pass<Kind>(w, format, rows_of(x, i, n), {out.y + i * out.stride, out.stride, 1},
                      {row, end}, s);
    }
  }
  _tile_release();
}

decltype(Kernels::matmul) without_tiles = nullptr;

void amx_matmul(const WeightView& w, const Activations& x, float* y, std::size_t y_stride,
                uint32_t row_begin, uint32_t row_end, std::byte* scratch) {
  const auto by_others = [&] { without_tiles(w, x, y, y_stride, row_begin, row_end, scratch); };
  if ((x.method == ProductMethod::by_count ? method_of(x.n) : x.method) != ProductMethod::tiles)
    return by_others();
  with_format<Avx512>(
      w.type,
      [&](auto of) {
        using Format = typename decltype(of)::Format;
        tile_products<KindOf<Avx512, Format>>(w, decoder_of<Avx512, Format>, x, {y, y_stride, 1},
                                              {row_begin, row_end},
                                              *reinterpret_cast<AmxScratch*>(scratch));
      },
      [&](auto) { by_others(); });
}

std::size_t amx_scratch(TensorType type, uint32_t) {
  static_assert(sizeof(AmxScratch) > sizeof(Panel<Avx512>));
  std::size_t bytes = sizeof(Panel<Avx512>);
  with_format<Avx512>(
      type, [&](auto) { bytes = sizeof(AmxScratch); }, [](auto) {});
  return bytes;
}

}  // namespace

void fill_matmul_amx(Kernels& k) {
  fill_matmul_avx512(k);
  without_tiles = k.matmul;
  k.matmul = amx_matmul, k.matmul_scratch = amx_scratch;
  k.tile_rows = pass_rows;
}

}  // namespace kvasir
