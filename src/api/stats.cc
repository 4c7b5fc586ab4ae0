// Statistics of a session: as a struct and as JSON for people.
#include "api/handles.h"

using namespace kvasir;

namespace {

kv_session_stats to_public(const SessionStats& s) {
  kv_session_stats out{};
  out.threads = s.threads;
  out.tokens = s.tokens;
  out.context_tokens = s.context_tokens;
  out.sealed_tokens = s.sealed_tokens;
  out.page_tokens = s.page_tokens;
  out.sink_tokens = s.sink_tokens;
  out.window_tokens = s.window_tokens;
  out.prefill_chunk = s.prefill_chunk;
  out.kv_bytes_per_token = s.kv_bytes_per_token;
  out.private_bytes = s.private_bytes;
  out.mapped_bytes = s.mapped_bytes;
  out.spilled_bytes = s.spilled_bytes;
  out.memory_limit = s.memory_limit;
  out.prefill_tokens = s.prefill_tokens;
  out.prefill_ns = s.prefill_ns;
  out.sparse_tokens = s.sparse_tokens;
  out.load_ns = s.load_ns;
  out.budget_tokens = s.budget_tokens;
  out.index_tokens = s.index_tokens;
  out.index_bytes = s.index_bytes;
  out.index_ns = s.index_ns;
  out.last_steps = s.last_steps;
  out.last_decode_ns = s.last_decode_ns;
  out.last_tokens_read = s.last_tokens_read;
  out.last_tokens_present = s.last_tokens_present;
  out.last_pages_touched = s.last_pages_touched;
  out.last_mass_read = s.last_mass_read;
  out.gpu_layers = s.gpu_layers;
  out.gpu_flags = (s.gpu_output ? KV_GPU_OUTPUT : 0) | (s.gpu_attends ? KV_GPU_ATTENDS : 0) |
                  (s.gpu_coexecutes ? KV_GPU_COEXECUTES : 0) |
                  (s.gpu_reads_pages ? KV_GPU_READS_PAGES : 0);
  out.gpu_weight_bytes = s.gpu_weight_bytes;
  out.gpu_bytes = s.gpu_bytes;
  out.gpu_memory_limit = s.gpu_memory_limit;
  api::copy_text(out.decode_strategy, s.decode_strategy);
  api::copy_text(out.chat_format, s.chat_format);
  api::copy_text(out.device, s.device);
  out.prefilled_again = s.prefilled_again;
  out.windows_bytes = s.windows_bytes;
  out.last_drafted = s.drafts.drafted;
  out.last_accepted = s.drafts.accepted;
  out.last_looked_up = s.drafts.looked_up;
  out.last_lookup_accepted = s.drafts.lookup_accepted;
  return out;
}

}  // namespace

extern "C" {

kv_status kv_session_get_stats(kv_session* session, kv_session_stats* stats, kv_error* error) {
  return api::exclusive(session, error, [&](const Session& s) -> Status {
    RETURN_IF_ERROR(api::check_result(stats, "stats"));
    return api::write_result(to_public(s.stats()), stats, "stats");
  });
}

kv_status kv_session_stats_json(kv_session* session, char* json, size_t capacity, size_t* size,
                                kv_error* error) {
  return api::exclusive(session, error, [&](const Session& s) {
    const std::string text = s.stats_json();
    return api::write_array(text.c_str(), text.size() + 1, json, capacity, size);
  });
}

}  // extern "C"
