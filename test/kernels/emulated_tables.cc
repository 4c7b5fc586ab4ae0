// The tables of instruction sets that this CPU lacks, from the same sources with the instructions
// of others: AVX-VNNI by AVX-512's form of it.
#include "support.h"

namespace kvasir {

void fill_attention_avxvnni_emulated(Kernels&);
void fill_matmul_avxvnni_emulated(Kernels&);

namespace test {
namespace {

[[maybe_unused]] Kernels make_table(const char* name, void (*matmul)(Kernels&),
                                    void (*attention)(Kernels&)) {
  Kernels k{};
  k.name = name;
  matmul(k);
  attention(k);
  return k;
}

}  // namespace

std::vector<const Kernels*> emulated_kernels() {
  std::vector<const Kernels*> tables;
#ifdef KVASIR_EMULATED_TABLES
  if (!cpu_kernels_by_name("avx512vnni")) return tables;
  static const Kernels vnni =
      make_table("avxvnni-emulated", fill_matmul_avxvnni_emulated, fill_attention_avxvnni_emulated);
  tables = {&vnni};
#endif
  return tables;
}

}  // namespace test
}  // namespace kvasir
