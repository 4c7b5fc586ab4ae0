// Sessions: reading, asking, going back, forking.
#include <charconv>
#include <cstring>

#include "api/handles.h"

using namespace kvasir;

namespace {

Status handle_for(std::unique_ptr<Session> session, std::unique_ptr<kv_session> handle,
                  kv_session** out) {
  handle->session = std::move(session);
  *out = handle.release();
  return {};
}

SamplingOptions sampling_of(const kv_generate_options& o) {
  return {o.temperature, o.top_k, o.top_p, o.min_p, o.repetition_penalty, o.seed};
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
  return out;
}

// "2,8,18". Whether the model has them is for the session to say.
Status read_layers(const char* text, std::vector<uint32_t>* out) {
  const char *at = text, *end = text + std::strlen(text);
  for (;;) {
    uint32_t layer = 0;
    const auto [stop, failed] = std::from_chars(at, end, layer);
    if (failed != std::errc() || (stop != end && *stop != ','))
      return Status::error(Code::bad_argument,
                           "filter_layers is '%s': write numbers with commas, as \"2,8,18\"",
                           Quoted(text).text());
    out->push_back(layer);
    if (stop == end) return {};
    at = stop + 1;
  }
}

}  // namespace

namespace kvasir::api {

LogFn log_function(kv_log_fn fn, void* user) {
  if (!fn) return {};
  return [=](int level, const char* message) {
    char line[1024];
    quote(message, line, sizeof line);  // names of files and documents are in it
    (void)Call::run_callback(nullptr, [&] { return fn(level, line, user), 0; });
  };
}

Status session_options(const kv_session_options* in, SessionOptions* out) {
  kv_session_options o;
  if (Status s = read_options(in, kv_session_options_init, &o); !s.ok()) return s;
  if (o.kv_type > KV_KV_F32)
    return Status::error(Code::bad_argument, "kv_type is %u: use KV_KV_INT8 or KV_KV_F32",
                         o.kv_type);
  if (o.share_heads > 1)
    return Status::error(Code::bad_argument, "share_heads is %u: use 0 or 1", o.share_heads);
  if (o.compare > 2)
    return Status::error(Code::bad_argument, "compare is %u: use 0, 1 or 2", o.compare);
  if (o.head_graphs > 1)
    return Status::error(Code::bad_argument, "head_graphs is %u: use 0 or 1", o.head_graphs);
  if (o.certify > 1)
    return Status::error(Code::bad_argument, "certify is %u: use 0 or 1", o.certify);
  if (o.budget_schedule > KV_BUDGET_PYRAMID)
    return Status::error(
        Code::bad_argument,
        "budget_schedule is %u: use KV_BUDGET_UNIFORM, KV_BUDGET_LINEAR or KV_BUDGET_PYRAMID",
        o.budget_schedule);
  if (o.filter_window > KV_FILTER_UNIFORM)
    return Status::error(
        Code::bad_argument,
        "filter_window is %u: use KV_FILTER_LAST, KV_FILTER_EXPONENTIAL or KV_FILTER_UNIFORM",
        o.filter_window);
  out->threads = o.threads;
  out->context = o.context;
  out->full_precision = o.kv_type == KV_KV_F32;
  out->window = o.window;
  out->prefill_chunk = o.prefill_chunk;
  out->select = {o.strategy ? o.strategy : "auto",
                 o.budget_tokens,
                 o.budget_fraction,
                 o.dense_layers,
                 o.share_heads == 1,
                 o.alpha,
                 {},
                 static_cast<FilterWindow>(o.filter_window),
                 o.select_tokens,
                 o.coverage,
                 o.certify == 1};
  out->select.search_breadth = o.search_breadth;
  out->select.head_graphs = o.head_graphs == 1;
  out->memory = {o.memory_budget, ""};
  if (o.memory_budget > 0 && o.spill_folder && *o.spill_folder)  // the current folder may change
    if (Status s = os::absolute_path(o.spill_folder, &out->memory.spill_folder); !s.ok()) return s;
  out->select.schedule = static_cast<BudgetSchedule>(o.budget_schedule);
  if (o.filter_layers)
    if (Status s = read_layers(o.filter_layers, &out->select.filter_layers); !s.ok()) return s;
  out->compare = static_cast<CompareLevel>(o.compare);
  out->read = {o.prefill_strategy ? o.prefill_strategy : "full", o.prefill_budget_fraction,
               o.prefill_exact_tokens};
  out->log = log_function(o.log, o.log_user);
  return {};
}

}  // namespace kvasir::api

