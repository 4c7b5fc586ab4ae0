// Libraries, documents of any size, and the result of kv_library_session.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "helpers.h"
#include "temp_folder.h"

namespace api_test {

struct CloseLibrary {
  void operator()(kv_library* library) const { kv_library_close(library); }
};
using Library = std::unique_ptr<kv_library, CloseLibrary>;

inline std::vector<std::string> logged;  // by libraries of open_library

inline Library open_library(const std::string& folder, uint64_t max_bytes = 0) {
  kv_library_options o;
  kv_init(&o, sizeof o);
  o.max_bytes = max_bytes;
  o.log = [](int32_t, const char* message, void*) { logged.push_back(message); };
  kv_library* library = nullptr;
  REQUIRE_OK(kv_library_open(folder.c_str(), &o, &library, error));
  return Library(library);
}

// Text of the tiny model: a token a byte.
inline std::string text_of(std::size_t bytes, char first = 'a') {
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

inline Got get(kv_library* library, kv_model* model, const std::string& text, const Ask& ask = {}) {
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

inline Got must_get(kv_library* library, kv_model* model, const std::string& text,
                    const Ask& ask = {}) {
  Got got = get(library, model, text, ask);
  REQUIRE_MESSAGE(got.status == KV_OK, got.error.message);
  CHECK(got.result.tokens == sequence(got.session.get()).size());
  return got;
}

inline std::vector<kv_library_document> list(kv_library* library) {
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

inline std::vector<std::string> names(kv_library* library) {
  std::vector<std::string> out;
  for (const auto& d : list(library)) out.push_back(d.name);
  return out;
}

// The answer after prefill of the text without a library.
inline std::vector<int32_t> fresh_answer(kv_model* model, const std::string& text,
                                         std::vector<int32_t>* tokens = nullptr) {
  const Session session = open_session(model);
  read_text(session.get(), text);
  if (tokens) *tokens = sequence(session.get());
  return peek(session.get(), 8);
}

inline uint64_t size_of(std::size_t tokens) {
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
inline void let_time_pass() { std::this_thread::sleep_for(std::chrono::milliseconds(12)); }

inline void damage(const std::string& path, long at) {
  std::FILE* file = std::fopen(path.c_str(), "r+b");
  REQUIRE(file);
  std::fseek(file, at, at < 0 ? SEEK_END : SEEK_SET);
  const int byte = std::fgetc(file);
  std::fseek(file, -1, SEEK_CUR);
  std::fputc(byte ^ 0x40, file);
  std::fclose(file);
}

}  // namespace api_test
