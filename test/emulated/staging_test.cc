// Staging: the CPU copies the selected pages for a device that does not read host memory.
#include <span>
#include <vector>

#include "../session/device_helpers.h"
#include "emulated.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr const char* cannot_read =
    "the GPU cannot read host memory; the CPU stages the chosen pages";

// Everything that a session computes of some questions and answers.
std::vector<float> ask(Session* session, std::span<const Token> tokens) {
  std::vector<float> out;
  for (const std::size_t n : {std::size_t{1}, std::size_t{2}, std::size_t{21}, std::size_t{64}}) {
    const uint64_t length = session->tokens().size();
    const std::vector<float> scores = score(session, tokens.first(n));
    out.insert(out.end(), scores.begin(), scores.end());
    for (const Token t : continue_with(session, 20)) out.push_back(static_cast<float>(t));
    REQUIRE(session->rewind(length).ok());
  }
  return out;
}

}  // namespace

TEST_CASE(
    "pages that the CPU stages are those that a device would read: the same bits, of a file and of "
    "memory, "
    "also of quads that stay") {
  for (const char* devices : {"cuda", "cuda:0,cuda:1"}) {
    CAPTURE(devices);
    const auto model = model_on(devices);
    const auto tokens = book_tokens(3200);
    for (const bool mapped : {true, false}) {
      CAPTURE(mapped);
      const auto open = [&] {
        auto session = mapped ? load(model, read_file(), bounded_options(200))
                              : open_session(model, bounded_options(200));
        if (!mapped) read(session.get(), std::span<const Token>(tokens).first(2500));
        return session;
      };
      const auto asked = std::span<const Token>(tokens).subspan(3000);
      const auto reading = open();
      const auto expected = ask(reading.get(), asked);
      CHECK(reads_pages(*reading));
      const emulated::Changed refuses(emulated::machine().refuses_sharing, emulated::refused);
      const int before = emulated::machine().shared;
      const auto staged = open();
      CHECK(ask(staged.get(), asked) == expected);
      CHECK(attends(*staged));
      CHECK_FALSE(reads_pages(*staged));
      CHECK(staged->stats_json().find(cannot_read) != std::string::npos);
      CHECK(stat_of(*staged, "last_tokens_on_gpu") > 0);
      CHECK(stat_of(*staged, "last_tokens_read") == stat_of(*reading, "last_tokens_read"));
      CHECK(emulated::machine().shared == before);
    }
  }
}

TEST_CASE("no step waits for pages that a device never reads") {
  const emulated::Changed less(emulated::machine().registration_bytes, 1 << 16);
  const emulated::Changed refuses(emulated::machine().refuses_sharing, emulated::refused);
  const auto session = load(model_on("cuda"), read_file(), bounded_options(200));
  REQUIRE(session->prepare_devices(nullptr, {}).ok());
  continue_with(session.get(), 1);
  CHECK(attends(*session));
  CHECK_FALSE(reads_pages(*session));
}

TEST_CASE(
    "a damaged page of a file is an error when the CPU stages it, and the sequence is as before") {
  const emulated::Changed refuses(emulated::machine().refuses_sharing, emulated::refused);
  const TempFolder folder;
  const auto model = model_on("cuda");
  const std::string path = damaged_file(folder, 1);
  auto session = load(model, path, bounded_options(100000));  // everything
  check_is_damaged(session.get());
}

TEST_CASE(
    "a step that is cancelled anywhere while the CPU stages pages leaves the session as it "
    "was") {
  const emulated::Changed refuses(emulated::machine().refuses_sharing, emulated::refused);
  const auto model = model_on("cuda");
  const auto tokens = book_tokens(3200);
  const auto asked = std::span<const Token>(tokens).subspan(3000), compared = asked.first(40);
  const auto take_steps = [&](Session* session, const Cancel& cancel) {
    std::vector<float> scores(21);
    Status s = session->score(asked.first(21), scores.data(), &cancel, {});
    Token token = -1;
    bool end = false;
    for (int i = 0; i < 4 && s.ok(); ++i) s = session->next({}, &cancel, &token, &end);
    return s;
  };
  const auto first = load(model, read_file(), bounded_options(200));
  const auto expected = score(first.get(), compared);
  const uint64_t begin = emulated::machine().calls;
  const Cancel never;
  REQUIRE(take_steps(load(model, read_file(), bounded_options(200)).get(), never).ok());
  const uint64_t calls = emulated::machine().calls - begin;
  uint32_t cancelled = 0;
  for (uint64_t at = 1; at < calls; at += emulated::fault_step(calls, 40)) {
    CAPTURE(at);
    const auto session = load(model, read_file(), bounded_options(200));
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
    // Rows that come back from pages that were sealed are rounded.
    CHECK(mean_difference(score(session.get(), compared), expected) < 0.15);
    CHECK(attends(*session));
  }
  CHECK(cancelled > 20);
}

TEST_CASE("without memory to pin, pages are staged until the sequence has grown, and then read") {
  const auto session = load(model_on("cuda"), read_file(), bounded_options(200));
  const auto tokens = book_tokens(3400);
  {
    const emulated::Changed refuses(emulated::machine().refuses_sharing, emulated::out_of_memory);
    continue_with(session.get(), 1);
  }
  CHECK(attends(*session));
  CHECK_FALSE(reads_pages(*session));
  CHECK(session->stats_json().find("no memory was left to pin pages in") != std::string::npos);
  read(session.get(), std::span<const Token>(tokens).subspan(3000, 300));
  continue_with(session.get(), 2);
  CHECK(attends(*session));
  CHECK(reads_pages(*session));
}

TEST_CASE(
    "without reserved pinned memory a sketch is transferred extent by extent: the same bits") {
  const auto tokens = book_tokens(3200);
  const auto asked = std::span<const Token>(tokens).subspan(3000);
  for (const char* devices : {"cuda", "cuda:0,cuda:1"}) {
    CAPTURE(devices);
    const uint64_t begin = emulated::machine().calls, held = emulated::machine().held;
    auto model = model_on(devices);
    const uint64_t calls = emulated::machine().calls - begin,
                   usual = emulated::machine().held - held;
    const auto expected = ask(load(model, read_file(), bounded_options(200)).get(), asked);
    model.reset();
    // the last two of opening a model: Device::reserve_host()
    for (const uint64_t at : {calls - 1, calls}) {
      const uint64_t before = emulated::machine().held;
      emulated::machine().fails_with = emulated::out_of_memory;
      emulated::machine().fails_at = emulated::machine().calls + at;
      const auto without = model_on(devices);
      emulated::machine().fails_at = 0;
      REQUIRE(emulated::machine().held - before == usual - 1);
      const auto session = load(without, read_file(), bounded_options(200));
      CHECK(ask(session.get(), asked) == expected);
      CHECK(attends(*session));
    }
  }
}
