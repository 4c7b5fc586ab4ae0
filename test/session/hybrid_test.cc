// Co-execution: the GPU attends sinks and window, and the CPU attends the rest or a part of it.
#include "device_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

SessionOptions options_of(const std::string& strategy) {
  SessionOptions o = bounded_options(strategy == "full" ? 0 : 200);
  o.select.strategy = strategy;
  return o;
}

// What decides who reads which pages, as if it had been measured.
void set_rates(const Model& model, double processor, double device) {
  for (const DeviceWeights& d : model.device_weights())
    d.device()->set_page_rates(2, {processor, device});
}

bool co_execution(const Session& session) { return says(session, "\"gpu_coexecutes\":true"); }
std::vector<std::string> strategies() {
  std::vector<std::string> names;
  for (const StrategyInfo& info : all_strategies()) names.emplace_back(info.name);
  return names;
}

// A session of read_file() whose device has the pages of a first score() of 150 tokens, `scores`:
// it and its copies agree after more pages are sealed, and after a step back.
void check_goes_on(Session* session, const SessionOptions& options,
                   const std::vector<float>& scores) {
  const auto tokens = book_tokens(3400);
  const std::span<const Token> next(tokens.data() + 3000, 150), other(tokens.data() + 3150, 40);
  continue_with(session, 60);
  std::unique_ptr<Session> fork;
  REQUIRE(session->fork(&fork).ok());
  const std::vector<float> of_fork = score(fork.get(), other);
  CHECK(score(session, other) == of_fork);
  const TempFolder folder;
  REQUIRE(session->save(folder.file("on.kv"), nullptr, {}).ok());
  const auto loaded = load(device_model(), folder.file("on.kv"), options);
  REQUIRE(loaded->prepare_devices(nullptr, {}).ok());
  CHECK(score(loaded.get(), other) == of_fork);
  REQUIRE(session->rewind(3000).ok());
  // rows that come back from pages are rounded
  CHECK(mean_difference(score(session, next), scores) < 0.15);
  CHECK(score(fork.get(), other) == of_fork);
}

}  // namespace

TEST_CASE(
    "co-execution attends what the CPU attends alone, by every strategy and however the pages are "
    "split") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 10);
  for (const std::string& name : strategies()) {
    if (name == "full") continue;  // the GPU attends alone, see below
    CAPTURE(name);
    SessionOptions o = options_of(name);
    if (name == "bounded") o.select.dense_layers = 2;
    GenerateOptions brief;
    brief.max_tokens = 3;
    auto alone = load(mini_model(), read_file(), o);
    const std::vector<float> expected = score(alone.get(), next);
    const auto tokens_read = static_cast<double>(stat_of(*alone, "last_tokens_read"));
    for (const auto& [processor, device] :
         {std::pair{1.0, 0.0}, {1.0, 1e-3}, {1.0, 1.0}, {1e-3, 1.0}}) {
      CAPTURE(device / processor);
      set_rates(*device_model(), processor, device);
      auto coexecution = load(device_model(), read_file(), o);
      REQUIRE(coexecution->prepare_devices(nullptr, {}).ok());
      const std::vector<float> scores = score(coexecution.get(), next);
      CHECK(mean_difference(scores, expected) < 0.2);
      CHECK(co_execution(*coexecution));
      CHECK_FALSE(attends(*coexecution));
      CHECK(static_cast<double>(stat_of(*coexecution, "last_tokens_read")) ==
            doctest::Approx(tokens_read).epsilon(0.1));
      CHECK(reads_pages(*coexecution) ==
            (device == 1.0 || (name == "filter-layers" && device > 0)));
      CHECK(says(*coexecution, device == 1.0 ? (processor == 1.0 ? "8 sixteenths" : "16 sixteenths")
                               : device > 0  ? "0 sixteenths"
                                             : "not measured"));
      CHECK(score(coexecution.get(), next) == scores);  // the same bits again, after going back
      // a question; which words come next is often nearly a tie in so small a model
      CHECK(ask(coexecution.get(), "Where did he go?", brief).size() > 0);
    }
    set_rates(*device_model(), 0, 0);
  }
}

