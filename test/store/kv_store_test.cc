// The places of tokens as they move from the window into pages, in forks and after rewinds.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "pool.h"
#include "store/kv_store.h"

using namespace kvasir;
using kvasir::test::pool;

namespace {

constexpr uint32_t store_layers = 2, store_heads = 3,
                   store_dim = 40;  // padded to 64: pages of 32 tokens
const StoreShape store_shape{store_layers, store_heads, PageShape::of(store_dim)};

struct Tokens {
  std::vector<float> k, v;  // [n][store_heads][store_dim]
};

Tokens random_tokens(uint32_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Tokens t{std::vector<float>(n * store_heads * store_dim),
           std::vector<float>(n * store_heads * store_dim)};
  for (float& x : t.k) x = normal(random) + 3;  // a mean to centre away
  for (float& x : t.v) x = normal(random);
  return t;
}

void append(KvStore* store, uint32_t n, uint32_t seed) {
  REQUIRE(store->prepare(n).ok());
  for (uint32_t l = 0; l < store_layers; ++l) {
    const Tokens t = random_tokens(n, seed * 10 + l);
    store->write(l, n, t.k.data(), t.v.data());
  }
  store->commit(n, cpu_kernels(), &pool());
}

// K and V of every token of a layer and head as attention sees them: pages, then window.
// [tokens][2][dim]
std::vector<float> contents(const KvStore& store, uint32_t layer, uint32_t head) {
  const uint32_t dim = store_shape.page.dim, page_tokens = store_shape.page.page_tokens;
  std::vector<float> out;
  std::vector<float> k(page_tokens * dim), v(page_tokens * dim);
  const auto add = [&](const float* rows_k, const float* rows_v, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
      out.insert(out.end(), rows_k + i * dim, rows_k + (i + 1) * dim);
      out.insert(out.end(), rows_v + i * dim, rows_v + (i + 1) * dim);
    }
  };
  for (uint32_t p = 0; p < store.pages().pages(); ++p) {
    const PageRef page = store.pages().page(layer, head, p);
    cpu_kernels().unseal_page(store_shape.page, page.data, page.scales, k.data(), v.data());
    add(k.data(), v.data(), page_tokens);
  }
  const KvStore::Rows window = store.window(layer, head);
  add(window.k, window.v, store.window_count());
  return out;
}

}  // namespace

TEST_CASE("tokens leave the window as pages and the window never shrinks below its size") {
  KvStore store(store_shape, 64);
  for (uint32_t n : {1u, 62u, 1u, 31u, 1u, 200u, 7u, 512u}) {
    const uint64_t before = store.tokens();
    append(&store, n, n);
    CHECK(store.tokens() == before + n);
    CHECK(store.window_count() < 64 + 32);
    if (store.pages().pages()) CHECK(store.window_count() >= 64);
    CHECK(store.sink_count() == (store.pages().pages() ? 32 : 0));
  }
}

TEST_CASE("stored keys and values are those written, centred by one vector a head") {
  KvStore store(store_shape, 64);
  append(&store, 300, 5);
  append(&store, 10, 6);
  REQUIRE(store.pages().pages() > 5);
  for (uint32_t l = 0; l < store_layers; ++l) {
    const Tokens first = random_tokens(300, 50 + l), second = random_tokens(10, 60 + l);
    for (uint32_t h = 0; h < store_heads; ++h) {
      const auto rows = contents(store, l, h);
      const float* centre = store.centre().data() + (l * store_heads + h) * store_shape.page.dim;
      double worst_k = 0, worst_v = 0;
      for (uint32_t t = 0; t < 310; ++t) {
        const Tokens& from = t < 300 ? first : second;
        const std::size_t at = ((t < 300 ? t : t - 300) * store_heads + h) * store_dim;
        for (uint32_t d = 0; d < store_dim; ++d) {
          worst_k = std::max(worst_k, std::abs(static_cast<double>(rows[(t * 2) * 64 + d] +
                                                                   centre[d] - from.k[at + d])));
          worst_v = std::max(
              worst_v, std::abs(static_cast<double>(rows[(t * 2 + 1) * 64 + d] - from.v[at + d])));
        }
        for (uint32_t d = store_dim; d < 64; ++d) CHECK(rows[(t * 2) * 64 + d] == 0);
      }
      CHECK(worst_k < 0.03);  // half a step of int8 at amplitudes up to 5
      CHECK(worst_v < 0.03);
    }
  }
}

