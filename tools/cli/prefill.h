// Documents as sessions: mapped from a cache file, or prefilled.
#pragma once

#include <optional>
#include <string>

#include "failure.h"
#include "sessions.h"

namespace tool {

struct OpenDocument {
  Session session;
  uint64_t tokens = 0;                  // of the sequence
  std::optional<Failure> save_failure;  // the prefill succeeded, the save failed
};

// Prefills flags.document, or maps flags.cache. With flags.save, a cache file of this document is
// mapped, one of its beginning is continued, and the result is saved. A Ctrl-C saves the finished
// part in flags.save. Reports to the terminal and in result["source"]. Throws Failure.
OpenDocument open_document(Console& console, kv_model* model, const SourceFlags& flags,
                           const SessionFlags& session_flags);

// Throws Failure(exit_usage) where -c stands with -f or --save.
void expect_one_source(const SourceFlags& flags);

// The text of a document. Warns about PDF and binary files. Throws Failure, also for an empty one.
std::string read_document(Console& console, const std::string& path);
std::string document_name(const std::string& path);  // "book.txt", "standard input"

// Throws a Failure that compares the document's tokens with the context.
[[noreturn]] void document_too_long(const kv_model* model, const SessionFlags& flags,
                                    const std::string& name, const std::string& text,
                                    const kv_error& error);

// The prefill rate, for messages: "Prefilled 1,234 tokens of a.txt in 2.1 s (590 tokens/s)".
std::string prefill_text(uint64_t tokens, const std::string& name, double seconds);

}  // namespace tool
