// State of a session and of its last decode, as kv_session_stats describes it.
#pragma once

#include <cstdint>
#include <string>

namespace kvasir {

// Why an answer has no drafts, or none any more.
enum class DraftsOff : uint8_t {
  no,             // it drafts
  measured,       // a trace, a comparison or a certificate needs each token alone
  strategy,       // the decode strategy keeps what it selects by from token to token
  no_hidden,      // what the MTP layer needs of the last token is unknown: only of a first step
  slower,         // steps with drafts take longer than they save
  memory,         // the memory limit has no room for what the MTP layer keeps
  device_memory,  // a GPU has no room for steps with drafts
  no_match,       // the newest tokens occur nowhere before: only without an MTP layer
};
const char* name_of(DraftsOff why);

// Drafts of an answer.
struct DraftCounts {
  uint64_t steps = 0;                           // with drafts
  uint64_t drafted = 0, accepted = 0;           // tokens
  uint64_t looked_up = 0, lookup_accepted = 0;  // those of them by lookup
  DraftsOff off = DraftsOff::no;
  // Medians of the session's newest steps, with drafts and of one token; 0: none yet.
  uint64_t step_ns = 0, alone_ns = 0;
};

struct SessionStats {
  uint32_t threads = 0;
  uint64_t tokens = 0, context_tokens = 0, sealed_tokens = 0;
  uint32_t page_tokens = 0, sink_tokens = 0, window_tokens = 0, prefill_chunk = 0;
  uint64_t kv_bytes_per_token = 0;
  uint64_t private_bytes = 0, mapped_bytes = 0, spilled_bytes = 0, memory_limit = 0;
  uint64_t prefill_tokens = 0, prefill_ns = 0, sparse_tokens = 0, load_ns = 0;
  uint64_t spans = 0, span_tokens = 0;  // of prefill, and their tokens
  uint64_t budget_tokens = 0;           // mean per layer and head
  uint64_t index_tokens = 0, index_bytes = 0, index_ns = 0;
  // windows: layers that see a window, and their bytes in memory
  uint64_t prefilled_again = 0, windows_bytes = 0;
  uint32_t windows_layers = 0;
  uint32_t recurrent_layers = 0, checkpoints = 0;
  uint64_t states_bytes = 0;  // of recurrent layers, checkpoints included, in memory
  uint64_t last_steps = 0, last_decode_ns = 0;
  uint64_t last_tokens_read = 0, last_tokens_present = 0, last_pages_touched = 0;
  double last_mass_read = -1;  // -1: not estimated
  uint32_t gpu_layers = 0;
  // of all GPUs; false without one
  bool gpu_output = false, gpu_attends = false, gpu_coexecutes = false, gpu_reads_pages = false;
  uint64_t gpu_weight_bytes = 0, gpu_bytes = 0, gpu_memory_limit = 0;
  uint32_t draft_tokens = 0;   // of a step; 0: the session has no MTP layer
  uint32_t lookup_tokens = 0;  // of a step at most; 0: no lookup
  DraftCounts drafts;          // of the last answer
  uint64_t drafts_first = 0;   // tokens before the first one that the MTP layer has
  std::string drafts_device;   // of the MTP layer: "cpu" or a GPU; empty: the session has none
  std::string drafts_device_because;  // why "cpu", where the model is on GPUs
  std::string decode_strategy, chat_format, device;
};

// State of an external store, as kv_cache_stats describes it.
struct ExternalStats {
  uint32_t threads = 0;
  uint64_t tokens = 0, max_tokens = 0, sealed_tokens = 0;
  uint32_t page_tokens = 0, sink_tokens = 0, window_tokens = 0, step_tokens = 0;
  uint64_t private_bytes = 0, mapped_bytes = 0, spilled_bytes = 0, memory_limit = 0;
  uint64_t budget_tokens = 0, tokens_read = 0, tokens_present = 0, pages_touched = 0;
  std::string decode_strategy;
};

}  // namespace kvasir
