// Sessions of models with windows and recurrent layers made of what another engine has. Here the
// other engine is a forward pass over stores in full precision.
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/memory.h"
#include "engine/forward.h"
#include "pool.h"
#include "sequence_helpers.h"
#include "session/external_store.h"
#include "session/given_checkpoint.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// Each kind of layer; windows of 16 tokens, whose extents have 512 or 1024.
constexpr const char* engine_models[] = {"qwen3next",     "qwen35",    "lfm2",
                                         "granitehybrid", "falcon-h1", "nemotron_h",
                                         "gemma3-linear", "gpt-oss"};

// The arrays of a checkpoint.
struct Arrays {
  uint64_t tokens = 0;
  struct Array {
    uint32_t layer;
    PartLayout layout;
    std::vector<float> numbers;
  };
  std::vector<Array> arrays;

  std::vector<GivenPart> parts() const {
    std::vector<GivenPart> result;
    for (const Array& a : arrays)
      result.push_back({a.layer, a.layout, Numbers::f32, a.numbers.data(), a.numbers.size()});
    return result;
  }
  Array& of(PartLayout layout) {  // of the last layer that has it
    const auto at = std::find_if(arrays.rbegin(), arrays.rend(),
                                 [&](const Array& a) { return a.layout == layout; });
    REQUIRE(at != arrays.rend());
    return *at;
  }
};

class Engine {
 public:
  explicit Engine(const std::string& name)
      : model_(fixture(name)), store_(model_->store_shape(), KvStore::keep_all),
        windows_(make_windows(*model_, KvStore::keep_all, 0)),
        states_(make_states(model_->config(), 0)) {
    REQUIRE(Forward::create(model_, 8192, &pool(), &forward_).ok());
  }

  void run(std::span<const Token> tokens) {
    for (std::size_t at = 0; at < tokens.size(); at += 64) {
      ForwardStep step;
      step.tokens = tokens.subspan(at, std::min<std::size_t>(64, tokens.size() - at));
      const Status s = forward_->run(
          step, {store_, windows_ ? &*windows_ : nullptr, states_ ? &*states_ : nullptr});
      REQUIRE_MESSAGE(s.ok(), s.message());
    }
  }

  // rows: of windows; 0: as few as a query needs.
  Arrays checkpoint(uint64_t rows = 0) const {
    const ModelConfig& config = model_->config();
    Arrays out;
    out.tokens = store_.tokens();
    rows = std::min(out.tokens, rows > 0 ? rows : config.window - 1);
    for (uint32_t l = 0; l < config.depth(); ++l) {
      const LayerConfig& layer = config.layer(l);
      if (layer.window > 0)
        for (const bool keys : {true, false})
          out.arrays.push_back({l, keys ? PartLayout::keys : PartLayout::values,
                                rows_of(*windows_, layer.kv, config.windows, rows, keys)});
      if (layer.mixer == MixerKind::recurrent || layer.mixer == MixerKind::both) add_state(l, &out);
    }
    return out;
  }

  // A cache of the layers that attend to all tokens.
  std::unique_ptr<ExternalStore> cache(bool full_precision) const {
    BareOptions o;
    o.shape = model_->config();
    o.max_tokens = 8192, o.threads = 2, o.full_precision = full_precision;
    std::unique_ptr<ExternalStore> cache;
    REQUIRE(ExternalStore::open(o, &cache).ok());
    const auto n = static_cast<uint32_t>(store_.tokens());
    for (uint32_t l = 0; l < o.shape.layers; ++l)
      REQUIRE(cache
                  ->update(l, Numbers::f32, rows_of(store_, l, o.shape, n, true).data(),
                           rows_of(store_, l, o.shape, n, false).data(), nullptr, n)
                  .ok());
    return cache;
  }

