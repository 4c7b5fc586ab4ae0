#include "terminal.h"

#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdlib>
#include <cstring>

#include "failure.h"

namespace tool {
namespace {

bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t size = ::write(descriptor, text.data(), text.size());
    if (size >= 0) {
      text.remove_prefix(static_cast<size_t>(size));
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

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

bool terminal_understands_drawing() {
  const char* kind = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && kind != nullptr && std::strcmp(kind, "dumb") != 0;
}

}  // namespace

Terminal::Terminal(bool quiet, bool json)
    : chatty_(!quiet && !json), output_is_terminal_(isatty(STDOUT_FILENO) == 1) {
  draws_ = chatty_ && terminal_understands_drawing();
  std::setlocale(LC_CTYPE, "");
  utf8_ = std::strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

void Terminal::print(std::string_view text) {
  erase();
  if (write_all(STDOUT_FILENO, text)) return;
  if (errno == EPIPE) throw Failure(exit_pipe, "");
  const int code = errno == ENOSPC || errno == EDQUOT ? exit_resources : exit_file;
  throw Failure(code, std::string("cannot write to standard output: ") + std::strerror(errno));
}

void Terminal::print_untrusted(std::string_view text) {
  output_is_terminal_ ? print(without_controls(text, true)) : print(text);
}

void Terminal::say(std::string_view line) {
  erase();
  std::string text = isatty(STDERR_FILENO) == 1 ? without_controls(line, false) : std::string(line);
  write_all(STDERR_FILENO, text += '\n');
}

void Terminal::note(std::string_view line) {
  if (chatty_) say(line);
}

void Terminal::error(std::string_view line) { say("kvasir: " + std::string(line)); }

void Terminal::prompt(std::string_view text) {
  erase();
  write_all(STDERR_FILENO, text);
}

int Terminal::columns() const {
  winsize size = {};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void Terminal::draw(std::string_view line) {
  if (!draws_) return;
  drawn_ = true;
  // One write, so that the line is never seen half drawn; what an earlier, longer one left is erased behind it.
  write_all(STDERR_FILENO, "\r" + without_controls(line, false) + "\x1b[K");
}

void Terminal::erase() {
  if (drawn_) write_all(STDERR_FILENO, "\r\x1b[K");
  drawn_ = false;
}

}  // namespace tool
