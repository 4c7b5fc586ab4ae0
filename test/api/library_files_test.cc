// Files in the folder of a library: leftovers, damage, names, files of other programs.
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

TEST_CASE(
    "what dead writers left is removed, what living ones write is not, and other files are left "
    "alone") {
  TempFolder folder;
  const auto write = [&](const std::string& name, const std::vector<uint8_t>& bytes) {
    write_file(folder.file(name), bytes);
  };
  const std::string dead = "a.kv.kvasir-0123456789abcdef.tmp",
                    living = "b.kv.kvasir-0123456789abcdef.tmp";
  const std::string dead_packed = "a.kvz.kvasir-0123456789abcdef.tmp",
                    dead_early = "c.kv.kvasir-0123456789abcdef.tmp";
  const std::string others[] = {"a.kv.0123456789abcdef.tmp", "d.kv.kvasir-0123456789abcdef.tmp",
                                "notes.tmp", "x.kv.0123.tmp", "readme.txt"};
  write(dead, std::vector<uint8_t>(100'000)), write(living, {}), write(dead_early, {});
  write(dead_packed, {0x8B, 'K', 'V', 'Z', '\r', '\n', 0x1A, '\n', 2, 0, 0, 0});
  for (const std::string& name : others) write(name, {'t', 'e', 'x', 't'});
  if (!on_windows)
    std::filesystem::create_symlink("readme.txt", folder.file("e.kv.kvasir-0123456789abcdef.tmp"));
  kvasir::os::File writer;
  bool locked = false;
  REQUIRE(kvasir::os::File::open_lock(folder.file(living), &writer).ok());
  REQUIRE((writer.lock(kvasir::os::Lock::exclusive, &locked).ok() && locked));
  const Library library = open_library(folder.path());
  const auto there = [&](const std::string& name) {
    return std::filesystem::exists(folder.file(name));
  };
  for (const std::string& name : {dead, dead_packed, dead_early}) CHECK(!there(name));
  CHECK(there(living));
  for (const std::string& name : others) {
    CAPTURE(name);
    CHECK(there(name));
  }
  if (!on_windows) CHECK(there("e.kv.kvasir-0123456789abcdef.tmp"));
  writer = kvasir::os::File();
  open_library(folder.path());
  CHECK(!there(living));

  // A file that is being written is locked, also between its closing and its renaming.
  static std::string path;
  static bool locked_at_rename;
  path = folder.path();
  locked_at_rename = false;
  kvasir::os::fault = [](const char* operation, const char*) {
    if (std::string_view(operation) != "rename") return 0;
    kvasir::os::fault = nullptr;
    open_library(path);
    for (const auto& entry : std::filesystem::directory_iterator(path))
      locked_at_rename |= entry.path().string().ends_with(".tmp") && entry.file_size() > 4096;
    return 0;
  };
  must_get(library.get(), tiny_model(), text_of(600));
  kvasir::os::fault = nullptr;
  CHECK(locked_at_rename);
  CHECK(list(library.get()).size() == 1);
}

TEST_CASE(
    "damaged documents are listed for what they are and passed over; a new prefill replaces those "
    "that are known to be of its text") {
  const OneDocument one(1000);
  const Library& library = one.library;
  const std::string &text = one.text, &path = one.path;
  const auto whole = read_file(path);
  const auto expected = fresh_answer(tiny_model(), text);
  // Header, tokens, and pages; a file that is cut, and one that is something else.
  struct Case {
    const char* what;
    std::function<void()> spoil;
    kv_status listed;
    bool is_known;
  };
  const Case cases[] = {
      {"header", [&] { damage(path, 40); }, KV_CORRUPT, false},
      {"cut", [&] { std::filesystem::resize_file(path, 70'000); }, KV_CORRUPT, false},
      {"state", [&] { damage(path, 65'536 + 8); }, KV_OK, true},
      {"tokens", [&] { damage(path, 131'072 + 8); }, KV_OK, true},
      {"tables", [&] { damage(path, -8); }, KV_OK, true}};
  for (const Case& c : cases) {
    CAPTURE(std::string(c.what));
    write_file(path, whole);
    c.spoil();
    const auto spoiled = read_file(path);
    const auto documents = list(library.get());
    REQUIRE(documents.size() == 1);
    CHECK(documents[0].status == c.listed);
    logged.clear();
    if (c.listed != KV_OK) CHECK(documents[0].tokens == 0);
    const Got got = must_get(library.get(), tiny_model(), text, one.named);
    CHECK(got.result.tokens_found == 0);
    CHECK(got.result.saved == 1);
    CHECK(peek(got.session.get(), 8) == expected);
    REQUIRE(!logged.empty());
    CHECK(logged[0].find(path) != std::string::npos);
    CHECK(read_file(path) == (c.is_known ? whole : spoiled));
    CHECK((std::string(got.result.name) == "a") == c.is_known);
    if (!c.is_known) REQUIRE_OK(kv_library_remove(library.get(), got.result.name, error));
  }
  // Pages: met while the rest of a longer text is read.
  bool met = false;
  for (std::size_t at = 4096 * 17; at + 4096 < whole.size() && !met; at += 4096) {
    write_file(path, whole);
    damage(path, static_cast<long>(at));
    Ask full;
    full.session.decode = strategy("full");
    const Got got = must_get(library.get(), tiny_model(), text + text_of(300, 'b'), full);
    met = got.result.tokens_found == 0 && std::string(got.result.name) == "a";
    CHECK(peek(got.session.get(), 8) == fresh_answer(tiny_model(), text + text_of(300, 'b')));
    for (const std::string& name : names(library.get()))
      if (name != "a") REQUIRE_OK(kv_library_remove(library.get(), name.c_str(), error));
  }
  CHECK(met);
  write_file(path, whole);
  damage(path, static_cast<long>(whole.size() / 2));
  Ask checked;
  checked.flags = KV_VERIFY;
  CHECK(must_get(library.get(), tiny_model(), text, checked).result.tokens_found == 0);
  CHECK(must_get(library.get(), tiny_model(), text, checked).result.tokens_found > 0);
}

TEST_CASE(
    "files of other programs neither count nor go, whatever they are called, and keep their "
    "names") {
  TempFolder folder;
  const std::vector<uint8_t> text(50'000, 'x'), zeros(50'000),
      packed = {0x8B, 'K', 'V', 'Z', '\r', '\n', 0x1A, '\n', 2, 0, 0, 0};
  const std::pair<const char*, const std::vector<uint8_t>*> files[] = {
      {"text", &text}, {"zeros", &zeros}, {"packed", &packed}};
  for (const auto& [name, bytes] : files)
    write_file(folder.file(name + std::string(".kv")), *bytes);
  write_file(folder.file("empty.kv"), {});
  std::filesystem::create_directory(folder.file("folder.kv"));
  const uint64_t size = size_of(600);
  const Library library =
      open_library(folder.path(), size + size / 2);  // less than these files take
  const auto all_there = [&] {
    for (const auto& [name, bytes] : files)
      CHECK(read_file(folder.file(name + std::string(".kv"))) == *bytes);
    CHECK(std::filesystem::file_size(folder.file("empty.kv")) == 0);
    CHECK(std::filesystem::is_directory(folder.file("folder.kv")));
  };
  CHECK(list(library.get()).empty());
  Ask ask;
  ask.flags = KV_REPLACE;  // of documents
  for (const char* name : {"text", "zeros", "packed", "empty", "folder"}) {
    CAPTURE(std::string(name));
    ask.name = name;
    let_time_pass();
    const Got got = must_get(library.get(), tiny_model(), text_of(600, name[0]), ask);
    CHECK(got.result.saved == 1);
    CHECK(std::string(got.result.name).find(name + std::string("-")) == 0);
    CHECK(names(library.get()) ==
          std::vector<std::string>{got.result.name});  // the one before has gone
    kv_error error{};
    CHECK(kv_library_remove(library.get(), name, &error) == KV_NOT_FOUND);
    CHECK(std::string(error.message).find(name) != std::string::npos);
    CHECK(kv_library_rename(library.get(), name, "new name", nullptr) == KV_NOT_FOUND);
    CHECK(kv_library_rename(library.get(), got.result.name, name, nullptr) == KV_BAD_STATE);
  }
  all_there();
  open_library(folder.path(), 1);
  CHECK(list(library.get()).empty());
  all_there();
}

TEST_CASE(
    "listed documents can be renamed and removed, and files with invalid names are not listed") {
  const OneDocument one(600);
  const auto bytes = read_file(one.path);
  std::vector<std::string> bad = {".hidden", std::string(201, 'n'), ""};
  if (!on_windows) bad.insert(bad.end(), {"a\\b", "a\nb", "a\x7F", "\xFF\xFE", "\xC3"});
  for (const std::string& name : bad) write_file(one.folder.file(name + ".kv"), bytes);
  const std::string longest(200, 'n');
  write_file(one.folder.file(longest + ".kv"), bytes);
  if (!on_windows) std::filesystem::create_symlink("a.kv", one.folder.file("link.kv"));
  auto listed = names(one.library.get());
  std::sort(listed.begin(), listed.end());
  CHECK(listed == std::vector<std::string>{"a", longest});
  for (const std::string& name : bad) {
    CHECK(kv_library_remove(one.library.get(), name.c_str(), nullptr) == KV_BAD_ARGUMENT);
    CHECK(kv_library_rename(one.library.get(), "a", name.c_str(), nullptr) == KV_BAD_ARGUMENT);
    Ask named;
    named.name = name.c_str();
    CHECK(get(one.library.get(), tiny_model(), "text", named).status == KV_BAD_ARGUMENT);
  }
  if (!on_windows) {
    CHECK(kv_library_remove(one.library.get(), "link", nullptr) == KV_NOT_FOUND);
    CHECK(kv_library_rename(one.library.get(), "a", "link", nullptr) == KV_BAD_STATE);
  }
  for (const std::string& name : listed) {
    REQUIRE_OK(kv_library_rename(one.library.get(), name.c_str(), "other", error));
    REQUIRE_OK(kv_library_remove(one.library.get(), "other", error));
  }
  CHECK(one.folder.entries() == bad.size() + (on_windows ? 1 : 2));  // and the lock
}

TEST_CASE(
    "two texts of one name are two documents, and the second replaces the first only where that is "
    "asked for") {
  TempFolder folder;
  const Library library = open_library(folder.path());
  Ask named;
  const std::string name = std::string(198, 'n') + "\xC3\xA6", cut(191, 'n');
  named.name = name.c_str();
  const Got first = must_get(library.get(), tiny_model(), text_of(600, 'a'), named);
  const Got second = must_get(library.get(), tiny_model(), text_of(600, 'b'), named);
  CHECK(std::string(first.result.name) == name);
  CHECK(second.result.saved == 1);
  const std::string unique = second.result.name;
  CHECK(unique.size() == 200);
  CHECK(unique.substr(0, 192) == cut + "-");
  CHECK(unique.find_first_not_of("0123456789abcdef", 192) == std::string::npos);
  CHECK(list(library.get()).size() == 2);
  CHECK(must_get(library.get(), tiny_model(), text_of(600, 'a'), named).result.tokens_found >= 600);
  CHECK(std::string(must_get(library.get(), tiny_model(), text_of(600, 'b'), named).result.name) ==
        unique);
  named.flags = KV_REPLACE;
  const_cast<Got&>(first).session.reset();
  const Got third = must_get(library.get(), tiny_model(), text_of(600, 'c'), named);
  CHECK(std::string(third.result.name) == name);
  CHECK(list(library.get()).size() == 2);
  CHECK(must_get(library.get(), tiny_model(), text_of(600, 'b'), named).result.saved == 0);
}

TEST_CASE("two models have a document each of one text, under one name, and read it once") {
  TempFolder folder;
  const Library library = open_library(folder.path());
  const Model other = open_model(same_shape_path);
  Ask named;
  named.name = "a.txt";
  for (int i = 0; i < 3; ++i)
    for (kv_model* model : {tiny_model(), other.get()}) {
      CAPTURE(i);
      const Got got = must_get(library.get(), model, text_of(600), named);
      CHECK(got.result.saved == (i == 0));
      CHECK((got.result.tokens_found > 0) == (i > 0));
    }
  CHECK(list(library.get()).size() == 2);
}

TEST_CASE(
    "a text that another call has saved meanwhile is not saved twice, and a name that it has taken "
    "is left to it") {
  TempFolder folder;
  static kv_library* second;
  static const char* first_letters;
  const Library library = open_library(folder.path()), other = open_library(folder.path());
  second = other.get();
  Ask ask;
  ask.name = "a";
  ask.progress = [](int32_t phase, uint64_t, uint64_t, void*) -> int32_t {
    if (phase != KV_PHASE_SAVE || !*first_letters) return 0;
    Ask named;
    named.name = "a";
    CHECK(must_get(second, tiny_model(), text_of(600, *first_letters++), named).result.saved == 1);
    return 0;
  };
  first_letters = "a";
  const Got same = must_get(library.get(), tiny_model(), text_of(600, 'a'), ask);
  CHECK(same.result.saved == 0);
  CHECK(same.result.save_status == KV_OK);
  CHECK(std::string(same.result.name) == "a");
  CHECK(names(library.get()) == std::vector<std::string>{"a"});
  REQUIRE_OK(kv_library_remove(library.get(), "a", error));
  first_letters = "b";
  const Got later = must_get(library.get(), tiny_model(), text_of(600, 'c'), ask);
  CHECK(later.result.saved == 1);
  CHECK(std::string(later.result.name).find("a-") == 0);
  const Got text_b = must_get(library.get(), tiny_model(), text_of(600, 'b'));
  CHECK(std::string(text_b.result.name) == "a");
  CHECK(folder.entries() == 3);  // and the lock
}

TEST_CASE(
    "a document of the same text that this library cannot use keeps its name, and the text is read "
    "once") {
  const OneDocument one(600);
  auto bytes = read_file(one.path);
  kvasir::CacheHeader header;
  REQUIRE(kvasir::CacheHeader::decode({bytes.data(), 4096}, bytes.size(), one.path.c_str(), &header)
              .ok());
  for (auto& entry : header.entries())
    if (entry.kind == kvasir::format::SectionKind::pages) entry.version = 99;  // of a newer library
  header.encode(std::span<uint8_t, 4096>(bytes.data(), 4096));
  write_file(one.path, bytes);
  for (bool is_new : {true, false}) {
    const Got got = must_get(one.library.get(), tiny_model(), one.text, one.named);
    CHECK(got.result.saved == is_new);
    CHECK((got.result.tokens_found == 0) == is_new);
    CHECK(std::string(got.result.name).find("a-") == 0);
  }
  CHECK(read_file(one.path) == bytes);
}

TEST_CASE("a library of a relative path stays where it was when the current folder changes") {
  TempFolder folder;
  std::filesystem::create_directory(folder.file("elsewhere"));
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  const Library library = open_library("lib");
  std::filesystem::current_path(folder.file("elsewhere"));
  Ask named;
  named.name = "a";
  const Got got = must_get(library.get(), tiny_model(), text_of(600), named);
  CHECK(got.result.saved == 1);
  CHECK(names(library.get()) == std::vector<std::string>{"a"});
  std::filesystem::current_path(before);
  CHECK(std::filesystem::exists(folder.file("lib/a.kv")));
  CHECK(std::filesystem::is_empty(folder.file("elsewhere")));
  CHECK(kv_library_rename(library.get(), "a", "b", nullptr) == KV_OK);
}
