// A sequence saved and loaded through the public header: information about files and sessions, and
// changes to a mapped file.
#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>

#include "helpers.h"
#include "replacing.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

nlohmann::json stats(kv_session* session) {
  std::size_t size = 0;
  kv_session_stats_json(session, nullptr, 0, &size, nullptr);
  std::string text(size, '?');
  REQUIRE_OK(kv_session_stats_json(session, text.data(), size, &size, error));
  REQUIRE(text.back() == '\0');
  text.pop_back();
  return nlohmann::json::parse(text);
}

struct Progress {
  int32_t phase = 0;
  int calls = 0, wrong = 0;
  uint64_t done = 0, total = 0;

  static int32_t call(int32_t phase, uint64_t done, uint64_t total, void* user) {
    auto& p = *static_cast<Progress*>(user);
    p.wrong += p.calls > 0 && (phase != p.phase || done < p.done || total != p.total);
    p.wrong += done > total;
    p.phase = phase, p.done = done, p.total = total;
    return ++p.calls, 0;
  }
};

}  // namespace

TEST_CASE("a loaded session goes on as the saved one would, and says that it is mapped") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Session session = open_session(mini_model());
  read_text(session.get(), book(9000));
  const kv_session_stats before = stats_of(session.get());
  const std::string answer = ask(session.get(), "Who is this about?", 24).text;
  save(session.get(), path);
  const Session loaded = load(mini_model(), path);
  CHECK(sequence(loaded.get()) == sequence(session.get()));
  CHECK(ask(loaded.get(), "Who is this about?", 24).text == answer);
  CHECK(peek(loaded.get(), 80) == peek(session.get(), 80));
  const kv_session_stats after = stats_of(loaded.get());
  CHECK(before.tokens == after.tokens);
  CHECK(before.context_tokens == after.context_tokens);
  CHECK(before.page_tokens == after.page_tokens);
  CHECK(before.sealed_tokens == after.sealed_tokens);
  CHECK(before.window_tokens == after.window_tokens);
  CHECK(before.kv_bytes_per_token == after.kv_bytes_per_token);
  CHECK(before.mapped_bytes == 0);
  CHECK(after.mapped_bytes > 0);
  CHECK(after.private_bytes < before.private_bytes);
  CHECK(after.load_ns > 0);
  CHECK(before.load_ns == 0);
}

TEST_CASE("statistics match the calls") {
  const Session session = open_session(tiny_model());
  CHECK(stats_of(session.get()).tokens == 0);
  read_tokens(session.get(), some_tokens(500));
  CHECK(ask(session.get(), "q", 5).status == KV_OK);
  const kv_session_stats s = stats_of(session.get());
  CHECK(s.tokens == 500);
  CHECK(s.threads == 2);
  CHECK(s.prefill_chunk == 64);
  CHECK(s.page_tokens > 0);
  CHECK(s.sealed_tokens % s.page_tokens == 0);
  CHECK(s.sealed_tokens + s.window_tokens == 500);
  CHECK(std::string(s.decode_strategy) == "quest");
  CHECK(s.budget_tokens == 64);
  CHECK(s.last_tokens_read > 0);
  CHECK(s.last_tokens_read < s.last_tokens_present);
  CHECK(s.last_pages_touched > 0);
  CHECK(s.last_steps <= 5);
  CHECK(s.prefill_tokens == 500);
  CHECK(s.prefill_ns > 0);
  CHECK(s.gpu_layers == 0);
  CHECK(std::string(s.device) == "cpu");
  const auto json = stats(session.get());
  CHECK(json["precision"] == "int8");
  CHECK(json["strategy_asked"] == "quest");
  CHECK(json["dense_layers"].empty());
  CHECK(json["share_heads"] == true);
  CHECK(nlohmann::json::parse(kv_build_info())["cache_format"] == 5);
}

TEST_CASE("a file says whether it has what the MTP layer keeps") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Model model = open_model(FIXTURES "/models/qwen35-mtp.gguf");
  for (const uint32_t drafts : {0u, 2u}) {
    kv_session_options o = small_options();
    o.draft_tokens = drafts;
    const Session session = open_session(model.get(), o);
    read_tokens(session.get(), some_tokens(300));
    save(session.get(), path);
    CHECK(inspect_file(path).mtp_tokens == (drafts ? 299 : 0));
  }
}

