// Statistics as structs: the JSON for people has the same values.
#include <cstring>
#include <nlohmann/json.hpp>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;
using nlohmann::json;

namespace {

json json_of(kv_session* session) {
  std::string text(40'000, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_session_stats_json(session, text.data(), text.size(), &size, error));
  return json::parse(text.substr(0, size - 1));
}

void check_same(const kv_session_stats& s, const json& j) {
#define SAME(field) CHECK(j.at(#field).get<uint64_t>() == uint64_t{s.field})
  SAME(threads);
  SAME(tokens);
  SAME(context_tokens);
  SAME(sealed_tokens);
  SAME(page_tokens);
  SAME(sink_tokens);
  SAME(window_tokens);
  SAME(prefill_chunk);
  SAME(kv_bytes_per_token);
  SAME(private_bytes);
  SAME(mapped_bytes);
  SAME(spilled_bytes);
  SAME(memory_limit);
  SAME(prefill_tokens);
  SAME(prefill_ns);
  SAME(sparse_tokens);
  SAME(load_ns);
  SAME(prefilled_again);
  SAME(budget_tokens);
  SAME(last_steps);
  SAME(last_decode_ns);
  SAME(last_tokens_read);
  SAME(last_tokens_present);
  SAME(last_pages_touched);
#undef SAME
  if (s.last_mass_read < 0) CHECK(j.at("last_mass_read").is_null());
  else CHECK(j.at("last_mass_read").get<double>() == doctest::Approx(s.last_mass_read));
  CHECK(j.at("decode_strategy").get<std::string>() == s.decode_strategy);
  CHECK(j.at("chat_format").get<std::string>() == s.chat_format);
  CHECK(j.at("device").get<std::string>() == s.device);
}

}  // namespace

TEST_CASE("statistics of a session describe its sequence and its last decode") {
  const TempFolder folder;
  const Session session = tiny_session(300);
  kv_session_stats s = stats_of(session.get());
  check_same(s, json_of(session.get()));
  CHECK(s.struct_size == sizeof s);
  CHECK(s.tokens == 300);
  CHECK(s.threads == 2);
  CHECK(s.prefill_chunk == 64);
  CHECK(s.sealed_tokens + s.window_tokens == 300);
  CHECK(s.sealed_tokens % s.page_tokens == 0);
  CHECK(s.prefill_tokens == 300);
  CHECK(s.prefill_ns > 0);
  CHECK(s.load_ns == 0);
  CHECK(s.last_steps == 0);
  CHECK(s.last_mass_read == -1);
  CHECK(s.private_bytes > 0);
  CHECK(s.last_drafted == 0);
  CHECK(s.gpu_layers == 0);
  CHECK(s.gpu_flags == 0);
  CHECK(std::string(s.device) == "cpu");
  CHECK(std::string(s.chat_format) == "chatml");

  kv_answer answer;
  kv_init(&answer, sizeof answer);
  REQUIRE_OK(
      kv_generate(session.get(), "a", 1, nullptr, nullptr, nullptr, nullptr, &answer, error));
  s = stats_of(session.get());
  check_same(s, json_of(session.get()));
  CHECK(s.last_steps == answer.answer_tokens);
  CHECK(s.last_tokens_read == answer.tokens_read);
  CHECK(s.last_tokens_present == answer.tokens_present);
  CHECK(s.last_tokens_read <= s.last_tokens_present);

  save(session.get(), folder.file("a.kv"));
  const Session loaded = load(tiny_model(), folder.file("a.kv"));
  s = stats_of(loaded.get());
  check_same(s, json_of(loaded.get()));
  CHECK(s.load_ns > 0);
  CHECK(s.mapped_bytes > 0);
  CHECK(s.prefill_tokens == 0);
}

TEST_CASE("statistics name the strategy of the next token, not of the last one") {
  const Session session = tiny_session(300);
  REQUIRE_OK(
      kv_generate(session.get(), "a", 1, nullptr, nullptr, nullptr, nullptr, nullptr, error));
  for (const char* name : {"quest", "window", "full"}) {
    REQUIRE_OK(kv_session_set_strategy(session.get(), strategy(name), error));
    CHECK(std::string(stats_of(session.get()).decode_strategy) == name);
  }
}

TEST_CASE("statistics have the plan of the next token after a prefill and a rewind") {
  kv_session_options o = small_options();
  o.decode = strategy("quest", {{KV_PARAM_BUDGET_FRACTION, 0.5}});
  const Session session = tiny_session(300, o);
  const auto check = [&] {
    const kv_session_stats s = stats_of(session.get());
    CHECK(s.budget_tokens == (s.sealed_tokens + 1) / 2);
    check_same(s, json_of(session.get()));
  };
  CHECK(ask(session.get(), "a", 2).status == KV_OK);
  check();
  read_tokens(session.get(), some_tokens(300));
  check();
  CHECK(ask(session.get(), "a", 2).status == KV_OK);
  REQUIRE_OK(kv_session_rewind(session.get(), 200, error));
  check();
}

TEST_CASE("an empty question to an empty sequence is refused") {
  const Session session = tiny_session(0);
  CHECK(kv_generate(session.get(), "", 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) ==
        KV_BAD_STATE);
  CHECK(stats_of(session.get()).tokens == 0);
}

TEST_CASE("statistics of an index are there once it is built") {
  kv_session_options o = small_options();
  o.decode = strategy("ivf");
  const Session session = tiny_session(2400, o);
  CHECK(stats_of(session.get()).index_tokens == 0);
  REQUIRE_OK(kv_session_prepare(session.get(), nullptr, error));
  const kv_session_stats s = stats_of(session.get());
  CHECK(s.index_tokens > 0);
  CHECK(s.index_bytes > 0);
  CHECK(s.index_ns > 0);
  CHECK(json_of(session.get()).at("index_tokens").get<uint64_t>() == s.index_tokens);
}

TEST_CASE("a shorter struct of statistics is filled up to its size") {
  const Session session = tiny_session(10);
  alignas(8) unsigned char bytes[sizeof(kv_session_stats)];
  std::memset(bytes, 0xAB, sizeof bytes);
  const uint32_t size = 24;
  std::memcpy(bytes, &size, sizeof size);
  REQUIRE_OK(
      kv_session_get_stats(session.get(), reinterpret_cast<kv_session_stats*>(bytes), error));
  uint64_t tokens = 0;
  std::memcpy(&tokens, bytes + offsetof(kv_session_stats, tokens), sizeof tokens);
  CHECK(tokens == 10);
  for (std::size_t i = size; i < sizeof bytes; ++i) CHECK(bytes[i] == 0xAB);
  CHECK(kv_session_get_stats(session.get(), nullptr, nullptr) == KV_BAD_ARGUMENT);
  kv_session_stats none{};
  CHECK(kv_session_get_stats(session.get(), &none, nullptr) == KV_BAD_ARGUMENT);
}

TEST_CASE("measurements of a session can be set and stopped at any time") {
  const Session session = tiny_session(600);
  CHECK(kv_session_measure(session.get(), 8, nullptr) == KV_BAD_ARGUMENT);
  REQUIRE_OK(kv_session_measure(session.get(), KV_MEASURE_COMPARE | KV_MEASURE_CERTIFY, error));
  CHECK(ask(session.get(), "a", 2).status == KV_OK);
  CHECK(json_of(session.get()).contains("compared"));
  CHECK(json_of(session.get()).contains("last_certificate"));
  CHECK(json_of(fork(session.get()).get()).contains("compared"));
  REQUIRE_OK(kv_session_set_strategy(session.get(), budgeted("flat", 64), error));
  CHECK(ask(session.get(), "a", 2).status == KV_OK);
  CHECK(json_of(session.get()).contains("last_certificate"));
  REQUIRE_OK(kv_session_measure(session.get(), 0, error));
  CHECK(ask(session.get(), "a", 2).status == KV_OK);
  CHECK(!json_of(session.get()).contains("compared"));
  CHECK(!json_of(session.get()).contains("last_certificate"));
}

TEST_CASE("statistics of a cache count its tokens and its attention") {
  kv_cache_shape shape;
  kv_init(&shape, sizeof shape);
  shape.layers = shape.heads = shape.kv_heads = 1, shape.head_dim = 32, shape.max_tokens = 1000;
  kv_cache* opened = nullptr;
  REQUIRE_OK(kv_cache_open(&shape, nullptr, &opened, error));
  const std::unique_ptr<kv_cache, void (*)(kv_cache*)> cache(opened, kv_cache_close);
  const std::vector<float> rows(200 * 32, 0.5f);
  std::vector<float> out(200 * 32);
  REQUIRE_OK(kv_cache_update(opened, 0, KV_F32, rows.data(), rows.data(), nullptr, 200, error));
  kv_cache_stats s;
  kv_init(&s, sizeof s);
  REQUIRE_OK(kv_cache_get_stats(opened, &s, error));
  CHECK(s.tokens == 200);
  CHECK(s.step_tokens == 200);
  CHECK(s.max_tokens == 1000);
  REQUIRE_OK(kv_cache_update(opened, 0, KV_F32, rows.data(), rows.data(), nullptr, 1, error));
  REQUIRE_OK(
      kv_cache_attention(opened, 0, KV_F32, rows.data(), out.data(), 1, nullptr, nullptr, error));
  REQUIRE_OK(kv_cache_get_stats(opened, &s, error));
  CHECK(s.tokens == 201);
  CHECK(s.sealed_tokens > 0);
  CHECK(s.tokens_present > 0);
  CHECK(std::string(s.decode_strategy) == "full");
  std::string text(4000, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_cache_stats_json(opened, text.data(), text.size(), &size, error));
  const json j = json::parse(text.substr(0, size - 1));
  CHECK(j.at("tokens").get<uint64_t>() == s.tokens);
  CHECK(j.at("tokens_present").get<uint64_t>() == s.tokens_present);
  CHECK(j.at("decode_strategy").get<std::string>() == s.decode_strategy);
}
