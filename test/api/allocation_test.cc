// Every allocation of every kind of call fails once, or from then on: the code is KV_NO_MEMORY,
// nothing leaks (a leak checker finds that), and the handle gives the same answers as one without a
// failure.
#include <algorithm>

#include "helpers.h"
#include "memory_sweep.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

const Session& base() {  // 300 tokens: 64-token pages behind a window, the last extent is not full
  static const Session session = tiny_session(300);
  return session;
}

const std::vector<int32_t>& base_next() {
  static const std::vector<int32_t> next = peek(base().get(), 6);
  return next;
}

void check_untouched(kv_session* session) {
  CHECK(sequence(session).size() == 300);
  CHECK(peek(session, 6) == base_next());
}

}  // namespace

TEST_CASE("opening a model without memory") {
  sweep([](long n, bool once) {
    kv_model* model = nullptr;
    const Outcome outcome =
        run(n, once, [&](kv_error* e) { return kv_open(tiny_path, nullptr, nullptr, &model, e); });
    CHECK((model == nullptr) == outcome.failed);
    kv_close(model);
    return outcome;
  });
  sweep([](long n, bool once) {
    kv_model_info info{};
    info.struct_size = sizeof info;
    const Outcome outcome =
        run(n, once, [&](kv_error* e) { return kv_model_inspect(tiny_path, &info, e); });
    CHECK((info.layers == 0) == outcome.failed);
    return outcome;
  });
}

TEST_CASE("tokens and text without memory") {
  const std::string text = book(300);
  tiny_model();
  std::vector<int32_t> tokens(1000);
  std::size_t count = 0;
  sweep([&](long n, bool once) {
    return run(n, once, [&](kv_error* e) {
      return kv_tokenize(tiny_model(), text.data(), text.size(), 0, nullptr, tokens.data(),
                         tokens.size(), &count, e);
    });
  });
  std::string back(2000, 0);
  std::size_t size = 0;
  sweep([&](long n, bool once) {
    return run(n, once, [&](kv_error* e) {
      return kv_detokenize(tiny_model(), tokens.data(), count, 0, back.data(), back.size(), &size,
                           e);
    });
  });
  CHECK(back.substr(0, size) == text);
}

TEST_CASE("opening a session without memory") {
  const kv_session_options o = small_options();
  tiny_model();
  sweep([&](long n, bool once) {
    kv_session* session = nullptr;
    const Outcome outcome =
        run(n, once, [&](kv_error* e) { return kv_session_open(tiny_model(), &o, &session, e); });
    CHECK((session == nullptr) == outcome.failed);
    kv_session_close(session);
    return outcome;
  });
  kv_cancel* cancel = nullptr;
  CHECK(run(0, true, [&](kv_error* e) { return kv_cancel_create(&cancel, e); }).failed);
  CHECK(cancel == nullptr);
}

TEST_CASE("prefill of tokens without memory keeps whole chunks and goes on to the same state") {
  const std::vector<int32_t> tokens = some_tokens(300);
  base_next();
  sweep([&](long n, bool once) {
    const Session session = open_session(tiny_model());
    uint64_t done = 99;
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_prefill_tokens(session.get(), tokens.data(), tokens.size(), nullptr, &done, e);
    });
    CHECK(done % 64 == (outcome.failed ? 0 : 300 % 64));
    CHECK(sequence(session.get()).size() == done);
    read_tokens(session.get(), {tokens.begin() + static_cast<std::ptrdiff_t>(done), tokens.end()});
    CHECK(peek(session.get(), 6) == base_next());
    return outcome;
  });
}

