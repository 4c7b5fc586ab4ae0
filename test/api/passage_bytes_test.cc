// kv_passage: the bytes of the document that a passage spells.
#include <cstring>

#include "cachefile/cache_file.h"
#include "cachefile/section_rules.h"
#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

const std::string fact = " Größe: the access code of the north gate is 4821907. ";
const char question[] = "What is the access code of the north gate?";

std::string document() { return book(1500) + fact + book(2400).substr(1500); }

kv_session_options full_options(const char* instructions = nullptr) {
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.threads = 2;
  o.decode = strategy("full");
  o.instructions = instructions;
  return o;
}

std::vector<kv_passage> passages(kv_session* session) {
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.flags = KV_TRACE_PASSAGES;
  o.max_tokens = 8;
  REQUIRE_OK(kv_generate(session, question, std::strlen(question), &o, nullptr, nullptr, nullptr,
                         nullptr, error));
  kv_passage out[64];
  std::size_t count = 0;
  REQUIRE_OK(kv_session_passages(session, out, 64, &count, error));
  REQUIRE(count > 0);
  return {out, out + count};
}

std::string spelled(kv_model* model, kv_session* session, const kv_passage& p) {
  const std::vector<int32_t> tokens = sequence(session);
  std::string text(8192, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_detokenize(model, tokens.data() + p.first_token, p.tokens, 0, text.data(),
                           text.size(), &size, error));
  return text.substr(0, size);
}

// Each passage's bytes contain the text of its tokens, and not much more.
void check_bytes(kv_model* model, kv_session* session, const std::string& text) {
  for (const kv_passage& p : passages(session)) {
    REQUIRE(p.first_byte + p.bytes <= text.size());
    const std::string bytes = text.substr(p.first_byte, p.bytes);
    const std::string tokens = spelled(model, session, p);
    CHECK(bytes.find(tokens.substr(0, tokens.size() - std::min<std::size_t>(3, tokens.size()))) !=
          std::string::npos);
    CHECK(bytes.size() <= tokens.size() + 6);
    CHECK((static_cast<unsigned char>(bytes[0]) & 0xC0) != 0x80);  // whole characters
    if (p.first_byte + p.bytes < text.size())
      CHECK((static_cast<unsigned char>(text[p.first_byte + p.bytes]) & 0xC0) != 0x80);
  }
}

void check_unknown(kv_session* session) {
  for (const kv_passage& p : passages(session)) {
    CHECK(p.first_byte == UINT64_MAX);
    CHECK(p.bytes == 0);
    CHECK(p.tokens > 0);
  }
}

// The status of loading a copy of a cache file with these numbers as its section `spelling`.
kv_status load_with(const std::string& path, const std::string& copy,
                    const std::vector<uint64_t>& spelling, uint32_t version = 1) {
  std::shared_ptr<const kvasir::CacheFile> file;
  REQUIRE(kvasir::CacheFile::open(path, &file).ok());
  std::unique_ptr<kvasir::CacheWriter> writer;
  REQUIRE(kvasir::CacheWriter::create(copy, file->identity(), &writer).ok());
  const auto is_copied = [](const auto& section) {
    return section.kind != kvasir::format::SectionKind::spelling;
  };
  for (const auto& section : file->sections())
    if (is_copied(section))
      REQUIRE(writer->add_section(section.kind, section.version, section.bytes).ok());
  REQUIRE(writer
              ->add_section(kvasir::format::SectionKind::spelling, version,
                            spelling.size() * sizeof(uint64_t))
              .ok());
  REQUIRE(writer->begin().ok());
  for (const auto& section : file->sections()) {
    if (!is_copied(section) || section.bytes == 0) continue;
    std::vector<std::byte> bytes(section.bytes);
    REQUIRE(file->copy(section, 0, section.bytes, bytes.data()).ok());
    REQUIRE(writer->write(bytes.data(), bytes.size()).ok());
  }
  if (!spelling.empty())
    REQUIRE(writer->write(spelling.data(), spelling.size() * sizeof(uint64_t)).ok());
  REQUIRE(writer->finish().ok());
  kv_session* session = nullptr;
  const kv_status status = kv_load(tiny_model(), copy.c_str(), nullptr, nullptr, &session, nullptr);
  CHECK((session != nullptr) == (status == KV_OK));
  kv_session_close(session);
  return status;
}

}  // namespace

