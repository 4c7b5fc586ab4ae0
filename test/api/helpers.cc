#include "helpers.h"

#include <fstream>
#include <iterator>

namespace api_test {

Model open_model(const char* path) {
  kv_model* model = nullptr;
  REQUIRE_OK(kv_open(path, nullptr, nullptr, &model, error));
  return Model(model);
}

Model open_tiny_model(const char* chat_format) {
  kv_model_options options;
  kv_init(&options, sizeof options);
  options.chat_format = chat_format;
  kv_model* model = nullptr;
  REQUIRE_OK(kv_open(tiny_path, &options, nullptr, &model, error));
  return Model(model);
}

kv_model* tiny_model() {
  static const Model model = open_model(tiny_path);
  return model.get();
}

kv_model* mini_model() {
  static const Model model = open_model(mini_path);
  return model.get();
}

kv_session_options small_options() {
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.threads = 2;
  o.prefill_chunk = 64;
  o.decode = budgeted("quest", 64);
  return o;
}

Session open_session(kv_model* model, const kv_session_options& options) {
  kv_session* session = nullptr;
  REQUIRE_OK(kv_session_open(model, &options, &session, error));
  return Session(session);
}

Cancel make_cancel() {
  kv_cancel* cancel = nullptr;
  REQUIRE_OK(kv_cancel_create(&cancel, error));
  return Cancel(cancel);
}

kv_control control_of(kv_cancel* cancel, uint32_t flags) {
  kv_control control;
  kv_init(&control, sizeof control);
  control.cancel = cancel;
  control.flags = flags;
  return control;
}

std::vector<int32_t> some_tokens(std::size_t n) {
  std::vector<int32_t> out(n);
  uint32_t state = 7;
  for (int32_t& token : out) {
    state = state * 1664525u + 1013904223u;
    token = static_cast<int32_t>(3 + (state >> 16) % 250);
  }
  return out;
}

std::string book(std::size_t bytes) {
  std::ifstream in(EXAMPLES "/demo.txt", std::ios::binary);
  std::string text(bytes, '\0');
  in.read(text.data(), static_cast<std::streamsize>(bytes));
  REQUIRE(in.good());
  return text;
}

void read_tokens(kv_session* session, const std::vector<int32_t>& tokens) {
  REQUIRE_OK(kv_prefill_tokens(session, tokens.data(), tokens.size(), nullptr, nullptr, error));
}

void read_text(kv_session* session, const std::string& text) {
  REQUIRE_OK(kv_prefill(session, text.data(), text.size(), nullptr, nullptr, nullptr, error));
}

Session tiny_session(std::size_t n, const kv_session_options& options) {
  Session session = open_session(tiny_model(), options);
  read_tokens(session.get(), some_tokens(n));
  return session;
}

Reply ask(kv_session* session, const char* question, uint32_t max_tokens, uint32_t flags) {
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.max_tokens = max_tokens;
  o.flags = flags;
  Reply out{};
  const auto on_text = [](const char* text, size_t size, void* user) -> int32_t {
    static_cast<std::string*>(user)->append(text, size);
    return 0;
  };
  out.status = kv_generate(session, question, std::char_traits<char>::length(question), &o, nullptr,
                           on_text, &out.text, nullptr, &out.error);
  return out;
}

kv_session_stats stats_of(kv_session* session) {
  kv_session_stats stats;
  kv_init(&stats, sizeof stats);
  REQUIRE_OK(kv_session_get_stats(session, &stats, error));
  return stats;
}

std::vector<int32_t> sequence(const kv_session* session) {
  std::size_t count = 0;
  kv_session_tokens(session, nullptr, 0, &count, nullptr);
  std::vector<int32_t> out(count);
  REQUIRE_OK(kv_session_tokens(session, out.data(), out.size(), &count, error));
  return out;
}

std::vector<int32_t> peek(kv_session* session, int n) {
  const Session other = fork(session);
  std::vector<int32_t> out;
  for (int i = 0; i < n; ++i) {
    int32_t token = -1;
    REQUIRE_OK(kv_session_next(other.get(), nullptr, nullptr, &token, nullptr, error));
    out.push_back(token);
  }
  return out;
}

Session fork(kv_session* session) {
  kv_session* out = nullptr;
  REQUIRE_OK(kv_session_fork(session, &out, error));
  return Session(out);
}

void save(kv_session* session, const std::string& path) {
  REQUIRE_OK(kv_save(session, path.c_str(), nullptr, error));
}

kv_file_info inspect_file(const std::string& path) {
  kv_file_info info{};
  info.struct_size = sizeof info;
  REQUIRE_OK(kv_file_inspect(path.c_str(), &info, error));
  return info;
}

Session load(kv_model* model, const std::string& path, uint32_t flags) {
  kv_control call;
  kv_init(&call, sizeof call);
  call.flags = flags;
  const kv_session_options options = small_options();
  kv_session* out = nullptr;
  REQUIRE_OK(kv_load(model, path.c_str(), &options, &call, &out, error));
  return Session(out);
}

}  // namespace api_test