TEST_CASE("a step that is not committed leaves no trace") {
  KvStore store(store_shape, 64), plain(store_shape, 64);
  append(&store, 200, 1);
  append(&plain, 200, 1);
  REQUIRE(store.prepare(500).ok());
  const Tokens other = random_tokens(500, 99);
  for (uint32_t l = 0; l < store_layers; ++l) store.write(l, 500, other.k.data(), other.v.data());
  append(&store, 90, 2);
  append(&plain, 90, 2);
  CHECK(contents(store, 1, 2) == contents(plain, 1, 2));
}

TEST_CASE("a fork has the original's window and sinks until the one or the other goes on") {
  KvStore store(store_shape, 64);
  append(&store, 200, 1);
  const auto before = contents(store, 1, 2);
  const float *rows = store.window(0, 0).k, *sinks = store.sinks(0, 0).k;
  KvStore fork(store), third(fork);
  CHECK(fork.window(0, 0).k == rows);
  CHECK(fork.sinks(0, 0).k == sinks);
  append(&fork, 5, 2);
  CHECK(fork.window(0, 0).k != rows);
  CHECK(fork.sinks(0, 0).k == sinks);  // those are never written to again
  append(&store, 3, 3);
  CHECK(store.window(0, 0).k == rows);  // behind those that its copies have
  CHECK(contents(third, 1, 2) == before);
  append(&third, 3, 3);
  CHECK(third.window(0, 0).k != rows);
  CHECK(contents(third, 1, 2) == contents(store, 1, 2));

  SUBCASE("also where a fork begins a text anew") {
    KvStore anew(store);
    const auto all = contents(store, 0, 1);
    const float first = *store.sinks(0, 0).k;
    REQUIRE(anew.rewind(0, cpu_kernels()).ok());
    append(&anew, 200, 7);
    CHECK(contents(store, 0, 1) == all);
    CHECK(*store.sinks(0, 0).k == first);
    CHECK(*anew.sinks(0, 0).k != first);
  }
}

TEST_CASE("a store that went back writes over nothing that a copy has") {
  KvStore store(store_shape, 64);
  append(&store, 200, 1);
  const float* rows = store.window(0, 0).k;
  {
    const KvStore copy(store);
    const auto before = contents(copy, 1, 2);
    store.pop();
    append(&store, 1, 2);
    CHECK(store.window(0, 0).k != rows);
    CHECK(contents(copy, 1, 2) == before);
    rows = store.window(0, 0).k;
    append(&store, 1, 3);  // of its own now, it goes on in its place
    CHECK(store.window(0, 0).k == rows);
  }
  store.pop();
  append(&store, 1, 4);  // nobody else has them
  CHECK(store.window(0, 0).k == rows);
}

