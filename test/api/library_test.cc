// A folder of documents: what is found, what is read, what is kept, what goes, and what becomes of it all when something fails.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "failing_allocations.h"
#include "fault_count.h"
#include "helpers.h"
#include "os/os.h"
#include "replacing.h"
#include "store/cache_header.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

struct CloseLibrary {
  void operator()(kv_library* library) const { kv_library_close(library); }
};
using Library = std::unique_ptr<kv_library, CloseLibrary>;

std::vector<std::string> logged;  // by libraries of open_library

Library open_library(const std::string& folder, uint64_t most_bytes = 0) {
  kv_library_options o;
  kv_library_options_init(&o, sizeof o);
  o.most_bytes = most_bytes;
  o.log = [](int32_t, const char* message, void*) { logged.push_back(message); };
  kv_library* library = nullptr;
  REQUIRE_OK(kv_library_open(folder.c_str(), &o, &library, error));
  return Library(library);
}

// Text of the tiny model: a token a byte.
std::string text_of(std::size_t bytes, char first = 'a') {
  std::string text;
  uint32_t state = 7u + static_cast<unsigned char>(first);
  while (text.size() < bytes) {
    state = state * 1664525u + 1013904223u;
    text += static_cast<char>('a' + (state >> 16) % 26);
  }
  return text;
}

struct Got {
  kv_status status = KV_OK;
  Session session;
  kv_library_result result{};
  kv_error error{};
};

struct Ask {
  const char* name = nullptr;
  uint32_t flags = 0;
  kv_session_options session = small_options();
  kv_cancel* cancel = nullptr;
  kv_progress_fn progress = nullptr;
  void* user = nullptr;
};

Got get(kv_library* library, kv_model* model, const std::string& text, const Ask& ask = {}) {
  kv_library_session_options o;
  kv_library_session_options_init(&o, sizeof o);
  o.name = ask.name;
  o.flags = ask.flags;
  o.session = &ask.session;
  o.cancel = ask.cancel;
  o.progress = ask.progress;
  o.progress_user = ask.user;
  Got got;
  got.result.struct_size = sizeof got.result;
  kv_session* session = nullptr;
  got.status = kv_library_session(library, model, text.data(), text.size(), &o, &session, &got.result, &got.error);
  got.session.reset(session);
  CHECK((session != nullptr) == (got.status == KV_OK));
  return got;
}

Got must_get(kv_library* library, kv_model* model, const std::string& text, const Ask& ask = {}) {
  Got got = get(library, model, text, ask);
  REQUIRE_MESSAGE(got.status == KV_OK, got.error.message);
  CHECK(got.result.tokens == timeline(got.session.get()).size());
  return got;
}

std::vector<kv_library_document> list(kv_library* library) {
  std::vector<kv_library_document> out;
  for (uint32_t i = 0;; ++i) {
    kv_library_document d{};
    d.struct_size = sizeof d;
    const kv_status status = kv_library_list(library, i, &d, nullptr);
    if (status == KV_NOT_FOUND) return out;
    REQUIRE(status == KV_OK);
    out.push_back(d);
  }
}

std::vector<std::string> names(kv_library* library) {
  std::vector<std::string> out;
  for (const auto& d : list(library)) out.push_back(d.name);
  return out;
}

// What reading the text without a library gives.
std::vector<int32_t> fresh_answer(kv_model* model, const std::string& text, std::vector<int32_t>* tokens = nullptr) {
  const Session session = open_session(model);
  read_text(session.get(), text);
  if (tokens) *tokens = timeline(session.get());
  return peek(session.get(), 8);
}

uint64_t size_of(std::size_t tokens) {
  TempFolder folder;
  const Library library = open_library(folder.path());
  must_get(library.get(), tiny_model(), text_of(tokens, 'b'));
  return list(library.get())[0].file_bytes;
}

