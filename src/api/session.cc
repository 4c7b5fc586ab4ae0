// Sessions: options, prefill, rewind, fork.
#include "api/handles.h"
#include "api/strategy.h"

using namespace kvasir;

namespace {

Status handle_for(std::unique_ptr<Session> session, std::unique_ptr<kv_session> handle,
                  kv_session** out) {
  handle->session = std::move(session);
  *out = handle.release();
  return {};
}

}  // namespace

namespace kvasir::api {

LogFn log_function(kv_log_fn fn, void* user) {
  if (!fn) return {};
  return [=](int level, const char* message) {
    char line[1024];
    quote(message, line, sizeof line);  // it has names of files and documents
    (void)Call::run_callback(nullptr, [&] { return fn(level, line, user), 0; });
  };
}

Status session_options(const kv_session_options* in, SessionOptions* out) {
  kv_session_options o;
  RETURN_IF_ERROR(read_options(in, &o));
  RETURN_IF_ERROR(check_flags(o.flags, KV_NO_LOOKUP));
  if (o.precision > KV_PRECISION_F32)
    return Status::error(Code::bad_argument,
                         "precision is %u: use KV_PRECISION_INT8 or KV_PRECISION_F32", o.precision);
  out->threads = o.threads;
  out->context = o.context_tokens;
  out->full_precision = o.precision == KV_PRECISION_F32;
  out->window = o.window_tokens;
  out->prefill_chunk = o.prefill_chunk;
  RETURN_IF_ERROR(decode_options(o.decode, Use::decode, &out->select));
  RETURN_IF_ERROR(prefill_options(o.prefill, &out->read));
  if (o.spill_directory && !*o.spill_directory)
    return Status::error(Code::bad_argument,
                         "spill_directory is empty: name a directory, or use NULL for the default");
  out->memory = {o.memory_limit, ""};
  if (o.memory_limit > 0 && o.spill_directory)  // the working directory may change
    RETURN_IF_ERROR(os::absolute_path(o.spill_directory, &out->memory.spill_folder));
  if (o.instructions) out->instructions = o.instructions;
  if (o.reserved != 0)
    return Status::error(Code::bad_argument, "options->reserved is %u: write 0", o.reserved);
  out->draft_tokens = o.draft_tokens;
  if (o.flags & KV_NO_LOOKUP) out->lookup_tokens = 0;
  out->log = log_function(o.log, o.log_user);
  return {};
}

}  // namespace kvasir::api

extern "C" {

kv_status kv_session_open(kv_model* model, const kv_session_options* options, kv_session** out,
                          kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    RETURN_IF_ERROR(api::check_model(model));
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    SessionOptions o;
    RETURN_IF_ERROR(api::session_options(options, &o));
    auto handle = std::make_unique<kv_session>();
    std::unique_ptr<Session> session;
    RETURN_IF_ERROR(Session::open(model->model, o, &session));
    return handle_for(std::move(session), std::move(handle), out);
  });
}

void kv_session_close(kv_session* session) { api::close(session); }

kv_status kv_session_set_strategy(kv_session* session, const kv_strategy* decode, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    SelectOptions select;
    RETURN_IF_ERROR(api::decode_options(decode, api::Use::decode, &select));
    select.certify = s.select().certify;
    return s.set_select(select);
  });
}

kv_status kv_session_measure(kv_session* session, uint32_t flags, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    RETURN_IF_ERROR(
        api::check_flags(flags, KV_MEASURE_COMPARE | KV_MEASURE_LAYERS | KV_MEASURE_CERTIFY));
    s.set_measure(flags & KV_MEASURE_LAYERS    ? CompareLevel::layers
                  : flags & KV_MEASURE_COMPARE ? CompareLevel::attention
                                               : CompareLevel::none,
                  flags & KV_MEASURE_CERTIFY);
    return {};
  });
}

kv_status kv_session_prepare(kv_session* session, const kv_control* control, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    api::Control c;
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    RETURN_IF_ERROR(s.prepare(c.cancel, c.report(KV_PHASE_PREPARE)));
    return s.prepare_devices(c.cancel, c.report(KV_PHASE_PREPARE));
  });
}

kv_status kv_prefill(kv_session* session, const char* text, size_t size, const kv_control* control,
                     uint64_t* tokens_done, uint64_t* bytes_done, kv_error* error) {
  uint64_t tokens = 0, bytes = 0;
  const kv_status status = api::exclusive(session, error, [&](Session& s) -> Status {
    api::Control c;
    RETURN_IF_ERROR(api::read_control(control, KV_TOKENIZE_SPECIAL, &c));
    RETURN_IF_ERROR(api::check_text(text, size, "text"));
    return s.prefill({text, size}, c.has(KV_TOKENIZE_SPECIAL), c.cancel, c.report(KV_PHASE_PREFILL),
                     &tokens, &bytes);
  });
  if (tokens_done) *tokens_done = tokens;
  if (bytes_done) *bytes_done = bytes;
  return status;
}

static kv_status prefill_ids(kv_session* session, const int32_t* tokens, size_t count,
                             float* logits, const kv_control* control, uint64_t* tokens_done,
                             kv_error* error) {
  uint64_t done = 0;
  const kv_status status = api::exclusive(session, error, [&](Session& s) -> Status {
    api::Control c;
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    if (!tokens && count)
      return Status::error(Code::bad_argument, "tokens is NULL and count is %zu", count);
    return s.prefill_tokens({tokens, count}, logits, c.cancel, c.report(KV_PHASE_PREFILL), &done);
  });
  if (tokens_done) *tokens_done = done;
  return status;
}

kv_status kv_prefill_tokens(kv_session* session, const int32_t* tokens, size_t count,
                            const kv_control* control, uint64_t* tokens_done, kv_error* error) {
  return prefill_ids(session, tokens, count, nullptr, control, tokens_done, error);
}

kv_status kv_prefill_logits(kv_session* session, const int32_t* tokens, size_t count, float* logits,
                            const kv_control* control, kv_error* error) {
  if (!logits && count)
    return api::guarded(error, [] { return Status::error(Code::bad_argument, "logits is NULL"); });
  return prefill_ids(session, tokens, count, logits, control, nullptr, error);
}

kv_status kv_session_tokens(const kv_session* session, int32_t* tokens, size_t capacity,
                            size_t* count, kv_error* error) {
  return api::exclusive(session, error, [&](const Session& s) {
    return api::write_array(s.tokens().data(), s.tokens().size(), tokens, capacity, count);
  });
}

kv_status kv_session_rewind(kv_session* session, uint64_t tokens, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) { return s.rewind(tokens); });
}

kv_status kv_session_fork(kv_session* session, kv_session** out, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    auto handle = std::make_unique<kv_session>();
    std::unique_ptr<Session> fork;
    RETURN_IF_ERROR(s.fork(&fork));
    return handle_for(std::move(fork), std::move(handle), out);
  });
}

}  // extern "C"
