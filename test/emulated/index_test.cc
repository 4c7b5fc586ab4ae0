// An index of keys that is built with a GPU: the same bits as the CPU's, its statistics, and the
// state after each call that fails.
#include <algorithm>
#include <string>

#include "../select/helpers.h"
#include "../session/device_helpers.h"
#include "emulated.h"
#include "select/graph/index_build.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::shared_ptr<Device> open_device(int number, uint64_t budget = 0) {
  std::shared_ptr<Device> device;
  const Status s = Device::open(number, budget, 1, &device);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return device;
}

struct Made {
  Status status;
  std::shared_ptr<TokenIndex> index;
  NearestBy by;
};

Made make(const PageStore& store, const IndexQueries& queries,
          std::vector<std::shared_ptr<Device>> devices, uint32_t threads = 2, uint32_t graphs = 1,
          const Cancel* cancel = nullptr) {
  Made made;
  Progress none;
  const IndexOrder order{IndexKind::ood, store, queries, graphs, {}, std::move(devices), &made.by};
  made.status = build_index(order, cpu_kernels(), &pool(threads), cancel, &none, &made.index);
  return made;
}

bool same(const TokenIndex& a, const TokenIndex& b, uint32_t heads) {
  if (a.graphs() != b.graphs() || a.bytes() != b.bytes()) return false;
  for (uint32_t h = 0; h < heads; ++h)
    for (uint32_t g = 0; g < a.graphs(); ++g) {
      const TokenIndex::Head &one = a.heads(0, h)[g], &other = b.heads(0, h)[g];
      if (one.entry != other.entry || !std::ranges::equal(one.floats, other.floats) ||
          one.levels[0].lists() != other.levels[0].lists())
        return false;
      for (uint32_t i = 0; i < one.levels[0].lists(); ++i)
        if (!std::ranges::equal(one.levels[0].list(i), other.levels[0].list(i))) return false;
    }
  return true;
}

const char* code_text(const Status& s) { return s.ok() ? "it is good" : s.message(); }

}  // namespace

TEST_CASE(
    "an index from nearest keys found by one device or three equals the CPU's, for a group and for "
    "each query head") {
  for (const uint32_t head_dim : {48u, 128u}) {
    const PageStore store = random_store(head_dim, 24, 3, head_dim);
    const IndexQueries queries = some_queries(store, 3, 60, 5);
    for (const uint32_t graphs : {1u, 3u}) {
      const Made expected = make(store, queries, {}, 2, graphs);
      CHECK(expected.by.names == "cpu");
      CHECK(expected.by.because.empty());
      const Made one = make(store, queries, {open_device(0)}, 3, graphs),
                 three = make(store, queries, {open_device(0), open_device(1), open_device(2)}, 2,
                              graphs);
      REQUIRE(one.status.ok());
      REQUIRE(three.status.ok());
      CHECK(same(*one.index, *expected.index, 3));
      CHECK(same(*three.index, *expected.index, 3));
      CHECK(one.by.names == "cuda:0");
      CHECK(three.by.names == "cuda:0,cuda:1,cuda:2");
      CHECK((one.by.because + three.by.because).empty());
    }
  }
}

TEST_CASE(
    "an index with fewer keys than nearest ones of a query, and one of heads that devices do not "
    "support") {
  const PageStore few = random_store(64, 6, 2, 3), wide = random_store(256, 60, 2, 4);
  const IndexQueries few_queries = some_queries(few, 2, 40, 6),
                     wide_queries = some_queries(wide, 2, 40, 6);
  const Made found = make(few, few_queries, {open_device(0)}),
             not_found = make(wide, wide_queries, {open_device(0)});
  REQUIRE(found.status.ok());
  REQUIRE(not_found.status.ok());
  CHECK(same(*found.index, *make(few, few_queries, {}).index, 2));
  CHECK(same(*not_found.index, *make(wide, wide_queries, {}).index, 2));
  CHECK(found.by.names == "cuda:0");
  CHECK(not_found.by.names == "cpu");
  CHECK(not_found.by.because == "cuda:0: unsupported head size");
}