TEST_CASE(
    "the choice of a filter layer is on the GPU, while pages are sealed, after rewinds and in "
    "forks") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 150);
  set_rates(*device_model(), 1, 1);
  const SessionOptions o = options_of("filter-layers");
  const auto alone = load(mini_model(), read_file(), o),
             coexecution = load(device_model(), read_file(), o);
  REQUIRE(coexecution->prepare_devices(nullptr, {}).ok());
  const std::vector<float> scores = score(coexecution.get(), next);
  CHECK(mean_difference(scores, score(alone.get(), next)) < 0.2);
  CHECK(says(*coexecution, "in one go"));
  CHECK(stat_of(*coexecution, "last_tokens_on_gpu") > 0);
  CHECK(stat_of(*coexecution, "last_tokens_on_gpu") < stat_of(*coexecution, "last_tokens_read"));
  // Again, when some of it is there from other texts, and when nothing is.
  check_goes_on(coexecution.get(), o, scores);
  set_rates(*device_model(), 0, 0);
}

TEST_CASE(
    "a GPU attends everything alone from its own memory, while pages are sealed, after rewinds and "
    "in forks") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 150);
  const SessionOptions o = options_of("full");
  const auto alone = load(mini_model(), read_file(), o),
             session = load(device_model(), read_file(), o);
  REQUIRE(session->prepare_devices(nullptr, {}).ok());
  const std::vector<float> scores = score(session.get(), next);
  CHECK(mean_difference(scores, score(alone.get(), next)) < 0.2);
  CHECK(attends(*session));
  CHECK(says(*session, "all pages cuda:0 (GPU copy)"));
  CHECK(stat_of(*session, "last_tokens_read") == stat_of(*alone, "last_tokens_read"));
  CHECK(stat_of(*session, "last_pages_touched") == stat_of(*alone, "last_pages_touched"));
  const uint64_t read = stat_of(*session, "last_tokens_read"),
                 kept = stat_of(*session, "last_tokens_on_gpu");
  CHECK(kept > read / 2);  // the first token reads all, and each page that is sealed some
  CHECK(kept < read);
  CHECK(score(session.get(), next) == scores);  // the same bits again, after going back
  check_goes_on(session.get(), o, scores);
}

TEST_CASE("without room for all pages on the GPU, the CPU helps to attend everything") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 10);
  const SessionOptions o = options_of("full");
  const std::vector<float> expected = score(load(mini_model(), read_file(), o).get(), next);
  constexpr uint64_t spare = uint64_t{1} << 28;
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda", device_model()->device_weights().front().bytes() + spare, &model).ok());
  const std::shared_ptr<Device>& device = model->device_weights().front().device();
  set_rates(*model, 1, 1);
  int together = 0, alone = 0, chosen = 0;
  for (uint64_t room = uint64_t{1} << 22; alone == 0 && room < spare; room += room / 4) {
    DeviceBuffer<std::byte> others;  // that have the rest
    REQUIRE(others.allocate(device, device->left() - room, "others").ok());
    const auto session = load(model, read_file(), o);
    if (!session->prepare_devices(nullptr, {}).ok()) continue;
    CHECK(mean_difference(score(session.get(), next), expected) < 0.2);
    CHECK_FALSE((attends(*session) && co_execution(*session)));
    together += co_execution(*session), alone += attends(*session);
    if (!co_execution(*session)) continue;
    CHECK(says(*session, "the GPU has no room"));
    REQUIRE(session->set_select(options_of("bounded").select).ok());  // which needs less
    (void)score(session.get(), next);
    chosen += attends(*session);
  }
  CHECK(chosen > 0);
  CHECK(together > 0);
  CHECK(alone > 0);
}

