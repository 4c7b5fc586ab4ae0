// A folder of documents: what is found, prefilled, kept and evicted.
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

TEST_CASE("a session over all documents of a library, or over those of a list") {
  TempFolder folder;
  const Library library = open_library(folder.file("lib"));
  for (const char* name : {"b", "a", "c"}) {
    Ask named;
    named.name = name;
    must_get(library.get(), tiny_model(), text_of(300, *name), named);
  }
  const auto names_of = [](kv_session* session) {
    std::string names;
    for (uint32_t i = 0;; ++i) {
      kv_session_document document;
      kv_init(&document, sizeof document);
      kv_error error{};
      const kv_status status = kv_session_get_document(session, i, &document, &error);
      if (status == KV_NOT_FOUND) return names;
      REQUIRE_MESSAGE(status == KV_OK, std::string(error.message));
      const std::string path = document.path;
      names += path.substr(path.rfind('/') + 1, 1);
    }
  };
  const auto compose = [&](std::vector<const char*> names, kv_session** out) {
    kv_error error{};
    return kv_library_compose(library.get(), tiny_model(), names.data(), names.size(), nullptr,
                              nullptr, out, &error);
  };
  kv_session* composed = nullptr;
  REQUIRE(compose({}, &composed) == KV_OK);
  const Session all(composed);
  CHECK(names_of(all.get()) == "abc");
  kv_error error{};
  CHECK(kv_library_remove(library.get(), "b", &error) == KV_BUSY);  // the session maps it
  REQUIRE(compose({"c", "a"}, &composed) == KV_OK);
  const Session some(composed);
  CHECK(names_of(some.get()) == "ca");
  REQUIRE(compose({"b"}, &composed) == KV_OK);
  const Session one(composed);
  CHECK(names_of(one.get()) == "b");
  CHECK(compose({"d"}, &composed) == KV_NOT_FOUND);
  // a document with a question is left out, and the log has the reason
  kv_generate_options keeping;
  kv_init(&keeping, sizeof keeping);
  keeping.flags = KV_KEEP_TURN, keeping.max_tokens = 2;
  const Got asked = must_get(library.get(), tiny_model(), text_of(300, 'a'));
  REQUIRE(kv_generate(asked.session.get(), "ab", 2, &keeping, nullptr, nullptr, nullptr, nullptr,
                      &error) == KV_OK);
  REQUIRE(kv_save(asked.session.get(), folder.file("lib/z.kv").c_str(), nullptr, &error) == KV_OK);
  logged.clear();
  REQUIRE(compose({}, &composed) == KV_OK);
  const Session rest(composed);
  REQUIRE(logged.size() == 1);
  CHECK(logged[0].find("z.kv") != std::string::npos);
  CHECK(names_of(rest.get()) == "abc");
  CHECK(compose({"a", "z"}, &composed) == KV_BAD_ARGUMENT);

  // a saved session over documents is none of them, and begins no text
  const std::string over = folder.file("lib/over.kv");
  REQUIRE(kv_generate(rest.get(), "ab", 2, &keeping, nullptr, nullptr, nullptr, nullptr, &error) ==
          KV_OK);
  REQUIRE(kv_save(rest.get(), over.c_str(), nullptr, &error) == KV_OK);
  logged.clear();
  REQUIRE(compose({}, &composed) == KV_OK);
  const Session again(composed);
  CHECK(names_of(again.get()) == "abc");
  CHECK(logged.size() == 1);                     // z.kv
  CHECK(compose({"over"}, &composed) == KV_OK);  // one name: as kv_load
  const Session loaded(composed);
  CHECK(names_of(loaded.get()) == "abc");
  CHECK(compose({"a", "over"}, &composed) == KV_BAD_ARGUMENT);
  CHECK(must_get(library.get(), tiny_model(), text_of(300, 'b')).result.tokens_found > 250);
  CHECK(inspect_file(over).documents == 3);
  CHECK(inspect_file(folder.file("lib/a.kv")).documents == 0);
  const auto status_of = [&](uint32_t index) {
    kv_file_document document;
    kv_init(&document, sizeof document);
    REQUIRE(kv_file_get_document(over.c_str(), index, &document, &error) == KV_OK);
    CHECK(document.path == folder.file("lib/") + "abc"[index] + ".kv");
    CHECK(document.tokens > 250);
    CHECK(document.file_bytes > 4096);
    CHECK(document.flags == (KV_DOCUMENT_CANDIDATE | KV_DOCUMENT_ATTENDED));
    return document.status;
  };
  for (uint32_t i = 0; i < 3; ++i) CHECK(status_of(i) == KV_OK);
  std::filesystem::remove(folder.file("lib/a.kv"));
  std::filesystem::copy_file(folder.file("lib/c.kv"), folder.file("lib/b.kv"),
                             std::filesystem::copy_options::overwrite_existing);
  CHECK(status_of(0) == KV_NOT_FOUND);
  CHECK(status_of(1) == KV_MODEL_MISMATCH);
  CHECK(status_of(2) == KV_OK);
  CHECK(names_of(loaded.get()) == "abc");
}

