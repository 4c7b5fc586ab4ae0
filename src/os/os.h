// The only seam to the operating system: files, read-only mappings, folders, processors, time. Two
// implementations, os_posix.cc and os_windows.cc, each with its helpers beside it. Everything above
// is portable C++.
//
// Paths are UTF-8. Errors name the path. EINTR is retried and short transfers are continued here,
// so callers see all of a transfer or an error. No function throws except on a failed small
// allocation.
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

// Locks are of whole files, advisory, and not waited for. Other processes and other Files of this
// one see them. They end with their File, or with the process however it ends.
enum class Lock { shared, exclusive };

// Which file a handle leads to, and whether it has been written since: a file of the same identity
// has the same contents, unless it was written within the resolution of its times or by who sets
// them.
struct FileIdentity {
  uint64_t device = 0, number = 0;  // number: the inode
  uint64_t bytes = 0;
  uint64_t modified_ns = 0,
           changed_ns = 0;  // since 1970; changed also when its name, owner or times are set
  bool operator==(const FileIdentity&) const = default;
};

// Whether an open file can be removed by its name: not on Windows.
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
  // A new, empty file that nobody else can have opened, in the folder of `target` (so that a rename
  // onto `target` is atomic), named after it with a random ending. Only its owner may use it: mode
  // 0600. Locked exclusively until the destructor, also when it has been closed: what others find
  // without a lock was left by a writer that is gone.
  static Status create_temporary(const std::string& target, File* out);
  // To be locked and nothing else; created where there is none, for its owner alone. A symbolic
  // link is refused.
  static Status open_lock(const std::string& path, File* out);
  // A file that is there, to be locked exclusively: on network file systems that takes a handle
  // that could write. A symbolic link is refused.
  static Status open_to_lock(const std::string& path, File* out);

  // A new, empty file in the folder ("": where the system keeps large temporary files) that no
  // other process can open: it has no name, or on Windows is not shared. Gone with its last handle
  // and mapping, also when the process is killed.
  static Status create_nameless(const std::string& folder, File* out);

  // Takes over the mode, owner, group and access list of the file at `path`, where there is one. An
  // owner or a group that this process cannot give stays its own; then the group gets the rights of
  // everybody. *changed says whether a sync has to follow. Does nothing on Windows, where a file
  // has the access list of its folder.
  Status keep_access_of(const std::string& path, bool* changed);

  // The very file to be read, opened once more: threads that read by the same handle wait for each
  // other. Code::not_found where its path leads elsewhere now.
  Status reopen(File* out) const;

  bool is_open() const { return fd_ >= 0; }
  const std::string& path() const { return path_; }
  // whether a path leads to this very file, however it is written
  bool is_at(const std::string& path) const;

  Status size(uint64_t* out) const;
  Status identity(FileIdentity* out) const;
  // all of it, or Code::corrupt at the file's end
  Status read(uint64_t offset, void* data, std::size_t size) const;
  // The same into several places, one after the other from `offset` on; as few system calls as the
  // system allows.
  struct Piece {
    void* data;
    std::size_t size;
  };
  Status read(uint64_t offset, std::span<const Piece> pieces) const;
  Status write(uint64_t offset, const void* data, std::size_t size);
  // reserves the blocks now, so that a full disk is known before the work
  Status preallocate(uint64_t size);
  void unlock();  // what create_temporary locked, before the destructor
  // *got is false where another has a lock that this one cannot stand beside
  Status lock(Lock kind, bool* got) const;
  // Gives the blocks of a part of the file back, which reads as zeros from then on; advice.
  void discard(uint64_t offset, uint64_t size) const;
  Status sync();
  Status close();  // reports the error that the destructor would have to swallow

 private:
  friend class Mapping;
#ifdef _WIN32
  using Descriptor = std::intptr_t;  // a HANDLE, whose header would be in every file
#else
  using Descriptor = int;
#endif
  Descriptor fd_ = -1;
  Descriptor lock_fd_ = -1;  // the same open file, so that its lock outlasts close()
  std::string path_;
};

// A read-only shared mapping of a whole file; an empty file has no data. Valid after the File is
// closed. Reading a page that another process has cut off the file raises SIGBUS: the size is
// checked when it is made. Windows does not let a mapped file be cut; there a page that a network
// or a drive does not give any more raises EXCEPTION_IN_PAGE_ERROR.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  static Status map(const File& file, Mapping* out);
  // A part of it; offset is a multiple of 64 KiB. The part is within the file.
  static Status map(const File& file, uint64_t offset, uint64_t size, Mapping* out);

  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

  // Advice about a part of the mapping; failures are ignored, because it is advice.
  enum class Advice { sequential, random, will_need, dont_need };
  void advise(uint64_t offset, uint64_t size, Advice advice) const;

 private:
  const std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// Atomic. On Windows a file that is in use is replaced where the system does it as POSIX says,
// which of a mapped one it need not; otherwise EBUSY, and nothing is changed. Removed, it may keep
// its name until nobody has it.
Status rename_replace(const std::string& from, const std::string& to);
Status sync_folder_of(const std::string& path);  // makes the rename durable
Status remove_file(const std::string& path);

// The path from the root: it leads to the same place when the current folder has changed.
Status absolute_path(const std::string& path, std::string* out);
// Where a new file for `path` gets its name: the absolute path, of a symbolic link the path of the
// file that it leads to. Refuses a link to no file, and one that belongs neither to the caller, nor
// to root, nor to the folder's owner.
Status find_target(const std::string& path, std::string* out);
// Whether the name is taken, also by a folder or a symbolic link to nothing.
bool exists(const std::string& path);

struct FolderEntry {
  std::string name;
  uint64_t bytes = 0;
  uint64_t modified_ns = 0;  // since 1970
};
// Whether a file may have this name, which is not empty and has no slash.
bool can_name_file(const std::string& name);
Status list_folder(const std::string& folder,
                   std::vector<FolderEntry>* out);  // its plain files, no links, in no order
Status make_folder(const std::string& folder);      // unless there is one; mode 0700
Status touch(const std::string& path);              // modified now

// Whether a name is one that create_temporary() gives.
bool is_temporary_name(std::string_view name);

// Asks for the largest pages of memory that the system gives for what lies wholly in them; advice.
// What is touched then becomes resident by as much.
void prefer_huge_pages(void* data, std::size_t size);

uint32_t processor_count();  // those this process may use
uint64_t now_ns();           // monotonic
uint64_t physical_memory();  // bytes that the machine has
// another in every process: who writes a file cannot choose what collides in its tables
uint64_t hash_seed();

// Of the calling thread, in the order in which threads first asked.
inline uint32_t thread_number() {
  static std::atomic<uint32_t> next{0};
  static thread_local const uint32_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

// A thread's name as debuggers and `top` show it.
void name_this_thread(const char* name);

// The calling thread gives way to others, also in its reads where the system can do that; advice.
void lower_this_thread();

// Another one in the child of a fork(), which has no thread but the one that forked.
uint64_t process_id();

// Tests set this to fail chosen operations: gets the operation's name ("open", "read", "write",
// "preallocate", "sync", "rename", "sync_folder", "map", "close", "remove", "lock", "list",
// "make_folder", "set_access", "touch") and its path, returns an errno to fail with, 0 to go on, or
// -1 to make a read or write transfer only part of what was asked in one system call. Null
// normally.
using Fault = int (*)(const char* operation, const char* path);
extern std::atomic<Fault> fault;

}  // namespace kvasir::os
