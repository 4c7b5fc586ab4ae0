#include "cachefile/cache_verify.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/checksum.h"
#include "base/memory.h"

namespace kvasir {

using namespace format;

namespace {

constexpr uint64_t step_blocks =
    256;  // blocks between tests of the cancel token: 1 MiB, well under 1 ms
constexpr uint64_t step_bytes = step_blocks * block_bytes;

bool is_zero(const std::byte* p, uint64_t size) {
  return size == 0 || (p[0] == std::byte{0} && std::memcmp(p, p + 1, size - 1) == 0);
}

class Verifier {
 public:
  Verifier(const os::File& file, const CacheHeader& header, Progress* progress,
           const Cancel* cancel)
      : file_(file), header_(header), progress_(progress), cancel_(cancel),
        buffer_(make_buffer<std::byte>(step_bytes)) {}

  Status run() {
    RETURN_IF_ERROR(advance(0));
    for (const CacheHeader::Entry& section : header_.entries())
      RETURN_IF_ERROR(check_table(file_, section, cancel_, 0, nullptr));
    uint64_t end = header_bytes;  // end of the verified part
    for (const CacheHeader::Entry& section : header_.entries()) {
      RETURN_IF_ERROR(check_zero(end, section.offset));
      RETURN_IF_ERROR(check_blocks(section));
      end = section.offset + section.bytes;
    }
    RETURN_IF_ERROR(check_zero(end, header_.tables_offset()));
    return advance(header_.file_size);
  }

 private:
  Status advance(uint64_t done) {
    if (!is_cancelled(cancel_) && (!progress_ || progress_->update(done, header_.file_size)))
      return {};
    return Status::error(Code::cancelled, "the check of %s was stopped", file_.path().c_str());
  }

  // Reads the part of the table that a step needs again, because a table grows with its section.
  Status check_blocks(const CacheHeader::Entry& section) {
    std::array<uint64_t, step_blocks> table;
    for (uint64_t first = 0; first < section.blocks(); first += step_blocks) {
      const uint64_t at = section.offset + first * block_bytes,
                     blocks = std::min(step_blocks, section.blocks() - first);
      const auto size =
          static_cast<std::size_t>(std::min(step_bytes, section.bytes - first * block_bytes));
      RETURN_IF_ERROR(advance(at));
      RETURN_IF_ERROR(file_.read(section.table_offset + first * sizeof(uint64_t), table.data(),
                                 blocks * sizeof(uint64_t)));
      RETURN_IF_ERROR(file_.read(at, buffer_.get(), size));
      for (uint64_t b = 0; b < blocks; ++b) {
        const std::size_t in_step = b * block_bytes,
                          part = std::min<std::size_t>(block_bytes, size - in_step);
        if (checksum(buffer_.get() + in_step, part, at + in_step) != table[b])
          return section_damaged(file_, section, at + in_step);
      }
    }
    return {};
  }

  // Gaps between sections are shorter than section_align.
  Status check_zero(uint64_t begin, uint64_t end) {
    const auto size = static_cast<std::size_t>(end - begin);
    RETURN_IF_ERROR(file_.read(begin, buffer_.get(), size));
    if (is_zero(buffer_.get(), size)) return {};
    const auto* found = std::find_if(buffer_.get(), buffer_.get() + size,
                                     [](std::byte b) { return b != std::byte{0}; });
    const uint64_t at = begin + static_cast<uint64_t>(found - buffer_.get());
    return Status::error(Code::corrupt,
                         "%s is damaged: byte %llu, between its sections, is not zero",
                         file_.path().c_str(), static_cast<unsigned long long>(at))
        .with_offset(at);
  }

  const os::File& file_;
  const CacheHeader& header_;
  Progress* progress_;
  const Cancel* cancel_;
  Buffer<std::byte> buffer_;
};

}  // namespace

Status section_damaged(const os::File& file, const CacheHeader::Entry& section, uint64_t offset) {
  return Status::error(Code::corrupt, "%s is damaged: section %s at byte %llu of the file",
                       file.path().c_str(), name_of(section.kind),
                       static_cast<unsigned long long>(offset))
      .with_offset(offset);
}

Status table_damaged(const os::File& file, const CacheHeader::Entry& section) {
  return Status::error(Code::corrupt,
                       "%s is damaged: the checksum table of section %s at byte %llu",
                       file.path().c_str(), name_of(section.kind),
                       static_cast<unsigned long long>(section.table_offset))
      .with_offset(section.table_offset);
}

Status check_table(const os::File& file, const CacheHeader::Entry& section, const Cancel* cancel,
                   uint64_t first_blocks, uint64_t* out) {
  constexpr std::size_t piece_bytes = 65536;
  // not on the stack of the caller, which may be small
  const auto piece = make_buffer<std::byte>(piece_bytes);
  const uint64_t kept = first_blocks * sizeof(uint64_t);
  RunningChecksum sum(section.table_offset);
  for (uint64_t at = 0; at < section.table_bytes(); at += piece_bytes) {
    if (is_cancelled(cancel))
      return Status::error(Code::cancelled, "cancelled; %s was not checked", file.path().c_str());
    const auto size =
        static_cast<std::size_t>(std::min<uint64_t>(piece_bytes, section.table_bytes() - at));
    RETURN_IF_ERROR(file.read(section.table_offset + at, piece.get(), size));
    sum.add(piece.get(), size);
    if (at < kept)
      std::memcpy(out + at / sizeof(uint64_t), piece.get(),
                  static_cast<std::size_t>(std::min<uint64_t>(size, kept - at)));
  }
  return sum.value() == section.table_checksum ? Status() : table_damaged(file, section);
}

Status verify_cache(const os::File& file, const CacheHeader& header, Progress* progress,
                    const Cancel* cancel) {
  return Verifier(file, header, progress, cancel).run();
}

}  // namespace kvasir