TEST_CASE("the documents of a library keep within one memory limit, and come and go") {
  TempFolder folder;
  const Library library = open_library(folder.file("lib"));
  for (char name = 'a'; name < 'i'; ++name) {
    Ask named;
    const std::string text(1, name);
    named.name = text.c_str();
    must_get(library.get(), tiny_model(), text_of(2000, name), named);
  }
  kv_session_options options = small_options();
  options.decode = strategy("bounded");
  kv_compose_options compose;
  kv_init(&compose, sizeof compose);
  compose.session = &options;
  kv_session* out = nullptr;
  kv_error error{};
  const auto composed = [&] {
    return kv_library_compose(library.get(), tiny_model(), nullptr, 0, &compose, nullptr, &out,
                              &error);
  };
  const auto answer = [](kv_session* session) { return ask(session, "What is it?", 6).text; };
  REQUIRE(composed() == KV_OK);
  const Session free(out);
  const std::string wanted = answer(free.get());
  options.memory_limit = 1000;
  REQUIRE(composed() == KV_LIMIT);
  CHECK(std::string(error.message).find("8 documents") != std::string::npos);
  // what it says that they take at least, and more
  const std::string message = error.message;
  options.memory_limit = std::stoull(message.substr(message.find("at least ") + 9));
  for (const uint64_t more : {0u, 100'000u, 4'000'000u}) {
    options.memory_limit += more;
    REQUIRE_MESSAGE(composed() == KV_OK, error.message);
    const Session limited(out);
    CHECK(answer(limited.get()) == wanted);
    CHECK(stats_of(limited.get()).private_bytes <= options.memory_limit);
    CHECK(stats_of(limited.get()).memory_limit == options.memory_limit);
  }
  // a new document is in the next session; a session holds what it maps
  options.memory_limit = 0;
  Ask named;
  named.name = "i";
  must_get(library.get(), tiny_model(), text_of(2000, 'i'), named);
  CHECK(answer(free.get()) == wanted);
  REQUIRE(composed() == KV_OK);
  {
    const Session nine(out);
    kv_session_document last;
    kv_init(&last, sizeof last);
    CHECK(kv_session_get_document(nine.get(), 8, &last, &error) == KV_OK);
    CHECK(kv_library_remove(library.get(), "i", &error) == KV_BUSY);
  }
  CHECK(kv_library_remove(library.get(), "i", &error) == KV_OK);
  CHECK(kv_library_remove(library.get(), "a", &error) == KV_BUSY);
  REQUIRE(composed() == KV_OK);
  const Session eight(out);
  CHECK(answer(eight.get()) == wanted);
}

TEST_CASE("a document with windows or states serves texts from its checkpoints on") {
  for (const char* name : {"gemma3-linear", "qwen35", "falcon-h1"}) {
    CAPTURE(name);
    TempFolder folder;
    const Library library = open_library(folder.file("lib"));
    const Model model = open_model((std::string(FIXTURES "/models/") + name + ".gguf").c_str());
    const std::string text = text_of(2500);
    REQUIRE(must_get(library.get(), model.get(), text).result.saved == 1);
    const Got same = must_get(library.get(), model.get(), text);
    CHECK(same.result.tokens_found == same.result.tokens);
    CHECK(stats_of(same.session.get()).prefilled_again == 0);
    const std::string longer = text + text_of(300, 'b');
    const Got rest = must_get(library.get(), model.get(), longer);
    CHECK(rest.result.tokens_found + 310 >= rest.result.tokens);
    // The common beginning of two texts is found in either's document, with the same bits.
    const std::string common = text.substr(0, 1200), other = common + text_of(300, 'c');
    const Library second = open_library(folder.file("second"));
    must_get(second.get(), model.get(), common + text_of(1300, 'd'));
    const Got one = must_get(library.get(), model.get(), other),
              two = must_get(second.get(), model.get(), other);
    for (const Got* got : {&one, &two}) {
      CHECK(got->result.tokens_found >= 1150);
      CHECK(got->result.tokens_found <= 1210);
      CHECK(stats_of(got->session.get()).prefilled_again <= 1024);
      CHECK(got->result.saved == 1);
    }
    CHECK(sequence(one.session.get()) == sequence(two.session.get()));
    CHECK(peek(one.session.get(), 8) == peek(two.session.get(), 8));
    CHECK(must_get(library.get(), model.get(), other).result.tokens_found == one.result.tokens);
    CHECK(must_get(library.get(), model.get(), text_of(900, 'e')).result.tokens_found == 0);
  }
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

TEST_CASE(
    "nothing is evicted for a document that cannot fit, nor is the one that it would replace") {
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
