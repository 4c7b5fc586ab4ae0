// One session serves one call at a time, also from its own callbacks; sessions of one model are
// independent. Also for ThreadSanitizer.
#include <atomic>
#include <thread>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

// Every call on a session that is busy; whatever it answers must be KV_BUSY.
std::vector<kv_status> all_calls(kv_session* s, const std::string& path) {
  const int32_t id = 5;
  int32_t token = 0;
  float logits[512];
  std::size_t n = 0;
  kv_session* out = nullptr;
  kv_session_stats stats;
  kv_init(&stats, sizeof stats);
  kv_passage passage;
  return {kv_prefill(s, "a", 1, nullptr, nullptr, nullptr, nullptr),
          kv_prefill_tokens(s, &id, 1, nullptr, nullptr, nullptr),
          kv_prefill_logits(s, &id, 1, logits, nullptr, nullptr),
          kv_generate(s, "a", 1, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr),
          kv_session_next(s, nullptr, nullptr, &token, nullptr, nullptr),
          kv_session_score(s, &id, 1, logits, nullptr, nullptr),
          kv_session_prepare(s, nullptr, nullptr),
          kv_session_passages(s, &passage, 1, &n, nullptr),
          kv_session_measure(s, 0, nullptr),
          kv_session_get_stats(s, &stats, nullptr),
          kv_session_tokens(s, nullptr, 0, &n, nullptr),
          kv_session_set_strategy(s, nullptr, nullptr),
          kv_session_rewind(s, 0, nullptr),
          kv_session_fork(s, &out, nullptr),
          kv_session_stats_json(s, nullptr, 0, &n, nullptr),
          kv_save(s, path.c_str(), nullptr, nullptr)};
}

struct Inside {
  kv_session* session;
  std::string path;
  int calls = 0;
  int others = 0;  // answers that were not KV_BUSY

  void try_all() {
    ++calls;
    for (kv_status s : all_calls(session, path)) others += s != KV_BUSY;
  }
};

int32_t text_callback(const char*, size_t, void* user) {
  return static_cast<Inside*>(user)->try_all(), 0;
}
int32_t progress_callback(int32_t, uint64_t, uint64_t, void* user) {
  return static_cast<Inside*>(user)->try_all(), 0;
}

}  // namespace

TEST_CASE("a session called from its own callbacks is busy, and goes on undisturbed") {
  TempFolder folder;
  const Session session = tiny_session(150);
  const std::string expected = ask(session.get(), "a question", 8).text;
  Inside inside{session.get(), folder.file("inside.kv")};

  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.max_tokens = 8;
  kv_control call = control_of(nullptr);
  call.progress = progress_callback;
  call.user = &inside;
  REQUIRE_OK(kv_generate(session.get(), "a question", 10, &o, &call, text_callback, &inside,
                         nullptr, error));
  CHECK(inside.calls > 1);

  const std::vector<int32_t> tokens = some_tokens(150);
  const Session read = open_session(tiny_model());
  inside.session = read.get();
  int before = inside.calls;
  REQUIRE_OK(kv_prefill_tokens(read.get(), tokens.data(), tokens.size(), &call, nullptr, error));
  CHECK(inside.calls > before);
  before = inside.calls;
  REQUIRE_OK(kv_save(read.get(), folder.file("a.kv").c_str(), &call, error));
  CHECK(inside.calls > before);
  CHECK(inside.others == 0);
  CHECK(folder.entries() == 1);
  CHECK(sequence(read.get()) == sequence(session.get()));
  CHECK(ask(read.get(), "a question", 8).text == expected);
}

TEST_CASE("other handles may be used inside a callback") {
  const Session session = tiny_session(100), other = tiny_session(100);
  const auto use_other = [](const char*, size_t, void* user) -> int32_t {
    return ask(static_cast<kv_session*>(user), "b", 2).status == KV_OK ? 0 : 1;
  };
  REQUIRE_OK(
      kv_generate(session.get(), "a", 1, nullptr, nullptr, use_other, other.get(), nullptr, error));
}

TEST_CASE("a second thread's calls are refused while a call runs, and change nothing") {
  TempFolder folder;
  const Session session = open_session(tiny_model());
  struct Shared {
    kv_session* session;
    std::string path;
    int others = 0;
  } shared{session.get(), folder.file("b.kv")};
  kv_control call;
  kv_init(&call, sizeof call);
  call.progress = [](int32_t, uint64_t, uint64_t, void* user) -> int32_t {
    auto& s = *static_cast<Shared*>(user);
    std::thread([&] {
      for (kv_status status : all_calls(s.session, s.path)) s.others += status != KV_BUSY;
    }).join();
    return 0;
  };
  call.user = &shared;
  const std::vector<int32_t> tokens = some_tokens(300);
  REQUIRE_OK(kv_prefill_tokens(session.get(), tokens.data(), tokens.size(), &call, nullptr, error));
  CHECK(shared.others == 0);
  CHECK(sequence(session.get()) == tokens);
}

TEST_CASE("threads that fight over one session: each call is done whole or refused") {
  const Session session = open_session(tiny_model());
  std::atomic<int> done{0}, wrong{0};
  const auto fight = [&] {
    for (int i = 0; i < 40; ++i) {
      const int32_t id = 5;
      const kv_status s = kv_prefill_tokens(session.get(), &id, 1, nullptr, nullptr, nullptr);
      done += s == KV_OK;
      wrong += s != KV_OK && s != KV_BUSY;
    }
  };
  std::thread a(fight), b(fight), c(fight);
  a.join(), b.join(), c.join();
  CHECK(wrong == 0);
  CHECK(done > 0);
  CHECK(sequence(session.get()).size() == static_cast<std::size_t>(done));
}

