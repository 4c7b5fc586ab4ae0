// Sessions over several documents whose allocations fail, or whose forks answer at the same time.
#include <array>
#include <thread>

#include "helpers.h"
#include "memory_sweep.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

constexpr std::array<std::size_t, 3> lengths{300, 200, 260};

// Sessions over files of the tiny model.
struct Documents {
  TempFolder folder;
  std::vector<std::string> paths;
  kv_session_options session = small_options();

  Documents() {
    for (std::size_t n : lengths) {
      paths.push_back(folder.file(std::to_string(n) + ".kv"));
      save(tiny_session(n).get(), paths.back());
    }
  }

  kv_status compose(std::size_t count, uint32_t most, kv_session** out, kv_error* error) const {
    kv_compose_options o;
    kv_init(&o, sizeof o);
    o.max_documents = most;
    o.session = &session;
    std::array<const char*, lengths.size()> names{};
    for (std::size_t i = 0; i < count; ++i) names[i] = paths[i].c_str();
    return kv_session_compose(tiny_model(), names.data(), count, &o, nullptr, out, error);
  }

  Session composed(uint32_t most, std::size_t count = lengths.size()) const {
    kv_session* out = nullptr;
    REQUIRE_OK(compose(count, most, &out, error));
    return Session(out);
  }
};

std::size_t count_documents(kv_session* session) {
  for (uint32_t i = 0;; ++i) {
    kv_session_document document;
    kv_init(&document, sizeof document);
    kv_error error{};
    if (kv_session_get_document(session, i, &document, &error) != KV_OK) return i;
  }
}

}  // namespace

TEST_CASE("composing documents without memory opens no session and no file") {
  const Documents documents;
  (void)documents.composed(2);
  sweep([&](long n, bool once) {
    kv_session* out = nullptr;
    const std::size_t descriptors = open_descriptors();
    const Outcome outcome =
        run(n, once, [&](kv_error* e) { return documents.compose(lengths.size(), 2, &out, e); });
    CHECK((out == nullptr) == outcome.failed);
    kv_session_close(out);
    CHECK(open_descriptors() == descriptors);
    return outcome;
  });
}

TEST_CASE("a question over documents without memory can be asked again") {
  const Documents documents;
  for (uint32_t most : {1u, 2u, 3u}) {  // a choice of one, of two, and none
    CAPTURE(most);
    const std::string answer = ask(documents.composed(most).get(), "a question", 4).text;
    sweep([&](long n, bool once) {
      const Session session = documents.composed(most);
      kv_generate_options o;
      kv_init(&o, sizeof o);
      o.max_tokens = 4;
      o.flags = KV_TRACE_PASSAGES;
      const Outcome outcome = run(n, once, [&](kv_error* e) {
        return kv_generate(session.get(), "a question", 10, &o, nullptr, nullptr, nullptr, nullptr,
                           e);
      });
      CHECK(sequence(session.get()).empty());
      CHECK(ask(session.get(), "a question", 4).text == answer);
      return outcome;
    });
  }
}

TEST_CASE("documents are replaced without memory as a whole or not at all") {
  const Documents documents;
  const std::array names{documents.paths[2].c_str(), documents.paths[0].c_str()};
  const std::string before = ask(documents.composed(1).get(), "a question", 4).text;
  sweep([&](long n, bool once) {
    const Session session = documents.composed(1);
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_session_set_documents(session.get(), names.data(), names.size(), nullptr, e);
    });
    CHECK(count_documents(session.get()) == (outcome.failed ? lengths.size() : names.size()));
    if (outcome.failed) CHECK(ask(session.get(), "a question", 4).text == before);
    return outcome;
  });
}

TEST_CASE("a session over documents is saved and loaded without memory as a whole or not at all") {
  const Documents documents;
  const std::string path = documents.folder.file("over.kv");
  const Session session = documents.composed(2);
  REQUIRE(ask(session.get(), "a question", 2, KV_KEEP_TURN).status == KV_OK);
  const std::vector<int32_t> tokens = sequence(session.get());
  sweep([&](long n, bool once) {
    const Outcome outcome =
        run(n, once, [&](kv_error* e) { return kv_save(session.get(), path.c_str(), nullptr, e); });
    CHECK(documents.folder.entries() == lengths.size() + !outcome.failed);
    CHECK(sequence(session.get()) == tokens);
    std::filesystem::remove(path);
    return outcome;
  });
  save(session.get(), path);
  const kv_session_options o = small_options();
  sweep([&](long n, bool once) {
    kv_session* out = nullptr;
    const std::size_t descriptors = open_descriptors();
    const Outcome outcome = run(n, once, [&](kv_error* e) {
      return kv_load(tiny_model(), path.c_str(), &o, nullptr, &out, e);
    });
    CHECK((out == nullptr) == outcome.failed);
    if (out) CHECK(sequence(out) == tokens);
    kv_session_close(out);
    CHECK(open_descriptors() == descriptors);
    return outcome;
  });
}

TEST_CASE("forks of a session over documents answer at the same time as each alone") {
  const Documents documents;
  const Session session = documents.composed(2);
  constexpr std::array questions{"a question", "another one", "what else?"};
  std::array<std::string, questions.size()> alone, together;
  for (std::size_t i = 0; i < questions.size(); ++i)
    alone[i] = ask(fork(session.get()).get(), questions[i], 6).text;
  std::vector<Session> forks;
  for (std::size_t i = 0; i < questions.size(); ++i) forks.push_back(fork(session.get()));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < questions.size(); ++i)
    threads.emplace_back([&, i] { together[i] = ask(forks[i].get(), questions[i], 6).text; });
  for (std::thread& thread : threads) thread.join();
  CHECK(alone == together);
}
