// A library when something fails: links, older versions, damage, stops, threads, memory, files.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "cachefile/cache_header.h"
#include "failing_allocations.h"
#include "fault_count.h"
#include "library_helpers.h"
#include "os/os.h"
#include "replacing.h"

using namespace api_test;

TEST_CASE("a lock that is a link is refused, and its target is not created" *
          doctest::skip(on_windows)) {
  const OneDocument one(600);
  std::filesystem::remove(one.folder.file(".lock"));
  std::filesystem::create_symlink("elsewhere", one.folder.file(".lock"));
  kv_error error{};
  CHECK(kv_library_remove(one.library.get(), "a", &error) == KV_BAD_ARGUMENT);
  CHECK(std::string(error.message).find("symbolic link") != std::string::npos);
  CHECK(must_get(one.library.get(), tiny_model(), text_of(600, 'b')).result.save_status ==
        KV_BAD_ARGUMENT);
  CHECK(!std::filesystem::exists(one.folder.file("elsewhere")));
  CHECK(must_get(one.library.get(), tiny_model(), one.text).result.tokens_found >= 600);
}

TEST_CASE(
    "documents of an older library, without hashes, or with a newer one's section are passed over, "
    "which the log says once") {
  using kvasir::format::SectionKind;
  const OneDocument one(600);
  std::vector<uint8_t> bytes = read_file(one.path);
  const auto write_changed = [&](const std::string& path, SectionKind kind, const auto& change) {
    kvasir::CacheHeader header;
    REQUIRE(
        kvasir::CacheHeader::decode({bytes.data(), 4096}, bytes.size(), one.path.c_str(), &header)
            .ok());
    for (auto& entry : header.entries())
      if (entry.kind == kind) change(&entry);
    std::vector<uint8_t> changed = bytes;
    header.encode(std::span<uint8_t, 4096>(changed.data(), 4096));
    write_file(path, changed);
  };
  // not known: skipped
  const auto hide = [](auto* entry) { entry->kind = static_cast<SectionKind>(99); };
  write_changed(one.path, SectionKind::chain, hide);
  write_changed(one.folder.file("b.kv"), SectionKind::chain, hide);
  write_changed(one.folder.file("c.kv"), SectionKind::pages,
                [](auto* entry) { entry->version = 99; });
  const Library other = open_library(one.folder.path());
  char next = 'a';  // a text each that goes on as no other does, so that c.kv is tried first
  for (const Library* library : {&one.library, &other}) {
    logged.clear();
    for (int i = 0; i < 2; ++i)
      must_get(library->get(), tiny_model(), one.text + next++ + text_of(300));
    CHECK(logged.size() == 3);
    const auto count = [](const char* what) {
      return std::count_if(logged.begin(), logged.end(), [&](const std::string& line) {
        return line.find(what) != std::string::npos;
      });
    };
    CHECK(count("no hashes") == 2);
    CHECK(count("has version 99") == 1);
  }
}

