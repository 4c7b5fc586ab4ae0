// Closes files on a thread of its own. The system frees the page cache and the blocks of a removed
// file when its last handle closes: about 55 ms of CPU time per GB (measured on Linux 6.1, ext4). A
// cancelled call must not wait for that.
#pragma once

#include <memory>

#include "os/os.h"

namespace kvasir::os {

// Any thread may call close(). The destructor waits until every file is closed.
class FileReaper {
 public:
  FileReaper();
  ~FileReaper();
  // Starts the thread if none is running. Closes a small file at once, and any file if there is no
  // memory or no thread.
  void close(File file) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvasir::os
