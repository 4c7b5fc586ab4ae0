// check-kernels: verifies and times every entry of the kernel table on every instruction set of
// this CPU.
//
//   check-kernels [--bench] [--isa NAME] [PATTERN]
//
// Prints a line per entry and instruction set: the largest error on random shapes, and its
// tolerance. --bench adds the time of a call on a fixed shape, and the ratio to the scalar table,
// measured in the same run. PATTERN is a part of an entry's name. The exit status is 0 where every
// error is within its tolerance.
#include "check_kernels.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace kvasir::test {
namespace {

struct Entry {
  const char* name;
  std::size_t offset;     // in the table
  void (*check)(Check&);  // null: checked with another entry
};

#define KVASIR_ENTRY(name) \
  { #name, offsetof(Kernels, name), check_##name }
constexpr Entry entries[] = {
    KVASIR_ENTRY(quantize),
    KVASIR_ENTRY(matmul),
    KVASIR_ENTRY(dequantize_row),
    KVASIR_ENTRY(rms_norm),
    KVASIR_ENTRY(layer_norm),
    KVASIR_ENTRY(rope),
    KVASIR_ENTRY(activate),
    KVASIR_ENTRY(softcap),
    KVASIR_ENTRY(add),
    KVASIR_ENTRY(sigmoid_gate),
    KVASIR_ENTRY(convolve),
    KVASIR_ENTRY(advance_state),
    KVASIR_ENTRY(quantize_queries),
    KVASIR_ENTRY(attend_pages),
    KVASIR_ENTRY(score_tokens),
    KVASIR_ENTRY(raise_by_pages),
    KVASIR_ENTRY(score_keys),
    KVASIR_ENTRY(attend_rows),
    KVASIR_ENTRY(merge),
    KVASIR_ENTRY(finish),
    KVASIR_ENTRY(seal_page),
    KVASIR_ENTRY(unseal_page),
    KVASIR_ENTRY(score_bounds),
    KVASIR_ENTRY(multiply),
    KVASIR_ENTRY(seal_sketch),
    KVASIR_ENTRY(score_sketch),
    KVASIR_ENTRY(raise_by_sketch),
    KVASIR_ENTRY(attention_shares),
    KVASIR_ENTRY(sum_shares),
    KVASIR_ENTRY(sample),
    KVASIR_ENTRY(top_k),
    // Their users' cases guard memory of exactly these sizes.
    {"matmul_scratch", offsetof(Kernels, matmul_scratch), nullptr},
    {"lane_bytes", offsetof(Kernels, lane_bytes), nullptr},
    {"to_lanes", offsetof(Kernels, to_lanes), nullptr},
    {"tile_bytes", offsetof(Kernels, tile_bytes), nullptr},
    {"to_tiles", offsetof(Kernels, to_tiles), nullptr},
    {"attend_scratch", offsetof(Kernels, attend_scratch), nullptr},
};
#undef KVASIR_ENTRY

// Every word of the table is the name, matmul_rows or an entry above.
constexpr bool covers_table() {
  for (std::size_t at = 0; at < sizeof(Kernels); at += sizeof(void*)) {
    bool found = at == offsetof(Kernels, name) || at == offsetof(Kernels, matmul_rows);
    for (const Entry& entry : entries) found = found || entry.offset == at;
    if (!found) return false;
  }
  return true;
}
static_assert(covers_table(), "a kernel has no check: write one and add it to `entries`");

// Nanoseconds a call: the least mean of several batches, each of at least a millisecond.
double nanoseconds(const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  const auto batch = [&](uint64_t calls) {
    const Clock::time_point begin = Clock::now();
    for (uint64_t i = 0; i < calls; ++i) call();
    return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
  };
  uint64_t calls = 1;
  while (batch(calls) < 1e6) calls *= 2;
  double least = batch(calls);
  for (int i = 0; i < 6; ++i) least = std::min(least, batch(calls));
  return least / static_cast<double>(calls);
}

}  // namespace

void Check::report(const std::string& variant, double error, double tolerance,
                   const std::function<void(const Kernels&)>& call) {
  const bool good = error <= tolerance;
  passed_ = passed_ && good;
  const std::string name = variant.empty() ? entry_ : entry_ + " " + variant;
  std::printf("%-28s %-16s %9.2g %9.2g", name.c_str(), kernels.name, error, tolerance);
  if (bench_) {
    const Kernels* scalar = cpu_kernels_by_name("scalar");
    const double time = nanoseconds([&] { call(kernels); });
    const double base = &kernels == scalar ? time : nanoseconds([&] { call(*scalar); });
    std::printf(" %12.0f ns %7.2fx scalar", time, base / time);
  }
  std::printf("%s\n", good ? "" : "  FAILED");
}

namespace {

int check_all(bool bench, const std::string& isa, const std::string& pattern) {
  std::printf("%-28s %-16s %9s %9s\n", "entry", "table", "error", "tolerance");
  bool passed = true;
  uint32_t checked = 0;
  for (const Entry& entry : entries) {
    if (!entry.check || std::string(entry.name).find(pattern) == std::string::npos) continue;
    for (const Kernels* k : all_kernels()) {
      if (!isa.empty() && isa != k->name) continue;
      Check check(*k, entry.name, bench);
      entry.check(check);
      passed = passed && check.passed();
      ++checked;
    }
  }
  if (checked == 0) {
    std::fprintf(stderr, "check-kernels: no entry matches: name a part of an entry and a table\n");
    return 2;
  }
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace kvasir::test

int main(int argc, char** argv) {
  bool bench = false;
  std::string isa, pattern;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--bench") bench = true;
    else if (argument == "--isa" && i + 1 < argc) isa = argv[++i];
    else if (argument[0] != '-' && pattern.empty()) pattern = argument;
    else {
      std::fprintf(stderr, "usage: check-kernels [--bench] [--isa NAME] [PATTERN]\n");
      return 2;
    }
  }
  return kvasir::test::check_all(bench, isa, pattern);
}
