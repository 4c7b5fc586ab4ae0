// Co-execution with two devices, cancels at any place, and memory that devices may not read.
#include <span>
#include <vector>

#include "../session/device_helpers.h"
#include "emulated.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::shared_ptr<const Model> hybrid_model_on(const char* devices) {
  std::shared_ptr<const Model> model = model_on(devices);
  for (const DeviceWeights& d : model->device_weights()) d.device()->set_page_rates(2, {1, 1});
  return model;
}

SessionOptions faulty_options(const char* strategy) {
  SessionOptions o = bounded_options(200);
  o.select.strategy = strategy;
  return o;
}

}  // namespace

TEST_CASE("co-execution with two devices attends like one, to the bit") {
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 20);
  for (const char* strategy : {"quest", "filter-layers"}) {
    CAPTURE(strategy);
    // Layers of a group that another device has choose for themselves there, from the same pages.
    const auto one = load(hybrid_model_on("cuda"), read_file(), faulty_options(strategy)),
               two = load(hybrid_model_on("cuda:0,cuda:1"), read_file(), faulty_options(strategy));
    const std::vector<float> of_one = score(one.get(), next), of_two = score(two.get(), next);
    if (strategy == std::string("quest")) CHECK(of_one == of_two);
    CHECK(mean_difference(of_one, of_two) < 0.15);
    for (const Session* s : {one.get(), two.get()}) {
      CHECK(says(*s, "\"gpu_coexecutes\":true"));
      CHECK(reads_pages(*s));
    }
    CHECK(stat_of(*one, "last_tokens_read") == stat_of(*two, "last_tokens_read"));
  }
}

TEST_CASE("a device launches the graphs of one token again for the next ones") {
  const auto model = hybrid_model_on("cuda");
  for (const char* strategy : {"quest", "filter-layers", "full", "bounded"}) {
    CAPTURE(strategy);
    SessionOptions o = faulty_options(strategy);
    if (strategy == std::string("full")) o.select.budget_tokens = 0;
    const auto session = load(model, read_file(), o);
    REQUIRE(session->prepare_devices(nullptr, {}).ok());
    continue_with(session.get(), 3);
    const uint64_t made = emulated::machine().graphs;
    continue_with(session.get(), 5);
    CHECK(emulated::machine().graphs == made);
  }
}

TEST_CASE("a device that may not read host memory attends the window, and the CPU all pages") {
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 8);
  const emulated::Changed refuses(emulated::machine().refuses_sharing, emulated::refused);
  for (const char* strategy : {"quest", "filter-layers", "full"}) {
    CAPTURE(strategy);
    SessionOptions o = faulty_options(strategy);
    if (strategy == std::string("full")) o.select.budget_tokens = 0;
    const auto session = load(hybrid_model_on("cuda"), read_file(), o);
    REQUIRE(session->prepare_devices(nullptr, {}).ok());
    CHECK(mean_difference(score(session.get(), next),
                          score(load(mini_model(), read_file(), o).get(), next)) < 0.2);
    CHECK(says(*session, "\"gpu_coexecutes\":true"));
    CHECK_FALSE(reads_pages(*session));
    CHECK(says(*session, "0 sixteenths"));
    CHECK(says(*session, "the GPU cannot read host memory"));
    CHECK(stat_of(*session, "last_tokens_on_gpu") == 0);
    // Of a text without pages there is nothing to read.
    REQUIRE(session->rewind(0).ok());
    read(session.get(), next);
    CHECK(continue_with(session.get(), 3).size() == 3);
    CHECK((attends(*session) || strategy != std::string("full")));
  }
}

TEST_CASE(
    "a step that is cancelled anywhere in co-execution leaves the session as "
    "it was") {
  const auto tokens = book_tokens(3200);
  const auto asked = std::span<const Token>(tokens).subspan(3000);
  const auto model = hybrid_model_on("cuda");
  for (const char* strategy : {"filter-layers", "quest", "full"}) {
    CAPTURE(strategy);
    SessionOptions o = faulty_options(strategy);
    if (strategy == std::string("full")) o.select.budget_tokens = 0;
    const auto take_steps = [&](Session* session, const Cancel& cancel) {
      std::vector<float> scores(5);
      Status s = session->score(asked.first(5), scores.data(), &cancel, {});
      Token token = -1;
      bool end = false;
      for (int i = 0; i < 2 && s.ok(); ++i) s = session->next({}, &cancel, &token, &end);
      return s;
    };
    const auto expected = score(load(model, read_file(), o).get(), asked.first(20));
    const uint64_t begin = emulated::machine().calls;
    const Cancel never;
    REQUIRE(take_steps(load(model, read_file(), o).get(), never).ok());
    const uint64_t calls = emulated::machine().calls - begin;
    uint32_t cancelled = 0;
    for (uint64_t at = 1; at < calls; at += emulated::fault_step(calls, 20)) {
      CAPTURE(at);
      const auto session = load(model, read_file(), o);
      Cancel cancel;
      emulated::machine().fires = &cancel;
      emulated::machine().fails_with = 0;
      emulated::machine().fails_at = emulated::machine().calls + at;
      const Status s = take_steps(session.get(), cancel);
      emulated::machine().fires = nullptr;
      emulated::machine().fails_at = 0;
      CHECK((s.ok() || s.code() == Code::cancelled));
      cancelled += !s.ok();
      REQUIRE(session->rewind(3000).ok());
      CHECK(mean_difference(score(session.get(), asked.first(20)), expected) < 0.2);
      CHECK(says(*session, "\"gpu_coexecutes\":true") == (strategy != std::string("full")));
    }
    CHECK(cancelled > 10);
  }
}
