// Each call of a device fails in turn: the failure is an error, the sequence stays complete, and
// nothing is left on the device. After a lack of memory the session goes on.
#include <algorithm>
#include <string>
#include <vector>

#include "../session/device_helpers.h"
#include "emulated.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

SessionOptions options(const std::string& strategy = "bounded") {
  SessionOptions o;
  o.threads = 1;
  o.select.strategy = strategy;
  o.select.budget_tokens = strategy == "full" ? 0 : 64;
  o.prefill_chunk = 128;
  return o;
}

struct Outcome {
  std::vector<Status> failed;  // of all that was done
  // logarithms of the probabilities of tokens after the file, and after more text; empty where that
  // failed
  std::vector<float> of_file, of_text;
};

// A model is opened, a file is loaded, asked and forked, the fork reads on and is asked.
Outcome use_device(const char* device, const std::string& strategy, const std::string& file,
                   std::span<const Token> tokens) {
  Outcome out;
  const auto ok = [&](Status s) {
    const bool fine = s.ok();
    if (!fine) out.failed.push_back(std::move(s));
    return fine;
  };
  const auto score = [&](Session* session, std::vector<float>* scores) {
    scores->resize(4);
    if (!ok(session->score(tokens.first(4), scores->data(), nullptr, {}))) scores->clear();
  };
  std::shared_ptr<const Model> model;
  if (!ok(Model::open(EXAMPLES "/mini-reader-q8_0.gguf", "", &model, {device, 0}))) return out;
  // of pages in co-execution it reads half
  for (const DeviceWeights& d : model->device_weights()) d.device()->set_page_rates(1, {1, 1});
  std::unique_ptr<Session> session, fork;
  if (!ok(Session::load(model, file, options(strategy), false, nullptr, {}, &session))) return out;
  score(session.get(), &out.of_file);
  const std::size_t length = session->tokens().size();
  CHECK(length == 700);
  Token token = -1;
  bool end = false;
  for (int i = 0; i < 3; ++i)
    if (!ok(session->next({}, nullptr, &token, &end))) break;
  if (!ok(session->fork(&fork))) return out;
  uint64_t done = 0;
  const std::size_t before = fork->tokens().size();
  const bool read = ok(fork->prefill_tokens(tokens.subspan(4, 300), nullptr, nullptr, {}, &done));
  CHECK(fork->tokens().size() == before + done);
  CHECK((!read || done == 300));
  if (read && ok(fork->rewind(700))) score(fork.get(), &out.of_text);
  // What failed once for want of memory is asked once more.
  if (!out.failed.empty() && out.of_file.empty() && session->rewind(length).ok())
    score(session.get(), &out.of_file);
  return out;
}

// Every call of the devices fails once, for want of memory and for good: an error says so, the text
// stays, nothing is left behind.
void check_every_call_fails(const char* device, const std::string& strategy,
                            uint64_t registration_bytes = UINT64_MAX) {
  TempFolder folder;
  const std::string file = folder.file("read.kv");
  const auto tokens = book_tokens(1100);
  {
    auto session = open_session(mini_model(), options());
    read(session.get(), std::span<const Token>(tokens).first(700));
    REQUIRE(session->save(file, nullptr, {}).ok());
  }
  const std::span<const Token> next = std::span<const Token>(tokens).subspan(700);
  const emulated::Changed registered(emulated::machine().registration_bytes, registration_bytes);
  const uint64_t held = emulated::machine().held.load(), begin = emulated::machine().calls.load();
  const Outcome expected = use_device(device, strategy, file, next);
  REQUIRE(expected.failed.empty());
  const uint64_t calls = emulated::machine().calls.load() - begin;
  CHECK(emulated::machine().held.load() == held);
  uint32_t cases = 0, reported = 0, unnoticed = 0;
  for (const int error : {emulated::out_of_memory, emulated::lost}) {
    for (uint64_t at = 1; at <= calls; at += at < 30 ? 1 : emulated::fault_step(calls, 30)) {
      CAPTURE(error);
      CAPTURE(at);
      emulated::machine().fails_with = error;
      emulated::machine().fails_at = emulated::machine().calls + at;
      const Outcome outcome = use_device(device, strategy, file, next);
      emulated::machine().fails_at = 0;
      ++cases;
      for (const Status& s : outcome.failed) {
        // how many there are and of which kind
        const bool is_found_out =
            at <= 3 && (s.code() == Code::not_found || s.code() == Code::device);
        CHECK_MESSAGE((is_found_out ||
                       s.code() == (error == emulated::lost ? Code::device : Code::no_memory)),
                      s.message());
        CHECK_MESSAGE(std::string(s.message()).find("cuda") != std::string::npos,
                      std::string(s.message()));
      }
      outcome.failed.empty() ? ++unnoticed : ++reported;
      if (!outcome.of_file.empty()) CHECK(mean_difference(outcome.of_file, expected.of_file) < 0.3);
      if (!outcome.of_text.empty()) CHECK(mean_difference(outcome.of_text, expected.of_text) < 0.3);
      CHECK(emulated::machine().held.load() == held);
    }
  }
  MESSAGE(cases, " failures: ", reported, " were reported, ", unnoticed, " made up for");
  CHECK(reported > cases / 2);
}

}  // namespace

TEST_CASE("every call of one device that fails is an error, and leaves only the sequence") {
  check_every_call_fails("cuda", "bounded");
}

TEST_CASE("every call of two devices that fails is an error, and leaves only the sequence") {
  check_every_call_fails("cuda:0,cuda:1", "bounded");
}

TEST_CASE("every call that fails while host memory is registered by the step is an error") {
  check_every_call_fails("cuda", "bounded", 1 << 16);
}

TEST_CASE("every call that fails while a device attends everything is an error") {
  check_every_call_fails("cuda", "full");
}

TEST_CASE("every call that fails in co-execution with one device is an error") {
  check_every_call_fails("cuda", "filter-layers");
}

TEST_CASE("every call that fails in co-execution with two devices is an error") {
  check_every_call_fails("cuda:0,cuda:1", "quest");
}
