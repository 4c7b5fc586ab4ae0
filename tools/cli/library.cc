// kvasir library: a folder of documents that are prefilled once.
#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>

#include "answer.h"
#include "calibration.h"
#include "chat.h"
#include "commands.h"
#include "failure.h"
#include "number_text.h"
#include "output.h"
#include "passages.h"
#include "prefill.h"
#include "suggestion.h"
#include "system.h"
#include "terminal_text.h"

namespace tool {
namespace {

void log_line(int32_t level, const char* message, void* user) {
  static_cast<Terminal*>(user)->note((level == KV_LOG_WARNING ? "warning: " : "") +
                                     std::string(message));
}

// Creates the folder.
Library open_library(Console& console, const LibraryFlags& flags) {
  kv_library_options options = initialised<kv_library_options>();
  options.max_bytes = flags.max_bytes;
  options.log = log_line;
  options.log_user = &console.terminal;
  kv_error error{};
  kv_library* library = nullptr;
  check(kv_library_open(flags.folder.c_str(), &options, &library, &error), error);
  return Library(library);
}

Library open_existing(Console& console, const LibraryFlags& flags) {
  std::error_code failed;
  if (!std::filesystem::is_directory(system::path(flags.folder), failed))
    throw Failure(exit_file, flags.folder +
                                 " has no documents: it is not a folder; `kvasir "
                                 "library add` creates one");
  return open_library(console, flags);
}

std::vector<kv_library_document> documents_of(kv_library* library) {
  std::vector<kv_library_document> documents;
  for (uint32_t i = 0;; ++i) {
    kv_library_document document = initialised<kv_library_document>();
    kv_error error{};
    const kv_status status = kv_library_list(library, i, &document, &error);
    if (status == KV_NOT_FOUND && (i > 0 || error.sys_errno == 0)) return documents;
    check(status, error);
    documents.push_back(document);
  }
}

// Whether the file is a conversation over documents.
bool is_conversation(const std::string& folder, const kv_library_document& document) {
  kv_file_info info = initialised<kv_file_info>();
  const std::string path = folder + "/" + document.name + ".kv";
  return kv_file_inspect(path.c_str(), &info, nullptr) == KV_OK && info.documents > 0;
}

// Throws Failure where the library has no document of this name.
void expect_document(kv_library* library, const std::string& folder, const std::string& name) {
  std::vector<std::string> names;
  for (const kv_library_document& document : documents_of(library)) {
    if (name == document.name) return;
    names.emplace_back(document.name);
  }
  throw Failure(exit_file, folder + " has no document '" + name + "'" + suggestion(name, names) +
                               "; `kvasir library list " + folder + "` lists them");
}

std::string day_and_time(uint64_t nanoseconds) {
  const auto seconds = static_cast<std::time_t>(nanoseconds / 1'000'000'000u);
  std::tm local{};
  char text[32] = "";
  if (system::local_time(seconds, &local))
    std::strftime(text, sizeof text, "%Y-%m-%d %H:%M", &local);
  return text;
}

void list_document(Console& console, const kv_library_document& d) {
  const bool usable = d.status == KV_OK;
  Json entry = {{"name", d.name},
                {"file_bytes", d.file_bytes},
                {"last_used", static_cast<double>(d.last_used) * 1e-9},
                {"status", d.status}};
  if (usable) {
    entry["tokens"] = d.tokens;
    entry["model_name"] = d.model_name;
    entry["fingerprint"] = d.fingerprint;
  } else {
    entry["status_text"] = kv_status_text(d.status);
  }
  console.result["documents"].push_back(std::move(entry));
  if (console.json) return;
  console.terminal.print(string_printf("%-32s ", d.name) +
                         string_printf("%10s  ", byte_count(d.file_bytes).c_str()) +
                         day_and_time(d.last_used) + "  " +
                         (usable ? grouped(d.tokens) + " tokens, " + d.model_name
                                 : std::string(kv_status_text(d.status))) +
                         "\n");
}

// The file's name as a document's name: without leading dots, at most 200 bytes, and with "_" for
// each character that no document's name has.
std::string name_after(const std::string& path) {
  const std::string file = path == "-" ? "" : document_name(path);
  constexpr std::size_t max_bytes = 200;
  std::string name;
  std::string_view rest = file;
  rest.remove_prefix(std::min(rest.find_first_not_of('.'), rest.size()));
  while (!rest.empty()) {
    const Decoded one = decode(rest);
    const bool good = one.kind == Decoded::character && one.code != '\t' && one.code != '\\' &&
                      !is_control(one.code);
    const std::string_view character = good ? rest.substr(0, one.size) : "_";
    if (name.size() + character.size() > max_bytes) break;
    name += character;
    rest.remove_prefix(one.kind == Decoded::incomplete ? 1 : one.size);
  }
  return name;
}

int32_t report_prefill(int32_t phase, uint64_t done, uint64_t total, void* user) {
  const bool shown = phase == KV_PHASE_PREFILL || phase == KV_PHASE_PREPARE;
  return shown ? Progress::callback(phase, done, total, user) : 0;
}

void report_added(Console& console, const std::string& folder, const kv_library_result& result,
                  double seconds) {
  Json& source = console.result["source"];
  source = {{"library", folder},          {"name", result.name},
            {"tokens", result.tokens},    {"found_tokens", result.tokens_found},
            {"saved", result.saved != 0}, {"seconds", seconds}};
  console.terminal.note(std::string(result.name) + ": found " + grouped(result.tokens_found) +
                        " tokens, prefilled " + grouped(result.tokens - result.tokens_found) +
                        " in " + duration(seconds) + (result.saved ? "; saved" : ""));
  if (result.save_status == KV_OK) return;
  source["save_status"] = result.save_status;
  console.terminal.error(std::string("the document is not in the library: ") +
                         kv_status_text(result.save_status));
}

// A session of the document. Finds what the library has of it, prefills the rest and adds it.
Session add(Console& console, kv_model* model, const LibraryAddArguments& arguments,
            const SessionFlags& flags) {
  const std::string text = read_document(console, arguments.document);
  const std::string name = arguments.name.empty() ? name_after(arguments.document) : arguments.name;
  const std::string shown = name.empty() ? "standard input" : name;
  const Library library = open_library(console, arguments.library);
  const SessionOptions session_options(console, flags);
  Progress progress(console.terminal, "Prefilling " + shown, Unit::tokens);
  kv_library_session_options options = initialised<kv_library_session_options>();
  options.flags = (arguments.verify ? KV_VERIFY : 0) | (arguments.replace ? KV_REPLACE : 0);
  options.name = name.empty() ? nullptr : name.c_str();
  options.session = session_options.get();
  kv_control control = control_of(console, &progress);
  control.progress = report_prefill;
  kv_library_result result = initialised<kv_library_result>();
  kv_error error{};
  kv_session* session = nullptr;
  const kv_status status = kv_library_session(library.get(), model, text.data(), text.size(),
                                              &options, &control, &session, &result, &error);
  if (status == KV_CANCELLED) throw Failure(exit_cancelled, "stopped; nothing was added");
  if (status == KV_CONTEXT_FULL) document_too_long(model, flags, shown, text, error);
  check(status, error);
  Session owner(session);
  report_added(console, arguments.library.folder, result, progress.seconds());
  return owner;
}

Session open_by_name(Console& console, kv_model* model, const LibraryAddArguments& arguments,
                     const std::string& name, const SessionFlags& flags) {
  const Library library = open_existing(console, arguments.library);
  const std::string& folder = arguments.library.folder;
  expect_document(library.get(), folder, name);
  const std::string path = folder + "/" + name + ".kv";
  const SessionOptions options(console, flags);
  const kv_control control = control_of(console, nullptr, arguments.verify ? KV_VERIFY : 0);
  kv_error error{};
  kv_session* session = nullptr;
  check_cache(kv_load(model, path.c_str(), options.get(), &control, &session, &error), error, path);
  Session owner(session);
  const uint64_t tokens = token_count(session);
  console.result["source"] = {{"library", folder}, {"name", name}, {"tokens", tokens}};
  console.terminal.note(name + ": mapped " + grouped(tokens) + " tokens");
  return owner;
}

// A session of -f FILE, which is added, or of the document of this name.
Session open_in_library(Console& console, kv_model* model, const LibraryAddArguments& arguments,
                        const std::string& name) {
  const SessionFlags flags =
      with_calibration(console, arguments.model, model, arguments.session,
                       {arguments.session.strategy, arguments.session.prefill});
  return arguments.document.empty() ? open_by_name(console, model, arguments, name, flags)
                                    : add(console, model, arguments, flags);
}

void expect_name_or_file(const LibraryAddArguments& arguments, const std::string& name) {
  if (arguments.document.empty() && name.empty())
    throw Failure(exit_usage, "no document; name one of the library, or a file with -f FILE");
  if (arguments.document.empty() && (!arguments.name.empty() || arguments.replace))
    throw Failure(exit_usage, "--name and --replace need a document to add, -f FILE");
}

}  // namespace

void run_library_list(Console& console, const LibraryListArguments& arguments) {
  const Library library = open_existing(console, arguments.library);
  console.result["documents"] = Json::array();
  const std::vector<kv_library_document> documents = documents_of(library.get());
  for (const kv_library_document& document : documents) list_document(console, document);
  if (documents.empty()) console.terminal.note("no documents");
}

void run_library_add(Console& console, const LibraryAddArguments& arguments) {
  if (exists(arguments.library.folder)) expect_writable_folder(arguments.library.folder);
  const Model model = open_model(console, arguments.model, arguments.session);
  open_in_library(console, model.get(), arguments, "");
  const Json& source = console.result["source"];
  if (source.contains("save_status"))
    throw Failure(exit_code_for(source["save_status"]), "the document was not added");
}

void run_library_ask(Console& console, const LibraryAskArguments& arguments) {
  std::vector<std::string> questions = arguments.words;
  std::string name;
  if (arguments.add.document.empty() && !questions.empty()) {
    name = questions.front();
    questions.erase(questions.begin());
  }
  expect_name_or_file(arguments.add, name);
  questions = questions_of(questions, arguments.add.document);
  const Model model = open_model(console, arguments.add.model, arguments.add.session);
  const Session session = open_in_library(console, model.get(), arguments.add, name);
  answer_each(console, model.get(), session.get(), questions, arguments.sampling,
              arguments.passages);
}

namespace {

struct ComposeFlags {
  std::string folder;
  const std::vector<std::string>& only;
  const SessionFlags& session;
  uint32_t max_documents = 0;
};

// Whether one of the patterns is the name, or its beginning with *.
bool is_named(const std::vector<std::string>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](std::string_view pattern) {
    return pattern.ends_with('*') ? name.starts_with(pattern.substr(0, pattern.size() - 1))
                                  : name == pattern;
  });
}

// The documents of this model that the patterns name, each once; none: all.
std::vector<std::string> names_among(kv_library* library, const kv_model* model,
                                     const ComposeFlags& flags) {
  std::vector<std::string> names;
  const std::string fingerprint = info_of(model).fingerprint;
  std::vector<kv_library_document> all = documents_of(library);
  std::erase_if(all, [&](const kv_library_document& d) {
    return fingerprint != d.fingerprint || is_conversation(flags.folder, d);
  });
  std::sort(all.begin(), all.end(), [](const kv_library_document& a, const kv_library_document& b) {
    return std::string_view(a.name) < b.name;
  });
  for (const std::string& pattern : flags.only) {
    if (!pattern.ends_with('*')) expect_document(library, flags.folder, pattern);
    const std::string beginning = pattern.substr(0, pattern.size() - pattern.ends_with('*'));
    const size_t before = names.size();
    for (const kv_library_document& document : all) {
      const std::string_view name = document.name;
      const bool named = pattern.ends_with('*') ? name.starts_with(beginning) : name == pattern;
      if (named && std::find(names.begin(), names.end(), name) == names.end())
        names.emplace_back(name);
    }
    if (names.size() == before && pattern.ends_with('*'))
      throw Failure(exit_file, flags.folder +
                                   " has no other document of this model whose name "
                                   "begins with '" +
                                   beginning + "'");
  }
  return names;
}

// A session over documents of the library.
Session compose_library(Console& console, kv_library* library, kv_model* model,
                        const ComposeFlags& flags) {
  const SessionOptions options(console, flags.session);
  kv_compose_options compose = initialised<kv_compose_options>();
  compose.max_documents = flags.max_documents;
  compose.session = options.get();
  const kv_control control = control_of(console);
  kv_session* composed = nullptr;
  kv_error error{};
  const std::vector<std::string> names = names_among(library, model, flags);
  std::vector<const char*> given;
  for (const std::string& name : names) given.push_back(name.c_str());
  check(kv_library_compose(library, model, given.data(), given.size(), &compose, &control,
                           &composed, &error),
        error);
  Session session(composed);
  const std::vector<kv_session_document> documents = session_documents(composed);
  uint64_t tokens = 0;
  for (const kv_session_document& document : documents) tokens += document.tokens;
  const double ms = static_cast<double>(stats_of(composed).load_ns) * 1e-6;
  console.result["source"] = {
      {"documents", documents.size()}, {"mapped_tokens", tokens}, {"load_ms", ms}};
  console.terminal.note(flags.folder + ": mapped " + grouped(documents.size()) + " documents of " +
                        grouped(tokens) + " tokens in " + duration(ms / 1e3));
  return session;
}

// Gives a conversation the documents that come to the library or are saved again, and takes those
// that go.
class LibraryWatch {
 public:
  LibraryWatch(Console& console, kv_library* library, const kv_model* model,
               const ComposeFlags& flags)
      : console_(console), library_(library), model_(model), flags_(flags), seen_(documents()) {}

