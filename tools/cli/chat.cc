// kvasir chat.
#include "chat.h"

#include <algorithm>
#include <string_view>

#include "answer.h"
#include "calibration.h"
#include "commands.h"
#include "failure.h"
#include "line_input.h"
#include "number_text.h"
#include "output.h"
#include "passages.h"
#include "prefill.h"
#include "suggestion.h"
#include "system.h"

namespace tool {
namespace {

constexpr const char* help_text =
    "/reset      drop the conversation, keep the document\n"
    "/stats      print statistics of the session as JSON\n"
    "/save FILE  save document and conversation; continue later with: kvasir chat -m MODEL -c "
    "FILE\n"
    "            /save --force FILE replaces a file that is not a beginning of this conversation\n"
    "/help       print this list\n"
    "Ctrl-C      stop the answer\n";

constexpr const char* command_names[] = {"/reset", "/stats", "/save", "/help"};

class Chat {
 public:
  Chat(Console& console, kv_model* model, Session start, Conversation conversation)
      : console_(console), model_(model), start_(std::move(start)),
        sampling_(conversation.sampling), passages_(conversation.passages),
        refresh_(std::move(conversation.refresh)) {
    if (passages_ == 0 && !session_documents(start_.get()).empty()) passages_ = default_sources;
    reset();
  }

  void run();

 private:
  void reset();
  void refresh();
  void ask(const std::string& line);
  void command(const std::string& line);
  void save_as(std::string path);
  std::string lost_with(const std::string& path);

