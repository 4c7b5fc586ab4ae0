// The seam to Windows 10 or newer. Operations on files are in this file, on folders in
// windows_folders.cc, on the machine in windows_machine.cc.
//
// System errors become errno, so that codes and texts are the same on every system.
#include "os/windows_calls.h"  // before the system's other headers, which need its types

#include <winioctl.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

namespace kvasir::os {

namespace {

// The most bytes per system call, which takes 32 bits.
constexpr std::size_t max_transfer = std::size_t{1} << 30;

// Windows locks keep others from reading and writing the locked bytes. Ours are advisory: they lock
// a byte beyond any file.
constexpr uint64_t locked_byte = uint64_t{1} << 62;

constexpr DWORD share_nothing = 0;

constexpr uint64_t max_offset = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());

HANDLE handle_of(intptr_t descriptor) { return reinterpret_cast<HANDLE>(descriptor); }

OVERLAPPED at(uint64_t offset) {
  OVERLAPPED place{};
  place.Offset = static_cast<DWORD>(offset);
  place.OffsetHigh = static_cast<DWORD>(offset >> 32);
  return place;
}

// EISDIR for a folder, for which the system reports denied access.
intptr_t open_file(const std::string& path, DWORD access, DWORD how, DWORD flags = 0,
                   DWORD sharing = share_all) {
  const WidePath name(path);
  if (!name.good()) return -1;
  const HANDLE handle = CreateFileW(name.c_str(), access, sharing, nullptr, how,
                                    flags | FILE_ATTRIBUTE_NORMAL, nullptr);
  if (handle != INVALID_HANDLE_VALUE) return reinterpret_cast<intptr_t>(handle);
  const DWORD error = GetLastError();
  const DWORD attributes = GetFileAttributesW(name.c_str());
  if (error == ERROR_ACCESS_DENIED && attributes != INVALID_FILE_ATTRIBUTES &&
      (attributes & FILE_ATTRIBUTE_DIRECTORY) != 0) {
    errno = EISDIR;
    return -1;
  }
  return failing(error);
}

// Opens a plain file, or returns the reason why it is none.
Status open_plain(const std::string& path, DWORD access, DWORD how, intptr_t* out) {
  const intptr_t descriptor = retried("open", path, [&] { return open_file(path, access, how); });
  if (descriptor < 0 && errno == EISDIR) return not_a_file(path, true);
  if (descriptor < 0) return failed("open", path, errno);
  if (GetFileType(handle_of(descriptor)) != FILE_TYPE_DISK) {
    CloseHandle(handle_of(descriptor));
    return not_a_file(path, false);
  }
  *out = descriptor;
  return {};
}

bool is_being_removed(HANDLE handle) {
  FILE_STANDARD_INFO info;
  return !GetFileInformationByHandleEx(handle, FileStandardInfo, &info, sizeof info) ||
         info.DeletePending || info.NumberOfLinks == 0;
}

// Reads or writes until it is complete. Only tests interrupt it or shorten a transfer.
template <class Call>
int transferred(const char* operation, const std::string& path, std::size_t* part, Call call) {
  for (;;) {
    const int failure = consult(operation, path);
    if (failure < 0) *part -= *part / 2;
    if (failure == EINTR) continue;
    if (failure <= 0) return call();
    errno = failure;
    return -1;
  }
}

}  // namespace

File::~File() {
  if (fd_ >= 0) CloseHandle(handle_of(fd_));
  if (lock_fd_ >= 0) CloseHandle(handle_of(lock_fd_));
}

Status File::open_read(const std::string& path, File* out) {
  File file;
  file.path_ = path;
  RETURN_IF_ERROR(open_plain(path, GENERIC_READ, OPEN_EXISTING, &file.fd_));
  *out = std::move(file);
  return {};
}

Status File::reopen(File* out) const {
  File file;
  file.path_ = path_;
  file.fd_ = retried("open", path_, [&] {
    const HANDLE handle = ReOpenFile(handle_of(fd_), GENERIC_READ, share_all, 0);
    return handle == INVALID_HANDLE_VALUE ? intptr_t{failing()}
                                          : reinterpret_cast<intptr_t>(handle);
  });
  if (file.fd_ < 0) return failed("open", path_, errno);
  *out = std::move(file);
  return {};
}

