// kv_cache_*: the store without a model.
#include "api/handles.h"

using namespace kvasir;

namespace {

// A caller's struct that has no init function: as far as its size goes, zeros for the rest.
Status read_shape(const kv_cache_shape* in, BareOptions* out) {
  if (!in) return Status::error(Code::bad_argument, "shape is NULL");
  kv_cache_shape s;
  const auto init = [](kv_cache_shape* shape, std::size_t size) {
    api::write_defaults(kv_cache_shape{}, shape, size);
  };
  if (Status e = api::read_options<kv_cache_shape>(in, init, &s); !e.ok()) return e;
  if (s.reserved != 0)
    return Status::error(Code::bad_argument, "shape->reserved is %u: write 0", s.reserved);
  out->shape.layers = s.layers;
  out->shape.heads = s.heads;
  out->shape.kv_heads = s.kv_heads;
  out->shape.head_dim = s.head_dim;
  out->max_tokens = s.max_tokens;
  std::copy_n(s.identity, out->identity.size(), out->identity.begin());
  return {};
}

// The options that sessions have too are checked where sessions' are.
Status read_cache_options(const kv_cache_options* in, BareOptions* out) {
  kv_cache_options o;
  if (Status s = api::read_options(in, kv_cache_options_init, &o); !s.ok()) return s;
  if (o.reserved != 0)
    return Status::error(Code::bad_argument, "options->reserved is %u: write 0", o.reserved);
  kv_session_options as;
  kv_session_options_init(&as, sizeof as);
  as.threads = o.threads;
  as.kv_type = o.kv_type;
  as.window = o.window;
  as.dense_layers = o.dense_layers;
  as.share_heads = o.share_heads;
  as.strategy = o.strategy;
  as.budget_tokens = o.budget_tokens;
  as.budget_fraction = o.budget_fraction;
  as.filter_layers = o.filter_layers;
  as.alpha = o.alpha;
  as.coverage = o.coverage;
  as.select_tokens = o.select_tokens;
  as.memory_budget = o.memory_budget;
  as.spill_folder = o.spill_folder;
  SessionOptions session;
  if (Status s = api::session_options(&as, &session); !s.ok()) return s;
  out->threads = session.threads;
  out->full_precision = session.full_precision;
  out->window = session.window;
  out->select = session.select;
  out->memory = session.memory;
  return {};
}

Status check_type(uint32_t type) {
  if (type <= KV_BF16) return {};
  return Status::error(Code::bad_argument, "type is %u: use KV_F32, KV_F16 or KV_BF16", type);
}

}  // namespace

extern "C" {

void kv_cache_options_init(kv_cache_options* options, size_t size) {
  kv_cache_options o{};
  o.window = 64;
  o.dense_layers = UINT32_MAX;
  o.share_heads = 1;
  api::write_defaults(o, options, size);
}

void kv_cache_attention_options_init(kv_cache_attention_options* options, size_t size) {
  api::write_defaults(kv_cache_attention_options{}, options, size);
}

kv_status kv_cache_open(const kv_cache_shape* shape, const kv_cache_options* options,
                        kv_cache** out, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    BareOptions o;
    if (Status s = read_shape(shape, &o); !s.ok()) return s;
    if (Status s = read_cache_options(options, &o); !s.ok()) return s;
    auto handle = std::make_unique<kv_cache>();
    if (Status s = ExternalStore::open(o, &handle->cache); !s.ok()) return s;
    *out = handle.release();
    return {};
  });
}

void kv_cache_close(kv_cache* cache) { api::close(cache); }

kv_status kv_cache_update(kv_cache* cache, uint32_t layer, uint32_t type, const void* k,
                          const void* v, const void* q, uint32_t tokens, kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    if (Status s = check_type(type); !s.ok()) return s;
    if (!k) return Status::error(Code::bad_argument, "k is NULL");
    if (!v) return Status::error(Code::bad_argument, "v is NULL");
    return c.update(layer, static_cast<Numbers>(type), k, v, q, tokens);
  });
}

