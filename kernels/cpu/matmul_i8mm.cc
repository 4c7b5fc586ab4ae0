// Matrix products of many inputs with i8mm: an instruction multiplies two rows of eight weights
// with two inputs. All else is NEON's.
#include "matmul_neon-inl.h"

namespace kvasir {
namespace {

struct I8mm : Neon {
  // Registers of a tile, of 32: 2 x 6 float and 2 x 6 integer accumulators, 4 of weights, an input.
  // With two scales in 32 columns there are 2 x 4 of each and of the block's float sums.
  template <uint32_t width>
  static constexpr std::size_t tile_tokens = width == 32 ? 6 : 4;
  // A panel is [cols / 8][panel_rows][8]: a register has eight weights of two rows.
  static constexpr uint32_t word = 8;

  template <class Kind, std::size_t tokens>
  [[gnu::always_inline]] static inline void accumulate(I (&sum)[tokens][2], const uint8_t* panel,
                                                       const int8_t* q, uint32_t cols) {
    // Two inputs by four pairs of rows: [row 0 input 0, row 0 input 1, row 1 input 0, ...]. All
    // sums of the tile start at the same value.
    constexpr std::size_t pairs = (tokens + 1) / 2;
    I both[pairs][4];
    for (auto& pair : both) pair[0] = pair[1] = pair[2] = pair[3] = sum[0][0];
    for (uint32_t k = 0; k < Kind::width; k += 8) {
      int8x16_t w[4];
      for (uint32_t i = 0; i < 4; ++i) w[i] = vreinterpretq_s8_u8(vld1q_u8(panel + k * 8 + 16 * i));
      for (std::size_t p = 0; p < pairs; ++p) {
        const std::size_t first = 2 * p, second = 2 * p + 1 < tokens ? 2 * p + 1 : first;
        const int8x16_t a =
            vcombine_s8(vld1_s8(q + first * cols + k), vld1_s8(q + second * cols + k));
        for (uint32_t i = 0; i < 4; ++i) both[p][i] = vmmlaq_s32(both[p][i], w[i], a);
      }
    }
    for (std::size_t t = 0; t < tokens; ++t) {
      for (uint32_t v = 0; v < 2; ++v) {
        const I low = both[t / 2][2 * v], high = both[t / 2][2 * v + 1];
        sum[t][v] = t % 2 == 0 ? vuzp1q_s32(low, high) : vuzp2q_s32(low, high);
      }
    }
  }

  // Four rows of two words.
  static void transpose(const uint8_t* from, std::size_t from_stride, uint8_t* to,
                        std::size_t to_stride) {
    uint64x2_t r[4];
    for (std::size_t i = 0; i < 4; ++i)
      r[i] = vreinterpretq_u64_u8(vld1q_u8(from + i * from_stride));
    for (std::size_t i = 0; i < 2; ++i, to += 16) {
      vst1q_u8(to, vreinterpretq_u8_u64(vzip1q_u64(r[2 * i], r[2 * i + 1])));
      vst1q_u8(to + to_stride, vreinterpretq_u8_u64(vzip2q_u64(r[2 * i], r[2 * i + 1])));
    }
  }
};

const Kernels& neon() {
  static const Kernels k = [] {
    Kernels table{};
    fill_matmul_neon(table);
    return table;
  }();
  return k;
}

void i8mm_matmul(const WeightView& w, const Activations& x, float* y, std::size_t y_stride,
                 uint32_t row_begin, uint32_t row_end, std::byte* scratch) {
  many_matmul<I8mm>(w, x, {y, y_stride, w.scale}, {row_begin, row_end}, scratch, neon());
}

}  // namespace

void fill_matmul_i8mm(Kernels& k) {
  fill_matmul_neon(k);
  k.matmul = i8mm_matmul;
}

}  // namespace kvasir
