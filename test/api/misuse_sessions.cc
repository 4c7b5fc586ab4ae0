// Wrong calls of models, tokenizers, strategies and sessions.
#include "misuse.h"

namespace api_test {

void Misuses::add_model() {
  add("kv_cancel_create", "out", [](kv_error* e) { return kv_cancel_create(nullptr, e); });
  add("kv_open", "path",
      [&](kv_error* e) { return kv_open(nullptr, nullptr, nullptr, &out_.model, e); });
  add("kv_open", "out",
      [](kv_error* e) { return kv_open(tiny_path, nullptr, nullptr, nullptr, e); });
  add(
      "kv_open", "an empty path",
      [&](kv_error* e) { return kv_open("", nullptr, nullptr, &out_.model, e); }, KV_NOT_FOUND);
  add(
      "kv_open", "no such file",
      [&](kv_error* e) { return kv_open((path_ + "x").c_str(), nullptr, nullptr, &out_.model, e); },
      KV_NOT_FOUND);
  add("kv_open", "a folder", [&](kv_error* e) {
    return kv_open(folder_.path().c_str(), nullptr, nullptr, &out_.model, e);
  });
  add(
      "kv_open", "a file that is no model",
      [&](kv_error* e) { return kv_open(path_.c_str(), nullptr, nullptr, &out_.model, e); },
      KV_UNSUPPORTED);
  add("kv_open", "flags", [&](kv_error* e) {
    kv_model_options o;
    kv_init(&o, sizeof o);
    o.flags = 1;
    return kv_open(tiny_path, &o, nullptr, &out_.model, e);
  });
  for (const char* format : {"", "chatml2", "CHATML"}) {
    add("kv_open", "chat_format", [&, format](kv_error* e) {
      kv_model_options o;
      kv_init(&o, sizeof o);
      o.chat_format = format;
      return kv_open(tiny_path, &o, nullptr, &out_.model, e);
    });
  }
  add("kv_open", "device", [&](kv_error* e) {
    kv_model_options o;
    kv_init(&o, sizeof o);
    o.device = "gpu";
    return kv_open(tiny_path, &o, nullptr, &out_.model, e);
  });
  add("kv_open", "device_memory without a device", [&](kv_error* e) {
    kv_model_options o;
    kv_init(&o, sizeof o);
    o.device_memory = 1;
    return kv_open(tiny_path, &o, nullptr, &out_.model, e);
  });
  add("kv_model_get_info", "model",
      [&](kv_error* e) { return kv_model_get_info(nullptr, &out_.model_info, e); });
  add("kv_model_get_info", "struct_size of kv_model_info", [&](kv_error* e) {
    kv_model_info bad{};
    return kv_model_get_info(tiny_model(), &bad, e);
  });
  add("kv_model_get_info", "info",
      [](kv_error* e) { return kv_model_get_info(tiny_model(), nullptr, e); });
  add("kv_model_hash", "model", [](kv_error* e) { return kv_model_hash(nullptr, nullptr, e); });
  add_control("kv_model_hash",
              [](const kv_control* c, kv_error* e) { return kv_model_hash(tiny_model(), c, e); });
  add_control("kv_open", [&](const kv_control* c, kv_error* e) {
    return kv_open(tiny_path, nullptr, c, &out_.model, e);
  });
  add("kv_open", "struct_size of kv_model_options", [&](kv_error* e) {
    kv_model_options o{};
    return kv_open(tiny_path, &o, nullptr, &out_.model, e);
  });
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
  add("kv_tokenize", "flags of loading", [&](kv_error* e) {
    return kv_tokenize(tiny_model(), "a", 1, KV_VERIFY, nullptr, out_.tokens, 4, &out_.count, e);
  });
  add_control("kv_tokenize", [&](const kv_control* c, kv_error* e) {
    return kv_tokenize(tiny_model(), "a", 1, 0, c, out_.tokens, 4, &out_.count, e);
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

void Misuses::add_strategies() {
  add("kv_strategy_list", "info", [](kv_error* e) { return kv_strategy_list(0, nullptr, e); });
  add("kv_strategy_list", "struct_size of kv_strategy_info", [](kv_error* e) {
    kv_strategy_info bad{};
    return kv_strategy_list(0, &bad, e);
  });
  add(
      "kv_strategy_list", "after the last",
      [&](kv_error* e) { return kv_strategy_list(1000, &out_.strategy_info, e); }, KV_NOT_FOUND);
  add("kv_strategy_create", "out",
      [](kv_error* e) { return kv_strategy_create("quest", nullptr, e); });
  add("kv_strategy_create", "name",
      [&](kv_error* e) { return kv_strategy_create(nullptr, &out_.strategy, e); });
  for (const char* name : {"", "Quest", "quest ", "h2o", "none", "\xff\xfe%s%n"})
    add("kv_strategy_create", "an unknown name",
        [=, this](kv_error* e) { return kv_strategy_create(name, &out_.strategy, e); });
  add("kv_strategy_set", "strategy",
      [](kv_error* e) { return kv_strategy_set(nullptr, KV_PARAM_BUDGET_TOKENS, 1, e); });
  add("kv_strategy_get", "strategy", [&](kv_error* e) {
    return kv_strategy_get(nullptr, KV_PARAM_BUDGET_TOKENS, &out_.value, e);
  });
  add("kv_strategy_get", "value", [&](kv_error* e) {
    return kv_strategy_get(changed("quest"), KV_PARAM_BUDGET_TOKENS, nullptr, e);
  });
  // A parameter that the strategy does not have, or that no strategy has.
  const auto lacks = [&](const char* name, uint32_t parameter) {
    for (const double value : {0.5, 1.0, 32.0})
      add("kv_strategy_set", "a parameter that the strategy does not have",
          [=, this](kv_error* e) { return kv_strategy_set(changed(name), parameter, value, e); });
    add("kv_strategy_get", "a parameter that the strategy does not have", [=, this](kv_error* e) {
      return kv_strategy_get(changed(name), parameter, &out_.value, e);
    });
  };
  for (const uint32_t parameter : {0u, 9u, 999u, 1004u, UINT32_MAX}) lacks("quest", parameter);
  for (uint32_t parameter = KV_PARAM_BUDGET_TOKENS; parameter < KV_PARAM_EXACT_TOKENS; ++parameter)
    lacks("full", parameter);
  for (const uint32_t parameter : {KV_PARAM_BUDGET_TOKENS, KV_PARAM_SHARE_HEADS})
    lacks("window", parameter);
  for (const char* name : {"auto", "flat", "filter-layers", "bounded"})
    lacks(name, KV_PARAM_SELECT_TOKENS);
  for (const char* name : {"quest", "flat", "dipr"}) lacks(name, KV_PARAM_COVERAGE);
  for (const char* name : {"quest", "bounded", "ood"}) lacks(name, KV_PARAM_ALPHA);
  for (const char* name : {"quest", "hnsw"}) lacks(name, KV_PARAM_HEAD_GRAPHS);
  for (const char* name : {"quest", "bounded"}) lacks(name, KV_PARAM_SEARCH_BREADTH);
  for (const char* name : {"auto", "bounded", "filter-layers", "full"})
    lacks(name, KV_PARAM_BUDGET_SCHEDULE);
  lacks("quest", KV_PARAM_FILTER_WINDOW);
  lacks("filter-layers", KV_PARAM_DENSE_LAYERS);
  lacks("filter-layers", KV_PARAM_SHARE_HEADS);
  const auto refuses = [&](const char* name, uint32_t parameter,
                           std::initializer_list<double> values) {
    for (const double value : values)
      add("kv_strategy_set", "a value out of range",
          [=, this](kv_error* e) { return kv_strategy_set(changed(name), parameter, value, e); });
  };
  const double inf = HUGE_VAL;
  refuses("quest", KV_PARAM_BUDGET_TOKENS, {0, -1, 0.5, nan_d, inf, -inf});
  refuses("quest", KV_PARAM_BUDGET_FRACTION, {0, -0.01, 1.01, nan_d, -nan_d, inf, -inf});
  refuses("quest", KV_PARAM_DENSE_LAYERS, {-1, 0.5, nan_d, inf});
  refuses("quest", KV_PARAM_SHARE_HEADS, {2, 0.5, -1, nan_d});
  refuses("quest", KV_PARAM_SELECT_TOKENS, {1, 24.5, 2048, double{UINT32_MAX}, nan_d});
  refuses("quest", KV_PARAM_EXACT_TOKENS, {-1, 0.5, nan_d, inf});
  refuses("quest", KV_PARAM_BUDGET_SCHEDULE, {3, 0.5, -1, nan_d});
  refuses("dipr", KV_PARAM_ALPHA, {0, -0.5, 1.5, nan_d, inf});
  refuses("bounded", KV_PARAM_COVERAGE, {1, -0.5, nan_d, inf});
  refuses("hnsw", KV_PARAM_SEARCH_BREADTH, {-1, 0.5, nan_d, inf});
  refuses("ood", KV_PARAM_HEAD_GRAPHS, {2, 0.5, -1, nan_d});
  refuses("filter-layers", KV_PARAM_FILTER_WINDOW, {3, 0.5, -1, nan_d});
  const auto layers = [&](const char* how, const char* name, std::vector<uint32_t> list) {
    add("kv_strategy_set_layers", how, [=, this](kv_error* e) {
      return kv_strategy_set_layers(changed(name), list.data(), list.size(), e);
    });
  };
  layers("another strategy", "quest", {0});
  layers("descending", "filter-layers", {1, 0});
  layers("one twice", "filter-layers", {0, 0});
  add("kv_strategy_set_layers", "strategy", [](kv_error* e) {
    const uint32_t layer = 0;
    return kv_strategy_set_layers(nullptr, &layer, 1, e);
  });
  add("kv_strategy_set_layers", "layers",
      [&](kv_error* e) { return kv_strategy_set_layers(changed("filter-layers"), nullptr, 1, e); });
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

void Misuses::add_decode(const char* how, const kv_strategy* decode) {
  add_session_option(how, [=](auto* o) { o->decode = decode; });
  add("kv_session_set_strategy", how,
      [=, this](kv_error* e) { return kv_session_set_strategy(session_.get(), decode, e); });
}

void Misuses::add_session() {
  add("kv_session_open", "model",
      [&](kv_error* e) { return kv_session_open(nullptr, nullptr, &out_.session, e); });
  add("kv_session_open", "out",
      [](kv_error* e) { return kv_session_open(tiny_model(), nullptr, nullptr, e); });
  add_session_option("struct_size of kv_session_options", [](auto* o) { o->struct_size = 3; });
  add_session_option("flags", [](auto* o) { o->flags = 1; });
  add_session_option("flags", [](auto* o) { o->flags = KV_NO_LOOKUP << 1; });
  add_session_option("threads", [](auto* o) { o->threads = 257; });
  add_session_option("context_tokens", [](auto* o) { o->context_tokens = UINT64_MAX; });
  add_session_option("precision", [](auto* o) { o->precision = 2; });
  add_session_option("window_tokens", [](auto* o) { o->window_tokens = UINT32_MAX; });
  add_session_option("draft_tokens", [](auto* o) { o->draft_tokens = 4; });
  add_session_option("reserved", [](auto* o) { o->reserved = 1; });
  add_session_option("prefill_chunk", [](auto* o) { o->prefill_chunk = 4097; });
  static const std::string long_instructions(1'000'001, 'x');
  add_session_option("instructions", [](auto* o) { o->instructions = long_instructions.c_str(); });
  // What kv_strategy_set accepts, where the use of the strategy does not have it.
  add_decode("EXACT_TOKENS of decode", strategy("quest", {{KV_PARAM_EXACT_TOKENS, 100}}));
  add_decode("a layer that the model does not have", strategies::filter_layers({0, 1000}));
  for (const char* name : {"dipr", "hnsw", "ood", "dipr-graph", "ivf", "infllm", "snapkv"})
    add_session_option("a strategy that cannot prefill",
                       [=](auto* o) { o->prefill = strategy(name); });
  for (const auto parameter : {KV_PARAM_BUDGET_TOKENS, KV_PARAM_DENSE_LAYERS, KV_PARAM_SHARE_HEADS})
    add_session_option("a parameter that prefill does not have", [=](auto* o) {
      o->prefill = strategy("quest", {{static_cast<uint32_t>(parameter), 1}});
    });
  add_session_option("SELECT_TOKENS of prefill", [](auto* o) {
    o->prefill = strategy("quest", {{KV_PARAM_SELECT_TOKENS, 32}});
  });
  add_session_option("COVERAGE of prefill", [](auto* o) {
    o->prefill = strategy("bounded", {{KV_PARAM_COVERAGE, 0.9}});
  });
  add_session_option("prefill by a layer that the model does not have", [](auto* o) {
    o->prefill = strategies::filter_layers({0, 1000});
  });
  add("kv_session_open", "memory_limit of a full-precision session", [&](kv_error* e) {
    kv_session_options o = small_options();
    o.precision = KV_PRECISION_F32;
    o.memory_limit = uint64_t{1} << 30;
    return kv_session_open(tiny_model(), &o, &out_.session, e);
  });
  add("kv_session_set_strategy", "session",
      [](kv_error* e) { return kv_session_set_strategy(nullptr, nullptr, e); });
  add("kv_session_measure", "session",
      [](kv_error* e) { return kv_session_measure(nullptr, 0, e); });
  for (const uint32_t flags : {8u, UINT32_MAX})
    add("kv_session_measure", "flags",
        [=, this](kv_error* e) { return kv_session_measure(session_.get(), flags, e); });
}

}  // namespace api_test
