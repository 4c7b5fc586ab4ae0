// Owners of public handles, small models, and the few calls that most of these tests begin with.
// Everything goes through kvasir.h.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvasir.h"
#include "kvasir_experimental.h"
#include "strategies.h"

namespace api_test {

using strategies::budgeted;
using strategies::strategy;

struct Close {
  void operator()(kv_model* m) const { kv_close(m); }
  void operator()(kv_session* s) const { kv_session_close(s); }
  void operator()(kv_cancel* c) const { kv_cancel_release(c); }
};
using Model = std::unique_ptr<kv_model, Close>;
using Session = std::unique_ptr<kv_session, Close>;
using Cancel = std::unique_ptr<kv_cancel, Close>;

// 259 tokens of vocabulary, random weights
inline const char* const tiny_path = FIXTURES "/models/llama-q8_0.gguf";
// trained: answers questions
inline const char* const mini_path = EXAMPLES "/mini-reader-q8_0.gguf";
// the tiny model's shape, other weights
inline const char* const same_shape_path = FIXTURES "/models/llama-f32.gguf";

Model open_model(const char* path);
Model open_tiny_model(const char* chat_format);
kv_model* tiny_model();  // opened once
kv_model* mini_model();

// Two threads, chunks of 64 tokens; quest with a small budget from the first layer on, so that
// summaries, pages and window all take part.
kv_session_options small_options();

Session open_session(kv_model* model, const kv_session_options& options = small_options());
Cancel make_cancel();
// Control of one call.
kv_control control_of(kv_cancel* cancel, uint32_t flags = 0);

// n tokens that are not all alike, of the tiny model's vocabulary.
std::vector<int32_t> some_tokens(std::size_t n);
// The first `bytes` bytes of a book.
std::string book(std::size_t bytes);

void read_tokens(kv_session* session, const std::vector<int32_t>& tokens);
void read_text(kv_session* session, const std::string& text);
// A session of the tiny model that has read some_tokens(n).
Session tiny_session(std::size_t n, const kv_session_options& options = small_options());

struct Reply {
  kv_status status;
  std::string text;
  kv_error error;
};
// Asks greedily for at most max_tokens tokens; flags are those of kv_generate_options.
Reply ask(kv_session* session, const char* question, uint32_t max_tokens = 16, uint32_t flags = 0);
kv_session_stats stats_of(kv_session* session);
std::vector<int32_t> sequence(const kv_session* session);
// The next n tokens, greedily, taken back afterwards by forking first: the session stays as it is.
std::vector<int32_t> peek(kv_session* session, int n);
Session fork(kv_session* session);
void save(kv_session* session, const std::string& path);
kv_file_info inspect_file(const std::string& path);
Session load(kv_model* model, const std::string& path, uint32_t flags = 0);

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

#define REQUIRE_OK(call)                                     \
  do {                                                       \
    kv_error error_of_call{};                                \
    kv_error* const error = &error_of_call;                  \
    REQUIRE_MESSAGE((call) == KV_OK, error_of_call.message); \
  } while (false)

}  // namespace api_test
