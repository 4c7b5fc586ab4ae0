// What every command has at hand: the terminal, Ctrl-C, the JSON result; and the steps that
// commands share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "handles.h"
#include "interrupt.h"
#include "progress.h"
#include "terminal.h"

namespace tool {

using Json = nlohmann::ordered_json;

struct Console {
  explicit Console(const GlobalFlags& flags)
      : json(flags.json), terminal(flags.quiet, flags.json) {}

  const bool json;
  Terminal terminal;
  Interrupt interrupt;
  Json result = Json::object();  // printed at the end with --json, also beside an error
};

// hashed: the hash of the whole file is looked for, computed meanwhile and kept in the user's cache
// folder.
Model open_model(Console& console, const ModelFlags& flags, bool hashed = false);
Session open_session(Console& console, kv_model* model, const SessionFlags& flags);
kv_session_options session_options(Console& console, const SessionFlags& flags);

// For calls with a progress line; progress may be null.
kv_call_options call_options(Console& console, Progress* progress);

std::vector<int32_t> tokens_of(const kv_session* session);
std::vector<int32_t> tokenize(const kv_model* model, const std::string& text, uint32_t flags);
size_t count_tokens(const kv_model* model, std::string_view text);  // of a text alone
uint64_t token_count(const kv_session* session);
Json stats_of(kv_session* session);

void save(Console& console, kv_session* session, const std::string& path);

// A whole file, "-" for standard input.
std::string read_file(const std::string& path);

// JSON text for standard output; bytes that are not UTF-8 are replaced, control characters escaped.
std::string json_text(const Json& value);

}  // namespace tool
