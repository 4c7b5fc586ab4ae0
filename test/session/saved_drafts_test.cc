// What the MTP layer keeps, in cache files: drafts go on after a load as without it, and a file
// that lies is refused by name.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cachefile/format_fields.h"
#include "sequence_helpers.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;
using format::drafts_at;
using format::SectionKind;

namespace {

SessionOptions drafting(bool full_precision = false) {
  SessionOptions options;
  options.draft_tokens = 2;
  options.lookup_tokens = 0;
  options.drafts_always = true;
  options.full_precision = full_precision;
  return options;
}

struct Drafted {
  std::vector<Token> tokens;
  uint64_t drafted = 0, accepted = 0, first = 0;
  bool operator==(const Drafted&) const = default;
};

Drafted answer_of(Session* session) {
  GenerateOptions options;
  options.max_tokens = 60;
  options.keep = true;
  Answer answer;
  const Status s = session->generate(
      "", options, [](std::string_view) { return 0; }, &answer);
  REQUIRE_MESSAGE(s.ok(), s.message());
  const SessionStats stats = session->stats();
  return {{session->tokens().begin(), session->tokens().end()},
          stats.drafts.drafted,
          stats.drafts.accepted,
          stats.drafts_first};
}

Status load(const std::string& name, const std::string& path, const SessionOptions& options,
            std::unique_ptr<Session>* out) {
  return Session::load(fixture(name), path, options, false, nullptr, {}, out);
}

std::vector<std::byte> section_of(const std::string& path, SectionKind kind) {
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  const auto bytes = file->bytes(kind);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

TEST_CASE("a loaded sequence drafts as the one that was saved") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), again = folder.file("b.kv");
  for (const char* name : {"qwen35-mtp", "glm4moe-mtp"})
    for (const std::size_t tokens : {2u, 60u, 150u, 1500u})
      for (const bool full_precision : {false, true}) {
        CAPTURE(name);
        CAPTURE(tokens);
        CAPTURE(full_precision);
        const SessionOptions options = drafting(full_precision);
        const auto session = fresh(name, tokens, options);
        save(session.get(), path);
        const auto other = loaded(name, path, 0, options);
        CHECK(other->stats().drafts_first == 1);
        save(other.get(), again);
        for (const SectionKind kind :
             {SectionKind::drafts, SectionKind::drafts_pages, SectionKind::drafts_scales})
          CHECK(section_of(path, kind) == section_of(again, kind));
        const auto fork = fork_of(*other);
        const Drafted expected = answer_of(session.get());
        CHECK(expected.drafted > 0);
        CHECK(answer_of(other.get()) == expected);
        CHECK(answer_of(fork.get()) == expected);
        // also in the middle of the answer
        save(session.get(), path);
        const auto third = loaded(name, path, 0, options);
        CHECK(answer_of(third.get()) == answer_of(session.get()));
      }
}

TEST_CASE("a prefix of a file, and a rewound one, keep the rows of their tokens") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), again = folder.file("b.kv");
  for (const char* name : {"qwen35-mtp", "glm4moe-mtp"}) {
    CAPTURE(name);
    save(fresh(name, 1500, drafting()).get(), path);
    for (const uint64_t kept : {1u, 5u, 700u, 1400u, 1499u}) {
      CAPTURE(kept);
      const auto prefix = loaded(name, path, kept, drafting());
      const auto rewound = loaded(name, path, 0, drafting());
      REQUIRE(rewound->rewind(kept).ok());
      for (Session* session : {prefix.get(), rewound.get()}) {
        save(session, again);
        const auto other = loaded(name, again, 0, drafting());
        CHECK(other->tokens().size() == kept);
        CHECK(other->stats().drafts_first == 1);
        const Drafted expected = answer_of(session);
        CHECK(answer_of(other.get()) == expected);
        if (expected.tokens.size() > kept + 8) CHECK(expected.drafted > 0);
      }
    }
  }
}

TEST_CASE("a file without rows of the MTP layer is loaded, and says so") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), other = folder.file("b.kv");
  save(fresh("qwen35-mtp", 200).get(), path);
  CHECK(section_of(path, SectionKind::drafts).empty());
  const auto without = [&](const std::string& file) {
    std::string log;
    SessionOptions options = drafting();
    options.log = [&](int, const char* line) { log += line; };
    std::unique_ptr<Session> session;
    const Status s = load("qwen35-mtp", file, options, &session);
    REQUIRE_MESSAGE(s.ok(), s.message());
    CHECK(session->stats().drafts_first == 200);
    CHECK_MESSAGE(log.find("MTP layer") != std::string::npos, log);
    CHECK(answer_of(session.get()).tokens == answer_of(fresh("qwen35-mtp", 200).get()).tokens);
  };
  without(path);
  // Of a later version of one of the sections.
  save(fresh("qwen35-mtp", 200, drafting()).get(), path);
  for (const SectionKind kind :
       {SectionKind::drafts, SectionKind::drafts_pages, SectionKind::drafts_scales}) {
    rewrite_section(path, other, kind,
                    [](std::vector<std::byte>*, uint32_t* version) { *version = 2; });
    without(other);
  }
  // A session that does not draft does not read them.
  rewrite_section(path, other, SectionKind::drafts,
                  [](std::vector<std::byte>* bytes, uint32_t*) { bytes->resize(3); });
  CHECK(loaded("qwen35-mtp", other)->stats().draft_tokens == 0);
}

