// Products of tiles by AMX.
#pragma once

#include "amx-inl.h"
#include "attention_common.h"

namespace kvasir {

void fill_attention_amx_pages(Kernels& k);

namespace {

constexpr uint32_t tile_rows = 16, tile_columns = tile_blocks;
constexpr uint32_t fewest_rows = 9;  // fewer are no slower without tiles

// Products of parts of up to 64 numbers of a sketch, `groups` groups of eight.
template <uint32_t Groups>
struct Parts {
  static constexpr uint32_t count = (Groups + 7) / 8, groups = Groups / count, bytes = groups * 8;
  static_assert(groups * count == Groups);
};

// f(Count<G>()) of the G of these with 8 G == numbers; whether there is one.
template <uint32_t... G, class F>
bool for_groups(uint32_t numbers, F&& f) {
  return ((numbers == 8 * G && (f(Count<G>()), true)) || ...);
}

// The tile registers, whose names the compiler wants as numbers: 0 to 3 have sums, of the four
// tokens of 16 quads or of four times 16 tokens, 4 has their sketches or keys, 5 has queries.
// Of products with values, 0 to 3 have sums, 4 and 6 values, 5 and 7 weights.
template <uint32_t Groups>
void configure() {
  TileConfig c;
  for (int i = 0; i < 4; ++i) c.rows[i] = tile_rows, c.row_bytes[i] = tile_columns * 4;
  c.rows[4] = Parts<Groups>::groups * 2, c.row_bytes[4] = tile_columns * 4;
  c.rows[5] = tile_rows, c.row_bytes[5] = Parts<Groups>::bytes;
  c.rows[6] = c.rows[7] = tile_rows, c.row_bytes[6] = c.row_bytes[7] = tile_columns * 4;
  load_config(c);
}

// out: [token][row][quad] of a tile of quads and 16 query rows.
template <uint32_t Groups>
void multiply_tile(const int8_t* q, const int8_t* unpacked, int32_t* out) {
  using P = Parts<Groups>;
  constexpr std::size_t token = Groups * 128, token_sums = tile_rows * tile_columns;
  // GCC does not know that tile loads read memory.
  __asm__ volatile("" : : "r"(q), "r"(unpacked) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (uint32_t part = 0; part < P::count; ++part) {
    const int8_t* const sketch = unpacked + part * P::groups * 128;
    _tile_loadd(5, q + part * P::bytes, Groups * 8);
    _tile_loadd(4, sketch, 64);
    _tile_dpbssd(0, 5, 4);
    _tile_loadd(4, sketch + token, 64);
    _tile_dpbssd(1, 5, 4);
    _tile_loadd(4, sketch + 2 * token, 64);
    _tile_dpbssd(2, 5, 4);
    _tile_loadd(4, sketch + 3 * token, 64);
    _tile_dpbssd(3, 5, 4);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + token_sums, 64);
  _tile_stored(2, out + 2 * token_sums, 64);
  _tile_stored(3, out + 3 * token_sums, 64);
}

// The larger of neighbouring lanes, of 2 N vectors: N vectors.
template <uint32_t N, class Low, class High>
void fold(__m512* x, Low low, High high) {
#pragma GCC unroll 8
  for (uint32_t i = 0; i < N; ++i)
    x[i] = _mm512_max_ps(low(x[2 * i], x[2 * i + 1]), high(x[2 * i], x[2 * i + 1]));
}

// Lane r: the largest of the 16 lanes of x[r].
__m512 largest_lanes(__m512* x) {
  using V = __m512;
  fold<8>(
      x, [](V a, V b) { return _mm512_unpacklo_ps(a, b); },
      [](V a, V b) { return _mm512_unpackhi_ps(a, b); });
  fold<4>(
      x, [](V a, V b) { return _mm512_shuffle_ps(a, b, 0x44); },
      [](V a, V b) { return _mm512_shuffle_ps(a, b, 0xee); });
  fold<2>(
      x, [](V a, V b) { return _mm512_shuffle_f32x4(a, b, 0x88); },
      [](V a, V b) { return _mm512_shuffle_f32x4(a, b, 0xdd); });
  fold<1>(
      x, [](V a, V b) { return _mm512_shuffle_f32x4(a, b, 0x88); },
      [](V a, V b) { return _mm512_shuffle_f32x4(a, b, 0xdd); });
  return x[0];
}

}  // namespace
}  // namespace kvasir