TEST_CASE("a passage has the bytes of the document that its tokens spell") {
  const TempFolder folder;
  const std::string text = document();
  for (const char* instructions : {static_cast<const char*>(nullptr), "Answer in a few words."}) {
    CAPTURE((instructions ? instructions : "no instructions"));
    const Session session = open_session(mini_model(), full_options(instructions));
    read_text(session.get(), text.substr(0, 1700));
    read_text(session.get(), text.substr(1700));  // one document in two calls
    check_bytes(mini_model(), session.get(), text);
    check_bytes(mini_model(), fork(session.get()).get(), text);
    const std::string path = folder.file(instructions ? "a.kv" : "b.kv");
    save(session.get(), path);
    check_bytes(mini_model(), load(mini_model(), path).get(), text);
  }
}

TEST_CASE("marks and instructions are no passage") {
  const std::string code = "The access code of the north gate is 4821907. ";
  const Session session =
      open_session(mini_model(), full_options((code + code + code + code).c_str()));
  read_text(session.get(), book(1200));
  for (const kv_passage& p : passages(session.get())) {
    CHECK(spelled(mini_model(), session.get(), p).find("code of the north") == std::string::npos);
    CHECK(p.first_byte + p.bytes <= 1200);
  }
  check_bytes(mini_model(), session.get(), book(1200));
}

TEST_CASE("a passage of tokens that come from no text has no bytes") {
  const Session text = open_session(mini_model(), full_options());
  read_text(text.get(), document());
  const Session session = open_session(mini_model(), full_options());
  read_tokens(session.get(), sequence(text.get()));
  check_unknown(session.get());
  read_text(session.get(), " More.");
  check_unknown(session.get());
}

TEST_CASE("a passage behind a token that the model chose has no bytes") {
  const Session session = open_session(mini_model(), full_options());
  read_text(session.get(), book(1000));
  const std::size_t before = sequence(session.get()).size();
  int32_t token = 0;
  REQUIRE_OK(kv_session_next(session.get(), nullptr, nullptr, &token, nullptr, error));
  read_text(session.get(), fact + book(600));
  std::size_t behind = 0;
  for (const kv_passage& p : passages(session.get())) {
    CHECK((p.first_byte == UINT64_MAX) == (p.first_token + p.tokens > before));
    behind += p.first_token + p.tokens > before ? 1u : 0u;
  }
  CHECK(behind > 0);
  REQUIRE_OK(kv_session_rewind(session.get(), before, error));
  read_text(session.get(), fact + book(600));
  check_bytes(mini_model(), session.get(), book(1000) + fact + book(600));
}

TEST_CASE("passages have their bytes after a rewind from within the instructions") {
  const Session session = open_session(mini_model(), full_options("Answer in a few words."));
  read_text(session.get(), document());
  REQUIRE_OK(kv_session_rewind(session.get(), 3, error));
  CHECK(kv_prefill(session.get(), "a", 1, nullptr, nullptr, nullptr, nullptr) == KV_BAD_STATE);
  REQUIRE_OK(kv_session_rewind(session.get(), 0, error));
  read_text(session.get(), document());
  check_bytes(mini_model(), session.get(), document());
}

TEST_CASE("instructions alone have no passage") {
  const std::string code = fact + fact + fact + fact;
  const Session session = open_session(mini_model(), full_options(code.c_str()));
  read_text(session.get(), "");
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.flags = KV_TRACE_PASSAGES;
  o.max_tokens = 2;
  REQUIRE_OK(kv_generate(session.get(), question, std::strlen(question), &o, nullptr, nullptr,
                         nullptr, nullptr, error));
  kv_passage out[64];
  std::size_t count = 7;
  REQUIRE_OK(kv_session_passages(session.get(), out, 64, &count, error));
  CHECK(count == 0);
}

TEST_CASE("a spelling that cannot be is refused by kv_load") {
  const TempFolder folder;
  const Session session = open_session(tiny_model());
  read_text(session.get(), book(400));
  const uint64_t tokens = sequence(session.get()).size();
  const std::string path = folder.file("a.kv"), copy = folder.file("b.kv");
  save(session.get(), path);
  for (const std::vector<uint64_t>& good :
       {std::vector<uint64_t>{}, {0, 5}, {1, UINT32_MAX, tokens - 1, 0}, {3, UINT64_MAX}})
    CHECK(load_with(path, copy, good) == KV_OK);
  for (const std::vector<uint64_t>& wrong :
       {std::vector<uint64_t>{0, 1, 2},
        {1, 2, 1, 2},
        {2, 2, 1, 2},
        {tokens, 1},
        {UINT64_MAX, 1},
        {0, UINT64_MAX, 1, 2},
        {0, uint64_t{1} << 32},
        std::vector<uint64_t>((kvasir::max_spelling_pairs + 1) * 2)}) {
    CAPTURE(wrong.size());
    CHECK(load_with(path, copy, wrong) == KV_CORRUPT);
  }
  CHECK(load_with(path, copy, {0, 5}, 2) == KV_VERSION);
}