TEST_CASE("what stores with a common past do stays their own, in any order") {
  struct Done {
    int what;  // tokens to append, minus those to go back to, or 0: the newest is taken back
    uint32_t seed;
  };
  struct One {
    KvStore store;
    std::vector<Done> past;
  };
  const auto act = [](KvStore* store, Done d) {
    if (d.what > 0) return append(store, static_cast<uint32_t>(d.what), d.seed);
    if (d.what == 0) return store->pop();
    REQUIRE(store->rewind(static_cast<uint64_t>(-d.what), cpu_kernels()).ok());
  };
  std::mt19937 random(7);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  std::vector<One> all;
  all.push_back({KvStore(store_shape, 64), {}});
  for (uint32_t round = 0; round < 150; ++round) {
    One& one = all[below(static_cast<uint32_t>(all.size()))];
    const uint32_t kind = below(10);
    if (kind < 3 && all.size() < 5) {
      One copy{KvStore(one.store), one.past};
      all.push_back(std::move(copy));
    } else if (kind < 4 && all.size() > 1) {
      std::swap(one, all.back());
      all.pop_back();
    } else {
      const uint64_t tokens = one.store.tokens();
      Done d{static_cast<int>(kind < 8 ? 1 + below(4) : 1 + below(150)), round};
      if (kind == 5 && one.store.window_count() > 0) d.what = 0;
      if (kind == 9 && tokens > 300) d.what = -static_cast<int>(tokens - below(200));
      act(&one.store, d);
      one.past.push_back(d);
    }
    if (round % 5 != 4) continue;
    for (const One& each : all) {
      KvStore alone(store_shape, 64);
      for (const Done& d : each.past) act(&alone, d);
      REQUIRE(contents(each.store, 1, 2) == contents(alone, 1, 2));
    }
  }
}

TEST_CASE("a fork shares pages and writes its own") {
  KvStore store(store_shape, 64);
  append(&store, 700, 1);
  const auto before = contents(store, 0, 1);
  KvStore fork(store);
  append(&fork, 400, 2);
  CHECK(contents(store, 0, 1) == before);
  append(&store, 300, 3);
  auto head = contents(fork, 0, 1);
  KvStore straight(store_shape, 64);
  append(&straight, 700, 1);
  append(&straight, 400, 2);
  CHECK(head == contents(straight, 0, 1));
}

TEST_CASE("going back keeps what pages and window held, for every length") {
  KvStore store(store_shape, 64);
  append(&store, 333, 1);
  for (uint64_t to : {332u, 310u, 290u, 288u, 257u, 128u, 96u, 95u, 64u, 33u, 32u, 31u, 1u}) {
    KvStore shorter(store);
    const auto all = contents(shorter, 1, 1);
    REQUIRE(shorter.rewind(to, cpu_kernels()).ok());
    CHECK(shorter.tokens() == to);
    auto kept = contents(shorter, 1, 1);
    CHECK(kept.size() == to * 2 * 64);
    // in full precision, better than the page had them
    const bool sinks_return = shorter.pages().pages() == 0;
    const std::size_t from = sinks_return ? std::min<std::size_t>(kept.size(), 32 * 2 * 64) : 0;
    CHECK(std::equal(kept.begin() + static_cast<std::ptrdiff_t>(from), kept.end(),
                     all.begin() + static_cast<std::ptrdiff_t>(from)));
    append(&shorter, 200, 9);  // and it goes on
    CHECK(shorter.tokens() == to + 200);
  }
}

TEST_CASE("tokens that were taken back are in no saved array") {
  for (uint32_t dim : {20u, 40u, 128u, 200u}) {  // of each padded size
    CAPTURE(dim);
    const StoreShape one{1, 2, PageShape::of(dim)};
    const uint32_t tokens = one.page.page_tokens;
    std::mt19937 random(dim);
    std::normal_distribution<float> normal;
    const auto seal = [&](PageStore* store, uint32_t first, uint32_t end) {
      REQUIRE(store->reserve(end).ok());
      std::vector<float> k(std::size_t{tokens} * one.page.dim), v(k.size());
      for (uint32_t p = first; p < end; ++p) {
        for (uint32_t h = 0; h < 2; ++h) {
          for (float& x : k) x = normal(random);
          for (float& x : v) x = normal(random);
          store->seal(cpu_kernels(), 0, h, p, k.data(), v.data());
        }
      }
      store->commit(end);
    };
    const auto saved = [](const PageStore& store) {
      std::vector<uint8_t> out;
      for (const auto kind : PageStore::sections) {
        const auto write = [&](const void* data, std::size_t size) {
          out.insert(out.end(), static_cast<const uint8_t*>(data),
                     static_cast<const uint8_t*>(data) + size);
          return Status();
        };
        REQUIRE(store.write(kind, write).ok());
      }
      return out;
    };
    for (uint32_t kept : {1u, 5u, 15u, 16u, 19u}) {
      PageStore store(one);
      seal(&store, 0, kept);
      const auto before = saved(store);
      PageStore fork(store);
      seal(&store, kept, 40);
      store.truncate(kept);
      CHECK(saved(store) == before);
      CHECK(saved(fork) == before);
      seal(&store, kept, kept + 1);  // what is sealed next is there
      store.truncate(kept);
      CHECK(saved(store) == before);
    }
  }
}

