// kv_cache_*: a KV cache for an engine that brings its own weights.
#include "api/handles.h"
#include "api/strategy.h"
#include "session/given_checkpoint.h"

using namespace kvasir;

namespace {

Status read_shape(const kv_cache_shape* in, BareOptions* out) {
  if (!in) return Status::error(Code::bad_argument, "shape is NULL");
  kv_cache_shape s;
  RETURN_IF_ERROR(api::read_options(in, &s));
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

// Options that sessions have too are checked where those of sessions are.
Status read_cache_options(const kv_cache_options* in, BareOptions* out) {
  kv_cache_options o;
  RETURN_IF_ERROR(api::read_options(in, &o));
  kv_session_options shared;
  kv_init(&shared, sizeof shared);
  shared.threads = o.threads;
  shared.precision = o.precision;
  shared.window_tokens = o.window_tokens;
  shared.memory_limit = o.memory_limit;
  shared.spill_directory = o.spill_directory;
  SessionOptions session;
  RETURN_IF_ERROR(api::session_options(&shared, &session));
  out->threads = session.threads;
  out->full_precision = session.full_precision;
  out->window = session.window;
  out->memory = session.memory;
  return api::decode_options(o.decode, api::Use::cache, &out->select);
}

kv_cache_stats to_public(const ExternalStats& s) {
  kv_cache_stats out{};
  out.threads = s.threads;
  out.tokens = s.tokens;
  out.max_tokens = s.max_tokens;
  out.sealed_tokens = s.sealed_tokens;
  out.page_tokens = s.page_tokens;
  out.sink_tokens = s.sink_tokens;
  out.window_tokens = s.window_tokens;
  out.step_tokens = s.step_tokens;
  out.private_bytes = s.private_bytes;
  out.mapped_bytes = s.mapped_bytes;
  out.spilled_bytes = s.spilled_bytes;
  out.memory_limit = s.memory_limit;
  out.budget_tokens = s.budget_tokens;
  out.tokens_read = s.tokens_read;
  out.tokens_present = s.tokens_present;
  out.pages_touched = s.pages_touched;
  api::copy_text(out.decode_strategy, s.decode_strategy);
  return out;
}

Status check_type(uint32_t type) {
  if (type <= KV_BF16) return {};
  return Status::error(Code::bad_argument, "type is %u: use KV_F32, KV_F16 or KV_BF16", type);
}

// A checkpoint of the caller. `parts` lasts as long as *out.
Status read_checkpoint(const char* name, const kv_checkpoint* in, const Model& model,
                       std::vector<GivenPart>* parts, GivenCheckpoint* out) {
  constexpr uint32_t max_states = 65536;
  kv_checkpoint c;
  RETURN_IF_ERROR(api::read_options(in, &c));
  if (c.count > max_states)
    return Status::error(Code::bad_argument, "%s->count is %u: use up to %u", name, c.count,
                         max_states);
  if (!c.states && c.count > 0)
    return Status::error(Code::bad_argument, "%s->states is NULL", name);
  parts->reserve(c.count);
  for (uint32_t i = 0; i < c.count; ++i) {
    const kv_layer_state& s = c.states[i];
    const auto refused = [&](const char* what) {
      return Status::error(Code::bad_argument, "%s->states[%u]: %s", name, i, what);
    };
    if (s.layout >= part_layouts) return refused("layout is not a kv_state_layout");
    if (s.type > KV_BF16) return refused("type is not KV_F32, KV_F16 or KV_BF16");
    if (s.reserved != 0) return refused("reserved is not 0");
    if (!s.numbers) return refused("numbers is NULL");
    parts->push_back({s.layer, static_cast<PartLayout>(s.layout), static_cast<Numbers>(s.type),
                      s.numbers, s.count});
  }
  return GivenCheckpoint::check(model.config(), name, c.tokens, *parts, out);
}

// A call that makes a session of a cache.
struct AdoptCall {
  kv_model* model;
  const int32_t* tokens;
  size_t count;
  const kv_session_options* options;
  const kv_control* control;
  kv_session** out;
};

Status adopt(ExternalStore& cache, const AdoptCall& request, Session::Adopted how) {
  if (!request.tokens) return Status::error(Code::bad_argument, "tokens is NULL");
  if (!request.out) return Status::error(Code::bad_argument, "out is NULL");
  SessionOptions options;
  api::Control call;
  RETURN_IF_ERROR(api::session_options(request.options, &options));
  RETURN_IF_ERROR(
      api::read_control(request.control, KV_TOKENIZE_DOCUMENT | KV_CACHE_UNCHECKED, &call));
  auto handle = std::make_unique<kv_session>();
  how.document = call.has(KV_TOKENIZE_DOCUMENT), how.compared = !call.has(KV_CACHE_UNCHECKED);
  RETURN_IF_ERROR(Session::adopt(request.model->model, cache, {request.tokens, request.count},
                                 options, how, call.cancel, call.report(KV_PHASE_PREFILL),
                                 &handle->session));
  *request.out = handle.release();
  return {};
}

}  // namespace

extern "C" {

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
                             const kv_control* control, kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    if (Status s = check_type(type); !s.ok()) return s;
    if (!q) return Status::error(Code::bad_argument, "q is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    kv_cache_attention_options o;
    api::Control call;
    RETURN_IF_ERROR(api::read_options(options, &o));
    RETURN_IF_ERROR(api::check_flags(o.flags, 0));
    RETURN_IF_ERROR(api::read_control(control, 0, &call));
    return c.attention(
        {layer, tokens, static_cast<Numbers>(type), q, out, o.scale, o.softcap, call.cancel});
  });
}

