#include "prefill.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "files.h"
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
        name_(document_name(flags.document)) {}

  OpenDocument from_cache();
  OpenDocument from_document();

 private:
  kv_status load(const std::string& path, kv_error* error);
  void reuse_saved();
  void expect_unchanged() const;
  void use(const Overlap& overlap);
  void prefill_rest();
  void save_result();
  [[noreturn]] void stopped(const kv_error& error, uint64_t added, uint64_t expected);
  void report_mapped(const std::string& path, const char* more);
  // Not stored as a reference: an insertion into result moves its members.
  Json& source() { return console_.result["source"]; }

  Console& console_;
  kv_model* model_;
  const SourceFlags& flags_;
  const SessionFlags& session_flags_;
  const std::string name_;
  std::string text_;
  std::optional<FileState> saved_;  // of flags_.save, when it was examined
  size_t bytes_done_ = 0;           // of text_, in the session
  double load_seconds_ = 0;
  OpenDocument opened_;
};

kv_status DocumentOpener::load(const std::string& path, kv_error* error) {
  const SessionOptions options(console_, session_flags_);
  const kv_control control = control_of(console_);
  kv_session* session = nullptr;
  const auto start = std::chrono::steady_clock::now();
  const kv_status status = kv_load(model_, path.c_str(), options.get(), &control, &session, error);
  load_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (status != KV_OK) return status;
  opened_.session.reset(session);
  opened_.tokens = token_count(session);
  source()["mapped_tokens"] = opened_.tokens;
  source()["load_ms"] = load_seconds_ * 1e3;
  return status;
}

void DocumentOpener::report_mapped(const std::string& path, const char* more) {
  console_.terminal.note(path + ": mapped " + grouped(opened_.tokens) + " tokens in " +
                         duration(load_seconds_) + more);
}

OpenDocument DocumentOpener::from_cache() {
  kv_error error{};
  source()["cache"] = flags_.cache;
  check_cache(load(flags_.cache, &error), error, flags_.cache);
  source()["tokens"] = opened_.tokens;
  report_mapped(flags_.cache, "");
  return std::move(opened_);
}

// Decides how the file of --save is used. A file that cannot be loaded may hold another document.
void DocumentOpener::reuse_saved() {
  saved_.emplace(flags_.save);
  if (!exists(flags_.save)) return;
  kv_error error{};
  const kv_status status = load(flags_.save, &error);
  const char* replaced = nullptr;
  std::string why;
  if (status == KV_OK) {
    return use(compare(console_, model_, opened_.session.get(), session_flags_, text_));
  } else if (kv_status_is_stale(status) != 0) {
    replaced = "stale", why = std::string("is stale (") + error.message + ")";
  } else if (status == KV_CORRUPT) {
    replaced = "damaged", why = std::string("is damaged (") + error.message + ")";
  } else if (status == KV_NOT_A_CACHE) {
    replaced = "not a cache file", why = "is not a cache file";
  } else if (status == KV_NOT_FOUND) {
    replaced = "broken link", why = "is a link to no file";
  } else {
    check(status, error);
  }
  expect_force(flags_.save, why, flags_.force);
  console_.terminal.note(flags_.save + ": " + why + "; " + name_ + " replaces it");
  source()["replaced"] = replaced;
}

// Called before the file is replaced: another program may have written it since.
void DocumentOpener::expect_unchanged() const {
  if (FileState(flags_.save) != *saved_)
    expect_force(flags_.save, "was written by another program meanwhile", flags_.force);
}

void DocumentOpener::use(const Overlap& overlap) {
  Terminal& terminal = console_.terminal;
  switch (overlap.kind) {
    case Overlap::whole:
      report_mapped(flags_.save, "; nothing to prefill");
      bytes_done_ = text_.size();
      return;
    case Overlap::beginning:
      terminal.note(flags_.save + ": has the first " + grouped(opened_.tokens) + " tokens of " +
                    name_ + "; prefilling the rest");
      bytes_done_ = overlap.bytes;
      return;
    case Overlap::longer:
      expect_force(flags_.save, "holds a conversation about this document, or a longer one",
                   flags_.force);
      terminal.note(flags_.save + ": holds more than " + name_ + "; " + name_ + " replaces it");
      break;
    case Overlap::other:
      expect_force(flags_.save, "holds another document", flags_.force);
      terminal.note(flags_.save + ": holds another document; " + name_ + " replaces it");
      break;
  }
  source()["replaced"] = overlap.kind == Overlap::longer ? "conversation" : "other document";
  source().erase("mapped_tokens");
  source().erase("load_ms");
  opened_ = OpenDocument();
}

