// Matrix products of quantised weights with AVX-VNNI: the byte dot product in 256-bit registers.
// All else is AVX2's.
#include "matmul_avx2-inl.h"

namespace kvasir {
namespace {

struct AvxVnni : Avx2 {
  // Registers of a tile, of 16: 2 x 3 float and 2 x 3 integer accumulators, weights, an input. With
  // two scales in 32 columns there are 2 x 2 of each and of the block's float sums.
  template <uint32_t width>
  static constexpr std::size_t tile_tokens = width == 32 ? 3 : 2;
  template <class Format>
  static constexpr uint32_t tile_max = 0;  // unused

  // acc + the sums of four products of unsigned u and signed s.
  static I dot(I acc, I u, I s) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(acc, u, s);
#else  // a build of the tests, for CPUs whose instruction is AVX-512's
    return _mm256_dpbusd_epi32(acc, u, s);
#endif
  }

  // Rows have the lanes and the order of AVX2's sums, so that answers have the same bits: signed
  // weights move their sign to the input.
  template <class Format, class Groups>
  [[gnu::always_inline]] static inline void row_group(RowSum& sum, const Groups& w,
                                                      const GroupInput& in) {
    Avx2::row_group<Format>(sum, w, in, [](I u, I a) {
      if constexpr (Format::is_signed)
        return dot(_mm256_setzero_si256(), _mm256_abs_epi8(u), _mm256_sign_epi8(a, u));
      else return dot(_mm256_setzero_si256(), u, a);
    });
  }

  // Tiles shift signed weights up by 128. The shift and the zero point are subtracted through the
  // sums of the inputs.
  template <class Kind>
  static constexpr int tile_bias = Kind::is_signed ? 128 : static_cast<int>(Kind::zero);

  template <class Format>
  static void prepare_panel(W (&u)[4]) {
    if constexpr (Format::is_signed) {
      for (W& w : u) {
        for (I& each : w.v) each = _mm256_xor_si256(each, _mm256_set1_epi8(-128));
      }
    }
  }

  template <class Kind>
  [[gnu::always_inline]] static inline void lane_weights(const Group* groups,
                                                         LaneWeights<Kind>& out) {
    Avx2::lane_weights<Kind>(groups, out);
    if constexpr (Kind::is_signed) {
      for (auto& row : out.w)
        for (I& each : row) each = _mm256_xor_si256(each, _mm256_set1_epi8(-128));
    }
  }

  template <class Kind, class Input>
  [[gnu::always_inline]] static inline void lane_group(LaneSum& sum, const LaneWeights<Kind>& w,
                                                       const Input& in) {
    Avx2::lane_group<Kind, tile_bias<Kind>>(
        sum, w, in, [](I start, const I* u, const int8_t* q, uint32_t first) {
#pragma GCC unroll 8
          for (uint32_t k = first; k < first + Kind::width / 4; ++k)
            start = dot(start, u[k], load32(q + lane_word(k)));
          return start;
        });
  }

  template <class Kind, std::size_t tokens>
  [[gnu::always_inline]] static inline void accumulate(I (&sum)[tokens][2], const uint8_t* panel,
                                                       const int8_t* q, uint32_t cols) {
    for (uint32_t k = 0; k < Kind::width / 4; ++k) {
      const I w0 = load32(panel + k * 64), w1 = load32(panel + k * 64 + 32);
      for (std::size_t t = 0; t < tokens; ++t) {
        const I a = _mm256_set1_epi32(kvasir::load<int>(q + t * cols + 4 * k));
        sum[t][0] = dot(sum[t][0], w0, a);
        sum[t][1] = dot(sum[t][1], w1, a);
      }
    }
  }
};

const Kernels& avx2() {
  static const Kernels k = [] {
    Kernels table{};
    fill_matmul_avx2(table);
    return table;
  }();
  return k;
}

void vnni_matmul(const WeightView& w, const Activations& x, float* y, std::size_t y_stride,
                 uint32_t row_begin, uint32_t row_end, std::byte* scratch) {
  byte_matmul<AvxVnni>(w, x, {y, y_stride, w.scale}, {row_begin, row_end}, scratch, avx2());
}

}  // namespace

void fill_matmul_avxvnni(Kernels& k) {
  fill_matmul_avx2(k);
  k.matmul = vnni_matmul;
}

}  // namespace kvasir
