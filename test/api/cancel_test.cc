// Cancelled calls: they end soon with KV_CANCELLED, and the sequence goes on as if nothing had
// happened.
#include <atomic>
#include <random>
#include <thread>

#include "fault_count.h"
#include "helpers.h"
#include "replacing.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

// seconds from firing to the call's return: 0.1 are promised, on a machine that is not overloaded
constexpr double patience = 2;

// Fires a token some time after it was made, and remembers when.
class FireLater {
 public:
  FireLater(kv_cancel* cancel, std::chrono::microseconds delay)
      : thread_([=, this] {
          std::this_thread::sleep_for(delay);
          fired_ = std::chrono::steady_clock::now();
          kv_cancel_fire(cancel);
        }) {
    count_faults("cancelled at a random moment");
  }
  ~FireLater() {
    if (thread_.joinable()) thread_.join();
  }
  double seconds_since_fired() {
    const auto now = std::chrono::steady_clock::now();
    thread_.join();
    return std::chrono::duration<double>(now - fired_).count();
  }

 private:
  std::chrono::steady_clock::time_point fired_;
  std::thread thread_;
};

std::mt19937 random(1);

std::chrono::microseconds some_time(int most) {
  return std::chrono::microseconds(std::uniform_int_distribution<int>(0, most)(random));
}

}  // namespace

