// Chooses the table of kernels by the instruction sets of the CPU and by the registers that the
// operating system saves on a thread switch.
#include <cstring>

#include "fill-inl.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace kvasir {
namespace {

using Fill = void (*)(Kernels&);

Kernels make_table(const char* name, Fill matmul, Fill attention) {
  Kernels k{};
  k.name = name;
  matmul(k);
  attention(k);
  return k;
}

// Filling a table runs code compiled for its instruction set, so it comes after the test for it.
const Kernels* scalar_table() {
  static const Kernels k = make_table("scalar", fill_matmul_scalar, fill_attention_scalar);
  return &k;
}

#if defined(__x86_64__)

struct X86Features {
  bool avx2 = false;     // with FMA and F16C
  bool avxvnni = false;  // with these
  bool avx512 = false;   // F, BW, DQ, VL, VNNI
  bool amx = false;      // with these: BF16; tiles of int8 and bf16
};

// XCR0: the register states that the operating system saves.
uint64_t saved_states() {
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return uint64_t{hi} << 32 | lo;
}

// The tile registers take 8 KiB of a thread's saved state, so Linux wants to be asked. It refuses
// where a thread has too small a stack for signals.
bool asks_for_tiles() {
#ifdef __linux__
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, of XCR0
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

X86Features detect() {
  X86Features f;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  constexpr unsigned fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
  if ((c & (fma | osxsave | avx | f16c)) != (fma | osxsave | avx | f16c)) return f;
  const uint64_t states = saved_states();
  // SSE, AVX; and opmask, upper ZMM halves, ZMM16-31
  constexpr uint64_t avx_state = 0x6, avx512_state = 0xe6;
  if ((states & avx_state) != avx_state) return f;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  f.avx2 = (b & 1u << 5) != 0;
  constexpr unsigned avx512f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31,
                     vnni = 1u << 11;
  f.avx512 = f.avx2 && (states & avx512_state) == avx512_state &&
             (b & (avx512f | dq | bw | vl)) == (avx512f | dq | bw | vl) && (c & vnni) != 0;
  constexpr unsigned tiles = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  constexpr uint64_t tile_state = 0x60000;                    // its configuration and data
  f.amx = f.avx512 && (d & tiles) == tiles && (states & tile_state) == tile_state;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) a = 0;
  f.avxvnni = f.avx2 && (a & 1u << 4) != 0;
  f.amx = f.amx && (a & 1u << 5) != 0;  // AVX512-BF16
  return f;
}

const Kernels* avx2_table() {
  if (!detect().avx2) return nullptr;
  static const Kernels k = make_table("avx2", fill_matmul_avx2, fill_attention_avx2);
  return &k;
}

const Kernels* avxvnni_table() {
  if (!detect().avxvnni) return nullptr;
  static const Kernels k = make_table("avxvnni", fill_matmul_avxvnni, fill_attention_avxvnni);
  return &k;
}

const Kernels* avx512_table() {
  if (!detect().avx512) return nullptr;
  static const Kernels k = make_table("avx512vnni", fill_matmul_avx512, fill_attention_avx512);
  return &k;
}

const Kernels* amx_table() {
  static const bool usable = detect().amx && asks_for_tiles();
  if (!usable) return nullptr;
  static const Kernels k = make_table("avx512amx", fill_matmul_amx, fill_attention_amx);
  return &k;
}

#elif defined(__aarch64__)

struct ArmFeatures {
  bool neon = false;  // dot products, half-precision arithmetic
  bool i8mm = false;  // with these
};

ArmFeatures detect() {
#ifdef __APPLE__
  // The first Apple CPU of this kind had the former. Nothing here asks for the latter.
  return {true, false};
#else
  constexpr unsigned long asimdhp = 1ul << 10, asimddp = 1ul << 20;  // of AT_HWCAP
  constexpr unsigned long i8mm = 1ul << 13;                          // of AT_HWCAP2
  ArmFeatures f;
  f.neon = (getauxval(AT_HWCAP) & (asimdhp | asimddp)) == (asimdhp | asimddp);
  f.i8mm = f.neon && (getauxval(AT_HWCAP2) & i8mm) != 0;
  return f;
#endif
}

const Kernels* neon_table() {
  if (!detect().neon) return nullptr;
  static const Kernels k = make_table("neon-dotprod", fill_matmul_neon, fill_attention_neon);
  return &k;
}

const Kernels* i8mm_table() {
  if (!detect().i8mm) return nullptr;
  static const Kernels k = make_table("neon-i8mm", fill_matmul_i8mm, fill_attention_neon);
  return &k;
}

#endif

using Table = const Kernels* (*)();

// Best first. A function returns null where the CPU lacks the instructions.
constexpr Table tables[] = {
#if defined(__x86_64__)
    amx_table, avx512_table, avxvnni_table, avx2_table,
#elif defined(__aarch64__)
    i8mm_table, neon_table,
#endif
    scalar_table};

}  // namespace

const Kernels* cpu_kernels_at(uint32_t i) {
  for (Table table : tables) {
    const Kernels* k = table();
    if (k && i-- == 0) return k;
  }
  return nullptr;
}

const Kernels& cpu_kernels() {
  static const Kernels& best = *cpu_kernels_at(0);
  return best;
}

const Kernels* cpu_kernels_by_name(const char* name) {
  const Kernels* k = nullptr;
  for (uint32_t i = 0; (k = cpu_kernels_at(i)) && std::strcmp(k->name, name) != 0;) ++i;
  return k;
}

}  // namespace kvasir