extern "C" {

kv_status kv_strategy_info(uint32_t index, kv_strategy_information* info, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    const std::span<const StrategyInfo> all = all_strategies();
    if (Status s = api::check_result(info, "info"); !s.ok()) return s;
    if (index >= all.size())
      return Status::error(Code::not_found, "there is no strategy %u: there are %zu", index,
                           all.size());
    const StrategyInfo& strategy = all[index];
    kv_strategy_information i{};
    i.dense_layers = strategy.dense_layers;
    i.budget_fraction = strategy.budget_fraction;
    i.budget_floor = strategy.budget_floor;
    i.takes_budget = strategy.make && strategy.budget_fraction > 0;
    i.takes_select_tokens = strategy.has(StrategyInfo::takes_unit);
    i.takes_coverage = strategy.has(StrategyInfo::takes_coverage);
    i.takes_head_graphs = strategy.index == IndexKind::ood;
    api::copy_text(i.name, strategy.name);
    return api::write_result(i, info, "info");
  });
}

void kv_session_options_init(kv_session_options* options, size_t size) {
  kv_session_options o{};
  o.dense_layers = UINT32_MAX;
  o.share_heads = 1;
  api::write_defaults(o, options, size);
}

void kv_generate_options_init(kv_generate_options* options, size_t size) {
  kv_generate_options o{};
  o.top_p = 1;
  o.repetition_penalty = 1;
  api::write_defaults(o, options, size);
}

kv_status kv_session_open(kv_model* model, const kv_session_options* options, kv_session** out,
                          kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!model) return Status::error(Code::bad_argument, "model is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    SessionOptions o;
    if (Status s = api::session_options(options, &o); !s.ok()) return s;
    auto handle = std::make_unique<kv_session>();
    std::unique_ptr<Session> session;
    if (Status s = Session::open(model->model, o, &session); !s.ok()) return s;
    return handle_for(std::move(session), std::move(handle), out);
  });
}

void kv_session_close(kv_session* session) { api::close(session); }

kv_status kv_session_set_strategy(kv_session* session, const char* strategy, uint64_t budget_tokens,
                                  double budget_fraction, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) {
    SelectOptions select = s.select();
    select.strategy = strategy ? strategy : "auto";
    select.budget_tokens = budget_tokens;
    select.budget_fraction = budget_fraction;
    const StrategyInfo* info = strategy_info(select.strategy);
    if (!info || !info->has(StrategyInfo::takes_unit)) select.unit_tokens = 0;
    if (info && !info->has(StrategyInfo::takes_coverage)) select.coverage = 0;
    if (!info || info->index != IndexKind::ood) select.head_graphs = false;
    return s.set_select(select);
  });
}

kv_status kv_prepare(kv_session* session, const kv_call_options* options, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    kv_call_options o;
    if (Status e = api::read_options(options, kv_call_options_init, &o); !e.ok()) return e;
    if (Status e = api::check_flags(o.flags, 0); !e.ok()) return e;
    const auto report = [&] {
      return api::progress_report(o.progress, o.progress_user, KV_PHASE_PREPARE);
    };
    if (Status e = s.prepare(api::flag_of(o.cancel), report()); !e.ok()) return e;
    return s.prepare_devices(api::flag_of(o.cancel), report());
  });
}