Status File::create_temporary(const std::string& target, File* out) {
  const std::size_t name = name_begin(target);
  if (name == target.size())
    return Status::error(Code::bad_argument, "\"%s\" does not name a file", shown(target));
  const WidePath wide_target(target);
  if (!wide_target.good()) return failed("name a temporary file for", target, errno);
  // Checked before the work, not at the rename after it.
  const DWORD attributes = GetFileAttributesW(wide_target.c_str());
  if (attributes != INVALID_FILE_ATTRIBUTES &&
      (attributes & (FILE_ATTRIBUTE_DIRECTORY | FILE_ATTRIBUTE_DEVICE)) != 0)
    return not_a_file(target, (attributes & FILE_ATTRIBUTE_DIRECTORY) != 0);
  File file;
  for (int attempt = 0; attempt < 16; ++attempt) {
    uint64_t random;
    if (!random_bits(&random)) return failed("name a temporary file for", target, EIO);
    file.path_ = temporary_name(target, random);
    file.fd_ = retried("open", file.path_, [&] {
      return open_file(file.path_, GENERIC_READ | GENERIC_WRITE, CREATE_NEW);
    });
    if (file.fd_ < 0 && errno != EEXIST) break;
    if (file.fd_ < 0) continue;
    if (GetFileType(handle_of(file.fd_)) != FILE_TYPE_DISK) {  // "nul.kv" is the device
      CloseHandle(handle_of(std::exchange(file.fd_, -1)));
      return not_a_file(target, false);
    }
    bool locked = false;
    // some file systems have no locks
    const bool can_lock = file.lock(Lock::exclusive, &locked).ok();
    // A cleanup of files left by ended processes may have come between; then the name is being
    // removed.
    if (can_lock && (!locked || is_being_removed(handle_of(file.fd_)))) {
      CloseHandle(handle_of(std::exchange(file.fd_, -1)));
      errno = EEXIST;
      continue;
    }
    HANDLE same = nullptr;  // the lock lasts until the last handle of the opening is closed
    if (DuplicateHandle(GetCurrentProcess(), handle_of(file.fd_), GetCurrentProcess(), &same, 0,
                        FALSE, DUPLICATE_SAME_ACCESS)) {
      file.lock_fd_ = reinterpret_cast<intptr_t>(same);
    } else if (can_lock) {
      (void)failing();
      const int error = errno;
      (void)remove_file(file.path_);
      return failed("create", file.path_, error);
    }
    *out = std::move(file);
    return {};
  }
  return failed("create", file.path_, errno);
}

Status File::open_lock(const std::string& path, File* out) {
  File file;
  file.path_ = path;
  if (is_link(path))
    return Status::error(Code::bad_argument, "%s is a symbolic link, not a file", shown(path))
        .with_errno(EINVAL);
  RETURN_IF_ERROR(open_plain(path, GENERIC_READ | GENERIC_WRITE, OPEN_ALWAYS, &file.fd_));
  *out = std::move(file);
  return {};
}

Status File::open_to_lock(const std::string& path, File* out) {
  if (is_link(path))
    return Status::error(Code::bad_argument, "%s is a symbolic link, not a file", shown(path))
        .with_errno(EINVAL);
  return open_read(path, out);  // enough for a lock
}

Status File::keep_access_of(const std::string&, bool* changed) {
  *changed = false;
  return {};
}

void File::unlock() {
  if (lock_fd_ >= 0) CloseHandle(handle_of(std::exchange(lock_fd_, -1)));
}

// Like flock(): taking a lock of another kind releases the File's lock.
Status File::lock(Lock kind, bool* got) const {
  *got = false;
  const DWORD how =
      (kind == Lock::exclusive ? LOCKFILE_EXCLUSIVE_LOCK : 0) | LOCKFILE_FAIL_IMMEDIATELY;
  bool taken = false;
  const int result = retried("lock", path_, [&] {
    OVERLAPPED place = at(locked_byte);
    (void)UnlockFileEx(handle_of(fd_), 0, 1, 0, &place);
    if (LockFileEx(handle_of(fd_), how, 0, 1, 0, &place)) return 0;
    taken = GetLastError() == ERROR_LOCK_VIOLATION || GetLastError() == ERROR_IO_PENDING;
    return failing();
  });
  if (result != 0 && !taken) return failed("lock", path_, errno);
  *got = result == 0;
  return {};
}

