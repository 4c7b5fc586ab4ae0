// Getting a document into a session: mapped from its cache where one is at hand, read by the model
// otherwise.
#pragma once

#include <optional>
#include <string>

#include "console.h"
#include "failure.h"

namespace tool {

struct OpenDocument {
  Session session;
  uint64_t tokens = 0;                  // in the sequence
  std::optional<Failure> save_failure;  // the document was read but could not be saved
};

// Reads flags.document, or maps flags.cache. With flags.save the cache file is used when it holds
// this very document, continued when it holds the document's beginning, and written otherwise. A
// Ctrl-C keeps what was read in flags.save. Says what it does, and describes it in
// console.result["source"].
OpenDocument open_document(Console& console, kv_model* model, const SourceFlags& flags,
                           const SessionFlags& session_flags);

// -c stands instead of -f and --save. Throws Failure(exit_usage).
void expect_one_source(const SourceFlags& flags);

}  // namespace tool
