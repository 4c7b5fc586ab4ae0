// Answers: generate, next, score, and the passages that an answer attended.
#include "api/handles.h"

using namespace kvasir;

namespace {

// 0 is the default of every field, also where the sampler has 1 for "off".
SamplingOptions sampling_of(const kv_generate_options& o) {
  return {.temperature = o.temperature,
          .top_k = o.top_k,
          .top_p = o.top_p == 0 ? 1 : o.top_p,
          .min_p = o.min_p,
          .repetition_penalty = o.repetition_penalty == 0 ? 1 : o.repetition_penalty,
          .seed = o.seed};
}

kv_answer to_public(const Answer& a) {
  kv_answer out{};
  out.stop_reason = static_cast<uint32_t>(a.reason);
  out.question_tokens = a.question_tokens;
  out.answer_tokens = a.answer_tokens;
  out.first_token_ns = a.first_token_ns;
  out.total_ns = a.total_ns;
  out.tokens_read = a.read.tokens_read;
  out.tokens_present = a.read.tokens_present;
  out.thinking_tokens = a.thinking_tokens;
  return out;
}

constexpr uint32_t generate_flags =
    KV_TOKENIZE_SPECIAL | KV_KEEP_TURN | KV_KEEP_THINKING | KV_TRACE_PASSAGES;

Status check_thinking(const kv_generate_options& o) {
  if (o.thinking > KV_THINKING_ON)
    return Status::error(Code::bad_argument, "thinking is %u: use a kv_thinking", o.thinking);
  if (o.thinking == KV_THINKING_OFF && o.thinking_tokens)
    return Status::error(Code::bad_argument, "thinking_tokens is %u, and thinking is off",
                         o.thinking_tokens);
  if ((o.flags & KV_KEEP_THINKING) && (o.thinking == KV_THINKING_OFF || !(o.flags & KV_KEEP_TURN)))
    return Status::error(Code::bad_argument,
                         "KV_KEEP_THINKING needs KV_KEEP_TURN and KV_THINKING_ON");
  return {};
}

Status generate_options(const kv_generate_options* in, kv_generate_options* out) {
  RETURN_IF_ERROR(api::read_options(in, out));
  RETURN_IF_ERROR(api::check_flags(out->flags, generate_flags));
  if (out->reserved != 0)
    return Status::error(Code::bad_argument, "options->reserved is %u: write 0", out->reserved);
  return check_thinking(*out);
}

Status stop_strings(const kv_generate_options& o, std::vector<std::string>* out) {
  if (!o.stop && o.stop_count)
    return Status::error(Code::bad_argument, "stop is NULL and stop_count is %u", o.stop_count);
  for (uint32_t i = 0; i < o.stop_count; ++i) {
    if (!o.stop[i] || !*o.stop[i])
      return Status::error(Code::bad_argument, "stop string %u is NULL or empty", i);
    out->emplace_back(o.stop[i]);
  }
  return {};
}

TextFn text_function(const char* name, kv_text_fn fn, void* user) {
  if (!fn) return {};
  return [=](std::string_view t) {
    return api::Call::run_callback(name, [&] { return fn(t.data(), t.size(), user); });
  };
}

}  // namespace

extern "C" {

kv_status kv_generate(kv_session* session, const char* question, size_t size,
                      const kv_generate_options* options, const kv_control* control,
                      kv_text_fn on_text, void* user, kv_answer* answer, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    kv_generate_options o;
    api::Control c;
    RETURN_IF_ERROR(generate_options(options, &o));
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    RETURN_IF_ERROR(api::check_text(question, size, "question"));
    if (answer) RETURN_IF_ERROR(api::check_result(answer, "answer"));  // before the work
    GenerateOptions g;
    RETURN_IF_ERROR(stop_strings(o, &g.stop));
    g.max_tokens = o.max_tokens ? o.max_tokens : 512;
    g.sampling = sampling_of(o);
    g.keep = o.flags & KV_KEEP_TURN;
    g.trace = o.flags & KV_TRACE_PASSAGES;
    g.parse_special = o.flags & KV_TOKENIZE_SPECIAL;
    g.cancel = c.cancel;
    g.progress = c.report(KV_PHASE_PREFILL);
    g.prepare_progress = c.report(KV_PHASE_PREPARE);
    g.thinking = o.thinking == KV_THINKING_ON;
    if (o.thinking_tokens) g.thinking_tokens = o.thinking_tokens;
    g.keep_thinking = o.flags & KV_KEEP_THINKING;
    g.on_thought = text_function("the thinking callback", o.on_thinking, user);
    Answer made;
    Status status =
        s.generate({question, size}, g, text_function("the text callback", on_text, user), &made);
    if (answer && (status.ok() || status.code() == Code::cancelled))
      RETURN_IF_ERROR(api::write_result(to_public(made), answer, "answer"));
    return status;
  });
}

kv_status kv_session_next(kv_session* session, const kv_generate_options* options,
                          const kv_control* control, int32_t* token, int32_t* end,
                          kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    kv_generate_options o;
    api::Control c;
    RETURN_IF_ERROR(generate_options(options, &o));
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    if (!token) return Status::error(Code::bad_argument, "token is NULL");
    bool ends = false;
    RETURN_IF_ERROR(s.next(sampling_of(o), c.cancel, token, &ends));
    if (end) *end = ends;
    return {};
  });
}

kv_status kv_session_score(kv_session* session, const int32_t* tokens, size_t count,
                           float* log_probabilities, const kv_control* control, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    api::Control c;
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    if (!tokens && count)
      return Status::error(Code::bad_argument, "tokens is NULL and count is %zu", count);
    if (!log_probabilities && count)
      return Status::error(Code::bad_argument, "log_probabilities is NULL");
    return s.score({tokens, count}, log_probabilities, c.cancel, c.report(KV_PHASE_PREFILL),
                   c.report(KV_PHASE_PREPARE));
  });
}

kv_status kv_session_passages(kv_session* session, kv_passage* passages, size_t capacity,
                              size_t* count, kv_error* error) {
  return api::exclusive(session, error, [&](const Session& s) -> Status {
    std::vector<Passage> found;
    RETURN_IF_ERROR(s.passages(&found));
    std::vector<kv_passage> out;  // [passages]
    out.reserve(found.size());
    for (const Passage& p : found)
      out.push_back(
          {p.first, p.tokens, p.first_byte, p.bytes, static_cast<float>(p.share), p.document});
    return api::write_array(out.data(), out.size(), passages, capacity, count);
  });
}

}  // extern "C"
