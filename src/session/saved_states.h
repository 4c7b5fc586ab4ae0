// Save and load of the states of recurrent layers. docs/file-format.md describes the section.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/cancel.h"
#include "base/status.h"
#include "cachefile/cache_file.h"
#include "cachefile/cache_peek.h"
#include "model/config.h"
#include "session/saved_store.h"
#include "store/recurrent_state.h"

namespace kvasir {

// The tokens before each state of a file, ascending: checkpoints, then the end.
using SavedStates = std::vector<uint64_t>;

uint64_t states_section_bytes(const RecurrentState& states);
// Passes the bytes of the section to `write`. Code::corrupt: a checkpoint of a loaded file is
// damaged. Code::cancelled, here and below.
Status write_states(const RecurrentState& states, const Cancel* cancel,
                    const std::function<Status(const void* data, std::size_t size)>& write);
// Refuses states that load would refuse. Returns the first contradiction in *what, or null.
Status find_wrong_state(const RecurrentState& states, const Cancel* cancel, const char** what);

// Checks that the file has states of this model, or none where it has no recurrent layers, and that
// they agree with `state`. Call before any allocation whose size comes from the file.
// Code::corrupt, Code::version, Code::io.
Status check_states(const CachePeek& file, const ModelConfig& config, const SavedSequence& state,
                    SavedStates* out);
// What a file says of its states, of any model; not checked.
struct StatesSummary {
  uint32_t layers = 0, states = 0;
  uint64_t bytes = 0;  // of all states
};
// Code::corrupt, Code::io. Throws std::bad_alloc.
Status summarise_states(const CachePeek& file, StatesSummary* out);
// Reads the last state of a checked file; checkpoints are read when they are needed.
Status load_states(const std::shared_ptr<const CacheFile>& file, const SavedStates& saved,
                   const WantedCheckpoints& wanted, ThreadPool* pool, const Cancel* cancel,
                   RecurrentState* out);

}  // namespace kvasir
