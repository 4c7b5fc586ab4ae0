// kv_strategy: one rule for all parameters.
#include <cmath>
#include <cstring>
#include <limits>

#include "helpers.h"

using namespace api_test;

namespace {

struct Destroy {
  void operator()(kv_strategy* s) const { kv_strategy_destroy(s); }
};
using Strategy = std::unique_ptr<kv_strategy, Destroy>;

Strategy create(const char* name) {
  kv_strategy* out = nullptr;
  REQUIRE_OK(kv_strategy_create(name, &out, error));
  return Strategy(out);
}

enum Group : uint32_t {
  b = 1,
  d = 2,
  h = 4,
  alpha = 8,
  coverage = 16,
  select = 32,
  exact = 64,
  breadth = 128,
  graphs = 256,
  schedule = 512,
  filter = 1024
};

// Parameters of each group, with a value that fits.
struct Value {
  uint32_t param;
  Group group;
  double value;
};
constexpr Value values[] = {{KV_PARAM_BUDGET_TOKENS, b, 100},
                            {KV_PARAM_BUDGET_FRACTION, b, 0.25},
                            {KV_PARAM_DENSE_LAYERS, d, 1},
                            {KV_PARAM_SHARE_HEADS, h, 0},
                            {KV_PARAM_ALPHA, alpha, 0.5},
                            {KV_PARAM_COVERAGE, coverage, 0.9},
                            {KV_PARAM_SELECT_TOKENS, select, 32},
                            {KV_PARAM_EXACT_TOKENS, exact, 10},
                            {KV_PARAM_SEARCH_BREADTH, breadth, 128},
                            {KV_PARAM_HEAD_GRAPHS, graphs, 1},
                            {KV_PARAM_BUDGET_SCHEDULE, schedule, KV_BUDGET_LINEAR},
                            {KV_PARAM_FILTER_WINDOW, filter, KV_FILTER_UNIFORM}};

struct Named {
  const char* name;
  uint32_t groups;
};
constexpr Named strategies_of_header[] = {
    {"auto", b | d | h | coverage},
    {"full", 0},
    {"window", d | exact},
    {"bounded", b | d | h | coverage | exact},
    {"quest", b | d | h | select | exact | schedule},
    {"flat", b | d | h | exact | schedule},
    {"dipr", b | d | h | alpha | schedule},
    {"dipr-graph", b | d | h | alpha | breadth | graphs | schedule},
    {"ood", b | d | h | breadth | graphs | schedule},
    {"hnsw", b | d | h | breadth | schedule},
    {"filter-layers", b | exact | filter},
    {"ivf", b | d | h | breadth | schedule},
    {"infllm", b | d | h | schedule},
    {"snapkv", b | d | h | schedule}};

kv_status opens(const kv_strategy* decode, const kv_strategy* prefill) {
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.threads = 1;
  o.decode = decode, o.prefill = prefill;
  kv_session* out = nullptr;
  const kv_status status = kv_session_open(tiny_model(), &o, &out, nullptr);
  kv_session_close(out);
  return status;
}

kv_status opens_cache(const kv_strategy* decode) {
  kv_cache_shape shape;
  kv_init(&shape, sizeof shape);
  shape.layers = 4, shape.heads = shape.kv_heads = 1, shape.head_dim = 32, shape.max_tokens = 100;
  kv_cache_options o;
  kv_init(&o, sizeof o);
  o.decode = decode;
  kv_cache* out = nullptr;
  const kv_status status = kv_cache_open(&shape, &o, &out, nullptr);
  kv_cache_close(out);
  return status;
}

kv_strategy_info info_of(const std::string& name) {
  kv_strategy_info info;
  kv_init(&info, sizeof info);
  for (uint32_t i = 0; kv_strategy_list(i, &info, nullptr) == KV_OK; ++i)
    if (name == info.name) return info;
  FAIL(name << " is not listed");
  return info;
}

}  // namespace

TEST_CASE("a strategy has the parameters that the header lists, and refuses all others") {
  for (const Named& named : strategies_of_header)
    for (const Value& v : values) {
      CAPTURE(named.name);
      CAPTURE(v.param);
      const Strategy s = create(named.name);
      const kv_status expected = named.groups & v.group ? KV_OK : KV_BAD_ARGUMENT;
      double value = -7;
      CHECK(kv_strategy_get(s.get(), v.param, &value, nullptr) == expected);
      CHECK(kv_strategy_set(s.get(), v.param, v.value, nullptr) == expected);
      if (expected != KV_OK) continue;
      REQUIRE_OK(kv_strategy_get(s.get(), v.param, &value, error));
      CHECK(value == v.value);
    }
}

