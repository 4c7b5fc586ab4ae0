// What File and Mapping do in the same way on every system.
#include <atomic>
#include <cinttypes>
#include <utility>

#include "os/os.h"

namespace kvasir::os {

std::atomic<Fault> fault{nullptr};

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), lock_fd_(std::exchange(other.lock_fd_, -1)),
      path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(lock_fd_, other.lock_fd_);
  std::swap(path_, other.path_);
  return *this;
}

Status File::read(uint64_t offset, void* data, std::size_t size) const {
  const Piece piece{data, size};
  return read(offset, {&piece, 1});
}

Status File::check_size(uint64_t bytes) const {
  uint64_t now = 0;
  RETURN_IF_ERROR(size(&now));
  if (now >= bytes) return {};
  return Status::error(Code::corrupt,
                       "%s was cut from %" PRIu64 " to %" PRIu64 " bytes while it was in use",
                       path_.c_str(), bytes, now)
      .with_offset(now);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Status Mapping::map(const File& file, Mapping* out) {
  uint64_t size = 0;
  RETURN_IF_ERROR(file.size(&size));
  return map(file, 0, size, out);
}

}  // namespace kvasir::os