TEST_CASE("a damaged document is replaced by a text that begins with it, not just like it") {
  const OneDocument one(1000);
  const Library& library = one.library;
  const std::string &text = one.text, &path = one.path;
  damage(path, 65'536 + 8);
  const auto damaged = read_file(path);
  const Got other = must_get(library.get(), tiny_model(), text.substr(0, 400) + text_of(300, 'b'));
  CHECK(other.result.tokens_found == 0);
  CHECK(std::string(other.result.name) != "a");
  CHECK(read_file(path) == damaged);
  CHECK(std::string(must_get(library.get(), tiny_model(), text + "more").result.name) == "a");
  CHECK(read_file(path) != damaged);
}

namespace {

// Of a document with an index for "hnsw": the middle of it.
void damage_index(const std::string& path) {
  const std::vector<uint8_t> whole = read_file(path);
  kvasir::CacheHeader header;
  REQUIRE(
      kvasir::CacheHeader::decode({whole.data(), 4096}, whole.size(), path.c_str(), &header).ok());
  for (const auto& entry : header.entries())
    if (entry.kind == kvasir::format::SectionKind::hnsw)
      damage(path, static_cast<long>(entry.offset + entry.bytes / 2));
  REQUIRE(read_file(path) != whole);
}

}  // namespace

TEST_CASE("damage that only a copy meets is met by the save, and the document replaced") {
  const OneDocument one(2600, "hnsw");
  const Library& library = one.library;
  const std::string longer = one.text + text_of(300, 'b');
  damage_index(one.path);
  const Got got = must_get(library.get(), tiny_model(), longer);
  CHECK(got.result.tokens_found == 0);
  CHECK(got.result.saved == 1);
  CHECK(std::string(got.result.name) == "a");
  CHECK(must_get(library.get(), tiny_model(), longer).result.tokens_found == got.result.tokens);
}

TEST_CASE("a second prefill, after damage found by the save, leaves the first file when it fails") {
  const OneDocument one(2600, "hnsw");
  const Library& library = one.library;
  const std::string longer = one.text + text_of(300, 'b');
  const auto expected = fresh_answer(tiny_model(), longer);
  damage_index(one.path);
  const std::vector<uint8_t> damaged = read_file(one.path);
  const std::size_t descriptors = open_descriptors();
  static std::optional<FailingAllocations> failing;
  static bool memory;
  Ask ask;
  ask.progress = [](int32_t phase, uint64_t, uint64_t total, void*) -> int32_t {
    const bool second = phase == KV_PHASE_PREFILL && total > 2600;  // the first has little to read
    if (second && !memory && !failing) failing.emplace(0, false);
    return second && memory;
  };
  for (bool enough : {true, false}) {
    CAPTURE(enough);
    memory = enough;
    Got got = get(library.get(), tiny_model(), longer, ask);
    CHECK(failing.has_value() == !memory);
    failing.reset();
    REQUIRE_MESSAGE(got.status == KV_OK, got.error.message);
    CHECK(got.result.tokens_found >= 2600);
    CHECK(got.result.saved == 0);
    CHECK(got.result.save_status == KV_CORRUPT);
    CHECK(sequence(got.session.get()).size() == got.result.tokens);
    REQUIRE_OK(kv_session_set_strategy(got.session.get(), strategy("full"), error));
    CHECK(peek(got.session.get(), 8) == expected);
    got.session.reset();
    CHECK(open_descriptors() == descriptors);
    CHECK(read_file(one.path) == damaged);
  }
}

TEST_CASE("answers of the model are no part of the document") {
  TempFolder folder;
  const Library library = open_library(folder.path());
  const std::string text = text_of(600);
  const Session session = open_session(tiny_model());
  read_text(session.get(), text);
  const std::size_t read = sequence(session.get()).size();
  std::string made;
  for (int i = 0; i < 400; ++i) {
    kv_generate_options sampling;
    kv_init(&sampling, sizeof sampling);
    sampling.temperature = 1;
    sampling.seed = static_cast<uint64_t>(i) + 1;
    int32_t token = 0, end = 0;
    REQUIRE_OK(kv_session_next(session.get(), &sampling, nullptr, &token, &end, error));
    char piece[64];
    std::size_t size = 0;
    REQUIRE_OK(kv_detokenize(tiny_model(), &token, 1, 0, piece, sizeof piece, &size, error));
    made.append(piece, size);
  }
  save(session.get(), folder.file("mine.kv"));
  const Got got = must_get(library.get(), tiny_model(), text + made);
  CHECK(got.result.tokens_found == read);
}

TEST_CASE("a document that kv_save put into the folder is one of the library" *
          doctest::skip(!replaces_files_in_use())) {
  TempFolder folder;
  const Library library = open_library(folder.path());
  const Session session = open_session(tiny_model());
  read_text(session.get(), text_of(800));
  save(session.get(), folder.file("mine.kv"));
  const Got got = must_get(library.get(), tiny_model(), text_of(800));
  CHECK(std::string(got.result.name) == "mine");
  CHECK(got.result.tokens_found == got.result.tokens);
  // with a conversation behind it the document is the same
  CHECK(ask(session.get(), "q", 4, KV_KEEP_TURN).status == KV_OK);
  save(session.get(), folder.file("mine.kv"));
  const Got again = must_get(library.get(), tiny_model(), text_of(800));
  CHECK(again.result.tokens_found == again.result.tokens);
  CHECK(peek(again.session.get(), 8) == peek(got.session.get(), 8));
}

TEST_CASE("a stopped prefill leaves nothing, a stopped or failed save leaves the session") {
  TempFolder folder;
  const Library library = open_library(folder.path());
  const Cancel cancel = make_cancel();
  Ask ask;
  ask.cancel = cancel.get();
  static int32_t stop_at;
  static std::vector<int32_t> phases;
  ask.progress = [](int32_t phase, uint64_t, uint64_t, void*) -> int32_t {
    if (phases.empty() || phases.back() != phase) phases.push_back(phase);
    return phase == stop_at;
  };
  for (stop_at = 0; stop_at <= KV_PHASE_SAVE; ++stop_at) {
    phases.clear();
    const Got got =
        get(library.get(), tiny_model(), text_of(2000, static_cast<char>('a' + stop_at)), ask);
    CHECK(got.status == (stop_at == KV_PHASE_PREFILL ? KV_CANCELLED : KV_OK));
    if (stop_at == KV_PHASE_SAVE) {
      CHECK(got.result.saved == 0);
      CHECK(got.result.save_status == KV_CANCELLED);
    }
    if (stop_at == 0) CHECK(phases == std::vector<int32_t>{KV_PHASE_PREFILL, KV_PHASE_SAVE});
  }
  CHECK(list(library.get()).size() == 2);
  kv_cancel_fire(cancel.get());
  ask.progress = nullptr;
  CHECK(get(library.get(), tiny_model(), text_of(2000, 'x'), ask).status == KV_CANCELLED);
  CHECK(list(library.get()).size() == 2);
  CHECK(folder.entries() <= 3);  // and the lock file
  Ask small;
  small.session.context_tokens = 100;
  CHECK(get(library.get(), tiny_model(), text_of(2000, 'x'), small).status == KV_CONTEXT_FULL);
  small.session.context_tokens = 500;
  CHECK(must_get(library.get(), tiny_model(), text_of(2000, 'a').substr(0, 450), small)
            .result.tokens_found > 440);
}

TEST_CASE("threads with handles of their own add, find, rename and remove in one folder") {
  TempFolder folder;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  tiny_model();
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      kv_library_options o;
      kv_init(&o, sizeof o);
      o.max_bytes = 6 << 20;
      for (int i = 0; i < 8; ++i) {
        kv_library* library = nullptr;
        if (kv_library_open(folder.path().c_str(), &o, &library, nullptr) != KV_OK) {
          ++wrong;
          continue;
        }
        const std::string text = text_of(400 + 100 * static_cast<std::size_t>(i % 3),
                                         static_cast<char>('a' + (i + t) % 4));
        const std::string name = "n" + std::to_string((i * 3 + t) % 5),
                          other = "n" + std::to_string(i % 5);
        kv_library_session_options s;
        kv_init(&s, sizeof s);
        const kv_session_options session_options = small_options();
        s.session = &session_options;
        if (i % 2) s.name = name.c_str();
        kv_session* session = nullptr;
        if (kv_library_session(library, tiny_model(), text.data(), text.size(), &s, nullptr,
                               &session, nullptr, nullptr) != KV_OK)
          ++wrong;
        std::size_t count = 0;
        if (session &&
            (kv_session_tokens(session, nullptr, 0, &count, nullptr), count < text.size()))
          ++wrong;
        kv_session_close(session);
        const kv_status renamed = kv_library_rename(library, name.c_str(), other.c_str(), nullptr);
        if (renamed != KV_OK && renamed != KV_NOT_FOUND && renamed != KV_BAD_STATE) ++wrong;
        const kv_status removed =
            i % 3 ? KV_OK : kv_library_remove(library, other.c_str(), nullptr);
        if (removed != KV_OK && removed != KV_NOT_FOUND && removed != KV_BUSY) ++wrong;
        kv_library_close(library);
      }
    });
  for (std::thread& t : threads) t.join();
  CHECK(wrong == 0);
  const Library library = open_library(folder.path());
  for (const auto& d : list(library.get())) CHECK(d.status == KV_OK);
}

