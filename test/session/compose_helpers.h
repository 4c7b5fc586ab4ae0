// Shared by the tests of compositions: saved documents with a fact each.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "helpers.h"
#include "temp_folder.h"

namespace kvasir::test {

inline constexpr const char* codes[] = {"5520914", "1739024", "6650318"};
inline constexpr const char* facts[] = {"The depth of the old well", "The password of the library",
                                        "The number of the second witness"};

// A part of the book, about 6,000 bytes, with the code of a gate in its middle.
inline std::string text_of(std::size_t i, std::size_t bytes = 6000) {
  const std::string book = book_text(100000 + 4 * bytes);
  const std::size_t at = 80000 + i * bytes;
  return book.substr(at, bytes / 2) + "\n" + facts[i] + " is " + codes[i] + ".\n" +
         book.substr(at + bytes / 2, bytes / 2) + "\n";
}
inline std::string question_of(std::size_t i) {
  return std::string("What is t") + (facts[i] + 1) + "?";
}

inline SessionOptions options_of(const char* strategy, bool full_precision = false) {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = strategy;
  o.full_precision = full_precision;
  return o;
}

// Saved documents, each made once.
struct Documents {
  TempFolder folder;
  std::vector<std::string> paths, exact_paths, long_paths;

  Documents() {
    for (std::size_t i = 0; i < 3; ++i) {
      paths.push_back(make("d" + std::to_string(i), text_of(i), options_of("auto")));
      exact_paths.push_back(make("e" + std::to_string(i), text_of(i), options_of("full", true)));
      long_paths.push_back(make("l" + std::to_string(i), text_of(i, 16000), options_of("auto")));
    }
  }
  std::string make(const std::string& name, const std::string& text, const SessionOptions& o) {
    auto session = open_session(mini_model(), o);
    uint64_t tokens = 0, bytes = 0;
    REQUIRE(session->prefill(text, false, nullptr, {}, &tokens, &bytes).ok());
    const std::string path = folder.file(name + ".kv");
    REQUIRE(session->save(path, nullptr, {}).ok());
    return path;
  }
};
inline const Documents& saved() {
  static const Documents documents;
  return documents;
}

// Seven documents, of which the third, the fifth and the seventh have a number each.
inline constexpr const char* numbers[] = {"2235936", "1668644", "1199767"};
inline constexpr const char* numbers_question =
    "What are all the special magic numbers for harbor mentioned in the document?";
struct Numbered {
  std::vector<std::string> texts, paths;
  TempFolder folder;

  Numbered() {
    texts.push_back(text_of(0, 16000)), paths.push_back(saved().long_paths[0]);
    for (std::size_t i = 0; i < 6; ++i) {
      std::string text = book_text(12000 * (i + 1)).substr(12000 * i);
      if (i % 2 == 1)
        text.insert(5000, "\nOne of the special magic numbers for harbor is: " +
                              std::string(numbers[i / 2]) + ".\n");
      auto session = open_session(mini_model(), options_of("auto"));
      uint64_t tokens = 0, bytes = 0;
      REQUIRE(session->prefill(text, false, nullptr, {}, &tokens, &bytes).ok());
      paths.push_back(folder.file(std::to_string(i) + ".kv"));
      REQUIRE(session->save(paths.back(), nullptr, {}).ok());
      texts.push_back(std::move(text));
    }
  }
};
inline const Numbered& numbered() {
  static const Numbered documents;
  return documents;
}

inline std::unique_ptr<Session> compose(const std::shared_ptr<const Model>& model,
                                        std::span<const std::string> paths, const SessionOptions& o,
                                        uint32_t most = 0) {
  std::unique_ptr<Session> session;
  const Status s = Session::compose(model, {.paths = paths, .most = most}, o, &session);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return session;
}
inline Status refused(std::span<const std::string> paths, const SessionOptions& o) {
  std::unique_ptr<Session> session;
  Status s = Session::compose(mini_model(), {.paths = paths}, o, &session);
  CHECK(!session);
  return s;
}

inline GenerateOptions briefly() {
  GenerateOptions o;
  o.max_tokens = 24;
  return o;
}
inline bool knows(Session* session, std::size_t i, GenerateOptions options = briefly()) {
  return ask(session, question_of(i), options).find(codes[i]) != std::string::npos;
}

inline GenerateOptions keeping(uint32_t tokens) {
  GenerateOptions o;
  o.keep = true;
  o.max_tokens = tokens;
  return o;
}

inline std::vector<float> scores_of(Session* session, std::span<const Token> tokens) {
  std::vector<float> out(tokens.size());
  const Status s = session->score(tokens, out.data(), nullptr, {});
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return out;
}

}  // namespace kvasir::test