TEST_CASE(
    "prefill that is cancelled at any time goes on to the same state as prefill without a break") {
  const std::vector<int32_t> tokens = some_tokens(1500);
  const Session whole = tiny_session(1500);
  const std::vector<int32_t> next = peek(whole.get(), 12);
  const Cancel cancel = make_cancel();
  const kv_control call = control_of(cancel.get());
  int cancelled = 0;
  for (int round = 0; round < 12; ++round) {
    const Session session = open_session(tiny_model());
    uint64_t at = 0;
    while (at < tokens.size()) {
      kv_cancel_reset(cancel.get());
      FireLater fire(cancel.get(), some_time(30'000));
      uint64_t done = 0;
      const kv_status s = kv_prefill_tokens(session.get(), tokens.data() + at, tokens.size() - at,
                                            &call, &done, nullptr);
      CHECK((s == KV_OK || s == KV_CANCELLED));
      CHECK((s == KV_OK) == (done == tokens.size() - at));
      CHECK(done % 64 == (s == KV_OK ? tokens.size() % 64 : 0));
      if (s == KV_CANCELLED) CHECK(fire.seconds_since_fired() < patience);
      cancelled += s == KV_CANCELLED;
      at += done;
      CHECK(sequence(session.get()).size() == at);
      if (cancelled > 60) break;  // a machine so slow that nothing gets done
    }
    kv_cancel_reset(cancel.get());
    if (at < tokens.size()) continue;
    CHECK(sequence(session.get()) == tokens);
    CHECK(peek(session.get(), 12) == next);
  }
  CHECK(cancelled > 0);
}

TEST_CASE("cancelled prefill of text reports the byte from which to go on" *
          doctest::test_suite("slow")) {
  const std::string text = book(20'000);
  const Cancel cancel = make_cancel();
  kv_control call = control_of(cancel.get());
  const Session session = open_session(mini_model());
  std::size_t at = 0;
  for (int round = 0; round < 200 && at < text.size(); ++round) {
    kv_cancel_reset(cancel.get());
    // later and later, so that it ends on any machine
    FireLater fire(cancel.get(), some_time(60'000) * (1 + round));
    uint64_t tokens = 0, bytes = 0;
    const std::size_t before = sequence(session.get()).size();
    const kv_status s = kv_prefill(session.get(), text.data() + at, text.size() - at, &call,
                                   &tokens, &bytes, nullptr);
    CHECK((s == KV_OK || s == KV_CANCELLED));
    CHECK(sequence(session.get()).size() == before + tokens);
    if (s == KV_OK) CHECK(bytes == text.size() - at);
    CHECK(bytes <= text.size() - at);
    at += bytes;
  }
  kv_cancel_reset(cancel.get());
  REQUIRE(at == text.size());
  // The sequence spells the text, whatever the breaks.
  const std::vector<int32_t> tokens = sequence(session.get());
  std::string spelled(text.size() + 1000, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_detokenize(mini_model(), tokens.data(), tokens.size(), 0, spelled.data(),
                           spelled.size(), &size, error));
  spelled.resize(size);
  CHECK(spelled.find(text) != std::string::npos);
}

TEST_CASE("a call that is cancelled before it begins leaves everything exactly as it was") {
  TempFolder folder;
  const Session session = tiny_session(333);
  save(session.get(), folder.file("a.kv"));
  const std::vector<int32_t> tokens = sequence(session.get()), next = peek(session.get(), 10);
  const Cancel cancel = make_cancel();
  kv_cancel_fire(cancel.get());
  kv_cancel_fire(cancel.get());
  kv_control call = control_of(cancel.get());
  kv_generate_options o;
  kv_init(&o, sizeof o);
  int32_t token = -1;
  kv_session* loaded = nullptr;
  uint64_t done = 7, bytes = 7;
  for (const uint32_t flags : {0u, KV_KEEP_TURN}) {
    o.flags = flags;
    CHECK(kv_generate(session.get(), "q", 1, &o, &call, nullptr, nullptr, nullptr, nullptr) ==
          KV_CANCELLED);
  }
  CHECK(kv_prefill(session.get(), "text", 4, &call, &done, &bytes, nullptr) == KV_CANCELLED);
  CHECK(done == 0);
  CHECK(bytes == 0);
  CHECK(kv_prefill_tokens(session.get(), tokens.data(), 10, &call, &done, nullptr) == KV_CANCELLED);
  CHECK(kv_session_next(session.get(), &o, &call, &token, nullptr, nullptr) == KV_CANCELLED);
  float score = 7;
  CHECK(kv_session_score(session.get(), tokens.data(), 1, &score, &call, nullptr) == KV_CANCELLED);
  CHECK(score == 7);
  CHECK(kv_save(session.get(), folder.file("b.kv").c_str(), &call, nullptr) == KV_CANCELLED);
  CHECK(kv_file_verify(folder.file("a.kv").c_str(), &call, nullptr) == KV_CANCELLED);
  call.flags = KV_VERIFY;
  CHECK(kv_load(tiny_model(), folder.file("a.kv").c_str(), nullptr, &call, &loaded, nullptr) ==
        KV_CANCELLED);
  CHECK(loaded == nullptr);
  call.flags = 0;
  kv_model* model = nullptr;
  CHECK(kv_open(tiny_path, nullptr, &call, &model, nullptr) == KV_CANCELLED);
  CHECK(model == nullptr);
  std::size_t count = 99;
  for (const uint32_t flags : {0u, KV_TOKENIZE_DOCUMENT})
    CHECK(kv_tokenize(tiny_model(), "text", 4, flags, &call, &token, 1, &count, nullptr) ==
          KV_CANCELLED);
  CHECK(count == 99);
  CHECK(token == -1);
  CHECK(folder.entries() == 1);
  CHECK(sequence(session.get()) == tokens);
  CHECK(peek(session.get(), 10) == next);
}

TEST_CASE(
    "an answer that is cancelled at any time leaves the sequence, or with keep the whole tokens "
    "made so far") {
  const Session session = tiny_session(900);
  const std::vector<int32_t> tokens = sequence(session.get()), next = peek(session.get(), 10);
  const Cancel cancel = make_cancel();
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.max_tokens = 1'000'000;
  const kv_control call = control_of(cancel.get());
  for (int round = 0; round < 16; ++round) {
    kv_cancel_reset(cancel.get());
    o.flags = round % 2 ? KV_KEEP_TURN : 0;
    const Session own = fork(session.get());
    FireLater fire(cancel.get(), some_time(40'000));
    kv_answer answer{};
    answer.struct_size = sizeof answer;
    const kv_status s =
        kv_generate(own.get(), "who?", 4, &o, &call, nullptr, nullptr, &answer, nullptr);
    if (s == KV_CANCELLED) CHECK(fire.seconds_since_fired() < patience);
    CHECK((s == KV_CANCELLED || s == KV_OK));
    const std::vector<int32_t> after = sequence(own.get());
    REQUIRE(after.size() >= tokens.size());
    CHECK(std::equal(tokens.begin(), tokens.end(), after.begin()));
    if (o.flags) {
      kv_cancel_reset(cancel.get());
      // A fast CPU fills the context before the cancel.
      const bool full = s == KV_OK && answer.stop_reason == KV_STOP_CONTEXT_FULL;
      CHECK(ask(own.get(), "and then?", 4).status == (full ? KV_CONTEXT_FULL : KV_OK));
    } else {
      CHECK(after == tokens);
      CHECK(peek(own.get(), 10) == next);
    }
  }
}

TEST_CASE(
    "saving and verifying that are cancelled leave the old file or the new one, and nothing else" *
    doctest::skip(!replaces_files_in_use())) {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Session old = tiny_session(50), session = tiny_session(2000);
  const Cancel cancel = make_cancel();
  kv_control call = control_of(cancel.get());
  kv_control verify = call;
  verify.flags = KV_VERIFY;
  save(old.get(), path);
  for (int round = 0; round < 24; ++round) {
    kv_cancel_reset(cancel.get());
    kv_session* loaded = nullptr;
    kv_status s;
    {
      FireLater fire(cancel.get(), some_time(10'000));
      s = round % 2 ? kv_save(session.get(), path.c_str(), &call, nullptr)
                    : kv_load(tiny_model(), path.c_str(), nullptr, &verify, &loaded, nullptr);
      if (s == KV_CANCELLED) CHECK(fire.seconds_since_fired() < patience);
    }
    CHECK((s == KV_OK || s == KV_CANCELLED));
    CHECK((loaded != nullptr) == (round % 2 == 0 && s == KV_OK));
    kv_session_close(loaded);
    CHECK(folder.entries() == 1);
    const Session there = load(tiny_model(), path, KV_VERIFY);
    const std::size_t tokens = sequence(there.get()).size();
    CHECK((tokens == 50 || tokens == 2000));
    if (round % 2) CHECK((s != KV_OK || tokens == 2000));
    if (tokens == 2000 && round % 4 == 3) save(old.get(), path);
  }
}

TEST_CASE("a callback stops every long call") {
  TempFolder folder;
  const Session session = tiny_session(500);
  const std::vector<int32_t> tokens = sequence(session.get()), next = peek(session.get(), 10);
  kv_control call;
  kv_init(&call, sizeof call);
  call.progress = [](int32_t, uint64_t, uint64_t, void*) -> int32_t { return -1; };
  uint64_t done = 0;
  const Session reading = open_session(tiny_model());
  CHECK(kv_prefill_tokens(reading.get(), tokens.data(), tokens.size(), &call, &done, nullptr) ==
        KV_CANCELLED);
  CHECK(done == 64);
  CHECK(kv_save(session.get(), folder.file("a.kv").c_str(), &call, nullptr) == KV_CANCELLED);
  CHECK(folder.entries() == 0);
  save(session.get(), folder.file("a.kv"));
  CHECK(kv_file_verify(folder.file("a.kv").c_str(), &call, nullptr) == KV_CANCELLED);
  call.flags = KV_VERIFY;
  kv_session* loaded = nullptr;
  CHECK(kv_load(tiny_model(), folder.file("a.kv").c_str(), nullptr, &call, &loaded, nullptr) ==
        KV_CANCELLED);
  CHECK(loaded == nullptr);
  CHECK(sequence(session.get()) == tokens);
  CHECK(peek(session.get(), 10) == next);
}

TEST_CASE("loading that is cancelled loads nothing, whether it verifies or not") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  save(tiny_session(700).get(), path);
  const Cancel cancel = make_cancel();
  const kv_session_options o = small_options();
  for (const uint32_t flags : {0u, uint32_t{KV_VERIFY}}) {
    kv_control call = control_of(cancel.get());
    call.flags = flags;
    kv_session* session = nullptr;
    kv_cancel_fire(cancel.get());
    CHECK(kv_load(tiny_model(), path.c_str(), &o, &call, &session, nullptr) == KV_CANCELLED);
    CHECK(session == nullptr);
    kv_cancel_reset(cancel.get());
    REQUIRE_OK(kv_load(tiny_model(), path.c_str(), &o, &call, &session, error));
    kv_session_close(session);
  }
}
