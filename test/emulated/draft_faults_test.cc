// Steps with drafts on emulated GPUs whose memory ends, whose calls fail, or that are cancelled.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "../session/device_helpers.h"
#include "emulated.h"
#include "session/saved_drafts.h"

using namespace kvasir;
using namespace kvasir::test;
using emulated::Changed;
using emulated::machine;

namespace {

constexpr const char* drafting_models[] = {"qwen35-mtp", "glm4moe-mtp"};
constexpr std::size_t drafted_length = 300;

std::shared_ptr<const Model> faulty_model(const char* name) {
  std::shared_ptr<const Model> model;
  const Status s =
      Model::open(FIXTURES "/models/" + std::string(name) + ".gguf", "", &model, {"cuda", 0});
  REQUIRE_MESSAGE(s.ok(), s.message());
  for (const DeviceWeights& d : model->device_weights()) d.device()->set_page_rates(1, {1, 1});
  return model;
}

struct FaultySession {
  FaultySession(const std::shared_ptr<const Model>& model, const char* strategy, uint32_t drafts,
                std::size_t tokens = drafted_length) {
    SessionOptions o;
    o.threads = 1;
    o.prefill_chunk = 128;
    o.select.strategy = strategy;
    if (strategy != std::string("full")) o.select.budget_tokens = 64;
    o.draft_tokens = drafts, o.drafts_always = true, o.lookup_tokens = 0;
    o.log = [this](int, const char* line) { log += line; };
    session = open_session(model, o);
    read(session.get(), some_tokens(tokens));
    REQUIRE(session->prepare(nullptr, {}).ok());
    REQUIRE(session->prepare_devices(nullptr, {}).ok());
  }
  Status answer(std::string* text, const Cancel* cancel = nullptr) {
    GenerateOptions options;
    options.max_tokens = 8;
    options.cancel = cancel;
    text->clear();
    Answer answer;
    return session->generate(
        "", options, [&](std::string_view t) { return *text += t, 0; }, &answer);
  }
  std::string log;
  std::unique_ptr<Session> session;
};

}  // namespace

TEST_CASE("without room for steps with drafts a GPU goes on without, and says so") {
  uint32_t refused = 0;
  for (const char* name : drafting_models)
    for (uint32_t part = 0; part < 12; ++part) {
      CAPTURE(std::string(name));
      CAPTURE(part);
      const auto model = faulty_model(name);
      FaultySession some(model, "bounded", 0);
      std::string alone, text;
      REQUIRE(some.answer(&alone).ok());
      some.session->draft_by([](Token, uint32_t count, Array<Token>* out) {
        for (uint32_t i = 0; i < count; ++i) out->push_back(7);
      });
      const uint64_t all = machine().bytes[0];
      {
        const Changed most(machine().max_bytes[0], all - all / 40 * part);
        const Status s = some.answer(&text);
        CHECK_MESSAGE((s.ok() || s.code() == Code::no_memory), s.message());
        if (!s.ok() || some.session->stats().drafts.off != DraftsOff::device_memory) continue;
      }
      ++refused;
      CHECK(text == alone);
      CHECK(some.log.find("no room for steps with drafts") != std::string::npos);
      REQUIRE(some.answer(&text).ok());  // there is room again
      CHECK(text == alone);
      CHECK(some.session->stats().drafts.drafted > 0);
    }
  CHECK(refused > 0);
}

TEST_CASE("steps with drafts read staged pages as they read pinned ones") {
  const auto model = model_on("cuda");
  constexpr std::size_t length = 1500;  // of several extents
  std::string pinned, alone, drafted;
  {
    const Changed refuses(machine().refuses_sharing, emulated::refused);
    FaultySession some(model, "bounded", 0, length), other(model, "bounded", 0, length);
    REQUIRE(some.answer(&alone).ok());
    other.session->draft_by([](Token next, uint32_t count, Array<Token>* out) {
      for (uint32_t i = 0; i < count; ++i) out->push_back(next + static_cast<Token>(i % 2));
    });
    REQUIRE(other.answer(&drafted).ok());
    CHECK(attends(*other.session));
    CHECK_FALSE(reads_pages(*other.session));
    CHECK(other.session->stats().drafts.drafted > 0);
  }
  FaultySession some(model, "bounded", 0, length);
  REQUIRE(some.answer(&pinned).ok());
  CHECK(reads_pages(*some.session));
  CHECK(alone == pinned);
  CHECK(drafted == alone);
}

