// Owners of the library's handles.
#pragma once

#include <memory>

#include "kvasir.h"

namespace tool {

struct Closer {
  void operator()(kv_model* model) const { kv_close(model); }
  void operator()(kv_session* session) const { kv_session_close(session); }
  void operator()(kv_strategy* strategy) const { kv_strategy_destroy(strategy); }
  void operator()(kv_cancel* cancel) const { kv_cancel_release(cancel); }
  void operator()(kv_cache* cache) const { kv_cache_close(cache); }
  void operator()(kv_library* library) const { kv_library_close(library); }
};

using Model = std::unique_ptr<kv_model, Closer>;
using Session = std::unique_ptr<kv_session, Closer>;
using Strategy = std::unique_ptr<kv_strategy, Closer>;
using Cancel = std::unique_ptr<kv_cancel, Closer>;
using Cache = std::unique_ptr<kv_cache, Closer>;
using Library = std::unique_ptr<kv_library, Closer>;

// A struct of the library with its defaults.
template <typename Struct>
Struct initialised() {
  Struct s;
  kv_init(&s, sizeof s);
  return s;
}

}  // namespace tool
