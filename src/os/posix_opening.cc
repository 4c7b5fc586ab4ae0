// Opens and creates files, with their access rights.
//
// A new file may hold a document, so it has mode 0600.
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/xattr.h>
#endif
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <utility>

#include "os/calls.h"

namespace kvasir::os {

namespace {

constexpr mode_t private_file = 0600, private_folder = 0700;
constexpr int create_tries = 16;

Status require_regular(const std::string& path, const struct stat& info) {
  return S_ISREG(info.st_mode) ? Status() : not_a_file(path, S_ISDIR(info.st_mode));
}

// A writable descriptor must not get the number of a closed standard stream: the host would print
// into the file.
int clear_of_standard_streams(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int higher = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  ::close(fd);
  errno = error;
  return higher;
}

// A descriptor of a plain file, or -1 with *why. O_NONBLOCK: opening a pipe must not wait for its
// writer; plain files ignore it.
int open_plain(const std::string& path, int flags, Status* why) {
  const int fd = retried("open", path, [&] {
    return ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, private_file);
  });
  struct stat info;
  if (fd < 0 && errno == ELOOP && (flags & O_NOFOLLOW)) {
    *why = Status::error(Code::bad_argument, "%s is a symbolic link, not a file", shown(path))
               .with_errno(ELOOP);
  } else if (fd < 0) {
    *why = failed("open", path, errno);
  } else if (fstat(fd, &info) != 0) {
    *why = failed("open", path, errno);
  } else {
    *why = require_regular(path, info);
  }
  if (why->ok()) return fd;
  if (fd >= 0) ::close(fd);
  return -1;
}

#ifdef __linux__
constexpr char access_list[] = "system.posix_acl_access";

// Copies the access list of another file, or removes it. False on failure.
bool copy_access_list(const char* from, int to) {
  char list[4096];
  const ssize_t size = getxattr(from, access_list, list, sizeof list);
  if (size >= 0) return fsetxattr(to, access_list, list, static_cast<std::size_t>(size), 0) == 0;
  if (errno != ENODATA && errno != ENOTSUP) return false;
  return fremovexattr(to, access_list) == 0 || errno == ENODATA || errno == ENOTSUP;
}
#else
bool copy_access_list(const char*, int) { return true; }
#endif

struct Free {
  void operator()(char* text) const { std::free(text); }
};

// Errors of file systems without nameless files.
bool lacks_nameless_files(int error) {
  return error == EOPNOTSUPP || error == ENOTSUP || error == EISDIR || error == EINVAL ||
         error == ENOSYS;
}

// A file that is created in a private folder and unlinked at once.
int create_in_private_folder(const std::string& where) {
  std::string folder;
  int made = -1;
  for (int attempt = 0; made != 0 && attempt < create_tries; ++attempt) {
    uint64_t random;
    if (getentropy(&random, sizeof random) != 0) return -1;
    folder = temporary_name(where + "/kvasir-spill", random);
    made = retried("make_folder", folder, [&] { return mkdir(folder.c_str(), private_folder); });
    if (made != 0 && errno != EEXIST) return -1;
  }
  if (made != 0) return -1;
  const std::string path = folder + "/pages";
  int fd = retried("open", path, [&] {
    return ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, private_file);
  });
  int error = errno;
  if (fd >= 0 && retried("remove", path, [&] { return ::unlink(path.c_str()); }) != 0) {
    error = errno;
    ::close(std::exchange(fd, -1));
  }
  (void)rmdir(folder.c_str());  // fails on a network file system while the file is open
  errno = error;
  return fd;
}

}  // namespace

Status File::open_read(const std::string& path, File* out) {
  File file;
  Status s;
  file.path_ = path;
  file.fd_ = open_plain(path, O_RDONLY, &s);
  if (s.ok()) *out = std::move(file);
  return s;
}

Status File::open_lock(const std::string& path, File* out) {
  File file;
  Status s;
  file.path_ = path;
  file.fd_ = clear_of_standard_streams(open_plain(path, O_RDWR | O_CREAT | O_NOFOLLOW, &s));
  if (s.ok() && file.fd_ < 0) s = failed("open", path, errno);
  if (s.ok()) *out = std::move(file);
  return s;
}

Status File::open_to_lock(const std::string& path, File* out) {
  File file;
  Status s;
  file.path_ = path;
  file.fd_ = clear_of_standard_streams(open_plain(path, O_RDWR | O_NOFOLLOW, &s));
  // A read-only file can be locked on a local disk.
  if (s.code() == Code::permission) file.fd_ = open_plain(path, O_RDONLY | O_NOFOLLOW, &s);
  if (s.ok() && file.fd_ < 0) s = failed("open", path, errno);
  if (s.ok()) *out = std::move(file);
  return s;
}

Status File::reopen(File* out) const {
  File file;
  struct stat here, there;
  RETURN_IF_ERROR(open_read(path_, &file));
  if (fstat(fd_, &here) != 0 || fstat(file.fd_, &there) != 0 || here.st_dev != there.st_dev ||
      here.st_ino != there.st_ino)
    return failed("open", path_, ENOENT);
  *out = std::move(file);
  return {};
}