 private:
  static std::vector<float> rows_of(const KvStore& store, uint32_t layer, const HeadShape& shape,
                                    uint64_t rows, bool keys) {
    REQUIRE(store.window_count() >= rows);
    const std::size_t dim = store.shape().page.dim, first = store.window_count() - rows;
    std::vector<float> out(rows * shape.kv_width());
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      const KvStore::Rows from = store.window(layer, h);
      for (std::size_t t = 0; t < rows; ++t)
        std::copy_n((keys ? from.k : from.v) + (first + t) * dim, shape.head_dim,
                    out.data() + t * shape.kv_width() + std::size_t{h} * shape.head_dim);
    }
    return out;
  }

  void add_state(uint32_t l, Arrays* out) const {
    const RecurrentConfig& r = model_->config().recurrent;
    const float* from = states_->now(model_->config().layer(l).state);
    Arrays::Array inputs{l, PartLayout::inputs, std::vector<float>(r.inputs_size())};
    const std::size_t before = r.taps - 1;
    for (std::size_t i = 0; i < before; ++i)
      for (std::size_t c = 0; c < r.channels; ++c)
        inputs.numbers[c * before + i] = from[i * r.channels + c];
    out->arrays.push_back(inputs);
    if (r.kind == RecurrentKind::convolution) return;
    const bool by_key = r.kind == RecurrentKind::delta_net;
    Arrays::Array matrices{l, by_key ? PartLayout::key_value : PartLayout::value_key, {}};
    const std::size_t keys = r.key_dim, values = r.value_dim;
    for (std::size_t h = 0; h < r.heads; ++h) {
      const float* panels = from + r.inputs_size() + h * r.matrix_size();
      for (std::size_t i = 0; i < keys * values; ++i) {
        const std::size_t k = by_key ? i / values : i % keys, v = by_key ? i % values : i / keys;
        matrices.numbers.push_back(
            panels[(v / state_panel * keys + k) * state_panel + v % state_panel]);
      }
    }
    out->arrays.push_back(matrices);
  }

  std::shared_ptr<const Model> model_;
  std::unique_ptr<Forward> forward_;
  KvStore store_;
  std::optional<KvStore> windows_;
  std::optional<RecurrentState> states_;
};

// What the engine has of a text at a token and at its end.
struct Given {
  Given(const std::string& model, std::size_t from_token, std::size_t count, bool full = false)
      : name(model), tokens(some_tokens(count)) {
    Engine engine(name);
    engine.run(std::span<const Token>(tokens).first(from_token));
    from = engine.checkpoint();
    engine.run(std::span<const Token>(tokens).subspan(from_token));
    end = engine.checkpoint();
    cache = engine.cache(full);
  }

  Status adopt(std::unique_ptr<Session>* out, const Cancel* cancel = nullptr) const {
    const auto model = fixture(name);
    const std::vector<GivenPart> parts = from.parts(), parts_at_end = end.parts();
    GivenCheckpoint first, last;
    RETURN_IF_ERROR(GivenCheckpoint::check(model->config(), "from", from.tokens, parts, &first));
    RETURN_IF_ERROR(
        GivenCheckpoint::check(model->config(), "end", end.tokens, parts_at_end, &last));
    Session::Adopted how;
    how.document = true, how.from = &first, how.end = &last;
    SessionOptions options;  // with checkpoints behind windows that begin in an extent
    options.prefill_chunk = 64, options.checkpoint_interval = 64;
    return Session::adopt(model, *cache, tokens, options, how, cancel, {}, out);
  }

  std::string name;
  std::vector<Token> tokens;
  Arrays from, end;
  std::unique_ptr<ExternalStore> cache;
};

std::unique_ptr<Session> adopted(const Given& given) {
  std::unique_ptr<Session> session;
  const Status s = given.adopt(&session);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return session;
}

void check_refused(const Given& given, Code code, const std::string& part) {
  std::unique_ptr<Session> session;
  const Status s = given.adopt(&session);
  const std::string message = s.message();
  CHECK_MESSAGE(s.code() == code, message);
  CHECK_MESSAGE(message.find(part) != std::string::npos, message);
  CHECK(!session);
}

}  // namespace

TEST_CASE("NaN and infinity are a large difference") {
  for (const float x : {INFINITY, NAN}) {
    Difference difference;
    difference.add(1, 1), difference.add(x, x);
    CHECK(difference.relative() > 1);
  }
}

TEST_CASE("windows and states of another engine continue as those of the model's own prefill") {
  TempFolder folder;
  for (const std::string name : engine_models)
    for (const bool full : {true, false}) {
      CAPTURE(name);
      CAPTURE(full);
      const Given given(name, 400, 1600, full);
      const auto session = adopted(given);
      CHECK(session->stats().prefilled_again == 1200);
      SessionOptions options;
      options.full_precision = full;
      const auto own = open_session(fixture(name), options);
      read(own.get(), given.tokens);
      REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
      std::unique_ptr<Session> loaded;
      const Status s =
          Session::load(fixture(name), folder.file("a.kv"), options, true, nullptr, {}, &loaded);
      REQUIRE_MESSAGE(s.ok(), s.message());
      const double limit = full ? 2e-5 : 0.03;
      const std::vector<float> next = logits_after(session.get(), 100);
      CHECK(difference(next, logits_after(own.get(), 100)) < limit);
      CHECK(next == logits_after(loaded.get(), 100));
      // back into the tokens that were prefilled again, and before them
      for (const uint64_t back : {1590u, 300u}) {
        for (Session* each : {session.get(), own.get(), loaded.get()})
          REQUIRE(each->rewind(back).ok());
        const std::vector<float> logits = logits_after(session.get(), 90);
        CHECK(difference(logits, logits_after(own.get(), 90)) < limit);
        CHECK(difference(logits, logits_after(loaded.get(), 90)) < limit);
      }
    }
}