TEST_CASE("rows of an MTP layer that contradict the file are refused by name") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), damaged = folder.file("b.kv");
  save(fresh("qwen35-mtp", 1500, drafting()).get(), path);
  const auto refused = [&](SectionKind kind, const char* section, const char* why,
                           const std::function<void(std::vector<std::byte>*)>& edit) {
    rewrite_section(path, damaged, kind,
                    [&](std::vector<std::byte>* bytes, uint32_t*) { edit(bytes); });
    std::unique_ptr<Session> session;
    const Status s = load("qwen35-mtp", damaged, drafting(), &session);
    CHECK(s.code() == Code::corrupt);
    CHECK_MESSAGE(std::string(s.message()).find(section) != std::string::npos, s.message());
    CHECK_MESSAGE(std::string(s.message()).find(why) != std::string::npos, s.message());
    CHECK(!session);
  };
  const auto number = [&](uint64_t at, uint32_t value, const char* why) {
    CAPTURE(at);
    refused(SectionKind::drafts, "'drafts'", why, [&](std::vector<std::byte>* bytes) {
      std::memcpy(bytes->data() + at, &value, sizeof value);
    });
  };
  number(drafts_at("first token"), 0, "other tokens");
  number(drafts_at("first token"), 2, "other tokens");
  number(drafts_at("first token") + 4, 1, "other tokens");
  number(drafts_at("pages"), 3, "other tokens");
  number(drafts_at("window count"), 1u << 30, "other tokens");
  number(drafts_at("kv heads"), 7, "another shape");
  number(drafts_at("head dim"), 8, "another shape");
  number(drafts_at("width"), 1u << 31, "width");
  number(drafts_at("parts"), 8, "unknown parts");
  number(drafts_at("parts"), 4, "without a centre");
  number(drafts_at("parts"), 3, "width");
  number(drafts_at("reserved"), 1, "reserved");
  for (const SectionKind kind :
       {SectionKind::drafts, SectionKind::drafts_pages, SectionKind::drafts_scales})
    for (const std::size_t less : {std::size_t{1}, SIZE_MAX})
      refused(kind, format::name_of(kind), "", [&](std::vector<std::byte>* bytes) {
        bytes->resize(bytes->size() - std::min(bytes->size(), less));
      });
  // Not finite: in the centre, the sinks, the window, the hidden state, and in a page's scales.
  const std::size_t size = section_of(path, SectionKind::drafts).size();
  for (const std::size_t at :
       {std::size_t{format::drafts_head_bytes}, size / 3, size / 2, size - 4})
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()})
      refused(SectionKind::drafts, "'drafts'", "not finite", [&](std::vector<std::byte>* bytes) {
        std::memcpy(bytes->data() + at / 4 * 4, &value, sizeof value);
      });
  refused(SectionKind::drafts_scales, "'drafts-scales'", "not finite",
          [](std::vector<std::byte>* bytes) {
            const uint16_t nan = 0x7fc0;
            std::memcpy(bytes->data() + 130, &nan, sizeof nan);
          });
}

TEST_CASE("a damaged page of the MTP layer is an error of the answer that reads it") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  save(fresh("qwen35-mtp", 1500, drafting()).get(), path);
  {
    std::shared_ptr<const CacheFile> file;
    REQUIRE(CacheFile::open(path, &file).ok());
    const uint64_t at = file->find(SectionKind::drafts_pages)->offset + 5 * 4096 + 7;
    file.reset();
    std::FILE* out = std::fopen(path.c_str(), "r+b");
    REQUIRE(out);
    std::fseek(out, static_cast<long>(at), SEEK_SET);
    std::fputc(0x5a, out);
    std::fclose(out);
  }
  std::unique_ptr<Session> session;
  CHECK(load("qwen35-mtp", path, drafting(), &session).ok());
  Answer answer;
  const Status s = session->generate(
      "", {}, [](std::string_view) { return 0; }, &answer);
  CHECK(s.code() == Code::corrupt);
  CHECK_MESSAGE(std::string(s.message()).find("drafts-pages") != std::string::npos, s.message());
  CHECK(session->tokens().size() == 1500);
  // Without drafts the same file answers.
  REQUIRE(load("qwen35-mtp", path, {}, &session).ok());
  CHECK(answer_of(session.get()).drafted == 0);
}
