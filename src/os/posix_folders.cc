// Operations on folders, and on files by name.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/calls.h"

namespace kvasir::os {

namespace {

// The field has another name on macOS.
#ifdef __APPLE__
#define KVASIR_TIME(which) st_##which##timespec
#else
#define KVASIR_TIME(which) st_##which##tim
#endif

uint64_t nanoseconds(const struct timespec& t) {
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace

Status File::identity(FileIdentity* out) const {
  struct stat info;
  if (fstat(fd_, &info) != 0) return failed("ask the size of", path_, errno);
  *out = {static_cast<uint64_t>(info.st_dev), static_cast<uint64_t>(info.st_ino),
          static_cast<uint64_t>(info.st_size), nanoseconds(info.KVASIR_TIME(m)),
          nanoseconds(info.KVASIR_TIME(c))};
  return {};
}

bool can_name_file(const std::string&) { return true; }

Status list_folder(const std::string& folder, std::vector<FolderEntry>* out) {
  DIR* stream = nullptr;
  const int opened =
      retried("list", folder, [&] { return (stream = opendir(folder.c_str())) ? 0 : -1; });
  if (opened != 0) return failed("list the folder", folder, errno);
  struct Close {
    DIR* stream;
    ~Close() { closedir(stream); }
  } close{stream};
  std::vector<FolderEntry> found;
  for (;;) {
    errno = 0;
    const struct dirent* entry = readdir(stream);
    if (!entry && errno != 0) return failed("list the folder", folder, errno);
    if (!entry) break;
    struct stat info;
    if (fstatat(dirfd(stream), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(info.st_mode))
      continue;  // gone meanwhile, or not a file
    found.push_back(
        {entry->d_name, static_cast<uint64_t>(info.st_size), nanoseconds(info.KVASIR_TIME(m))});
  }
  *out = std::move(found);
  return {};
}

Status make_folder(const std::string& folder) {
  const int result = retried("make_folder", folder, [&] { return mkdir(folder.c_str(), 0700); });
  struct stat info;
  // The parent folder may be unreadable for this process.
  if (result == 0) (void)sync_folder_of(folder);
  if (result == 0) return {};
  const int error = errno;
  // A read-only file system may report EROFS instead.
  if ((error == EEXIST || error == EROFS) && stat(folder.c_str(), &info) == 0 &&
      S_ISDIR(info.st_mode))
    return {};
  errno = error;
  if (errno == EEXIST)
    return Status::error(Code::bad_argument, "%s is not a folder", shown(folder))
        .with_errno(ENOTDIR);
  return failed("make the folder", folder, errno);
}

Status touch(const std::string& path) {
  const int result =
      retried("touch", path, [&] { return utimensat(AT_FDCWD, path.c_str(), nullptr, 0); });
  if (result != 0) return failed("set the time of", path, errno);
  return {};
}

}  // namespace kvasir::os
