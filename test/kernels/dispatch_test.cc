// The choice of a table.
#include <doctest/doctest.h>

#include <string>

#include "support.h"

using namespace kvasir;

TEST_CASE("the chosen table is the best that can be asked for by name") {
  const Kernels& k = cpu_kernels();
  CHECK(cpu_kernels_by_name(k.name) == &k);
  CHECK(test::all_kernels().back() == &k);
}

TEST_CASE("the scalar table exists on every CPU and unknown names are refused") {
  REQUIRE(cpu_kernels_by_name("scalar"));
  CHECK(cpu_kernels_by_name("scalar")->name == std::string("scalar"));
  CHECK(cpu_kernels_by_name("") == nullptr);
  CHECK(cpu_kernels_by_name("avx9") == nullptr);
}
