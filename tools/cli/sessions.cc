#include "sessions.h"

#include <filesystem>

#include "failure.h"
#include "files.h"
#include "strategies.h"
#include "system.h"

namespace tool {
namespace {

void log_warning(int32_t level, const char* message, void* user) {
  if (level == KV_LOG_WARNING)
    static_cast<Terminal*>(user)->note(std::string("warning: ") + message);
}

// With "auto", also the device that the library chose.
void log_device(int32_t level, const char* message, void* user) {
  level == KV_LOG_INFO ? static_cast<Terminal*>(user)->note(message)
                       : log_warning(level, message, user);
}

// Whether opening failed because of the device, not because of the file.
bool device_failed(const ModelFlags& flags, kv_status status) {
  if (flags.device.empty() || (status != KV_UNSUPPORTED && status != KV_NOT_FOUND)) return false;
  kv_model_info info = initialised<kv_model_info>();
  return kv_model_inspect(flags.path.c_str(), &info, nullptr) == KV_OK;
}

std::string chat_format_of(const ModelFlags& flags) {
  if (flags.chat_format_file.empty()) return flags.chat_format;
  if (!flags.chat_format.empty())
    throw Failure(exit_usage, "give --chat-format or --chat-format-file, not both");
  std::string text = read_file(flags.chat_format_file);
  // a name is no text of a format, and a NUL would cut it
  if (text.find('\0') != std::string::npos || text.find('{') == std::string::npos)
    throw Failure(exit_file, flags.chat_format_file + " is not the text of a chat format");
  return text;
}

}  // namespace

Model open_model(Console& console, const ModelFlags& flags, bool hashed) {
  const std::string folder = hashed ? system::cache_folder() : "";
  kv_model_options options = initialised<kv_model_options>();
  options.log = flags.device == "auto" ? log_device : log_warning;
  options.log_user = &console.terminal;
  if (flags.vocabulary_only) options.flags = KV_VOCABULARY_ONLY;
  if (flags.drafts && !flags.device.empty()) options.flags |= KV_PLAN_DRAFTS;
  const std::string chat_format = chat_format_of(flags);
  if (!chat_format.empty()) options.chat_format = chat_format.c_str();
  if (!flags.device.empty()) options.device = flags.device.c_str();
  options.device_memory = flags.device_memory;
  if (!folder.empty()) options.hash_directory = folder.c_str();
  const kv_control control = control_of(console);
  kv_error error{};
  kv_model* model = nullptr;
  const kv_status status = kv_open(flags.path.c_str(), &options, &control, &model, &error);
  if (device_failed(flags, status)) throw Failure(exit_resources, error.message);
  check(status, error);
  return Model(model);
}

Model open_model(Console& console, const ModelFlags& flags, const SessionFlags& session) {
  ModelFlags of_model = flags;
  of_model.drafts = session.draft_tokens > 0;
  return open_model(console, of_model, true);
}

kv_model_info info_of(const kv_model* model) {
  kv_model_info info = initialised<kv_model_info>();
  kv_error error{};
  check(kv_model_get_info(model, &info, &error), error);
  return info;
}

std::string instructions_of(const SessionFlags& flags) {
  if (flags.instructions_file.empty()) return flags.instructions;
  if (!flags.instructions.empty())
    throw Failure(exit_usage, "give --instructions or --instructions-file, not both");
  std::string text = read_file(flags.instructions_file);
  if (text.find('\0') != std::string::npos)
    throw Failure(exit_file, flags.instructions_file + " is not a text file");
  while (text.ends_with('\n') || text.ends_with('\r')) text.pop_back();
  if (text.empty()) throw Failure(exit_file, flags.instructions_file + " is empty");
  return text;
}

SessionOptions::SessionOptions(Console& console, const SessionFlags& flags)
    : spill_directory_(flags.spill_directory), instructions_(instructions_of(flags)),
      decode_(decode_strategy(flags)), prefill_(prefill_strategy(flags)),
      options_(initialised<kv_session_options>()) {
  options_.threads = flags.threads;
  options_.context_tokens = flags.context_tokens;
  options_.window_tokens = flags.window_tokens;
  options_.prefill_chunk = flags.prefill_chunk;
  options_.draft_tokens = flags.draft_tokens;
  if (flags.no_lookup) options_.flags |= KV_NO_LOOKUP;
  options_.precision = flags.full_precision ? KV_PRECISION_F32 : KV_PRECISION_INT8;
  options_.decode = decode_.get();
  options_.prefill = prefill_.get();
  options_.memory_limit = flags.memory_limit;
  if (!spill_directory_.empty()) options_.spill_directory = spill_directory_.c_str();
  if (!instructions_.empty()) options_.instructions = instructions_.c_str();
  options_.log = log_warning;
  options_.log_user = &console.terminal;
}

Session open_session(Console& console, kv_model* model, const SessionFlags& flags) {
  const SessionOptions options(console, flags);
  kv_error error{};
  kv_session* session = nullptr;
  check(kv_session_open(model, options.get(), &session, &error), error);
  return Session(session);
}

Session fork(kv_session* session) {
  kv_error error{};
  kv_session* copy = nullptr;
  check(kv_session_fork(session, &copy, &error), error);
  return Session(copy);
}

kv_control control_of(Console& console, Progress* progress, uint32_t flags) {
  kv_control control = initialised<kv_control>();
  control.flags = flags;
  control.cancel = console.interrupt.token();
  if (progress != nullptr) {
    control.progress = Progress::callback;
    control.user = progress;
  }
  return control;
}

size_t count_tokens(const kv_model* model, std::string_view text, uint32_t flags) {
  kv_error error{};
  size_t count = 0;
  const kv_status status =
      kv_tokenize(model, text.data(), text.size(), flags, nullptr, nullptr, 0, &count, &error);
  if (status != KV_LIMIT) check(status, error);
  return count;
}

uint64_t token_count(const kv_session* session) {
  kv_error error{};
  size_t count = 0;
  const kv_status status = kv_session_tokens(session, nullptr, 0, &count, &error);
  if (status != KV_LIMIT) check(status, error);
  return count;
}

std::vector<int32_t> tokens_of(const kv_session* session) {
  kv_error error{};
  size_t count = token_count(session);
  std::vector<int32_t> tokens(count);
  check(kv_session_tokens(session, tokens.data(), tokens.size(), &count, &error), error);
  return tokens;
}

std::vector<int32_t> tokenize(const kv_model* model, const std::string& text, uint32_t flags) {
  kv_error error{};
  // At most one token per byte, plus a begin-of-text token and a space that some tokenizers add.
  std::vector<int32_t> tokens(text.size() + 4);
  size_t count = 0;
  check(kv_tokenize(model, text.data(), text.size(), flags, nullptr, tokens.data(), tokens.size(),
                    &count, &error),
        error);
  tokens.resize(count);
  return tokens;
}

std::string detokenize(const kv_model* model, const int32_t* tokens, size_t count, uint32_t flags) {
  kv_error error{};
  size_t size = 0;
  const kv_status status = kv_detokenize(model, tokens, count, flags, nullptr, 0, &size, &error);
  if (status != KV_LIMIT) check(status, error);
  std::string text(size, '\0');
  check(kv_detokenize(model, tokens, count, flags, text.data(), text.size(), &size, &error), error);
  return text;
}

kv_session_stats stats_of(kv_session* session) {
  kv_session_stats stats = initialised<kv_session_stats>();
  kv_error error{};
  check(kv_session_get_stats(session, &stats, &error), error);
  return stats;
}

Json stats_json(kv_session* session) {
  kv_error error{};
  std::string text(4096, '\0');
  size_t size = 0;
  kv_status status = kv_session_stats_json(session, text.data(), text.size(), &size, &error);
  if (status == KV_LIMIT) {
    text.resize(size);
    status = kv_session_stats_json(session, text.data(), text.size(), &size, &error);
  }
  check(status, error);
  return Json::parse(text.c_str());
}

void save(Console& console, kv_session* session, const std::string& path) {
  kv_error error{};
  Progress progress(console.terminal, "Saving " + system::text(system::path(path).filename()),
                    Unit::bytes);
  const kv_control control = control_of(console, &progress);
  check(kv_save(session, path.c_str(), &control, &error), error);
}

}  // namespace tool