kv_status kv_prefill(kv_session* session, const char* text, size_t size,
                     const kv_call_options* options, uint64_t* tokens_done, uint64_t* bytes_done,
                     kv_error* error) {
  uint64_t tokens = 0, bytes = 0;
  const kv_status status = api::exclusive(session, error, [&](Session& s) -> Status {
    kv_call_options o;
    if (Status e = api::read_options(options, kv_call_options_init, &o); !e.ok()) return e;
    if (Status e = api::check_flags(o.flags, KV_TOKENIZE_SPECIAL); !e.ok()) return e;
    if (Status e = api::check_text(text, size, "text"); !e.ok()) return e;
    return s.prefill({text, size}, o.flags & KV_TOKENIZE_SPECIAL, api::flag_of(o.cancel),
                     api::progress_report(o.progress, o.progress_user, KV_PHASE_PREFILL), &tokens,
                     &bytes);
  });
  if (tokens_done) *tokens_done = tokens;
  if (bytes_done) *bytes_done = bytes;
  return status;
}

static kv_status prefill_ids(kv_session* session, const int32_t* tokens, size_t count,
                             float* logits, const kv_call_options* options, uint64_t* tokens_done,
                             kv_error* error) {
  uint64_t done = 0;
  const kv_status status = api::exclusive(session, error, [&](Session& s) -> Status {
    kv_call_options o;
    if (Status e = api::read_options(options, kv_call_options_init, &o); !e.ok()) return e;
    if (Status e = api::check_flags(o.flags, 0); !e.ok()) return e;
    if (!tokens && count)
      return Status::error(Code::bad_argument, "tokens is NULL and count is %zu", count);
    return s.prefill_tokens({tokens, count}, logits, api::flag_of(o.cancel),
                            api::progress_report(o.progress, o.progress_user, KV_PHASE_PREFILL),
                            &done);
  });
  if (tokens_done) *tokens_done = done;
  return status;
}

kv_status kv_prefill_tokens(kv_session* session, const int32_t* tokens, size_t count,
                            const kv_call_options* options, uint64_t* tokens_done,
                            kv_error* error) {
  return prefill_ids(session, tokens, count, nullptr, options, tokens_done, error);
}

kv_status kv_prefill_logits(kv_session* session, const int32_t* tokens, size_t count, float* logits,
                            const kv_call_options* options, kv_error* error) {
  if (!logits && count)
    return api::guarded(error, [] { return Status::error(Code::bad_argument, "logits is NULL"); });
  return prefill_ids(session, tokens, count, logits, options, nullptr, error);
}

kv_status kv_generate(kv_session* session, const char* question, size_t size,
                      const kv_generate_options* options, kv_text_fn on_text, void* user,
                      kv_answer* answer, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    kv_generate_options o;
    if (Status e = api::read_options(options, kv_generate_options_init, &o); !e.ok()) return e;
    if (Status e = api::check_flags(o.flags, KV_TOKENIZE_SPECIAL); !e.ok()) return e;
    if (Status e = api::check_text(question, size, "question"); !e.ok()) return e;
    if (o.keep > 1) return Status::error(Code::bad_argument, "keep is %u: use 0 or 1", o.keep);
    if (o.trace > 1) return Status::error(Code::bad_argument, "trace is %u: use 0 or 1", o.trace);
    if (o.reserved != 0)
      return Status::error(Code::bad_argument, "options->reserved is %u: write 0", o.reserved);
    if (!o.stop && o.stop_count)
      return Status::error(Code::bad_argument, "stop is NULL and stop_count is %u", o.stop_count);
    if (answer)  // a wrong size is found before the work
      if (Status e = api::check_result(answer, "answer"); !e.ok()) return e;
    GenerateOptions g;
    g.max_tokens = o.max_tokens ? o.max_tokens : 512;
    g.sampling = sampling_of(o);
    g.keep = o.keep;
    g.trace = o.trace;
    g.parse_special = o.flags & KV_TOKENIZE_SPECIAL;
    for (uint32_t i = 0; i < o.stop_count; ++i) {
      if (!o.stop[i] || !*o.stop[i])
        return Status::error(Code::bad_argument, "stop string %u is NULL or empty", i);
      g.stop.emplace_back(o.stop[i]);
    }
    g.cancel = api::flag_of(o.cancel);
    g.progress = api::progress_report(o.progress, o.progress_user, KV_PHASE_PREFILL);
    g.prepare_progress = api::progress_report(o.progress, o.progress_user, KV_PHASE_PREPARE);
    TextFn text;
    if (on_text)
      text = [=](std::string_view t) {
        return api::Call::run_callback("the text callback",
                                       [&] { return on_text(t.data(), t.size(), user); });
      };
    Answer made;
    Status status = s.generate({question, size}, g, text, &made);
    if (answer && (status.ok() || status.code() == Code::cancelled))
      if (Status e = api::write_result(to_public(made), answer, "answer"); !e.ok()) return e;
    return status;
  });
}