  // Of the documents that compose_library() used.
  void start(kv_session* session);
  // Whether the session has other documents now.
  bool refresh(kv_session* session);

 private:
  // Names, and the first 4 KiB of the files: they have checksums of all that follows.
  using Documents = std::map<std::string, std::string>;
  Documents documents() const;

  Console& console_;
  kv_library* library_;
  const kv_model* model_;
  const ComposeFlags& flags_;
  Documents seen_, current_;  // in the library; in the conversation
};

std::string beginning_of(const std::string& path) {
  std::string bytes(4096, '\0');
  std::ifstream file(system::path(path), std::ios::binary);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

// Of the library's documents of this model, those that the flags name.
LibraryWatch::Documents LibraryWatch::documents() const {
  Documents found;
  const std::string fingerprint = info_of(model_).fingerprint;
  for (const kv_library_document& d : documents_of(library_))
    if (fingerprint == d.fingerprint && (flags_.only.empty() || is_named(flags_.only, d.name)) &&
        !is_conversation(flags_.folder, d))
      found[d.name] = beginning_of(flags_.folder + "/" + d.name + ".kv");
  return found;
}

void LibraryWatch::start(kv_session* session) {
  for (const kv_session_document& document : session_documents(session))
    if (const auto known = seen_.find(system::text(system::path(document.path).stem()));
        known != seen_.end())
      current_.insert(*known);
}

bool LibraryWatch::refresh(kv_session* session) {
  const Documents now = documents();
  Documents wanted;
  for (const auto& document : now) {
    const auto before = seen_.find(document.first);
    const bool is_new = before == seen_.end() || *before != document;
    if (is_new || current_.count(document.first) > 0) wanted.insert(document);
  }
  if (wanted == current_ || wanted.empty()) {
    seen_ = now;
    return false;
  }
  std::vector<std::string> paths;
  std::vector<const char*> given;
  for (const auto& [name, header] : wanted) paths.push_back(flags_.folder + "/" + name + ".kv");
  for (const std::string& path : paths) given.push_back(path.c_str());
  kv_error error{};
  const kv_control control = control_of(console_);
  const kv_status status =
      kv_session_set_documents(session, given.data(), given.size(), &control, &error);
  if (status != KV_OK) {
    console_.terminal.note(std::string("the library has changed, the documents stay: ") +
                           error.message);
    return false;
  }
  seen_ = now, current_ = wanted;
  console_.terminal.note("now over " + grouped(wanted.size()) +
                         (wanted.size() == 1 ? " document" : " documents"));
  return true;
}

void expect_library_alone(const SourceFlags& source) {
  if (!source.document.empty() || !source.cache.empty() || !source.save.empty() || source.force)
    throw Failure(exit_usage, "--library asks its documents: leave -f, -c, --save and --force out");
}

}  // namespace

// All documents of a library at once.
void ask_library(Console& console, const AskArguments& arguments) {
  expect_library_alone(arguments.source);
  const std::vector<std::string> questions = questions_of(arguments.questions, "");
  const Library library = open_existing(console, {arguments.library});
  const Model model = open_model(console, arguments.model, arguments.session);
  const Session session = compose_library(
      console, library.get(), model.get(),
      {arguments.library, arguments.only, arguments.session, arguments.max_documents});
  answer_each(console, model.get(), session.get(), questions, arguments.sampling,
              arguments.passages > 0 ? arguments.passages : default_sources);
}

void chat_library(Console& console, const ChatArguments& arguments) {
  expect_library_alone(arguments.source);
  expect_chat_possible(console, "");
  const Library library = open_existing(console, {arguments.library});
  const Model model = open_model(console, arguments.model, arguments.session);
  const ComposeFlags flags{arguments.library, arguments.only, arguments.session,
                           arguments.max_documents};
  LibraryWatch watch(console, library.get(), model.get(), flags);
  Session session = compose_library(console, library.get(), model.get(), flags);
  watch.start(session.get());
  converse(console, model.get(), std::move(session),
           {arguments.sampling, arguments.passages,
            [&](kv_session* conversation) { return watch.refresh(conversation); }});
}

void run_library_chat(Console& console, const LibraryChatArguments& arguments) {
  expect_chat_possible(console, arguments.add.document);
  if (!arguments.add.document.empty() && !arguments.document_name.empty())
    throw Failure(exit_usage, "name a document of the library, or a file with -f FILE, not both");
  expect_name_or_file(arguments.add, arguments.document_name);
  const Model model = open_model(console, arguments.add.model, arguments.add.session);
  Session session = open_in_library(console, model.get(), arguments.add, arguments.document_name);
  converse(console, model.get(), std::move(session), {arguments.sampling});
}

void run_library_rename(Console& console, const LibraryRenameArguments& arguments) {
  const Library library = open_existing(console, arguments.library);
  expect_document(library.get(), arguments.library.folder, arguments.from);
  kv_error error{};
  check(kv_library_rename(library.get(), arguments.from.c_str(), arguments.to.c_str(), &error),
        error);
}

void run_library_remove(Console& console, const LibraryRemoveArguments& arguments) {
  const Library library = open_existing(console, arguments.library);
  for (const std::string& name : arguments.names)
    expect_document(library.get(), arguments.library.folder, name);
  for (const std::string& name : arguments.names) {
    kv_error error{};
    check(kv_library_remove(library.get(), name.c_str(), &error), error);
  }
}

}  // namespace tool