TEST_CASE("calls that fail within steps with drafts leave the sequence, and no other answer") {
  for (const char* name : drafting_models)
    for (const char* strategy : {"full", "bounded"}) {
      CAPTURE(std::string(name));
      CAPTURE(std::string(strategy));
      const auto model = faulty_model(name);
      std::optional<FaultySession> some;
      some.emplace(model, strategy, 3);
      std::string expected, text;
      REQUIRE(some->answer(&expected).ok());
      const uint64_t begin = machine().calls;
      REQUIRE(some->answer(&text).ok());
      CHECK(text == expected);
      const uint64_t calls = machine().calls - begin;
      uint64_t left_out = 0;
      for (uint64_t at = 1; at <= calls; at += emulated::fault_step(calls, 40)) {
        CAPTURE(at);
        Status s;
        {
          const Changed error(machine().fails_with, emulated::out_of_memory);
          const Changed when(machine().fails_at, machine().calls + at);
          s = some->answer(&text);
        }
        if (s.ok()) CHECK(text == expected);
        else CHECK_MESSAGE(s.code() == Code::no_memory, s.message());
        CHECK(some->session->tokens().size() == drafted_length);
        if (!some->log.empty()) {  // a session that has left drafts out has none any more
          ++left_out;
          REQUIRE(some->answer(&text).ok());
          CHECK(text == expected);
          some.emplace(model, strategy, 3);
          REQUIRE(some->answer(&text).ok());
        }
        Cancel cancel;
        {
          const Changed fires(machine().fires, &cancel);
          const Changed when(machine().fails_at, machine().calls + at);
          s = some->answer(&text, &cancel);
        }
        if (!s.ok()) CHECK_MESSAGE(s.code() == Code::cancelled, s.message());
        CHECK(some->session->tokens().size() == drafted_length);
        REQUIRE(some->answer(&text).ok());
        CHECK(text == expected);
      }
      CHECK(left_out > 10);
    }
}

namespace {

std::unique_ptr<Session> without_prefill(const std::shared_ptr<const Model>& model, uint32_t drafts,
                                         std::string* log) {
  SessionOptions o;
  o.threads = 1, o.prefill_chunk = 128, o.lookup_tokens = 0;
  o.select.strategy = "bounded", o.select.budget_tokens = 64;
  o.draft_tokens = drafts, o.drafts_always = true;
  o.log = [log](int, const char* line) { *log += line; };
  return open_session(model, o);
}

std::string answer_of(Session* session) {
  GenerateOptions options;
  options.max_tokens = 8;
  return ask(session, "", options);
}

constexpr const char* lost_line = "no memory for the MTP layer";

}  // namespace

TEST_CASE("without memory for an MTP layer's part of a prefill the session goes on without it") {
  const auto model = faulty_model("glm4moe-mtp");
  std::string log;
  const std::string alone = [&] {
    const auto session = without_prefill(model, 0, &log);
    read(session.get(), some_tokens(drafted_length));
    return answer_of(session.get());
  }();
  uint32_t lost = 0;
  for (uint64_t part = 1; part < 400; part += 3) {
    log.clear();
    const auto session = without_prefill(model, 2, &log);
    uint64_t done = 0;
    Status s;
    {
      const Changed error(machine().fails_with, emulated::out_of_memory);
      const Changed when(machine().fails_at, machine().calls + part);
      s = session->prefill_tokens(some_tokens(drafted_length), nullptr, nullptr, {}, &done);
    }
    if (!s.ok()) CHECK_MESSAGE(s.code() == Code::no_memory, s.message());
    if (!s.ok() || log.find(lost_line) == std::string::npos) continue;
    ++lost;
    CHECK(answer_of(session.get()) == alone);
    CHECK(session->stats().drafts.off == DraftsOff::device_memory);
    CHECK(session->stats().drafts.drafted == 0);
  }
  CHECK(lost > 0);
}

TEST_CASE("without memory for an MTP layer's part of a save the file has none of it") {
  const auto model = faulty_model("glm4moe-mtp");
  const TempFolder folder;
  uint32_t lost = 0;
  for (uint64_t part = 1; part < 60; ++part) {
    std::string log;
    const auto session = without_prefill(model, 2, &log);
    read(session.get(), some_tokens(drafted_length));
    GenerateOptions kept;  // the layer has not computed the newest rows of an answer
    kept.max_tokens = 2, kept.keep = true;
    (void)ask(session.get(), "", kept);
    {
      const Changed error(machine().fails_with, emulated::out_of_memory);
      const Changed when(machine().fails_at, machine().calls + part);
      REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    }
    const bool is_lost = log.find(lost_line) != std::string::npos;
    lost += is_lost;
    SessionOptions o;
    o.threads = 1, o.prefill_chunk = 128, o.lookup_tokens = 0;
    o.select.strategy = "bounded", o.select.budget_tokens = 64;
    const auto loaded = load(model, folder.file("a.kv"), o);
    CHECK(answer_of(loaded.get()) == answer_of(session.get()));
    uint64_t saved = 0;
    CachePeek peek;
    REQUIRE(CachePeek::open(folder.file("a.kv"), &peek).ok());
    REQUIRE(count_saved_drafts(peek, &saved).ok());
    CHECK((saved == 0) == is_lost);
  }
  CHECK(lost > 0);
}