// With a name that nobody can open or remove: the handle is not shared, and removes the file when
// it is closed, at the latest with its process. After a power cut the file remains.
Status File::create_nameless(const std::string& folder, File* out) {
  wchar_t temporary[MAX_PATH + 2] = L"";
  if (folder.empty() && GetTempPathW(MAX_PATH + 1, temporary) == 0)
    return Status::error(Code::io, "Windows has no folder for temporary files");
  const std::string where = folder.empty() ? narrow(temporary) : folder;
  File file;
  for (int attempt = 0; file.fd_ < 0 && attempt < 16; ++attempt) {
    uint64_t random;
    if (!random_bits(&random)) return failed("name a file in", where, EIO);
    file.path_ = temporary_name(where + "/kvasir-spill", random);
    file.fd_ = retried("open", file.path_, [&] {
      constexpr DWORD access = GENERIC_READ | GENERIC_WRITE | DELETE;
      return open_file(file.path_, access, CREATE_NEW, FILE_FLAG_DELETE_ON_CLOSE, share_nothing);
    });
    if (file.fd_ < 0 && errno != EEXIST) break;
  }
  if (file.fd_ < 0) return failed("create a file in", where, errno);
  // Only a sparse file releases blocks; without support for sparse files it keeps them.
  DWORD none = 0;
  (void)DeviceIoControl(handle_of(file.fd_), FSCTL_SET_SPARSE, nullptr, 0, nullptr, 0, &none,
                        nullptr);
  *out = std::move(file);
  return {};
}

void File::discard(uint64_t offset, uint64_t size) const {
  FILE_ZERO_DATA_INFORMATION range;
  range.FileOffset.QuadPart = static_cast<LONGLONG>(offset);
  range.BeyondFinalZero.QuadPart = static_cast<LONGLONG>(offset + size);
  DWORD none = 0;
  (void)DeviceIoControl(handle_of(fd_), FSCTL_SET_ZERO_DATA, &range, sizeof range, nullptr, 0,
                        &none, nullptr);
}

bool File::is_at(const std::string& path) const {
  const WidePath name(path);
  if (!name.good()) return false;
  const Handle other(CreateFileW(name.c_str(), FILE_READ_ATTRIBUTES, share_all, nullptr,
                                 OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, nullptr));
  BY_HANDLE_FILE_INFORMATION there, here;
  return other.good() && GetFileInformationByHandle(other, &there) &&
         GetFileInformationByHandle(handle_of(fd_), &here) &&
         there.dwVolumeSerialNumber == here.dwVolumeSerialNumber &&
         there.nFileIndexHigh == here.nFileIndexHigh && there.nFileIndexLow == here.nFileIndexLow;
}

Status File::size(uint64_t* out) const {
  LARGE_INTEGER size;
  if (!GetFileSizeEx(handle_of(fd_), &size) && failing() != 0)
    return failed("ask the size of", path_, errno);
  *out = static_cast<uint64_t>(size.QuadPart);
  return {};
}

// The system can fill several places only with whole pages past its cache.
Status File::read(uint64_t offset, std::span<const Piece> pieces) const {
  uint64_t left = 0;
  for (const Piece& piece : pieces) left += piece.size;
  if (offset + left < offset || offset + left > max_offset)
    return failed("read", path_, EOVERFLOW).with_offset(offset);
  std::size_t first = 0, skip = 0;  // the current piece, and the bytes of it that are filled
  while (left > 0) {
    while (skip == pieces[first].size) ++first, skip = 0;
    std::size_t part = std::min(pieces[first].size - skip, max_transfer);
    DWORD n = 0;
    bool at_end = false;
    const int result = transferred("read", path_, &part, [&] {
      OVERLAPPED place = at(offset);
      if (ReadFile(handle_of(fd_), static_cast<char*>(pieces[first].data) + skip,
                   static_cast<DWORD>(part), &n, &place))
        return 0;
      at_end = GetLastError() == ERROR_HANDLE_EOF;
      return at_end ? 0 : failing();
    });
    if (result != 0) return failed("read", path_, errno).with_offset(offset);
    if (at_end || n == 0) {
      return Status::error(Code::corrupt, "%s ends at byte %llu, %llu bytes too early",
                           shown(path_), static_cast<unsigned long long>(offset),
                           static_cast<unsigned long long>(left))
          .with_offset(offset);
    }
    offset += n;
    left -= n;
    skip += n;
  }
  return {};
}

Status File::write(uint64_t offset, const void* data, std::size_t size) {
  if (offset + size < offset || offset + size > max_offset)
    return failed("write", path_, EFBIG).with_offset(offset);
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    std::size_t part = std::min(size, max_transfer);
    DWORD n = 0;
    const int result = transferred("write", path_, &part, [&] {
      OVERLAPPED place = at(offset);
      return WriteFile(handle_of(fd_), from, static_cast<DWORD>(part), &n, &place) ? 0 : failing();
    });
    if (result != 0 || n == 0)
      return failed("write", path_, result != 0 ? errno : EIO).with_offset(offset);
    from += n;
    offset += n;
    size -= n;
  }
  return {};
}