TEST_CASE(
    "prefill of text without memory keeps whole chunks and remembers that the document has begun") {
  const std::string text = book(400);
  const Session whole = open_session(tiny_model());
  read_text(whole.get(), text);
  const std::vector<int32_t> tokens = sequence(whole.get());
  sweep([&](long n, bool once) {
    const Session session = open_session(tiny_model());
    uint64_t done = 99, bytes = 99;
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_prefill(session.get(), text.data(), text.size(), nullptr, &done, &bytes, e);
    });
    CHECK(sequence(session.get()).size() == done);
    CHECK((bytes == text.size()) == !outcome.failed);
    read_text(session.get(), text.substr(bytes));
    const std::vector<int32_t> after = sequence(session.get());
    CHECK(std::count(after.begin(), after.end(), tokens[0]) ==
          std::count(tokens.begin(), tokens.end(), tokens[0]));
    return outcome;
  });
}

TEST_CASE("answering without memory leaves the sequence as it was") {
  const std::string answer = ask(base().get(), "a question", 6).text;
  sweep([&](long n, bool once) {
    const Session session = fork(base().get());
    kv_generate_options o;
    kv_init(&o, sizeof o);
    o.max_tokens = 6;
    o.flags = KV_TRACE_PASSAGES;
    const char* const stop[] = {"never to be seen, this string is"};
    o.stop = stop;
    o.stop_count = 1;
    const auto ignore = [](const char*, size_t, void*) -> int32_t { return 0; };
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_generate(session.get(), "a question", 10, &o, nullptr, ignore, nullptr, nullptr, e);
    });
    check_untouched(session.get());
    CHECK(ask(session.get(), "a question", 6).text == answer);
    return outcome;
  });
}

TEST_CASE("a kept answer without memory keeps whole tokens") {
  const std::vector<int32_t> before = sequence(base().get());
  sweep([&](long n, bool once) {
    const Session session = fork(base().get());
    kv_generate_options o;
    kv_init(&o, sizeof o);
    o.max_tokens = 70;  // seals a page
    o.flags = KV_KEEP_TURN;
    o.temperature = 1;
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_generate(session.get(), "a", 1, &o, nullptr, nullptr, nullptr, nullptr, e);
    });
    const std::vector<int32_t> after = sequence(session.get());
    REQUIRE(after.size() >= before.size());
    CHECK(std::equal(before.begin(), before.end(), after.begin()));
    CHECK(ask(session.get(), "b", 4, KV_KEEP_TURN).status == KV_OK);
    return outcome;
  });
}

TEST_CASE("a token, a fork, going back and statistics without memory") {
  sweep([&](long n, bool once) {
    const Session session = fork(base().get());
    int32_t token = -1;
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_session_next(session.get(), nullptr, nullptr, &token, nullptr, e);
    });
    if (outcome.failed) {
      CHECK(token == -1);
      check_untouched(session.get());
    }
    return outcome;
  });
  sweep([&](long n, bool once) {
    kv_session* out = nullptr;
    const Outcome outcome =
        run(n, once, [&](kv_error* e) { return kv_session_fork(base().get(), &out, e); });
    CHECK((out == nullptr) == outcome.failed);
    if (out) check_untouched(out);
    kv_session_close(out);
    check_untouched(base().get());
    return outcome;
  });
  // into a page, which is opened again, and then a token whose logits have to be made again
  sweep([&](long n, bool once) {
    const Session session = fork(base().get());
    const Outcome outcome =
        run(n, once, [&](kv_error* e) { return kv_session_rewind(session.get(), 150, e); });
    if (outcome.failed) check_untouched(session.get());
    return outcome;
  });
  const Session shorter = fork(base().get());
  REQUIRE_OK(kv_session_rewind(shorter.get(), 150, error));
  const std::vector<int32_t> next = peek(shorter.get(), 4);
  sweep([&](long n, bool once) {
    const Session session = fork(shorter.get());
    int32_t token = -1;
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_session_next(session.get(), nullptr, nullptr, &token, nullptr, e);
    });
    if (outcome.failed) CHECK(peek(session.get(), 4) == next);
    return outcome;
  });
  std::string json(4000, 0);
  std::size_t size = 0;
  sweep([&](long n, bool once) {
    return run(n, once, [&](kv_error* e) {
      return kv_session_stats_json(base().get(), json.data(), json.size(), &size, e);
    });
  });
}