// A library with a text of so many bytes as its document "a".
struct OneDocument {
  explicit OneDocument(std::size_t bytes, const char* strategy = nullptr) : text(text_of(bytes)) {
    named.name = "a";
    if (strategy) named.session.strategy = strategy;
    must_get(library.get(), tiny_model(), text, named);
  }
  TempFolder folder;
  Library library = open_library(folder.path());
  Ask named;
  std::string text, path = folder.file("a.kv");
};

// Later than what was used before, whatever the clock's steps are.
void let_time_pass() { std::this_thread::sleep_for(std::chrono::milliseconds(12)); }

void damage(const std::string& path, long at) {
  std::FILE* file = std::fopen(path.c_str(), "r+b");
  REQUIRE(file);
  std::fseek(file, at, at < 0 ? SEEK_END : SEEK_SET);
  const int byte = std::fgetc(file);
  std::fseek(file, -1, SEEK_CUR);
  std::fputc(byte ^ 0x40, file);
  std::fclose(file);
}

}  // namespace

TEST_CASE("a text is read once: again, its beginning, and from where a longer one goes on") {
  TempFolder folder;
  const Library library = open_library(folder.file("lib"));
  const std::string text = text_of(1500);
  const Got first = must_get(library.get(), tiny_model(), text);
  CHECK(first.result.tokens_found == 0);
  CHECK(first.result.saved == 1);
  const Library other = open_library(folder.file("lib"));
  const Got second = must_get(other.get(), tiny_model(), text);
  CHECK(second.result.tokens_found == second.result.tokens);
  CHECK(second.result.saved == 0);
  CHECK(std::string(second.result.name) == first.result.name);
  CHECK(timeline(second.session.get()) == timeline(first.session.get()));
  CHECK(peek(second.session.get(), 8) == peek(first.session.get(), 8));

  const Got beginning = must_get(library.get(), tiny_model(), text.substr(0, 1000));
  CHECK(beginning.result.tokens_found == beginning.result.tokens);
  CHECK(beginning.result.saved == 0);
  CHECK(list(library.get()).size() == 1);
  std::vector<int32_t> tokens;
  CHECK(peek(beginning.session.get(), 8) == fresh_answer(tiny_model(), text.substr(0, 1000), &tokens));
  CHECK(timeline(beginning.session.get()) == tokens);

  const std::string longer = text.substr(0, 1200) + text_of(700, 'b');
  const Got rest = must_get(library.get(), tiny_model(), longer);
  CHECK(rest.result.tokens_found >= 1200);
  CHECK(rest.result.tokens_found < 1210);
  CHECK(rest.result.saved == 1);
  CHECK(list(library.get()).size() == 2);
  CHECK(peek(rest.session.get(), 8) == fresh_answer(tiny_model(), longer, &tokens));
  CHECK(timeline(rest.session.get()) == tokens);
  CHECK(must_get(library.get(), tiny_model(), longer).result.tokens_found == rest.result.tokens);
  CHECK(must_get(library.get(), tiny_model(), text_of(900, 'c')).result.tokens_found == 0);
}

TEST_CASE("tokens are compared, not bytes: a text that ends within a word") {
  TempFolder folder;
  const Library library = open_library(folder.path());
  const std::string text = book(3000);
  Ask named;
  named.name = "the book";
  CHECK(std::string(must_get(library.get(), mini_model(), text, named).result.name) == "the book");
  for (std::size_t bytes : {2002u, 2003u, 2004u, 2005u}) {
    CAPTURE(bytes);
    const std::string cut = text.substr(0, bytes) + "xy";
    std::vector<int32_t> tokens;
    fresh_answer(mini_model(), cut, &tokens);
    const Got got = must_get(library.get(), mini_model(), cut);
    CHECK(got.result.tokens_found < got.result.tokens);
    CHECK(got.result.tokens_found + 6 > got.result.tokens);
    CHECK(timeline(got.session.get()) == tokens);
  }
}

