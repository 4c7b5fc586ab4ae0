#include <histedit.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cwchar>

#include "line_editor.h"

namespace tool {
namespace {

class LineEditor : public LineInput {
 public:
  explicit LineEditor(Interrupt* interrupt)
      : interrupt_(interrupt), history_(history_init()),
        editor_(el_init("kvasir", stdin, stderr, stderr)) {
    if (!usable()) return;
    HistEvent event;
    history(history_, &event, H_SETSIZE, max_history);
    history(history_, &event, H_SETUNIQUE, 1);
    el_set(editor_, EL_CLIENTDATA, this);
    el_set(editor_, EL_PROMPT, &LineEditor::prompt);
    el_set(editor_, EL_EDITOR, "emacs");
    el_set(editor_, EL_SIGNAL, 0);  // Ctrl-C is the Interrupt's
    el_set(editor_, EL_GETCFN, &LineEditor::read_character);
    el_set(editor_, EL_HIST, &history, history_);
  }
  ~LineEditor() override {
    if (editor_ != nullptr) el_end(editor_);
    if (history_ != nullptr) history_end(history_);
  }
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  bool usable() const { return history_ != nullptr && editor_ != nullptr; }

  Kind next(const std::string& prompt, std::string* line) override {
    prompt_ = prompt;
    // libedit would show the prompt first. What is typed in between would be echoed twice, and
    // Ctrl-D would be lost.
    el_set(editor_, EL_PREP_TERM, 1);
    int size = 0;
    const char* text = el_gets(editor_, &size);
    if (interrupt_->fired()) {
      el_reset(editor_);
      return Kind::interrupted;
    }
    if (text == nullptr || size <= 0) return Kind::end;
    line->assign(text, static_cast<size_t>(size));
    while (line->ends_with('\n') || line->ends_with('\r')) line->pop_back();
    HistEvent event;
    if (line->find_first_not_of(" \t") != std::string::npos)
      history(history_, &event, H_ENTER, line->c_str());
    return Kind::line;
  }

 private:
  static constexpr int max_history = 500;

  static LineEditor& of(EditLine* editor) {
    void* self = nullptr;
    el_get(editor, EL_CLIENTDATA, &self);
    return *static_cast<LineEditor*>(self);
  }

  static char* prompt(EditLine* editor) { return of(editor).prompt_.data(); }

  // One character of the terminal; 0 at its end, -1 after a Ctrl-C. libedit's own function retries
  // a read that a signal interrupted.
  static int read_character(EditLine* editor, wchar_t* character) {
    LineEditor& self = of(editor);
    std::mbstate_t state{};
    while (self.interrupt_->wait_for_input()) {
      char byte = 0;
      const ssize_t size = ::read(STDIN_FILENO, &byte, 1);
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) return 0;
      // A Ctrl-D that was typed in line mode, during an answer. libedit binds 0 to quoted insert,
      // so the next Ctrl-D would become text.
      if (byte == 0) continue;
      const size_t used = std::mbrtowc(character, &byte, 1, &state);
      if (used == static_cast<size_t>(-2)) continue;  // more bytes follow
      if (used == static_cast<size_t>(-1)) {          // not of this locale: dropped
        state = {};
        continue;
      }
      return 1;
    }
    errno = EINTR;
    return -1;
  }

  Interrupt* interrupt_;
  History* history_;
  EditLine* editor_;
  std::string prompt_;
};

}  // namespace

std::unique_ptr<LineInput> open_line_editor(Interrupt* interrupt) {
  std::setlocale(LC_CTYPE, "");  // the encoding of what is typed
  auto editor = std::make_unique<LineEditor>(interrupt);
  if (!editor->usable()) return nullptr;
  return editor;
}

}  // namespace tool
