#include "line_input.h"

#include <cerrno>

#include "line_editor.h"
#include "system.h"

namespace tool {
namespace {

// Not std::getline, which cannot distinguish a Ctrl-C from the end.
class PlainInput : public LineInput {
 public:
  explicit PlainInput(Interrupt* interrupt) : interrupt_(interrupt) {}

  Kind next(const std::string& prompt, std::string* line) override {
    if (system::is_terminal(system::Stream::input)) system::write(system::Stream::error, prompt);
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

}  // namespace

std::unique_ptr<LineInput> open_line_input(Interrupt* interrupt) {
  if (system::is_terminal(system::Stream::input) && system::terminal_understands_drawing())
    if (std::unique_ptr<LineInput> editor = open_line_editor(interrupt)) return editor;
  return std::make_unique<PlainInput>(interrupt);
}

}  // namespace tool
