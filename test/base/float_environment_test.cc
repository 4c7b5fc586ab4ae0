// The floating-point environment of the library's own computations.
#include <doctest/doctest.h>

#include <limits>

#include "os/calling_thread.h"

using namespace kvasir;

#if defined(__x86_64__) || defined(__aarch64__)
TEST_CASE("subnormal numbers count as zero in a scope of their own, and are kept after it") {
  const volatile float smallest = std::numeric_limits<float>::min();
  const auto half = [&] { return smallest * 0.5f; };
  CHECK(half() > 0);
  {
    const os::SubnormalsAsZero outer;
    {
      const os::SubnormalsAsZero inner;
      CHECK_FALSE(half() > 0);
    }
    CHECK_FALSE(half() > 0);
  }
  CHECK(half() > 0);
}
#endif
