// Why a GPU does not attend, or does not read the pages itself. The text is for people (stats);
// code and tests compare the enum.
#pragma once

#include <cstdint>

namespace kvasir {

enum class Fallback : uint8_t {
  none,  // the GPU does it
  // Why the CPU attends a layer that a GPU computes.
  not_planned,
  traced,
  documents,
  attends_everything,
  other_strategy,
  is_prefill,
  separate_heads,
  dense_layers,
  compared,
  memory_limit,
  full_precision,
  head_size,
  capped_scores,
  shared_keys,
  group_size,
  no_sketch,
  query_batch,
  few_tokens,
  no_room,
  // Why the CPU stages or attends pages that a GPU could read from pinned host memory.
  pinning,
  cannot_pin,
  too_many_pages,
  spilled,
  no_memory_to_pin,
  unknown_rate,
  cpu_is_faster,
  several_tokens,
  // Why pages that a filter layer chose are not read together.
  no_room_for_group,
  no_layers_in_group,
  // Why prefill goes through all layers chunk by chunk, though weights do not fit.
  no_room_for_weights,
  more_streams,
};

// Static storage.
const char* text_of(Fallback reason);

}  // namespace kvasir
