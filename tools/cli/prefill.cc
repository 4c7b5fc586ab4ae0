#include "prefill.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "number_text.h"
#include "output.h"
#include "sequence_text.h"
#include "system.h"

namespace tool {
namespace {

class DocumentOpener {
 public:
  DocumentOpener(Console& console, kv_model* model, const SourceFlags& flags,
                 const SessionFlags& session_flags)
      : console_(console), model_(model), flags_(flags), session_flags_(session_flags),
        source_(console.result["source"]) {}

  OpenDocument from_cache();
  OpenDocument from_document();

 private:
  kv_status load(const std::string& path, kv_error* error);
  void reuse_saved();
  void expect_unchanged() const;
  void use_holdings(const Holdings& holdings);
  void read_rest();
  [[noreturn]] void stopped(const kv_error& error, uint64_t added, uint64_t expected);
  void say_mapped(const std::string& path, const char* also);
  std::string document_name() const {
    return flags_.document == "-" ? "standard input"
                                  : system::text(system::path(flags_.document).filename());
  }

  Console& console_;
  kv_model* model_;
  const SourceFlags& flags_;
  const SessionFlags& session_flags_;
  Json& source_;
  std::string document_;
  std::optional<Glimpse> saved_;  // the file that --save names, when it was looked at
  size_t bytes_read_ = 0;         // of the document, by the session
  double load_seconds_ = 0;
  OpenDocument opened_;
};

kv_status DocumentOpener::load(const std::string& path, kv_error* error) {
  const kv_session_options options = session_options(console_, session_flags_);
  const kv_call_options call = call_options(console_, nullptr);
  kv_session* session = nullptr;
  const auto start = std::chrono::steady_clock::now();
  const kv_status status = kv_load(model_, path.c_str(), &options, &call, &session, error);
  load_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (status != KV_OK) return status;
  opened_.session.reset(session);
  opened_.tokens = token_count(session);
  source_["mapped_tokens"] = opened_.tokens;
  source_["load_ms"] = load_seconds_ * 1e3;
  return status;
}

void DocumentOpener::say_mapped(const std::string& path, const char* also) {
  console_.terminal.note(path + ": mapped " + grouped(opened_.tokens) + " tokens in " +
                         duration(load_seconds_) + also);
}

OpenDocument DocumentOpener::from_cache() {
  kv_error error{};
  source_["cache"] = flags_.cache;
  check(load(flags_.cache, &error), error);
  source_["tokens"] = opened_.tokens;
  say_mapped(flags_.cache, "");
  return std::move(opened_);
}

// Decides what the file that --save names is good for. What cannot be loaded cannot be told from
// another document either.
void DocumentOpener::reuse_saved() {
  saved_.emplace(flags_.save);
  if (!is_there(flags_.save)) return;
  kv_error error{};
  const kv_status status = load(flags_.save, &error);
  const char* replaced = nullptr;
  std::string what;
  if (status == KV_OK) {
    return use_holdings(compare(console_, model_, opened_.session.get(), document_));
  } else if (kv_status_is_stale(status) != 0) {
    replaced = "stale", what = std::string("is stale (") + error.message + ")";
  } else if (status == KV_CORRUPT) {
    replaced = "damaged", what = std::string("is damaged (") + error.message + ")";
  } else if (status == KV_NOT_A_CACHE) {
    replaced = "no cache", what = "is not a Kvasir cache";
  } else if (status == KV_NOT_FOUND) {
    replaced = "a link", what = "is a link that leads nowhere";
  } else {
    check(status, error);
  }
  expect_force(flags_.save, what, flags_.force);
  console_.terminal.note(flags_.save + ": " + what + "; reading " + document_name() +
                         " in its place");
  source_["replaced"] = replaced;
}

// Before it is replaced: what was found out about it holds no longer where it was written
// meanwhile.
void DocumentOpener::expect_unchanged() const {
  if (Glimpse(flags_.save) != *saved_)
    expect_force(flags_.save, "was written by another program meanwhile", flags_.force);
}

void DocumentOpener::use_holdings(const Holdings& holdings) {
  Terminal& terminal = console_.terminal;
  switch (holdings.kind) {
    case Holdings::whole:
      say_mapped(flags_.save, "; nothing to read");
      bytes_read_ = document_.size();
      return;
    case Holdings::beginning:
      terminal.note(flags_.save + ": has the first " + grouped(opened_.tokens) + " tokens of " +
                    document_name() + "; reading the rest");
      bytes_read_ = holdings.bytes;
      return;
    case Holdings::more:
      expect_force(flags_.save, "holds a conversation about this document, or a longer one",
                   flags_.force);
      terminal.note(flags_.save + ": holds more than " + document_name() + "; reading it again");
      break;
    case Holdings::other:
      expect_force(flags_.save, "holds another document", flags_.force);
      terminal.note(flags_.save + ": holds another document; reading " + document_name() +
                    " in its place");
      break;
  }
  source_["replaced"] = holdings.kind == Holdings::more ? "conversation" : "other document";
  source_.erase("mapped_tokens");
  source_.erase("load_ms");
  opened_ = OpenDocument();
}

// The read part is worth minutes, so it is kept where there is a file for it; another Ctrl-C gives
// it up.
void DocumentOpener::stopped(const kv_error& error, uint64_t added, uint64_t expected) {
  const bool cancelled = error.status == KV_CANCELLED;
  if (error.status == KV_CONTEXT_FULL)
    throw Failure(error,
                  "take a part of " + document_name() + ", or a model with a longer context");
  if (!cancelled && (added == 0 || flags_.save.empty())) throw Failure(error, "");
  const uint64_t tokens = opened_.tokens + added;
  const std::string of = grouped(tokens) + " of " + grouped(opened_.tokens + expected) + " tokens";
  if (tokens == 0) throw Failure(exit_cancelled, "stopped; nothing was read");
  if (flags_.save.empty())
    throw Failure(exit_cancelled,
                  "stopped after " + of + "; nothing was kept, which --save FILE does");
  source_["tokens"] = tokens;
  if (added > 0) {
    console_.terminal.note("Keeping what was read; Ctrl-C again gives it up");
    expect_unchanged();
    kv_error save_error{};
    check(kv_save(opened_.session.get(), flags_.save.c_str(), nullptr, &save_error), save_error);
  }
  throw Failure(exit_code_for(error.status), std::string(cancelled ? "stopped" : error.message) +
                                                 "; kept " + of + " in " + flags_.save +
                                                 "; run the same command again to go on");
}

void DocumentOpener::read_rest() {
  kv_session* session = opened_.session.get();
  kv_error error{};
  uint64_t added = 0, expected = 0;
  double seconds = 0;
  kv_status status = KV_OK;
  {
    Progress progress(console_.terminal, "Reading " + document_name(), Unit::tokens,
                      opened_.tokens);
    const kv_call_options options = call_options(console_, &progress);
    status = kv_prefill(session, document_.data() + bytes_read_, document_.size() - bytes_read_,
                        &options, &added, nullptr, &error);
    seconds = progress.seconds();
    expected = std::max(progress.total(), added);
  }
  if (status != KV_OK) stopped(error, added, expected);
  opened_.tokens = token_count(session);
  source_["read_tokens"] = added;
  source_["read_seconds"] = seconds;
  console_.terminal.note("Read " + grouped(added) + " tokens of " + document_name() + " in " +
                         duration(seconds) + " (" + rate(static_cast<double>(added) / seconds) +
                         " tokens/s)");
}

OpenDocument DocumentOpener::from_document() {
  source_["document"] = flags_.document;
  if (!flags_.save.empty()) expect_writable(flags_.save);
  document_ = read_file(flags_.document);
  if (document_.empty()) throw Failure(exit_file, document_name() + " is empty");
  if (!flags_.save.empty()) {
    source_["cache"] = flags_.save;
    reuse_saved();
  }
  if (opened_.session == nullptr) opened_.session = open_session(console_, model_, session_flags_);
  if (bytes_read_ < document_.size()) {
    read_rest();
    if (!flags_.save.empty()) {
      try {
        expect_unchanged();
        save(console_, opened_.session.get(), flags_.save);
        console_.terminal.note("Saved " + grouped(opened_.tokens) + " tokens in " + flags_.save);
      } catch (const Failure& failure) {
        if (failure.exit_code() == exit_cancelled) throw;
        opened_.save_failure = failure;
      }
    }
  }
  source_["tokens"] = opened_.tokens;
  return std::move(opened_);
}

}  // namespace

void expect_one_source(const SourceFlags& flags) {
  if (!flags.cache.empty() && !(flags.document.empty() && flags.save.empty()))
    throw Failure(exit_usage, "-c names a saved document; it stands instead of -f and --save");
  if (flags.document.empty() && !flags.save.empty())
    throw Failure(exit_usage, "--save needs a document, -f FILE");
}

OpenDocument open_document(Console& console, kv_model* model, const SourceFlags& flags,
                           const SessionFlags& session_flags) {
  DocumentOpener opener(console, model, flags, session_flags);
  return flags.cache.empty() ? opener.from_document() : opener.from_cache();
}

}  // namespace tool