TEST_CASE("a library without memory") {
  TempFolder folder;
  const std::string text = text_of(700), longer = text + text_of(200, 'b');
  const Library library = open_library(folder.path());
  must_get(library.get(), tiny_model(), text);
  const std::size_t descriptors = open_descriptors();
  static bool was_read;
  kv_control control = control_of(nullptr);
  control.progress = [](int32_t phase, uint64_t done, uint64_t total, void*) -> int32_t {
    was_read = phase == KV_PHASE_SAVE || (phase == KV_PHASE_PREFILL && done == total);
    return 0;
  };
  for (bool once : {true, false}) {
    for (long n = 0, reached = 1; reached; n += 1 + n / 12) {
      CAPTURE(n);
      kv_library* opened = nullptr;
      kv_session* session = nullptr;
      kv_library_document document{};
      document.struct_size = sizeof document;
      kv_status a, b, c;
      was_read = false;
      {
        FailingAllocations failing(n, once);
        a = kv_library_open(folder.path().c_str(), nullptr, &opened, nullptr);
        b = kv_library_list(library.get(), 0, &document, nullptr);
        c = kv_library_session(library.get(), tiny_model(), n % 2 ? text.data() : longer.data(),
                               n % 2 ? text.size() : longer.size(), nullptr, &control, &session,
                               nullptr, nullptr);
        reached = failing.reached();
      }
      for (kv_status s : {a, b, c}) CHECK((s == KV_OK || (reached && s == KV_NO_MEMORY)));
      CHECK((session != nullptr) == (c == KV_OK));
      if (was_read) CHECK(c == KV_OK);  // whatever becomes of the save
      kv_library_close(opened);
      kv_session_close(session);
      CHECK(open_descriptors() == descriptors);
      for (const auto& d : list(library.get())) CHECK(d.status == KV_OK);
      for (const std::string& name : names(library.get()))
        if (list(library.get()).size() > 1)
          REQUIRE_OK(kv_library_remove(library.get(), name.c_str(), error));
    }
  }
}

