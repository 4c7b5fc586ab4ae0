// An index of keys that a real GPU helps to build, where there is one: the same bits as the CPU's.
#include <algorithm>
#include <cstdlib>

#include "helpers.h"

using namespace kvasir;
using namespace kvasir::test;

TEST_CASE("ood: a graph from the nearest keys that a device has found is the CPU's") {
  std::vector<int> found;
  std::shared_ptr<Device> device;
  Status s = Device::find("cuda", &found);
  if (s.ok()) s = Device::open(found[0], 0, 1, &device);
  if (!s.ok()) {
    MESSAGE("not run: ", std::string(s.message()));
    REQUIRE(!std::getenv("KVASIR_TEST_NEEDS_GPU"));
    return;
  }
  for (const uint32_t head_dim : {64u, 128u}) {
    const PageStore store = random_store(head_dim, 150, 2, head_dim + 1);
    const IndexQueries queries = some_queries(store, 2, 150, 4);
    const auto expected = build(IndexKind::ood, store, queries, 2);
    std::shared_ptr<TokenIndex> index;
    NearestBy by;
    Progress none;
    s = build_index({IndexKind::ood, store, queries, 1, {}, {device}, &by}, cpu_kernels(), &pool(2),
                    nullptr, &none, &index);
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
    CHECK(by.names == "cuda:0");
    CHECK(by.because.empty());
    for (uint32_t head = 0; head < 2; ++head) {
      const TokenIndex::Head &left = index->heads(0, head)[0], &right = expected->heads(0, head)[0];
      CHECK(left.entry == right.entry);
      CHECK(std::ranges::equal(left.floats, right.floats));
      uint32_t different = 0;
      for (uint32_t i = 0; i < right.levels[0].lists(); ++i)
        different += !std::ranges::equal(left.levels[0].list(i), right.levels[0].list(i));
      CHECK(different == 0);
    }
    CHECK(device->used() == 0);
  }
}