Status File::create_temporary(const std::string& target, File* out) {
  if (target.empty() || target.back() == '/')
    return Status::error(Code::bad_argument, "\"%s\" does not name a file", shown(target));
  struct stat info;
  if (stat(target.c_str(), &info) == 0) {  // checked before the work, not at the rename after it
    RETURN_IF_ERROR(require_regular(target, info));
  }
  File file;
  for (int attempt = 0; attempt < create_tries; ++attempt) {
    uint64_t random;
    if (getentropy(&random, sizeof random) != 0)
      return failed("name a temporary file for", target, errno);
    file.path_ = temporary_name(target, random);
    file.fd_ = retried("open", file.path_, [&] {
      return ::open(file.path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOCTTY,
                    private_file);
    });
    file.fd_ = clear_of_standard_streams(file.fd_);
    if (file.fd_ < 0 && errno != EEXIST) break;
    if (file.fd_ < 0) continue;
    bool locked = false;
    struct stat now;
    const bool can_lock =
        file.lock(Lock::exclusive, &locked).ok();  // some file systems have no locks
    // A cleanup of files left by ended processes may have come between; then the name is gone.
    if (can_lock && (!locked || fstat(file.fd_, &now) != 0 || now.st_nlink == 0)) {
      ::close(std::exchange(file.fd_, -1));
      errno = EEXIST;
      continue;
    }
    file.lock_fd_ = fcntl(file.fd_, F_DUPFD_CLOEXEC,
                          STDERR_FILENO + 1);  // the lock lasts until its last descriptor is closed
    if (can_lock && file.lock_fd_ < 0) {
      const int error = errno;
      (void)unlink(file.path_.c_str());
      return failed("create", file.path_, error);
    }
    *out = std::move(file);
    return {};
  }
  return failed("create", file.path_, errno);
}

Status File::create_nameless(const std::string& folder, File* out) {
  const std::string where = folder.empty() ? "/var/tmp" : folder;
  File file;
  file.path_ = where + "/kvasir-spill";  // for messages: no such file exists
#ifdef O_TMPFILE
  file.fd_ = retried("open", file.path_, [&] {  // O_EXCL: it cannot be linked to a name
    return ::open(where.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, private_file);
  });
#else
  errno = EOPNOTSUPP;
#endif
  if (file.fd_ < 0 && lacks_nameless_files(errno)) file.fd_ = create_in_private_folder(where);
  file.fd_ = clear_of_standard_streams(file.fd_);
  if (file.fd_ < 0) return failed("create a file in", where, errno);
  *out = std::move(file);
  return {};
}

Status File::keep_access_of(const std::string& path, bool* changed) {
  *changed = false;
  struct stat old, own;
  if (stat(path.c_str(), &old) != 0) return {};
  if (fstat(fd_, &own) != 0) return failed("set the access of", path_, errno);
  const bool same_list = copy_access_list(path.c_str(), fd_);
  const bool same_group =
      old.st_gid == own.st_gid || fchown(fd_, static_cast<uid_t>(-1), old.st_gid) == 0;
  mode_t mode = old.st_mode & 0777;
  if (!same_list || !same_group)
    mode = (mode & 0707) | (mode & 07) << 3;  // the group gets the rights of others
  *changed = old.st_uid != own.st_uid || old.st_gid != own.st_gid || mode != (own.st_mode & 0777);
  const int result =
      !*changed ? 0 : retried("set_access", path_, [&] { return fchmod(fd_, mode); });
  // A file system without modes has the same mode for all files.
  if (result != 0 && errno != EPERM && errno != ENOTSUP && errno != EOPNOTSUPP && errno != ENOSYS)
    return failed("set the access of", path_, errno);
  if (old.st_uid != own.st_uid)
    (void)fchown(fd_, old.st_uid, static_cast<gid_t>(-1));  // only root may
  return {};
}

Status absolute_path(const std::string& path, std::string* out) {
  if (path.starts_with('/')) {
    *out = path;
    return {};
  }
  const std::unique_ptr<char, Free> here(getcwd(nullptr, 0));
  if (!here) return failed("find the current folder for", path, errno);
  *out = std::string(here.get()) + "/" + path;
  return {};
}

Status find_target(const std::string& path, std::string* out) {
  if (path.empty() || path.back() == '/')
    return Status::error(Code::bad_argument, "\"%s\" does not name a file", shown(path));
  std::string whole;
  RETURN_IF_ERROR(absolute_path(path, &whole));
  struct stat link, folder, file;
  if (lstat(whole.c_str(), &link) != 0 || !S_ISLNK(link.st_mode)) {
    *out = std::move(whole);
    return {};
  }
  // In a folder shared by several users, a link of another user could lead to any file of the
  // caller.
  const bool trusted =
      link.st_uid == geteuid() || link.st_uid == 0 ||
      (stat(folder_of(whole).c_str(), &folder) == 0 && link.st_uid == folder.st_uid);
  if (!trusted)
    return Status::error(Code::permission,
                         "%s is another user's symbolic link; nothing was written", shown(path))
        .with_errno(EACCES);
  if (stat(whole.c_str(), &file) != 0) {
    if (errno != ENOENT) return failed("follow the symbolic link", path, errno);
    return Status::error(Code::bad_argument,
                         "%s is a symbolic link to no file; nothing was written", shown(path))
        .with_errno(ENOENT);
  }
  RETURN_IF_ERROR(require_regular(path, file));
  const std::unique_ptr<char, Free> leads(realpath(whole.c_str(), nullptr));
  if (!leads) return failed("follow the symbolic link", path, errno);
  *out = leads.get();
  return {};
}

bool exists(const std::string& path) {
  struct stat info;
  return lstat(path.c_str(), &info) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

}  // namespace kvasir::os
