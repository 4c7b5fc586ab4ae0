// A folder of documents: what is found, what is read, what is kept, what goes, and what becomes of
// it all when something fails.
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
#include "helpers.h"
#include "os/os.h"
#include "replacing.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

struct CloseLibrary {
  void operator()(kv_library* library) const { kv_library_close(library); }
};
using Library = std::unique_ptr<kv_library, CloseLibrary>;

std::vector<std::string> logged;  // by libraries of open_library

Library open_library(const std::string& folder, uint64_t max_bytes = 0) {
  kv_library_options o;
  kv_init(&o, sizeof o);
  o.max_bytes = max_bytes;
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
  kv_init(&o, sizeof o);
  o.name = ask.name;
  o.flags = ask.flags;
  o.session = &ask.session;
  kv_control control = control_of(ask.cancel);
  control.progress = ask.progress;
  control.user = ask.user;
  Got got;
  got.result.struct_size = sizeof got.result;
  kv_session* session = nullptr;
  got.status = kv_library_session(library, model, text.data(), text.size(), &o, &control, &session,
                                  &got.result, &got.error);
  got.session.reset(session);
  CHECK((session != nullptr) == (got.status == KV_OK));
  return got;
}

Got must_get(kv_library* library, kv_model* model, const std::string& text, const Ask& ask = {}) {
  Got got = get(library, model, text, ask);
  REQUIRE_MESSAGE(got.status == KV_OK, got.error.message);
  CHECK(got.result.tokens == sequence(got.session.get()).size());
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
std::vector<int32_t> fresh_answer(kv_model* model, const std::string& text,
                                  std::vector<int32_t>* tokens = nullptr) {
  const Session session = open_session(model);
  read_text(session.get(), text);
  if (tokens) *tokens = sequence(session.get());
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
    if (strategy) named.session.decode = budgeted(strategy, 64);
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
  CHECK(sequence(second.session.get()) == sequence(first.session.get()));
  CHECK(peek(second.session.get(), 8) == peek(first.session.get(), 8));

  const Got beginning = must_get(library.get(), tiny_model(), text.substr(0, 1000));
  CHECK(beginning.result.tokens_found == beginning.result.tokens);
  CHECK(beginning.result.saved == 0);
  CHECK(list(library.get()).size() == 1);
  std::vector<int32_t> tokens;
  CHECK(peek(beginning.session.get(), 8) ==
        fresh_answer(tiny_model(), text.substr(0, 1000), &tokens));
  CHECK(sequence(beginning.session.get()) == tokens);

  const std::string longer = text.substr(0, 1200) + text_of(700, 'b');
  const Got rest = must_get(library.get(), tiny_model(), longer);
  CHECK(rest.result.tokens_found >= 1200);
  CHECK(rest.result.tokens_found < 1210);
  CHECK(rest.result.saved == 1);
  CHECK(list(library.get()).size() == 2);
  CHECK(peek(rest.session.get(), 8) == fresh_answer(tiny_model(), longer, &tokens));
  CHECK(sequence(rest.session.get()) == tokens);
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
    CHECK(sequence(got.session.get()) == tokens);
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
  CHECK(found(tiny_model(), [](auto* o) { o->decode = strategy("full"), o->threads = 1; }));
  // was read exactly: no worse
  CHECK(found(tiny_model(), [](auto* o) { o->prefill = strategy("quest"); }));
  CHECK(!found(tiny_model(), [](auto* o) { o->window_tokens = 100; }));
  CHECK(found(tiny_model(), [](auto* o) { o->window_tokens = 100; }));
  CHECK(!found(tiny_model(), [](auto* o) { o->precision = KV_PRECISION_F32; }));
  const Model other = open_model(same_shape_path);
  CHECK(!found(other.get(), [](auto*) {}));
  CHECK(found(other.get(), [](auto*) {}));
  const auto documents = list(library.get());
  CHECK(documents.size() == 4);
  std::set<std::string> models;
  for (const auto& d : documents) models.insert(d.fingerprint);
  kv_model_info info{};
  info.struct_size = sizeof info;
  REQUIRE_OK(kv_model_get_info(tiny_model(), &info, error));
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
    // a fork has it open, too
    CHECK(kv_library_remove(library.get(), "Zürich 1", nullptr) == KV_BUSY);
  }
  CHECK(kv_library_remove(library.get(), "Zürich 1", nullptr) == KV_OK);
  CHECK(list(library.get()).empty());
}

TEST_CASE("a document that has grown takes its own place where that is asked for" *
          doctest::skip(!replaces_files_in_use())) {
  TempFolder folder;
  const Library library = open_library(folder.path());
  Ask log;
  log.name = "log";
  log.flags = KV_REPLACE;
  for (std::size_t bytes : {600u, 900u, 1300u})
    must_get(library.get(), tiny_model(), text_of(bytes), log);
  CHECK(names(library.get()) == std::vector<std::string>{"log"});
  CHECK(list(library.get())[0].tokens >= 1300);
  CHECK(must_get(library.get(), tiny_model(), text_of(600)).result.saved == 0);
}

TEST_CASE(
    "the least recently used documents go when there is no room, those that are open do not") {
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

  Got open_d = must_get(library.get(), tiny_model(), text_of(600, 'd')),
      open_e = must_get(library.get(), tiny_model(), text_of(600, 'e'));
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
  const Library library = open_library(folder.path()),
                small = open_library(folder.path(), large + size / 2);
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
  grown.flags = KV_REPLACE;
  const Got got =
      must_get(small.get(), tiny_model(), text_of(600, 'c') + text_of(3000, 'd'), grown);
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
  // one too many: it has its name, which may not last
  CHECK(names(library.get()) == std::vector<std::string>{"c", "b", "a"});
  let_time_pass();
  ask.name = "d";
  CHECK(must_get(library.get(), tiny_model(), text_of(600, 'd'), ask).result.saved == 1);
  CHECK(names(library.get()) == std::vector<std::string>{"d", "c"});
}

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
    "damaged documents are listed for what they are and passed over; a new reading replaces those "
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
    "what is listed can be renamed and removed, and what cannot be a document's name is not "
    "listed") {
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

TEST_CASE("a lock that is a link is refused, and what it leads to is not made" *
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

TEST_CASE(
    "a damaged document gives its place to what begins with it, not to what only begins like it") {
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
    CHECK(sequence(got.session.get()).size() == got.result.tokens);
    REQUIRE_OK(kv_session_set_strategy(got.session.get(), strategy("full"), error));
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
