// The functions that fill a Kernels table: two per instruction set, compiled with its flags.
//
// A file compiled with wider flags must not define anything that the linker could share with
// another file. Its code is in an anonymous namespace, and it includes no header with inline
// functions except intrinsics and the contract's.
#pragma once

#include "backend/kernels.h"

namespace kvasir {

// quantize, matmul, matmul_scratch, matmul_rows, dequantize_row, rms_norm, layer_norm,
// rope, activate, softcap, add, sigmoid_gate, convolve, advance_state.
void fill_matmul_scalar(Kernels& k);
void fill_matmul_avx2(Kernels& k);
void fill_matmul_avxvnni(Kernels& k);
void fill_matmul_avx512(Kernels& k);
void fill_matmul_amx(Kernels& k);
void fill_matmul_neon(Kernels& k);
void fill_matmul_i8mm(Kernels& k);

// quantize_queries, attend_*, merge, finish, seal_page, unseal_page, multiply, seal_sketch,
// score_*, raise_by_*, attention_shares, sum_shares, sample, top_k.
void fill_attention_scalar(Kernels& k);
void fill_attention_avx2(Kernels& k);
void fill_attention_avxvnni(Kernels& k);
void fill_attention_avx512(Kernels& k);
void fill_attention_amx(Kernels& k);
void fill_attention_neon(Kernels& k);

}  // namespace kvasir