TEST_CASE("a document serves those that read as it was read, by the same model") {
  TempFolder folder;
  const Library library = open_library(folder.path());
  const std::string text = text_of(700);
  must_get(library.get(), tiny_model(), text);
  const auto found = [&](kv_model* model, const std::function<void(kv_session_options*)>& change) {
    Ask ask;
    change(&ask.session);
    return must_get(library.get(), model, text, ask).result.tokens_found > 0;
  };
  CHECK(found(tiny_model(), [](auto*) {}));
  CHECK(found(tiny_model(), [](auto* o) { o->strategy = "full", o->budget_tokens = 0, o->threads = 1; }));
  CHECK(found(tiny_model(), [](auto* o) { o->prefill_strategy = "quest"; }));  // was read exactly: no worse
  CHECK(!found(tiny_model(), [](auto* o) { o->window = 100; }));
  CHECK(found(tiny_model(), [](auto* o) { o->window = 100; }));
  CHECK(!found(tiny_model(), [](auto* o) { o->kv_type = KV_KV_F32; }));
  const Model other = open_model(same_shape_path);
  CHECK(!found(other.get(), [](auto*) {}));
  CHECK(found(other.get(), [](auto*) {}));
  const auto documents = list(library.get());
  CHECK(documents.size() == 4);
  std::set<std::string> models;
  for (const auto& d : documents) models.insert(d.fingerprint);
  kv_model_information info{};
  info.struct_size = sizeof info;
  REQUIRE_OK(kv_model_info(tiny_model(), &info, error));
  CHECK(models.size() == 2);
  CHECK(models.count(info.fingerprint) == 1);
  CHECK(std::string(info.fingerprint).size() == 64);
}

TEST_CASE("documents are listed, renamed and removed") {
  TempFolder folder;
  const Library library = open_library(folder.path());
  for (const char* name : {"a", "b"}) {
    Ask ask;
    ask.name = name;
    must_get(library.get(), tiny_model(), text_of(600, name[0]), ask);
    let_time_pass();
  }
  auto documents = list(library.get());
  REQUIRE(documents.size() == 2);
  CHECK(std::string(documents[0].name) == "b");  // used last
  CHECK(documents[0].tokens > 590);
  CHECK(documents[0].status == KV_OK);
  CHECK(documents[0].file_bytes == std::filesystem::file_size(folder.file("b.kv")));
  CHECK(documents[0].last_used > documents[1].last_used);
  must_get(library.get(), tiny_model(), text_of(500, 'a'));
  CHECK(names(library.get()) == std::vector<std::string>{"a", "b"});

  CHECK(kv_library_rename(library.get(), "a", "b", nullptr) == KV_BAD_STATE);
  CHECK(kv_library_rename(library.get(), "c", "d", nullptr) == KV_NOT_FOUND);
  CHECK(kv_library_rename(library.get(), "a", "Zürich 1", nullptr) == KV_OK);
  CHECK(kv_library_rename(library.get(), "b", "b", nullptr) == KV_OK);
  const Got open = must_get(library.get(), tiny_model(), text_of(500, 'a'));
  CHECK(std::string(open.result.name) == "Zürich 1");
  kv_error error{};
  CHECK(kv_library_remove(library.get(), "Zürich 1", &error) == KV_BUSY);
  CHECK(std::string(error.message).find("open in a session") != std::string::npos);
  CHECK(kv_library_remove(library.get(), "b", nullptr) == KV_OK);
  CHECK(kv_library_remove(library.get(), "b", nullptr) == KV_NOT_FOUND);
  {
    const Session own = fork(open.session.get());
    const_cast<Got&>(open).session.reset();
    CHECK(kv_library_remove(library.get(), "Zürich 1", nullptr) == KV_BUSY);  // a fork has it open, too
  }
  CHECK(kv_library_remove(library.get(), "Zürich 1", nullptr) == KV_OK);
  CHECK(list(library.get()).empty());
}

