// A file that appears whole. It is written under another name in the same folder, synced and
// renamed; then the folder is synced. The path holds the old file or the new one, never a mixture.
// A new file is private to its owner (mode 0600); one that replaces another file takes its mode,
// owner and group (os::File::keep_access_of). One thread at a time.
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

  // Whether a file can be created there.
  static Status check(const std::string& path);
  // Creates the file that will replace `path`, or the target of a symbolic link there
  // (os::find_target). Call once. reaper: closes an unfinished file; null: the destructor does.
  Status create(const std::string& path, std::shared_ptr<os::FileReaper> reaper = {});
  os::File& file() { return file_; }
  bool is_open() const { return temporary_; }
  // Called before the rename, when the file is complete and synced, with its size. An error leaves
  // the path as it was. The function may choose another path in the same folder.
  using BeforeRename = std::function<Status(uint64_t bytes, std::string* path)>;
  // After success the file is durable. If only the sync of the folder fails, the new file is in
  // place and the error says so.
  Status finish(const BeforeRename& before_rename = {});

 private:
  std::shared_ptr<os::FileReaper> reaper_;
  std::string path_;
  os::File file_;
  bool temporary_ = false;  // the file has a name of its own
};

}  // namespace kvasir