kv_status kv_cache_truncate(kv_cache* cache, uint64_t tokens, kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) { return c.truncate(tokens); });
}

kv_status kv_cache_fork(kv_cache* cache, const kv_control* control, kv_cache** out,
                        kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    api::Control call;
    RETURN_IF_ERROR(api::read_control(control, 0, &call));
    auto handle = std::make_unique<kv_cache>();
    RETURN_IF_ERROR(c.fork(call.cancel, &handle->cache));
    *out = handle.release();
    return {};
  });
}

kv_status kv_cache_save(kv_cache* cache, const char* path, const kv_control* control,
                        kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    api::Control call;
    RETURN_IF_ERROR(api::read_control(control, 0, &call));
    return c.save(path, call.cancel, call.report(KV_PHASE_SAVE));
  });
}

kv_status kv_cache_load(const kv_cache_shape* shape, const char* path,
                        const kv_cache_options* options, const kv_control* control, kv_cache** out,
                        kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    BareOptions o;
    api::Control call;
    RETURN_IF_ERROR(read_shape(shape, &o));
    RETURN_IF_ERROR(read_cache_options(options, &o));
    RETURN_IF_ERROR(api::read_control(control, KV_VERIFY, &call));
    auto handle = std::make_unique<kv_cache>();
    RETURN_IF_ERROR(ExternalStore::load(path, o, call.has(KV_VERIFY), call.cancel,
                                        call.report(KV_PHASE_VERIFY), &handle->cache));
    *out = handle.release();
    return {};
  });
}

kv_status kv_session_from_cache(kv_model* model, kv_cache* cache, const int32_t* tokens,
                                size_t count, const kv_session_options* options,
                                const kv_control* control, kv_session** out, kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    RETURN_IF_ERROR(api::check_model(model));
    return adopt(c, {model, tokens, count, options, control, out}, {});
  });
}

kv_status kv_session_from_checkpoint(kv_model* model, kv_cache* cache, const kv_checkpoint* from,
                                     const kv_checkpoint* end, const int32_t* tokens, size_t count,
                                     const kv_session_options* options, const kv_control* control,
                                     kv_session** out, kv_error* error) {
  return api::exclusive(cache, error, [&](ExternalStore& c) -> Status {
    RETURN_IF_ERROR(api::check_model(model));
    if (!from) return Status::error(Code::bad_argument, "from is NULL");
    std::vector<GivenPart> parts[2];
    GivenCheckpoint given[2];
    RETURN_IF_ERROR(read_checkpoint("from", from, *model->model, &parts[0], &given[0]));
    if (end) RETURN_IF_ERROR(read_checkpoint("end", end, *model->model, &parts[1], &given[1]));
    Session::Adopted how;
    how.from = &given[0], how.end = end ? &given[1] : nullptr;
    return adopt(c, {model, tokens, count, options, control, out}, how);
  });
}

kv_status kv_cache_get_stats(kv_cache* cache, kv_cache_stats* stats, kv_error* error) {
  return api::exclusive(cache, error, [&](const ExternalStore& c) -> Status {
    RETURN_IF_ERROR(api::check_result(stats, "stats"));
    return api::write_result(to_public(c.stats()), stats, "stats");
  });
}

kv_status kv_cache_stats_json(kv_cache* cache, char* json, size_t capacity, size_t* size,
                              kv_error* error) {
  return api::exclusive(cache, error, [&](const ExternalStore& c) {
    const std::string text = c.stats_json();
    return api::write_array(text.c_str(), text.size() + 1, json, capacity, size);
  });
}

}  // extern "C"