TEST_CASE("strategies take turns in one session, and each attends as in one of its own") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 5);
  set_rates(*device_model(), 1, 1);
  const auto all = strategies();
  const auto session = load(device_model(), read_file(), options_of("bounded"));
  for (const char* name :
       {"bounded", "quest", "full", "filter-layers", "bounded", "window", "filter-layers"}) {
    CAPTURE(name);
    const SessionOptions o = options_of(name);
    REQUIRE(session->set_select(o.select).ok());
    REQUIRE(session->prepare_devices(nullptr, {}).ok());
    const auto own = load(device_model(), read_file(), o);
    REQUIRE(own->prepare_devices(nullptr, {}).ok());
    CHECK(score(session.get(), next) == score(own.get(), next));
    const bool alone = name == std::string("bounded") || name == std::string("full");
    CHECK(attends(*session) == alone);
    CHECK(co_execution(*session) == !alone);
  }
  set_rates(*device_model(), 0, 0);
}

TEST_CASE("a damaged page is an error on the CPU and on a GPU, and the sequence is as before") {
  if (!device_model()) return;
  set_rates(*device_model(), 1, 1);
  for (const char* name : {"full", "flat", "filter-layers"}) {
    for (const uint32_t layer : {0u, mini_model()->config().layers - 1}) {
      CAPTURE(name);
      CAPTURE(layer);
      const TempFolder folder;
      SessionOptions o = options_of(name);
      if (name != std::string("full")) o.select.budget_tokens = 100000;
      check_is_damaged(load(device_model(), damaged_file(folder, layer), o).get());
    }
  }
  set_rates(*device_model(), 0, 0);
}

TEST_CASE(
    "without room on the GPU for the choice of filter layers, their layers use co-execution, and "
    "the statistics say so") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 2);
  const SessionOptions o = options_of("filter-layers");
  const std::vector<float> expected = score(load(mini_model(), read_file(), o).get(), next);
  const DeviceWeights& weights = device_model()->device_weights().front();
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda", weights.device()->used() + (uint64_t{80} << 20), &model).ok());
  set_rates(*model, 1, 1);
  std::vector<std::unique_ptr<Session>> sessions;
  bool was_full = false;
  for (int i = 0; i < 64 && !was_full; ++i) {
    sessions.push_back(load(model, read_file(), o));
    std::vector<float> scores(next.size());
    const Status s = sessions.back()->score(next, scores.data(), nullptr, {});
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
    CHECK(mean_difference(scores, expected) < 0.2);
    was_full = says(*sessions.back(), "the GPU has no room for what the filter layers choose");
    CHECK(says(*sessions.back(), "in one go") == !was_full);
    CHECK((i > 0 || !was_full));
  }
  CHECK(was_full);
  const Device& device = *model->device_weights().front().device();
  CHECK(device.used() <= device.budget());
}

TEST_CASE("without co-execution the CPU attends alone, and the statistics say why") {
  if (!device_model()) return;
  const auto tokens = book_tokens(40);
  set_rates(*device_model(), 1, 1);
  // the heads choose each for itself, on the CPU as always
  SessionOptions separate = options_of("quest");
  separate.select.share_heads = false;
  const auto heads = load(device_model(), read_file(), separate);
  CHECK(mean_difference(score(heads.get(), tokens),
                        score(load(mini_model(), read_file(), separate).get(), tokens)) < 0.2);
  CHECK(co_execution(*heads));
  SessionOptions certified = options_of("quest");
  certified.select.certify = true;
  const auto certain = load(device_model(), read_file(), certified);
  score(certain.get(), tokens);
  CHECK_FALSE(co_execution(*certain));
  set_rates(*device_model(), 0, 0);
}

TEST_CASE(
    "how fast pages are read is measured once for the sessions of a GPU, where there are enough") {
  if (!device_model()) return;
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda", 0, &model).ok());
  const Device& device = *model->device_weights().front().device();
  const auto session = load(model, read_file(), options_of("quest"));
  CHECK_FALSE(device.page_rates(2).known());
  REQUIRE(session->prepare_devices(nullptr, {}).ok());
  const PageRates rates = device.page_rates(2);
  const uint64_t layer_bytes =
      session->store().pages().pages() * uint64_t{model->config().kv_heads} * page_bytes;
  CHECK(rates.known() == (layer_bytes > uint64_t{1} << 20));
  const auto other = load(model, read_file(), options_of("full"));
  REQUIRE(other->prepare_devices(nullptr, {}).ok());
  CHECK(device.page_rates(2).cpu == rates.cpu);
  CHECK(device.page_rates(2).device == rates.device);
}
