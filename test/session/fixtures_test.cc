// The forward pass against logits of independent references.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "backend/kernels.h"
#include "helpers.h"
#include "temp_folder.h"

using namespace kvasir;
using nlohmann::json;

namespace {

json read_json(const std::string& path) {
  std::ifstream in(path);
  REQUIRE(in.good());
  return json::parse(in);
}

std::vector<float> read_floats(const std::string& path, std::size_t n) {
  std::vector<float> out(n);
  std::ifstream in(path, std::ios::binary);
  in.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(n * sizeof(float)));
  REQUIRE(in.good());
  return out;
}

std::size_t largest(const float* row, std::size_t n) {
  return static_cast<std::size_t>(std::max_element(row, row + n) - row);
}

// [tokens][vocabulary]
std::vector<float> logits_of(std::shared_ptr<const Model> model, std::span<const Token> tokens,
                             const SessionOptions& options) {
  auto session = test::open_session(model, options);
  std::vector<float> logits(tokens.size() * model->config().vocabulary);
  uint64_t done = 0;
  const Status s = session->prefill_tokens(tokens, logits.data(), nullptr, {}, &done);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return logits;
}

}  // namespace

TEST_CASE("every architecture, RoPE kind and weight type gives the reference's logits") {
  for (const json& fixture : read_json(FIXTURES "/models/fixtures.json")) {
    const std::string weights = fixture["weights"], name = fixture["model"];
    CAPTURE(name);
    const auto model = test::open_model(FIXTURES "/models/" + name);
    const std::vector<Token> tokens = fixture["tokens"];
    const std::size_t rows = fixture["shape"][0], cols = fixture["shape"][1];
    // Tokens that the rows of the logits belong to; without it, all.
    const std::vector<std::size_t> positions =
        fixture.value("positions", std::vector<std::size_t>());
    const auto expected =
        read_floats(FIXTURES "/models/" + fixture["logits"].get<std::string>(), rows * cols);
    SessionOptions options;
    options.full_precision = true;
    options.context = fixture.value("context", uint64_t{0});
    auto logits = logits_of(model, tokens, options);
    for (std::size_t r = 0; r < positions.size(); ++r)
      std::copy_n(&logits[positions[r] * cols], cols, &logits[r * cols]);
    logits.resize(rows * cols);
    double difference = 0, norm = 0, same = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      difference += std::pow(static_cast<double>(logits[i]) - static_cast<double>(expected[i]), 2);
      norm += std::pow(static_cast<double>(expected[i]), 2);
    }
    for (std::size_t r = 0; r < rows; ++r)
      same += largest(&logits[r * cols], cols) == largest(&expected[r * cols], cols);
    // Float weights are computed in float, so only its rounding is left. Quantised ones meet
    // activations of 8 bits, or of bf16 with AMX.
    const bool is_float = weights == "F32" || weights == "F16" || weights == "BF16";
    CHECK(std::sqrt(difference / norm) < (is_float ? 2e-5 : 3e-2));
    const double near_ties = cpu_kernels().tile_bytes(16, 256) > 0 ? 1 : 0;
    const auto all = static_cast<double>(rows);
    CHECK(all - same <= (is_float ? 0 : std::max(near_ties, 0.05 * all)));
  }
}

TEST_CASE("every architecture goes on the same after saving, loading and forking") {
  TempFolder folder;
  std::set<std::string> seen;
  for (const json& fixture : read_json(FIXTURES "/models/fixtures.json")) {
    if (!seen.insert(fixture["arch"]).second) continue;
    CAPTURE(fixture["arch"].get<std::string>());
    const auto model = test::open_model(FIXTURES "/models/" + fixture["model"].get<std::string>());
    std::vector<Token> tokens;  // enough for sealed pages
    while (tokens.size() < 400)
      for (const Token t : fixture["tokens"].get<std::vector<Token>>()) tokens.push_back(t);
    SessionOptions options;
    options.select.strategy = "bounded";
    options.select.budget_tokens = 128;
    auto session = test::open_session(model, options);
    test::read(session.get(), tokens);
    REQUIRE(session->store().sealed_tokens() > 0);
    REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    std::unique_ptr<Session> loaded, fork;
    REQUIRE(Session::load(model, folder.file("a.kv"), options, true, nullptr, {}, &loaded).ok());
    REQUIRE(session->fork(&fork).ok());
    const std::vector<Token> expected = test::continue_with(session.get(), 20);
    CHECK(test::continue_with(loaded.get(), 20) == expected);
    CHECK(test::continue_with(fork.get(), 20) == expected);
    const std::vector<float> logits = test::logits_after(session.get(), 100);
    CHECK(test::logits_after(loaded.get(), 100) == logits);
    CHECK(test::logits_after(fork.get(), 100) == logits);
  }
}

TEST_CASE("a sequence is not continued with the RoPE factors of another context") {
  TempFolder folder;
  const auto model = test::open_model(FIXTURES "/models/phi3-long.gguf");  // long: above 64 tokens
  const std::vector<Token> tokens = {5, 6, 7, 8, 9};
  SessionOptions with_short, with_long;
  with_short.context = 64, with_long.context = 65;
  for (const auto& [written, other] :
       {std::pair(with_short, with_long), std::pair(with_long, with_short)}) {
    auto session = test::open_session(model, written);
    test::read(session.get(), tokens);
    REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    std::unique_ptr<Session> loaded;
    const Status s = Session::load(model, folder.file("a.kv"), other, true, nullptr, {}, &loaded);
    CHECK(s.code() == Code::model_mismatch);
    CHECK_MESSAGE(std::string(s.message()).find("context_tokens") != std::string::npos,
                  s.message());
    REQUIRE(Session::load(model, folder.file("a.kv"), written, true, nullptr, {}, &loaded).ok());
    CHECK(test::logits_after(loaded.get(), 9) == test::logits_after(session.get(), 9));
  }
}

TEST_CASE(
    "int8 keys and values cost the trained model less than half a percent of log-probability") {
  const json reference = read_json(FIXTURES "/mini-reference.json");
  const std::vector<Token> tokens = reference["tokens"];
  const std::size_t vocabulary = reference["vocab"];
  const auto nll = [&](const SessionOptions& options) {
    const auto logits = logits_of(test::mini_model(), tokens, options);
    double sum = 0;
    for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
      const float* row = &logits[i * vocabulary];
      const double top = static_cast<double>(row[largest(row, vocabulary)]);
      double total = 0;
      for (std::size_t v = 0; v < vocabulary; ++v)
        total += std::exp(static_cast<double>(row[v]) - top);
      sum +=
          top + std::log(total) - static_cast<double>(row[static_cast<std::size_t>(tokens[i + 1])]);
    }
    return sum / static_cast<double>(tokens.size() - 1);
  };
  const double expected = reference["mean_nll"];
  SessionOptions exact, sealed;
  exact.full_precision = true;
  sealed.prefill_chunk = 64;  // so that most of the prompt is read from sealed pages
  CHECK(std::abs(nll(exact) / expected - 1) < 1e-3);
  CHECK(std::abs(nll(sealed) / expected - 1) < 5e-3);
}
