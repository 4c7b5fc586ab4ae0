// Matrix products and elementwise operations for CPUs without the other instruction sets: plain
// loops.
#include "elementwise-inl.h"
#include "fill-inl.h"
#include "matmul_float-inl.h"
#include "recurrent-inl.h"

namespace kvasir {
namespace {

struct Scalar {
  struct F {
    float v[4];
  };
  struct I {
    int32_t v[4];
  };
  struct W {
    uint8_t v[64];
  };
  template <std::size_t n>
  struct Floats {
    float v[n];
  };
  static constexpr uint32_t lanes = 4;
  static constexpr uint32_t row_tokens = 1, word = 4;
  static constexpr uint32_t far_bytes = max_group_bytes;  // never
  template <uint32_t>
  static constexpr std::size_t tile_tokens = 2;
  template <class Format>
  static constexpr uint32_t tile_max = 0;  // unused

  // ---- floats ----
  static F zero() { return {}; }
  static F load(const float* p) { return kvasir::load<F>(p); }
  static void store(float* p, const F& v) { std::memcpy(p, &v, sizeof v); }
  static F broadcast(const float* p) { return {*p, *p, *p, *p}; }
  static F fma(const F& a, const F& b, const F& c) { return add(mul(a, b), c); }
  static F mul(F a, const F& b) {
    for (uint32_t i = 0; i < lanes; ++i) a.v[i] *= b.v[i];
    return a;
  }
  static F add(F a, const F& b) {
    for (uint32_t i = 0; i < lanes; ++i) a.v[i] += b.v[i];
    return a;
  }
  static F to_float(const I& v) {
    F out;
    for (uint32_t i = 0; i < lanes; ++i) out.v[i] = static_cast<float>(v.v[i]);
    return out;
  }
  // Products are rounded before they are added: the sums start at zero.
  static constexpr int32_t sum_start = 0;
  static F scaled(const I& sum, const F& s, const F&) { return mul(to_float(sum), s); }
  static F sum_to_float(const I& sum) { return to_float(sum); }
  static float sum(const F& v) { return (v.v[0] + v.v[2]) + (v.v[1] + v.v[3]); }

  static float half(const uint8_t* p) {
    const uint32_t bits = kvasir::load<uint16_t>(p), sign = (bits & 0x8000) << 16,
                   magnitude = bits & 0x7fff;
    // Infinities and NaNs.
    if (magnitude >= 0x7c00) return from_bits(sign | magnitude << 13 | 0x7f800000);
    // A multiplication adds 112 to the exponent's bias, which also normalises subnormal numbers.
    return from_bits(sign | 0x3f800000) * (from_bits(magnitude << 13) * 0x1p112f);
  }
  static F load_f16(const uint8_t* p) { return {half(p), half(p + 2), half(p + 4), half(p + 6)}; }
  static F load_bf16(const uint8_t* p) {
    const auto at = [p](uint32_t i) {
      return from_bits(uint32_t{kvasir::load<uint16_t>(p + 2 * i)} << 16);
    };
    return {at(0), at(1), at(2), at(3)};
  }

