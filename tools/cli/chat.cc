// kvasir chat: a conversation in the terminal, or line by line from a pipe.
#include <algorithm>
#include <cerrno>
#include <optional>
#include <string_view>

#include "answer.h"
#include "calibration.h"
#include "commands.h"
#include "failure.h"
#include "number_text.h"
#include "output.h"
#include "prefill.h"
#include "system.h"

namespace tool {
namespace {

constexpr const char* help_text =
    "/reset      forget the conversation, keep the document\n"
    "/stats      facts about the session as JSON\n"
    "/save FILE  save document and conversation; go on later with: kvasir chat -m MODEL -c FILE\n"
    "            /save --force FILE replaces FILE also when it is no beginning of this "
    "conversation\n"
    "/help       this\n"
    "Ctrl-C      stop the answer\n";

// Lines of standard input. Not std::getline, which cannot tell a Ctrl-C from the end.
class Lines {
 public:
  enum class Kind { line, interrupted, end };

  explicit Lines(Interrupt* interrupt) : interrupt_(interrupt) {}

  Kind next(std::string* line) {
    while (true) {
      const size_t end = pending_.find('\n');
      if (end != std::string::npos) return take(end, end + 1, line);
      if (!interrupt_->wait_for_input()) {
        pending_.clear();
        return Kind::interrupted;
      }
      char buffer[4096];
      const ptrdiff_t size = system::read(buffer, sizeof buffer);
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0)
        return pending_.empty() ? Kind::end : take(pending_.size(), pending_.size(), line);
      pending_.append(buffer, static_cast<size_t>(size));
    }
  }

 private:
  Kind take(size_t size, size_t consumed, std::string* line) {
    *line = pending_.substr(0, size);
    pending_.erase(0, consumed);
    if (line->ends_with('\r')) line->pop_back();
    return Kind::line;
  }

  Interrupt* interrupt_;
  std::string pending_;
};

class Chat {
 public:
  Chat(Console& console, kv_model* model, Session start, const SamplingFlags& sampling)
      : console_(console), model_(model), start_(std::move(start)), sampling_(sampling) {
    reset();
  }

  void run();

 private:
  void reset();
  void say(const std::string& line);
  void command(const std::string& line);
  void save_as(std::string path);
  std::string lost_with(const std::string& path);

  Console& console_;
  kv_model* model_;
  Session start_;  // as it was at the beginning; the conversation is a fork of it
  Session session_;
  SamplingFlags sampling_;
};

void Chat::reset() {
  kv_error error{};
  kv_session* fork = nullptr;
  check(kv_fork(start_.get(), &fork, &error), error);
  session_.reset(fork);
}

void Chat::say(const std::string& line) {
  const Answer given = answer(console_, session_.get(), line, sampling_, Keep::yes);
  console_.terminal.note("  " + facts_line(given));
}

// What replacing this file would lose: nothing where the conversation begins with all of it, as
// where it was saved earlier.
std::string Chat::lost_with(const std::string& path) {
  const kv_session_options options = session_options(console_, {});
  kv_session* loaded = nullptr;
  if (kv_load(model_, path.c_str(), &options, nullptr, &loaded, nullptr) != KV_OK)
    return "is not a cache of this model";
  const Session there(loaded);
  const std::vector<int32_t> old = tokens_of(there.get()), now = tokens_of(session_.get());
  const bool goes_on = old.size() <= now.size() && std::equal(old.begin(), old.end(), now.begin());
  return goes_on ? "" : "holds another conversation or document";
}

void Chat::save_as(std::string path) {
  constexpr std::string_view forced = "--force ";
  const bool force = path.starts_with(forced);
  if (force) path.erase(0, forced.size());
  if (path.empty()) return console_.terminal.error("/save needs a file name");
  expect_writable(path);
  if (!force && is_there(path))
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
    console_.terminal.note("Forgotten; the document is still there");
  } else if (name == "/stats") {
    console_.terminal.print(json_text(stats_of(session_.get())));
  } else if (name == "/save") {
    save_as(argument);
  } else if (name == "/help") {
    console_.terminal.print(help_text + std::string(system::end_of_input) + "      leave\n");
  } else {
    console_.terminal.error("no command " + name + "; /help lists them");
  }
}

void Chat::run() {
  const bool person = system::is_terminal(system::Stream::input);
  if (person)
    console_.terminal.note(std::string("Ask away. /help lists commands, ") + system::end_of_input +
                           " leaves.");
  Lines lines(&console_.interrupt);
  bool leaving = false;  // a second Ctrl-C in a row at the prompt leaves too
  while (true) {
    console_.interrupt.arm();
    if (person) console_.terminal.prompt("> ");
    std::string line;
    const Lines::Kind kind = lines.next(&line);
    if (kind == Lines::Kind::end || (kind == Lines::Kind::interrupted && (leaving || !person)))
      break;
    leaving = kind == Lines::Kind::interrupted;
    if (leaving) {
      console_.terminal.prompt(std::string("\n") + system::end_of_input + " leaves.\n");
      continue;
    }
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    try {
      line.front() == '/' ? command(line) : say(line);
    } catch (const Failure& failure) {
      // A failed call leaves the session as it was: the conversation goes on, unless nobody
      // listens.
      if (failure.exit_code() == exit_pipe || !person) throw;
      console_.terminal.error(failure.what());
    }
  }
  if (person) console_.terminal.prompt("\n");
}

}  // namespace

void run_chat(Console& console, const ChatArguments& arguments) {
  if (console.json) throw Failure(exit_usage, "chat has no --json; `kvasir ask --json` has");
  expect_one_source(arguments.source);
  const Model model = open_model(console, arguments.model, true);
  const SessionFlags flags =
      with_calibration(console, arguments.model, model.get(), arguments.session,
                       {arguments.session.strategy, arguments.session.prefill});
  Session session;
  if (arguments.source.document.empty() && arguments.source.cache.empty()) {
    session = open_session(console, model.get(), flags);
  } else {
    if (arguments.source.document == "-")
      throw Failure(exit_usage,
                    "chat reads questions from standard input; the document must be a file");
    OpenDocument opened = open_document(console, model.get(), arguments.source, flags);
    if (opened.save_failure) console.terminal.error(opened.save_failure->what());
    session = std::move(opened.session);
  }
  Chat(console, model.get(), std::move(session), arguments.sampling).run();
}

}  // namespace tool
