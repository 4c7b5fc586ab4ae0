// CacheWriter: gathers the bytes of sections into large writes and computes the blocks' checksums.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "cachefile/cache_file.h"
#include "cachefile/section_sizes.h"

namespace kvasir {

using namespace format;

namespace {

// Bytes of a write: they stay in a core's second-level cache between copy, checksum and write.
constexpr std::size_t gather_bytes = std::size_t{256} << 10;
static_assert(gather_bytes % block_bytes == 0);

Status misuse(const std::string& path, const char* reason) {
  return Status::error(Code::bad_state, "%s: %s", path.c_str(), reason);
}

}  // namespace

CacheWriter::CacheWriter(const std::string& path, const Identity& identity) : path_(path) {
  header_.identity = identity;
  const uint32_t needed = identity.latent               ? version
                          : identity.windows.layers > 0 ? windows_version
                                                        : plain_version;
  header_.version = header_.minimum_reader = needed;
}

Status CacheWriter::create(const std::string& path, const Identity& identity,
                           std::unique_ptr<CacheWriter>* out,
                           std::shared_ptr<os::FileReaper> reaper) {
  // Everything is allocated before the file exists, so that a failed allocation leaves none behind.
  std::unique_ptr<CacheWriter> writer(new CacheWriter(path, identity));
  writer->gather_ = make_buffer<std::byte>(gather_bytes);
  RETURN_IF_ERROR(writer->file_.create(path, std::move(reaper)));
  *out = std::move(writer);
  return {};
}

Status CacheWriter::add_section(SectionKind kind, uint32_t contents_version, uint64_t bytes) {
  if (begun_) return misuse(path_, "a section was added after the first write");
  if (header_.section_count == max_sections) {
    return Status::error(Code::limit, "%s: more than %u sections", path_.c_str(), max_sections);
  }
  const auto same = [kind](const CacheHeader::Entry& e) { return e.kind == kind; };
  const auto entries = header_.entries();
  if (is_known(kind) && std::any_of(entries.begin(), entries.end(), same)) {
    return misuse(path_, "a section was added twice");
  }
  CacheHeader::Entry& entry = header_.sections[header_.section_count];
  entry = {};
  entry.kind = kind;
  entry.version = contents_version;
  entry.flags = flags_of(kind);
  entry.bytes = bytes;
  ++header_.section_count;
  if (!header_.lay_out()) {
    --header_.section_count;
    return Status::error(Code::limit, "%s: a section of %llu bytes is too large", path_.c_str(),
                         static_cast<unsigned long long>(bytes));
  }
  total_ += bytes;
  return {};
}

Status CacheWriter::begin() {
  if (begun_) return misuse(path_, "begun twice");
  if (!header_.lay_out()) return Status::error(Code::internal, "%s has no layout", path_.c_str());
  if (Status s = check_section_sizes(header_, path_.c_str()); !s.ok())
    return misuse(path_, "a section is larger than a reader accepts");
  checksums_.reserve((header_.file_size - header_.tables_offset()) / sizeof(uint64_t));
  begun_ = true;
  enter_section();
  Status s = file_.file().preallocate(header_.file_size);
  broken_ = !s.ok();
  return s;
}

void CacheWriter::enter_section() {
  while (section_ < header_.section_count && position_ == header_.sections[section_].bytes) {
    ++section_;
    position_ = 0;
  }
}

Status CacheWriter::flush() {
  const uint64_t offset = header_.sections[section_].offset + position_ - gathered_;
  for (std::size_t i = 0; i < gathered_; i += block_bytes) {
    const std::size_t size = std::min<std::size_t>(block_bytes, gathered_ - i);
    checksums_.push_back(checksum(gather_.get() + i, size, offset + i));
  }
  Status s = file_.file().write(offset, gather_.get(), std::exchange(gathered_, 0));
  broken_ = !s.ok();
  return s;
}

Status CacheWriter::write(const void* data, std::size_t size) {
  if (!begun_ || broken_)
    return misuse(path_, broken_ ? "written to after a failure" : "written to before it was begun");
  if (size > total_ - written_) return misuse(path_, "more was written than its sections hold");
  const auto* from = static_cast<const std::byte*>(data);
  written_ += size;
  while (size > 0) {
    const uint64_t left = header_.sections[section_].bytes - position_;
    const std::size_t part =
        static_cast<std::size_t>(std::min<uint64_t>({size, left, gather_bytes - gathered_}));
    std::memcpy(gather_.get() + gathered_, from, part);
    gathered_ += part;
    position_ += part;
    from += part;
    size -= part;
    if (gathered_ == gather_bytes || part == left) {
      RETURN_IF_ERROR(flush());
      enter_section();
    }
  }
  return {};
}

Status CacheWriter::finish(const AtomicFile::BeforeRename& before_rename) {
  if (!file_.is_open() || !begun_ || broken_ || written_ != total_)
    return misuse(path_, "finished before all of it was written");
  const uint64_t* table = checksums_.data();
  for (CacheHeader::Entry& entry : header_.entries()) {
    entry.table_checksum = checksum(table, entry.table_bytes(), entry.table_offset);
    table += entry.blocks();
  }
  std::array<uint8_t, header_bytes> header;
  header_.encode(header);
  if (Status s = file_.file().write(header_.tables_offset(), checksums_.data(),
                                    checksums_.size() * sizeof(uint64_t));
      !s.ok()) {
    return s;
  }
  RETURN_IF_ERROR(file_.file().write(0, header.data(), header.size()));
  return file_.finish(before_rename);
}

}  // namespace kvasir
