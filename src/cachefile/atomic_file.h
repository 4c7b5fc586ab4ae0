// A file that comes into being whole: written under another name in the same folder, synced,
// renamed to its name, the folder synced. The path holds the old file or the new one, never
// anything between. A new file is for its owner alone (mode 0600); one that replaces another has
// its mode, owner and group (os::File::keep_access_of). One thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/status.h"
#include "os/file_reaper.h"
#include "os/os.h"

namespace kvasir {

class AtomicFile {
 public:
  AtomicFile() = default;
  // Removes the temporary file unless finished.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Whether a file can be begun there.
  static Status check(const std::string& path);
  // Begins a file that will replace `path`, or the file that a symbolic link there leads to
  // (os::find_target). Once.
  // reaper: closes a file that is not finished; null: the destructor does.
  Status create(const std::string& path, std::shared_ptr<os::FileReaper> reaper = {});
  os::File& file() { return file_; }
  bool is_open() const { return temporary_; }
  // Called when the file is whole and synced, with its size, before it gets its name: an error
  // leaves the path as it was. It may choose another path in the same folder.
  using BeforeRename = std::function<Status(uint64_t bytes, std::string* path)>;
  // After success the file is durable. When only the folder's sync fails, the new file is in place
  // and the error says so.
  Status finish(const BeforeRename& before_rename = {});

 private:
  std::shared_ptr<os::FileReaper> reaper_;
  std::string path_;
  os::File file_;
  bool temporary_ = false;  // it exists under its own name
};

}  // namespace kvasir