namespace {

struct FailAt {
  long at, seen;
  int error;
} fail_at;

}  // namespace

TEST_CASE("a library whose Nth file operation fails" * doctest::test_suite("slow")) {
  TempFolder folder;
  const std::string text = text_of(700), longer = text + text_of(200, 'b');
  const Library library = open_library(folder.path());
  Ask ask;
  ask.session.threads = 1;
  for (int failure : {EIO, ENOSPC, EACCES}) {
    for (long n = 0, reached = 1; reached; ++n) {
      CAPTURE(failure);
      CAPTURE(n);
      for (const std::string& name : names(library.get()))
        REQUIRE_OK(kv_library_remove(library.get(), name.c_str(), error));
      must_get(library.get(), tiny_model(), text, ask);
      const std::size_t descriptors = open_descriptors();
      fail_at = {n, 0, failure};
      kvasir::os::fault = [](const char*, const char*) {
        const bool hits = fail_at.seen++ == fail_at.at;
        if (hits) count_faults("file operation fails, once");
        return hits ? fail_at.error : 0;
      };
      kv_library* opened = nullptr;
      (void)kv_library_open(folder.path().c_str(), nullptr, &opened, nullptr);
      Got got = get(library.get(), tiny_model(), longer, ask);
      (void)kv_library_rename(opened ? opened : library.get(), got.result.name, "renamed", nullptr);
      kvasir::os::fault = nullptr;
      reached = fail_at.seen > n;
      if (got.session) CHECK(sequence(got.session.get()).size() >= 900);
      if (got.session && !got.result.saved) CHECK(got.result.save_status != KV_OK);
      got.session.reset();
      kv_library_close(opened);
      CHECK(open_descriptors() == descriptors);
      open_library(folder.path());  // removes what a failed removal left
      for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
        CHECK(!entry.path().string().ends_with(".tmp"));
      for (const auto& d : list(library.get())) CHECK(d.status == KV_OK);
      Got again = must_get(library.get(), tiny_model(), text, ask);
      CHECK(again.result.tokens_found == again.result.tokens);
    }
  }
}
