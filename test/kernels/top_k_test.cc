// Top-k of every instruction set against a stable sort.
#include <doctest/doctest.h>

#include <algorithm>

#include "reference/reference.h"
#include "support.h"

using namespace kvasir;
using test::Guarded;
using test::Random;

namespace {

void check_top_k(const Kernels& k, const std::vector<float>& scores, uint32_t wanted) {
  const auto n = static_cast<uint32_t>(scores.size());
  Guarded<float> given(n);
  std::copy(scores.begin(), scores.end(), given.data());
  Guarded<uint32_t> out(std::min(n, wanted));
  Guarded<std::byte> scratch(n * 4);
  std::vector<uint32_t> want(std::min(n, wanted));
  CAPTURE(k.name);
  CAPTURE(n);
  CAPTURE(wanted);
  const uint32_t found = k.top_k(given.data(), n, wanted, out.data(), scratch.data());
  CHECK(found == reference::top_k(scores.data(), n, wanted, want.data()));
  CHECK(out.guards_intact());
  CHECK(scratch.guards_intact());
  CHECK(std::equal(want.begin(), want.end(), out.data()));
}

}  // namespace

TEST_CASE("top-k is the stable sort's choice, ties to the lowest index") {
  for (const Kernels* k : test::all_kernels()) {
    Random random(99);
    for (uint32_t i = 0; i < 120; ++i) {
      std::vector<float> scores(i < 90 ? random.below(300) : random.below(17000));
      const uint32_t kind = i % 6;
      for (float& x : scores) {
        if (kind == 0) x = random.normal();
        if (kind == 1) x = static_cast<float>(random.below(5)) - 2;  // many ties
        if (kind == 2) x = 1e4f + random.normal();                   // one exponent
        if (kind == 3)
          x = random.below(3) ? -std::numeric_limits<float>::infinity() : random.normal();
        if (kind == 4) x = random.below(2) ? 0.0f : -0.0f;
        // the last bits decide
        if (kind == 5) x = 1.0f + static_cast<float>(random.below(1 << 12)) * 0x1p-23f;
      }
      const auto n = static_cast<uint32_t>(scores.size());
      check_top_k(*k, scores, random.below(n + 1));
      check_top_k(*k, scores, n / 50 + 1);
    }
  }
}

TEST_CASE("top-k of nothing, of none, of all and of more than there are") {
  for (const Kernels* k : test::all_kernels()) {
    check_top_k(*k, {}, 0);
    check_top_k(*k, {}, 5);
    check_top_k(*k, {1, 2, 3}, 0);
    check_top_k(*k, {1, 2, 3}, 3);
    check_top_k(*k, {1, 2, 3}, 9);
    check_top_k(*k,
                {-std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                 -std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()},
                2);
    check_top_k(*k, std::vector<float>(1000, 7.5f), 999);
    check_top_k(*k,
                {3.4e38f, std::numeric_limits<float>::infinity(), -3.4e38f,
                 -std::numeric_limits<float>::infinity(), 1e-45f, -1e-45f},
                4);
  }
}