TEST_CASE("a strategy reads nothing that the strategy before it chose") {
  const Session session = tiny_session(700);
  for (const char* strategy : {"bounded", "window"}) {
    REQUIRE_OK(kv_session_set_strategy(session.get(), budgeted(strategy, 48), error));
    REQUIRE(ask(session.get(), "q", 3).status == KV_OK);
    CHECK((stats_of(session.get()).last_pages_touched > 0) == (std::string(strategy) == "bounded"));
  }
}

TEST_CASE("a file says what is in it") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  for (uint32_t type : {KV_PRECISION_INT8, KV_PRECISION_F32}) {
    kv_session_options o = small_options();
    o.precision = type;
    const Session session = tiny_session(333, o);
    save(session.get(), path);
    kv_file_info info{};
    info.struct_size = sizeof info;
    REQUIRE_OK(kv_file_inspect(path.c_str(), &info, error));
    kv_model_info model{};
    model.struct_size = sizeof model;
    REQUIRE_OK(kv_model_get_info(tiny_model(), &model, error));
    CHECK(info.format_version == 3);
    CHECK(info.file_bytes == std::filesystem::file_size(path));
    CHECK(info.tokens == 333);
    CHECK(info.sealed_tokens ==
          (type == KV_PRECISION_INT8 ? stats_of(session.get()).sealed_tokens : 0));
    CHECK((info.kv_bytes > 0) == (type == KV_PRECISION_INT8));
    CHECK(info.layers == model.layers);
    CHECK(info.kv_heads == model.kv_heads);
    CHECK(info.head_dim == model.head_dim);
    CHECK(info.precision == type);
    CHECK(std::string(info.model_name) == model.name);
    const Session loaded = load(tiny_model(), path);
    CHECK(stats(loaded.get())["precision"] == (type == KV_PRECISION_INT8 ? "int8" : "f32"));
    CHECK(peek(loaded.get(), 5) == peek(session.get(), 5));
  }
}

TEST_CASE("a model says the same opened and inspected") {
  for (const char* path : {tiny_path, same_shape_path, mini_path}) {
    kv_model_info opened{}, inspected{};
    opened.struct_size = inspected.struct_size = sizeof opened;
    const Model model = open_model(path);
    REQUIRE_OK(kv_model_get_info(model.get(), &opened, error));
    REQUIRE_OK(kv_model_inspect(path, &inspected, error));
    CHECK(std::string(opened.weights) == inspected.weights);
    CHECK(opened.parameters == inspected.parameters);
    CHECK(opened.weight_bytes < std::filesystem::file_size(path));
    CHECK(opened.kv_bytes_per_token > 2u * opened.layers * opened.kv_heads * opened.head_dim);
    CHECK(opened.context_tokens > 0);
  }
}

TEST_CASE("a mapped file may be replaced or removed by name while it is in use" *
          doctest::skip(!replaces_files_in_use())) {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), other = folder.file("b.kv");
  const Session session = tiny_session(900), next = tiny_session(123);
  save(session.get(), path);
  const std::vector<int32_t> expected = peek(session.get(), 30);
  const Session mapped = load(tiny_model(), path);
  save(next.get(), path);  // over it
  CHECK(peek(mapped.get(), 30) == expected);
  CHECK(sequence(load(tiny_model(), path).get()).size() == 123);

  save(mapped.get(), path);  // a mapped session over another file, then over its own
  const Session again = load(tiny_model(), path);
  save(again.get(), path);
  CHECK(peek(again.get(), 30) == expected);
  CHECK(peek(load(tiny_model(), path, KV_VERIFY).get(), 30) == expected);

  save(next.get(), other);
  REQUIRE(std::rename(other.c_str(), path.c_str()) == 0);
  CHECK(peek(again.get(), 30) == expected);
  REQUIRE(std::remove(path.c_str()) == 0);
  CHECK(peek(again.get(), 30) == expected);
  CHECK(ask(again.get(), "q", 100, KV_KEEP_TURN).status ==
        KV_OK);  // seals pages over a file without a name
  save(again.get(), path);
  CHECK(sequence(load(tiny_model(), path).get()).size() > 1000);
}

