#include "prefill.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "output.h"
#include "sequence_text.h"
#include "system.h"
#include "words.h"

namespace tool {
namespace {

class Reader {
 public:
  Reader(Context& context, kv_model* model, const SourceFlags& flags,
         const SessionFlags& session_flags)
      : context_(context), model_(model), flags_(flags), session_flags_(session_flags),
        source_(context.result["source"]) {}

  Reading from_cache();
  Reading from_document();

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

  Context& context_;
  kv_model* model_;
  const SourceFlags& flags_;
  const SessionFlags& session_flags_;
  Json& source_;
  std::string document_;
  std::optional<Glimpse> saved_;  // the file that --save names, when it was looked at
  size_t bytes_read_ = 0;         // of the document, by the session
  double load_seconds_ = 0;
  Reading reading_;
};

kv_status Reader::load(const std::string& path, kv_error* error) {
  const kv_session_options options = session_options(context_, session_flags_);
  const kv_call_options call = call_options(context_, nullptr);
  kv_session* session = nullptr;
  const auto start = std::chrono::steady_clock::now();
  const kv_status status = kv_load(model_, path.c_str(), &options, &call, &session, error);
  load_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (status != KV_OK) return status;
  reading_.session.reset(session);
  reading_.tokens = token_count(session);
  source_["mapped_tokens"] = reading_.tokens;
  source_["load_ms"] = load_seconds_ * 1e3;
  return status;
}

void Reader::say_mapped(const std::string& path, const char* also) {
  context_.terminal.note(path + ": mapped " + grouped(reading_.tokens) + " tokens in " +
                         duration(load_seconds_) + also);
}

Reading Reader::from_cache() {
  kv_error error{};
  source_["cache"] = flags_.cache;
  check(load(flags_.cache, &error), error);
  source_["tokens"] = reading_.tokens;
  say_mapped(flags_.cache, "");
  return std::move(reading_);
}

// Decides what the file that --save names is good for. What cannot be loaded cannot be told from
// another document either.
void Reader::reuse_saved() {
  saved_.emplace(flags_.save);
  if (!is_there(flags_.save)) return;
  kv_error error{};
  const kv_status status = load(flags_.save, &error);
  const char* replaced = nullptr;
  std::string what;
  if (status == KV_OK) {
    return use_holdings(compare(context_, model_, reading_.session.get(), document_));
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
  context_.terminal.note(flags_.save + ": " + what + "; reading " + document_name() +
                         " in its place");
  source_["replaced"] = replaced;
}

// Before it is replaced: what was found out about it holds no longer where it was written
// meanwhile.
void Reader::expect_unchanged() const {
  if (Glimpse(flags_.save) != *saved_)
    expect_force(flags_.save, "was written by another program meanwhile", flags_.force);
}

void Reader::use_holdings(const Holdings& holdings) {
  Terminal& terminal = context_.terminal;
  switch (holdings.kind) {
    case Holdings::whole:
      say_mapped(flags_.save, "; nothing to read");
      bytes_read_ = document_.size();
      return;
    case Holdings::beginning:
      terminal.note(flags_.save + ": has the first " + grouped(reading_.tokens) + " tokens of " +
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
  reading_ = Reading();
}

// The read part is worth minutes, so it is kept where there is a file for it; another Ctrl-C gives
// it up.
void Reader::stopped(const kv_error& error, uint64_t added, uint64_t expected) {
  const bool cancelled = error.status == KV_CANCELLED;
  if (error.status == KV_CONTEXT_FULL)
    throw Failure(error,
                  "take a part of " + document_name() + ", or a model with a longer context");
  if (!cancelled && (added == 0 || flags_.save.empty())) throw Failure(error, "");
  const uint64_t tokens = reading_.tokens + added;
  const std::string of = grouped(tokens) + " of " + grouped(reading_.tokens + expected) + " tokens";
  if (tokens == 0) throw Failure(exit_cancelled, "stopped; nothing was read");
  if (flags_.save.empty())
    throw Failure(exit_cancelled,
                  "stopped after " + of + "; nothing was kept, which --save FILE does");
  source_["tokens"] = tokens;
  if (added > 0) {
    context_.terminal.note("Keeping what was read; Ctrl-C again gives it up");
    expect_unchanged();
    kv_error save_error{};
    check(kv_save(reading_.session.get(), flags_.save.c_str(), nullptr, &save_error), save_error);
  }
  throw Failure(exit_code_for(error.status), std::string(cancelled ? "stopped" : error.message) +
                                                 "; kept " + of + " in " + flags_.save +
                                                 "; run the same command again to go on");
}

void Reader::read_rest() {
  kv_session* session = reading_.session.get();
  kv_error error{};
  uint64_t added = 0, expected = 0;
  double seconds = 0;
  kv_status status = KV_OK;
  {
    Progress progress(context_.terminal, "Reading " + document_name(), Unit::tokens,
                      reading_.tokens);
    const kv_call_options options = call_options(context_, &progress);
    status = kv_prefill(session, document_.data() + bytes_read_, document_.size() - bytes_read_,
                        &options, &added, nullptr, &error);
    seconds = progress.seconds();
    expected = std::max(progress.total(), added);
  }
  if (status != KV_OK) stopped(error, added, expected);
  reading_.tokens = token_count(session);
  source_["read_tokens"] = added;
  source_["read_seconds"] = seconds;
  context_.terminal.note("Read " + grouped(added) + " tokens of " + document_name() + " in " +
                         duration(seconds) + " (" + rate(static_cast<double>(added) / seconds) +
                         " tokens/s)");
}

Reading Reader::from_document() {
  source_["document"] = flags_.document;
  if (!flags_.save.empty()) expect_writable(flags_.save);
  document_ = read_file(flags_.document);
  if (document_.empty()) throw Failure(exit_file, document_name() + " is empty");
  if (!flags_.save.empty()) {
    source_["cache"] = flags_.save;
    reuse_saved();
  }
  if (reading_.session == nullptr)
    reading_.session = open_session(context_, model_, session_flags_);
  if (bytes_read_ < document_.size()) {
    read_rest();
    if (!flags_.save.empty()) {
      try {
        expect_unchanged();
        save(context_, reading_.session.get(), flags_.save);
        context_.terminal.note("Saved " + grouped(reading_.tokens) + " tokens in " + flags_.save);
      } catch (const Failure& failure) {
        if (failure.exit_code() == exit_cancelled) throw;
        reading_.save_failure = failure;
      }
    }
  }
  source_["tokens"] = reading_.tokens;
  return std::move(reading_);
}

}  // namespace

void expect_one_source(const SourceFlags& flags) {
  if (!flags.cache.empty() && !(flags.document.empty() && flags.save.empty()))
    throw Failure(exit_usage, "-c names a saved document; it stands instead of -f and --save");
  if (flags.document.empty() && !flags.save.empty())
    throw Failure(exit_usage, "--save needs a document, -f FILE");
}

Reading open_reading(Context& context, kv_model* model, const SourceFlags& flags,
                     const SessionFlags& session_flags) {
  Reader reader(context, model, flags, session_flags);
  return flags.cache.empty() ? reader.from_document() : reader.from_cache();
}

}  // namespace tool
