// Sessions over several documents in a file, which refers to the documents.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>

#include "cachefile/format_fields.h"
#include "helpers.h"
#include "os/paths.h"
#include "sequence_helpers.h"
#include "session/saved_documents.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;
using format::SectionKind;

namespace {

SessionOptions options_of(const char* strategy = "bounded", uint64_t memory = 0) {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = strategy;
  o.memory.bytes = memory;
  return o;
}

std::string text_of(std::size_t i) {
  constexpr std::size_t bytes = 6000;
  const std::string book = book_text(100000 + 4 * bytes);
  const std::size_t at = 80000 + i * bytes;
  return book.substr(at, bytes / 2) + "\nThe code of gate " + std::to_string(i) + " is 55" +
         std::to_string(i) + "0914.\n" + book.substr(at + bytes / 2, bytes / 2) + "\n";
}
std::string question_of(std::size_t i) {
  return "What is the code of gate " + std::to_string(i) + "?";
}

void make(const std::string& path, std::size_t i, const SessionOptions& options = options_of()) {
  auto session = open_session(mini_model(), options);
  uint64_t tokens = 0, bytes = 0;
  REQUIRE(session->prefill(text_of(i), false, nullptr, {}, &tokens, &bytes).ok());
  REQUIRE(session->save(path, nullptr, {}).ok());
}

// Documents in a folder of their own, and a session over them in another one.
struct Saved {
  TempFolder folder;
  std::vector<std::string> paths;
  std::string path = folder.file("asked/chat.kv");

  explicit Saved(std::size_t count = 3) {
    std::filesystem::create_directory(folder.file("docs"));
    std::filesystem::create_directory(folder.file("asked"));
    for (std::size_t i = 0; i < count; ++i) {
      paths.push_back(folder.file("docs/" + std::to_string(i) + ".kv"));
      std::filesystem::copy_file(made(i), paths.back());
    }
  }
  // Each document is made once.
  static const std::string& made(std::size_t i) {
    static const TempFolder all;
    static std::vector<std::string> files;
    for (std::size_t k = files.size(); k <= i; ++k) {
      files.push_back(all.file(std::to_string(k)));
      make(files.back(), k);
    }
    return files[i];
  }
  std::unique_ptr<Session> compose(const SessionOptions& options = options_of(),
                                   uint32_t most = 0) const {
    std::unique_ptr<Session> session;
    const Status s =
        Session::compose(mini_model(), {.paths = paths, .most = most}, options, &session);
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
    return session;
  }
};

Status load(const std::string& path, std::unique_ptr<Session>* out,
            const SessionOptions& options = options_of(), bool verify = false) {
  return Session::load(mini_model(), path, options, verify, nullptr, {}, out);
}
void refused(const std::string& path, Code code, const std::string& what,
             const SessionOptions& options = options_of(), bool verify = false) {
  std::unique_ptr<Session> session;
  const Status s = load(path, &session, options, verify);
  CHECK(s.code() == code);
  CHECK_MESSAGE(std::string(s.message()).find(what) != std::string::npos, s.message());
  CHECK(!session);
}

GenerateOptions answering(bool keep, uint32_t tokens = 12) {
  GenerateOptions o;
  o.keep = keep;
  o.max_tokens = tokens;
  return o;
}

std::vector<float> scores_of(Session* session, std::span<const Token> tokens) {
  std::vector<float> out(tokens.size());
  const Status s = session->score(tokens, out.data(), nullptr, {});
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return out;
}

}  // namespace