// Saves the finished part, which took minutes, where there is a file for it. Another Ctrl-C ends
// the process without that.
void DocumentOpener::stopped(const kv_error& error, uint64_t added, uint64_t expected) {
  const bool cancelled = error.status == KV_CANCELLED;
  if (error.status == KV_CONTEXT_FULL)
    document_too_long(model_, session_flags_, name_, text_, error);
  if (!cancelled && (added == 0 || flags_.save.empty())) throw Failure(error, "");
  const uint64_t tokens = opened_.tokens + added;
  const std::string part =
      grouped(tokens) + " of " + grouped(opened_.tokens + expected) + " tokens";
  if (tokens == 0) throw Failure(exit_cancelled, "stopped; nothing was prefilled");
  if (flags_.save.empty())
    throw Failure(exit_cancelled,
                  "stopped after " + part + "; nothing was saved: --save FILE saves that part");
  source()["tokens"] = tokens;
  if (added > 0) {
    console_.terminal.note("Saving the finished part; Ctrl-C again drops it");
    expect_unchanged();
    kv_error save_error{};
    check(kv_save(opened_.session.get(), flags_.save.c_str(), nullptr, &save_error), save_error);
  }
  throw Failure(exit_code_for(error.status), std::string(cancelled ? "stopped" : error.message) +
                                                 "; saved " + part + " in " + flags_.save +
                                                 "; run the same command again to continue");
}

void DocumentOpener::prefill_rest() {
  kv_session* session = opened_.session.get();
  kv_error error{};
  uint64_t added = 0, expected = 0;
  double seconds = 0;
  kv_status status = KV_OK;
  {
    Progress progress(console_.terminal, "Prefilling " + name_, Unit::tokens, opened_.tokens);
    const kv_control control = control_of(console_, &progress);
    status = kv_prefill(session, text_.data() + bytes_done_, text_.size() - bytes_done_, &control,
                        &added, nullptr, &error);
    seconds = progress.seconds();
    expected = std::max(progress.total(), added);
  }
  if (status != KV_OK) stopped(error, added, expected);
  opened_.tokens = token_count(session);
  source()["prefill_tokens"] = added;
  source()["prefill_seconds"] = seconds;
  console_.terminal.note(prefill_text(added, name_, seconds));
}

void DocumentOpener::save_result() {
  try {
    expect_unchanged();
    save(console_, opened_.session.get(), flags_.save);
    console_.terminal.note("Saved " + grouped(opened_.tokens) + " tokens in " + flags_.save);
  } catch (const Failure& failure) {
    if (failure.exit_code() == exit_cancelled) throw;
    opened_.save_failure = failure;
  }
}

OpenDocument DocumentOpener::from_document() {
  source()["document"] = flags_.document;
  if (!flags_.save.empty()) expect_writable(flags_.save);
  text_ = read_document(console_, flags_.document);
  if (!flags_.save.empty()) {
    source()["cache"] = flags_.save;
    reuse_saved();
  }
  if (opened_.session == nullptr) opened_.session = open_session(console_, model_, session_flags_);
  if (bytes_done_ < text_.size()) {
    prefill_rest();
    if (!flags_.save.empty()) save_result();
  }
  source()["tokens"] = opened_.tokens;
  return std::move(opened_);
}

}  // namespace

void expect_one_source(const SourceFlags& flags) {
  if (!flags.cache.empty() && !(flags.document.empty() && flags.save.empty()))
    throw Failure(exit_usage, "-c names a cache file in place of -f and --save: give one of them");
  if (flags.document.empty() && !flags.save.empty())
    throw Failure(exit_usage, "--save needs a document, -f FILE");
}

OpenDocument open_document(Console& console, kv_model* model, const SourceFlags& flags,
                           const SessionFlags& session_flags) {
  DocumentOpener opener(console, model, flags, session_flags);
  return flags.cache.empty() ? opener.from_document() : opener.from_cache();
}

std::string document_name(const std::string& path) {
  return path == "-" ? "standard input" : system::text(system::path(path).filename());
}

std::string read_document(Console& console, const std::string& path) {
  std::string text = read_file(path);
  const std::string name = document_name(path);
  if (text.empty()) throw Failure(exit_file, name + " is empty");
  std::string warning;
  if (text.starts_with("%PDF-"))
    warning = name + " is a PDF file, not text; convert it first, for example with pdftotext";
  else if (text.find('\0') != std::string::npos)
    warning = name + " has NUL bytes; a document is plain text in UTF-8";
  if (!warning.empty()) {
    console.terminal.note("warning: " + warning);
    console.result["warnings"].push_back(warning);
  }
  return text;
}

void document_too_long(const kv_model* model, const SessionFlags& flags, const std::string& name,
                       const std::string& text, const kv_error& error) {
  const uint64_t context = info_of(model).context_tokens;
  const bool limited = flags.context_tokens > 0 && flags.context_tokens < context;
  const std::string size = grouped(count_tokens(model, text, KV_TOKENIZE_DOCUMENT)) + " of " +
                           grouped(limited ? flags.context_tokens : context) + " tokens";
  Failure failure(error, "");
  failure.reword(
      name + " is too long for " +
      (limited ? "--context (" + size + "); allow more tokens, or take a part of it"
               : "the model (" + size + "); take a part of it, or a model with a longer context"));
  throw failure;
}

std::string prefill_text(uint64_t tokens, const std::string& name, double seconds) {
  return "Prefilled " + grouped(tokens) + " tokens of " + name + " in " + duration(seconds) + " (" +
         rate(static_cast<double>(tokens) / seconds) + " tokens/s)";
}

}  // namespace tool
