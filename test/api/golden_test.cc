// Documents that older libraries wrote, kept under test/golden: they unpack, verify, load, and go
// on as they did then.
#include "golden_tokens.h"

#include <cmath>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

struct Golden {
  const char* file;
  uint32_t version;
  // of golden::continued_tokens tokens after it, read by quest
  std::vector<float> log_probabilities;
};

const std::vector<Golden> all = {
    {"format-3.kvz",
     3,
     {-70.8732f, -111.8492f, -103.9018f, -95.7286f, -60.3468f, -110.1436f, -125.1662f, -60.0978f}},
};

std::vector<float> scores_of(kv_session* session) {
  const std::vector<int32_t> next = golden::tokens(golden::continued_tokens, 12);
  std::vector<float> scores(next.size());
  REQUIRE_OK(kv_session_score(session, next.data(), next.size(), scores.data(), nullptr, error));
  return scores;
}

void unpack_golden(const Golden& golden, const std::string& path) {
  REQUIRE_OK(kv_unpack((std::string(FIXTURES "/../golden/") + golden.file).c_str(), path.c_str(),
                       nullptr, error));
}

Session load_golden(const std::string& path) {
  const kv_session_options options = golden::options("quest");
  kv_session* loaded = nullptr;
  REQUIRE_OK(kv_load(tiny_model(), path.c_str(), &options, nullptr, &loaded, error));
  return Session(loaded);
}

}  // namespace

TEST_CASE(
    "documents of every format version that is read are sound, and go on as they did when they "
    "were written") {
  for (const Golden& golden : all) {
    CAPTURE(std::string(golden.file));
    TempFolder folder;
    const std::string path = folder.file("a.kv");
    unpack_golden(golden, path);
    REQUIRE_OK(kv_file_verify(path.c_str(), nullptr, error));
    CHECK(inspect_file(path).format_version == golden.version);
    const Session session = load_golden(path);
    CHECK(sequence(session.get()) == golden::tokens());
    // instruction sets round differently
    const auto most = [](float score) { return std::abs(score) / 100; };
    const std::vector<float> scores = scores_of(session.get());
    for (std::size_t i = 0; i < scores.size(); ++i)
      CHECK(std::abs(scores[i] - golden.log_probabilities[i]) <= most(scores[i]));
    // So does a document that is read today, by bf16 where the CPU has AMX. With full attention, as
    // other pages may be chosen.
    REQUIRE_OK(kv_session_set_strategy(session.get(), strategy("full"), error));
    const Session today = open_session(tiny_model(), golden::options("full"));
    read_tokens(today.get(), golden::tokens());
    const std::vector<float> new_scores = scores_of(today.get()), full = scores_of(session.get());
    for (std::size_t i = 0; i < full.size(); ++i)
      CHECK(std::abs(full[i] - new_scores[i]) <= 2 * most(full[i]));
    REQUIRE_OK(kv_session_set_strategy(session.get(), strategy("bounded"), error));
    CHECK(peek(session.get(), 2).size() == 2);
    std::string json(20'000, '\0');
    std::size_t size = 0;
    REQUIRE_OK(kv_session_stats_json(session.get(), json.data(), json.size(), &size, error));
    CHECK(json.find("\"sketch_pages\":0,") == std::string::npos);
  }
}

TEST_CASE("a golden document is packed as it is, and saved in today's format") {
  for (const Golden& golden : all) {
    CAPTURE(std::string(golden.file));
    TempFolder folder;
    const std::string path = folder.file("a.kv"), packed = folder.file("a.kvz"),
                      back = folder.file("b.kv"), saved = folder.file("c.kv");
    unpack_golden(golden, path);
    REQUIRE_OK(kv_pack(path.c_str(), packed.c_str(), 0, nullptr, error));
    REQUIRE_OK(kv_unpack(packed.c_str(), back.c_str(), nullptr, error));
    CHECK(read_file(back) == read_file(path));
    const Session session = load_golden(path);
    save(session.get(), saved);
    CHECK(inspect_file(saved).format_version == all.back().version);
    REQUIRE_OK(kv_file_verify(saved.c_str(), nullptr, error));
    const Session again = load_golden(saved);
    CHECK(sequence(again.get()) == sequence(session.get()));
    CHECK(scores_of(again.get()) == scores_of(session.get()));
  }
}
