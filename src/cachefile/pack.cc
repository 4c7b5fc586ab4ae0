#include "cachefile/pack.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "base/checked.h"
#include "base/checksum.h"
#include "base/little_endian.h"
#include "base/memory.h"
#include "cachefile/atomic_file.h"
#include "cachefile/cache_header.h"
#include "cachefile/split_pages.h"

namespace kvasir {

using packed::chunk_bytes, packed::chunk_header_bytes;

namespace {

// zstd computes frequencies per block of this size, so that the keys and the values of an extent
// get their own. The cancel token is tested as often: the slowest level takes 40 ms per block.
constexpr std::size_t piece_bytes = PageShape::pages_bytes() / 2;
static_assert(chunk_bytes % PageShape::pages_bytes() == 0 &&
              format::section_align == PageShape::pages_bytes());

constexpr std::size_t skippable_head = 8;  // u32 magic, u32 bytes that follow
static_assert(2 * chunk_bytes / packed::max_ratio + skippable_head < chunk_bytes,
              "a chunk that is made longer has room");

struct FreeZstd {
  void operator()(ZSTD_CCtx* c) const { ZSTD_freeCCtx(c); }
  void operator()(ZSTD_DCtx* c) const { ZSTD_freeDCtx(c); }
};

Status same_file(const std::string& path) {
  return Status::error(Code::bad_argument, "%s is source and destination: name another file",
                       path.c_str());
}

Status no_memory(const std::string& path) {
  return Status::error(Code::no_memory, "out of memory; %s is unchanged", path.c_str());
}

// The operation and the file that a failure leaves unchanged.
struct Work {
  const std::string& from;
  const std::string& to;
  Progress* progress;
  const Cancel* cancel;

  Status stopped() const {
    return Status::error(Code::cancelled, "stopped; %s is unchanged", to.c_str());
  }
  Status advance(uint64_t done, uint64_t total) const {
    return is_cancelled(cancel) || (progress && !progress->update(done, total)) ? stopped()
                                                                                : Status();
  }
  Status damaged(uint64_t offset, const char* reason) const {
    return Status::error(Code::corrupt, "%s is damaged at byte %llu: %s; %s is unchanged",
                         from.c_str(), static_cast<unsigned long long>(offset), reason, to.c_str())
        .with_offset(offset);
  }
};

// Puts the extents of a chunk into the order of split_pages(), or back; copies what is no page.
void reorder(const PackedHeader& header, uint64_t offset, uint64_t size, const uint8_t* from,
             uint8_t* to, void (*pages)(uint32_t page_tokens, const uint8_t* from, uint8_t* to)) {
  for (uint64_t at = 0; at < size; at += PageShape::pages_bytes()) {
    const uint64_t part = std::min<uint64_t>(size - at, PageShape::pages_bytes());
    if (part == PageShape::pages_bytes() && header.has_pages(offset + at, part)) {
      pages(header.page_tokens, from + at, to + at);
    } else {
      std::memcpy(to + at, from + at, part);
    }
  }
}

class Packer {
 public:
  Packer(const Work& work, uint32_t level) : work_(work) { header_.level = level; }

  Status run() {
    RETURN_IF_ERROR(open());
    uint64_t end = packed::header_bytes;  // bytes written
    for (uint64_t at = 0; at < header_.document_bytes; at += chunk_bytes) {
      const auto size =
          static_cast<std::size_t>(std::min(chunk_bytes, header_.document_bytes - at));
      RETURN_IF_ERROR(in_.read(at, plain_.get(), size));
      header_.content = checksum(plain_.get(), size, header_.content);
      reorder(header_, at, size, plain_.get(), split_.get(), split_pages);
      std::size_t packed_size = 0;
      RETURN_IF_ERROR(compress(at, size, &packed_size));
      packed_size +=
          pad(end + chunk_header_bytes + packed_size, min_packed_bytes(at + size), packed_size);
      RETURN_IF_ERROR(write_chunk(packed_size, &end));
    }
    header_.packed_bytes = end;
    std::array<uint8_t, packed::header_bytes> begin;
    header_.encode(begin);
    RETURN_IF_ERROR(out_.file().write(0, begin.data(), begin.size()));
    RETURN_IF_ERROR(work_.advance(header_.document_bytes, header_.document_bytes));
    return out_.finish();
  }

 private:
  // Everything is allocated before the file exists.
  Status open() {
    plain_ = make_buffer<uint8_t>(chunk_bytes);
    RETURN_IF_ERROR(describe());
    split_ = make_buffer<uint8_t>(chunk_bytes);
    // Ending a block per piece costs a few bytes more than ZSTD_compressBound() allows for.
    room_ = ZSTD_compressBound(chunk_bytes) + 64 * (chunk_bytes / piece_bytes);
    packed_ = make_buffer<uint8_t>(chunk_header_bytes + room_);
    zstd_.reset(ZSTD_createCCtx());
    if (!zstd_) return no_memory(work_.to);
    // Every level in our range is valid.
    (void)ZSTD_CCtx_setParameter(zstd_.get(), ZSTD_c_compressionLevel,
                                 static_cast<int>(header_.level));
    return out_.create(work_.to);
  }

