// Where the tool speaks: answers and tables on standard output, one-line notes and a transient line
// on standard error.
//
// No control character reaches a terminal but those of this file: not from a model's text, a
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

  // All of the text to standard output, now; but to a terminal the beginning of a character waits
  // for its end. Throws Failure: exit_pipe when nobody reads it any more.
  void print(std::string_view text);

  void note(std::string_view line);    // unless quiet or json
  void error(std::string_view line);   // always, as "kvasir: LINE"
  void prompt(std::string_view text);  // for a person at the keyboard; no newline is added. The
                                       // tool's own words: nothing is replaced
  bool chatty() const { return chatty_; }

  // The transient line: drawn over itself, erased by whatever is said next. Not shown unless
  // draws().
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
