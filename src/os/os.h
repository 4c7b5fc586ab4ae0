// The only seam to the operating system: files, read-only mappings, folders, CPUs, time. Two
// implementations, os_posix.cc and os_windows.cc, each with its helpers. All other code is portable
// C++.
//
// Paths are UTF-8. Errors name the path. Calls are repeated after EINTR and short transfers are
// continued, so callers see a whole transfer or an error. Functions throw only when a small
// allocation fails.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvasir::os {

// Locks are advisory, for whole files, and never wait. Other processes and other Files of this
// process respect them. They end with their File, or with the process in any case.
enum class Lock { shared, exclusive };

// Identifies a file and its version: the same identity means the same content, unless the file was
// written within the resolution of its times or by a process that sets them.
struct FileIdentity {
  uint64_t device = 0, number = 0;  // number: the inode
  uint64_t bytes = 0;
  uint64_t modified_ns = 0,
           changed_ns = 0;  // since 1970; also changes with name, owner and times
  bool operator==(const FileIdentity&) const = default;
};

// Whether an open file can be removed by name: not on Windows.
#ifdef _WIN32
constexpr bool removes_open_files = false;
#else
constexpr bool removes_open_files = true;
#endif

// A file handle. Closed by the destructor; move-only.
class File {
 public:
  File() = default;
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  static Status open_read(const std::string& path, File* out);
  // Creates an empty file that no other process can have opened, in the folder of `target` (so that
  // a rename onto `target` is atomic), with its name and a random suffix. Mode 0600. It is locked
  // exclusively until the destructor, even after close(): an unlocked one was left by a process
  // that ended.
  static Status create_temporary(const std::string& target, File* out);
  // Opens a file for locking only; creates it with mode 0600 if it is missing. A symbolic link is
  // refused.
  static Status open_lock(const std::string& path, File* out);
  // Opens an existing file for an exclusive lock: on network file systems that takes a writable
  // handle. A symbolic link is refused.
  static Status open_to_lock(const std::string& path, File* out);

  // Creates an empty file that no other process can open, in the folder ("": the system's folder
  // for large temporary files). It has no name, or on Windows is not shared. It disappears with its
  // last handle and mapping, also when the process is killed.
  static Status create_nameless(const std::string& folder, File* out);

  // Copies mode, owner, group and access list from the file at `path`, if there is one. An owner or
  // group that this process may not set stays its own; then the group gets the rights of others.
  // *changed: a sync must follow. Does nothing on Windows, where a file has the access list of its
  // folder.
  Status keep_access_of(const std::string& path, bool* changed);

  // Opens the same file again for reading: threads that read through one handle wait for each
  // other. Code::not_found when its path leads elsewhere now.
  Status reopen(File* out) const;

  bool is_open() const { return fd_ >= 0; }
  const std::string& path() const { return path_; }
  // Whether a path leads to this file, however it is spelled.
  bool is_at(const std::string& path) const;

  Status size(uint64_t* out) const;
  // Code::corrupt where the file has fewer bytes than that: a mapping of it would raise SIGBUS.
  Status check_size(uint64_t bytes) const;
  Status identity(FileIdentity* out) const;
  // Reads all bytes; Code::corrupt at the end of the file.
  Status read(uint64_t offset, void* data, std::size_t size) const;
  // Reads into several places, one after the other from `offset` on, with few system calls.
  struct Piece {
    void* data;
    std::size_t size;
  };
  Status read(uint64_t offset, std::span<const Piece> pieces) const;
  Status write(uint64_t offset, const void* data, std::size_t size);
  // Reserves the blocks now, so that a full disk is reported before the work.
  Status preallocate(uint64_t size);
  void unlock();  // releases the lock of create_temporary() early
  // *got is false when another lock conflicts.
  Status lock(Lock kind, bool* got) const;
  // Releases the blocks of a part of the file, which then reads as zeros; advice.
  void discard(uint64_t offset, uint64_t size) const;
  Status sync();
  Status close();  // reports the error that the destructor ignores

