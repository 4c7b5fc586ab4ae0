// Cache files that are cut, have flipped bits or are other files: a clear code, and nothing is
// loaded. Damage that is found later ends the call with KV_CORRUPT and leaves the session as it
// was. Never a crash, never an answer from damaged bytes.
#include <fstream>
#include <set>

#include "fault_count.h"
#include "helpers.h"
#include "store/cache_samples.h"
#include "temp_folder.h"

using namespace api_test;
using kvasir::format::SectionKind;

namespace {

// A saved sequence of 642 tokens: 18 sealed pages of 32, so that the second extent is not full, and
// 66 tokens in the window, so that a short question seals none.
class Saved {
 public:
  Saved() : path_(folder_.file("a.kv")), session_(tiny_session(642)) {
    save(session_.get(), path_);
    bytes_ = read_file(path_);
  }
  const std::string& path() const { return path_; }
  const std::vector<uint8_t>& bytes() const { return bytes_; }
  kv_session* session() const { return session_.get(); }

  struct Place {
    uint64_t offset, size;
  };
  Place section(SectionKind kind) const {
    const uint64_t count = samples::get(bytes_, kvasir::format::header_at("section count"), 4);
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t entry =
          kvasir::format::header_at("sections") + i * kvasir::format::entry_bytes;
      if (samples::get(bytes_, entry, 4) == static_cast<uint32_t>(kind))
        return {samples::get(bytes_, entry + kvasir::format::entry_at("offset"), 8),
                samples::get(bytes_, entry + kvasir::format::entry_at("size"), 8)};
    }
    FAIL("no such section");
    return {};
  }
  // Writes the file with one byte changed.
  void flip(uint64_t at, uint8_t mask = 0x10) const {
    std::vector<uint8_t> damaged = bytes_;
    damaged[at] ^= mask;
    write_file(path_, damaged);
  }

 private:
  TempFolder folder_;
  std::string path_;
  Session session_;
  std::vector<uint8_t> bytes_;
};

kv_status try_load(const std::string& path, uint32_t flags = 0, kv_session** out = nullptr,
                   kv_error* error = nullptr) {
  kv_control call;
  kv_init(&call, sizeof call);
  call.flags = flags;
  kv_session* session = nullptr;
  const kv_session_options o = small_options();
  const kv_status s = kv_load(tiny_model(), path.c_str(), &o, &call, &session, error);
  CHECK((s == KV_OK) == (session != nullptr));
  if (out) *out = session;
  else kv_session_close(session);
  return s;
}

kv_status inspect(const std::string& path) {
  kv_file_info info{};
  info.struct_size = sizeof info;
  return kv_file_inspect(path.c_str(), &info, nullptr);
}

}  // namespace

TEST_CASE("a file that was cut or grew is refused wherever it happened") {
  const Saved saved;
  const uint64_t size = saved.bytes().size();
  std::set<uint64_t> sizes = {0,    1,    7,     8,     100,      4087,     4095,
                              4096, 4097, 65535, 65536, size - 1, size - 8, size - 4096};
  for (uint64_t at = 65536; at < size; at += 65536) sizes.insert({at - 1, at, at + 1});
  for (SectionKind kind : {SectionKind::state, SectionKind::tokens, SectionKind::window,
                           SectionKind::pages, SectionKind::bounds})
    sizes.insert({saved.section(kind).offset + saved.section(kind).size,
                  saved.section(kind).offset + saved.section(kind).size / 2});
  for (uint64_t n : sizes) {
    CAPTURE(n);
    write_file(saved.path(),
               {saved.bytes().begin(), saved.bytes().begin() + static_cast<std::ptrdiff_t>(n)});
    const kv_status s = try_load(saved.path());
    CHECK(s == (n == 0 ? KV_NOT_A_CACHE : KV_CORRUPT));
    count_faults("file cut, or with something at its end");
    CHECK(inspect(saved.path()) == s);
    CHECK(kv_file_verify(saved.path().c_str(), nullptr, nullptr) == s);
  }
  std::vector<uint8_t> longer = saved.bytes();
  longer.push_back(0);
  write_file(saved.path(), longer);
  CHECK(try_load(saved.path()) == KV_CORRUPT);
}

