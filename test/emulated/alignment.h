// Alignment of the arrays that kernels/cuda accesses by vector loads and stores. A device is lost
// when an array begins at another address. Kernels access all other arrays number by number, or
// check the address first, as load() and store() of elementwise.cu do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/device.h"
#include "cuda/layout.h"
#include "emulated.h"

namespace kvasir::emulated {

// 0, or an error whose text is what.
inline int begins(uint64_t address, std::size_t at_multiples_of, const char* what) {
  if (address % at_multiples_of == 0) return 0;
  machine().misaligned = what;
  return misaligned;
}
inline int begins(const void* p, std::size_t at_multiples_of, const char* what) {
  return begins(reinterpret_cast<uintptr_t>(p), at_multiples_of, what);
}

// matmul.cu
inline int check_matmul(std::span<const DeviceProduct> products, const DeviceActivations& x) {
  int error = 0;
  for (const DeviceProduct& p : products) {
    const TensorTypeInfo& type = *tensor_type_info(p.w.type);
    // load_quants(): uint4, of two bits uint2; inputs: uint4; multiply_row(): short2 of sums, where
    // the weights have an offset
    if (type.block_elements > 1) {
      const bool two_bits = cuda::layout_of(p.w.type).low_bits == 2;
      const bool has_offset = cuda::has_sums(p.w.type);
      if (!error) error = begins(p.w.data, two_bits ? 8 : 16, "matmul: quants of weights");
      if (!error) error = begins(x.q, 16, "matmul: quants of inputs");
      if (!error && x.n == 1 && has_offset) error = begins(x.sums, 4, "matmul: sums of an input");
    } else if (x.n == 1 && p.w.cols % (16 / type.block_bytes) == 0) {
      // multiply_float_row(): Weights and Inputs. multiply_float_tile() takes them one by one
      if (!error) error = begins(p.w.data, 16, "matmul: weights of floats, of one input");
      if (!error) error = begins(x.f32, 16, "matmul: one input, of floats");
    }
  }
  return error;
}

// rounding.h, of the kernels of elementwise.cu: char4.
inline int check_rounded(const DeviceActivations& out, const char* what) {
  return begins(out.q, 4, what);
}

// experts.cu, experts_gather(): char4.
inline int check_gather_inputs(const DeviceActivations& x, const DeviceActivations& out) {
  const int error = begins(x.q, 4, "gather_inputs: quants");
  return error ? error : begins(out.q, 4, "gather_inputs: gathered quants");
}

// choice.cu, score_sketch(): queries by words, the sketch by two of them.
inline int check_score_sketch(const DeviceKv& kv, const DeviceAttention& a) {
  const int error = begins(a.projected, 4, "score_sketch: queries");
  return error ? error : begins(kv.sketch_size, 8, "score_sketch: the sketch of a head");
}
inline int check_sketch(uint64_t at) {
  return begins(at, 8, "score_sketch: the sketch of an extent");
}

// attention.cu, attend_chosen(): queries by words, quads that stay by uint4.
inline int check_gathered(const DeviceAttention& a) {
  return begins(a.gathered, 16, "attend_chosen: quads that were gathered");
}
inline int check_group(const DeviceGroup& g) { return begins(g.to, 16, "gather_group: places"); }
inline int check_attend_chosen(const DeviceAttention& a) {
  int error = check_gathered(a);
  if (!error) error = begins(a.q8, 4, "attend_chosen: queries");
  if (!error) error = begins(a.hot.quads, 16, "attend_chosen: quads that stay");
  return error ? error : begins(a.hot.quad_bytes, 16, "attend_chosen: a quad that stays");
}
// A quad, or a page (prefill_attention.cu, prefill_lay_out()), at its device address: uint4.
// Scales: uint2 of a quad, one by one of a page.
inline int check_seen_pages(uint64_t at) { return begins(at, 16, "attention: a page"); }
inline int check_seen_quad_scales(uint64_t at) {
  return begins(at, 8, "attend_chosen: scales of a page");
}

// prefill_attention.cu: uint2 of keys, values and queries in half precision; prefill_queries():
// float4 of queries whose rows are whole ones.
inline int check_prepare_reading(const DevicePrefill& r, const float* q) {
  int error = begins(r.keys, 8, "prepare_prefill: keys");
  if (!error) error = begins(r.values, 8, "prepare_prefill: values");
  if (!error && r.head_dim % 4 == 0)
    error = begins(q, 16, "prepare_prefill: queries that are read");
  return error ? error : begins(r.q, 8, "prepare_prefill: queries");
}

// prefill_attention.cu, copy_async(): 16 bytes.
inline int check_attend_reading(const DevicePrefill& r) {
  int error = begins(r.keys, 16, "attend_prefill: keys");
  if (!error) error = begins(r.values, 16, "attend_prefill: values");
  return error ? error : begins(r.q, 16, "attend_prefill: queries");
}

// nearest.cu: keys and queries by uint4 and copy_async(), the best of groups by two.
inline int check_find_nearest(const DeviceNearest& n) {
  int error = begins(n.keys, 16, "find_nearest: keys");
  if (!error) error = begins(n.group_best, 8, "find_nearest: the best of groups");
  return error ? error : begins(n.queries, 16, "find_nearest: queries");
}

}  // namespace kvasir::emulated