TEST_CASE("a session over documents goes on from its file, bit for bit") {
  for (const bool asked : {false, true})
    for (const uint32_t most : {0u, 1u}) {
      CAPTURE(asked);
      CAPTURE(most);
      const Saved saved;
      auto session = saved.compose(options_of(), most);
      const std::vector<uint32_t> two = {0, 2};
      if (most == 1) REQUIRE(session->set_candidates(two).ok());
      if (asked) ask(session.get(), question_of(2), answering(true));
      if (asked) ask(session.get(), question_of(0), answering(true, 90));  // seals a page
      REQUIRE(session->save(saved.path, nullptr, {}).ok());
      CHECK(std::filesystem::file_size(saved.path) < (asked ? 5'000'000u : 300'000u));
      std::unique_ptr<Session> loaded;
      const Status s = load(saved.path, &loaded);
      REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
      CHECK(std::equal(session->tokens().begin(), session->tokens().end(), loaded->tokens().begin(),
                       loaded->tokens().end()));
      for (std::size_t i = 0; i < 3; ++i) {
        const DocumentReport a = session->documents()[i], b = loaded->documents()[i];
        CHECK(a.tokens == b.tokens);
        CHECK(a.is_candidate == b.is_candidate);
        CHECK(a.is_chosen == b.is_chosen);
        CHECK(a.score == b.score);
        CHECK(std::string(b.path) == saved.paths[i]);
      }
      if (asked)
        CHECK(scores_of(session.get(), book_tokens(9)) == scores_of(loaded.get(), book_tokens(9)));
      for (const std::size_t i : {std::size_t{1}, std::size_t{2}})
        CHECK(ask(session.get(), question_of(i), answering(true)) ==
              ask(loaded.get(), question_of(i), answering(true)));
      REQUIRE(loaded->rewind(0).ok());
      REQUIRE(session->rewind(0).ok());
      CHECK(ask(session.get(), question_of(0), answering(false)) ==
            ask(loaded.get(), question_of(0), answering(false)));
      // and once more, from the loaded one
      REQUIRE(loaded->save(saved.path, nullptr, {}).ok());
      CHECK(load(saved.path, &session).ok());
    }
}

TEST_CASE("a document of a saved session that is missing or has changed is named") {
  const Saved saved;
  REQUIRE(saved.compose()->save(saved.path, nullptr, {}).ok());
  std::unique_ptr<Session> session;
  const std::string aside = saved.folder.file("aside");
  std::filesystem::rename(saved.paths[1], aside);
  refused(saved.path, Code::not_found, "document 2, " + saved.paths[1] + ", which is missing");
  make(saved.paths[1], 1, options_of("full"));
  CHECK(load(saved.path, &session).ok());  // the same file, prefilled again
  make(saved.paths[1], 2);
  refused(saved.path, Code::model_mismatch,
          "document 2, " + saved.paths[1] + ", which has changed");
  write_file(saved.paths[1], std::vector<uint8_t>(100));
  refused(saved.path, Code::model_mismatch, "has changed");
  std::filesystem::rename(aside, saved.paths[1]);
  CHECK(load(saved.path, &session).ok());
  // both folders may move together, and the file alone may not
  std::filesystem::create_directory(saved.folder.file("moved"));
  std::filesystem::rename(saved.folder.file("docs"), saved.folder.file("moved/docs"));
  std::filesystem::rename(saved.folder.file("asked"), saved.folder.file("moved/asked"));
  CHECK(load(saved.folder.file("moved/asked/chat.kv"), &session).ok());
  std::filesystem::rename(saved.folder.file("moved/asked/chat.kv"), saved.folder.file("alone.kv"));
  refused(saved.folder.file("alone.kv"), Code::not_found, "docs/0.kv, which is missing");
}

TEST_CASE("a damaged document of a saved session is found where all is verified, or when read") {
  const Saved saved;
  REQUIRE(saved.compose()->save(saved.path, nullptr, {}).ok());
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(saved.paths[2], &file).ok());
  const uint64_t at = file->find(SectionKind::pages)->offset + 5 * 4096 + 7;
  file.reset();
  std::FILE* out = std::fopen(saved.paths[2].c_str(), "r+b");
  REQUIRE(out);
  std::fseek(out, static_cast<long>(at), SEEK_SET);
  std::fputc(0x5a, out);
  std::fclose(out);
  std::unique_ptr<Session> session;
  CHECK(load(saved.path, &session).ok());
  refused(saved.path, Code::corrupt, "2.kv", options_of(), true);
}

TEST_CASE("a saved session over documents is no document, and has no prefix to load") {
  const Saved saved;
  auto session = saved.compose();
  ask(session.get(), question_of(1), answering(true));
  REQUIRE(session->save(saved.path, nullptr, {}).ok());
  const std::vector<std::string> paths = {saved.paths[0], saved.path};
  std::unique_ptr<Session> none;
  Status s = Session::compose(mini_model(), {.paths = paths}, options_of(), &none);
  CHECK(s.code() == Code::bad_argument);
  CHECK_MESSAGE(std::string(s.message()).find("over 3 documents") != std::string::npos,
                s.message());
  s = Session::load(mini_model(), saved.path, options_of(), false, nullptr, {}, &none, 3);
  CHECK(s.code() == Code::unsupported);
  CHECK(!none);
  // nor does it take the place of one
  s = session->save(saved.paths[1], nullptr, {});
  CHECK(s.code() == Code::bad_argument);
  CHECK_MESSAGE(
      std::string(s.message()).find("one of the session's documents") != std::string::npos,
      s.message());
  CHECK(load(saved.path, &none).ok());
  // its options are checked as those of a composition
  SessionOptions options = options_of("snapkv");
  refused(saved.path, Code::unsupported, "snapkv", options);
  options = options_of();
  options.instructions = "Answer in one word.";
  refused(saved.path, Code::model_mismatch, "instructions", options);
  options = options_of();
  options.context = session->tokens().size() + 100;
  refused(saved.path, Code::context_full, "context", options);
}

TEST_CASE("a saved session over documents keeps within a memory limit") {
  const Saved saved;
  auto session = saved.compose();
  ask(session.get(), question_of(1), answering(true, 90));
  REQUIRE(session->save(saved.path, nullptr, {}).ok());
  refused(saved.path, Code::limit, "3 documents", options_of("bounded", 1 << 20));
  const uint64_t bytes = uint64_t{33} << 20;
  std::unique_ptr<Session> limited;
  REQUIRE(load(saved.path, &limited, options_of("bounded", bytes)).ok());
  CHECK(ask(limited.get(), question_of(0), answering(false)) ==
        ask(session.get(), question_of(0), answering(false)));
  CHECK(limited->stats().memory_limit == bytes);
  CHECK(limited->stats().private_bytes < bytes);
  // a sequence in full precision stays in memory, as one that is composed
  SessionOptions exact = options_of("full");
  exact.full_precision = true;
  session = saved.compose(exact);
  ask(session.get(), question_of(1), answering(true));
  REQUIRE(session->save(saved.path, nullptr, {}).ok());
  refused(saved.path, Code::bad_argument, "full precision", options_of("full", bytes));
  exact.memory.bytes = bytes;
  std::unique_ptr<Session> none;
  CHECK(Session::compose(mini_model(), {.paths = saved.paths}, exact, &none).code() ==
        Code::bad_argument);
}

TEST_CASE("a composition answers while its documents come, go and change") {
  const Saved saved;
  auto session = saved.compose();
  const std::string first = ask(session.get(), question_of(1), answering(false));
  std::filesystem::remove(saved.paths[1]);
  make(saved.paths[2], 0);
  CHECK(ask(session.get(), question_of(1), answering(false)) == first);
  // it is saved with what it maps, so that a document that is gone is missed at the load
  REQUIRE(session->save(saved.path, nullptr, {}).ok());
  refused(saved.path, Code::not_found, "document 2");
}

TEST_CASE("documents of a composition come and go between questions") {
  const Saved saved(4);
  const std::vector<std::string> first = {saved.paths[0], saved.paths[1]},
                                 second = {saved.paths[1], saved.paths[3], saved.paths[2]},
                                 one = {saved.paths[2]};
  std::unique_ptr<Session> session;
  REQUIRE(Session::compose(mini_model(), {.paths = first}, options_of(), &session).ok());
  const auto knows = [&](std::size_t i) {
    return ask(session.get(), question_of(i), answering(false, 24))
               .find("55" + std::to_string(i) + "0914") != std::string::npos;
  };
  CHECK(knows(0));
  CHECK(!knows(3));
  ask(session.get(), question_of(1), answering(true, 24));
  const std::vector<Token> said(session->tokens().begin(), session->tokens().end());
  std::unique_ptr<Session> fork;
  REQUIRE(session->fork(&fork).ok());
  const std::vector<float> before = scores_of(fork.get(), book_tokens(9));
  REQUIRE(session->replace_documents(second, nullptr).ok());
  CHECK(std::equal(said.begin(), said.end(), session->tokens().begin(), session->tokens().end()));
  REQUIRE(session->documents().size() == 3);
  CHECK(std::string(session->documents()[1].path) == saved.paths[3]);
  CHECK(session->documents()[0].is_chosen);  // it was there, and was attended
  CHECK(!session->documents()[1].is_chosen);
  CHECK(knows(3));
  CHECK(!knows(0));
  CHECK(scores_of(fork.get(), book_tokens(9)) == before);  // forks keep theirs
  // as a session that was composed of these from the beginning, but for the conversation
  REQUIRE(session->rewind(0).ok());
  std::unique_ptr<Session> fresh;
  REQUIRE(Session::compose(mini_model(), {.paths = second}, options_of(), &fresh).ok());
  CHECK(ask(session.get(), question_of(3), answering(false)) ==
        ask(fresh.get(), question_of(3), answering(false)));
  // what cannot be used changes nothing
  ask(session.get(), question_of(3), answering(true));
  const std::vector<float> scores = scores_of(session.get(), book_tokens(9));
  const auto unchanged = [&](std::span<const std::string> paths, Code code,
                             const Cancel* cancel = nullptr) {
    CHECK(session->replace_documents(paths, cancel).code() == code);
    CHECK(session->documents().size() == 3);
    CHECK(scores_of(session.get(), book_tokens(9)) == scores);
  };
  SessionOptions instructed = options_of();
  instructed.instructions = "Answer in one word.";
  make(saved.folder.file("instructed.kv"), 1, instructed);
  unchanged({}, Code::bad_argument);
  unchanged(std::vector<std::string>{saved.paths[0], saved.folder.file("none")}, Code::not_found);
  unchanged(std::vector<std::string>{saved.folder.file("instructed.kv")}, Code::model_mismatch);
  Cancel cancel;
  cancel.fire();
  unchanged(first, Code::cancelled, &cancel);
  // one is enough, and the session is saved with it
  REQUIRE(session->replace_documents(one, nullptr).ok());
  CHECK(session->documents()[0].is_chosen);
  REQUIRE(session->save(saved.path, nullptr, {}).ok());
  REQUIRE(load(saved.path, &fresh).ok());
  CHECK(ask(fresh.get(), question_of(2), answering(false)) ==
        ask(session.get(), question_of(2), answering(false)));
  auto alone = load_session(saved.paths[0], options_of());
  CHECK(alone->replace_documents(first, nullptr).code() == Code::bad_state);
}

TEST_CASE("documents that come keep within the session's memory limit") {
  const Saved saved(3);
  const std::vector<std::string> two = {saved.paths[0], saved.paths[1]};
  std::unique_ptr<Session> session;
  const uint64_t bytes = uint64_t{26} << 20;
  REQUIRE(
      Session::compose(mini_model(), {.paths = two}, options_of("bounded", bytes), &session).ok());
  const Status s = session->replace_documents(saved.paths, nullptr);
  if (s.ok()) ask(session.get(), question_of(2), answering(false));
  else CHECK(s.code() == Code::limit);
  CHECK(session->stats().private_bytes < bytes);
  ask(session.get(), question_of(1), answering(false));
  CHECK(session->stats().private_bytes < bytes);
}

TEST_CASE("every field of a file's documents that lies is refused by name") {
  const Saved saved(2);
  auto session = saved.compose(options_of(), 1);
  ask(session.get(), question_of(1), answering(true));
  REQUIRE(session->save(saved.path, nullptr, {}).ok());
  const std::string lied = saved.folder.file("asked/lied.kv");
  const auto lie = [&](Code code, const char* what,
                       const std::function<void(std::vector<std::byte>*)>& edit) {
    rewrite_section(saved.path, lied, SectionKind::documents,
                    [&](std::vector<std::byte>* bytes, uint32_t*) { edit(bytes); });
    refused(lied, code, what);
  };
  lie(Code::corrupt, "'documents' is too short", [](auto* b) { b->resize(8); });
  lie(Code::corrupt, "'documents' is too short", [](auto* b) { b->clear(); });
  lie(Code::corrupt, "bytes after its paths", [](auto* b) { b->push_back(std::byte{'x'}); });
  lie(Code::corrupt, "impossible size", [](auto* b) { b->pop_back(); });
  const auto number = [&](uint64_t at, auto value, Code code, const char* what) {
    CAPTURE(at);
    lie(code, what, [&](auto* b) { std::memcpy(b->data() + at, &value, sizeof value); });
  };
  using format::documents_at;
  for (const uint32_t count : {0u, 3u, 1u << 28, UINT32_MAX})
    number(documents_at("documents"), count, Code::corrupt, "number of documents");
  number(documents_at("documents"), 1u, Code::corrupt, "");
  number(documents_at("scores"), 2u, Code::corrupt, "unknown flag");
  number(documents_at("scores"), 0u, Code::corrupt, "score");
  number(documents_at("reserved"), 1u, Code::corrupt, "unknown flag");
  number(documents_at("checksum"), uint64_t{1}, Code::model_mismatch, "document 1");
  number(documents_at("file size"), uint64_t{1}, Code::model_mismatch, "document 1");
  number(documents_at("tokens"), uint64_t{0}, Code::corrupt, "without tokens");
  number(documents_at("tokens"), uint64_t{7}, Code::model_mismatch, "document 1");
  for (const uint32_t size : {0u, 1001u, UINT32_MAX})
    number(documents_at("path bytes"), size, Code::corrupt, "impossible size");
  number(documents_at("path bytes"), 3u, Code::corrupt, "");
  number(documents_at("flags"), 4u, Code::corrupt, "unknown flag");
  number(documents_at("reserved entry"), 1u, Code::corrupt, "unknown flag");
  for (const float score : {-1.0f, -0.5f, 1.5f, NAN, INFINITY})
    number(documents_at("score"), score, Code::corrupt, "score");
  const uint64_t second = format::document_entry_bytes, flags = documents_at("flags"),
                 paths = format::documents_head_bytes + 2 * format::document_entry_bytes;
  const auto set = [](auto* b, uint64_t at, auto value) {
    std::memcpy(b->data() + at, &value, sizeof value);
  };
  lie(Code::corrupt, "no document that the sequence attends",
      [&](auto* b) { set(b, flags, 1u), set(b, flags + second, 1u); });
  lie(Code::corrupt, "no candidate", [&](auto* b) {
    for (const uint64_t at : {uint64_t{0}, second})
      set(b, flags + at, 2u), set(b, documents_at("score") + at, -1.0f);
  });
  for (const char c : {'/', '\n', '\0', '\x7f'})
    lie(Code::corrupt, "a path that", [&](auto* b) { set(b, paths, c); });
  lie(Code::not_found, "document 1", [&](auto* b) { set(b, paths + 3, 'x'); });
  // of another version, and the state section of a text
  rewrite_section(saved.path, lied, SectionKind::documents,
                  [](std::vector<std::byte>*, uint32_t* version) { *version = 2; });
  refused(lied, Code::version, "'documents'");
  rewrite_section(saved.path, lied, SectionKind::state, [](std::vector<std::byte>* b, uint32_t*) {
    const uint32_t turn = 2;
    std::memcpy(b->data(), &turn, sizeof turn);
  });
  refused(lied, Code::corrupt, "a text after documents");
}

TEST_CASE("a path leads from a file to another and back") {
  using os::path_from, os::relative_path;
  CHECK(relative_path("/a/b/c.kv", "/a/b/d.kv") == "d.kv");
  CHECK(relative_path("/a/b/c.kv", "/a/x/d.kv") == "../x/d.kv");
  CHECK(relative_path("/a//b/./c.kv", "/a/q/../b/e/d.kv") == "e/d.kv");
  CHECK(relative_path("/c.kv", "/x/y/d.kv") == "x/y/d.kv");
  CHECK(path_from("/a/b/c.kv", "../x/d.kv") == "/a/x/d.kv");
  CHECK(path_from("/a/b/c.kv", "d.kv") == "/a/b/d.kv");
  CHECK(path_from("/c.kv", "../../d.kv") == "/d.kv");
  constexpr os::PathRules posix = os::PathRules::posix;
  CHECK(relative_path("//a/b/c.kv", "/a/d.kv", posix) == "../d.kv");  // one root
  CHECK(relative_path("a/c.kv", "/a/d.kv", posix).empty());
  CHECK(path_from("/a/c.kv", "/b/d.kv", posix).empty());
  CHECK(path_from("/a/c.kv", "C:/d.kv", posix) == "/a/C:/d.kv");
}

TEST_CASE("a path on Windows leads from a file to another and back, on its drive or share") {
  constexpr os::PathRules windows = os::PathRules::windows;
  const auto leads = [](const char* file, const char* to) {
    return os::relative_path(file, to, windows);
  };
  const auto from = [](const char* file, const char* relative) {
    return os::path_from(file, relative, windows);
  };
  CHECK(leads("C:\\a\\b\\c.kv", "C:\\a\\x\\d.kv") == "../x/d.kv");
  CHECK(leads("C:\\a\\c.kv", "c:/a/d.kv") == "d.kv");
  CHECK(leads("C:\\a\\c.kv", "D:\\a\\d.kv").empty());
  CHECK(leads("\\\\?\\C:\\a\\c.kv", "C:\\a\\d.kv") == "d.kv");  // as long paths begin
  CHECK(leads("\\\\nas\\docs\\a\\c.kv", "\\\\?\\UNC\\nas\\docs\\d.kv") == "../d.kv");
  CHECK(leads("\\\\nas\\docs\\c.kv", "\\\\nas\\other\\d.kv").empty());
  CHECK(leads("\\\\nas\\docs\\c.kv", "C:\\nas\\docs\\d.kv").empty());
  CHECK(from("C:\\a\\b\\c.kv", "../x/d.kv") == "C:/a/x/d.kv");
  CHECK(from("C:\\c.kv", "../../d.kv") == "C:/d.kv");
  CHECK(from("\\\\nas\\docs\\c.kv", "../../d.kv") == "//nas/docs/d.kv");
  CHECK(from("\\\\?\\UNC\\nas\\docs\\a\\c.kv", "d.kv") == "//nas/docs/a/d.kv");
  for (const char* absolute : {"D:/d.kv", "D:d.kv", "a/D:/d.kv", "/d.kv", "\\d.kv",
                               "//nas/docs/d.kv", "\\\\nas\\docs\\d.kv", "d.kv:stream"})
    CHECK(from("C:\\a\\c.kv", absolute).empty());
}
