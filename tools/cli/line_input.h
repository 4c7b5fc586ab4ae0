// Lines of standard input, edited and recalled where it is a terminal.
#pragma once

#include <memory>
#include <string>

#include "interrupt.h"

namespace tool {

class LineInput {
 public:
  enum class Kind { line, interrupted, end };

  virtual ~LineInput() = default;
  // The next line without its end. Shows `prompt` to a person.
  virtual Kind next(const std::string& prompt, std::string* line) = 0;
};

// With line editing and history if standard input and standard error are terminals and the program
// was built with libedit.
std::unique_ptr<LineInput> open_line_input(Interrupt* interrupt);

}  // namespace tool