TEST_CASE("sessions of one model in several threads answer as they do alone") {
  const std::string text = book(3000);
  const auto work = [&] {
    const Session session = open_session(mini_model());
    std::string out;
    if (kv_prefill(session.get(), text.data(), text.size(), nullptr, nullptr, nullptr, nullptr) ==
        KV_OK)
      out = ask(session.get(), "What is this about?", 24).text;
    std::size_t count = 0;
    kv_tokenize(mini_model(), text.data(), text.size(), 0, nullptr, nullptr, 0, &count, nullptr);
    return out + std::to_string(count);
  };
  const std::string alone = work();
  std::string results[3];
  std::vector<std::thread> threads;
  for (std::string& result : results) threads.emplace_back([&] { result = work(); });
  for (std::thread& t : threads) t.join();
  for (const std::string& result : results) CHECK(result == alone);
}

TEST_CASE("forks in threads, some save and some answer: each goes its own way") {
  TempFolder folder;
  const Session session = tiny_session(700);
  const std::string answer = ask(session.get(), "q", 40, 0).text;
  const std::vector<int32_t> next = peek(session.get(), 20);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back(
        [&, i, own = std::shared_ptr<kv_session>(fork(session.get()).release(), kv_session_close)] {
          if (i % 2) {
            const std::string path = folder.file(std::to_string(i) + ".kv");
            for (int round = 0; round < 3; ++round) {
              wrong += kv_save(own.get(), path.c_str(), nullptr, nullptr) != KV_OK;
              kv_session* out = nullptr;
              const kv_session_options o = small_options();
              wrong += kv_load(tiny_model(), path.c_str(), &o, nullptr, &out, nullptr) != KV_OK;
              wrong += ask(out, "q", 40).text != answer;
              kv_session_close(out);
            }
          } else {
            for (int round = 0; round < 3; ++round)
              wrong += ask(own.get(), "q", 40, 0).text != answer;
            wrong += ask(own.get(), "q", 60, KV_KEEP_TURN).status !=
                     KV_OK;  // seals pages while others answer
          }
        });
  }
  for (int round = 0; round < 3; ++round) wrong += ask(session.get(), "q", 40).text != answer;
  for (std::thread& t : threads) t.join();
  CHECK(wrong == 0);
  CHECK(peek(session.get(), 20) == next);
}

TEST_CASE(
    "forks of one mapped document in threads, each with a tail of its own, closed in any order") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  save(tiny_session(700).get(), path);
  const auto bytes = read_file(path);
  const auto tail = [](int i) {
    std::vector<int32_t> tokens = some_tokens(300 + 40 * static_cast<std::size_t>(i));
    for (int32_t& token : tokens) token = 3 + (token + 17 * i) % 250;
    return tokens;
  };
  constexpr int forks = 6;
  std::vector<std::vector<int32_t>> alone(forks), together(forks);
  for (int i = 0; i < forks; ++i) {
    const Session own = load(tiny_model(), path);
    read_tokens(own.get(), tail(i));
    alone[static_cast<std::size_t>(i)] = peek(own.get(), 12);
  }
  Session mapped = load(tiny_model(), path);
  std::vector<std::shared_ptr<kv_session>> owned;
  for (int i = 0; i < forks; ++i) {
    Session one = fork(mapped.get());
    if (i % 2) one = fork(one.get());  // a fork of a fork that is closed
    owned.emplace_back(one.release(), kv_session_close);
  }
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int i = 0; i < forks; ++i)
    threads.emplace_back([&, i, own = std::move(owned[static_cast<std::size_t>(i)])]() mutable {
      const auto tokens = tail(i);
      wrong += kv_prefill_tokens(own.get(), tokens.data(), tokens.size(), nullptr, nullptr,
                                 nullptr) != KV_OK;
      for (int n = 0; n < 12; ++n) {
        int32_t token = -1;
        wrong += kv_session_next(own.get(), nullptr, nullptr, &token, nullptr, nullptr) != KV_OK;
        together[static_cast<std::size_t>(i)].push_back(token);
      }
      own.reset();
    });
  mapped.reset();  // while they go on
  for (std::thread& t : threads) t.join();
  CHECK(wrong == 0);
  CHECK(together == alone);
  CHECK(read_file(path) == bytes);
}

TEST_CASE("forks of one session made and closed by several threads, one call at a time") {
  const Session session = tiny_session(300);
  const std::vector<int32_t> next = peek(session.get(), 5);
  std::atomic<int> wrong{0}, made{0};
  const auto work = [&] {
    for (int i = 0; i < 10;) {
      kv_session* out = nullptr;
      const kv_status s = kv_session_fork(session.get(), &out, nullptr);
      if (s == KV_BUSY) {
        std::this_thread::yield();
        continue;
      }
      ++i;
      wrong += s != KV_OK;
      made += ask(out, "q", 4).status == KV_OK;
      kv_session_close(out);
    }
  };
  std::thread a(work), b(work);
  a.join(), b.join();
  CHECK(wrong == 0);
  CHECK(made == 20);
  CHECK(peek(session.get(), 5) == next);
}

TEST_CASE("handles are closed in any order, and models counted") {
  kv_model* model = open_model(tiny_path).release();
  CHECK(kv_model_retain(model) == model);
  kv_close(model);
  Session session = open_session(model);
  read_tokens(session.get(), some_tokens(200));
  Session second = fork(session.get());
  kv_close(model);  // the last reference of the caller's
  CHECK(ask(session.get(), "a", 4).status == KV_OK);
  session.reset();
  CHECK(ask(second.get(), "a", 4).status == KV_OK);
  std::thread([&] { second.reset(); }).join();
}
