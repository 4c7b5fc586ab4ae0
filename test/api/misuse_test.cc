// Every function called wrongly: each pointer NULL in turn, sizes and ranges out of bounds. The
// answer is a code and a message, outputs and handles stay as they were. A table by hand; a test
// compares it with the header, so that no function is forgotten.
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <set>

#include "fault_count.h"
#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

constexpr int32_t some_ids[] = {3};

// Everything that a call may write, filled with a pattern that no call would.
struct Outputs {
  kv_model* model;
  kv_session* session;
  kv_cancel* cancel;
  std::size_t count;
  int32_t tokens[4], token, end;
  float logits[1024];
  char text[64];
  kv_answer answer;
  kv_model_information model_info;
  kv_file_information file_info;
  kv_strategy_information strategy_info;
  kv_packed_information packed_info;
  kv_library* library;
  kv_library_document document;
  kv_library_result result;
  kv_cache* cache;
  kv_span spans[4];

  void fill() {
    std::memset(static_cast<void*>(this), 0x5A, sizeof *this);
    answer.struct_size = sizeof answer;
    model_info.struct_size = sizeof model_info;
    file_info.struct_size = sizeof file_info;
    strategy_info.struct_size = sizeof strategy_info;
    packed_info.struct_size = sizeof packed_info;
    document.struct_size = sizeof document;
    result.struct_size = sizeof result;
  }
};

struct Misuse {
  const char* function;
  const char* how;
  kv_status expected;
  std::function<kv_status(kv_error*)> call;
};

class Misuses {
 public:
  Misuses()
      : session_(tiny_session(200)), empty_(open_session(tiny_model())), traced_(tiny_session(100)),
        path_(folder_.file("a.kv")) {
    kv_generate_options traced;
    kv_generate_options_init(&traced, sizeof traced);
    traced.trace = 1, traced.max_tokens = 2;
    REQUIRE(kv_generate(traced_.get(), "a", 1, &traced, nullptr, nullptr, nullptr, nullptr) ==
            KV_OK);
    save(session_.get(), path_);
    add_model();
    add_tokens();
    add_session();
    add_prefill();
    add_generate();
    add_sequence();
    add_files();
    add_packing();
    REQUIRE(kv_library_open(library_folder_.path().c_str(), nullptr, &library_, nullptr) == KV_OK);
    add_library();
    add_caches();
  }
  ~Misuses() { kv_library_close(library_); }
  const std::vector<Misuse>& table() const { return table_; }
  kv_session* session() const { return session_.get(); }
  Outputs& out() { return out_; }
  std::size_t files() const { return folder_.entries(); }

 private:
  void add(const char* function, const char* how, std::function<kv_status(kv_error*)> call,
           kv_status expected = KV_BAD_ARGUMENT) {
    table_.push_back({function, how, expected, std::move(call)});
  }
  void add_model();
  void add_tokens();
  void add_session();
  void add_prefill();
  void add_generate();
  void add_sequence();
  void add_files();
  void add_packing();
  void add_library();
  void add_caches();
  void add_generate_option(const char* how, std::function<void(kv_generate_options*)> change);
  void add_session_option(const char* how, std::function<void(kv_session_options*)> change);

  struct CloseCache {
    void operator()(kv_cache* c) const { kv_cache_close(c); }
  };
  TempFolder folder_, library_folder_;
  kv_library* library_ = nullptr;
  std::unique_ptr<kv_cache, CloseCache> cache_;
  Session session_, empty_, traced_;
  std::string path_;
  Outputs out_;
  std::vector<Misuse> table_;
};

const float nan_f = std::numeric_limits<float>::quiet_NaN(),
            inf_f = std::numeric_limits<float>::infinity();
const int32_t known_tokens[] = {5, 6};
const double nan_d = std::numeric_limits<double>::quiet_NaN();

void Misuses::add_model() {
  add("kv_cancel_create", "out", [](kv_error* e) { return kv_cancel_create(nullptr, e); });
  add("kv_strategy_info", "info", [](kv_error* e) { return kv_strategy_info(0, nullptr, e); });
  add(
      "kv_strategy_info", "after the last",
      [&](kv_error* e) { return kv_strategy_info(1000, &out_.strategy_info, e); }, KV_NOT_FOUND);
  add("kv_open", "path", [&](kv_error* e) { return kv_open(nullptr, nullptr, &out_.model, e); });
  add("kv_open", "out", [](kv_error* e) { return kv_open(tiny_path, nullptr, nullptr, e); });
  add(
      "kv_open", "an empty path", [&](kv_error* e) { return kv_open("", nullptr, &out_.model, e); },
      KV_NOT_FOUND);
  add(
      "kv_open", "no such file",
      [&](kv_error* e) { return kv_open((path_ + "x").c_str(), nullptr, &out_.model, e); },
      KV_NOT_FOUND);
  add("kv_open", "a folder",
      [&](kv_error* e) { return kv_open(folder_.path().c_str(), nullptr, &out_.model, e); });
  add(
      "kv_open", "a file that is no model",
      [&](kv_error* e) { return kv_open(path_.c_str(), nullptr, &out_.model, e); }, KV_UNSUPPORTED);
  add("kv_open", "flags", [&](kv_error* e) {
    kv_model_options o;
    kv_model_options_init(&o, sizeof o);
    o.flags = 1;
    return kv_open(tiny_path, &o, &out_.model, e);
  });
  for (const char* format : {"chatml2", "CHATML"}) {
    add("kv_open", "chat_format", [&, format](kv_error* e) {
      kv_model_options o;
      kv_model_options_init(&o, sizeof o);
      o.chat_format = format;
      return kv_open(tiny_path, &o, &out_.model, e);
    });
  }
  add("kv_open", "device", [&](kv_error* e) {
    kv_model_options o;
    kv_model_options_init(&o, sizeof o);
    o.device = "gpu";
    return kv_open(tiny_path, &o, &out_.model, e);
  });
  add("kv_open", "device_memory without a device", [&](kv_error* e) {
    kv_model_options o;
    kv_model_options_init(&o, sizeof o);
    o.device_memory = 1;
    return kv_open(tiny_path, &o, &out_.model, e);
  });
  add("kv_model_info", "model",
      [&](kv_error* e) { return kv_model_info(nullptr, &out_.model_info, e); });
  add("kv_model_info", "info", [](kv_error* e) { return kv_model_info(tiny_model(), nullptr, e); });
  add("kv_model_hash", "model", [](kv_error* e) { return kv_model_hash(nullptr, nullptr, e); });
  add("kv_model_inspect", "path",
      [&](kv_error* e) { return kv_model_inspect(nullptr, &out_.model_info, e); });
  add("kv_model_inspect", "info",
      [](kv_error* e) { return kv_model_inspect(tiny_path, nullptr, e); });
  add(
      "kv_model_inspect", "no such file",
      [&](kv_error* e) { return kv_model_inspect("/nowhere/x", &out_.model_info, e); },
      KV_NOT_FOUND);
}