kv_status kv_next(kv_session* session, const kv_generate_options* options, int32_t* token,
                  int32_t* end, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    kv_generate_options o;
    if (Status e = api::read_options(options, kv_generate_options_init, &o); !e.ok()) return e;
    if (Status e = api::check_flags(o.flags, KV_TOKENIZE_SPECIAL); !e.ok()) return e;
    if (!token) return Status::error(Code::bad_argument, "token is NULL");
    bool ends = false;
    if (Status e = s.next(sampling_of(o), api::flag_of(o.cancel), token, &ends); !e.ok()) return e;
    if (end) *end = ends;
    return {};
  });
}

kv_status kv_score(kv_session* session, const int32_t* tokens, size_t count,
                   float* log_probabilities, const kv_call_options* options, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    kv_call_options o;
    if (Status e = api::read_options(options, kv_call_options_init, &o); !e.ok()) return e;
    if (Status e = api::check_flags(o.flags, 0); !e.ok()) return e;
    if (!tokens && count)
      return Status::error(Code::bad_argument, "tokens is NULL and count is %zu", count);
    if (!log_probabilities && count)
      return Status::error(Code::bad_argument, "log_probabilities is NULL");
    return s.score({tokens, count}, log_probabilities, api::flag_of(o.cancel),
                   api::progress_report(o.progress, o.progress_user, KV_PHASE_PREFILL),
                   api::progress_report(o.progress, o.progress_user, KV_PHASE_PREPARE));
  });
}

kv_status kv_session_tokens(const kv_session* session, int32_t* tokens, size_t capacity,
                            size_t* count, kv_error* error) {
  return api::exclusive(session, error, [&](const Session& s) {
    return api::write_array(s.tokens().data(), s.tokens().size(), tokens, capacity, count);
  });
}

kv_status kv_rewind(kv_session* session, uint64_t tokens, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) { return s.rewind(tokens); });
}

kv_status kv_fork(kv_session* session, kv_session** out, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    auto handle = std::make_unique<kv_session>();
    std::unique_ptr<Session> fork;
    if (Status e = s.fork(&fork); !e.ok()) return e;
    return handle_for(std::move(fork), std::move(handle), out);
  });
}

kv_status kv_trace(kv_session* session, kv_span* spans, size_t capacity, size_t* count,
                   kv_error* error) {
  return api::exclusive(session, error, [&](const Session& s) -> Status {
    std::vector<Trace::Passage> passages;
    if (Status e = s.passages(&passages); !e.ok()) return e;
    std::vector<kv_span> out;  // [passages]
    for (const Trace::Passage& p : passages)
      out.push_back({p.first, p.tokens, static_cast<float>(p.share), 0});
    return api::write_array(out.data(), out.size(), spans, capacity, count);
  });
}

kv_status kv_stats(kv_session* session, char* json, size_t capacity, size_t* size,
                   kv_error* error) {
  return api::exclusive(session, error, [&](const Session& s) {
    const std::string text = s.stats_json();
    return api::write_array(text.c_str(), text.size() + 1, json, capacity, size);
  });
}

}  // extern "C"
