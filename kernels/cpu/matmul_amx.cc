// Products of quantised weights with many inputs by bf16 tiles of AMX. All else is AVX-512's.
//
// Scaled weights and inputs are rounded to bf16, so that a tile register adds up the products of
// 256 columns in float. A panel has 32 rows and 256 columns of weights. It stays in the first-level
// cache while all inputs are multiplied with it. After each block of 32 inputs, the CPU rounds a
// part of the next panel.
#include "amx-inl.h"
#include "fill-inl.h"
#include "matmul_avx512-inl.h"

namespace kvasir {
namespace {

constexpr uint32_t side = 16;        // rows and inputs of a tile of sums
constexpr uint32_t tile_cols = 32;   // columns that a product of tiles adds up
constexpr uint32_t block_side = 32;  // rows and inputs whose sums are in registers
constexpr uint32_t amx_panel_cols = group_weights, panel_tiles = amx_panel_cols / tile_cols;
// The largest pass: its sums, and the inputs of a panel's columns, fit the second-level cache.
constexpr uint32_t pass_rows = tile_pass_rows, pass_inputs = tile_inputs;
static_assert(pass_inputs % block_side == 0 && pass_rows % block_side == 0);

constexpr uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
constexpr uint32_t blocks_of(uint32_t n) { return (n + block_side - 1) / block_side; }

struct Tile {
  uint16_t pairs[side][tile_cols];  // bf16; 16 rows of weights, or two columns of 16 inputs each
};
using TileSums = float[side][side];  // [row][input]

struct alignas(64) AmxScratch {
  Tile weights[2][block_side / side][panel_tiles];  // of a panel and of the next one
  TileSums sums[pass_rows / block_side][pass_inputs / block_side][4];
  Group group;
};

// Registers 0 to 3 have sums, 4 and 5 weights, 6 and 7 inputs.
void configure() {
  TileConfig c;
  for (int i = 0; i < 8; ++i) c.rows[i] = side, c.row_bytes[i] = 64;
  load_config(c);
}

// ---- inputs: for each tile_inputs of them, [columns / 256][inputs / 32][8][2] tiles

std::size_t tile_bytes(uint32_t n, uint32_t cols) {
  return std::size_t{blocks_of(n)} * block_side * cols * sizeof(uint16_t);
}

// The first of the tiles of a panel's columns and 32 of `n` inputs.
std::size_t tiles_at(uint32_t n, uint32_t cols, uint32_t input, uint32_t col) {
  const uint32_t first = input - input % tile_inputs, group_inputs = least(n - first, tile_inputs);
  const std::size_t before =
      std::size_t{first} * cols + std::size_t{blocks_of(group_inputs)} * block_side * col;
  return (before + (input - first) * least(cols - col, amx_panel_cols)) / (side * tile_cols);
}

void to_tiles(const Activations& x, uint32_t first, uint32_t count, std::byte* out) {
  alignas(64) uint16_t rows[side][tile_cols];
  for (uint32_t col = 0; col < x.cols; col += tile_cols) {
    for (uint32_t i = 0; i < side; ++i) {
      __m512bh rounded{};
      if (i < count) {
        const float* from = x.f32 + std::size_t{first + i} * x.cols + col;
        rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
      }
      std::memcpy(rows[i], &rounded, sizeof rounded);
    }
    const uint32_t block = first - first % block_side;
    Tile* const to = reinterpret_cast<Tile*>(out) +
                     tiles_at(x.n, x.cols, block, col - col % amx_panel_cols) +
                     col % amx_panel_cols / tile_cols * 2;
    Avx512::transpose(reinterpret_cast<const uint8_t*>(rows), sizeof rows[0],
                      reinterpret_cast<uint8_t*>(to + first % block_side / side), 64);
  }
}

// ---- weights

// Columns [0, cols) of a group, times `factor`, as a row of tiles. Formats with eight scales leave
// the others as they are: their products are not used.
template <class Kind>
void round_group(Group& from, uint32_t cols, float factor, uint16_t* to) {
  const __m512 by = _mm512_set1_ps(factor);
  _mm512_store_ps(from.scale, _mm512_mul_ps(_mm512_load_ps(from.scale), by));
  if constexpr (Kind::has_offset)
    _mm512_store_ps(from.offset, _mm512_mul_ps(_mm512_load_ps(from.offset), by));
  const __m128i zero = _mm_set1_epi8(Kind::is_signed ? 0 : static_cast<char>(Kind::zero));
  constexpr uint32_t halves = tile_cols / Kind::width;  // that have a scale each
  for (uint32_t k = 0; k < cols / tile_cols; ++k, to += side * tile_cols) {
    __m512 x[2];
    for (uint32_t h = 0; h < 2; ++h) {
      const auto* const u = reinterpret_cast<const __m128i*>(from.u + tile_cols * k + 16 * h);
      const uint32_t at = k * halves + h * (halves - 1);
      const __m512 q =
          _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_sub_epi8(_mm_load_si128(u), zero)));
      const __m512 scale = _mm512_set1_ps(from.scale[at]);
      if constexpr (Kind::has_offset)
        x[h] = _mm512_fmadd_ps(q, scale, _mm512_set1_ps(from.offset[at]));
      else x[h] = _mm512_mul_ps(q, scale);
    }
    const __m512bh rounded = _mm512_cvtne2ps_pbh(x[1], x[0]);
    std::memcpy(to, &rounded, sizeof rounded);
  }
}

