// Forged cache files whose checksums all match: NaN or infinity, fields out of range, invalid
// tokens. Every call returns an answer or a code. Memory stays safe whatever the kernels' inputs.
#include <cmath>
#include <cstring>
#include <random>

#include "backend/kernels.h"
#include "fault_count.h"
#include "helpers.h"
#include "store/cache_samples.h"
#include "temp_folder.h"

using namespace api_test;
using kvasir::format::SectionKind;

namespace {

struct File {
  std::vector<uint8_t> bytes;

  // Where a section begins; its size into *size.
  uint64_t section(SectionKind kind, uint64_t* size = nullptr) const {
    for (uint64_t i = 0; i < samples::get(bytes, kvasir::format::header_at("section count"), 4);
         ++i) {
      const uint64_t entry =
          kvasir::format::header_at("sections") + i * kvasir::format::entry_bytes;
      if (samples::get(bytes, entry, 4) != static_cast<uint32_t>(kind)) continue;
      if (size) *size = samples::get(bytes, entry + kvasir::format::entry_at("size"), 8);
      return samples::get(bytes, entry + kvasir::format::entry_at("offset"), 8);
    }
    FAIL("no such section");
    return 0;
  }
  void put(SectionKind kind, uint64_t at, int size, uint64_t value) {
    samples::put(bytes, section(kind) + at, size, value);
  }
};

const File& good_file() {
  static const File file = [] {
    TempFolder folder;
    save(tiny_session(700).get(), folder.file("a.kv"));
    return File{read_file(folder.file("a.kv"))};
  }();
  return file;
}

class Scratch {
 public:
  Scratch() : path_(folder_.file("hostile.kv")) {}
  const std::string& hold(File file) {
    samples::repair(file.bytes);
    write_file(path_, file.bytes);
    return path_;
  }

 private:
  TempFolder folder_;
  std::string path_;
};

kv_status try_tiny(const std::string& path, Session* out = nullptr) {
  kv_session* session = nullptr;
  const kv_session_options o = small_options();
  const kv_status s = kv_load(tiny_model(), path.c_str(), &o, nullptr, &session, nullptr);
  CHECK((s == KV_OK) == (session != nullptr));
  Session owner(session);
  if (out) *out = std::move(owner);
  return s;
}

bool allowed(kv_status s) { return s == KV_OK || s == KV_CORRUPT; }

// Does with a session what an application may; every answer must be an allowed one.
void use(kv_session* session) {
  for (const char* strategy : {"quest", "bounded", "full", "window"}) {
    REQUIRE_OK(kv_session_set_strategy(session, budgeted(strategy, 48), error));
    CHECK(allowed(ask(session, "q", 3).status));
  }
  int32_t token = 0;
  CHECK(allowed(kv_session_next(session, nullptr, nullptr, &token, nullptr, nullptr)));
  const std::vector<int32_t> more = some_tokens(70);
  CHECK(allowed(kv_prefill_tokens(session, more.data(), more.size(), nullptr, nullptr, nullptr)));
  std::size_t size = 0;
  CHECK(kv_session_stats_json(session, nullptr, 0, &size, nullptr) == KV_LIMIT);
  TempFolder folder;
  CHECK(allowed(kv_save(session, folder.file("b.kv").c_str(), nullptr, nullptr)));
  CHECK(allowed(kv_session_rewind(session, 400, nullptr)));
  CHECK(allowed(kv_session_next(session, nullptr, nullptr, &token, nullptr, nullptr)));
}

void fill(File* file, SectionKind kind, const std::vector<uint8_t>& pattern) {
  uint64_t size = 0;
  const uint64_t at = file->section(kind, &size);
  for (uint64_t i = 0; i < size; ++i) file->bytes[at + i] = pattern[i % pattern.size()];
}

}  // namespace

TEST_CASE("NaN or infinity among scales and bounds") {
  Scratch scratch;
  const std::vector<uint8_t> patterns[] = {{0xC0, 0x7F},              // bf16 NaN; as f32 a NaN too
                                           {0x00, 0x00, 0xC0, 0x7F},  // f32 NaN between zeros
                                           {0x80, 0x7F},              // bf16 infinity
                                           {0x00, 0x00, 0x80, 0xFF},  // f32 -infinity
                                           {0x7F, 0x7F},              // the largest
                                           {0xFF},
                                           {0x80}};
  for (SectionKind kind : {SectionKind::pages, SectionKind::scales, SectionKind::bounds}) {
    for (const auto& pattern : patterns) {
      for (uint32_t share : {0u, 1u}) {
        CAPTURE(std::string(kvasir::format::name_of(kind)));
        CAPTURE(static_cast<int>(pattern[0]));
        File file = good_file();
        fill(&file, kind, pattern);
        count_faults("facts that lie behind sound checksums");
        const std::string& path = scratch.hold(std::move(file));
        kv_session* session = nullptr;
        kv_session_options o = small_options();
        o.decode = budgeted("quest", 64, {{KV_PARAM_SHARE_HEADS, share}});
        REQUIRE_OK(kv_load(tiny_model(), path.c_str(), &o, nullptr, &session, error));
        const Session owner(session);
        use(session);
      }
    }
  }
}