  // ---- quants ----
  static W load64(const uint8_t* p) { return kvasir::load<W>(p); }
  static void store64(uint8_t* p, const W& v) { std::memcpy(p, &v, sizeof v); }
  static W load32x2(const uint8_t* p0, const uint8_t* p1) {
    W out;
    std::memcpy(out.v, p0, 32);
    std::memcpy(out.v + 32, p1, 32);
    return out;
  }
  static W mask(W v, uint8_t m) {
    for (uint8_t& b : v.v) b &= m;
    return v;
  }
  static W merge(W a, const W& b) {
    for (uint32_t i = 0; i < 64; ++i) a.v[i] |= b.v[i];
    return a;
  }
  static W add_where(W v, uint64_t bits, uint8_t value) {
    for (uint32_t i = 0; i < 64; ++i)
      v.v[i] = static_cast<uint8_t>(v.v[i] + (bits >> i & 1) * value);
    return v;
  }
  static W signed_around(W v, uint64_t minus, uint8_t zero) {
    for (uint32_t i = 0; i < 64; ++i)
      v.v[i] = static_cast<uint8_t>(minus >> i & 1 ? zero - v.v[i] : zero + v.v[i]);
    return v;
  }
  template <class At>
  static W gather(At&& at) {
    constexpr uint32_t size = sizeof(*at(0));
    W out;
    for (uint32_t k = 0; k < 64 / size; ++k) std::memcpy(out.v + size * k, at(k), size);
    return out;
  }
  template <int a>
  static uint8_t shift(uint8_t v) {
    if constexpr (a >= 0) return static_cast<uint8_t>(v >> a);
    else return static_cast<uint8_t>(v << -a);
  }
  template <int a>
  static W shift_right(W v) {
    for (uint8_t& b : v.v) b = shift<a>(b);
    return v;
  }
  template <int a, int b>
  static W spread(const uint8_t* p) {
    W out;
    for (uint32_t i = 0; i < 32; ++i) {
      out.v[i] = shift<a>(p[i]);
      out.v[i + 32] = shift<b>(p[i]);
    }
    return out;
  }
  static W nibbles(const uint8_t* p0, const uint8_t* p1) {
    W out;
    for (uint32_t i = 0; i < 16; ++i) {
      out.v[i] = p0[i] & 15;
      out.v[i + 16] = p0[i] >> 4;
      out.v[i + 32] = p1[i] & 15;
      out.v[i + 48] = p1[i] >> 4;
    }
    return out;
  }
  static W nibbles8(const uint8_t* p) {
    W out;
    for (uint32_t i = 0; i < 32; ++i) {
      out.v[i / 8 * 16 + i % 8] = p[i] & 15;
      out.v[i / 8 * 16 + i % 8 + 8] = p[i] >> 4;
    }
    return out;
  }
  static W lookup(W v, const int8_t (&table)[16]) {
    for (uint8_t& b : v.v) b = static_cast<uint8_t>(table[b]);
    return v;
  }

  // ---- scales ----
  static Floats<8> from_halves(const uint8_t* p, uint32_t stride) {
    Floats<8> out;
    for (uint32_t i = 0; i < 8; ++i) out.v[i] = half(p + i * stride);
    return out;
  }
  static Floats<8> from_bytes(uint64_t bytes) {
    Floats<8> out;
    for (uint32_t i = 0; i < 8; ++i) out.v[i] = static_cast<float>(bytes >> (8 * i) & 255);
    return out;
  }
  static Floats<16> from_bytes(uint64_t low, uint64_t high) {
    Floats<16> out;
    for (uint32_t i = 0; i < 16; ++i)
      out.v[i] = static_cast<float>((i < 8 ? low : high) >> (8 * (i % 8)) & 255);
    return out;
  }
  // 2^(e - 128) of each byte e; 0 for e < 2, where that is subnormal.
  static Floats<8> from_exponents(uint64_t bytes) {
    Floats<8> out;
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t e = bytes >> (8 * i) & 255;
      out.v[i] = from_bits(e < 2 ? 0 : (e - 1) << 23);
    }
    return out;
  }
  // The floats of four exponent bits and three mantissa bits, as half-precision numbers 2^8 too
  // small. 0x7f is not a number; files mean zero.
  static Floats<16> from_ue4m3(uint64_t low, uint64_t high) {
    Floats<16> out;
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t byte = (i < 8 ? low : high) >> (8 * (i % 8)) & 255;
      const auto bits = static_cast<uint16_t>(byte == 0x7f ? 0 : (byte & 0x7f) << 7);
      out.v[i] = half(reinterpret_cast<const uint8_t*>(&bits)) * 256;
    }
    return out;
  }
  static Floats<16> from_signed_bytes(const uint8_t* p) {
    Floats<16> out;
    for (uint32_t i = 0; i < 16; ++i) out.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
    return out;
  }
  template <std::size_t n>
  static Floats<n> times(Floats<n> v, float f) {
    for (float& each : v.v) each *= f;
    return v;
  }
  template <std::size_t n>
  static Floats<n> plus(Floats<n> v, float f) {
    for (float& each : v.v) each += f;
    return v;
  }
  template <std::size_t n>
  static void store(float* p, const Floats<n>& v) {
    std::memcpy(p, &v, sizeof v);
  }

