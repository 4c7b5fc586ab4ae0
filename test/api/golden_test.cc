// Documents that older libraries wrote, kept under test/golden: they unpack, verify, load, and go on as they did then.
#include "golden_tokens.h"

#include <cmath>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

struct Golden {
  const char* file;
  std::vector<float> log_probabilities;  // of golden::continued_tokens tokens after it, read by quest
};

const std::vector<Golden> all = {
    {"format-1.kvz", {-70.8732f, -111.8492f, -103.8266f, -95.6321f, -60.3469f, -110.1752f, -125.2168f, -60.0978f}},
};

}  // namespace

TEST_CASE("documents of every format version so far are read, and go on as they did when they were written") {
  for (const Golden& golden : all) {
    CAPTURE(std::string(golden.file));
    TempFolder folder;
    const std::string path = folder.file("a.kv"), packed = std::string(FIXTURES "/../golden/") + golden.file;
    REQUIRE_OK(kv_unpack(packed.c_str(), path.c_str(), nullptr, error));
    REQUIRE_OK(kv_file_verify(path.c_str(), nullptr, error));
    const kv_session_options options = golden::options("quest");
    kv_session* loaded = nullptr;
    REQUIRE_OK(kv_load(tiny_model(), path.c_str(), &options, nullptr, &loaded, error));
    const Session session(loaded);
    CHECK(timeline(loaded) == golden::tokens());
    const std::vector<int32_t> next = golden::tokens(golden::continued_tokens, 12);
    const auto most = [](float score) { return std::abs(score) / 100; };  // instruction sets round differently
    std::vector<float> scores(next.size());
    REQUIRE_OK(kv_score(loaded, next.data(), next.size(), scores.data(), nullptr, error));
    for (std::size_t i = 0; i < scores.size(); ++i) CHECK(std::abs(scores[i] - golden.log_probabilities[i]) <= most(scores[i]));
    // So does a document that is read today.
    const Session today = open_session(tiny_model(), options);
    read_tokens(today.get(), golden::tokens());
    std::vector<float> its_scores(next.size());
    REQUIRE_OK(kv_score(today.get(), next.data(), next.size(), its_scores.data(), nullptr, error));
    for (std::size_t i = 0; i < scores.size(); ++i) CHECK(std::abs(scores[i] - its_scores[i]) <= most(scores[i]));
    REQUIRE_OK(kv_session_set_strategy(loaded, "bounded", 0, 0, error));
    CHECK(peek(loaded, 2).size() == 2);
    std::string json(20'000, '\0');
    std::size_t size = 0;
    REQUIRE_OK(kv_stats(loaded, json.data(), json.size(), &size, error));
    CHECK(json.find("\"sketch_pages\":0,") == std::string::npos);
  }
}
