// kvasir library: a folder of documents that are read once.
#include <ctime>
#include <filesystem>

#include "answer.h"
#include "calibration.h"
#include "commands.h"
#include "failure.h"
#include "grammar.h"
#include "number_text.h"
#include "output.h"
#include "system.h"

namespace tool {
namespace {

void on_log(int32_t level, const char* message, void* user) {
  static_cast<Terminal*>(user)->note((level == KV_LOG_WARNING ? "warning: " : "") +
                                     std::string(message));
}

Library open_library(Console& console, const LibraryFlags& flags) {
  kv_library_options options;
  kv_library_options_init(&options, sizeof options);
  options.max_bytes = flags.max_bytes;
  options.log = on_log;
  options.log_user = &console.terminal;
  kv_error error{};
  kv_library* library = nullptr;
  check(kv_library_open(flags.folder.c_str(), &options, &library, &error), error);
  return Library(library);
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
  console.terminal.print(printed("%-32s ", d.name) +
                         printed("%10s  ", byte_count(d.file_bytes).c_str()) +
                         day_and_time(d.last_used) + "  " +
                         (usable ? grouped(d.tokens) + " tokens, " + d.model_name
                                 : std::string(kv_status_text(d.status))) +
                         "\n");
}

// What a file's name becomes where it cannot be a document's (kv_library_open): hidden, too long,
// not UTF-8, or with characters that no name has.
std::string name_after(const std::string& path) {
  const std::string file = path == "-" ? "" : system::text(system::path(path).filename());
  constexpr std::size_t most = 200;  // bytes
  std::string name;
  for (std::size_t i = file.find_first_not_of('.'); i < file.size();) {
    const auto byte = [&](std::size_t at) {
      return at < file.size() ? static_cast<unsigned char>(file[at]) : 0u;
    };
    const unsigned first = byte(i);
    const std::size_t size = first < 0x80                    ? 1
                             : first >= 0xC2 && first < 0xE0 ? 2
                             : first >= 0xE0 && first < 0xF0 ? 3
                             : first >= 0xF0 && first < 0xF5 ? 4
                                                             : 0;
    bool good = size > 0 && first >= 0x20 && first != 0x7F && first != '\\';
    for (std::size_t k = 1; k < size; ++k) good = good && (byte(i + k) & 0xC0) == 0x80;
    // Not the shortest form, a surrogate, beyond the last character.
    const unsigned second = byte(i + 1);
    if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
        (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F))
      good = false;
    const std::string character = good ? file.substr(i, size) : "_";
    if (name.size() + character.size() > most) break;
    name += character;
    i += good ? size : 1;
  }
  return name;
}

// A session of the document: from the library as far as it is there, read and added where it is
// not.
Session add(Console& console, kv_model* model, const LibraryAddArguments& arguments,
            const SessionFlags& flags) {
  const std::string text = read_file(arguments.document);
  const std::string name = arguments.name.empty() ? name_after(arguments.document) : arguments.name;
  const Library library = open_library(console, arguments.library);
  const kv_session_options session_flags = session_options(console, flags);
  Progress progress(console.terminal, "Reading " + (name.empty() ? "standard input" : name),
                    Unit::tokens);
  kv_library_session_options options;
  kv_library_session_options_init(&options, sizeof options);
  options.flags =
      (arguments.verify ? KV_LIBRARY_VERIFY : 0) | (arguments.replace ? KV_LIBRARY_REPLACE : 0);
  options.name = name.empty() ? nullptr : name.c_str();
  options.session = &session_flags;
  options.cancel = console.interrupt.token();
  options.progress = [](int32_t phase, uint64_t done, uint64_t total, void* user) -> int32_t {
    return phase == KV_PHASE_PREFILL || phase == KV_PHASE_PREPARE
               ? Progress::callback(phase, done, total, user)
               : 0;
  };
  options.progress_user = &progress;
  kv_library_result result{};
  result.struct_size = sizeof result;
  kv_error error{};
  kv_session* session = nullptr;
  const kv_status status = kv_library_session(library.get(), model, text.data(), text.size(),
                                              &options, &session, &result, &error);
  if (status == KV_CANCELLED) throw Failure(exit_cancelled, "stopped; nothing was added");
  check(status, error,
        status == KV_BAD_STATE ? "give this one another --name, or add --force to replace it" : "");
  Session owner(session);
  console.result["source"] = {{"library", arguments.library.folder},
                              {"name", result.name},
                              {"tokens", result.tokens},
                              {"found_tokens", result.tokens_found},
                              {"saved", result.saved != 0},
                              {"seconds", progress.seconds()}};
  const uint64_t read = result.tokens - result.tokens_found;
  console.terminal.note(std::string(result.name) + ": found " + grouped(result.tokens_found) +
                        " tokens, read " + grouped(read) + " in " + duration(progress.seconds()) +
                        (result.saved ? "; saved" : ""));
  if (result.save_status != KV_OK) {
    console.result["source"]["save_status"] = result.save_status;
    console.terminal.error(std::string("what was read is not in the library: ") +
                           kv_status_text(result.save_status));
  }
  return owner;
}

}  // namespace