TEST_CASE("a strategy lists itself with its uses") {
  std::size_t listed = 0;
  kv_strategy_info info;
  kv_init(&info, sizeof info);
  while (kv_strategy_list(static_cast<uint32_t>(listed), &info, nullptr) == KV_OK) ++listed;
  CHECK(listed == std::size(strategies_of_header) - 1);  // "auto" is not listed
  CHECK(kv_strategy_list(static_cast<uint32_t>(listed), &info, nullptr) == KV_NOT_FOUND);
  CHECK(info_of("full").flags == (KV_STRATEGY_PREFILL | KV_STRATEGY_CACHE));
  CHECK(info_of("full").budget_floor == 0);
  CHECK(info_of("quest").budget_floor == 512);
  CHECK(info_of("ood").flags == KV_STRATEGY_INDEX);
  CHECK(info_of("ivf").flags == (KV_STRATEGY_INDEX | KV_STRATEGY_EXPERIMENTAL));
  CHECK(info_of("infllm").flags == (KV_STRATEGY_CACHE | KV_STRATEGY_EXPERIMENTAL));
  CHECK(info_of("snapkv").flags == KV_STRATEGY_EXPERIMENTAL);
  for (const Named& named : strategies_of_header) {
    if (std::strcmp(named.name, "auto") == 0) continue;
    CAPTURE(named.name);
    const Strategy s = create(named.name);
    const uint32_t flags = info_of(named.name).flags;
    CHECK(opens(s.get(), nullptr) == KV_OK);
    CHECK(opens(nullptr, s.get()) == (flags & KV_STRATEGY_PREFILL ? KV_OK : KV_BAD_ARGUMENT));
    CHECK(opens_cache(s.get()) == (flags & KV_STRATEGY_CACHE ? KV_OK : KV_BAD_ARGUMENT));
  }
  CHECK(opens(nullptr, create("auto").get()) == KV_BAD_ARGUMENT);
}

TEST_CASE("a parameter that does not fit the use is refused and not ignored") {
  const Strategy exact_part = create("quest");
  REQUIRE_OK(kv_strategy_set(exact_part.get(), KV_PARAM_EXACT_TOKENS, 10, error));
  CHECK(opens(exact_part.get(), nullptr) == KV_BAD_ARGUMENT);
  CHECK(opens(nullptr, exact_part.get()) == KV_OK);
  CHECK(opens_cache(exact_part.get()) == KV_BAD_ARGUMENT);
  const Strategy dense = create("quest");
  REQUIRE_OK(kv_strategy_set(dense.get(), KV_PARAM_DENSE_LAYERS, 1, error));
  CHECK(opens(dense.get(), nullptr) == KV_OK);
  CHECK(opens(nullptr, dense.get()) == KV_BAD_ARGUMENT);
  CHECK(opens_cache(dense.get()) == KV_OK);
  const Strategy spread = create("quest");
  REQUIRE_OK(kv_strategy_set(spread.get(), KV_PARAM_BUDGET_SCHEDULE, KV_BUDGET_PYRAMID, error));
  CHECK(opens(spread.get(), nullptr) == KV_OK);
  CHECK(opens_cache(spread.get()) == KV_BAD_ARGUMENT);
}

TEST_CASE("a value out of range is refused and changes nothing") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const struct {
    const char* name;
    uint32_t param;
    std::vector<double> bad, good;
  } cases[] = {{"quest", KV_PARAM_BUDGET_TOKENS, {0, -1, 1.5, inf, nan}, {1, 1e9}},
               {"quest", KV_PARAM_BUDGET_FRACTION, {0, -0.1, 1.1, 1e-60, nan}, {1, 1e-6}},
               {"quest", KV_PARAM_DENSE_LAYERS, {-1, 0.5, 4294967295.0, nan}, {0, 1000}},
               {"quest", KV_PARAM_SHARE_HEADS, {-1, 0.5, 2, nan}, {0, 1}},
               {"quest", KV_PARAM_SELECT_TOKENS, {0, 7, 12, 1032, nan}, {8, 1024}},
               {"quest", KV_PARAM_EXACT_TOKENS, {-1, 0.5, inf}, {0, 1e6}},
               {"dipr", KV_PARAM_ALPHA, {0, 1e-60, 1.1, nan}, {1e-6, 1}},
               {"bounded", KV_PARAM_COVERAGE, {0, 1, 1 - 1e-12, nan}, {0.1, 0.99}},
               {"ood", KV_PARAM_SEARCH_BREADTH, {0, 1.5, -1}, {1, 4096}},
               {"ood", KV_PARAM_HEAD_GRAPHS, {2, -1}, {0, 1}},
               {"quest", KV_PARAM_BUDGET_SCHEDULE, {3, -1}, {0, 2}},
               {"filter-layers", KV_PARAM_FILTER_WINDOW, {3, -1}, {0, 2}}};
  for (const auto& c : cases) {
    CAPTURE(c.param);
    const Strategy s = create(c.name);
    for (const double value : c.good) CHECK(kv_strategy_set(s.get(), c.param, value, nullptr) == 0);
    for (const double value : c.bad) {
      CAPTURE(value);
      CHECK(kv_strategy_set(s.get(), c.param, value, nullptr) == KV_BAD_ARGUMENT);
      double now = 0;
      REQUIRE_OK(kv_strategy_get(s.get(), c.param, &now, error));
      CHECK(now == c.good.back());
    }
  }
}

