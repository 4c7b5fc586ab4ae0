// Steps of a cache: their ends, refused calls, files of other shapes, damage and memory.
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "cache_helpers.h"
#include "failing_allocations.h"
#include "temp_folder.h"

using namespace api_test;

TEST_CASE("going back drops tokens, or a step that is not complete") {
  const Text text(small, 400);
  const Cache cache = open_cache(small, options_of("full"));
  read(cache.get(), text, 0, 300);
  const auto out = step(cache.get(), text, 300, 1);
  REQUIRE_OK(kv_cache_truncate(cache.get(), 300, error));
  CHECK(step(cache.get(), text, 300, 1) == out);
  // the wrong tokens
  REQUIRE_OK(
      kv_cache_update(cache.get(), 0, KV_F32, text.key(0, 5), text.value(0, 5), nullptr, 3, error));
  CHECK(stats_of(cache.get()).tokens == 301);
  kv_cache* fork = nullptr;
  CHECK(kv_cache_fork(cache.get(), nullptr, &fork, nullptr) == KV_BAD_STATE);
  REQUIRE_OK(kv_cache_truncate(cache.get(), 301, error));
  REQUIRE_OK(kv_cache_truncate(cache.get(), 300, error));
  CHECK(step(cache.get(), text, 300, 1) == out);
  REQUIRE_OK(kv_cache_truncate(cache.get(), 0, error));
  CHECK(largest_difference(step(cache.get(), text, 0, 30)[1], text.exact(1, 0, 30)) <
        window_tolerance);
}

TEST_CASE("a step that is taken back leaves the window as it was") {
  const Text text(small, 200);
  for (uint32_t kept : {0u, 1u, 3u, 20u}) {
    CAPTURE(kept);
    const Cache cache = open_cache(small, options_of("full")),
                shorter = open_cache(small, options_of("full"));
    for (kv_cache* c : {cache.get(), shorter.get()}) read(c, text, 0, 112);
    step(cache.get(), text, 112, 20);  // with all of it a page would leave the window
    REQUIRE_OK(kv_cache_truncate(cache.get(), 112 + kept, error));
    if (kept > 0) step(shorter.get(), text, 112, kept);
    CHECK(stats_of(cache.get()).tokens == 112 + kept);
    CHECK(step(cache.get(), text, 112 + kept, 1) == step(shorter.get(), text, 112 + kept, 1));
  }
}

TEST_CASE("a complete step is attended until a call ends it, and refused calls do not end it") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Text text(small, 100);
  kv_cache_shape shape = small;
  shape.max_tokens = 70;
  const Cache cache = open_cache(shape, options_of("full"));
  kv_cache* const c = cache.get();
  const auto update = [&](uint32_t layer, uint32_t n) {
    return kv_cache_update(c, layer, KV_F32, text.key(layer, 0), text.value(layer, 0), nullptr, n,
                           nullptr);
  };
  Floats out(100 * text.row());
  kv_error reply{};
  const auto attend = [&](uint32_t n) {
    return kv_cache_attention(c, 1, KV_F32, text.query(1, 0), out.data(), n, nullptr, nullptr,
                              &reply);
  };
  REQUIRE(attend(1) == KV_BAD_STATE);
  CHECK(std::strstr(reply.message, "kv_cache_update") != nullptr);
  step(c, text, 0, 60);
  CHECK(update(0, 11) == KV_CONTEXT_FULL);
  CHECK(attend(60) == KV_OK);
  CHECK(kv_cache_truncate(c, 61, nullptr) == KV_BAD_ARGUMENT);
  CHECK(attend(60) == KV_OK);
  kv_cache* copy = nullptr;
  const std::function<kv_status()> ends[] = {
      [&] { return kv_cache_save(c, path.c_str(), nullptr, nullptr); },
      [&] { return kv_cache_fork(c, nullptr, &copy, nullptr); },
      [&] { return kv_cache_truncate(c, 60, nullptr); },
      [&] { return kv_cache_truncate(c, 59, nullptr); }};
  for (const auto& end : ends) {
    REQUIRE_OK(kv_cache_truncate(c, 0, error));
    step(c, text, 0, 60);
    REQUIRE(end() == KV_OK);
    REQUIRE(attend(60) == KV_BAD_STATE);
    CHECK_MESSAGE(std::strstr(reply.message, "not to be updated again") != nullptr, reply.message);
  }
  kv_cache_close(copy);
  REQUIRE_OK(kv_cache_truncate(c, 0, error));
  REQUIRE(attend(60) == KV_BAD_STATE);
  CHECK(std::strstr(reply.message, "kv_cache_update") != nullptr);
}

