#include "store/spill_file.h"

#include <algorithm>
#include <utility>

namespace kvasir {

Status SpillFile::create(const std::string& folder, uint64_t extent_bytes, std::size_t page_size,
                         std::shared_ptr<os::FileReaper> reaper, std::shared_ptr<SpillFile>* out) {
  os::File file;
  RETURN_IF_ERROR(os::File::create_nameless(folder, &file));
  out->reset(new SpillFile(std::move(file), extent_bytes, page_size, std::move(reaper)));
  return {};
}

SpillFile::~SpillFile() {
  if (reaper_) reaper_->close(std::move(file_));
}

Status SpillFile::append(const void* extent, uint32_t* index) {
  *index = extents_.fetch_add(1);
  if (Status s = file_.write(*index * extent_bytes_, extent, extent_bytes_); !s.ok()) {
    file_.discard(*index * extent_bytes_, extent_bytes_);
    return s;
  }
  return {};
}

void SpillFile::discard(uint32_t index) { file_.discard(index * extent_bytes_, extent_bytes_); }

Status SpillFile::read(uint64_t first, std::span<std::byte* const> to) const {
  os::File::Piece pieces[extent_pages];
  while (!to.empty()) {
    const std::size_t count = std::min<std::size_t>(to.size(), extent_pages);
    for (std::size_t i = 0; i < count; ++i) pieces[i] = {to[i], page_size_};
    RETURN_IF_ERROR(file_.read(first * page_size_, {pieces, count}));
    first += count;
    to = to.subspan(count);
  }
  return {};
}

}  // namespace kvasir