TEST_CASE("an early checkpoint has complete windows, and a text may be short") {
  for (const std::string name : {"gemma3-linear", "falcon-h1"})
    for (const std::size_t count : {2u, 20u, 90u}) {
      CAPTURE(name);
      CAPTURE(count);
      const Given given(name, std::min<std::size_t>(15, count - 1), count);
      const auto session = adopted(given), own = open_session(fixture(name));
      read(own.get(), given.tokens);
      CHECK(difference(logits_after(session.get(), 100), logits_after(own.get(), 100)) < 2e-5);
    }
}

TEST_CASE("a checkpoint too near to the end for its windows is refused with the last token") {
  check_refused(Given("gemma3-linear", 900, 1000), Code::bad_argument, "use 15 or fewer");
  check_refused(Given("gemma3-linear", 1400, 1600), Code::bad_argument, "use 1039 or fewer");
  check_refused(Given("gemma3-linear", 1040, 1600), Code::bad_argument, "use 1039 or fewer");
  CHECK(adopted(Given("gemma3-linear", 1039, 1600)));
  CHECK(adopted(Given("gemma3-linear", 1400, 1600, true)));  // has no pages
}

TEST_CASE("a checkpoint that contradicts the model is refused by name") {
  const auto with = [](const std::string& name, auto change, const char* part) {
    Given given(name, name == "gpt-oss" ? 15 : 60, 100);
    change(&given.from);
    check_refused(given, Code::bad_argument, part);
  };
  const auto infinity = std::numeric_limits<float>::infinity();
  for (const std::string name : {"qwen35", "granitehybrid"}) {
    const PartLayout matrices = name == "qwen35" ? PartLayout::key_value : PartLayout::value_key;
    const PartLayout other = name == "qwen35" ? PartLayout::value_key : PartLayout::key_value;
    const uint32_t attention = name == "qwen35" ? 3 : 2;
    with(
        name, [](Arrays* a) { a->arrays.pop_back(); }, "has no");
    with(
        name, [](Arrays* a) { a->arrays.push_back(a->arrays[0]); }, "twice");
    with(
        name, [](Arrays* a) { a->arrays[0].layer = 99; }, "fewer layers");
    with(
        name, [&](Arrays* a) { a->arrays[0].layer = attention; }, "has none");
    with(
        name, [](Arrays* a) { a->arrays[0].layout = PartLayout::keys; }, "has none");
    with(
        name, [](Arrays* a) { a->of(PartLayout::inputs).numbers.pop_back(); }, "count is");
    with(
        name, [&](Arrays* a) { a->of(matrices).numbers.push_back(0); }, "count is");
    with(
        name, [&](Arrays* a) { a->of(matrices).layout = other; }, "has none");
    for (const float bad : {std::nanf(""), infinity, -infinity, 2e30f}) {
      with(
          name, [&](Arrays* a) { a->of(matrices).numbers[5] = bad; }, "NaN, infinity");
      with(
          name, [&](Arrays* a) { a->of(PartLayout::inputs).numbers[5] = bad; }, "NaN, infinity");
    }
    with(
        name, [](Arrays* a) { a->tokens = 0; }, "tokens is 0");
    with(
        name, [](Arrays* a) { a->tokens = 100; }, "from->tokens is 100");
    with(
        name, [](Arrays* a) { a->tokens = UINT64_MAX; }, "from->tokens is");
  }
  const auto windows = [&](auto change, const char* part) { with("gpt-oss", change, part); };
  windows([](Arrays* a) { a->of(PartLayout::keys).numbers.resize(64); }, "count is");
  windows([](Arrays* a) { a->of(PartLayout::values).numbers[5] = std::nanf(""); }, "NaN");
  windows([](Arrays* a) { a->arrays.clear(); }, "has no keys");
  windows(
      [](Arrays* a) {
        for (auto& x : a->arrays) x.numbers.resize(14 * 64);
      },
      "14 rows");
  windows(
      [](Arrays* a) {
        for (auto& x : a->arrays) x.numbers.resize(61 * 64);
      },
      "61 rows");
  windows(
      [](Arrays* a) {
        for (auto& x : a->arrays) x.numbers.clear();
      },
      "0 rows");
}