  // ---- products ----
  // Quants become signed bytes around zero.
  template <class Format>
  static void prepare(W (&u)[4]) {
    if constexpr (Format::zero != 0) {
      for (W& w : u) {
        for (uint8_t& b : w.v) b = static_cast<uint8_t>(b - Format::zero);
      }
    }
  }

  template <class Format>
  static void prepare_panel(W (&u)[4]) {
    prepare<Format>(u);
  }

  static constexpr bool has_lanes = false;
  template <class Format>
  static constexpr uint32_t row_pair = 1;

  struct RowSum {
    float f = 0;
  };
  template <class Format>
  static void row_totals(const RowSum& s, float* out) {
    *out = s.f;
  }

  template <class Format, class Groups>
  static void row_group(RowSum& sum, const Groups& groups, const GroupInput& in) {
    const auto& u = groups.u[0];
    const auto &scale = groups.scale[0], &offset = groups.offset[0];
    constexpr uint32_t width = Format::width;
    for (uint32_t run = 0; run < group_weights / width; ++run) {
      const uint8_t* w = u[run * width / 64].v + run * width % 64;
      int32_t products = 0;
      for (uint32_t i = 0; i < width; ++i)
        products += static_cast<int8_t>(w[i]) * in.q[run * width + i];
      const float in_scale = in.scale[run * width / 32];
      sum.f += static_cast<float>(products) * (scale.v[run] * in_scale);
      if constexpr (Format::has_offset) {
        const int total = width == 32 ? in.sums[2 * run] + in.sums[2 * run + 1] : in.sums[run];
        sum.f += static_cast<float>(total) * in_scale * offset.v[run];
      }
    }
  }

  template <class Kind>
  static constexpr int tile_bias = 0;

  static I pair_sums(const int16_t* p, int first, int second) {
    I out;
    for (uint32_t i = 0; i < lanes; ++i) out.v[i] = first * p[2 * i] + second * p[2 * i + 1];
    return out;
  }
  static I iset(int32_t v) { return {v, v, v, v}; }
  static I iadd(I a, const I& b) {
    for (uint32_t i = 0; i < lanes; ++i) a.v[i] += b.v[i];
    return a;
  }
  static void istore(int32_t* p, const I& v) { std::memcpy(p, &v, sizeof v); }

  template <class Kind, std::size_t tokens>
  static void accumulate(I (&sum)[tokens][2], const uint8_t* panel, const int8_t* q,
                         uint32_t cols) {
    for (std::size_t t = 0; t < tokens; ++t) {
      int32_t products[2 * lanes];
      std::memcpy(products, &sum[t], sizeof products);
      for (uint32_t k = 0; k < Kind::width; k += 4) {
        for (uint32_t r = 0; r < 2 * lanes; ++r) {
          for (uint32_t i = 0; i < 4; ++i) {
            products[r] += static_cast<int8_t>(panel[(k * 2 + r) * 4 + i]) * q[t * cols + k + i];
          }
        }
      }
      std::memcpy(&sum[t], products, sizeof products);
    }
  }

  static void transpose(const uint8_t* from, std::size_t from_stride, uint8_t* to,
                        std::size_t to_stride) {
    for (uint32_t r = 0; r < lanes; ++r) {
      for (uint32_t c = 0; c < lanes; ++c)
        std::memcpy(to + c * to_stride + r * 4, from + r * from_stride + c * 4, 4);
    }
  }

 private:
  static float from_bits(uint32_t bits) { return kvasir::load<float>(&bits); }
};

}  // namespace

void fill_matmul_scalar(Kernels& k) {
  fill_elementwise(k);
  fill_matmul<Scalar>(k);
  fill_recurrent<Scalar>(k);
}

}  // namespace kvasir
