// Ctrl-C: the first one fires a cancel token, the second ends the process at once.
#pragma once

#include "handles.h"

namespace tool {

// One for the process, for as long as it runs commands.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  kv_cancel* token() const { return cancel_.get(); }

  // Makes the next Ctrl-C a first one again.
  void arm();

  // Whether Ctrl-C was pressed since then.
  bool fired() const;

  // Waits until standard input has something to read, or its end. False when Ctrl-C was pressed
  // since arm(), also before the wait.
  bool wait_for_input();

 private:
  Cancel cancel_;
};

}  // namespace tool
