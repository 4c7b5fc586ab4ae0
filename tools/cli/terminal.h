// Standard output for answers and tables, standard error for one-line notes and a transient line.
//
// No control character reaches a terminal except those of this class: none from a model's text, a
// document, a name or a message.
#pragma once

#include <string>
#include <string_view>

#include "terminal_text.h"

namespace tool {

class Terminal {
 public:
  Terminal(bool quiet, bool json);
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  // Writes the text to standard output at once; on a terminal, the beginning of a character waits
  // for its end. Throws Failure, with exit_pipe where the reader is gone.
  void print(std::string_view text);

  void note(std::string_view line);    // unless quiet or json
  void error(std::string_view line);   // always, as "kvasir: LINE"
  void prompt(std::string_view text);  // as it is, without a newline
  bool chatty() const { return chatty_; }

  // The transient line: drawn over itself, erased by the next output. Only where draws().
  bool draws() const { return draws_; }
  bool has_utf8() const { return utf8_; }
  int columns() const;
  void draw(std::string_view line);
  void erase();

 private:
  void say(std::string_view line);

  bool chatty_;  // notes are shown
  bool draws_ = false;
  bool utf8_ = false;
  bool output_is_terminal_;
  bool drawn_ = false;
  TerminalText terminal_text_{
      TerminalText::Newlines::keep};  // what standard output has been given, where it is a terminal
};

}  // namespace tool
