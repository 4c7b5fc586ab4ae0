// The seam to Linux and macOS: operations on open files. posix_opening.cc opens and creates them,
// posix_folders.cc has the operations on folders.
//
// A write beyond RLIMIT_FSIZE raises SIGXFSZ, which ends a host without a handler. A library must
// not install handlers, so operations that grow a file check the limit first.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "os/calls.h"
#include "os/cgroup_memory.h"

#if !defined(__linux__) && !defined(__APPLE__)
#error "os_posix.cc supports Linux and macOS; another system needs its own file"
#endif

namespace kvasir::os {

namespace {

// The most bytes per system call: macOS refuses more than INT_MAX; Linux stops at 2 GiB less a
// page.
constexpr std::size_t max_transfer = std::size_t{1} << 30;

// Whether a file may grow to `size` bytes under this process's limit.
bool within_file_limit(uint64_t size) {
  if (size > static_cast<uint64_t>(std::numeric_limits<off_t>::max())) return false;
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return true;
  return size <= limit.rlim_cur;
}

}  // namespace

File::~File() {
  if (fd_ >= 0) ::close(fd_);
  if (lock_fd_ >= 0) ::close(lock_fd_);
}

void File::unlock() {
  if (lock_fd_ >= 0) ::close(std::exchange(lock_fd_, -1));
}

Status File::lock(Lock kind, bool* got) const {
  *got = false;
  const int how = (kind == Lock::exclusive ? LOCK_EX : LOCK_SH) | LOCK_NB;
  const int result = retried("lock", path_, [&] { return flock(fd_, how); });
  if (result != 0 && errno != EWOULDBLOCK) return failed("lock", path_, errno);
  *got = result == 0;
  return {};
}

void File::discard([[maybe_unused]] uint64_t offset, [[maybe_unused]] uint64_t size) const {
#ifdef FALLOC_FL_PUNCH_HOLE
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(size));
#endif
}

bool File::is_at(const std::string& path) const {
  struct stat there, here;
  return stat(path.c_str(), &there) == 0 && fstat(fd_, &here) == 0 && there.st_dev == here.st_dev &&
         there.st_ino == here.st_ino;
}

Status File::size(uint64_t* out) const {
  struct stat info;
  if (fstat(fd_, &info) != 0) return failed("ask the size of", path_, errno);
  *out = static_cast<uint64_t>(info.st_size);
  return {};
}

Status File::read(uint64_t offset, std::span<const Piece> pieces) const {
  uint64_t left = 0;
  for (const Piece& piece : pieces) left += piece.size;
  if (offset + left < offset ||
      offset + left > static_cast<uint64_t>(std::numeric_limits<off_t>::max())) {
    return failed("read", path_, EOVERFLOW).with_offset(offset);
  }
  std::size_t first = 0, skip = 0;  // the current piece, and the bytes of it that are filled
  while (left > 0) {
    while (skip == pieces[first].size) ++first, skip = 0;
    constexpr std::size_t max_parts = 64;  // well under IOV_MAX
    iovec parts[max_parts];
    int count = 0;
    std::size_t requested = 0;
    for (std::size_t i = first;
         i < pieces.size() && count < static_cast<int>(max_parts) && requested < max_transfer;
         ++i) {
      const std::size_t done = i == first ? skip : 0;
      const std::size_t size = std::min(pieces[i].size - done, max_transfer - requested);
      parts[count++] = {static_cast<char*>(pieces[i].data) + done, size};
      requested += size;
    }
    const int failure = consult("read", path_);
    if (failure < 0) {  // a partial transfer
      count = 1;
      parts[0].iov_len -= parts[0].iov_len / 2;
    }
    ssize_t n = -1;
    if (failure > 0) {
      errno = failure;
    } else {
      n = count == 1 ? pread(fd_, parts[0].iov_base, parts[0].iov_len, static_cast<off_t>(offset))
                     : preadv(fd_, parts, count, static_cast<off_t>(offset));
    }
    if (n < 0) {
      if (errno == EINTR) continue;
      return failed("read", path_, errno).with_offset(offset);
    }
    if (n == 0) {
      return Status::error(Code::corrupt, "%s ends at byte %llu, %llu bytes too early",
                           shown(path_), static_cast<unsigned long long>(offset),
                           static_cast<unsigned long long>(left))
          .with_offset(offset);
    }
    offset += static_cast<uint64_t>(n);
    left -= static_cast<uint64_t>(n);
    skip += static_cast<std::size_t>(n);
    while (skip > pieces[first].size) skip -= pieces[first++].size;
  }
  return {};
}

