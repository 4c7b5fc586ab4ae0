#include "terminal.h"

#include <cerrno>
#include <cstring>

#include "failure.h"
#include "system.h"

namespace tool {

Terminal::Terminal(bool quiet, bool json)
    : chatty_(!quiet && !json), output_is_terminal_(system::is_terminal(system::Stream::output)) {
  draws_ = chatty_ && system::terminal_understands_drawing();
  utf8_ = system::terminal_shows_utf8();
}

Terminal::~Terminal() {
  erase();
  if (const std::string rest = terminal_text_.end(); !rest.empty())
    system::write(system::Stream::output, rest);
}

void Terminal::print(std::string_view text) {
  erase();
  if (output_is_terminal_ ? system::write(system::Stream::output, terminal_text_.next(text))
                          : system::write(system::Stream::output, text))
    return;
  if (errno == EPIPE) throw Failure(exit_pipe, "");
  const int code = system::is_disk_full(errno) ? exit_resources : exit_file;
  throw Failure(code, std::string("cannot write to standard output: ") + std::strerror(errno));
}

void Terminal::say(std::string_view line) {
  erase();
  std::string text =
      system::is_terminal(system::Stream::error) ? one_terminal_line(line) : std::string(line);
  system::write(system::Stream::error, text += '\n');
}

void Terminal::note(std::string_view line) {
  if (chatty_) say(line);
}

void Terminal::error(std::string_view line) { say("kvasir: " + std::string(line)); }

void Terminal::prompt(std::string_view text) {
  erase();
  system::write(system::Stream::error, text);
}

int Terminal::columns() const {
  const int columns = system::terminal_columns();
  return columns > 0 ? columns : 80;
}

void Terminal::draw(std::string_view line) {
  if (!draws_) return;
  drawn_ = true;
  // One write, so that the line is never half drawn. The end of a longer earlier line is erased.
  system::write(system::Stream::error, "\r" + one_terminal_line(line) + "\x1b[K");
}

void Terminal::erase() {
  if (drawn_) system::write(system::Stream::error, "\r\x1b[K");
  drawn_ = false;
}

}  // namespace tool