static int set_end(HANDLE file, uint64_t size) {
  FILE_END_OF_FILE_INFO end;
  end.EndOfFile.QuadPart = static_cast<LONGLONG>(size);
  return SetFileInformationByHandle(file, FileEndOfFileInfo, &end, sizeof end) ? 0 : failing();
}

static int reserve_blocks(HANDLE file, uint64_t size) {
  FILE_ALLOCATION_INFO blocks;
  blocks.AllocationSize.QuadPart = static_cast<LONGLONG>(size);
  if (!SetFileInformationByHandle(file, FileAllocationInfo, &blocks, sizeof blocks)) {
    // Some systems report an unknown call as a wrong parameter.
    return failing(GetLastError() == ERROR_INVALID_PARAMETER ? ERROR_NOT_SUPPORTED
                                                             : GetLastError());
  }
  return set_end(file, size);
}

// For file systems that cannot reserve: sets the size, if enough space is free now.
static int extend_file(HANDLE file, const std::string& path, uint64_t more, uint64_t size) {
  const WidePath name(path);
  ULARGE_INTEGER free;
  if (name.good() && GetDiskFreeSpaceExW(name.folder().c_str(), &free, nullptr, nullptr) &&
      more > free.QuadPart)
    return failing(ERROR_DISK_FULL);
  return set_end(file, size);
}

Status File::preallocate(uint64_t size) {
  uint64_t now = 0;
  RETURN_IF_ERROR(this->size(&now));
  if (size <= now) return {};
  int result = -1;
  if (size > max_offset) {
    errno = EFBIG;
  } else {
    result = retried("preallocate", path_, [&] { return reserve_blocks(handle_of(fd_), size); });
    if (result != 0 && (errno == EOPNOTSUPP || errno == ENOTSUP || errno == ENOSYS))
      result = extend_file(handle_of(fd_), path_, size - now, size);
  }
  if (result == 0) return {};
  const int error = errno;
  char action[64];
  std::snprintf(action, sizeof action, "reserve %llu bytes for",
                static_cast<unsigned long long>(size));
  return failed(action, path_, error);
}

Status File::sync() {
  const int result =
      retried("sync", path_, [&] { return FlushFileBuffers(handle_of(fd_)) ? 0 : failing(); });
  if (result != 0) return failed("sync", path_, errno);
  return {};
}

Status File::close() {
  if (fd_ < 0) return {};
  const int failure = consult("close", path_);
  int error = CloseHandle(handle_of(std::exchange(fd_, -1))) || failing() == 0 ? 0 : errno;
  if (failure > 0) error = failure;
  return error == 0 || error == EINTR ? Status() : failed("close", path_, error);
}

Mapping::~Mapping() {
  if (data_) UnmapViewOfFile(data_);
}

Status Mapping::map(const File& file, uint64_t offset, uint64_t size, Mapping* out) {
  Mapping mapping;
  mapping.size_ = size;
  if (size > std::numeric_limits<std::size_t>::max())
    return Status::error(Code::limit, "%s is larger than the address space", shown(file.path_));
  if (size > 0) {
    const void* data = nullptr;
    const int result = retried("map", file.path_, [&] {
      const Handle section(
          CreateFileMappingW(handle_of(file.fd_), nullptr, PAGE_READONLY, 0, 0, nullptr));
      if (!section.good()) return failing();
      data = MapViewOfFile(section, FILE_MAP_READ, static_cast<DWORD>(offset >> 32),
                           static_cast<DWORD>(offset), static_cast<std::size_t>(size));
      return data ? 0 : failing();
    });
    if (result != 0) return failed("map", file.path_, errno);
    mapping.data_ = static_cast<const std::byte*>(data);
  }
  *out = std::move(mapping);
  return {};
}

// The system takes no advice about the order of reads.
void Mapping::advise(uint64_t offset, uint64_t size, Advice advice) const {
  if (offset >= size_) return;
  size = std::min(size, size_ - offset);
  void* const begin = const_cast<std::byte*>(data_) + offset;
  if (advice == Advice::will_need) {
    WIN32_MEMORY_RANGE_ENTRY range{begin, static_cast<std::size_t>(size)};
    (void)PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
  } else if (advice == Advice::dont_need) {
    // Unlocking pages that are not locked removes them from the working set.
    (void)VirtualUnlock(begin, static_cast<std::size_t>(size));
  }
}

}  // namespace kvasir::os