  // Reads only the header and the checksum tables: memory does not grow with the file.
  Status describe() {
    RETURN_IF_ERROR(os::File::open_read(work_.from, &in_));
    if (in_.is_at(work_.to)) return same_file(work_.to);
    uint64_t size = 0;
    RETURN_IF_ERROR(in_.size(&size));
    const auto readable = static_cast<std::size_t>(std::min(size, format::header_bytes));
    RETURN_IF_ERROR(in_.read(0, plain_.get(), readable));
    CacheHeader document;
    RETURN_IF_ERROR(
        CacheHeader::decode({plain_.get(), readable}, size, work_.from.c_str(), &document));
    header_.document_bytes = document.file_size;
    header_.format_version = document.version;
    header_.identity = document.identity;
    const uint32_t head_dim = document.identity.head_dim;
    for (const CacheHeader::Entry& section : document.entries()) {
      RETURN_IF_ERROR(check_table(section));
      // Pages without values have nothing to be divided into.
      if (section.kind != format::SectionKind::pages || document.identity.latent || head_dim < 1 ||
          head_dim > max_head_dim)
        continue;
      header_.pages_offset = section.offset;
      header_.pages_bytes = section.bytes;
      header_.page_tokens = PageShape::of(head_dim).page_tokens;
    }
    return {};
  }

  Status check_table(const CacheHeader::Entry& section) {
    RunningChecksum table(section.table_offset);
    for (uint64_t at = 0; at < section.table_bytes(); at += chunk_bytes) {
      if (is_cancelled(work_.cancel)) return work_.stopped();
      const auto size = static_cast<std::size_t>(std::min(chunk_bytes, section.table_bytes() - at));
      RETURN_IF_ERROR(in_.read(section.table_offset + at, plain_.get(), size));
      table.add(plain_.get(), size);
    }
    return table.value() == section.table_checksum
               ? Status()
               : work_.damaged(section.table_offset, "a checksum table does not match");
  }

  Status compress(uint64_t offset, std::size_t size, std::size_t* packed_size) {
    ZSTD_CCtx_reset(zstd_.get(), ZSTD_reset_session_only);
    ZSTD_CCtx_setPledgedSrcSize(zstd_.get(), size);
    ZSTD_outBuffer to{packed_.get() + chunk_header_bytes, room_, 0};
    for (std::size_t at = 0; at < size; at += piece_bytes) {
      RETURN_IF_ERROR(work_.advance(offset + at, header_.document_bytes));
      const std::size_t part = std::min(size - at, piece_bytes);
      ZSTD_inBuffer from{split_.get() + at, part, 0};
      const std::size_t left = ZSTD_compressStream2(zstd_.get(), &to, &from,
                                                    at + part == size ? ZSTD_e_end : ZSTD_e_flush);
      // Its only failure with valid parameters.
      if (ZSTD_isError(left)) return no_memory(work_.to);
      if (left != 0 || from.pos != part)
        return Status::error(Code::internal, "zstd exceeded its own size bound");
    }
    *packed_size = to.pos;
    return {};
  }

  // Pads a chunk whose zeros packed to less than a reader accepts: a frame that zstd skips. Returns
  // the frame's bytes. At most what this chunk adds to the minimum is missing.
  std::size_t pad(uint64_t end, uint64_t min_end, std::size_t packed_size) {
    if (end >= min_end) return 0;
    const auto size = static_cast<std::size_t>(std::max<uint64_t>(min_end - end, skippable_head));
    uint8_t* frame = packed_.get() + chunk_header_bytes + packed_size;
    std::memset(frame, 0, size);
    store32(frame, ZSTD_MAGIC_SKIPPABLE_START);
    store32(frame + 4, static_cast<uint32_t>(size - skippable_head));
    return size;
  }

  Status write_chunk(std::size_t size, uint64_t* end) {
    uint8_t* chunk = packed_.get();
    store32(chunk, static_cast<uint32_t>(size));
    store32(chunk + 4, 0);
    store64(chunk + 8, checksum(chunk + chunk_header_bytes, size, *end + chunk_header_bytes));
    RETURN_IF_ERROR(out_.file().write(*end, chunk, chunk_header_bytes + size));
    *end += chunk_header_bytes + size;
    return {};
  }

  const Work& work_;
  PackedHeader header_;
  os::File in_;
  AtomicFile out_;
  // A chunk: plain, reordered, and compressed behind its header.
  Buffer<uint8_t> plain_, split_, packed_;
  std::size_t room_ = 0;  // for the compressed bytes
  std::unique_ptr<ZSTD_CCtx, FreeZstd> zstd_;
};

Status open_packed(const std::string& path, os::File* file, PackedHeader* header) {
  RETURN_IF_ERROR(os::File::open_read(path, file));
  uint64_t size = 0;
  RETURN_IF_ERROR(file->size(&size));
  std::array<uint8_t, packed::header_bytes> begin;
  const auto readable = static_cast<std::size_t>(std::min(size, packed::header_bytes));
  RETURN_IF_ERROR(file->read(0, begin.data(), readable));
  return PackedHeader::decode({begin.data(), readable}, size, path.c_str(), header);
}

class Unpacker {
 public:
  explicit Unpacker(const Work& work) : work_(work) {}