TEST_CASE(
    "without room on the device the CPU finds the nearest keys and reports it; the device's memory "
    "is released") {
  const PageStore store = random_store(64, 30, 4, 9);
  const IndexQueries queries = some_queries(store, 2, 90, 5);
  const Made expected = make(store, queries, {});
  const auto tight = open_device(0, 30000), wide = open_device(1);
  const Made neither = make(store, queries, {tight}), both = make(store, queries, {tight, wide});
  CHECK(neither.by.names == "cpu");
  CHECK_MESSAGE(neither.by.because.starts_with("cuda:0: the nearest keys of an index "),
                neither.by.because);
  CHECK(both.by.names == "cuda:1,cpu");
  CHECK(both.by.because == neither.by.because);
  CHECK(same(*neither.index, *expected.index, 4));
  CHECK(same(*both.index, *expected.index, 4));
  CHECK(tight->used() == 0);
  CHECK(wide->used() == 0);
}

TEST_CASE(
    "every call of a device during an index build fails once: after a lack of memory the CPU goes "
    "on, a lost device is an error, a cancel stops") {
  const PageStore store = random_store(64, 12, 4, 11);
  const IndexQueries queries = some_queries(store, 2, 30, 5);
  const Made expected = make(store, queries, {});
  const uint64_t held = emulated::machine().held.load();
  uint64_t calls = 0;
  {
    const auto device = open_device(0);
    const uint64_t begin = emulated::machine().calls.load();
    REQUIRE(make(store, queries, {device}, 1).status.ok());
    calls = emulated::machine().calls.load() - begin;
  }
  CHECK(calls > 30);
  for (const int error : {emulated::out_of_memory, emulated::lost, 0})
    for (uint64_t at = 1; at <= calls; ++at) {
      CAPTURE(error);
      CAPTURE(at);
      const auto device = open_device(0);
      Cancel cancel;
      const emulated::Changed fires(emulated::machine().fires, &cancel);
      emulated::machine().fails_with = error;
      emulated::machine().fails_at = emulated::machine().calls + at;
      const Made made = make(store, queries, {device}, 1 + at % 2, 1, &cancel);
      emulated::machine().fails_at = 0;
      if (error == emulated::out_of_memory) {
        REQUIRE_MESSAGE(made.status.ok(), code_text(made.status));
        CHECK(same(*made.index, *expected.index, 4));
        CHECK(made.by.names.ends_with("cpu"));
        CHECK_MESSAGE(made.by.because.starts_with("cuda:0 has no memory for "), made.by.because);
      } else {
        CHECK_MESSAGE(made.status.code() == (error ? Code::device : Code::cancelled),
                      code_text(made.status));
        CHECK_FALSE(made.index);
      }
      CHECK(device->used() == 0);
    }
  CHECK(emulated::machine().held.load() == held);
}

TEST_CASE(
    "the statistics and the file say whether a device or the CPU found the nearest keys, and why "
    "the CPU") {
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda:0,cuda:1", 0, &model).ok());
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = "ood";
  o.select.budget_tokens = 100;
  auto document = open_session(model, o);
  read(document.get(), book_tokens(2150));
  const auto says = [&](const Session& s, const std::string& what) {
    return s.stats_json().find(what) != std::string::npos;
  };
  std::unique_ptr<Session> session, full;
  REQUIRE(document->fork(&session).ok());
  REQUIRE(document->fork(&full).ok());
  CHECK_FALSE(says(*session, "index_nearest_by"));
  uint64_t room[2];
  for (int i = 0; i < 2; ++i) room[i] = emulated::machine().bytes[i];
  REQUIRE(session->prepare(nullptr, {}).ok());
  CHECK_MESSAGE(says(*session, "\"index_nearest_by\":\"cuda:0,cuda:1\""), session->stats_json());
  CHECK_FALSE(says(*session, "index_nearest_because"));
  // what the other fork's steps need too
  for (int i = 0; i < 2; ++i) room[i] = 2 * emulated::machine().bytes[i] - room[i] + (1 << 16);
  {
    const emulated::Changed first(emulated::machine().max_bytes[0], room[0]),
        second(emulated::machine().max_bytes[1], room[1]);
    const Status s = full->prepare(nullptr, {});
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  }
  CHECK_MESSAGE(says(*full, "\"index_nearest_by\":\"cpu\""), full->stats_json());
  CHECK(says(*full, "\"index_nearest_because\":\"cuda:0 has no memory for "));
  TempFolder folder;
  REQUIRE(session->save(folder.file("indexed.kv"), nullptr, {}).ok());
  auto mapped = load(model, folder.file("indexed.kv"), o);
  CHECK_FALSE(says(*mapped, "index_nearest_by"));
  CHECK(continue_with(mapped.get(), 5) == continue_with(session.get(), 5));
}