TEST_CASE(
    "a good file is never replaced by one that cannot be loaded, whatever the pages that were "
    "loaded give") {
  Scratch scratch;
  TempFolder folder;
  const std::string good = folder.file("good.kv");
  // of bf16: NaN, both infinities, the largest: 127 times it is infinite
  for (const uint64_t scale : {0x7FC0u, 0x7F80u, 0xFF80u, 0x7F7Fu}) {
    for (const bool all : {true, false}) {
      CAPTURE(scale);
      File file = good_file();
      uint64_t size = 0;
      const uint64_t at = file.section(SectionKind::scales, &size);
      for (uint64_t i = 0; i < size; i += all ? 2 : 256) samples::put(file.bytes, at + i, 2, scale);
      count_faults("facts that lie behind sound checksums");
      Session session;
      REQUIRE(try_tiny(scratch.hold(std::move(file)), &session) == KV_OK);
      write_file(good, good_file().bytes);
      for (const uint64_t tokens : {650u, 400u, 100u, 0u}) {
        CAPTURE(tokens);
        const std::vector<int32_t> before = sequence(session.get());
        kv_error error{};
        const kv_status s = kv_session_rewind(session.get(), tokens, &error);
        CHECK(s == (tokens == 0 || before.size() == tokens ? KV_OK : KV_CORRUPT));
        if (s != KV_OK) CHECK(std::string(error.message).find("scales") != std::string::npos);
        if (s != KV_OK) CHECK(sequence(session.get()) == before);
        const kv_status saved = kv_save(session.get(), good.c_str(), nullptr, nullptr);
        CHECK(allowed(saved));
        if (saved != KV_OK) CHECK(read_file(good) == good_file().bytes);
        CHECK(try_tiny(good) == KV_OK);
        write_file(good, good_file().bytes);
      }
    }
  }
}

TEST_CASE("NaN or infinity in the full-precision parts are refused") {
  Scratch scratch;
  for (SectionKind kind :
       {SectionKind::centre, SectionKind::sinks, SectionKind::window, SectionKind::logits}) {
    for (uint64_t bits : {0x7FC00000u, 0xFFFFFFFFu, 0x7F800000u, 0xFF800000u}) {
      CAPTURE(std::string(kvasir::format::name_of(kind)));
      File file = good_file();
      uint64_t size = 0;
      file.section(kind, &size);
      file.put(kind, size - 4, 4, bits);
      count_faults("facts that lie behind sound checksums");
      CHECK(try_tiny(scratch.hold(std::move(file))) == KV_CORRUPT);
    }
  }
}

TEST_CASE("tokens that the model does not have are refused") {
  Scratch scratch;
  for (uint64_t token : {259u, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu}) {
    for (uint64_t at : {0u, 699u}) {
      File file = good_file();
      file.put(SectionKind::tokens, at * 4, 4, token);
      count_faults("facts that lie behind sound checksums");
      CHECK(try_tiny(scratch.hold(std::move(file))) == KV_CORRUPT);
    }
  }
}

TEST_CASE("facts of a sequence that contradict each other are refused") {
  Scratch scratch;
  const uint64_t state = good_file().section(SectionKind::state);
  struct Field {
    uint64_t at;
    int size;
    std::vector<uint64_t> values;
  };
  const auto now = [&](uint64_t at, int size) {
    return samples::get(good_file().bytes, state + at, size);
  };
  const uint64_t window = now(12, 4), pages = now(16, 4), huge = 0xFFFFFFFF;
  const Field fields[] = {{0, 4, {0, 4, huge}},
                          {4, 4, {1, 2, huge}},
                          {8, 4, {0, (1u << 20) + 1, huge}},
                          {12, 4, {0, window - 1, window + 1, window + 64, huge}},
                          {16, 4, {0, pages - 1, pages + 1, 0x04000000, huge}},
                          {20, 4, {0, 1, 32, 128, huge}},
                          {24, 8, {0, 699, 701, uint64_t{1} << 63, UINT64_MAX}},
                          {32, 8, {1, uint64_t{1} << 63}},
                          {40, 4, {1, 3, huge}},
                          {44, 4, {pages + 1, huge}}};
  for (const Field& field : fields) {
    for (uint64_t value : field.values) {
      CAPTURE(field.at);
      CAPTURE(value);
      if (value == now(field.at, field.size)) continue;
      File file = good_file();
      file.put(SectionKind::state, field.at, field.size, value);
      count_faults("facts that lie behind sound checksums");
      CHECK(try_tiny(scratch.hold(std::move(file))) == KV_CORRUPT);
    }
  }
  for (uint64_t value : {1u, 2u, 3u}) {  // turns that there are
    File file = good_file();
    file.put(SectionKind::state, 0, 4, value);
    Session session;
    CHECK(try_tiny(scratch.hold(std::move(file)), &session) == KV_OK);
    use(session.get());
  }
  // Pages and window that add up, with sections that do not.
  File file = good_file();
  const uint64_t page = now(20, 4);
  file.put(SectionKind::state, 16, 4, pages - 1);
  file.put(SectionKind::state, 12, 4, window + page);
  CHECK(try_tiny(scratch.hold(std::move(file))) == KV_CORRUPT);
}