TEST_CASE("a document that has grown takes its own place under its name" * doctest::skip(!replaces_files_in_use())) {
  TempFolder folder;
  const Library library = open_library(folder.path());
  Ask log;
  log.name = "log";
  for (std::size_t bytes : {600u, 900u, 1300u}) must_get(library.get(), tiny_model(), text_of(bytes), log);
  CHECK(names(library.get()) == std::vector<std::string>{"log"});
  CHECK(list(library.get())[0].tokens >= 1300);
  CHECK(must_get(library.get(), tiny_model(), text_of(600)).result.saved == 0);
}

TEST_CASE("on request a document is replaced by what goes on from it alone") {
  const TempFolder folder;
  const Library library = open_library(folder.file("lib"));
  const std::string text = text_of(600);
  uint64_t calls = 0;
  Ask careful;
  careful.name = "a";
  must_get(library.get(), tiny_model(), text, careful);
  const std::vector<uint8_t> before = read_file(folder.file("lib/a.kv"));
  careful.flags = KV_LIBRARY_NO_REPLACE;
  careful.user = &calls;
  careful.progress = [](int32_t, uint64_t, uint64_t, void* user) {
    ++*static_cast<uint64_t*>(user);
    return int32_t{0};
  };
  const std::string others[] = {text.substr(0, 300) + text_of(300, 'c'), text_of(600, 'b')};
  for (const std::string& other : others) {
    calls = 0;  // of what begins alike the window is read again
    const Got got = get(library.get(), tiny_model(), other, careful);
    CHECK(got.status == KV_BAD_STATE);
    CHECK(std::string(got.error.message).find("a.kv") != std::string::npos);
  }
  CHECK(calls == 0);
  CHECK(read_file(folder.file("lib/a.kv")) == before);
  const Got beginning = get(library.get(), tiny_model(), text.substr(0, 300), careful);
  CHECK(beginning.status == KV_OK);  // it is there: nothing is saved
  careful.name = "b";
  must_get(library.get(), tiny_model(), others[1], careful);
}

TEST_CASE("on request a document is replaced when it has grown" *
          doctest::skip(!replaces_files_in_use())) {
  const TempFolder folder;
  const Library library = open_library(folder.file("lib"));
  const std::string text = text_of(600);
  Ask careful;
  careful.name = "a";
  must_get(library.get(), tiny_model(), text, careful);
  careful.flags = KV_LIBRARY_NO_REPLACE;
  const Got grown = must_get(library.get(), tiny_model(), text + text_of(200, 'b'), careful);
  CHECK(grown.result.saved == 1);
  CHECK(grown.result.tokens_found > 0);
  CHECK(names(library.get()) == std::vector<std::string>{"a"});
}

TEST_CASE("the least recently used documents go when there is no room, those that are open do not") {
  TempFolder folder;
  const uint64_t size = size_of(600);
  const Library library = open_library(folder.path(), 3 * size + size / 2);
  const auto add = [&](char name) {
    const std::string its(1, name);
    Ask ask;
    ask.name = its.c_str();
    let_time_pass();
    return must_get(library.get(), tiny_model(), text_of(600, name), ask);
  };
  add('a'), add('b'), add('c');
  let_time_pass();
  Got open_b = must_get(library.get(), tiny_model(), text_of(600, 'b'));
  let_time_pass();
  must_get(library.get(), tiny_model(), text_of(300, 'a'));  // used again: c is the oldest now
  add('d');
  CHECK(names(library.get()) == std::vector<std::string>{"d", "a", "b"});
  add('e');  // b is older than a, but open
  CHECK(names(library.get()) == std::vector<std::string>{"e", "d", "b"});
  CHECK(peek(open_b.session.get(), 8) == fresh_answer(tiny_model(), text_of(600, 'b')));

  Got open_d = must_get(library.get(), tiny_model(), text_of(600, 'd')), open_e = must_get(library.get(), tiny_model(), text_of(600, 'e'));
  const Got no_room = add('f');  // all others are open
  CHECK(no_room.result.saved == 0);
  CHECK(no_room.result.save_status == KV_NO_SPACE);
  CHECK(peek(no_room.session.get(), 8) == fresh_answer(tiny_model(), text_of(600, 'f')));
  CHECK(list(library.get()).size() == 3);
  open_d = {}, open_b = {};
  open_e = {};

  open_library(folder.path(), size + size / 2);  // a smaller limit is kept at once
  CHECK(list(library.get()).size() == 1);
}