TEST_CASE("saved files do not depend on when or how often they are saved") {
  TempFolder folder;
  const std::string a = folder.file("a.kv"), b = folder.file("b.kv");
  const Session session = tiny_session(640);
  save(session.get(), a);
  save(session.get(), b);
  CHECK(read_file(a) == read_file(b));
  const Session loaded = load(tiny_model(), a);
  save(loaded.get(), b);
  CHECK(read_file(a) == read_file(b));
  save(fork(loaded.get()).get(), b);
  CHECK(read_file(a) == read_file(b));
}

TEST_CASE(
    "a document read on after loading is measured when it would have been, so that the same layers "
    "are dense") {
  TempFolder folder;
  const std::string text = book(16'000);
  std::vector<int32_t> tokens(4000);
  std::size_t count = 0;
  kv_tokenize(mini_model(), text.data(), text.size(), 0, nullptr, tokens.data(), tokens.size(),
              &count, nullptr);
  REQUIRE(count > 3200);
  kv_session_options o = small_options();
  o.decode = strategy("quest", {{KV_PARAM_BUDGET_TOKENS, 64}, {KV_PARAM_DENSE_LAYERS, 2}});
  const Session session = open_session(mini_model(), o);
  // measured at 2048 sealed tokens, again at 2560
  read_tokens(session.get(), {tokens.begin(), tokens.begin() + 2432});
  save(session.get(), folder.file("a.kv"));
  kv_session* out = nullptr;
  REQUIRE_OK(kv_load(mini_model(), folder.file("a.kv").c_str(), &o, nullptr, &out, error));
  const Session loaded(out);
  CHECK(stats(loaded.get())["layer_errors"] == stats(session.get())["layer_errors"]);
  for (kv_session* s : {session.get(), loaded.get()})
    read_tokens(s, {tokens.begin() + 2432, tokens.begin() + 3200});
  CHECK(stats(loaded.get())["layer_errors"] == stats(session.get())["layer_errors"]);
  CHECK(peek(loaded.get(), 20) == peek(session.get(), 20));
}

TEST_CASE("an empty sequence is saved and loaded too") {
  TempFolder folder;
  const Session session = open_session(tiny_model());
  save(session.get(), folder.file("a.kv"));
  const Session loaded = load(tiny_model(), folder.file("a.kv"), KV_VERIFY);
  read_tokens(loaded.get(), some_tokens(300));
  CHECK(peek(loaded.get(), 5) == peek(tiny_session(300).get(), 5));
}

TEST_CASE("progress is reported in order, with the phase and up to the end") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const std::vector<int32_t> tokens = some_tokens(1000);
  Progress progress;
  kv_control call;
  kv_init(&call, sizeof call);
  call.progress = Progress::call;
  call.user = &progress;
  const auto check = [&](int32_t phase) {
    CHECK(progress.calls > 0);
    CHECK(progress.phase == phase);
    CHECK(progress.done == progress.total);
    CHECK(progress.total > 0);
    CHECK(progress.wrong == 0);
    progress = {};
  };
  const Session session = open_session(tiny_model());
  REQUIRE_OK(kv_prefill_tokens(session.get(), tokens.data(), tokens.size(), &call, nullptr, error));
  CHECK(progress.total == 1000);
  check(KV_PHASE_PREFILL);
  REQUIRE_OK(kv_save(session.get(), path.c_str(), &call, error));
  check(KV_PHASE_SAVE);
  REQUIRE_OK(kv_file_verify(path.c_str(), &call, error));
  check(KV_PHASE_VERIFY);
  kv_session* loaded = nullptr;
  call.flags = KV_VERIFY;
  REQUIRE_OK(kv_load(tiny_model(), path.c_str(), nullptr, &call, &loaded, error));
  kv_session_close(loaded);
  check(KV_PHASE_VERIFY);
}

TEST_CASE("a save that is not possible is refused before an index is made for it") {
  TempFolder folder;
  kv_session_options options = small_options();
  options.decode = strategy("ivf");
  const Session session = tiny_session(3000, options);
  Progress progress;
  kv_control call;
  kv_init(&call, sizeof call);
  call.progress = Progress::call;
  call.user = &progress;
  for (const std::string& path : {folder.file("none/a.kv"), folder.path(), std::string()}) {
    CHECK(kv_save(session.get(), path.c_str(), &call, nullptr) != KV_OK);
    CHECK(progress.calls == 0);
  }
  REQUIRE_OK(kv_save(session.get(), folder.file("a.kv").c_str(), &call, error));
  CHECK(progress.calls > 0);
}