TEST_CASE("a changed bit of the header is found when the file is opened") {
  const Saved saved;
  std::fstream file(saved.path(), std::ios::in | std::ios::out | std::ios::binary);
  for (uint64_t at = 0; at < 4096; at += at < 1200 ? 1 : 37) {
    const auto changed = static_cast<uint8_t>(saved.bytes()[at] ^ (1u << at % 8));
    file.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(changed)).flush();
    kv_error error{};
    const kv_status s = try_load(saved.path(), 0, nullptr, &error);
    CAPTURE(at);
    count_faults("bits flipped");
    CHECK_MESSAGE((s == KV_CORRUPT || (at < 8 && s == KV_NOT_A_CACHE)), error.message);
    file.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(saved.bytes()[at])).flush();
  }
  CHECK(try_load(saved.path()) == KV_OK);
}

TEST_CASE("a changed byte of a small section is found by loading, one of the pages by verifying") {
  const Saved saved;
  for (SectionKind kind : {SectionKind::state, SectionKind::tokens, SectionKind::centre,
                           SectionKind::sinks, SectionKind::window, SectionKind::logits,
                           SectionKind::pages, SectionKind::scales, SectionKind::bounds}) {
    const Saved::Place place = saved.section(kind);
    CAPTURE(std::string(kvasir::format::name_of(kind)));
    REQUIRE(place.size > 0);
    const bool lazy = kind >= SectionKind::pages && kind <= SectionKind::bounds;
    for (uint64_t at : {uint64_t{0}, place.size / 2, place.size - 1}) {
      saved.flip(place.offset + at);
      count_faults("bits flipped");
      kv_error error{};
      CHECK(try_load(saved.path(), 0, nullptr, &error) == (lazy ? KV_OK : KV_CORRUPT));
      CHECK(try_load(saved.path(), KV_VERIFY, nullptr, &error) == KV_CORRUPT);
      CHECK(std::string(error.message).find(kvasir::format::name_of(kind)) != std::string::npos);
      CHECK(error.offset >= place.offset);
      CHECK(error.offset <= place.offset + at);
      CHECK(kv_file_verify(saved.path().c_str(), nullptr, &error) == KV_CORRUPT);
    }
  }
}

TEST_CASE(
    "damage that an answer meets ends it with the session as before; damage that it does not meet "
    "does no harm") {
  const Saved saved;
  const std::vector<int32_t> tokens = sequence(saved.session());
  kv_model_info info{};
  info.struct_size = sizeof info;
  REQUIRE_OK(kv_model_get_info(tiny_model(), &info, error));
  for (const char* strategy : {"full", "quest", "bounded"}) {
    REQUIRE_OK(kv_session_set_strategy(saved.session(), budgeted(strategy, 64), error));
    const std::string expected = ask(saved.session(), "a question", 4).text;
    int corrupt = 0, unmet = 0;
    for (SectionKind kind : {SectionKind::pages, SectionKind::scales, SectionKind::bounds}) {
      const Saved::Place place = saved.section(kind);
      for (uint64_t part = 0; part < 24; ++part) {
        const uint64_t at = place.size * part / 24 + part % 5;
        CAPTURE(std::string(kvasir::format::name_of(kind)));
        CAPTURE(at);
        saved.flip(place.offset + at);
        count_faults("bits flipped");
        kv_session* out = nullptr;
        REQUIRE(try_load(saved.path(), 0, &out) == KV_OK);
        const Session session(out);
        REQUIRE_OK(kv_session_set_strategy(session.get(), budgeted(strategy, 64), error));
        const Reply reply = ask(session.get(), "a question", 4);
        if (reply.status == KV_OK) {
          ++unmet;
          CHECK(reply.text == expected);
        } else {
          ++corrupt;
          CHECK(reply.status == KV_CORRUPT);
          CHECK(reply.error.offset <= place.offset + at);
          CHECK(reply.error.offset + 4096 > place.offset + at);
        }
        CHECK(sequence(session.get()) == tokens);
        REQUIRE_OK(kv_session_set_strategy(session.get(), strategies::strategy("window"), error));
        // reads no page and seals none: the session is usable
        CHECK(peek(session.get(), 1).size() == 1);
      }
    }
    CHECK(corrupt > 0);
    CHECK(unmet > 0);
  }
}