TEST_CASE("windows and states of other weights, tokens or orders are refused") {
  for (const std::string name : engine_models) {
    CAPTURE(name);
    const bool windows = name == "gemma3-linear" || name == "gpt-oss";
    Given given(name, windows ? 15 : 60, 100);
    const PartLayout layout = windows ? PartLayout::values : PartLayout::inputs;
    // of the last layer, behind which no key depends on it
    Arrays::Array& last = given.end.of(layout);
    std::reverse(last.numbers.begin(), last.numbers.end());
    check_refused(given, Code::model_mismatch, "windows or states at the end");
  }
  Given given("qwen35", 60, 100);
  for (Arrays* each : {&given.from, &given.end})
    for (Arrays::Array& a : each->arrays) {
      if (a.layout != PartLayout::key_value) continue;
      std::vector<float> turned(a.numbers.size());  // rows by value
      for (std::size_t h = 0; h < 4; ++h)
        for (std::size_t i = 0; i < 256; ++i)
          turned[h * 256 + i] = a.numbers[h * 256 + i % 16 * 16 + i / 16];
      a.numbers = turned;
    }
  check_refused(given, Code::model_mismatch, "differ from the model's");
}

TEST_CASE("a sequence needs a checkpoint where its model has windows or states, and only there") {
  std::unique_ptr<Session> session;
  for (const std::string name : {"gemma3-linear", "lfm2"}) {
    const Given given(name, 10, 20);
    const Status s =
        Session::adopt(fixture(name), *given.cache, given.tokens, {}, {}, nullptr, {}, &session);
    CHECK(s.code() == Code::unsupported);
    CHECK(std::string(s.message()).find("kv_session_from_checkpoint") != std::string::npos);
  }
  const Given given("falcon-h1", 10, 20);
  GivenCheckpoint none;
  const auto model = fixture("llama-f32");
  REQUIRE(GivenCheckpoint::check(model->config(), "from", 10, {}, &none).ok());
  Session::Adopted how;
  how.from = &none;
  const Status s =
      Session::adopt(model, *given.cache, given.tokens, {}, how, nullptr, {}, &session);
  CHECK(s.code() == Code::bad_argument);
}

TEST_CASE("an import is cancelled between layers, and between rows of windows") {
  const auto model = fixture("gemma3-linear");
  Engine engine("gemma3-linear");
  engine.run(some_tokens(16));
  Arrays arrays = engine.checkpoint();
  for (Arrays::Array& a : arrays.arrays) a.numbers.resize(a.numbers.size() / 15 * 3000, 0.5f);
  const std::vector<GivenPart> parts = arrays.parts();
  GivenCheckpoint given;
  REQUIRE(GivenCheckpoint::check(model->config(), "from", 3000, parts, &given).ok());
  static Cancel cancel;
  static std::atomic<int> left;
  for (const int first : {0, 2, 4}) {
    CAPTURE(first);
    cancel.reset(), left = first;
    std::optional<KvStore> windows = make_windows(*model, 64, 1);
    allocation_fault = [](std::size_t) {
      if (left-- == 0) cancel.fire();
      return false;
    };
    const Status s = given.fill(&pool(), &cancel, &*windows);
    allocation_fault = nullptr;
    CHECK(s.code() == Code::cancelled);
    CHECK(windows->tokens() < 1500);
  }
  double difference = 0;
  std::optional<KvStore> windows = make_windows(*model, 64, 1);
  cancel.reset();
  REQUIRE(given.fill(&pool(), &cancel, &*windows).ok());
  CHECK(windows->tokens() == 3000);
  cancel.fire();
  CHECK(given.compare({&*windows, nullptr}, &pool(), &cancel, &difference).code() ==
        Code::cancelled);
  const Given states("qwen35", 60, 100);
  const std::vector<GivenPart> state_parts = states.from.parts();
  REQUIRE(
      GivenCheckpoint::check(fixture("qwen35")->config(), "from", 60, state_parts, &given).ok());
  std::optional<RecurrentState> empty = make_states(fixture("qwen35")->config(), 1);
  CHECK(given.fill(&pool(), &cancel, &*empty).code() == Code::cancelled);
  CHECK(empty->tokens() == 0);
}

TEST_CASE("a cancelled import leaves the cache as it was") {
  const Given given("qwen35", 60, 100);
  Cancel cancel;
  cancel.fire();
  std::unique_ptr<Session> session;
  CHECK(given.adopt(&session, &cancel).code() == Code::cancelled);
  CHECK(!session);
  CHECK(given.adopt(&session).ok());
}