TEST_CASE("a header that contradicts the model is refused") {
  Scratch scratch;
  using namespace kvasir::format;
  for (uint64_t at : {header_at("layers"), header_at("kv heads"), header_at("head dim"),
                      header_at("vocabulary"), header_at("tokens")}) {
    for (uint64_t value : {0u, 1u, 3u, 1000u, 0xFFFFFFFFu}) {
      CAPTURE(at);
      CAPTURE(value);
      if (value == samples::get(good_file().bytes, at, 4)) continue;
      File file = good_file();
      samples::put(file.bytes, at, 4, value);
      count_faults("facts that lie behind sound checksums");
      const bool no_model =
          at == header_at("vocabulary") && value == 0;  // as kv_cache_save writes it
      CHECK(try_tiny(scratch.hold(std::move(file))) == (no_model ? KV_MODEL_MISMATCH : KV_CORRUPT));
    }
  }
  File file = good_file();
  file.bytes[header_at("model") + 5] ^= 1;
  CHECK(try_tiny(scratch.hold(std::move(file))) == KV_MODEL_MISMATCH);
}

TEST_CASE("random changes behind matching checksums") {
  Scratch scratch;
  std::mt19937 random(3);
  const auto below = [&](uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(random);
  };
  constexpr SectionKind kinds[] = {SectionKind::state, SectionKind::tokens, SectionKind::centre,
                                   SectionKind::sinks, SectionKind::window, SectionKind::logits,
                                   SectionKind::pages, SectionKind::scales, SectionKind::bounds};
  for (int round = 0; round < 60; ++round) {
    CAPTURE(round);
    File file = good_file();
    const SectionKind kind = kinds[below(std::size(kinds))];
    uint64_t size = 0;
    const uint64_t at = file.section(kind, &size);
    for (uint64_t changes = 1 + below(30); changes > 0; --changes)
      file.bytes[at + below(size)] = static_cast<uint8_t>(below(256));
    if (round % 4 == 0)
      file.bytes[kvasir::format::header_at("layers") + below(2200)] ^=
          static_cast<uint8_t>(1u << below(8));
    count_faults("random damage behind repaired checksums");
    Session session;
    const kv_status s = try_tiny(scratch.hold(std::move(file)), &session);
    CHECK((allowed(s) || s == KV_MODEL_MISMATCH || s == KV_VERSION || s == KV_CONTEXT_FULL));
    if (s == KV_OK) use(session.get());
  }
}

TEST_CASE(
    "the best of scores that are not numbers: indices stay within bounds on every instruction "
    "set") {
  constexpr uint32_t guard = 0xABABABAB;
  int tables = 0;
  while (const kvasir::Kernels* kernels = kvasir::cpu_kernels_at(static_cast<uint32_t>(tables))) {
    ++tables;
    CAPTURE(std::string(kernels->name));
    std::mt19937 random(5);
    for (uint32_t n : {1u, 15u, 16u, 17u, 300u, 5000u}) {
      for (uint32_t of_100 : {1u, 50u, 100u}) {
        for (uint32_t k : {0u, 1u, 8u, n / 3, n - 1, n, n + 5}) {
          CAPTURE(n);
          CAPTURE(k);
          kvasir::Array<float> scores(n);
          for (float& x : scores)
            x = random() % 100 < of_100 ? (random() % 2 ? NAN : -NAN)
                                        : static_cast<float>(random() % 1000) - 500.0f;
          kvasir::Array<uint32_t> out(n + 8, guard);
          kvasir::Array<std::byte> scratch(std::size_t{n} * 4);
          const uint32_t count = kernels->top_k(scores.data(), n, k, out.data(), scratch.data());
          REQUIRE(count <= std::min(k, n));
          for (uint32_t i = 0; i < count; ++i) REQUIRE(out[i] < n);
          for (uint32_t i = 1; i < count; ++i) REQUIRE(out[i - 1] < out[i]);
          for (uint32_t i = n; i < out.size(); ++i) REQUIRE(out[i] == guard);
        }
      }
    }
  }
  CHECK(tables > 0);
}