kv_status kv_cache_attention(kv_cache* cache, uint32_t layer, uint32_t type, const void* q,
                             void* out, uint32_t tokens, const kv_cache_attention_options* options,
                             kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    if (Status s = check_type(type); !s.ok()) return s;
    if (!q) return Status::error(Code::bad_argument, "q is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    kv_cache_attention_options o;
    if (Status s = api::read_options(options, kv_cache_attention_options_init, &o); !s.ok())
      return s;
    if (Status s = api::check_flags(o.flags, 0); !s.ok()) return s;
    return c.attention({layer, tokens, static_cast<Numbers>(type), q, out, o.scale, o.softcap,
                        api::flag_of(o.cancel)});
  });
}

kv_status kv_cache_truncate(kv_cache* cache, uint64_t tokens, kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) { return c.truncate(tokens); });
}

kv_status kv_cache_fork(kv_cache* cache, kv_cancel* cancel, kv_cache** out, kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    auto handle = std::make_unique<kv_cache>();
    if (Status s = c.fork(api::flag_of(cancel), &handle->cache); !s.ok()) return s;
    *out = handle.release();
    return {};
  });
}

kv_status kv_cache_save(kv_cache* cache, const char* path, const kv_call_options* options,
                        kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    kv_call_options o;
    if (Status s = api::read_options(options, kv_call_options_init, &o); !s.ok()) return s;
    if (Status s = api::check_flags(o.flags, 0); !s.ok()) return s;
    return c.save(path, api::flag_of(o.cancel),
                  api::progress_report(o.progress, o.progress_user, KV_PHASE_SAVE));
  });
}

kv_status kv_cache_load(const kv_cache_shape* shape, const char* path,
                        const kv_cache_options* cache_options, const kv_call_options* options,
                        kv_cache** out, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    BareOptions b;
    if (Status s = read_shape(shape, &b); !s.ok()) return s;
    if (Status s = read_cache_options(cache_options, &b); !s.ok()) return s;
    kv_call_options o;
    if (Status s = api::read_options(options, kv_call_options_init, &o); !s.ok()) return s;
    if (Status s = api::check_flags(o.flags, KV_LOAD_VERIFY); !s.ok()) return s;
    auto handle = std::make_unique<kv_cache>();
    if (Status s = ExternalStore::load(
            path, b, o.flags & KV_LOAD_VERIFY, api::flag_of(o.cancel),
            api::progress_report(o.progress, o.progress_user, KV_PHASE_VERIFY), &handle->cache);
        !s.ok())
      return s;
    *out = handle.release();
    return {};
  });
}

kv_status kv_session_from_cache(kv_model* model, kv_cache* cache, const int32_t* tokens,
                                size_t count, const kv_session_options* session_options,
                                const kv_call_options* options, kv_session** out, kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    if (!model) return Status::error(Code::bad_argument, "model is NULL");
    if (!tokens) return Status::error(Code::bad_argument, "tokens is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    SessionOptions so;
    if (Status s = api::session_options(session_options, &so); !s.ok()) return s;
    kv_call_options o;
    if (Status s = api::read_options(options, kv_call_options_init, &o); !s.ok()) return s;
    if (Status s = api::check_flags(o.flags, KV_TOKENIZE_DOCUMENT | KV_CACHE_UNCHECKED); !s.ok())
      return s;
    auto handle = std::make_unique<kv_session>();
    const Session::Adopted how{.document = (o.flags & KV_TOKENIZE_DOCUMENT) != 0,
                               .compared = (o.flags & KV_CACHE_UNCHECKED) == 0};
    if (Status s = Session::adopt(
            model->model, c, {tokens, count}, so, how, api::flag_of(o.cancel),
            api::progress_report(o.progress, o.progress_user, KV_PHASE_PREFILL), &handle->session);
        !s.ok())
      return s;
    *out = handle.release();
    return {};
  });
}

kv_status kv_cache_stats(kv_cache* cache, char* json, size_t capacity, size_t* size,
                         kv_error* error) {
  return api::exclusive(cache, error, [&](const ExternalStore& c) {
    const std::string text = c.stats_json();
    return api::write_array(text.c_str(), text.size() + 1, json, capacity, size);
  });
}

}  // extern "C"