TEST_CASE("nothing goes for a document that cannot fit, also not what it would replace") {
  TempFolder folder;
  const uint64_t size = size_of(600), large = size_of(3600);
  const Library library = open_library(folder.path()), small = open_library(folder.path(), large + size / 2);
  for (const char* name : {"a", "b", "c"}) {
    Ask ask;
    ask.name = name;
    let_time_pass();
    must_get(library.get(), tiny_model(), text_of(600, name[0]), ask);
  }
  const Got open = must_get(library.get(), tiny_model(), text_of(600, 'b'));
  // a could go, b cannot; c would be replaced.
  Ask grown;
  grown.name = "c";
  const Got got = must_get(small.get(), tiny_model(), text_of(600, 'c') + text_of(3000, 'd'), grown);
  CHECK(got.result.tokens_found > 600);
  CHECK(got.result.save_status == KV_NO_SPACE);
  CHECK(list(library.get()).size() == 3);
  CHECK(must_get(library.get(), tiny_model(), text_of(600, 'c')).result.saved == 0);
}

TEST_CASE("nothing goes for a document that is too large by itself") {
  TempFolder folder;
  const Library library = open_library(folder.path(), size_of(4000) - 1);
  Ask small;
  small.name = "small";
  CHECK(must_get(library.get(), tiny_model(), text_of(600), small).result.saved == 1);
  const Got large = must_get(library.get(), tiny_model(), text_of(4000, 'b'));
  CHECK(large.result.save_status == KV_NO_SPACE);
  CHECK(names(library.get()) == std::vector<std::string>{"small"});
}

TEST_CASE("nothing goes for a document that does not get its name") {
  TempFolder folder;
  const uint64_t size = size_of(600);
  const Library library = open_library(folder.path(), 2 * size + size / 2);
  for (const char* name : {"a", "b"}) {
    Ask ask;
    ask.name = name;
    let_time_pass();
    must_get(library.get(), tiny_model(), text_of(600, name[0]), ask);
  }
  let_time_pass();
  Ask ask;
  ask.name = "c";
  for (const char* failing : {"rename", "sync_folder"}) {
    CAPTURE(std::string(failing));
    static std::string operation;
    operation = failing;
    kvasir::os::fault = [](const char* name, const char*) { return operation == name ? EIO : 0; };
    const Got got = get(library.get(), tiny_model(), text_of(600, 'c'), ask);
    kvasir::os::fault = nullptr;
    CHECK(got.status == KV_OK);
    CHECK(got.result.save_status == KV_IO);
    CHECK(std::filesystem::exists(folder.file("a.kv")));
    CHECK(std::filesystem::exists(folder.file("b.kv")));
  }
  CHECK(names(library.get()) == std::vector<std::string>{"c", "b", "a"});  // one too many: it has its name, which may not last
  let_time_pass();
  ask.name = "d";
  CHECK(must_get(library.get(), tiny_model(), text_of(600, 'd'), ask).result.saved == 1);
  CHECK(names(library.get()) == std::vector<std::string>{"d", "c"});
}

