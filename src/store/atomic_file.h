// A file that comes into being whole: written under another name in the same folder, synced, renamed to its name, the folder synced. The path
// holds the old file or the new one, never anything between. One thread at a time.
#pragma once

#include <string>

#include "base/status.h"
#include "os/os.h"

namespace kvasir {

class AtomicFile {
 public:
  AtomicFile() = default;
  ~AtomicFile();  // removes the temporary file unless finished
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Begins a file that will replace `path`. Once.
  Status create(const std::string& path);
  os::File& file() { return file_; }
  bool is_open() const { return temporary_; }
  // After success the file is durable. When only the folder's sync fails, the new file is in place and the error says so.
  Status finish();

 private:
  std::string path_;
  os::File file_;
  bool temporary_ = false;  // it exists under its own name
};

}  // namespace kvasir
