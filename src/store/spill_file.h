// The sealed pages of sequences that a memory budget has no room for: whole extents, in a file
// without a name, which is gone with the process.
//
// An extent is as a slab has it and as a cache file has it: [layers][kv_heads][16 pages][4096].
// Extents are numbered as they come; one that is let go of gives its blocks back to the disk, and
// its number is not used again. What is read is what was written: nobody else can open the file.
// Threads: all functions may run together; the forks of a sequence share the file.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "os/file_reaper.h"
#include "os/os.h"
#include "store/page_cache.h"

namespace kvasir {

class SpillFile final : public PageSource {
 public:
  // Code::no_space, Code::permission, ... name the folder.
  // reaper: closes the file in the end; null: the destructor does.
  static Status create(const std::string& folder, uint64_t extent_bytes,
                       std::shared_ptr<os::FileReaper> reaper, std::shared_ptr<SpillFile>* out);
  ~SpillFile() override;

  // Code::no_space, Code::io: as if it had not been tried.
  Status append(const void* extent, uint32_t* index);
  void discard(uint32_t index);
  Status map(uint32_t index, os::Mapping* out) const {
    return os::Mapping::map(file_, index * extent_bytes_, extent_bytes_, out);
  }

  uint64_t extents() const override { return extents_; }
  Status read(uint64_t first, std::span<std::byte* const> to) const override;

 private:
  SpillFile(os::File file, uint64_t extent_bytes, std::shared_ptr<os::FileReaper> reaper)
      : reaper_(std::move(reaper)), file_(std::move(file)), extent_bytes_(extent_bytes) {}

  std::shared_ptr<os::FileReaper> reaper_;
  os::File file_;
  const uint64_t extent_bytes_;
  std::atomic<uint32_t> extents_{0};
};

}  // namespace kvasir