TEST_CASE("the budget that is set last counts") {
  const Strategy s = create("quest");
  double tokens = -1, fraction = -1;
  const auto read = [&] {
    REQUIRE_OK(kv_strategy_get(s.get(), KV_PARAM_BUDGET_TOKENS, &tokens, error));
    REQUIRE_OK(kv_strategy_get(s.get(), KV_PARAM_BUDGET_FRACTION, &fraction, error));
  };
  read();
  CHECK(tokens == 0);
  CHECK(fraction == 0.02);
  REQUIRE_OK(kv_strategy_set(s.get(), KV_PARAM_BUDGET_FRACTION, 0.5, error));
  REQUIRE_OK(kv_strategy_set(s.get(), KV_PARAM_BUDGET_TOKENS, 64, error));
  read();
  CHECK(tokens == 64);
  CHECK(fraction == 0);
  CHECK(opens(s.get(), nullptr) == KV_OK);
  REQUIRE_OK(kv_strategy_set(s.get(), KV_PARAM_BUDGET_FRACTION, 0.5, error));
  read();
  CHECK(tokens == 0);
  CHECK(fraction == 0.5);
}

TEST_CASE("parameters that are not set read as their defaults") {
  double value = 0;
  const auto get = [&](const char* name, uint32_t param) {
    REQUIRE_OK(kv_strategy_get(create(name).get(), param, &value, error));
    return value;
  };
  CHECK(get("auto", KV_PARAM_BUDGET_FRACTION) == 0.01);
  CHECK(get("bounded", KV_PARAM_COVERAGE) == 0.96);
  CHECK(get("dipr", KV_PARAM_ALPHA) == 0.012);
  CHECK(get("quest", KV_PARAM_DENSE_LAYERS) == 2);
  CHECK(get("flat", KV_PARAM_DENSE_LAYERS) == 0);
  CHECK(get("flat", KV_PARAM_SHARE_HEADS) == 1);
  CHECK(get("flat", KV_PARAM_EXACT_TOKENS) == 0);
}

TEST_CASE("layers are for filter-layers, ascending, and of the model") {
  const uint32_t good[] = {0, 2}, same[] = {1, 1}, down[] = {2, 1}, beyond[] = {100};
  CHECK(kv_strategy_set_layers(create("quest").get(), good, 2, nullptr) == KV_BAD_ARGUMENT);
  const Strategy s = create("filter-layers");
  CHECK(kv_strategy_set_layers(s.get(), same, 2, nullptr) == KV_BAD_ARGUMENT);
  CHECK(kv_strategy_set_layers(s.get(), down, 2, nullptr) == KV_BAD_ARGUMENT);
  CHECK(kv_strategy_set_layers(s.get(), nullptr, 1, nullptr) == KV_BAD_ARGUMENT);
  REQUIRE_OK(kv_strategy_set_layers(s.get(), beyond, 1, error));
  CHECK(opens(s.get(), nullptr) == KV_BAD_ARGUMENT);
  CHECK(opens(nullptr, s.get()) == KV_BAD_ARGUMENT);
  CHECK(opens_cache(s.get()) == KV_BAD_ARGUMENT);
  REQUIRE_OK(kv_strategy_set_layers(s.get(), nullptr, 0, error));
  CHECK(opens(s.get(), s.get()) == KV_OK);
}

TEST_CASE("a session keeps its own copy of a strategy") {
  Strategy s = create("quest");
  REQUIRE_OK(kv_strategy_set(s.get(), KV_PARAM_BUDGET_TOKENS, 48, error));
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.threads = 1;
  o.decode = s.get();
  const Session session = open_session(tiny_model(), o);
  REQUIRE_OK(kv_strategy_set(s.get(), KV_PARAM_BUDGET_TOKENS, 96, error));
  s.reset();
  CHECK(stats_of(session.get()).budget_tokens == 48);
  CHECK(std::string(stats_of(fork(session.get()).get()).decode_strategy) == "quest");
  REQUIRE_OK(kv_session_set_strategy(session.get(), create("flat").get(), error));
  CHECK(std::string(stats_of(session.get()).decode_strategy) == "flat");
  REQUIRE_OK(kv_session_set_strategy(session.get(), nullptr, error));
  CHECK(std::string(stats_of(session.get()).decode_strategy) == "full");
}

TEST_CASE("a strategy of another use leaves the session's as it was") {
  const Session session = open_session(tiny_model());
  const Strategy s = create("flat");
  REQUIRE_OK(kv_strategy_set(s.get(), KV_PARAM_EXACT_TOKENS, 1, error));
  CHECK(kv_session_set_strategy(session.get(), s.get(), nullptr) == KV_BAD_ARGUMENT);
  CHECK(std::string(stats_of(session.get()).decode_strategy) == "quest");
}