Status File::write(uint64_t offset, const void* data, std::size_t size) {
  if (offset + size < offset || !within_file_limit(offset + size)) {
    return failed("write", path_, EFBIG).with_offset(offset);
  }
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    std::size_t part = std::min(size, max_transfer);
    const int failure = consult("write", path_);
    if (failure < 0) part = part - part / 2;
    ssize_t n = -1;
    if (failure > 0) {
      errno = failure;
    } else {
      n = pwrite(fd_, from, part, static_cast<off_t>(offset));
    }
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return failed("write", path_, n < 0 ? errno : EIO).with_offset(offset);
    from += n;
    offset += static_cast<uint64_t>(n);
    size -= static_cast<std::size_t>(n);
  }
  return {};
}

// Not posix_fallocate: where the file system cannot reserve, it writes every block.
static int reserve_blocks(int fd, uint64_t size) {
#ifdef __APPLE__
  fstore_t want = {F_ALLOCATEALL, F_PEOFPOSMODE, 0, static_cast<off_t>(size), 0};
  if (fcntl(fd, F_PREALLOCATE, &want) != 0) return -1;
  return ftruncate(fd, static_cast<off_t>(size));
#else
  return fallocate(fd, 0, 0, static_cast<off_t>(size));
#endif
}

// For file systems that cannot reserve: sets the size, if enough space is free now.
static int extend_file(int fd, uint64_t size) {
  struct statvfs space;
  if (fstatvfs(fd, &space) == 0 && space.f_blocks != 0) {
    const uint64_t unit = space.f_frsize ? space.f_frsize : space.f_bsize;
    if (unit != 0 && size / unit > space.f_bavail) {
      errno = ENOSPC;
      return -1;
    }
  }
  return ftruncate(fd, static_cast<off_t>(size));
}

Status File::preallocate(uint64_t size) {
  if (size == 0) return {};
  int result = -1;
  if (!within_file_limit(size)) {
    errno = EFBIG;
  } else {
    result = retried("preallocate", path_, [&] { return reserve_blocks(fd_, size); });
    if (result != 0 && (errno == EOPNOTSUPP || errno == ENOTSUP || errno == ENOSYS)) {
      result = retried("preallocate", path_, [&] { return extend_file(fd_, size); });
    }
  }
  if (result == 0) return {};
  const int error = errno;
  char action[64];
  std::snprintf(action, sizeof action, "reserve %llu bytes for",
                static_cast<unsigned long long>(size));
  return failed(action, path_, error);
}

static int sync_descriptor(int fd) {
#ifdef __APPLE__
  // fsync on macOS stops at the cache of the drive.
  if (fcntl(fd, F_FULLFSYNC) == 0) return 0;
  if (errno == EIO || errno == EINTR) return -1;
#endif
  return fsync(fd);
}

Status File::sync() {
  const int result = retried("sync", path_, [&] { return sync_descriptor(fd_); });
  if (result != 0) return failed("sync", path_, errno);
  return {};
}

Status File::close() {
  if (fd_ < 0) return {};
  const int failure = consult("close", path_);
  int error = ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno;
  if (failure > 0) error = failure;
  // After EINTR the descriptor is closed; closing it again could hit a new file of another thread.
  if (error == 0 || error == EINTR) return {};
  return failed("close", path_, error);
}

Mapping::~Mapping() {
  if (data_) munmap(const_cast<std::byte*>(data_), static_cast<std::size_t>(size_));
}

Status Mapping::map(const File& file, uint64_t offset, uint64_t size, Mapping* out) {
  Mapping mapping;
  mapping.size_ = size;
  if (mapping.size_ > std::numeric_limits<std::size_t>::max()) {
    return Status::error(Code::limit, "%s is larger than the address space", shown(file.path_));
  }
  if (mapping.size_ > 0) {
    void* data = MAP_FAILED;
    const int result = retried("map", file.path_, [&] {
      data = mmap(nullptr, static_cast<std::size_t>(mapping.size_), PROT_READ, MAP_SHARED, file.fd_,
                  static_cast<off_t>(offset));
      return data == MAP_FAILED ? -1 : 0;
    });
    if (result != 0) return failed("map", file.path_, errno);
    mapping.data_ = static_cast<const std::byte*>(data);
  }
  *out = std::move(mapping);
  return {};
}