TEST_CASE("scoring a continuation without memory leaves the sequence as it was") {
  const std::vector<int32_t> tokens = some_tokens(5);
  sweep([&](long n, bool once) {
    const Session session = fork(base().get());
    std::vector<float> scores(tokens.size(), 7);
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_session_score(session.get(), tokens.data(), tokens.size(), scores.data(), nullptr,
                              e);
    });
    CHECK((scores == std::vector<float>(tokens.size(), 7)) == outcome.failed);
    check_untouched(session.get());
    return outcome;
  });
}

TEST_CASE("saving and loading without memory leave the old file and no temporary one") {
  TempFolder folder;
  (void)base();  // made before memory is wanting
  const std::string path = folder.file("a.kv");
  const Session old = tiny_session(40);
  sweep([&](long n, bool once) {
    save(old.get(), path);
    const Outcome outcome =
        run(n, once, [&](kv_error* e) { return kv_save(base().get(), path.c_str(), nullptr, e); });
    CHECK(folder.entries() == 1);
    const Session there = load(tiny_model(), path, KV_VERIFY);
    const std::size_t tokens = sequence(there.get()).size();
    CHECK((tokens == 300 || (outcome.failed && tokens == 40)));
    return outcome;
  });
  check_untouched(base().get());
  save(base().get(), path);
  const kv_session_options o = small_options();
  for (uint32_t flags : {0u, KV_VERIFY}) {
    kv_control call;
    kv_init(&call, sizeof call);
    call.flags = flags;
    sweep([&](long n, bool once) {
      kv_session* out = nullptr;
      const std::size_t descriptors = open_descriptors();
      const Outcome outcome = run(n, once, [&](kv_error* e) {
        return kv_load(tiny_model(), path.c_str(), &o, &call, &out, e);
      });
      CHECK((out == nullptr) == outcome.failed);
      // a session keeps its file open; Wine counts none
      CHECK(open_descriptors() == descriptors + (out && descriptors > 0 ? 1 : 0));
      if (out) check_untouched(out);
      kv_session_close(out);
      return outcome;
    });
  }
  kv_file_info info{};
  info.struct_size = sizeof info;
  sweep([&](long n, bool once) {
    return run(n, once, [&](kv_error* e) { return kv_file_inspect(path.c_str(), &info, e); });
  });
  sweep([&](long n, bool once) {
    return run(n, once, [&](kv_error* e) { return kv_file_verify(path.c_str(), nullptr, e); });
  });
}

TEST_CASE("a loaded session that runs out of memory while it copies a page of its file") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  save(base().get(), path);
  const std::vector<int32_t> more = some_tokens(128);
  sweep([&](long n, bool once) {
    const Session session = load(tiny_model(), path);
    uint64_t done = 0;
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_prefill_tokens(session.get(), more.data(), more.size(), nullptr, &done, e);
    });
    CHECK(sequence(session.get()).size() == 300 + done);
    if (done == 0) check_untouched(session.get());
    return outcome;
  });
}

TEST_CASE("a strategy is replaced as a whole or not at all") {
  kv_strategy* created = nullptr;
  REQUIRE_OK(kv_strategy_create("filter-layers", &created, error));
  const std::unique_ptr<kv_strategy, void (*)(kv_strategy*)> filter(created, kv_strategy_destroy);
  const uint32_t layers[] = {0};
  REQUIRE_OK(kv_strategy_set_layers(filter.get(), layers, 1, error));
  long n = 0;
  for (bool reached = true; reached && n < 100; ++n) {
    CAPTURE(n);
    const Session session = fork(base().get());
    const Outcome outcome = run(n, false, [&](kv_error* error) {
      return kv_session_set_strategy(session.get(), filter.get(), error);
    });
    reached = outcome.reached;
    const std::string now = stats_of(session.get()).decode_strategy;
    CHECK(now == (outcome.failed ? "quest" : "filter-layers"));
  }
  CHECK(n > 2);
}