TEST_CASE("sinks that were taken back are gone") {
  KvStore store(store_shape, 64);
  append(&store, 300, 1);
  REQUIRE(store.rewind(5, cpu_kernels()).ok());
  CHECK(store.sink_floats().empty());
  CHECK(store.window_count() == 5);
  append(&store, 200, 2);
  CHECK(store.sink_floats().size() == std::size_t{store_shape.heads_total()} * 2 * 32 * 64);
}

TEST_CASE("a full-precision store never seals") {
  KvStore store(store_shape, KvStore::keep_all);
  for (uint32_t i = 0; i < 20; ++i) append(&store, 77, i);
  CHECK(store.pages().pages() == 0);
  CHECK(store.window_count() == 20 * 77);
  const Tokens last = random_tokens(77, 190);
  CHECK(store.window(0, 0).k[(19 * 77) * 64] == last.k[0]);
}

TEST_CASE("spilling that is cancelled goes on with the next call, and nothing is lost") {
  KvStore store(store_shape, 64), plain(store_shape, 64);
  for (uint32_t step = 0; step < 12; ++step) append(&store, 1000, step), append(&plain, 1000, step);
  const uint64_t tokens = store.tokens();
  MemoryBudget budget;
  budget.step_tokens = store.budget().step_tokens;
  budget.bytes = store.min_bytes(tokens) + store_shape.slab_bytes();
  Cancel cancel;
  cancel.fire();
  CHECK(store.set_budget(budget, tokens, &cancel).code() == Code::cancelled);
  CHECK(store.pages().spilled_bytes() == 0);
  CHECK(contents(store, 1, 2) == contents(plain, 1, 2));
  cancel.reset();
  REQUIRE(store.set_budget(budget, tokens, &cancel).ok());
  CHECK(store.pages().spilled_bytes() > 0);
  CHECK(contents(store, 1, 2) == contents(plain, 1, 2));
}

TEST_CASE("room for pages that is cancelled is made by the next step") {
  KvStore store(store_shape, 64), plain(store_shape, 64);
  append(&store, 300, 1);
  append(&plain, 300, 1);
  Cancel cancel;
  cancel.fire();
  REQUIRE(store.prepare_rows(5000, KvStore::Overlap::nothing, &pool(), &cancel).code() ==
          Code::cancelled);
  REQUIRE(store.prepare_rows(5000, KvStore::Overlap::nothing, &pool()).ok());
  CHECK(store.prepare_pages(5000, &pool(), &cancel).code() == Code::cancelled);
  CHECK(contents(store, 1, 2) == contents(plain, 1, 2));
  append(&store, 5000, 2);
  append(&plain, 5000, 2);
  CHECK(contents(store, 1, 2) == contents(plain, 1, 2));
}

