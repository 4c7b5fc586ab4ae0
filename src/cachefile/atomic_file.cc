#include "cachefile/atomic_file.h"

#include <new>
#include <utility>

namespace kvasir {

AtomicFile::~AtomicFile() {
  if (!temporary_) return;
  if (!os::removes_open_files || !reaper_) (void)file_.close();
  (void)os::remove_file(file_.path());  // the error that led here has been reported
  if (reaper_ && file_.is_open()) reaper_->close(std::move(file_));
}

Status AtomicFile::check(const std::string& path) {
  AtomicFile begun;
  return begun.create(path);
}

Status AtomicFile::create(const std::string& path, std::shared_ptr<os::FileReaper> reaper) {
  reaper_ = std::move(reaper);
  RETURN_IF_ERROR(os::find_target(path, &path_));
  Status s = os::File::create_temporary(path_, &file_);
  temporary_ = s.ok();
  return s;
}

// The file is in place already, so a failed allocation must say that too.
static Status sync_folder(const std::string& path) {
  try {
    return os::sync_folder_of(path);
  } catch (const std::bad_alloc&) {
    return Status::error(Code::no_memory, "out of memory");
  }
}

Status AtomicFile::finish(const BeforeRename& before_rename) {
  uint64_t bytes = 0;
  bool changed = false;
  RETURN_IF_ERROR(file_.sync());
  if (before_rename) {
    RETURN_IF_ERROR(file_.size(&bytes));
    RETURN_IF_ERROR(before_rename(bytes, &path_));
  }
  RETURN_IF_ERROR(file_.keep_access_of(path_, &changed));
  if (changed) RETURN_IF_ERROR(file_.sync());
  RETURN_IF_ERROR(file_.close());
  RETURN_IF_ERROR(os::rename_replace(file_.path(), path_));
  temporary_ = false;
  file_.unlock();  // from here on, whoever opens the document locks it
  Status s = sync_folder(path_);
  if (s.ok()) return s;
  return Status::error(s.code(), "%s is written, but a power cut may still undo it: %s",
                       path_.c_str(), s.message())
      .with_errno(s.sys_errno());
}

}  // namespace kvasir
