#include "cachefile/packed_header.h"

#include <algorithm>
#include <cstring>

#include "backend/page.h"
#include "base/checked.h"
#include "base/checksum.h"
#include "base/little_endian.h"
#include "cachefile/cache_header.h"

namespace kvasir {

using namespace packed;

namespace {

constexpr uint64_t max_bytes = uint64_t{1} << 62;  // no sum below can wrap
constexpr uint64_t min_frame = 9;                  // the shortest zstd frame

Status corrupt(const char* path, uint64_t offset, const char* reason) {
  return Status::error(Code::corrupt, "%s is damaged: %s", path, reason).with_offset(offset);
}

unsigned long long printable(uint64_t value) { return value; }

bool all_zero(const uint8_t* p, uint64_t size) {
  return std::all_of(p, p + size, [](uint8_t b) { return b == 0; });
}

// As in CacheHeader, versions are checked after the header's checksum.
Status check_begin(std::span<const uint8_t> begin, uint64_t file_bytes, const char* path) {
  const std::size_t compared = std::min(begin.size(), magic.size());
  if (compared == 0)
    return Status::error(Code::not_a_cache, "%s is empty, not a packed document", path)
        .with_offset(0);
  if (!std::equal(begin.begin(), begin.begin() + static_cast<std::ptrdiff_t>(compared),
                  magic.begin())) {
    if (looks_like_text_damage(begin, magic[3]))
      return corrupt(path, 0,
                     "a transfer that took it for text changed its bytes; copy it again as binary");
    return Status::error(Code::not_a_cache, "%s is not a packed document", path).with_offset(0);
  }
  if (file_bytes < header_bytes) {
    return Status::error(Code::corrupt, "%s is truncated after %llu bytes, within its header", path,
                         printable(file_bytes))
        .with_offset(file_bytes);
  }
  const uint8_t* h = begin.data();
  if (load64(h + place_checksum) != checksum(h, place_checksum, header_seed))
    return corrupt(path, 0, "the header's checksum does not match");
  if (load32(h + place_byte_order) != format::byte_order)
    return corrupt(path, place_byte_order, "the byte order mark is wrong");
  const uint32_t written = load32(h + place_version), needed = load32(h + place_minimum_reader);
  if (needed > packed::version) {
    return Status::error(
               Code::version,
               "%s is packed in version %u and needs a reader of version %u; this one is %u", path,
               written, needed, packed::version)
        .with_offset(place_minimum_reader);
  }
  if (needed == 0 || needed > written)
    return corrupt(path, place_version, "the version numbers contradict each other");
  if (written < oldest_readable) {
    return Status::error(Code::version,
                         "%s is packed in version %u, which was written before the first release: "
                         "prefill the document again",
                         path, written)
        .with_offset(place_version);
  }
  for (const format::Field& f : header_fields)
    if (written <= packed::version && f.is == format::FieldIs::reserved &&
        !all_zero(h + f.offset, f.bytes))
      return corrupt(path, f.offset, "reserved bytes of the header are not zero");
  return {};
}

// All sizes must agree, and the file must end where the header says.
Status check_sizes(const PackedHeader& header, uint64_t file_bytes, const char* path) {
  if (header.document_bytes < format::header_bytes || header.document_bytes > max_bytes)
    return corrupt(path, place_document_bytes, "the document's size is impossible");
  if (header.packed_bytes < header_bytes || header.packed_bytes > max_bytes ||
      header.chunks() > (header.packed_bytes - header_bytes) / (chunk_header_bytes + min_frame))
    return corrupt(path, place_packed_bytes, "the file's size contradicts the document's");
  if (header.packed_bytes < min_packed_bytes(header.document_bytes))
    return corrupt(path, place_document_bytes, "it promises a document that is too large for it");
  const bool whole = header.pages_offset % PageShape::pages_bytes() == 0 &&
                     range_fits(header.pages_offset, header.pages_bytes, header.document_bytes);
  const uint32_t tokens = header.page_tokens;
  if (!whole || (tokens != 0 && tokens != 8 && tokens != 16 && tokens != 32 && tokens != 64))
    return corrupt(path, place_pages_offset, "the place of its pages is impossible");
  const auto* name = header.identity.model_name;
  if (std::find(name, name + sizeof header.identity.model_name, '\0') ==
      name + sizeof header.identity.model_name)
    return corrupt(path, place_model_name, "the model's name is not ended by zeros");
  return check_file_size(path, file_bytes, header.packed_bytes);
}

}  // namespace

bool is_packed(std::span<const uint8_t> begin) {
  return begin.size() >= magic.size() && std::equal(magic.begin(), magic.end(), begin.begin());
}

Status PackedHeader::check_document(const CacheHeader& document, const char* path) const {
  const format::Identity& is = document.identity;
  if (document.file_size != document_bytes || document.version != format_version ||
      is.layers != identity.layers || is.kv_heads != identity.kv_heads ||
      is.head_dim != identity.head_dim || is.tokens != identity.tokens ||
      std::memcmp(is.model_name, identity.model_name, sizeof is.model_name) != 0)
    return corrupt(path, place_document_bytes, "its header is of another document");
  return {};
}

uint64_t PackedHeader::chunks() const { return ceil_div(document_bytes, chunk_bytes); }

bool PackedHeader::has_pages(uint64_t offset, uint64_t size) const {
  return page_tokens != 0 && offset >= pages_offset &&
         range_fits(offset - pages_offset, size, pages_bytes);
}

void PackedHeader::encode(std::span<uint8_t, header_bytes> out) const {
  uint8_t* h = out.data();
  std::memset(h, 0, out.size());
  std::copy(magic.begin(), magic.end(), h);
  store32(h + place_version, packed::version);
  store32(h + place_minimum_reader, minimum_reader);
  store32(h + place_byte_order, format::byte_order);
  store32(h + place_level, level);
  store64(h + place_packed_bytes, packed_bytes);
  store64(h + place_document_bytes, document_bytes);
  store64(h + place_pages_offset, pages_offset);
  store64(h + place_pages_bytes, pages_bytes);
  store32(h + place_page_tokens, page_tokens);
  store32(h + place_layers, identity.layers);
  store32(h + place_kv_heads, identity.kv_heads);
  store32(h + place_head_dim, identity.head_dim);
  store64(h + place_tokens, identity.tokens);
  store32(h + place_format_version, format_version);
  std::memcpy(h + place_model_name, identity.model_name, sizeof identity.model_name);
  store64(h + place_content, content);
  store64(h + place_checksum, checksum(h, place_checksum, header_seed));
}

Status PackedHeader::decode(std::span<const uint8_t> begin, uint64_t file_bytes, const char* path,
                            PackedHeader* out) {
  RETURN_IF_ERROR(check_begin(begin, file_bytes, path));
  const uint8_t* h = begin.data();
  PackedHeader header;
  header.version = load32(h + place_version);
  header.level = load32(h + place_level);
  header.packed_bytes = load64(h + place_packed_bytes);
  header.document_bytes = load64(h + place_document_bytes);
  header.pages_offset = load64(h + place_pages_offset);
  header.pages_bytes = load64(h + place_pages_bytes);
  header.page_tokens = load32(h + place_page_tokens);
  header.identity.layers = load32(h + place_layers);
  header.identity.kv_heads = load32(h + place_kv_heads);
  header.identity.head_dim = load32(h + place_head_dim);
  header.identity.tokens = load64(h + place_tokens);
  header.format_version = load32(h + place_format_version);
  std::memcpy(header.identity.model_name, h + place_model_name, sizeof header.identity.model_name);
  header.content = load64(h + place_content);
  RETURN_IF_ERROR(check_sizes(header, file_bytes, path));
  *out = header;
  return {};
}

}  // namespace kvasir
