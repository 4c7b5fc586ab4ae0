// A host that has set a locale with a decimal comma, as GTK and Qt do: the library's JSON stays
// valid, and messages keep the decimal point.
#include <clocale>
#include <locale>

#include "host.h"
#include "temp_folder.h"

namespace {

// Whether a text is JSON; at: behind what has been read.
struct Json {
  const std::string& text;
  std::size_t at = 0;

  bool is(char c) { return at < text.size() && text[at] == c && (++at, true); }
  bool digits() {
    const std::size_t begin = at;
    while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
    return at > begin;
  }
  bool number() {
    (void)is('-');
    if (!digits() || (is('.') && !digits())) return false;
    if (!is('e') && !is('E')) return true;
    if (!is('+')) (void)is('-');
    return digits();
  }
  bool string() {
    if (!is('"')) return false;
    for (; at < text.size() && text[at] != '"'; ++at)
      if (text[at] == '\\' || static_cast<unsigned char>(text[at]) < ' ') return false;
    return is('"');
  }
  bool word(const char* wanted) {
    return text.compare(at, std::strlen(wanted), wanted) == 0 && (at += std::strlen(wanted), true);
  }
  bool members(char end, bool named) {
    if (is(end)) return true;
    do {
      if (named && !(string() && is(':'))) return false;
      if (!value()) return false;
    } while (is(','));
    return is(end);
  }
  bool value() {
    if (is('{')) return members('}', true);
    if (is('[')) return members(']', false);
    if (at < text.size() && text[at] == '"') return string();
    return word("true") || word("false") || word("null") || number();
  }
};

void require_json(const std::string& text, const char* what) {
  Json json{text};
  if (json.value() && json.at == text.size()) return;
  std::fprintf(stderr, "%s is no JSON at byte %zu: %s\n", what, json.at, text.c_str());
  std::exit(1);
}

void require_message(kv_status status, const kv_error& error, const char* part) {
  host::require(status == KV_BAD_ARGUMENT, "a wrong number is refused");
  if (std::strstr(error.message, part)) return;
  std::fprintf(stderr, "'%s' lacks '%s'\n", error.message, part);
  std::exit(1);
}

}  // namespace

int main() {
  if (!std::setlocale(LC_ALL, "de_DE.UTF-8")) {
    std::puts("skipped: there is no locale de_DE.UTF-8, and localedef did not make one");
    return 77;
  }
  std::locale::global(std::locale("de_DE.UTF-8"));
  char half[16];
  std::snprintf(half, sizeof half, "%.1f", 0.5);
  host::require(std::strcmp(half, "0,5") == 0, "this host's printf writes a comma");

  require_json(kv_build_info(), "kv_build_info");
  kv_model* const model = host::open_model();
  const std::string point = "\"last_decode_ns\":";
  for (const std::string& strategy : host::strategy_names()) {
    kv_session_options o = host::session_options(strategy.c_str());
    if (strategy == "filter-layers") o.decode = strategies::filter_layers({0});
    kv_session* const session = host::open_session(model, o);
    uint32_t measures = strategy == "flat" ? KV_MEASURE_CERTIFY : 0;
    if (strategy == "quest" || strategy == "ood") measures = KV_MEASURE_LAYERS;
    kv_error failed{};
    host::require_ok(kv_session_measure(session, measures, &failed), failed, "kv_session_measure");
    host::read(session, 2200);
    (void)host::ask(session);
    const std::string text = host::stats(session);
    require_json(text, strategy.c_str());
    host::require(text.find(point) != std::string::npos,
                  "an answer's time is in kv_session_stats_json");
    kv_session_close(session);
  }

  kv_error error{};
  kv_session* session = nullptr;
  kv_strategy* quest = nullptr;
  host::require_ok(kv_strategy_create("quest", &quest, &error), error, "kv_strategy_create");
  require_message(kv_strategy_set(quest, KV_PARAM_BUDGET_FRACTION, 1.5, &error), error, "1.5");
  kv_strategy_destroy(quest);
  session = host::open_session(model);
  host::read(session, 100);
  kv_generate_options g = host::generate_options();
  g.top_p = 1.25f;
  require_message(kv_generate(session, "a", 1, &g, nullptr, nullptr, nullptr, nullptr, &error),
                  error, "1.25");
  const kv_status missing = kv_save(session, "/nowhere/a.kv", nullptr, &error);
  host::require(missing == KV_NOT_FOUND && std::strstr(error.message, "No such file or directory"),
                "the system's reason is in English");
  kv_session_close(session);

  kv_cache_shape shape{};
  shape.struct_size = sizeof shape;
  shape.layers = shape.heads = shape.kv_heads = 1;
  shape.head_dim = 64;
  shape.max_tokens = 100;
  kv_cache* cache = nullptr;
  host::require_ok(kv_cache_open(&shape, nullptr, &cache, &error), error, "kv_cache_open");
  std::string text(4096, '\0');
  std::size_t size = 0;
  host::require_ok(kv_cache_stats_json(cache, text.data(), text.size(), &size, &error), error,
                   "kv_cache_stats_json");
  text.resize(size - 1);
  require_json(text, "kv_cache_stats_json");
  kv_cache_close(cache);
  kv_close(model);
  return 0;
}
