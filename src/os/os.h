// The only seam to the operating system: files, read-only mappings, folders, processors, time.
// One implementation file a system (os_posix.cc). Everything above is portable C++.
//
// Paths are UTF-8. Errors name the path. EINTR is retried and short transfers are continued here, so callers
// see all of a transfer or an error. No function throws except on a failed small allocation.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"

namespace kvasir::os {

// A file handle. Closed by the destructor; move-only.
class File {
 public:
  File() = default;
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  static Status open_read(const std::string& path, File* out);
  // A new, empty file that nobody else can have opened, in the folder of `target` (so that a rename onto `target`
  // is atomic), named after it with a random ending. Mode 0666 less the umask.
  static Status create_temporary(const std::string& target, File* out);

  bool is_open() const { return fd_ >= 0; }
  const std::string& path() const { return path_; }

  Status size(uint64_t* out) const;
  Status read(uint64_t offset, void* data, std::size_t size) const;  // all of it, or Code::corrupt at the file's end
  // The same into several places, one after the other from `offset` on; as few system calls as the system allows.
  struct Piece {
    void* data;
    std::size_t size;
  };
  Status read(uint64_t offset, std::span<const Piece> pieces) const;
  Status write(uint64_t offset, const void* data, std::size_t size);
  Status preallocate(uint64_t size);  // reserves the blocks now, so that a full disk is known before the work
  Status sync();
  Status close();  // reports the error that the destructor would have to swallow

 private:
  friend class Mapping;
  int fd_ = -1;
  std::string path_;
};

// A read-only shared mapping of a whole file; an empty file has no data. Valid after the File is closed.
// Reading a page that another process has cut off the file raises SIGBUS: the size is checked when it is made.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  static Status map(const File& file, Mapping* out);

  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

  // Advice about a part of the mapping; failures are ignored, because it is advice.
  enum class Advice { sequential, random, will_need, dont_need };
  void advise(uint64_t offset, uint64_t size, Advice advice) const;

 private:
  const std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

Status rename_replace(const std::string& from, const std::string& to);  // atomic
Status sync_folder_of(const std::string& path);                         // makes the rename durable
Status remove_file(const std::string& path);

// Asks for the largest pages of memory that the system gives for what lies wholly in them; advice. What is touched then becomes resident
// by as much.
void prefer_huge_pages(void* data, std::size_t size);

uint32_t processor_count();  // those this process may use
uint64_t now_ns();           // monotonic

// A thread's name as debuggers and `top` show it.
void name_this_thread(const char* name);

// Tests set this to fail chosen operations: gets the operation's name ("open", "read", "write", "preallocate",
// "sync", "rename", "sync_folder", "map", "close", "remove") and its path, returns an errno to fail with, 0 to go on,
// or -1 to make a read or write transfer only part of what was asked in one system call. Null normally.
using Fault = int (*)(const char* operation, const char* path);
extern std::atomic<Fault> fault;

}  // namespace kvasir::os
