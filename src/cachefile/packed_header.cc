#include "cachefile/packed_header.h"

#include <algorithm>
#include <cstring>

#include "backend/page.h"
#include "base/checked.h"
#include "base/checksum.h"
#include "base/little_endian.h"
#include "cachefile/cache_header.h"
#include "cachefile/header_checks.h"

namespace kvasir {

namespace {

constexpr uint64_t max_bytes = uint64_t{1} << 62;  // no sum below can wrap
constexpr uint64_t min_frame = 9;                  // the shortest zstd frame

constexpr HeaderForm packed_form = {.magic = packed::magic,
                                    .what = "a packed document",
                                    .has_version = "is packed in version",
                                    .version = packed::version,
                                    .oldest_readable = packed::oldest_readable,
                                    .bytes = packed::header_bytes,
                                    .checksum_at = packed::header_at("checksum"),
                                    .seed = packed::header_seed};
static_assert(packed::header_at("version") == format::header_at("version") &&
              packed::header_at("minimum reader") == format::header_at("minimum reader") &&
              packed::header_at("byte order") == format::header_at("byte order"));

// All sizes must agree, and the file must end where the header says.
Status check_sizes(const PackedHeader& header, uint64_t file_bytes, const char* path) {
  if (header.document_bytes < format::header_bytes || header.document_bytes > max_bytes)
    return damaged_at(packed::header_at("document bytes"), path,
                      "the document's size is impossible");
  if (header.packed_bytes < packed::header_bytes || header.packed_bytes > max_bytes ||
      header.chunks() >
          (header.packed_bytes - packed::header_bytes) / (packed::chunk_header_bytes + min_frame))
    return damaged_at(packed::header_at("packed bytes"), path,
                      "the file's size contradicts the document's");
  if (header.packed_bytes < min_packed_bytes(header.document_bytes))
    return damaged_at(packed::header_at("document bytes"), path,
                      "it promises a document that is too large for it");
  const bool whole = header.pages_offset % PageShape::pages_bytes() == 0 &&
                     range_fits(header.pages_offset, header.pages_bytes, header.document_bytes);
  const uint32_t tokens = header.page_tokens;
  if (!whole ||
      (tokens != 0 && tokens != 4 && tokens != 8 && tokens != 16 && tokens != 32 && tokens != 64))
    return damaged_at(packed::header_at("pages offset"), path,
                      "the place of its pages is impossible");
  const auto* name = header.identity.model_name;
  if (std::find(name, name + sizeof header.identity.model_name, '\0') ==
      name + sizeof header.identity.model_name)
    return damaged_at(packed::header_at("model name"), path,
                      "the model's name is not ended by zeros");
  return check_file_size(path, file_bytes, header.packed_bytes);
}

}  // namespace

bool is_packed(std::span<const uint8_t> begin) { return starts_with(begin, packed::magic); }

Status PackedHeader::check_document(const CacheHeader& document, const char* path) const {
  const format::Identity& is = document.identity;
  if (document.file_size != document_bytes || document.version != format_version ||
      is.layers != identity.layers || is.kv_heads != identity.kv_heads ||
      is.head_dim != identity.head_dim || is.tokens != identity.tokens ||
      std::memcmp(is.model_name, identity.model_name, sizeof is.model_name) != 0)
    return damaged_at(packed::header_at("document bytes"), path,
                      "its header is of another document");
  return {};
}

uint64_t PackedHeader::chunks() const { return ceil_div(document_bytes, packed::chunk_bytes); }

bool PackedHeader::has_pages(uint64_t offset, uint64_t size) const {
  return page_tokens != 0 && offset >= pages_offset &&
         range_fits(offset - pages_offset, size, pages_bytes);
}

void PackedHeader::encode(std::span<uint8_t, packed::header_bytes> out) const {
  uint8_t* h = out.data();
  std::memset(h, 0, out.size());
  std::copy(packed::magic.begin(), packed::magic.end(), h);
  store32(h + packed::header_at("version"), packed::version);
  store32(h + packed::header_at("minimum reader"), packed::minimum_reader);
  store32(h + packed::header_at("byte order"), format::byte_order);
  store32(h + packed::header_at("level"), level);
  store64(h + packed::header_at("packed bytes"), packed_bytes);
  store64(h + packed::header_at("document bytes"), document_bytes);
  store64(h + packed::header_at("pages offset"), pages_offset);
  store64(h + packed::header_at("pages bytes"), pages_bytes);
  store32(h + packed::header_at("page tokens"), page_tokens);
  store32(h + packed::header_at("layers"), identity.layers);
  store32(h + packed::header_at("kv heads"), identity.kv_heads);
  store32(h + packed::header_at("head dim"), identity.head_dim);
  store64(h + packed::header_at("tokens"), identity.tokens);
  store32(h + packed::header_at("format version"), format_version);
  std::memcpy(h + packed::header_at("model name"), identity.model_name, sizeof identity.model_name);
  store64(h + packed::header_at("content"), content);
  store64(h + packed::header_at("checksum"),
          checksum(h, packed::header_at("checksum"), packed::header_seed));
}

Status PackedHeader::decode(std::span<const uint8_t> begin, uint64_t file_bytes, const char* path,
                            PackedHeader* out) {
  RETURN_IF_ERROR(check_magic(packed_form, begin, file_bytes, path));
  const uint8_t* h = begin.data();
  RETURN_IF_ERROR(check_version(packed_form, h, path));
  if (const format::Field* field = format::find_used_reserve(packed::header_fields, h);
      field && load32(h + packed::header_at("version")) <= packed::version)
    return damaged_at(field->offset, path, "reserved bytes of the header are not zero");
  PackedHeader header;
  header.version = load32(h + packed::header_at("version"));
  header.level = load32(h + packed::header_at("level"));
  header.packed_bytes = load64(h + packed::header_at("packed bytes"));
  header.document_bytes = load64(h + packed::header_at("document bytes"));
  header.pages_offset = load64(h + packed::header_at("pages offset"));
  header.pages_bytes = load64(h + packed::header_at("pages bytes"));
  header.page_tokens = load32(h + packed::header_at("page tokens"));
  header.identity.layers = load32(h + packed::header_at("layers"));
  header.identity.kv_heads = load32(h + packed::header_at("kv heads"));
  header.identity.head_dim = load32(h + packed::header_at("head dim"));
  header.identity.tokens = load64(h + packed::header_at("tokens"));
  header.format_version = load32(h + packed::header_at("format version"));
  std::memcpy(header.identity.model_name, h + packed::header_at("model name"),
              sizeof header.identity.model_name);
  header.content = load64(h + packed::header_at("content"));
  RETURN_IF_ERROR(check_sizes(header, file_bytes, path));
  *out = header;
  return {};
}

}  // namespace kvasir