TEST_CASE("a strategy that cannot choose is refused before the step before is over") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Text text(small, 300);
  const Cache cache = open_cache(small, options_of("full"));
  read(cache.get(), text, 0, 250);  // without queries
  REQUIRE_OK(kv_cache_save(cache.get(), path.c_str(), nullptr, error));
  const kv_cache_options o = options_of("infllm", 64);
  kv_cache* made = nullptr;
  REQUIRE_OK(kv_cache_load(&small, path.c_str(), &o, nullptr, &made, error));
  const Cache loaded(made);
  step(made, text, 250, 2, nullptr, true);
  CHECK(kv_cache_update(made, 0, KV_F32, text.key(0, 252), text.value(0, 252), text.query(0, 252),
                        1, nullptr) == KV_BAD_STATE);
  Floats out(2 * text.row());
  CHECK(kv_cache_attention(made, 0, KV_F32, text.query(0, 250), out.data(), 2, nullptr, nullptr,
                           nullptr) == KV_OK);
}

TEST_CASE("a step out of order is refused and changes nothing") {
  const Text text(small, 100);
  kv_cache_shape shape = small;
  shape.max_tokens = 70;
  const Cache cache = open_cache(shape, options_of("full"));
  kv_cache* const c = cache.get();
  Floats out(100 * text.row(), 7);
  const auto update = [&](uint32_t layer, uint32_t n) {
    return kv_cache_update(c, layer, KV_F32, text.key(layer, 0), text.value(layer, 0), nullptr, n,
                           nullptr);
  };
  const auto attend = [&](uint32_t layer, uint32_t n) {
    return kv_cache_attention(c, layer, KV_F32, text.query(layer, 0), out.data(), n, nullptr,
                              nullptr, nullptr);
  };
  CHECK(attend(0, 1) == KV_BAD_STATE);
  CHECK(update(1, 60) == KV_OK);  // any order
  CHECK(attend(0, 60) == KV_BAD_STATE);
  CHECK(attend(1, 59) == KV_BAD_ARGUMENT);
  CHECK(update(1, 60) == KV_BAD_STATE);
  CHECK(update(0, 59) == KV_BAD_STATE);
  CHECK(kv_cache_save(c, "/nowhere/a.kv", nullptr, nullptr) == KV_BAD_STATE);
  CHECK(update(0, 60) == KV_OK);
  CHECK(update(0, 11) == KV_CONTEXT_FULL);
  CHECK(stats_of(c).tokens == 60);
  for (float bad : {NAN, INFINITY, -INFINITY, 2e30f}) {
    Floats k(text.key(0, 0), text.key(0, 10));
    k[777] = bad;
    CHECK(kv_cache_update(c, 0, KV_F32, k.data(), text.value(0, 0), nullptr, 10, nullptr) ==
          KV_BAD_ARGUMENT);
    CHECK(kv_cache_update(c, 0, KV_F32, text.key(0, 0), k.data(), nullptr, 10, nullptr) ==
          KV_BAD_ARGUMENT);
  }
  CHECK(out == Floats(out.size(), 7));
  const Cancel cancel = make_cancel();
  kv_cancel_fire(cancel.get());
  const kv_control o = control_of(cancel.get());
  CHECK(update(0, 10) == KV_OK);
  CHECK(kv_cache_attention(c, 0, KV_F32, text.query(0, 60), out.data(), 10, nullptr, &o, nullptr) ==
        KV_CANCELLED);
  CHECK(out == Floats(out.size(), 7));
  CHECK(attend(0, 10) == KV_OK);
}