TEST_CASE("what dead writers left is removed, what living ones write is not, and other files are left alone") {
  TempFolder folder;
  const auto touch = [&](const std::string& name) { write_file(folder.file(name), {1, 2, 3}); };
  const std::string dead = "a.kv.0123456789abcdef.tmp", living = "b.kv.0123456789abcdef.tmp";
  touch(dead), touch(living), touch("notes.tmp"), touch("x.kv.0123.tmp"), touch("readme.txt");
  kvasir::os::File writer;
  bool locked = false;
  REQUIRE(kvasir::os::File::open_lock(folder.file(living), &writer).ok());
  REQUIRE((writer.lock(kvasir::os::Lock::exclusive, &locked).ok() && locked));
  const Library library = open_library(folder.path());
  const auto there = [&](const std::string& name) { return std::filesystem::exists(folder.file(name)); };
  CHECK(!there(dead));
  CHECK(there(living));
  CHECK((there("notes.tmp") && there("x.kv.0123.tmp") && there("readme.txt")));
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
    for (const auto& entry : std::filesystem::directory_iterator(path)) locked_at_rename |= entry.path().string().ends_with(".tmp") && entry.file_size() > 4096;
    return 0;
  };
  must_get(library.get(), tiny_model(), text_of(600));
  kvasir::os::fault = nullptr;
  CHECK(locked_at_rename);
  CHECK(list(library.get()).size() == 1);
}