void run_library_list(Console& console, const LibraryListArguments& arguments) {
  const Library library = open_library(console, arguments.library);
  console.result["documents"] = Json::array();
  for (uint32_t i = 0;; ++i) {
    kv_library_document document{};
    document.struct_size = sizeof document;
    kv_error error{};
    const kv_status status = kv_library_list(library.get(), i, &document, &error);
    if (status == KV_NOT_FOUND) return;
    check(status, error);
    list_document(console, document);
  }
}

void run_library_add(Console& console, const LibraryAddArguments& arguments) {
  if (is_there(arguments.library.folder)) expect_writable_folder(arguments.library.folder);
  const Model model = open_model(console, arguments.model, true);
  add(console, model.get(), arguments,
      with_calibration(console, arguments.model, model.get(), arguments.session,
                       {arguments.session.prefill}));
  const Json& source = console.result["source"];
  if (source.contains("save_status"))
    throw Failure(exit_code_for(source["save_status"]), "the document was not added");
}

void run_library_ask(Console& console, const LibraryAskArguments& arguments) {
  const std::vector<std::string> questions =
      questions_of(arguments.questions, arguments.add.document);
  const Model model = open_model(console, arguments.add.model, true);
  const SessionFlags flags =
      with_calibration(console, arguments.add.model, model.get(), arguments.add.session,
                       {arguments.add.session.strategy, arguments.add.session.prefill});
  const Session session = add(console, model.get(), arguments.add, flags);
  answer_each(console, model.get(), session.get(), questions, arguments.sampling,
              arguments.passages);
}

void run_library_rename(Console& console, const LibraryRenameArguments& arguments) {
  const Library library = open_library(console, arguments.library);
  kv_error error{};
  check(kv_library_rename(library.get(), arguments.from.c_str(), arguments.to.c_str(), &error),
        error);
}

void run_library_remove(Console& console, const LibraryRemoveArguments& arguments) {
  const Library library = open_library(console, arguments.library);
  for (const std::string& name : arguments.names) {
    kv_error error{};
    check(kv_library_remove(library.get(), name.c_str(), &error), error);
  }
}

namespace {

void add_folder(CLI::App* app, LibraryFlags* flags) {
  text(app, "library", &flags->folder, "DIR", "The library's folder, made where there is none")
      ->required();
  count<uint64_t>(app, "--most-bytes", &flags->max_bytes, 1, UINT64_MAX,
                  "What all documents may take together; the least recently used ones go");
}

void add_reading_of(CLI::App* app, LibraryAddArguments* arguments) {
  add_folder(app, &arguments->library);
  add_model(app, &arguments->model);
  text(app, "-f,--file", &arguments->document, "FILE",
       "The document, plain text; - is standard input")
      ->required();
  text(app, "--name", &arguments->name, "NAME",
       "What it is called where it is added; without it as its file. A name that is taken gets an "
       "ending");
  flag(app, "--replace", &arguments->replace,
       "Replace the document of that name, if another text or another model has it");
  flag(app, "--verify", &arguments->verify,
       "Check all of a document before it is used, not each part when it is first used");
  add_reading(app, &arguments->session);
}

}  // namespace

void add_library(Grammar& grammar) {
  CLI::App* library =
      grammar.app.add_subcommand("library", "A folder of documents: each text is read once");
  library->require_subcommand(1);
  library->footer(
      "A text that is there, or that a document in it begins with, is found and not read again; of "
      "a text that begins like one,\n"
      "only the rest is read. Any number of programs may use one folder at once. NAME.kv in it is "
      "the document NAME.\n"
      "Texts of one name, and models that read one text, have a document each: the second is "
      "called NAME-, and 8 digits.\n\n"
      "Examples:\n"
      "  kvasir library ask books -m model.gguf -f book.txt \"Who is Irene Adler?\"\n"
      "  kvasir library list books");
  Grammar inner{*library, grammar.global, grammar.chosen};
  const auto [list, listed] =
      inner.add("list", "What is in it, the last used first", run_library_list);
  add_folder(list, &listed->library);
  const auto [adding, added] =
      inner.add("add", "Read a document, or find that it is there", run_library_add);
  add_reading_of(adding, added.get());
  const auto [asking, asked] = inner.add(
      "ask", "Question a document, which is added where it is not there", run_library_ask);
  add_reading_of(asking, &asked->add);
  add_strategy(asking, &asked->add.session);
  add_sampling(asking, &asked->sampling);
  add_passages(asking, &asked->passages);
  asking
      ->add_option("questions", asked->questions, "Questions; none: one a line from standard input")
      ->type_name("TEXT");
  const auto [renaming, renamed] =
      inner.add("rename", "Give a document another name", run_library_rename);
  add_folder(renaming, &renamed->library);
  text(renaming, "from", &renamed->from, "NAME", "As it is called now")->required();
  text(renaming, "to", &renamed->to, "NAME", "As it is called then")->required();
  const auto [removing, removed] =
      inner.add("remove", "Remove documents that no session has open", run_library_remove);
  add_folder(removing, &removed->library);
  removing->add_option("names", removed->names, "Documents")
      ->type_name("NAME")
      ->required()
      ->check(not_empty());
}

}  // namespace tool