TEST_CASE(
    "a file of another shape, of another identity or of a session is refused, and a session "
    "refuses a cache's") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), session_path = folder.file("s.kv");
  const Text text(small, 200);
  const kv_cache_options o = options_of("full");
  const Cache cache = open_cache(small, o);
  read(cache.get(), text, 0, 200);
  REQUIRE_OK(kv_cache_save(cache.get(), path.c_str(), nullptr, error));
  save(tiny_session(200).get(), session_path);
  kv_cache* out = nullptr;
  const auto refused = [&](const std::string& file,
                           const std::function<void(kv_cache_shape*)>& change, kv_status expected) {
    kv_cache_shape shape = small;
    change(&shape);
    kv_error error{};
    CHECK_MESSAGE(kv_cache_load(&shape, file.c_str(), &o, nullptr, &out, &error) == expected,
                  error.message);
    CHECK(out == nullptr);
  };
  refused(
      path, [](auto* s) { s->layers = 3; }, KV_MODEL_MISMATCH);
  refused(
      path, [](auto* s) { s->head_dim = 64; }, KV_MODEL_MISMATCH);
  refused(
      path, [](auto* s) { s->identity[31] = 1; }, KV_MODEL_MISMATCH);
  refused(
      path, [](auto* s) { s->max_tokens = 199; }, KV_CONTEXT_FULL);
  refused(
      session_path, [](auto* s) { s->layers = 2, s->heads = s->kv_heads = 2, s->head_dim = 64; },
      KV_MODEL_MISMATCH);
  kv_session* session = nullptr;
  kv_error reply{};
  CHECK(kv_load(tiny_model(), path.c_str(), nullptr, nullptr, &session, &reply) ==
        KV_MODEL_MISMATCH);
  CHECK(std::strstr(reply.message, "kv_cache_load") != nullptr);
  kv_file_info info{};
  info.struct_size = sizeof info;
  REQUIRE_OK(kv_file_inspect(path.c_str(), &info, error));
  CHECK(info.tokens == 200);
  CHECK(std::string(info.model_name) == "(no model)");
  kv_cache_shape other_heads = small;
  other_heads.heads = 2;  // keys and values do not depend on it
  REQUIRE_OK(kv_cache_load(&other_heads, path.c_str(), &o, nullptr, &out, error));
  kv_cache_close(out);
}

TEST_CASE("a cache's file is of no model, also where its identity is a model's fingerprint") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  kv_model_info model{};
  model.struct_size = sizeof model;
  REQUIRE_OK(kv_model_get_info(tiny_model(), &model, error));
  kv_cache_shape shape = shape_of(model.layers, model.heads, model.kv_heads, model.head_dim);
  for (std::size_t i = 0; i < 32; ++i)
    shape.identity[i] =
        static_cast<uint8_t>(std::stoul(std::string(model.fingerprint + 2 * i, 2), nullptr, 16));
  const Text text(shape, 200);
  const Cache cache = open_cache(shape, options_of("full"));
  read(cache.get(), text, 0, 200);
  REQUIRE_OK(kv_cache_save(cache.get(), path.c_str(), nullptr, error));
  kv_session* session = nullptr;
  kv_error reply{};
  CHECK(kv_load(tiny_model(), path.c_str(), nullptr, nullptr, &session, &reply) ==
        KV_MODEL_MISMATCH);
  CHECK_MESSAGE(std::strstr(reply.message, "kv_cache_load") != nullptr, reply.message);
}

TEST_CASE("a cache that is saved lets no other call in, and its save can be stopped") {
  TempFolder folder;
  const Text text(small, 200);
  const Cache cache = open_cache(small, options_of("full"));
  read(cache.get(), text, 0, 200);
  kv_control call;
  kv_init(&call, sizeof call);
  call.user = cache.get();
  call.progress = [](int32_t phase, uint64_t, uint64_t, void* user) -> int32_t {
    CHECK(phase == KV_PHASE_SAVE);
    return kv_cache_truncate(static_cast<kv_cache*>(user), 0, nullptr) == KV_BUSY ? 1 : 0;
  };
  CHECK(kv_cache_save(cache.get(), folder.file("a.kv").c_str(), &call, nullptr) == KV_CANCELLED);
  CHECK(folder.entries() == 0);
  CHECK(stats_of(cache.get()).tokens == 200);
}

