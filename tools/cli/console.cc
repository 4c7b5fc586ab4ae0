#include "console.h"

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "failure.h"
#include "number_text.h"
#include "system.h"
#include "terminal_text.h"

namespace tool {
namespace {

void on_log(int32_t level, const char* message, void* user) {
  if (level == KV_LOG_WARNING)
    static_cast<Terminal*>(user)->note(std::string("warning: ") + message);
}

// Of a model whose device is chosen: which it is.
void on_choice(int32_t level, const char* message, void* user) {
  level == KV_LOG_INFO ? static_cast<Terminal*>(user)->note(message) : on_log(level, message, user);
}

}  // namespace

Model open_model(Console& console, const ModelFlags& flags, bool hashed) {
  const std::string folder = hashed ? system::cache_folder() : "";
  kv_model_options options;
  kv_model_options_init(&options, sizeof options);
  options.log = flags.device == "auto" ? on_choice : on_log;
  options.log_user = &console.terminal;
  if (!flags.chat_format.empty()) options.chat_format = flags.chat_format.c_str();
  if (!flags.device.empty()) options.device = flags.device.c_str();
  options.device_memory = flags.device_memory;
  if (!folder.empty()) options.hash_folder = folder.c_str();
  kv_error error{};
  kv_model* model = nullptr;
  check(kv_open(flags.path.c_str(), &options, &model, &error), error);
  return Model(model);
}

kv_session_options session_options(Console& console, const SessionFlags& flags) {
  kv_session_options options;
  kv_session_options_init(&options, sizeof options);
  options.threads = flags.threads;
  options.context = flags.context;
  options.kv_type = flags.full_precision ? KV_KV_F32 : KV_KV_INT8;
  if (flags.window != 0) options.window = flags.window;
  if (flags.chunk != 0) options.prefill_chunk = flags.chunk;
  if (flags.dense_layers) options.dense_layers = *flags.dense_layers;
  if (!flags.filter_layers.empty()) options.filter_layers = flags.filter_layers.c_str();
  options.filter_window = flags.filter_window;
  options.compare = flags.compare;
  if (!flags.strategy.empty()) options.strategy = flags.strategy.c_str();
  options.budget_tokens = flags.budget.tokens;
  options.budget_fraction = flags.budget.fraction;
  options.certify = flags.certify ? 1 : 0;
  options.coverage = static_cast<float>(flags.coverage);
  options.budget_schedule = flags.schedule;
  options.search_breadth = flags.search_breadth;
  options.head_graphs = flags.head_graphs ? 1 : 0;
  options.share_heads = flags.separate_heads ? 0 : 1;
  options.select_tokens = flags.select_tokens;
  if (!flags.prefill.empty()) options.prefill_strategy = flags.prefill.c_str();
  options.prefill_budget_fraction = flags.prefill_budget;
  options.prefill_exact_tokens = flags.prefill_exact;
  options.memory_budget = flags.memory;
  if (!flags.spill_folder.empty()) options.spill_folder = flags.spill_folder.c_str();
  options.log = on_log;
  options.log_user = &console.terminal;
  return options;
}

Session open_session(Console& console, kv_model* model, const SessionFlags& flags) {
  const kv_session_options options = session_options(console, flags);
  kv_error error{};
  kv_session* session = nullptr;
  check(kv_session_open(model, &options, &session, &error), error);
  return Session(session);
}

kv_call_options call_options(Console& console, Progress* progress) {
  kv_call_options options;
  kv_call_options_init(&options, sizeof options);
  options.cancel = console.interrupt.token();
  if (progress != nullptr) {
    options.progress = Progress::callback;
    options.progress_user = progress;
  }
  return options;
}

size_t count_tokens(const kv_model* model, std::string_view text) {
  kv_error error{};
  size_t count = 0;
  const kv_status status =
      kv_tokenize(model, text.data(), text.size(), 0, nullptr, nullptr, 0, &count, &error);
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
  // Never more tokens than bytes, but for a begin-of-text token and a space that some tokenizers
  // put in front.
  std::vector<int32_t> tokens(text.size() + 4);
  size_t count = 0;
  check(kv_tokenize(model, text.data(), text.size(), flags, nullptr, tokens.data(), tokens.size(),
                    &count, &error),
        error);
  tokens.resize(count);
  return tokens;
}

Json stats_of(kv_session* session) {
  kv_error error{};
  std::string text(4096, '\0');
  size_t size = 0;
  kv_status status = kv_stats(session, text.data(), text.size(), &size, &error);
  if (status == KV_LIMIT) {
    text.resize(size);
    status = kv_stats(session, text.data(), text.size(), &size, &error);
  }
  check(status, error);
  return Json::parse(text.c_str());
}

void save(Console& console, kv_session* session, const std::string& path) {
  kv_error error{};
  Progress progress(console.terminal, "Saving " + system::text(system::path(path).filename()),
                    Unit::bytes);
  const kv_call_options options = call_options(console, &progress);
  check(kv_save(session, path.c_str(), &options, &error), error);
}

static bool read_input(std::string* text) {
  std::vector<char> buffer(1 << 16);
  ptrdiff_t size = 0;
  while ((size = system::read(buffer.data(), buffer.size())) > 0 &&
         text->size() <= system::max_text)
    text->append(buffer.data(), static_cast<size_t>(size));
  if (size > 0) errno = EFBIG;
  return size == 0;
}

std::string read_file(const std::string& path) {
  const bool from_input = path == "-";
  std::string text;
  if (from_input ? read_input(&text) : system::read_file(path, &text)) return text;
  if (errno == EINTR) throw Failure(exit_cancelled, "stopped; nothing was read");
  throw Failure(exit_file, (from_input ? "standard input" : path) + ": " + std::strerror(errno));
}

std::string json_text(const Json& value) {
  return with_escapes(value.dump(2, ' ', false, Json::error_handler_t::replace)) + "\n";
}

}  // namespace tool
