// Sealed pages that exceed the memory budget of their sequences: whole extents in a file without a
// name, which disappears with the process.
//
// An extent has the layout of a slab and of a cache file: [layers][kv_heads][16 pages][4096].
// Extents are numbered in order of arrival. A released extent returns its blocks to the disk, and
// its number is not used again. The content needs no checksums: no other process can open the file.
// Threads: all functions may be called at once; the forks of a sequence share the file.
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
  // Code::no_space, Code::permission, ... name the folder. reaper: closes the file; null: the
  // destructor does.
  static Status create(const std::string& folder, uint64_t extent_bytes, std::size_t page_size,
                       std::shared_ptr<os::FileReaper> reaper, std::shared_ptr<SpillFile>* out);
  ~SpillFile() override;

  // Code::no_space, Code::io: nothing has changed.
  Status append(const void* extent, uint32_t* index);
  void discard(uint32_t index);
  Status map(uint32_t index, os::Mapping* out) const {
    return os::Mapping::map(file_, index * extent_bytes_, extent_bytes_, out);
  }

  uint64_t extents() const override { return extents_; }
  std::size_t page_size() const override { return page_size_; }
  Status read(uint64_t first, std::span<std::byte* const> to) const override;

 private:
  SpillFile(os::File file, uint64_t extent_bytes, std::size_t page_size,
            std::shared_ptr<os::FileReaper> reaper)
      : reaper_(std::move(reaper)), file_(std::move(file)), extent_bytes_(extent_bytes),
        page_size_(page_size) {}

  std::shared_ptr<os::FileReaper> reaper_;
  os::File file_;
  const uint64_t extent_bytes_;
  const std::size_t page_size_;
  std::atomic<uint32_t> extents_{0};
};

}  // namespace kvasir