void Mapping::advise(uint64_t offset, uint64_t size, Advice advice) const {
  if (offset >= size_) return;
  size = std::min(size, size_ - offset);
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = offset / page * page;
  int flag = MADV_NORMAL;
  switch (advice) {
    case Advice::normal:
      break;
    case Advice::sequential:
      flag = MADV_SEQUENTIAL;
      break;
    case Advice::random:
      flag = MADV_RANDOM;
      break;
    case Advice::will_need:
      flag = MADV_WILLNEED;
      break;
    case Advice::dont_need:
      flag = MADV_DONTNEED;
      break;
  }
  (void)madvise(const_cast<std::byte*>(data_) + begin,
                static_cast<std::size_t>(offset + size - begin), flag);
}

Status rename_replace(const std::string& from, const std::string& to) {
  if (retried("rename", to, [&] { return std::rename(from.c_str(), to.c_str()); }) != 0)
    return failed("replace", to, errno);
  return {};
}

Status sync_folder_of(const std::string& path) {
  const std::string folder = folder_of(path);
  const int fd = retried("sync_folder", folder, [&] {
    return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  });
  if (fd < 0) return failed("open the folder", folder, errno);
  int result = -1;
  do {
    result = sync_descriptor(fd);
  } while (result != 0 && errno == EINTR);
  const int error = errno;
  ::close(fd);
  // Some file systems cannot sync a folder and return these errors.
  if (result != 0 && error != EINVAL && error != ENOTSUP && error != EOPNOTSUPP) {
    return failed("sync the folder", folder, error);
  }
  return {};
}

Status remove_file(const std::string& path) {
  const int result = retried("remove", path, [&] { return ::unlink(path.c_str()); });
  if (result != 0) return failed("remove", path, errno);
  return {};
}

// On whole huge pages: x86-64's, and aarch64's with pages of 4 KiB.
[[maybe_unused]] static void advise_huge(void* data, std::size_t size, int advice) {
  constexpr uintptr_t huge = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + huge - 1) / huge * huge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / huge * huge;
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t size) {
#ifdef __linux__
  advise_huge(data, size, MADV_HUGEPAGE);
#endif
}

void prefer_small_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t size) {
#ifdef __linux__
  advise_huge(data, size, MADV_NOHUGEPAGE);
#endif
}

uint32_t cpu_count() {
#ifdef __linux__
  // The kernel's mask may be wider than cpu_set_t: grows until it fits.
  for (std::size_t processors = CPU_SETSIZE; processors <= (std::size_t{1} << 18);
       processors *= 2) {
    cpu_set_t* set = CPU_ALLOC(processors);
    if (!set) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(processors);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    const int count = known ? CPU_COUNT_S(bytes, set) : 0;
    const int error = errno;
    CPU_FREE(set);
    if (known) return count > 0 ? static_cast<uint32_t>(count) : 1;
    if (error != EINVAL) break;
  }
#endif
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<uint32_t>(online) : 1;
}

uint64_t physical_memory() {
  const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
  return pages > 0 && size > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(size)
                               : UINT64_MAX;
}

uint64_t available_memory() {
#ifdef __linux__
  if (std::FILE* file = std::fopen("/proc/meminfo", "re")) {
    constexpr char name[] = "MemAvailable:";
    char line[128];
    uint64_t kib = 0;
    bool found = false;
    while (!found && std::fgets(line, sizeof line, file)) {
      found = std::strncmp(line, name, sizeof name - 1) == 0;
      for (const char* c = line + sizeof name - 1; found && *c; ++c)
        if (*c >= '0' && *c <= '9') kib = kib * 10 + static_cast<uint64_t>(*c - '0');
    }
    (void)std::fclose(file);
    if (found)
      return std::min(kib * 1024, cgroup_memory_left("/sys/fs/cgroup", "/proc/self/cgroup"));
  }
#endif
  return physical_memory();
}

uint64_t hash_seed() {
  static const uint64_t seed = [] {
    uint64_t random;
    // Where a sandbox forbids it, the time is still unknown to the author of a file.
    return getentropy(&random, sizeof random) == 0 ? random : now_ns() * 0x9E3779B97F4A7C15u;
  }();
  return seed;
}

uint64_t now_ns() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

void name_this_thread(const char* name) {
  char cut[16];  // Linux takes 15 bytes and refuses more
  std::snprintf(cut, sizeof cut, "%s", name);
#ifdef __APPLE__
  pthread_setname_np(cut);
#else
  pthread_setname_np(pthread_self(), cut);
#endif
}

}  // namespace kvasir::os