 private:
  friend class Mapping;
#ifdef _WIN32
  using Descriptor = std::intptr_t;  // a HANDLE, whose header is too large to include everywhere
#else
  using Descriptor = int;
#endif
  Descriptor fd_ = -1;
  Descriptor lock_fd_ = -1;  // the same open file: its lock outlasts close()
  std::string path_;
};

// A read-only shared mapping of a whole file; an empty file has no data. Valid after the File is
// closed. Reading a page that another process has truncated raises SIGBUS; the size is checked when
// the mapping is made. Windows does not truncate a mapped file; there, a page that a network or
// drive cannot deliver raises EXCEPTION_IN_PAGE_ERROR.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  static Status map(const File& file, Mapping* out);
  // Maps a part of the file; offset is a multiple of 64 KiB.
  static Status map(const File& file, uint64_t offset, uint64_t size, Mapping* out);

  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

  // Advice for a part of the mapping; failures are ignored.
  enum class Advice { normal, sequential, random, will_need, dont_need };
  void advise(uint64_t offset, uint64_t size, Advice advice) const;

 private:
  const std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// Atomic. On Windows a file in use is replaced where the system follows POSIX, which it may refuse
// for a mapped one; otherwise EBUSY and nothing is changed. A removed file may keep its name until
// its last handle is closed.
Status rename_replace(const std::string& from, const std::string& to);
Status sync_folder_of(const std::string& path);  // makes the rename durable
Status remove_file(const std::string& path);

// The absolute path: it stays valid when the current folder changes.
Status absolute_path(const std::string& path, std::string* out);
// The path at which a new file for `path` gets its name: the absolute path, or the target of a
// symbolic link. Refuses a link without a target, and one that belongs neither to the caller, nor
// to root, nor to the owner of the folder.
Status find_target(const std::string& path, std::string* out);
// Whether the name exists, also as a folder or a dangling link.
bool exists(const std::string& path);

struct FolderEntry {
  std::string name;
  uint64_t bytes = 0;
  uint64_t modified_ns = 0;  // since 1970
};
// Whether a non-empty name without a slash is valid for a file.
bool can_name_file(const std::string& name);
Status list_folder(const std::string& folder,
                   std::vector<FolderEntry>* out);  // its plain files, without links, in any order
Status make_folder(const std::string& folder);      // unless it exists; mode 0700
Status touch(const std::string& path);              // sets the modification time to now

// Whether create_temporary() makes such names.
bool is_temporary_name(std::string_view name);

// Advises the largest memory pages for the range. Touched memory then becomes resident in such
// pages.
void prefer_huge_pages(void* data, std::size_t size);
// Advises the smallest ones, for memory of which a part is touched here and there.
void prefer_small_pages(void* data, std::size_t size);

uint32_t cpu_count();        // that this process may use
uint64_t now_ns();           // monotonic
uint64_t physical_memory();  // bytes
// Bytes that this process could take without anything being paged out, in its control groups on
// Linux; physical_memory() where the system does not say.
uint64_t available_memory();
// Differs in every process: the author of a file cannot choose keys that collide.
uint64_t hash_seed();

// The number of the calling thread, in the order of first calls.
inline uint32_t thread_number() {
  static std::atomic<uint32_t> next{0};
  static thread_local const uint32_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

// Sets the name that debuggers and `top` show.
void name_this_thread(const char* name);

// Lowers the priority of the calling thread, for I/O too where possible; advice.
void lower_this_thread();

// Changes in the child of fork(), which has only the forking thread.
uint64_t process_id();

// Tests set this to fail chosen operations. It gets the operation ("open", "read", "write",
// "preallocate", "sync", "rename", "sync_folder", "map", "close", "remove", "lock", "list",
// "make_folder", "set_access", "touch") and its path. It returns an errno to fail with, 0 to go on,
// or -1 to make a read or write transfer only a part in one system call. Normally null.
using Fault = int (*)(const char* operation, const char* path);
extern std::atomic<Fault> fault;

}  // namespace kvasir::os