  Status run() {
    RETURN_IF_ERROR(open());
    uint64_t position = packed::header_bytes, content = 0;
    for (uint64_t at = 0; at < header_.document_bytes; at += chunk_bytes) {
      RETURN_IF_ERROR(work_.advance(at, header_.document_bytes));
      const auto size =
          static_cast<std::size_t>(std::min(chunk_bytes, header_.document_bytes - at));
      RETURN_IF_ERROR(read_chunk(size, &position));
      if (position < min_packed_bytes(at + size))
        return work_.damaged(position, "it unpacks to more than 64 times its size");
      reorder(header_, at, size, split_.get(), plain_.get(), join_pages);
      content = checksum(plain_.get(), size, content);
      if (at == 0) RETURN_IF_ERROR(begin({plain_.get(), size}));
      // Space is allocated as chunks arrive, so a header that claims too much reserves nothing.
      RETURN_IF_ERROR(out_.file().write(at, plain_.get(), size));
    }
    if (position != header_.packed_bytes)
      return work_.damaged(position, "there is more than its document");
    if (content != header_.content)
      return work_.damaged(packed::header_at("content"), "what it holds is not what was packed");
    RETURN_IF_ERROR(work_.advance(header_.document_bytes, header_.document_bytes));
    return out_.finish();
  }

 private:
  Status open() {
    RETURN_IF_ERROR(open_packed(work_.from, &in_, &header_));
    if (in_.is_at(work_.to)) return same_file(work_.to);
    plain_ = make_buffer<uint8_t>(chunk_bytes);
    split_ = make_buffer<uint8_t>(chunk_bytes);
    room_ = ZSTD_compressBound(chunk_bytes) + 64 * (chunk_bytes / piece_bytes);
    packed_ = make_buffer<uint8_t>(room_);
    zstd_.reset(ZSTD_createDCtx());
    if (!zstd_) return no_memory(work_.to);
    return {};
  }

  // The document's first bytes, checked before the file exists: only a cache is written.
  Status begin(std::span<const uint8_t> bytes) {
    const std::string document = work_.from + " (its document)";
    CacheHeader header;
    RETURN_IF_ERROR(CacheHeader::decode(bytes.first(format::header_bytes), header_.document_bytes,
                                        document.c_str(), &header));
    RETURN_IF_ERROR(header_.check_document(header, work_.from.c_str()));
    return out_.create(work_.to);
  }

  // Reads one chunk into split_. Its checksum is verified before use, and zstd gets no more room
  // than the chunk has.
  Status read_chunk(std::size_t size, uint64_t* position) {
    const uint64_t begin = *position;
    std::array<uint8_t, chunk_header_bytes> head;
    if (!range_fits(begin, head.size(), header_.packed_bytes))
      return work_.damaged(begin, "a chunk is missing");
    RETURN_IF_ERROR(in_.read(begin, head.data(), head.size()));
    const std::size_t packed_size = load32(head.data());
    const uint64_t data = begin + head.size();
    if (packed_size > room_ || load32(head.data() + 4) != 0 ||
        !range_fits(data, packed_size, header_.packed_bytes))
      return work_.damaged(begin, "a chunk's size is impossible");
    RETURN_IF_ERROR(in_.read(data, packed_.get(), packed_size));
    if (checksum(packed_.get(), packed_size, data) != load64(head.data() + 8))
      return work_.damaged(begin, "a chunk's checksum does not match");
    if (ZSTD_decompressDCtx(zstd_.get(), split_.get(), size, packed_.get(), packed_size) != size)
      return work_.damaged(data, "a chunk holds something else than its part of the document");
    *position = data + packed_size;
    return {};
  }

  const Work& work_;
  PackedHeader header_;
  os::File in_;
  AtomicFile out_;
  Buffer<uint8_t> plain_, split_, packed_;
  std::size_t room_ = 0;
  std::unique_ptr<ZSTD_DCtx, FreeZstd> zstd_;
};

}  // namespace

Status pack(const std::string& path, const std::string& packed_path, uint32_t level,
            Progress* progress, const Cancel* cancel) {
  const Work work{path, packed_path, progress, cancel};
  return Packer(work, level).run();
}

Status unpack(const std::string& packed_path, const std::string& path, Progress* progress,
              const Cancel* cancel) {
  const Work work{packed_path, path, progress, cancel};
  return Unpacker(work).run();
}

const char* zstd_version() { return ZSTD_versionString(); }

Status read_packed_header(const std::string& packed_path, PackedHeader* out) {
  os::File file;
  return open_packed(packed_path, &file, out);
}

}  // namespace kvasir
