// Helpers of the programs of this folder. Each is a host with one unusual property, and uses the
// library as any host does.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kvasir.h"
#include "kvasir_experimental.h"
#include "strategies.h"

namespace host {

// 259 tokens of vocabulary, random weights
inline const char* const tiny_path = FIXTURES "/models/llama-q8_0.gguf";

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::exit(1);
}

inline void require_ok(kv_status status, const kv_error& error, const char* what) {
  if (status == KV_OK) return;
  std::fprintf(stderr, "broken: %s: %s: %s\n", what, kv_status_text(status), error.message);
  std::exit(1);
}

inline kv_model* open_model(const char* path = tiny_path) {
  kv_model* model = nullptr;
  kv_error error{};
  require_ok(kv_open(path, nullptr, nullptr, &model, &error), error, "kv_open");
  return model;
}

// Two threads, chunks of 64 tokens, a small budget from the first layer on: summaries, pages and
// window all take part.
inline kv_session_options session_options(const char* strategy = "quest") {
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.threads = 2;
  o.prefill_chunk = 64;
  o.decode = strategies::budgeted(strategy, 64);
  return o;
}

inline kv_session* open_session(kv_model* model,
                                const kv_session_options& options = session_options()) {
  kv_session* session = nullptr;
  kv_error error{};
  require_ok(kv_session_open(model, &options, &session, &error), error, "kv_session_open");
  return session;
}

// n tokens that are not all alike.
inline std::vector<int32_t> some_tokens(std::size_t n) {
  std::vector<int32_t> tokens(n);
  uint32_t x = 12345;
  for (int32_t& t : tokens)
    x = x * 1664525u + 1013904223u, t = static_cast<int32_t>(3 + (x >> 16) % 250);
  return tokens;
}

inline void read(kv_session* session, std::size_t n, const kv_control* options = nullptr) {
  const std::vector<int32_t> tokens = some_tokens(n);
  kv_error error{};
  require_ok(kv_prefill_tokens(session, tokens.data(), tokens.size(), options, nullptr, &error),
             error, "kv_prefill_tokens");
}

inline kv_generate_options generate_options(uint32_t max_tokens = 8) {
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.max_tokens = max_tokens;
  return o;
}

inline std::string ask(kv_session* session, const char* question = "a question",
                       uint32_t max_tokens = 8) {
  const kv_generate_options o = generate_options(max_tokens);
  const auto add = [](const char* text, std::size_t size, void* user) -> int32_t {
    return static_cast<std::string*>(user)->append(text, size), 0;
  };
  std::string answer;
  kv_error error{};
  require_ok(kv_generate(session, question, std::strlen(question), &o, nullptr, add, &answer,
                         nullptr, &error),
             error, "kv_generate");
  return answer;
}

inline std::string stats(kv_session* session) {
  std::size_t size = 0;
  (void)kv_session_stats_json(session, nullptr, 0, &size, nullptr);
  std::string text(size, '\0');
  kv_error error{};
  require_ok(kv_session_stats_json(session, text.data(), text.size(), &size, &error), error,
             "kv_session_stats_json");
  text.resize(size - 1);
  return text;
}

inline std::size_t count_tokens(kv_session* session) {
  std::size_t count = 0;
  (void)kv_session_tokens(session, nullptr, 0, &count, nullptr);
  return count;
}

// The names of all strategies.
inline std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  kv_strategy_info info{};
  info.struct_size = sizeof info;
  for (uint32_t i = 0; kv_strategy_list(i, &info, nullptr) == KV_OK; ++i)
    names.emplace_back(info.name);
  return names;
}

// How often a program does what it does: its argument, or `otherwise`.
inline int times(int argc, char** argv, int otherwise) {
  return argc > 1 ? std::atoi(argv[1]) : otherwise;
}

}  // namespace host