using Round = void (*)(Group& from, uint32_t cols, float factor, uint16_t* to);

// Rows [begin, end) of a matrix, at most pass_rows.
struct PassRows {
  const WeightView& w;
  const Decoder& format;
  Round round;
  uint32_t begin, end;

  // The last row repeats in the place of missing ones.
  const uint8_t* at(uint32_t row, uint32_t col) const {
    const std::size_t r = begin + row < end ? begin + row : end - 1;
    return reinterpret_cast<const uint8_t*>(w.data) + r * w.row_bytes +
           std::size_t{col} / format.block * format.block_bytes;
  }
};

// Rounds rows [first, end) of the panel of the pass's rows from `row` on, and columns from `col`.
void round_rows(const PassRows& rows, uint32_t row, uint32_t col, uint32_t first, uint32_t end,
                Tile (&to)[block_side / side][panel_tiles], Group& group) {
  alignas(64) uint8_t last[max_group_bytes] = {};
  const uint32_t cols = least(rows.w.cols - col, amx_panel_cols);
  for (uint32_t r = first; r < end; ++r) {
    const uint8_t* p = rows.at(row + r, col);
    const uint8_t* const ahead = rows.at(row + r + block_side, col);
    for (uint32_t b = 0; b < rows.format.group_bytes + 63; b += 64) __builtin_prefetch(ahead + b);
    if (cols < amx_panel_cols) {
      std::memcpy(last, p, cols / rows.format.block * rows.format.block_bytes);
      p = last;
    }
    rows.format.decode(p, group);
    rows.round(group, cols, rows.w.scale, to[r / side][0].pairs[r % side]);
  }
}

// ---- products

// Cache lines of later inputs, and how many of them are fetched after the products of 32 columns.
struct Ahead {
  const char* from;
  uint32_t lines;
};