TEST_CASE("rows that are sealed without the window leave what write, seal and commit leave") {
  for (const uint32_t before : {0u, 40u, 100u, 300u}) {
    CAPTURE(before);
    KvStore by_rows(store_shape, 64), plain(store_shape, 64);
    by_rows.drop_representatives(), plain.drop_representatives();
    if (before > 0) append(&by_rows, before, 1), append(&plain, before, 1);
    for (const uint32_t n : {200u, 33u, 500u}) {
      CAPTURE(n);
      append(&plain, n, n);
      for (const bool fails : {true, false}) {  // a step that fails before its commit
        REQUIRE(by_rows.prepare(n).ok());
        for (uint32_t l = 0; l < store_layers; ++l) {
          const Tokens t = random_tokens(n, n * 10 + l);
          // where there is no centre yet, rows before the step may not change
          CHECK(by_rows.can_seal_rows(n) == (before != 40 || by_rows.pages().pages() > 0));
          if (l == 0 && n == 33) by_rows.write(l, n, t.k.data(), t.v.data());
          else if (by_rows.can_seal_rows(n))
            by_rows.seal_rows(l, {n, t.k.data(), t.v.data()}, cpu_kernels(), &pool());
          else by_rows.write(l, n, t.k.data(), t.v.data());
          if (fails) break;
        }
        if (!fails) by_rows.commit(n, cpu_kernels(), &pool());
      }
      CHECK(std::ranges::equal(by_rows.centre(), plain.centre()));
      for (uint32_t l = 0; l < store_layers; ++l)
        for (uint32_t h = 0; h < store_heads; ++h) {
          CHECK(contents(by_rows, l, h) == contents(plain, l, h));
          const std::size_t rows = std::size_t{store_shape.page.page_tokens} * store_shape.page.dim;
          const auto sinks = [&](const KvStore& store) {
            const KvStore::Rows at = store.sinks(l, h);
            std::vector<float> floats(at.k, at.k + rows);
            floats.insert(floats.end(), at.v, at.v + rows);
            return floats;
          };
          CHECK(sinks(by_rows) == sinks(plain));
        }
    }
  }
}

TEST_CASE("the first rows that are attended are in the window, though their pages are sealed") {
  constexpr uint32_t n = 300, attended = 130;
  KvStore by_rows(store_shape, 64), plain(store_shape, 64);
  append(&by_rows, 200, 1), append(&plain, 200, 1);
  REQUIRE(by_rows.prepare(n).ok());
  REQUIRE(plain.prepare(n).ok());
  const std::size_t count = (plain.window_count() + attended) * store_shape.page.dim;
  for (uint32_t l = 0; l < store_layers; ++l) {
    const Tokens t = random_tokens(n, 30 + l);
    by_rows.seal_rows(l, {n, t.k.data(), t.v.data(), attended}, cpu_kernels(), &pool());
    plain.write(l, n, t.k.data(), t.v.data());
    for (uint32_t h = 0; h < store_heads; ++h) {
      const KvStore::Rows ours = by_rows.window(l, h), whole = plain.window(l, h);
      CHECK(std::equal(whole.k, whole.k + count, ours.k));
      CHECK(std::equal(whole.v, whole.v + count, ours.v));
    }
  }
  by_rows.commit(n, cpu_kernels(), &pool()), plain.commit(n, cpu_kernels(), &pool());
  for (uint32_t l = 0; l < store_layers; ++l)
    for (uint32_t h = 0; h < store_heads; ++h)
      CHECK(contents(by_rows, l, h) == contents(plain, l, h));
}

TEST_CASE("a sketch that is found layer by layer has no layer whose pages are not sealed") {
  constexpr uint32_t n = 700;
  KvStore store(store_shape, 64);
  append(&store, n, 1);  // the first keys get their centre behind their step
  REQUIRE(store.prepare(n).ok());
  for (uint32_t l = 0; l < store_layers; ++l) {
    const Tokens t = random_tokens(n, 20 + l);
    store.write(l, n, t.k.data(), t.v.data());
  }
  KeySketch::Build build;
  const auto add = [&](uint32_t layer) {
    store.add_to_sketch(layer, n, nullptr, cpu_kernels(), &pool(2), nullptr, &build);
  };
  store.seal(1, n, cpu_kernels(), &pool(2));
  add(1);  // as where one of two GPUs has no room for its layers' pages
  CHECK_FALSE(build.complete());
  store.seal(0, n, cpu_kernels(), &pool(2));
  add(0), add(1);
  CHECK(build.complete());
  store.commit(n, cpu_kernels(), &pool(2));
  CHECK(store.take_sketch(std::move(build), cpu_kernels(), &pool(2), nullptr));
}

