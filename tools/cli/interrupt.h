// Ctrl-C: the first one fires a cancel token, the second ends the process.
#pragma once

#include "handles.h"

namespace tool {

// At most one per process.
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

  // Waits for standard input or its end. False if Ctrl-C was pressed since arm(), also before the
  // wait.
  bool wait_for_input();

 private:
  Cancel cancel_;
};

}  // namespace tool
