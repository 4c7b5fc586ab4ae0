// Files that another process cuts while a session maps them: an error, and the process goes on. In
// a child process, which SIGBUS would end.
#include <doctest/doctest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "helpers.h"
#include "temp_folder.h"

#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>

using namespace kvasir;
using namespace kvasir::test;

namespace {

// Returns what f returns in a child process, or minus the signal that ended it.
int in_child(const std::function<int()>& f) {
  const pid_t child = fork();
  if (child == 0) _exit(f());
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

SessionOptions full(uint64_t span = 0) {
  SessionOptions o;
  o.threads = 2, o.prefill_chunk = 100, o.span_tokens = span;
  o.select.strategy = "full";
  return o;
}

Status append(Session* session, std::span<const Token> tokens, Progress::Report report = {}) {
  uint64_t done = 0;
  return session->prefill_tokens(tokens, nullptr, nullptr, std::move(report), &done);
}

bool is_cut(const Status& s, const std::string& path) {
  return s.code() == Code::corrupt && std::string(s.message()).find(path) != std::string::npos;
}

// Fails with the number of the line.
#define EXPECT(condition) \
  if (!(condition)) return __LINE__ % 200 + 1

}  // namespace

TEST_CASE("a model that is cut while it is in use is an error of the next step") {
  const TempFolder folder;
  const std::string path = folder.file("model.gguf");
  std::filesystem::copy_file(EXAMPLES "/mini-reader-q8_0.gguf", path);
  const auto tokens = book_tokens(400);
  CHECK(in_child([&] {
          std::shared_ptr<const Model> model;
          EXPECT(Model::open(path, "", &model).ok());
          std::unique_ptr<Session> session;
          EXPECT(Session::open(model, full(), &session).ok());
          EXPECT(append(session.get(), {tokens.data(), 300}).ok());
          std::filesystem::resize_file(path, 8192);
          EXPECT(is_cut(append(session.get(), {tokens.data() + 300, 100}), path));
          EXPECT(session->tokens().size() == 300);
          return 0;
        }) == 0);
}

TEST_CASE("a model that is cut within a span is an error of the next chunk") {
  const TempFolder folder;
  const std::string path = folder.file("model.gguf");
  std::filesystem::copy_file(EXAMPLES "/mini-reader-q8_0.gguf", path);
  const auto tokens = book_tokens(4000);
  CHECK(in_child([&] {
          std::shared_ptr<const Model> model;
          EXPECT(Model::open(path, "", &model).ok());
          std::unique_ptr<Session> session;
          EXPECT(Session::open(model, full(4000), &session).ok());
          bool cut = false;
          const auto cut_file = [&](uint64_t, uint64_t) {
            if (!cut) std::filesystem::resize_file(path, 8192);
            cut = true;
            return 0;
          };
          const Status s = append(session.get(), tokens, cut_file);
          EXPECT(cut);
          EXPECT(is_cut(s, path));
          EXPECT(session->tokens().empty());
          return 0;
        }) == 0);
}

// One document has pages and one has none: its tokens are in the window.
TEST_CASE("a document of several that is cut while it is mapped is an error of the next answer") {
  const TempFolder folder;
  const std::vector<std::string> saved = {folder.file("a.kv"), folder.file("b.kv")};
  const auto tokens = book_tokens(3000);
  for (const std::size_t i : {0u, 1u}) {
    auto session = open_session(mini_model(), full());
    read(session.get(), std::span(tokens).subspan(i > 0 ? 0 : 60, i > 0 ? 3000 : 40));
    REQUIRE(session->save(saved[i], nullptr, {}).ok());
  }
  for (const std::size_t cut : {0u, 1u}) {
    std::vector<std::string> paths;
    for (const std::string& path : saved) {
      paths.push_back(path + std::to_string(cut));
      std::filesystem::copy_file(path, paths.back());
    }
    const std::string& path = paths[cut];
    CHECK(in_child([&] {
            std::shared_ptr<const Model> model;
            EXPECT(Model::open(EXAMPLES "/mini-reader-q8_0.gguf", "", &model).ok());
            std::unique_ptr<Session> session;
            EXPECT(Session::compose(model, {.paths = paths}, full(), &session).ok());
            GenerateOptions o;
            o.max_tokens = 3;
            Answer answer;
            EXPECT(session->generate("What is it?", o, {}, &answer).ok());
            std::filesystem::resize_file(path, 4096);
            EXPECT(is_cut(session->generate("What is it?", o, {}, &answer), path));
            return 0;
          }) == 0);
  }
}

TEST_CASE("a cache file that is cut while it is mapped is an error of every call that reads it") {
  const TempFolder folder;
  const std::string path = folder.file("a.kv"), other = folder.file("b.kv");
  const auto tokens = book_tokens(3100);
  {
    auto session = open_session(mini_model(), full());
    read(session.get(), {tokens.data(), 3000});
    REQUIRE(session->save(path, nullptr, {}).ok());
  }
  CHECK(in_child([&] {
          std::shared_ptr<const Model> model;
          EXPECT(Model::open(EXAMPLES "/mini-reader-q8_0.gguf", "", &model).ok());
          std::unique_ptr<Session> session, fork;
          EXPECT(Session::load(model, path, full(), false, nullptr, {}, &session, 0).ok());
          EXPECT(append(session.get(), {tokens.data() + 3000, 50}).ok());
          std::filesystem::resize_file(path, 8192);
          EXPECT(is_cut(append(session.get(), {tokens.data() + 3050, 50}), path));
          EXPECT(is_cut(session->save(other, nullptr, {}), path));
          EXPECT(is_cut(session->rewind(100), path));
          EXPECT(is_cut(session->prepare(nullptr, {}), path));
          EXPECT(session->fork(&fork).ok());
          EXPECT(is_cut(append(fork.get(), {tokens.data() + 3050, 50}), path));
          EXPECT(session->tokens().size() == 3050);
          return 0;
        }) == 0);
}

#endif
