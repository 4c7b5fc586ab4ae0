// The checkpoints of a cache file: of its windows and of its states.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "cachefile/cache_peek.h"
#include "model/config.h"
#include "store/page_store.h"

namespace kvasir {

// Whether a session of the file's first `tokens` tokens goes on from a later position than the
// beginning, as Session::load() does. Always without windows and states. windows: the shape of the
// model's. Codes as check_windows().
Status prefix_serves(const CachePeek& file, const StoreShape& windows, const ModelConfig& config,
                     uint64_t tokens, bool* out);

// The checkpoints that a file of any model names, of its windows and of its states, ascending:
// tokens before each. The end is none. At most format::max_saved_checkpoints. Not checked.
// Code::corrupt, Code::io. Throws std::bad_alloc.
Status list_checkpoints(const CachePeek& file, std::vector<uint64_t>* out);

}  // namespace kvasir