TEST_CASE(
    "a damaged page of a mapped cache is reported as damage, and the cache goes on without it") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Text text(small, 400);
  const kv_cache_options o = options_of("full");
  const Cache cache = open_cache(small, o);
  read(cache.get(), text, 0, 300);
  REQUIRE_OK(kv_cache_save(cache.get(), path.c_str(), nullptr, error));
  std::vector<uint8_t> bytes = read_file(path);
  std::size_t pages = 0;  // the section's offset, from the header's table
  for (std::size_t entry = 256; pages == 0; entry += 64)
    if (bytes[entry] == 6) std::memcpy(&pages, &bytes[entry + 16], 8);
  bytes[pages + 4096 + 100] ^= 1;  // page 1 of layer 0
  write_file(path, bytes);
  kv_cache* made = nullptr;
  kv_control verify;
  kv_init(&verify, sizeof verify);
  verify.flags = KV_VERIFY;
  CHECK(kv_cache_load(&small, path.c_str(), &o, &verify, &made, nullptr) == KV_CORRUPT);
  REQUIRE_OK(kv_cache_load(&small, path.c_str(), &o, nullptr, &made, error));
  const Cache loaded(made);
  REQUIRE_OK(
      kv_cache_update(made, 0, KV_F32, text.key(0, 300), text.value(0, 300), nullptr, 1, error));
  Floats out(text.row(), 7);
  CHECK(kv_cache_attention(made, 0, KV_F32, text.query(0, 300), out.data(), 1, nullptr, nullptr,
                           nullptr) == KV_CORRUPT);
  CHECK(out == Floats(text.row(), 7));
  REQUIRE_OK(kv_cache_truncate(made, 20, error));
  CHECK(largest_difference(step(made, text, 20, 1)[1], text.exact(1, 20, 1)) < page_tolerance);
}

TEST_CASE("a cache without memory stays as it was") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Text text(small, 400);
  const kv_cache_options o = options_of("bounded", 64);
  const Cache base = open_cache(small, o);
  read(base.get(), text, 0, 300);
  REQUIRE_OK(kv_cache_save(base.get(), path.c_str(), nullptr, error));
  const auto next = step(base.get(), text, 300, 1);
  REQUIRE_OK(kv_cache_truncate(base.get(), 300, error));
  const auto sweep =
      [&](const std::function<kv_status(long n, bool once, bool* reached)>& attempt) {
        for (bool once : {true, false}) {
          for (long n = 0; n < 10'000; n += 1 + n / 16) {
            CAPTURE(n);
            bool reached = false;
            const kv_status status = attempt(n, once, &reached);
            CHECK((status == KV_OK || (reached && status == KV_NO_MEMORY)));
            if (!reached) break;
          }
        }
      };
  const auto failing = [](long n, bool once, bool* reached,
                          const std::function<kv_status()>& call) {
    FailingAllocations memory(n, once);
    const kv_status status = call();
    *reached = memory.reached();
    return status;
  };
  kv_cache* out = nullptr;
  for (const auto& make : std::vector<std::function<kv_status()>>{
           [&] { return kv_cache_open(&small, &o, &out, nullptr); },
           [&] { return kv_cache_fork(base.get(), nullptr, &out, nullptr); },
           [&] { return kv_cache_load(&small, path.c_str(), &o, nullptr, &out, nullptr); }}) {
    sweep([&](long n, bool once, bool* reached) {
      const kv_status status = failing(n, once, reached, make);
      CHECK((status == KV_OK) == (out != nullptr));
      kv_cache_close(out);
      out = nullptr;
      return status;
    });
  }
  sweep([&](long n, bool once, bool* reached) {
    kv_cache* made = nullptr;
    REQUIRE_OK(kv_cache_load(&small, path.c_str(), &o, nullptr, &made, error));
    const Cache cache(made);
    Floats attended(text.row());
    const kv_status status = failing(n, once, reached, [&] {
      for (uint32_t l = 0; l < small.layers; ++l) {
        if (kv_status s = kv_cache_update(made, l, KV_F32, text.key(l, 300), text.value(l, 300),
                                          nullptr, 1, nullptr))
          return s;
        if (kv_status s = kv_cache_attention(made, l, KV_F32, text.query(l, 300), attended.data(),
                                             1, nullptr, nullptr, nullptr))
          return s;
      }
      return kv_cache_truncate(made, 290, nullptr);
    });
    if (status != KV_OK) REQUIRE_OK(kv_cache_truncate(made, 300, error));
    if (status != KV_OK) CHECK(step(made, text, 300, 1) == next);
    return status;
  });
}
