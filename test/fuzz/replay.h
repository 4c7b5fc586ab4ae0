// What every fuzz target defines: run the code under test on one input, return 0, crash when a
// promise is broken. libFuzzer calls it in fuzz builds, replay.cc in ordinary ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size);

namespace kvasir::test {

// A promise that the target checks beyond what the sanitizers see.
inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", promise);
  std::abort();
}

}  // namespace kvasir::test
