// Wrong calls of a cache without a model.
#include "misuse.h"

namespace api_test {

namespace {

kv_cache_shape cache_shape() {
  kv_cache_shape s;
  kv_init(&s, sizeof s);
  s.layers = s.heads = s.kv_heads = 2;
  s.head_dim = 8;
  s.max_tokens = 100;
  return s;
}

}  // namespace

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
  shaped("struct_size of kv_cache_shape", [](auto* s) { s->struct_size = 3; });
  shaped("layers", [](auto* s) { s->layers = 0; });
  shaped("many layers", [](auto* s) { s->layers = UINT32_MAX; });
  shaped("heads", [](auto* s) { s->heads = 0; });
  shaped("many heads", [](auto* s) { s->heads = 1026; });
  shaped("kv_heads", [](auto* s) { s->kv_heads = 0; });
  shaped("kv_heads that divide nothing", [](auto* s) { s->heads = 5; });
  shaped("head_dim", [](auto* s) { s->head_dim = 0; });
  shaped("a long head_dim", [](auto* s) { s->head_dim = 513; });
  shaped("max_tokens", [](auto* s) { s->max_tokens = 0; });
  shaped("many max_tokens", [](auto* s) { s->max_tokens = UINT64_MAX; });
  shaped("reserved", [](auto* s) { s->reserved = 1; });
  const auto optioned = [&](const char* how, std::function<void(kv_cache_options*)> change) {
    add("kv_cache_open", how, [=, this](kv_error* e) {
      const kv_cache_shape s = cache_shape();
      kv_cache_options o;
      kv_init(&o, sizeof o);
      change(&o);
      return kv_cache_open(&s, &o, &out_.cache, e);
    });
  };
  optioned("struct_size of kv_cache_options", [](auto* o) { o->struct_size = 0; });
  optioned("threads", [](auto* o) { o->threads = 257; });
  optioned("precision", [](auto* o) { o->precision = 2; });
  optioned("window_tokens", [](auto* o) { o->window_tokens = UINT32_MAX; });
  optioned("a strategy that needs a model", [](auto* o) { o->decode = strategy("ood"); });
  optioned("EXACT_TOKENS of decode", [](auto* o) {
    o->decode = strategy("quest", {{KV_PARAM_EXACT_TOKENS, 100}});
  });
  optioned("a layer that the cache does not have", [](auto* o) {
    o->decode = strategies::filter_layers({0, 2});
  });
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
      kv_init(&o, sizeof o);
      change(&o);
      return kv_cache_attention(made, 0, KV_F32, rows, out_.logits, 1, &o, nullptr, e);
    });
  };
  attend("flags", [](auto* o) { o->flags = 1; });
  attend("struct_size of kv_cache_attention_options", [](auto* o) { o->struct_size = 1; });
  for (float bad : {nan_f, inf_f, -1.0f})
    attend("scale", [=](auto* o) { o->scale = bad; }),
        attend("softcap", [=](auto* o) { o->softcap = bad; });
  add("kv_cache_attention", "cache", [&](kv_error* e) {
    return kv_cache_attention(nullptr, 0, KV_F32, rows, out_.logits, 1, nullptr, nullptr, e);
  });
  add("kv_cache_attention", "layer", [&, made](kv_error* e) {
    return kv_cache_attention(made, 9, KV_F32, rows, out_.logits, 1, nullptr, nullptr, e);
  });
  add("kv_cache_attention", "type", [&, made](kv_error* e) {
    return kv_cache_attention(made, 0, 9, rows, out_.logits, 1, nullptr, nullptr, e);
  });
  add("kv_cache_attention", "q", [&, made](kv_error* e) {
    return kv_cache_attention(made, 0, KV_F32, nullptr, out_.logits, 1, nullptr, nullptr, e);
  });
  add("kv_cache_attention", "out", [made](kv_error* e) {
    return kv_cache_attention(made, 0, KV_F32, rows, nullptr, 1, nullptr, nullptr, e);
  });
  add("kv_cache_attention", "tokens", [&, made](kv_error* e) {
    return kv_cache_attention(made, 0, KV_F32, rows, out_.logits, 2, nullptr, nullptr, e);
  });
  add(
      "kv_cache_attention", "a layer without its update",
      [&, made](kv_error* e) {
        return kv_cache_attention(made, 1, KV_F32, rows, out_.logits, 1, nullptr, nullptr, e);
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
  add(
      "kv_session_from_cache", "another shape",
      [&, made](kv_error* e) {
        return kv_session_from_cache(tiny_model(), made, some_ids, 1, nullptr, nullptr,
                                     &out_.session, e);
      },
      KV_MODEL_MISMATCH);
  const auto from = [this](kv_cache* cache, const kv_checkpoint* first, kv_error* e) {
    return kv_session_from_checkpoint(tiny_model(), cache, first, nullptr, some_ids, 1, nullptr,
                                      nullptr, &out_.session, e);
  };
  const auto checkpoint = [](uint32_t count, const kv_layer_state* states) {
    kv_checkpoint c;
    kv_init(&c, sizeof c);
    c.tokens = 1, c.count = count, c.states = states;
    return c;
  };
  static constexpr kv_layer_state good = {0, KV_STATE_INPUTS, KV_F32, 0, rows, 4};
  add("kv_session_from_checkpoint", "cache", [=](kv_error* e) {
    const kv_checkpoint c = checkpoint(0, nullptr);
    return from(nullptr, &c, e);
  });
  add("kv_session_from_checkpoint", "from", [=](kv_error* e) { return from(made, nullptr, e); });
  add("kv_session_from_checkpoint", "states", [=](kv_error* e) {
    const kv_checkpoint c = checkpoint(1, nullptr);
    return from(made, &c, e);
  });
  add("kv_session_from_checkpoint", "struct_size of kv_checkpoint", [=](kv_error* e) {
    kv_checkpoint c = checkpoint(0, nullptr);
    c.struct_size = 3;
    return from(made, &c, e);
  });
  add("kv_session_from_checkpoint", "count", [=](kv_error* e) {
    const kv_checkpoint c = checkpoint(65537, &good);
    return from(made, &c, e);
  });
  const auto refuses = [&](const char* what, kv_layer_state state) {
    add("kv_session_from_checkpoint", what, [=](kv_error* e) {
      const kv_checkpoint c = checkpoint(1, &state);
      return from(made, &c, e);
    });
  };
  kv_layer_state state = good;
  state.layout = 5, refuses("layout", state), state = good;
  state.type = 3, refuses("type", state), state = good;
  state.reserved = 1, refuses("reserved", state), state = good;
  state.numbers = nullptr, refuses("numbers", state);
  refuses("layer 0, inputs", good);
  add("kv_session_from_checkpoint", "model", [&, made, checkpoint](kv_error* e) {
    const kv_checkpoint c = checkpoint(0, nullptr);
    return kv_session_from_checkpoint(nullptr, made, &c, nullptr, some_ids, 1, nullptr, nullptr,
                                      &out_.session, e);
  });
  add("kv_session_from_checkpoint", "tokens", [&, made, checkpoint](kv_error* e) {
    const kv_checkpoint c = checkpoint(0, nullptr);
    return kv_session_from_checkpoint(tiny_model(), made, &c, nullptr, nullptr, 1, nullptr, nullptr,
                                      &out_.session, e);
  });
  add("kv_session_from_checkpoint", "out", [&, made, checkpoint](kv_error* e) {
    const kv_checkpoint c = checkpoint(0, nullptr);
    return kv_session_from_checkpoint(tiny_model(), made, &c, nullptr, some_ids, 1, nullptr,
                                      nullptr, nullptr, e);
  });
  add_control("kv_session_from_checkpoint",
              [&, made, checkpoint](const kv_control* c, kv_error* e) {
                const kv_checkpoint first = checkpoint(0, nullptr);
                return kv_session_from_checkpoint(tiny_model(), made, &first, nullptr, some_ids, 1,
                                                  nullptr, c, &out_.session, e);
              });
  add("kv_cache_stats_json", "cache",
      [&](kv_error* e) { return kv_cache_stats_json(nullptr, out_.text, 64, &out_.count, e); });
  add("kv_cache_stats_json", "json",
      [&, made](kv_error* e) { return kv_cache_stats_json(made, nullptr, 64, &out_.count, e); });
  add("kv_cache_stats_json", "size",
      [&, made](kv_error* e) { return kv_cache_stats_json(made, out_.text, 64, nullptr, e); });
  add("kv_session_from_cache", "instructions", [&, made](kv_error* e) {
    kv_session_options o = small_options();
    o.instructions = "Be brief.";
    return kv_session_from_cache(tiny_model(), made, some_ids, 1, &o, nullptr, &out_.session, e);
  });
  add_control("kv_session_from_cache", [&, made](const kv_control* c, kv_error* e) {
    return kv_session_from_cache(tiny_model(), made, some_ids, 1, nullptr, c, &out_.session, e);
  });
  add_control("kv_cache_attention", [&, made](const kv_control* c, kv_error* e) {
    return kv_cache_attention(made, 0, KV_F32, rows, out_.logits, 1, nullptr, c, e);
  });
  add_control("kv_cache_fork", [&, made](const kv_control* c, kv_error* e) {
    return kv_cache_fork(made, c, &out_.cache, e);
  });
  add_control("kv_cache_save", [&, made](const kv_control* c, kv_error* e) {
    return kv_cache_save(made, path_.c_str(), c, e);
  });
  add_control("kv_cache_load", [&, shape](const kv_control* c, kv_error* e) {
    return kv_cache_load(&shape, path_.c_str(), nullptr, c, &out_.cache, e);
  });
  add("kv_cache_get_stats", "cache",
      [&](kv_error* e) { return kv_cache_get_stats(nullptr, &out_.cache_stats, e); });
  add("kv_cache_get_stats", "stats",
      [made](kv_error* e) { return kv_cache_get_stats(made, nullptr, e); });
  add("kv_cache_get_stats", "struct_size of kv_cache_stats", [made](kv_error* e) {
    kv_cache_stats bad{};
    return kv_cache_get_stats(made, &bad, e);
  });
}

}  // namespace api_test
