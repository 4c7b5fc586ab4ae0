// Steps that commands share: opening models and sessions, options, tokens, statistics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "console.h"
#include "handles.h"
#include "progress.h"

namespace tool {

// All functions throw Failure.

// `hashed`: uses the hash of the whole file, from the user's cache folder or computed meanwhile.
Model open_model(Console& console, const ModelFlags& flags, bool hashed = false);
// For sessions like this, with the hash of the file.
Model open_model(Console& console, const ModelFlags& flags, const SessionFlags& session);
kv_model_info info_of(const kv_model* model);

// The options of a session, with what they point to.
class SessionOptions {
 public:
  SessionOptions(Console& console, const SessionFlags& flags);
  SessionOptions(const SessionOptions&) = delete;
  SessionOptions& operator=(const SessionOptions&) = delete;

  const kv_session_options* get() const { return &options_; }

 private:
  const std::string spill_directory_, instructions_;
  const Strategy decode_, prefill_;
  kv_session_options options_;
};

// The system text of the flags: given, or in a file.
std::string instructions_of(const SessionFlags& flags);

Session open_session(Console& console, kv_model* model, const SessionFlags& flags);
Session fork(kv_session* session);

// Cancel token and progress of one call; `progress` may be null.
kv_control control_of(Console& console, Progress* progress = nullptr, uint32_t flags = 0);

std::vector<int32_t> tokens_of(const kv_session* session);
std::vector<int32_t> tokenize(const kv_model* model, const std::string& text, uint32_t flags);
size_t count_tokens(const kv_model* model, std::string_view text, uint32_t flags = 0);
std::string detokenize(const kv_model* model, const int32_t* tokens, size_t count, uint32_t flags);
uint64_t token_count(const kv_session* session);

kv_session_stats stats_of(kv_session* session);
Json stats_json(kv_session* session);

void save(Console& console, kv_session* session, const std::string& path);

}  // namespace tool
