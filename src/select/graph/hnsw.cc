// `hnsw`: the tokens with the largest scores, searched in a graph of near keys per KV head (HNSW,
// arXiv 1603.09320).
//
// hnswlib builds the graph. Its items are token numbers; its distance is the negative inner product
// of two keys of the store. The links are then copied, and hnswlib is not used any more: one search
// serves all graphs (select/graph/token_search.h).
#include <istream>

// hnswlib includes <iostream>, which runs code when the library is loaded, for warnings that do not
// occur here. The names that it uses are declared instead.
#ifdef __GLIBCXX__
#define _GLIBCXX_IOSTREAM 1
namespace std {
extern ostream cout, cerr;
}
#endif
// Its prefetches read one number past the end of a full list. Its vector code is not needed,
// because distances are ours.
#define NO_MANUAL_VECTORIZATION
#include <hnswlib/hnswlib.h>

#include <cstring>
#include <exception>
#include <new>

#include "select/graph/index_build.h"
#include "select/graph/token_search.h"

namespace kvasir {

namespace {

constexpr std::size_t hnsw_links = 16;  // twice as many on level 0: hnswlib's default
// Half of hnswlib's default, which finds as much in half the time.
constexpr std::size_t hnsw_breadth = 100;
constexpr std::size_t seed = 100;

float distance(const void* a, const void* b, const void* keys) {
  uint32_t x, y;
  std::memcpy(&x, a, sizeof x);
  std::memcpy(&y, b, sizeof y);
  return -static_cast<const KeyRows*>(keys)->dot(x, y);
}

// Items of 4 bytes: their number.
struct Space final : hnswlib::SpaceInterface<float> {
  explicit Space(const KeyRows* rows) : keys(rows) {}
  std::size_t get_data_size() override { return sizeof(uint32_t); }
  hnswlib::DISTFUNC<float> get_dist_func() override { return distance; }
  void* get_dist_func_param() override { return const_cast<KeyRows*>(keys); }
  const KeyRows* keys;
};

TokenIndex::Words graph_of(const KeyRows& keys, const CancelLatch& cancel) {
  Space space(&keys);
  hnswlib::HierarchicalNSW<float> graph(&space, keys.items(), hnsw_links, hnsw_breadth, seed);
  for (uint32_t i = 0; i < keys.items() && !cancel.fired(); ++i) graph.addPoint(&i, i);
  if (cancel.fired()) return {};
  std::vector<TokenIndex::Lists> levels(static_cast<std::size_t>(graph.maxlevel_) + 1);
  for (uint32_t i = 0; i < keys.items(); ++i)
    for (int l = 0; l <= graph.element_levels_[i]; ++l) {
      TokenIndex::Lists& level = levels[static_cast<std::size_t>(l)];
      const std::vector<hnswlib::tableint> links = graph.getConnectionsWithLock(i, l);
      if (l > 0) level.items.push_back(i);
      level.lists.emplace_back(links.begin(), links.end());
    }
  return TokenIndex::encode(graph.enterpoint_node_, levels, {});
}

}  // namespace

// hnswlib throws various types when memory is short; nothing else makes it throw here.
TokenIndex::Words build_hnsw(const IndexInput& input) {
  const KeyRows keys(input.pages, input.kernels, input.layer, input.kv_head, input.first_token,
                     input.cancel);
  try {
    return graph_of(keys, input.cancel);
  } catch (const std::exception&) {
    throw std::bad_alloc();
  }
}

std::unique_ptr<const Selector> make_hnsw_selector() {
  return make_nearest_selector(IndexKind::hnsw);
}

}  // namespace kvasir