TEST_CASE("a step's pages are in the sketch, however and whenever its layers are sealed") {
  constexpr uint32_t n = 500;
  enum class Way { by_commit, sealed, rows, one_layer, found_between };
  const auto sketch_by = [&](Way way) {
    KvStore store(store_shape, 64);
    store.drop_representatives();
    append(&store, 1500, 1);
    const auto find = [&](uint32_t open) {
      REQUIRE(store.build_sketch(nullptr, cpu_kernels(), &pool(), nullptr, open).ok());
    };
    if (way != Way::found_between) find(0);
    for (const uint32_t seed : {50u, 20u}) {  // the first step has other tokens and fails
      REQUIRE(store.prepare(n).ok());
      for (uint32_t l = 0; l < store_layers; ++l) {
        const Tokens t = random_tokens(n, seed + l);
        if (way == Way::rows) {
          store.seal_rows(l, {n, t.k.data(), t.v.data()}, cpu_kernels(), &pool());
          continue;
        }
        store.write(l, n, t.k.data(), t.v.data());
        if (way != Way::by_commit && (way != Way::one_layer || l == 0))
          store.seal(l, n, cpu_kernels(), &pool());
        if (way == Way::found_between && l == 0 && seed == 20) find(n);
      }
    }
    store.commit(n, cpu_kernels(), &pool());
    CHECK(store.sketch().pages() == store.pages().pages());
    std::vector<char> bytes;
    const Status s = store.sketch().write([&](const void* data, std::size_t size) {
      const char* const from = static_cast<const char*>(data);
      return bytes.insert(bytes.end(), from, from + size), Status();
    });
    REQUIRE(s.ok());
    return bytes;
  };
  const std::vector<char> expected = sketch_by(Way::by_commit);
  for (const Way way : {Way::sealed, Way::rows, Way::one_layer, Way::found_between}) {
    CAPTURE(static_cast<int>(way));
    CHECK(sketch_by(way) == expected);
  }
}

TEST_CASE("room for pages changes no stamp, though a fork shares the last slab") {
  KvStore store(store_shape, 64);
  append(&store, 400, 1);
  const KvStore fork(store);
  const uint64_t stamp = store.pages().stamp(0);
  REQUIRE(store.prepare(100).ok());
  CHECK(store.pages().stamp(0) == stamp);
  append(&store, 100, 2);
  CHECK(store.pages().stamp(0) != stamp);
  CHECK(fork.pages().stamp(0) == stamp);
}

TEST_CASE("memory that is made ahead is counted, used by the next step and given back") {
  constexpr uint32_t n = 1400;
  KvStore store(store_shape, 64);
  append(&store, n, 1);
  const uint64_t before = store.pages().private_bytes();
  const auto slabs = [&] {
    return (store.pages().private_bytes() - before) / store_shape.slab_bytes();
  };
  store.prepare_ahead(n, &pool(2));
  CHECK(slabs() == 1);  // one a call
  store.prepare_ahead(n, &pool(2));
  CHECK(slabs() == 2);
  const KvStore fork(store);  // without them
  CHECK(fork.pages().private_bytes() <= before);
  REQUIRE(store.prepare(n).ok());
  const uint64_t needed = slabs();
  CHECK(needed >= 2);
  store.prepare_ahead(n, &pool(2));  // there is room already
  CHECK(slabs() == needed);
  store.prepare_ahead(4 * n, &pool(2));
  CHECK(slabs() == needed + 1);
  store.end_ahead();
  CHECK(slabs() == needed);
}
