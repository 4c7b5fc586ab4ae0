#include "terminal.h"

#include <cerrno>
#include <cstring>

#include "failure.h"
#include "system.h"

namespace tool {
namespace {

// Escape sequences could rewrite the screen or the window's title. C1 controls are two bytes in UTF-8: C2 80 to C2 9F.
std::string without_controls(std::string_view text, bool keep_newlines) {
  std::string clean;
  clean.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0u;
    if (byte == 0xC2 && next >= 0x80 && next < 0xA0) {
      ++i;
    } else if (byte == '\t' || (byte == '\n' && keep_newlines) || (byte >= 0x20 && byte != 0x7F)) {
      clean += text[i];
    }
  }
  return clean;
}

}  // namespace

Terminal::Terminal(bool quiet, bool json)
    : chatty_(!quiet && !json), output_is_terminal_(system::is_terminal(system::Stream::output)) {
  draws_ = chatty_ && system::terminal_understands_drawing();
  utf8_ = system::terminal_shows_utf8();
}

void Terminal::print(std::string_view text) {
  erase();
  if (system::write(system::Stream::output, text)) return;
  if (errno == EPIPE) throw Failure(exit_pipe, "");
  const int code = system::is_disk_full(errno) ? exit_resources : exit_file;
  throw Failure(code, std::string("cannot write to standard output: ") + std::strerror(errno));
}

void Terminal::print_untrusted(std::string_view text) {
  output_is_terminal_ ? print(without_controls(text, true)) : print(text);
}

void Terminal::say(std::string_view line) {
  erase();
  std::string text = system::is_terminal(system::Stream::error) ? without_controls(line, false) : std::string(line);
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
  // One write, so that the line is never seen half drawn; what an earlier, longer one left is erased behind it.
  system::write(system::Stream::error, "\r" + without_controls(line, false) + "\x1b[K");
}

void Terminal::erase() {
  if (drawn_) system::write(system::Stream::error, "\r\x1b[K");
  drawn_ = false;
}

}  // namespace tool
