// A model and sessions for the session tests.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gguf/gguf_builder.h"
#include "session/session.h"

namespace kvasir::test {

inline std::shared_ptr<const Model> open_model(const std::string& path) {
  std::shared_ptr<const Model> model;
  const Status s = Model::open(path, "", &model);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return model;
}

// The trained model that the project ships, opened once.
inline std::shared_ptr<const Model> mini_model() {
  static const auto model = open_model(EXAMPLES "/mini-reader-q8_0.gguf");
  return model;
}

// A llama model of one layer, 32 wide, over a file that holds a tokenizer of `vocabulary` tokens.
// Weights are zeros, but for the tensors in `filled`, whose numbers are all the same.
std::shared_ptr<const Model> model_over(GgufBuilder file, uint32_t vocabulary, const char* chat,
                                        const std::map<std::string, float>& filled = {});

inline std::unique_ptr<Session> open_session(std::shared_ptr<const Model> model,
                                             const SessionOptions& options = {}) {
  std::unique_ptr<Session> session;
  const Status s = Session::open(std::move(model), options, &session);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return session;
}

// Of the mini model; tokens: the prefix, 0 for all.
inline std::unique_ptr<Session> load_session(const std::string& path, const SessionOptions& options,
                                             uint64_t tokens = 0) {
  std::unique_ptr<Session> session;
  const Status s = Session::load(mini_model(), path, options, false, nullptr, {}, &session, tokens);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return session;
}

// The first bytes of its book.
std::string book_text(std::size_t bytes);
// Tokens that are text to the mini model: the first `n` of its book.
std::vector<Token> book_tokens(std::size_t n);

// Text to a fixture: ids that its vocabulary has.
inline std::vector<Token> some_tokens(std::size_t n, uint32_t seed = 7) {
  std::vector<Token> tokens(n);
  for (Token& t : tokens) {
    seed = seed * 1664525 + 1013904223;
    t = static_cast<Token>(3 + seed % 250);
  }
  return tokens;
}

inline void read(Session* session, std::span<const Token> tokens) {
  uint64_t done = 0;
  const Status s = session->prefill_tokens(tokens, nullptr, nullptr, {}, &done);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  REQUIRE(done == tokens.size());
}

// The next n tokens, greedily.
inline std::vector<Token> continue_with(Session* session, int n) {
  std::vector<Token> out;
  for (int i = 0; i < n; ++i) {
    Token token = -1;
    bool end = false;
    const Status s = session->next({}, nullptr, &token, &end);
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
    out.push_back(token);
  }
  return out;
}

inline std::string ask(Session* session, std::string_view question, GenerateOptions options = {}) {
  std::string text;
  Answer answer;
  const Status s = session->generate(
      question, options, [&](std::string_view t) { return text += t, 0; }, &answer);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return text;
}

// The logits that the sequence's continuation `token` gives.
inline std::vector<float> logits_after(Session* session, Token token) {
  std::vector<float> logits(session->model().config().vocabulary);
  uint64_t done = 0;
  const Status s = session->prefill_tokens({&token, 1}, logits.data(), nullptr, {}, &done);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return logits;
}

// Relative L2 difference.
inline double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double off = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    off += std::pow(static_cast<double>(a[i] - b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(off / norm);
}

}  // namespace kvasir::test