void Misuses::add_tokens() {
  add("kv_tokenize", "model", [&](kv_error* e) {
    return kv_tokenize(nullptr, "a", 1, 0, nullptr, out_.tokens, 4, &out_.count, e);
  });
  add("kv_tokenize", "text", [&](kv_error* e) {
    return kv_tokenize(tiny_model(), nullptr, 1, 0, nullptr, out_.tokens, 4, &out_.count, e);
  });
  add("kv_tokenize", "tokens", [&](kv_error* e) {
    return kv_tokenize(tiny_model(), "a", 1, 0, nullptr, nullptr, 4, &out_.count, e);
  });
  add("kv_tokenize", "count", [&](kv_error* e) {
    return kv_tokenize(tiny_model(), "a", 1, 0, nullptr, out_.tokens, 4, nullptr, e);
  });
  add("kv_tokenize", "flags", [&](kv_error* e) {
    return kv_tokenize(tiny_model(), "a", 1, 8, nullptr, out_.tokens, 4, &out_.count, e);
  });
  static const int32_t ids[] = {5, 6};
  add("kv_detokenize", "model", [&](kv_error* e) {
    return kv_detokenize(nullptr, ids, 2, 0, out_.text, 64, &out_.count, e);
  });
  add("kv_detokenize", "tokens", [&](kv_error* e) {
    return kv_detokenize(tiny_model(), nullptr, 2, 0, out_.text, 64, &out_.count, e);
  });
  add("kv_detokenize", "text", [&](kv_error* e) {
    return kv_detokenize(tiny_model(), ids, 2, 0, nullptr, 64, &out_.count, e);
  });
  add("kv_detokenize", "size", [&](kv_error* e) {
    return kv_detokenize(tiny_model(), ids, 2, 0, out_.text, 64, nullptr, e);
  });
  add("kv_detokenize", "flags", [&](kv_error* e) {
    return kv_detokenize(tiny_model(), ids, 2, KV_TOKENIZE_BOS, out_.text, 64, &out_.count, e);
  });
  for (int32_t bad :
       {-1, 259, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    add("kv_detokenize", "a token that is none", [&, bad](kv_error* e) {
      return kv_detokenize(tiny_model(), &bad, 1, 0, out_.text, 64, &out_.count, e);
    });
    add("kv_prefill_tokens", "a token that is none", [&, bad](kv_error* e) {
      const int32_t two[] = {5, bad};
      return kv_prefill_tokens(session_.get(), two, 2, nullptr, nullptr, e);
    });
  }
}

void Misuses::add_session_option(const char* how, std::function<void(kv_session_options*)> change) {
  const auto changed = [change] {
    kv_session_options o = small_options();
    change(&o);
    return o;
  };
  add("kv_session_open", how, [&, changed](kv_error* e) {
    const kv_session_options o = changed();
    return kv_session_open(tiny_model(), &o, &out_.session, e);
  });
  add("kv_load", how, [&, changed](kv_error* e) {
    const kv_session_options o = changed();
    return kv_load(tiny_model(), path_.c_str(), &o, nullptr, &out_.session, e);
  });
}

void Misuses::add_session() {
  add("kv_session_open", "model",
      [&](kv_error* e) { return kv_session_open(nullptr, nullptr, &out_.session, e); });
  add("kv_session_open", "out",
      [](kv_error* e) { return kv_session_open(tiny_model(), nullptr, nullptr, e); });
  add_session_option("threads", [](auto* o) { o->threads = 257; });
  add_session_option("context", [](auto* o) { o->context = UINT64_MAX; });
  add_session_option("kv_type", [](auto* o) { o->kv_type = 2; });
  add_session_option("window", [](auto* o) { o->window = UINT32_MAX; });
  add_session_option("prefill_chunk", [](auto* o) { o->prefill_chunk = 4097; });
  add_session_option("share_heads", [](auto* o) { o->share_heads = 2; });
  add_session_option("alpha above 1", [](auto* o) { o->alpha = 1.5f; });
  add_session_option("alpha below 0", [](auto* o) { o->alpha = -0.5f; });
  add_session_option("head_graphs", [](auto* o) { o->head_graphs = 2; });
  add_session_option("head_graphs of hnsw",
                     [](auto* o) { o->strategy = "hnsw", o->head_graphs = 1; });
  add_session_option("certify", [](auto* o) { o->certify = 2; });
  add_session_option("coverage", [](auto* o) { o->coverage = 1; });
  add_session_option("compare", [](auto* o) { o->compare = 3; });
  for (uint32_t tokens : {1u, 24u, 2048u, UINT32_MAX})
    add_session_option("select_tokens",
                       [=](auto* o) { o->strategy = "quest", o->select_tokens = tokens; });
  for (const char* other : {"auto", "full", "flat", "filter-layers"})
    add_session_option("select_tokens of another strategy",
                       [=](auto* o) { o->strategy = other, o->select_tokens = 32; });
  add_session_option("filter_window", [](auto* o) { o->filter_window = 3; });
  for (const char* layers :
       {"", ",", "1,", "x", "-1", "0 ", "1,0", "0,0", "1000", "99999999999", "\xff%s%n"})
    add_session_option("filter_layers", [=](auto* o) { o->filter_layers = layers; });
  const auto strategy = [&](const char* name, uint64_t tokens, double fraction) {
    add_session_option("strategy and budget", [=](auto* o) {
      o->strategy = name, o->budget_tokens = tokens, o->budget_fraction = fraction;
    });
    add("kv_session_set_strategy", "strategy and budget", [=, this](kv_error* e) {
      return kv_session_set_strategy(session_.get(), name, tokens, fraction, e);
    });
  };
  for (const char* name : {"", "Quest", "quest ", "h2o", "\xff\xfe%s%n"}) strategy(name, 0, 0);
  for (double fraction : {-0.01, 1.01, nan_d, -nan_d, HUGE_VAL, -HUGE_VAL})
    strategy("quest", 0, fraction);
  strategy("quest", 1, 0.5);
  add("kv_session_set_strategy", "session",
      [](kv_error* e) { return kv_session_set_strategy(nullptr, "full", 0, 0, e); });
}

void Misuses::add_prefill() {
  kv_session* const s = session_.get();
  static const int32_t ids[] = {5, 6};
  kv_call_options flags;
  kv_call_options_init(&flags, sizeof flags);
  flags.flags = 8;
  add("kv_prefill", "session",
      [](kv_error* e) { return kv_prefill(nullptr, "a", 1, nullptr, nullptr, nullptr, e); });
  add("kv_prefill", "text",
      [s](kv_error* e) { return kv_prefill(s, nullptr, 1, nullptr, nullptr, nullptr, e); });
  add("kv_prefill", "flags",
      [s, flags](kv_error* e) { return kv_prefill(s, "a", 1, &flags, nullptr, nullptr, e); });
  add("kv_prefill_tokens", "session",
      [](kv_error* e) { return kv_prefill_tokens(nullptr, ids, 2, nullptr, nullptr, e); });
  add("kv_prefill_tokens", "tokens",
      [s](kv_error* e) { return kv_prefill_tokens(s, nullptr, 2, nullptr, nullptr, e); });
  add("kv_prefill_tokens", "flags",
      [s, flags](kv_error* e) { return kv_prefill_tokens(s, ids, 2, &flags, nullptr, e); });
  add(
      "kv_prefill_tokens", "more than the context",
      [s](kv_error* e) {
        const std::vector<int32_t> many(5'000'000, 5);
        return kv_prefill_tokens(s, many.data(), many.size(), nullptr, nullptr, e);
      },
      KV_CONTEXT_FULL);
  add("kv_prefill_logits", "session",
      [&](kv_error* e) { return kv_prefill_logits(nullptr, ids, 2, out_.logits, nullptr, e); });
  add("kv_prefill_logits", "tokens",
      [&, s](kv_error* e) { return kv_prefill_logits(s, nullptr, 2, out_.logits, nullptr, e); });
  add("kv_prefill_logits", "logits",
      [s](kv_error* e) { return kv_prefill_logits(s, ids, 2, nullptr, nullptr, e); });
  add("kv_prefill_logits", "flags",
      [&, s, flags](kv_error* e) { return kv_prefill_logits(s, ids, 2, out_.logits, &flags, e); });
}

void Misuses::add_generate_option(const char* how,
                                  std::function<void(kv_generate_options*)> change) {
  const auto changed = [change] {
    kv_generate_options o;
    kv_generate_options_init(&o, sizeof o);
    o.max_tokens = 2;
    change(&o);
    return o;
  };
  add("kv_generate", how, [&, changed](kv_error* e) {
    const kv_generate_options o = changed();
    return kv_generate(session_.get(), "a", 1, &o, nullptr, nullptr, &out_.answer, e);
  });
  const std::string_view option = how;
  // kv_next does not use these
  if (option.substr(0, 4) == "stop" || option == "keep" || option == "trace" ||
      option == "reserved")
    return;
  add("kv_next", how, [&, changed](kv_error* e) {
    const kv_generate_options o = changed();
    return kv_next(session_.get(), &o, &out_.token, &out_.end, e);
  });
}

void Misuses::add_generate() {
  add("kv_generate", "session", [&](kv_error* e) {
    return kv_generate(nullptr, "a", 1, nullptr, nullptr, nullptr, &out_.answer, e);
  });
  add("kv_generate", "question", [&](kv_error* e) {
    return kv_generate(session_.get(), nullptr, 1, nullptr, nullptr, nullptr, &out_.answer, e);
  });
  add(
      "kv_generate", "nothing to answer",
      [&](kv_error* e) {
        kv_model_options o;
        kv_model_options_init(&o, sizeof o);
        o.chat_format = "raw";
        kv_model* raw = nullptr;
        // wants no begin-of-text token
        REQUIRE(kv_open(FIXTURES "/models/qwen2-f16.gguf", &o, &raw, nullptr) == KV_OK);
        const Model owner(raw);
        const Session empty = open_session(raw);
        return kv_generate(empty.get(), nullptr, 0, nullptr, nullptr, nullptr, &out_.answer, e);
      },
      KV_BAD_STATE);
  add_generate_option("flags", [](auto* o) { o->flags = 2; });
  add_generate_option("keep", [](auto* o) { o->keep = 2; });
  for (float x : {-1.0f, 101.0f, nan_f, inf_f})
    add_generate_option("temperature", [x](auto* o) { o->temperature = x; });
  for (float x : {-1.0f, 0.0f, 1.5f, nan_f})
    add_generate_option("top_p", [x](auto* o) { o->top_p = x; });
  for (float x : {-0.5f, 1.0f, nan_f}) add_generate_option("min_p", [x](auto* o) { o->min_p = x; });
  for (float x : {-1.0f, 0.0f, 1000.0f, nan_f})
    add_generate_option("repetition_penalty", [x](auto* o) { o->repetition_penalty = x; });
  static const char* const with_null[] = {"a", nullptr};
  static const char* const with_empty[] = {"a", ""};
  add_generate_option("trace", [](auto* o) { o->trace = 2; });
  add_generate_option("reserved", [](auto* o) { o->reserved = 1; });
  add_generate_option("stop: no strings", [](auto* o) { o->stop_count = 1; });
  add_generate_option("stop: a NULL string",
                      [](auto* o) { o->stop = with_null, o->stop_count = 2; });
  add_generate_option("stop: an empty string",
                      [](auto* o) { o->stop = with_empty, o->stop_count = 2; });
  add("kv_next", "session",
      [&](kv_error* e) { return kv_next(nullptr, nullptr, &out_.token, &out_.end, e); });
  add("kv_next", "token",
      [&](kv_error* e) { return kv_next(session_.get(), nullptr, nullptr, &out_.end, e); });
  add("kv_score", "session",
      [&](kv_error* e) { return kv_score(nullptr, known_tokens, 2, out_.logits, nullptr, e); });
  add("kv_score", "tokens",
      [&](kv_error* e) { return kv_score(session_.get(), nullptr, 2, out_.logits, nullptr, e); });
  add("kv_score", "log_probabilities",
      [&](kv_error* e) { return kv_score(session_.get(), known_tokens, 2, nullptr, nullptr, e); });
  add("kv_score", "a token of no vocabulary", [&](kv_error* e) {
    static const int32_t wild[] = {5, 259};
    return kv_score(session_.get(), wild, 2, out_.logits, nullptr, e);
  });
  add("kv_score", "flags", [&](kv_error* e) {
    kv_call_options o;
    kv_call_options_init(&o, sizeof o);
    o.flags = KV_TOKENIZE_SPECIAL;
    return kv_score(session_.get(), known_tokens, 2, out_.logits, &o, e);
  });
  add(
      "kv_score", "empty sequence",
      [&](kv_error* e) { return kv_score(empty_.get(), known_tokens, 2, out_.logits, nullptr, e); },
      KV_BAD_STATE);
  add(
      "kv_next", "empty sequence",
      [&](kv_error* e) { return kv_next(empty_.get(), nullptr, &out_.token, &out_.end, e); },
      KV_BAD_STATE);
}

void Misuses::add_sequence() {
  kv_session* const s = session_.get();
  add("kv_session_tokens", "session",
      [&](kv_error* e) { return kv_session_tokens(nullptr, out_.tokens, 4, &out_.count, e); });
  add("kv_session_tokens", "tokens",
      [&, s](kv_error* e) { return kv_session_tokens(s, nullptr, 4, &out_.count, e); });
  add("kv_session_tokens", "count",
      [&, s](kv_error* e) { return kv_session_tokens(s, out_.tokens, 4, nullptr, e); });
  add("kv_rewind", "session", [](kv_error* e) { return kv_rewind(nullptr, 0, e); });
  add("kv_rewind", "beyond the end", [s](kv_error* e) { return kv_rewind(s, 201, e); });
  add("kv_rewind", "far beyond the end", [s](kv_error* e) { return kv_rewind(s, UINT64_MAX, e); });
  add("kv_fork", "session", [&](kv_error* e) { return kv_fork(nullptr, &out_.session, e); });
  add("kv_fork", "out", [s](kv_error* e) { return kv_fork(s, nullptr, e); });
  add("kv_trace", "session",
      [&](kv_error* e) { return kv_trace(nullptr, out_.spans, 4, &out_.count, e); });
  add("kv_trace", "spans",
      [&](kv_error* e) { return kv_trace(traced_.get(), nullptr, 4, &out_.count, e); });
  add("kv_trace", "count",
      [&](kv_error* e) { return kv_trace(traced_.get(), out_.spans, 4, nullptr, e); });
  add(
      "kv_trace", "nothing traced",
      [&, s](kv_error* e) { return kv_trace(s, out_.spans, 4, &out_.count, e); }, KV_BAD_STATE);
  add("kv_stats", "session",
      [&](kv_error* e) { return kv_stats(nullptr, out_.text, 64, &out_.count, e); });
  add("kv_stats", "json", [&, s](kv_error* e) { return kv_stats(s, nullptr, 64, &out_.count, e); });
  add("kv_stats", "size", [&, s](kv_error* e) { return kv_stats(s, out_.text, 64, nullptr, e); });
}

void Misuses::add_files() {
  kv_call_options flags;
  kv_call_options_init(&flags, sizeof flags);
  flags.flags = 8;
  const std::string nowhere = folder_.file("none/a.kv");
  add("kv_prepare", "session", [](kv_error* e) { return kv_prepare(nullptr, nullptr, e); });
  add("kv_prepare", "flags",
      [&, flags](kv_error* e) { return kv_prepare(session_.get(), &flags, e); });
  add("kv_save", "session",
      [&](kv_error* e) { return kv_save(nullptr, path_.c_str(), nullptr, e); });
  add("kv_save", "path", [&](kv_error* e) { return kv_save(session_.get(), nullptr, nullptr, e); });
  add("kv_save", "flags",
      [&, flags](kv_error* e) { return kv_save(session_.get(), path_.c_str(), &flags, e); });
  add(
      "kv_save", "no such folder",
      [&, nowhere](kv_error* e) { return kv_save(session_.get(), nowhere.c_str(), nullptr, e); },
      KV_NOT_FOUND);
  add("kv_load", "model", [&](kv_error* e) {
    return kv_load(nullptr, path_.c_str(), nullptr, nullptr, &out_.session, e);
  });
  add("kv_load", "path", [&](kv_error* e) {
    return kv_load(tiny_model(), nullptr, nullptr, nullptr, &out_.session, e);
  });
  add("kv_load", "out", [&](kv_error* e) {
    return kv_load(tiny_model(), path_.c_str(), nullptr, nullptr, nullptr, e);
  });
  add("kv_load", "flags", [&, flags](kv_error* e) {
    return kv_load(tiny_model(), path_.c_str(), nullptr, &flags, &out_.session, e);
  });
  add(
      "kv_load", "no such file",
      [&, nowhere](kv_error* e) {
        return kv_load(tiny_model(), nowhere.c_str(), nullptr, nullptr, &out_.session, e);
      },
      KV_NOT_FOUND);
  add(
      "kv_load", "another kind of file",
      [&](kv_error* e) {
        return kv_load(tiny_model(), tiny_path, nullptr, nullptr, &out_.session, e);
      },
      KV_NOT_A_CACHE);
  add("kv_load_prefix", "model", [&](kv_error* e) {
    return kv_load_prefix(nullptr, path_.c_str(), 5, nullptr, nullptr, &out_.session, e);
  });
  add("kv_load_prefix", "path", [&](kv_error* e) {
    return kv_load_prefix(tiny_model(), nullptr, 5, nullptr, nullptr, &out_.session, e);
  });
  add("kv_load_prefix", "out", [&](kv_error* e) {
    return kv_load_prefix(tiny_model(), path_.c_str(), 5, nullptr, nullptr, nullptr, e);
  });
  for (const uint64_t tokens : {uint64_t{201}, UINT64_MAX})
    add("kv_load_prefix", "more tokens than there are", [&, tokens](kv_error* e) {
      return kv_load_prefix(tiny_model(), path_.c_str(), tokens, nullptr, nullptr, &out_.session,
                            e);
    });
  add(
      "kv_load", "a shorter context",
      [&](kv_error* e) {
        kv_session_options o = small_options();
        o.context = 199;
        return kv_load(tiny_model(), path_.c_str(), &o, nullptr, &out_.session, e);
      },
      KV_CONTEXT_FULL);
  add("kv_file_inspect", "path",
      [&](kv_error* e) { return kv_file_inspect(nullptr, &out_.file_info, e); });
  add("kv_file_inspect", "info",
      [&](kv_error* e) { return kv_file_inspect(path_.c_str(), nullptr, e); });
  add(
      "kv_file_inspect", "another kind of file",
      [&](kv_error* e) { return kv_file_inspect(tiny_path, &out_.file_info, e); }, KV_NOT_A_CACHE);
  add("kv_file_verify", "path", [](kv_error* e) { return kv_file_verify(nullptr, nullptr, e); });
  add("kv_file_verify", "flags",
      [&, flags](kv_error* e) { return kv_file_verify(path_.c_str(), &flags, e); });
}

void Misuses::add_packing() {
  const std::string packed = folder_.file("b.kvz");
  const auto level = [](uint32_t of) {
    kv_pack_options o;
    kv_pack_options_init(&o, sizeof o);
    o.level = of;
    return o;
  };
  add("kv_pack", "path", [=](kv_error* e) { return kv_pack(nullptr, packed.c_str(), nullptr, e); });
  add("kv_pack", "packed_path",
      [&](kv_error* e) { return kv_pack(path_.c_str(), nullptr, nullptr, e); });
  add("kv_pack", "the same path twice",
      [&](kv_error* e) { return kv_pack(path_.c_str(), path_.c_str(), nullptr, e); });
  for (uint32_t of : {20u, UINT32_MAX})
    add("kv_pack", "level", [=, this, o = level(of)](kv_error* e) {
      return kv_pack(path_.c_str(), packed.c_str(), &o, e);
    });
  add(
      "kv_pack", "no such file",
      [=](kv_error* e) { return kv_pack("/nowhere/x", packed.c_str(), nullptr, e); }, KV_NOT_FOUND);
  add(
      "kv_pack", "another kind of file",
      [=](kv_error* e) { return kv_pack(tiny_path, packed.c_str(), nullptr, e); }, KV_NOT_A_CACHE);
  add(
      "kv_pack", "no such folder",
      [&](kv_error* e) { return kv_pack(path_.c_str(), "/nowhere/x", nullptr, e); }, KV_NOT_FOUND);
  add("kv_unpack", "packed_path",
      [&](kv_error* e) { return kv_unpack(nullptr, path_.c_str(), nullptr, e); });
  add("kv_unpack", "path",
      [&](kv_error* e) { return kv_unpack(path_.c_str(), nullptr, nullptr, e); });
  add("kv_unpack", "level", [=, this, o = level(1)](kv_error* e) {
    return kv_unpack(path_.c_str(), packed.c_str(), &o, e);
  });
  add(
      "kv_unpack", "another kind of file",
      [=, this](kv_error* e) { return kv_unpack(path_.c_str(), packed.c_str(), nullptr, e); },
      KV_NOT_A_CACHE);
  add("kv_packed_inspect", "path",
      [&](kv_error* e) { return kv_packed_inspect(nullptr, &out_.packed_info, e); });
  add(
      "kv_packed_inspect", "another kind of file",
      [&](kv_error* e) { return kv_packed_inspect(path_.c_str(), &out_.packed_info, e); },
      KV_NOT_A_CACHE);
}

void Misuses::add_library() {
  kv_library* const l = library_;
  add("kv_library_open", "folder",
      [&](kv_error* e) { return kv_library_open(nullptr, nullptr, &out_.library, e); });
  add("kv_library_open", "an empty name",
      [&](kv_error* e) { return kv_library_open("", nullptr, &out_.library, e); });
  add("kv_library_open", "out",
      [&](kv_error* e) { return kv_library_open(folder_.path().c_str(), nullptr, nullptr, e); });
  add("kv_library_open", "a file",
      [&](kv_error* e) { return kv_library_open(path_.c_str(), nullptr, &out_.library, e); });
  add(
      "kv_library_open", "no such folder",
      [&](kv_error* e) {
        return kv_library_open(folder_.file("none/lib").c_str(), nullptr, &out_.library, e);
      },
      KV_NOT_FOUND);
  add("kv_library_open", "flags", [&](kv_error* e) {
    kv_library_options o;
    kv_library_options_init(&o, sizeof o);
    o.flags = 1;
    return kv_library_open(folder_.path().c_str(), &o, &out_.library, e);
  });
  add("kv_library_list", "library",
      [&](kv_error* e) { return kv_library_list(nullptr, 0, &out_.document, e); });
  add("kv_library_list", "document",
      [l](kv_error* e) { return kv_library_list(l, 0, nullptr, e); });
  add(
      "kv_library_list", "after the last",
      [&, l](kv_error* e) { return kv_library_list(l, 0, &out_.document, e); }, KV_NOT_FOUND);
  add("kv_library_session", "library", [&](kv_error* e) {
    return kv_library_session(nullptr, tiny_model(), "a", 1, nullptr, &out_.session, &out_.result,
                              e);
  });
  add("kv_library_session", "model", [&, l](kv_error* e) {
    return kv_library_session(l, nullptr, "a", 1, nullptr, &out_.session, &out_.result, e);
  });
  add("kv_library_session", "text", [&, l](kv_error* e) {
    return kv_library_session(l, tiny_model(), nullptr, 1, nullptr, &out_.session, &out_.result, e);
  });
  add("kv_library_session", "no text", [&, l](kv_error* e) {
    return kv_library_session(l, tiny_model(), nullptr, 0, nullptr, &out_.session, &out_.result, e);
  });
  add("kv_library_session", "out", [&, l](kv_error* e) {
    return kv_library_session(l, tiny_model(), "a", 1, nullptr, nullptr, &out_.result, e);
  });
  add("kv_library_session", "result", [&, l](kv_error* e) {
    kv_library_result bad{};
    return kv_library_session(l, tiny_model(), "a", 1, nullptr, &out_.session, &bad, e);
  });
  add(
      "kv_library_session", "more than the context",
      [&, l](kv_error* e) {
        const std::string text(100'000, 'a');
        return kv_library_session(l, tiny_model(), text.data(), text.size(), nullptr, &out_.session,
                                  &out_.result, e);
      },
      KV_CONTEXT_FULL);
  const auto option =
      [&, l](const char* how,
             std::function<void(kv_library_session_options*, kv_session_options*)> change) {
        add("kv_library_session", how, [&, l, change](kv_error* e) {
          kv_library_session_options o;
          kv_library_session_options_init(&o, sizeof o);
          kv_session_options s = small_options();
          o.session = &s;
          change(&o, &s);
          return kv_library_session(l, tiny_model(), "a", 1, &o, &out_.session, &out_.result, e);
        });
      };
  option("flags", [](auto* o, auto*) { o->flags = 2; });
  option("strategy", [](auto*, auto* s) { s->strategy = "none"; });
  static const std::string long_name(201, 'x');
  for (const char* name : {"", "a/b", "../a", ".a", "a\nb", "a\\b", long_name.c_str()}) {
    option("name", [name](auto* o, auto*) { o->name = name; });
    add("kv_library_rename", "to",
        [l, name](kv_error* e) { return kv_library_rename(l, "a", name, e); });
    add("kv_library_rename", "from",
        [l, name](kv_error* e) { return kv_library_rename(l, name, "a", e); });
    add("kv_library_remove", "name",
        [l, name](kv_error* e) { return kv_library_remove(l, name, e); });
  }
  add("kv_library_rename", "library",
      [](kv_error* e) { return kv_library_rename(nullptr, "a", "b", e); });
  add("kv_library_rename", "from",
      [l](kv_error* e) { return kv_library_rename(l, nullptr, "b", e); });
  add("kv_library_rename", "to",
      [l](kv_error* e) { return kv_library_rename(l, "a", nullptr, e); });
  add(
      "kv_library_rename", "none of that name",
      [l](kv_error* e) { return kv_library_rename(l, "a", "b", e); }, KV_NOT_FOUND);
  add("kv_library_remove", "library",
      [](kv_error* e) { return kv_library_remove(nullptr, "a", e); });
  add("kv_library_remove", "name", [l](kv_error* e) { return kv_library_remove(l, nullptr, e); });
  add(
      "kv_library_remove", "none of that name",
      [l](kv_error* e) { return kv_library_remove(l, "a", e); }, KV_NOT_FOUND);
}

kv_cache_shape cache_shape() {
  kv_cache_shape s{};
  s.struct_size = sizeof s;
  s.layers = s.heads = s.kv_heads = 2;
  s.head_dim = 8;
  s.max_tokens = 100;
  return s;
}

void Misuses::add_caches() {
  const kv_cache_shape shape = cache_shape();
  kv_cache* made = nullptr;
  REQUIRE_OK(kv_cache_open(&shape, nullptr, &made, error));
  cache_.reset(made);
  static const float rows[16] = {};
  // layer 1 is missing
  REQUIRE_OK(kv_cache_update(made, 0, KV_F32, rows, rows, nullptr, 1, error));
  const auto shaped = [&](const char* how, std::function<void(kv_cache_shape*)> change) {
    add("kv_cache_open", how, [=, this](kv_error* e) {
      kv_cache_shape s = cache_shape();
      change(&s);
      return kv_cache_open(&s, nullptr, &out_.cache, e);
    });
  };
  shaped("struct_size", [](auto* s) { s->struct_size = 3; });
  shaped("layers", [](auto* s) { s->layers = 0; });
  shaped("many layers", [](auto* s) { s->layers = UINT32_MAX; });
  shaped("heads", [](auto* s) { s->heads = 0; });
  shaped("many heads", [](auto* s) { s->heads = 1026; });
  shaped("kv_heads", [](auto* s) { s->kv_heads = 0; });
  shaped("kv_heads that divide nothing", [](auto* s) { s->heads = 5; });
  shaped("head_dim", [](auto* s) { s->head_dim = 0; });
  shaped("a long head_dim", [](auto* s) { s->head_dim = 257; });
  shaped("max_tokens", [](auto* s) { s->max_tokens = 0; });
  shaped("many max_tokens", [](auto* s) { s->max_tokens = UINT64_MAX; });
  shaped("reserved", [](auto* s) { s->reserved = 1; });
  const auto optioned = [&](const char* how, std::function<void(kv_cache_options*)> change) {
    add("kv_cache_open", how, [=, this](kv_error* e) {
      const kv_cache_shape s = cache_shape();
      kv_cache_options o;
      kv_cache_options_init(&o, sizeof o);
      change(&o);
      return kv_cache_open(&s, &o, &out_.cache, e);
    });
  };
  optioned("struct_size of options", [](auto* o) { o->struct_size = 0; });
  optioned("threads", [](auto* o) { o->threads = 257; });
  optioned("kv_type", [](auto* o) { o->kv_type = 2; });
  optioned("window", [](auto* o) { o->window = UINT32_MAX; });
  optioned("share_heads", [](auto* o) { o->share_heads = 2; });
  optioned("strategy", [](auto* o) { o->strategy = "h2o"; });
  optioned("a strategy that needs a model", [](auto* o) { o->strategy = "ood"; });
  optioned("budget", [](auto* o) { o->strategy = "quest", o->budget_fraction = nan_d; });
  optioned("coverage", [](auto* o) { o->strategy = "bounded", o->coverage = 1; });
  optioned("options->reserved", [](auto* o) { o->reserved = 1; });
  add("kv_cache_open", "shape",
      [&](kv_error* e) { return kv_cache_open(nullptr, nullptr, &out_.cache, e); });
  add("kv_cache_open", "out",
      [shape](kv_error* e) { return kv_cache_open(&shape, nullptr, nullptr, e); });
  add("kv_cache_update", "cache",
      [](kv_error* e) { return kv_cache_update(nullptr, 0, KV_F32, rows, rows, nullptr, 1, e); });
  add("kv_cache_update", "layer",
      [made](kv_error* e) { return kv_cache_update(made, 2, KV_F32, rows, rows, nullptr, 1, e); });
  add("kv_cache_update", "type",
      [made](kv_error* e) { return kv_cache_update(made, 1, 3, rows, rows, nullptr, 1, e); });
  add("kv_cache_update", "k", [made](kv_error* e) {
    return kv_cache_update(made, 1, KV_F32, nullptr, rows, nullptr, 1, e);
  });
  add("kv_cache_update", "v", [made](kv_error* e) {
    return kv_cache_update(made, 1, KV_F32, rows, nullptr, nullptr, 1, e);
  });
  for (uint32_t n : {0u, 4097u, UINT32_MAX})
    add("kv_cache_update", "tokens",
        [=](kv_error* e) { return kv_cache_update(made, 1, KV_F32, rows, rows, nullptr, n, e); });
  add(
      "kv_cache_update", "twice",
      [made](kv_error* e) { return kv_cache_update(made, 0, KV_F32, rows, rows, nullptr, 1, e); },
      KV_BAD_STATE);
  const auto attend = [&](const char* how,
                          std::function<void(kv_cache_attention_options*)> change) {
    add("kv_cache_attention", how, [=, this](kv_error* e) {
      kv_cache_attention_options o;
      kv_cache_attention_options_init(&o, sizeof o);
      change(&o);
      return kv_cache_attention(made, 0, KV_F32, rows, out_.logits, 1, &o, e);
    });
  };
  attend("flags", [](auto* o) { o->flags = 1; });
  attend("struct_size", [](auto* o) { o->struct_size = 1; });
  for (float bad : {nan_f, inf_f, -1.0f})
    attend("scale", [=](auto* o) { o->scale = bad; }),
        attend("softcap", [=](auto* o) { o->softcap = bad; });
  add("kv_cache_attention", "cache", [&](kv_error* e) {
    return kv_cache_attention(nullptr, 0, KV_F32, rows, out_.logits, 1, nullptr, e);
  });
  add("kv_cache_attention", "layer", [&, made](kv_error* e) {
    return kv_cache_attention(made, 9, KV_F32, rows, out_.logits, 1, nullptr, e);
  });
  add("kv_cache_attention", "type", [&, made](kv_error* e) {
    return kv_cache_attention(made, 0, 9, rows, out_.logits, 1, nullptr, e);
  });
  add("kv_cache_attention", "q", [&, made](kv_error* e) {
    return kv_cache_attention(made, 0, KV_F32, nullptr, out_.logits, 1, nullptr, e);
  });
  add("kv_cache_attention", "out", [made](kv_error* e) {
    return kv_cache_attention(made, 0, KV_F32, rows, nullptr, 1, nullptr, e);
  });
  add("kv_cache_attention", "tokens", [&, made](kv_error* e) {
    return kv_cache_attention(made, 0, KV_F32, rows, out_.logits, 2, nullptr, e);
  });
  add(
      "kv_cache_attention", "a layer without its update",
      [&, made](kv_error* e) {
        return kv_cache_attention(made, 1, KV_F32, rows, out_.logits, 1, nullptr, e);
      },
      KV_BAD_STATE);
  add("kv_cache_truncate", "cache", [](kv_error* e) { return kv_cache_truncate(nullptr, 0, e); });
  add("kv_cache_truncate", "beyond the end",
      [made](kv_error* e) { return kv_cache_truncate(made, 1, e); });
  add("kv_cache_fork", "cache",
      [&](kv_error* e) { return kv_cache_fork(nullptr, nullptr, &out_.cache, e); });
  add("kv_cache_fork", "out",
      [made](kv_error* e) { return kv_cache_fork(made, nullptr, nullptr, e); });
  add(
      "kv_cache_fork", "amid a step",
      [&, made](kv_error* e) { return kv_cache_fork(made, nullptr, &out_.cache, e); },
      KV_BAD_STATE);
  add("kv_cache_save", "cache",
      [&](kv_error* e) { return kv_cache_save(nullptr, path_.c_str(), nullptr, e); });
  add("kv_cache_save", "path",
      [made](kv_error* e) { return kv_cache_save(made, nullptr, nullptr, e); });
  add(
      "kv_cache_save", "amid a step",
      [&, made](kv_error* e) { return kv_cache_save(made, path_.c_str(), nullptr, e); },
      KV_BAD_STATE);
  add("kv_cache_load", "shape", [&](kv_error* e) {
    return kv_cache_load(nullptr, path_.c_str(), nullptr, nullptr, &out_.cache, e);
  });
  add("kv_cache_load", "path", [&, shape](kv_error* e) {
    return kv_cache_load(&shape, nullptr, nullptr, nullptr, &out_.cache, e);
  });
  add("kv_cache_load", "out", [&, shape](kv_error* e) {
    return kv_cache_load(&shape, path_.c_str(), nullptr, nullptr, nullptr, e);
  });
  add(
      "kv_cache_load", "a session's file",
      [&, shape](kv_error* e) {
        return kv_cache_load(&shape, path_.c_str(), nullptr, nullptr, &out_.cache, e);
      },
      KV_MODEL_MISMATCH);
  add("kv_session_from_cache", "cache", [&](kv_error* e) {
    return kv_session_from_cache(tiny_model(), nullptr, some_ids, 1, nullptr, nullptr,
                                 &out_.session, e);
  });
  add("kv_session_from_cache", "model", [&, made](kv_error* e) {
    return kv_session_from_cache(nullptr, made, some_ids, 1, nullptr, nullptr, &out_.session, e);
  });
  add("kv_session_from_cache", "tokens", [&, made](kv_error* e) {
    return kv_session_from_cache(tiny_model(), made, nullptr, 1, nullptr, nullptr, &out_.session,
                                 e);
  });
  add("kv_session_from_cache", "out", [&, made](kv_error* e) {
    return kv_session_from_cache(tiny_model(), made, some_ids, 1, nullptr, nullptr, nullptr, e);
  });
  kv_call_options flags;
  kv_call_options_init(&flags, sizeof flags);
  flags.flags = 8;
  add("kv_session_from_cache", "flags", [&, made, flags](kv_error* e) {
    return kv_session_from_cache(tiny_model(), made, some_ids, 1, nullptr, &flags, &out_.session,
                                 e);
  });
  add(
      "kv_session_from_cache", "another shape",
      [&, made](kv_error* e) {
        return kv_session_from_cache(tiny_model(), made, some_ids, 1, nullptr, nullptr,
                                     &out_.session, e);
      },
      KV_MODEL_MISMATCH);
  add("kv_cache_stats", "cache",
      [&](kv_error* e) { return kv_cache_stats(nullptr, out_.text, 64, &out_.count, e); });
  add("kv_cache_stats", "json",
      [&, made](kv_error* e) { return kv_cache_stats(made, nullptr, 64, &out_.count, e); });
  add("kv_cache_stats", "size",
      [&, made](kv_error* e) { return kv_cache_stats(made, out_.text, 64, nullptr, e); });
}

}  // namespace

TEST_CASE("a wrong call gets its code and a message and changes nothing") {
  Misuses misuses;
  const std::vector<int32_t> tokens = sequence(misuses.session()),
                             next = peek(misuses.session(), 3);
  for (const Misuse& m : misuses.table()) {
    CAPTURE(std::string(m.function));
    CAPTURE(std::string(m.how));
    misuses.out().fill();
    std::vector<char> before(sizeof(Outputs));
    std::memcpy(before.data(), &misuses.out(), sizeof(Outputs));
    kv_error error{};
    error.status = -1;
    count_faults("wrong call");
    CHECK(m.call(&error) == m.expected);
    CHECK(error.status == m.expected);
    CHECK(std::string_view(error.message).size() > 5);
    CHECK(std::string_view(error.message).find('\n') == std::string_view::npos);
    CHECK(m.call(nullptr) == m.expected);
    CHECK(std::memcmp(before.data(), &misuses.out(), sizeof(Outputs)) == 0);
  }
  CHECK(sequence(misuses.session()) == tokens);
  CHECK(peek(misuses.session(), 3) == next);
  CHECK(misuses.files() == 1);
}

TEST_CASE("NULL where nothing can go wrong is nothing") {
  kv_close(nullptr);
  kv_session_close(nullptr);
  kv_cancel_release(nullptr);
  kv_cancel_fire(nullptr);
  kv_cancel_reset(nullptr);
  CHECK(kv_retain(nullptr) == nullptr);
  kv_model_options_init(nullptr, 64);
  kv_session_options_init(nullptr, 64);
  kv_call_options_init(nullptr, 64);
  kv_generate_options_init(nullptr, 64);
  kv_pack_options_init(nullptr, 64);
  kv_library_close(nullptr);
  kv_library_options_init(nullptr, 64);
  kv_library_session_options_init(nullptr, 64);
  kv_cache_close(nullptr);
  kv_cache_options_init(nullptr, 64);
  kv_cache_attention_options_init(nullptr, 64);
}

TEST_CASE("every function of the header is misused here") {
  std::set<std::string> known = {
      "kv_close", "kv_session_close", "kv_cancel_release", "kv_cancel_fire", "kv_cancel_reset",
      "kv_retain", "kv_model_options_init", "kv_session_options_init", "kv_call_options_init",
      "kv_generate_options_init", "kv_pack_options_init", "kv_library_close",
      "kv_library_options_init", "kv_library_session_options_init", "kv_cache_close",
      "kv_cache_options_init", "kv_cache_attention_options_init",
      // No pointers in: status_test below.
      "kv_status_text", "kv_status_is_stale", "kv_version", "kv_build_info"};
  const Misuses misuses;
  for (const Misuse& m : misuses.table()) known.insert(m.function);
  std::ifstream in(EXAMPLES "/../include/kvasir.h");
  const std::string header(std::istreambuf_iterator<char>(in), {});
  std::set<std::string> declared;
  const std::string mark = "\nKV_API ";
  for (std::size_t at = header.find(mark); at != std::string::npos;
       at = header.find(mark, at + 1)) {
    const std::size_t end = header.find('(', at), begin = header.find_last_of(" *", end) + 1;
    declared.insert(header.substr(begin, end - begin));
  }
  CHECK(declared.size() > 30);
  CHECK(declared == known);
}

TEST_CASE("every status has a text, and NaN or infinity have one too") {
  std::set<std::string> texts;
  for (kv_status s = KV_OK; s <= KV_DEVICE; ++s) {
    texts.insert(kv_status_text(s));
    CHECK(kv_status_is_stale(s) == (s == KV_VERSION || s == KV_MODEL_MISMATCH));
  }
  CHECK(texts.size() == KV_DEVICE + 1);
  for (kv_status s : {-1, KV_DEVICE + 1, INT32_MIN, INT32_MAX})
    CHECK(std::string(kv_status_text(s)) == "unknown status");
  CHECK(kv_version() == KV_VERSION_NUMBER);
}