TEST_CASE("damaged pages do not become good ones by being copied") {
  // The last extent of the file is copied when the next page is sealed, and a saved session is
  // written from the file.
  const Saved saved;
  for (SectionKind kind : {SectionKind::pages, SectionKind::scales, SectionKind::bounds}) {
    CAPTURE(std::string(kvasir::format::name_of(kind)));
    saved.flip(saved.section(kind).offset + saved.section(kind).size / 2 + 1);
    kv_session* out = nullptr;
    REQUIRE(try_load(saved.path(), 0, &out) == KV_OK);
    const Session session(out);
    REQUIRE_OK(kv_session_set_strategy(session.get(), strategies::strategy("window"), error));
    TempFolder folder;
    CHECK(kv_save(session.get(), folder.file("copy.kv").c_str(), nullptr, nullptr) == KV_CORRUPT);
    CHECK(folder.entries() == 0);
    kv_status s = KV_OK;
    int made = 0;
    for (; made < 200 && s == KV_OK; ++made) {
      int32_t token = 0;
      s = kv_session_next(session.get(), nullptr, nullptr, &token, nullptr, nullptr);
    }
    CHECK(s == KV_CORRUPT);
    CHECK(made < 100);
    CHECK(sequence(session.get()).size() == 642 + static_cast<std::size_t>(made) - 1);
    CHECK(kv_session_rewind(session.get(), 642, nullptr) == KV_OK);
  }
}

TEST_CASE("going back into damaged pages changes nothing") {
  const Saved saved;
  saved.flip(saved.section(SectionKind::pages).offset + 4096 * 3 + 1);
  kv_session* out = nullptr;
  REQUIRE(try_load(saved.path(), 0, &out) == KV_OK);
  const Session session(out);
  int corrupt = 0;
  for (uint64_t at : {600u, 450u, 300u, 260u, 200u, 100u}) {
    const std::size_t before = sequence(session.get()).size();
    const kv_status s = kv_session_rewind(session.get(), at, nullptr);
    CHECK((s == KV_OK || s == KV_CORRUPT));
    CHECK(sequence(session.get()).size() == (s == KV_OK ? at : before));
    corrupt += s == KV_CORRUPT;
  }
  CHECK(corrupt > 0);
}

TEST_CASE("stale files and damaged ones have different codes") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Model other = open_model(same_shape_path);
  const Session session = open_session(other.get());
  read_tokens(session.get(), some_tokens(200));
  save(session.get(), path);
  kv_error error{};
  kv_status s = try_load(path, 0, nullptr, &error);
  CHECK(s == KV_MODEL_MISMATCH);
  CHECK(kv_status_is_stale(s));
  CHECK(inspect(path) == KV_OK);
  CHECK(kv_file_verify(path.c_str(), nullptr, nullptr) == KV_OK);

  const std::vector<uint8_t> good = read_file(path);
  std::vector<uint8_t> newer = good;
  newer.at(kvasir::format::header_at("version")) =
      newer.at(kvasir::format::header_at("minimum reader")) = 9;
  samples::repair_header(newer);
  write_file(path, newer);
  s = try_load(path, 0, nullptr, &error);
  CHECK(s == KV_VERSION);
  CHECK(kv_status_is_stale(s));
  CHECK(inspect(path) == KV_VERSION);

  write_file(path, good);
  kv_session* loaded = nullptr;
  CHECK(kv_load(other.get(), path.c_str(), nullptr, nullptr, &loaded, nullptr) == KV_OK);
  kv_session_close(loaded);
}