TEST_CASE("damaged, stale and foreign files are listed for what they are, passed over, and replaced by a new reading") {
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
  };
  const Case cases[] = {{"header", [&] { damage(path, 40); }, KV_CORRUPT},
                        {"cut", [&] { std::filesystem::resize_file(path, 70'000); }, KV_CORRUPT},
                        {"empty", [&] { write_file(path, {}); }, KV_NOT_A_CACHE},
                        {"text", [&] { write_file(path, std::vector<uint8_t>(9000, 'x')); }, KV_NOT_A_CACHE},
                        {"state", [&] { damage(path, 65'536 + 8); }, KV_OK},
                        {"tokens", [&] { damage(path, 131'072 + 8); }, KV_OK},
                        {"tables", [&] { damage(path, -8); }, KV_OK}};
  for (const Case& c : cases) {
    CAPTURE(std::string(c.what));
    write_file(path, whole);
    c.spoil();
    const auto documents = list(library.get());
    REQUIRE(documents.size() == 1);
    CHECK(documents[0].status == c.listed);
    logged.clear();
    if (c.listed != KV_OK) CHECK(documents[0].tokens == 0);
    const Got got = must_get(library.get(), tiny_model(), text, one.named);
    CHECK(got.result.tokens_found == 0);
    CHECK(got.result.saved == 1);
    CHECK(peek(got.session.get(), 8) == expected);
    CHECK(read_file(path) == whole);
    REQUIRE(!logged.empty());
    CHECK(logged[0].find(path) != std::string::npos);
  }
  // Pages: met while the rest of a longer text is read.
  bool met = false;
  for (std::size_t at = 4096 * 17; at + 4096 < whole.size() && !met; at += 4096) {
    write_file(path, whole);
    damage(path, static_cast<long>(at));
    Ask full;
    full.session.strategy = "full", full.session.budget_tokens = 0;
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
  checked.flags = KV_LIBRARY_VERIFY;
  CHECK(must_get(library.get(), tiny_model(), text, checked).result.tokens_found == 0);
  CHECK(must_get(library.get(), tiny_model(), text, checked).result.tokens_found > 0);
}

TEST_CASE("documents of an older library, without hashes, or with a newer one's section are passed over, which the log says once") {
  using kvasir::format::SectionKind;
  const OneDocument one(600);
  std::vector<uint8_t> bytes = read_file(one.path);
  const auto write_changed = [&](const std::string& path, SectionKind kind, const auto& change) {
    kvasir::CacheHeader header;
    REQUIRE(kvasir::CacheHeader::decode({bytes.data(), 4096}, bytes.size(), one.path.c_str(), &header).ok());
    for (auto& entry : header.entries())
      if (entry.kind == kind) change(&entry);
    std::vector<uint8_t> changed = bytes;
    header.encode(std::span<uint8_t, 4096>(changed.data(), 4096));
    write_file(path, changed);
  };
  const auto hide = [](auto* entry) { entry->kind = static_cast<SectionKind>(99); };  // not known: skipped
  write_changed(one.path, SectionKind::chain, hide);
  write_changed(one.folder.file("b.kv"), SectionKind::chain, hide);
  write_changed(one.folder.file("c.kv"), SectionKind::pages, [](auto* entry) { entry->version = 99; });
  const Library other = open_library(one.folder.path());
  char next = 'a';  // a text each that goes on as no other does, so that c.kv is tried first
  for (const Library* library : {&one.library, &other}) {
    logged.clear();
    for (int i = 0; i < 2; ++i) must_get(library->get(), tiny_model(), one.text + next++ + text_of(300));
    CHECK(logged.size() == 3);
    const auto count = [](const char* what) {
      return std::count_if(logged.begin(), logged.end(), [&](const std::string& line) { return line.find(what) != std::string::npos; });
    };
    CHECK(count("no hashes") == 2);
    CHECK(count("has version 99") == 1);
  }
}

TEST_CASE("a damaged document gives its place to what begins with it, not to what only begins like it") {
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
  REQUIRE(kvasir::CacheHeader::decode({whole.data(), 4096}, whole.size(), path.c_str(), &header).ok());
  for (const auto& entry : header.entries())
    if (entry.kind == kvasir::format::SectionKind::hnsw) damage(path, static_cast<long>(entry.offset + entry.bytes / 2));
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

TEST_CASE("a second reading, for damage that the save met, leaves the first where it fails") {
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
    CHECK(timeline(got.session.get()).size() == got.result.tokens);
    REQUIRE_OK(kv_session_set_strategy(got.session.get(), "full", 0, 0, error));
    CHECK(peek(got.session.get(), 8) == expected);
    got.session.reset();
    CHECK(open_descriptors() == descriptors);
    CHECK(read_file(one.path) == damaged);
  }
}

TEST_CASE("what a model wrote is not taken for what was read") {
  TempFolder folder;
  const Library library = open_library(folder.path());
  const std::string text = text_of(600);
  const Session session = open_session(tiny_model());
  read_text(session.get(), text);
  const std::size_t read = timeline(session.get()).size();
  std::string made;
  for (int i = 0; i < 400; ++i) {
    kv_generate_options sampling;
    kv_generate_options_init(&sampling, sizeof sampling);
    sampling.temperature = 1;
    sampling.seed = static_cast<uint64_t>(i) + 1;
    int32_t token = 0, end = 0;
    REQUIRE_OK(kv_next(session.get(), &sampling, &token, &end, error));
    char piece[64];
    std::size_t size = 0;
    REQUIRE_OK(kv_detokenize(tiny_model(), &token, 1, 0, piece, sizeof piece, &size, error));
    made.append(piece, size);
  }
  save(session.get(), folder.file("mine.kv"));
  const Got got = must_get(library.get(), tiny_model(), text + made);
  CHECK(got.result.tokens_found == read);
}

TEST_CASE("a document that kv_save put into the folder is one of the library" * doctest::skip(!replaces_files_in_use())) {
  TempFolder folder;
  const Library library = open_library(folder.path());
  const Session session = open_session(tiny_model());
  read_text(session.get(), text_of(800));
  save(session.get(), folder.file("mine.kv"));
  const Got got = must_get(library.get(), tiny_model(), text_of(800));
  CHECK(std::string(got.result.name) == "mine");
  CHECK(got.result.tokens_found == got.result.tokens);
  CHECK(ask(session.get(), "q", 4, 1).status == KV_OK);  // with a conversation behind it the document is the same
  save(session.get(), folder.file("mine.kv"));
  const Got again = must_get(library.get(), tiny_model(), text_of(800));
  CHECK(again.result.tokens_found == again.result.tokens);
  CHECK(peek(again.session.get(), 8) == peek(got.session.get(), 8));
}

TEST_CASE("a stopped reading leaves nothing, a stopped or failed save leaves the session") {
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
    const Got got = get(library.get(), tiny_model(), text_of(2000, static_cast<char>('a' + stop_at)), ask);
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
  small.session.context = 100;
  CHECK(get(library.get(), tiny_model(), text_of(2000, 'x'), small).status == KV_CONTEXT_FULL);
  small.session.context = 500;
  CHECK(must_get(library.get(), tiny_model(), text_of(2000, 'a').substr(0, 450), small).result.tokens_found > 440);
}

TEST_CASE("threads with handles of their own add, find, rename and remove in one folder") {
  TempFolder folder;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  tiny_model();
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      kv_library_options o;
      kv_library_options_init(&o, sizeof o);
      o.most_bytes = 6 << 20;
      for (int i = 0; i < 8; ++i) {
        kv_library* library = nullptr;
        if (kv_library_open(folder.path().c_str(), &o, &library, nullptr) != KV_OK) {
          ++wrong;
          continue;
        }
        const std::string text = text_of(400 + 100 * static_cast<std::size_t>(i % 3), static_cast<char>('a' + (i + t) % 4));
        const std::string name = "n" + std::to_string((i * 3 + t) % 5), other = "n" + std::to_string(i % 5);
        kv_library_session_options s;
        kv_library_session_options_init(&s, sizeof s);
        const kv_session_options session_options = small_options();
        s.session = &session_options;
        if (i % 2) s.name = name.c_str();
        kv_session* session = nullptr;
        if (kv_library_session(library, tiny_model(), text.data(), text.size(), &s, &session, nullptr, nullptr) != KV_OK) ++wrong;
        std::size_t count = 0;
        if (session && (kv_session_tokens(session, nullptr, 0, &count, nullptr), count < text.size())) ++wrong;
        kv_session_close(session);
        const kv_status renamed = kv_library_rename(library, name.c_str(), other.c_str(), nullptr);
        if (renamed != KV_OK && renamed != KV_NOT_FOUND && renamed != KV_BAD_STATE) ++wrong;
        const kv_status removed = i % 3 ? KV_OK : kv_library_remove(library, other.c_str(), nullptr);
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
  kv_library_session_options options;
  kv_library_session_options_init(&options, sizeof options);
  options.progress = [](int32_t phase, uint64_t done, uint64_t total, void*) -> int32_t {
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
        c = kv_library_session(library.get(), tiny_model(), n % 2 ? text.data() : longer.data(), n % 2 ? text.size() : longer.size(), &options,
                               &session, nullptr, nullptr);
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
        if (list(library.get()).size() > 1) REQUIRE_OK(kv_library_remove(library.get(), name.c_str(), error));
    }
  }
}

namespace {

struct FailAt {
  long at, seen;
  int error;
} fail_at;

}  // namespace

TEST_CASE("a library whose Nth file operation fails") {
  TempFolder folder;
  const std::string text = text_of(700), longer = text + text_of(200, 'b');
  const Library library = open_library(folder.path());
  Ask ask;
  ask.session.threads = 1;
  for (int failure : {EIO, ENOSPC, EACCES}) {
    for (long n = 0, reached = 1; reached; ++n) {
      CAPTURE(failure);
      CAPTURE(n);
      for (const std::string& name : names(library.get())) REQUIRE_OK(kv_library_remove(library.get(), name.c_str(), error));
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
      if (got.session) CHECK(timeline(got.session.get()).size() >= 900);
      if (got.session && !got.result.saved) CHECK(got.result.save_status != KV_OK);
      got.session.reset();
      kv_library_close(opened);
      CHECK(open_descriptors() == descriptors);
      open_library(folder.path());  // removes what a failed removal left
      for (const auto& entry : std::filesystem::directory_iterator(folder.path())) CHECK(!entry.path().string().ends_with(".tmp"));
      for (const auto& d : list(library.get())) CHECK(d.status == KV_OK);
      Got again = must_get(library.get(), tiny_model(), text, ask);
      CHECK(again.result.tokens_found == again.result.tokens);
    }
  }
}