  Console& console_;
  kv_model* model_;
  Session start_;  // the document; the conversation is a fork
  Session session_;
  SamplingFlags sampling_;
  uint32_t passages_;  // quoted under an answer
  std::function<bool(kv_session*)> refresh_;
};

void Chat::reset() { session_ = fork(start_.get()); }

// After a reset the documents are those of now; it keeps no file that is gone.
void Chat::refresh() {
  if (!refresh_(session_.get())) return;
  Session start = fork(session_.get());
  kv_error error{};
  check(kv_session_rewind(start.get(), 0, &error), error);
  start_ = std::move(start);
}

void Chat::ask(const std::string& line) {
  if (refresh_) refresh();
  const Answer given = answer(console_, session_.get(), line, sampling_, Keep::yes, passages_ > 0);
  if (passages_ > 0 && given.facts.stop_reason != KV_STOP_CANCELLED)
    print_passages(console_, passages_of(model_, session_.get(), passages_));
  console_.terminal.note("  " + facts_line(given));
}

// The loss of replacing this file: none where it is a beginning of this conversation.
std::string Chat::lost_with(const std::string& path) {
  constexpr const char* other = "holds another conversation or document";
  kv_session* loaded = nullptr;
  const kv_status status = kv_load(model_, path.c_str(), nullptr, nullptr, &loaded, nullptr);
  if (status != KV_OK) {
    kv_file_info info = initialised<kv_file_info>();
    const bool lacks_documents = status != KV_MODEL_MISMATCH &&
                                 kv_file_inspect(path.c_str(), &info, nullptr) == KV_OK &&
                                 info.documents > 0;
    return lacks_documents ? other : "is not a cache file of this model";
  }
  const Session saved(loaded);
  const std::vector<int32_t> old = tokens_of(saved.get()), now = tokens_of(session_.get());
  const auto same = [](const kv_session_document& a, const kv_session_document& b) {
    return std::string(a.path) == b.path;
  };
  const std::vector<kv_session_document> there = session_documents(saved.get()),
                                         here = session_documents(session_.get());
  const bool beginning = old.size() <= now.size() &&
                         std::equal(old.begin(), old.end(), now.begin()) &&
                         std::equal(there.begin(), there.end(), here.begin(), here.end(), same);
  return beginning ? "" : other;
}

void Chat::save_as(std::string path) {
  constexpr std::string_view forced = "--force ";
  const bool force = path.starts_with(forced);
  if (force) path.erase(0, forced.size());
  if (path.empty()) return console_.terminal.error("/save needs a file name");
  expect_writable(path);
  if (!force && exists(path))
    if (const std::string lost = lost_with(path); !lost.empty()) expect_force(path, lost, force);
  save(console_, session_.get(), path);
  console_.terminal.note("Saved " + grouped(token_count(session_.get())) + " tokens in " + path);
}

void Chat::command(const std::string& line) {
  const size_t space = line.find(' ');
  const std::string name = line.substr(0, space);
  const size_t rest = line.find_first_not_of(' ', space);
  const std::string argument =
      space == std::string::npos || rest == std::string::npos ? "" : line.substr(rest);
  if (name == "/reset") {
    reset();
    console_.terminal.note("Dropped the conversation; the document stays");
  } else if (name == "/stats") {
    console_.terminal.print(json_text(stats_json(session_.get())));
  } else if (name == "/save") {
    save_as(argument);
  } else if (name == "/help") {
    console_.terminal.print(help_text + std::string(system::end_of_input) +
                            "      end the conversation\n");
  } else {
    console_.terminal.error("unknown command '" + name + "'" +
                            suggestion(name, {std::begin(command_names), std::end(command_names)}) +
                            "; /help lists the commands");
  }
}

void Chat::run() {
  const bool person = system::is_terminal(system::Stream::input);
  Terminal& terminal = console_.terminal;
  if (person)
    terminal.note(std::string("Type a question. /help lists commands, ") + system::end_of_input +
                  " ends the conversation.");
  const std::unique_ptr<LineInput> input = open_line_input(&console_.interrupt);
  bool interrupted = false;  // a second Ctrl-C in a row at the prompt ends the conversation
  while (true) {
    console_.interrupt.arm();
    terminal.erase();
    std::string line;
    const LineInput::Kind kind = input->next("> ", &line);
    if (kind == LineInput::Kind::end) break;
    if (kind == LineInput::Kind::interrupted) {
      if (interrupted || !person) break;
      interrupted = true;
      terminal.prompt(std::string("\n") + system::end_of_input + " ends the conversation.\n");
      continue;
    }
    interrupted = false;
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    try {
      line.front() == '/' ? command(line) : ask(line);
    } catch (const Failure& failure) {
      // A failed call leaves the session as it was. A script gets the exit code, a person the
      // conversation.
      if (failure.exit_code() == exit_pipe || !person) throw;
      terminal.error(failure.what());
    }
  }
  if (person) terminal.prompt("\n");
}

}  // namespace

void expect_chat_possible(const Console& console, const std::string& document) {
  if (console.json) throw Failure(exit_usage, "chat has no --json; `kvasir ask --json` has");
  if (document == "-")
    throw Failure(exit_usage,
                  "chat reads questions from standard input: the document must be a file");
}

void converse(Console& console, kv_model* model, Session start, Conversation conversation) {
  Chat(console, model, std::move(start), std::move(conversation)).run();
}

void run_chat(Console& console, const ChatArguments& arguments) {
  if (!arguments.library.empty()) return chat_library(console, arguments);
  if (arguments.max_documents > 0 || !arguments.only.empty())
    throw Failure(exit_usage, "--documents and --only need a library, --library DIR");
  expect_chat_possible(console, arguments.source.document);
  expect_one_source(arguments.source);
  const Model model = open_model(console, arguments.model, arguments.session);
  const SessionFlags flags =
      with_calibration(console, arguments.model, model.get(), arguments.session,
                       {arguments.session.strategy, arguments.session.prefill});
  Session session;
  if (arguments.source.document.empty() && arguments.source.cache.empty()) {
    session = open_session(console, model.get(), flags);
  } else {
    OpenDocument opened = open_document(console, model.get(), arguments.source, flags);
    if (opened.save_failure) console.terminal.error(opened.save_failure->what());
    session = std::move(opened.session);
  }
  converse(console, model.get(), std::move(session), {arguments.sampling, arguments.passages});
}

}  // namespace tool
