// What an evaluation keeps, sums up and promises about its end.
#include <doctest/doctest.h>

#include <fstream>

#include "eval_progress.h"
#include "eval_results.h"
#include "failure.h"
#include "temp_folder.h"

using namespace tool;

namespace {

Result result(const char* key, Task task, double score, std::optional<double> depth = {}) {
  Result r;
  r.key = key;
  r.document = "d";
  r.length = 8192;
  r.strategy = "quest";
  r.budget = "1%";
  r.task = task;
  r.depth = depth;
  r.questions = {"q \"1\"\n", "q2"};
  r.expected = {{"a", "b"}, {"c"}};
  r.answers = {"\xC3\xA4", ""};
  r.score = score;
  r.steps = 10;
  r.tokens_read = 20;
  r.tokens_present = 1000;
  r.summary_bytes = 4000;
  r.seconds = 0.5;
  return r;
}

}  // namespace

TEST_CASE("results are kept from one run to the next") {
  TempFolder folder;
  const std::string path = folder.file("results.jsonl");
  {
    ResultFile file(path);
    CHECK(file.find("k1") == nullptr);
    file.add(result("k1", Task::single, 1, 0.25));
    file.add(result("k2", Task::perplexity, -2.5));
  }
  ResultFile again(path);
  CHECK(again.size() == 2);
  REQUIRE(again.find("k1") != nullptr);
  CHECK(to_json(*again.find("k1")) == to_json(result("k1", Task::single, 1, 0.25)));
  CHECK(to_json(*again.find("k2")) == to_json(result("k2", Task::perplexity, -2.5)));
}

TEST_CASE("a line that was written half is not a result and does no harm to the next") {
  TempFolder folder;
  const std::string path = folder.file("results.jsonl");
  ResultFile(path).add(result("k1", Task::single, 1));
  std::ofstream(path, std::ios::app) << to_json(result("k2", Task::single, 1)).dump().substr(0, 50);
  {
    ResultFile file(path);
    CHECK(file.size() == 1);
    file.add(result("k3", Task::single, 0));
  }
  const ResultFile file(path);
  CHECK(file.size() == 2);
  CHECK(file.find("k2") == nullptr);
  CHECK(file.find("k3") != nullptr);
}

TEST_CASE("lines of another version, of another kind and what is no JSON are passed over") {
  TempFolder folder;
  const std::string path = folder.file("results.jsonl");
  Json later = to_json(result("k1", Task::single, 1));
  later["task"] = "telepathy";
  std::ofstream(path) << later.dump() << "\n{}\n[]\n\n42\nnonsense\n"
                      << to_json(result("k2", Task::single, 1)).dump() << "\n";
  CHECK(ResultFile(path).size() == 1);
}

TEST_CASE("a file that cannot be written is an error") {
  TempFolder folder;
  ResultFile file(folder.file("none/results.jsonl"));
  CHECK_THROWS_WITH_AS(file.add(result("k1", Task::single, 1)), doctest::Contains("results.jsonl"),
                       Failure);
}

TEST_CASE("scores are means by task, and the whole is the mean of the tasks without perplexity") {
  std::vector<Result> results = {
      result("1", Task::single, 1, 0.05), result("2", Task::single, 0, 0.95),
      result("3", Task::single, 1, 1.0), result("4", Task::pass_key, 1, 0.5),
      result("5", Task::perplexity, -2)};
  results.push_back(result("6", Task::single, 0, 0.5));
  results.back().budget = "2%";
  std::vector<const Result*> pointers;
  for (const Result& r : results) pointers.push_back(&r);
  const std::vector<Summary> summaries = summarise(pointers, 4);
  REQUIRE(summaries.size() == 2);
  CHECK(summaries[0].tasks.at(Task::single).mean() == doctest::Approx(2.0 / 3));
  CHECK(summaries[0].score().value() == doctest::Approx((2.0 / 3 + 1) / 2));
  CHECK(summaries[0].all.read_share() == doctest::Approx(0.02));
  // depth 1 is of the last stretch
  CHECK(summaries[0].depths.at(Task::single).at(3).questions == 2);
  CHECK(summaries[1].score().value() == 0);
  const Json rows = rows_json(summaries, 128);
  CHECK(rows.size() == 3 + 1 + 1 + 1);
  CHECK(rows[0]["task"] == "single");
  CHECK(rows[0]["kv_bytes_per_token"].get<double>() == doctest::Approx(2.0 * 128));
  CHECK(rows[0]["summary_bytes_per_token"].get<double>() == doctest::Approx(400));
  CHECK(rows[0]["depths"].size() == 2);
  CHECK(rows[0]["depths"][0] == Json({{"depth", 0.125}, {"questions", 1}, {"score", 1.0}}));
  CHECK(rows[2]["perplexity"].get<double>() == doctest::Approx(7.389).epsilon(1e-3));
  CHECK(rows[3]["task"] == "all");
}

TEST_CASE("the time left follows what work took") {
  Estimate estimate;
  estimate.expect(Work::prefill, 100);
  estimate.expect(Work::decode, 50);
  CHECK(estimate.share() == 0);
  estimate.done(Work::prefill, 50, 5);  // 0.1 s per unit; decode is not known yet
  CHECK(estimate.seconds_left() == doctest::Approx(5 + 5));
  estimate.done(Work::decode, 25, 25);
  CHECK(estimate.seconds_left() == doctest::Approx(5 + 25));
  CHECK(estimate.share() == doctest::Approx(0.5));
  estimate.drop(Work::prefill, 50);  // finished by an earlier run
  CHECK(estimate.seconds_left() == doctest::Approx(25));
  estimate.done(Work::decode, 25, 25);
  CHECK(estimate.share() == doctest::Approx(1));
}