// Adds the products of 32 rows with 16 inputs, or 32 if `both`, to `sums`. Without `add` they
// replace it.
template <bool both>
void multiply_block(const Tile (&weights)[block_side / side][panel_tiles], const Tile* inputs,
                    uint32_t count, bool add, TileSums (&sums)[4], Ahead ahead) {
  constexpr std::size_t row = sizeof sums[0][0];
  __asm__ volatile("" : : "r"(inputs), "r"(weights), "r"(sums) : "memory");
  if (add) {
    _tile_loadd(0, sums[0], row);
    _tile_loadd(1, sums[1], row);
    if (both) _tile_loadd(2, sums[2], row);
    if (both) _tile_loadd(3, sums[3], row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (uint32_t k = 0; k < count; ++k) {
    _tile_loadd(4, weights[0] + k, 64);
    _tile_loadd(6, inputs + 2 * k, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, weights[1] + k, 64);
    _tile_dpbf16ps(1, 5, 6);
    if (both) {
      _tile_loadd(7, inputs + 2 * k + 1, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (uint32_t i = 0; i < ahead.lines; ++i) _mm_prefetch(ahead.from + 64 * i, _MM_HINT_T1);
    ahead.from += 64 * ahead.lines;
  }
  _tile_stored(0, sums[0], row);
  _tile_stored(1, sums[1], row);
  if (both) _tile_stored(2, sums[2], row);
  if (both) _tile_stored(3, sums[3], row);
  __asm__ volatile("" : : : "memory");
}

// Writes the sums of `height` rows with `width` inputs.
void write_sums(const TileSums& sums, uint32_t height, uint32_t width, float* y,
                std::size_t stride) {
  alignas(64) float turned[side][side];
  const bool whole = height == side && width == side;
  Avx512::transpose(reinterpret_cast<const uint8_t*>(sums), sizeof sums[0],
                    reinterpret_cast<uint8_t*>(whole ? y : turned[0]),
                    whole ? stride * sizeof(float) : sizeof turned[0]);
  for (uint32_t i = 0; !whole && i < width; ++i)
    std::memcpy(y + i * stride, turned[i], height * sizeof(float));
}

// x: at most pass_inputs inputs, whose tiles begin at x.tiles. While a panel is multiplied, the CPU
// fetches a part of the inputs of the next columns into its second-level cache.
void tile_pass(const PassRows& rows, const Activations& x, float* y, std::size_t stride,
               AmxScratch& s) {
  const uint32_t height = rows.end - rows.begin, cols = rows.w.cols, blocks = blocks_of(x.n),
                 row_blocks = blocks_of(height),
                 panels = (cols + amx_panel_cols - 1) / amx_panel_cols * row_blocks,
                 lines = 2 * sizeof(Tile) / 64 / row_blocks;
  const auto round = [&](uint32_t p, uint32_t first, uint32_t end) {
    round_rows(rows, p % row_blocks * block_side, p / row_blocks * amx_panel_cols, first, end,
               s.weights[p % 2], s.group);
  };
  const auto* const tiles = reinterpret_cast<const Tile*>(x.tiles);
  round(0, 0, block_side);
  for (uint32_t p = 0; p < panels; ++p) {
    const uint32_t col = p / row_blocks * amx_panel_cols,
                   count = least(cols - col, amx_panel_cols) / tile_cols;
    const uint32_t next = least(col + amx_panel_cols, cols - 1) / amx_panel_cols * amx_panel_cols;
    for (uint32_t b = 0; b < blocks; ++b) {
      const uint32_t input = b * block_side;
      const Ahead ahead{reinterpret_cast<const char*>(tiles + tiles_at(x.n, cols, input, next)) +
                            p % row_blocks * lines * 64 * panel_tiles,
                        lines};
      const auto multiply = x.n - input > side ? multiply_block<true> : multiply_block<false>;
      multiply(s.weights[p % 2], tiles + tiles_at(x.n, cols, input, col), count, col > 0,
               s.sums[p % row_blocks][b], ahead);
      if (p + 1 < panels) round(p + 1, block_side * b / blocks, block_side * (b + 1) / blocks);
    }
  }
  for (uint32_t input = 0; input < x.n; input += side) {
    for (uint32_t row = 0; row < height; row += side)
      write_sums(s.sums[row / block_side][input / block_side]
                       [row % block_side / side + input % block_side / side * 2],
                 least(height - row, side), least(x.n - input, side),
                 y + input * stride + rows.begin + row, stride);
  }
}

decltype(Kernels::matmul) without_tiles = nullptr;

void amx_matmul(const WeightView& w, const Activations& x, float* y, std::size_t y_stride,
                uint32_t row_begin, uint32_t row_end, std::byte* scratch) {
  const Decoder* format = nullptr;  // null: the weights are floats
  Round round = nullptr;
  with_format<Avx512>(
      w.type,
      [&](auto of) {
        using Format = typename decltype(of)::Format;
        format = &decoder_of<Avx512, Format>, round = round_group<KindOf<Avx512, Format>>;
      },
      [](auto) {});
  if (x.method != ProductMethod::tiles || !format)
    return without_tiles(w, x, y, y_stride, row_begin, row_end, scratch);
  configure();
  for (uint32_t row = row_begin; row < row_end; row += pass_rows) {
    for (uint32_t i = 0; i < x.n; i += pass_inputs)
      tile_pass({w, *format, round, row, row + least(row_end - row, pass_rows)},
                rows_of(x, i, least(x.n - i, pass_inputs)), y + i * y_stride, y_stride,
                *reinterpret_cast<AmxScratch*>(scratch));
  }
  _tile_release();
}

std::size_t amx_scratch(TensorType type, ProductMethod method) {
  static_assert(sizeof(AmxScratch) > sizeof(Panel<Avx512>));
  std::size_t bytes = sizeof(Panel<Avx512>);
  if (method == ProductMethod::tiles)
    with_format<Avx512>(
        type, [&](auto) { bytes = sizeof(AmxScratch); }, [](auto) {});
  return bytes;
}

}  // namespace

void fill_matmul_amx(Kernels& k) {
  fill_matmul_avx512(k);
  without_tiles = k.matmul;
  k.matmul = amx_matmul, k.matmul_scratch = amx_scratch;
  k.tile_bytes = tile_bytes, k.to_tiles = to_tiles;
}

}  // namespace kvasir
