#include "cachefile/cache_header.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/checksum.h"
#include "base/little_endian.h"
#include "cachefile/header_checks.h"
#include "cachefile/packed_header.h"
#include "cachefile/section_sizes.h"

namespace kvasir {

using namespace format;

namespace {

using Bytes = std::span<const uint8_t>;

bool all_zero(Bytes bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0; });
}

std::size_t name_length(const Identity& identity) {
  const char* begin = identity.model_name;
  return static_cast<std::size_t>(std::find(begin, begin + sizeof identity.model_name, '\0') -
                                  begin);
}

constexpr HeaderForm cache_form = {.magic = magic,
                                   .what = "a cache file",
                                   .has_version = "has format version",
                                   .version = format::version,
                                   .oldest_readable = oldest_readable,
                                   .bytes = header_bytes,
                                   .checksum_at = header_at("checksum"),
                                   .seed = header_seed};

Status check_kind(Bytes begin, const char* path) {
  constexpr uint8_t gguf[] = {'G', 'G', 'U', 'F'};
  if (is_packed(begin))
    return Status::error(Code::not_a_cache,
                         "%s is a packed document: unpack it first (kv_unpack, kvasir unpack)",
                         path)
        .with_offset(0);
  if (starts_with(begin, gguf))
    return Status::error(Code::not_a_cache, "%s is a GGUF model, not a cache file", path)
        .with_offset(0);
  return {};
}

Status decode_identity(const uint8_t* h, const char* path, Identity* out) {
  std::copy_n(h + header_at("model"), out->model.size(), out->model.begin());
  out->layers = load32(h + header_at("layers"));
  out->kv_heads = load32(h + header_at("kv heads"));
  out->head_dim = load32(h + header_at("head dim"));
  out->vocabulary = load32(h + header_at("vocabulary"));
  out->tokens = load64(h + header_at("tokens"));
  std::memcpy(out->model_name, h + header_at("model name"), sizeof out->model_name);
  std::copy_n(h + header_at("model hash"), out->model_hash.size(), out->model_hash.begin());
  out->windows = {
      load32(h + header_at("windows layers")), load32(h + header_at("windows kv heads")),
      load32(h + header_at("windows head dim")), load64(h + header_at("windows tokens"))};
  const uint32_t latent = load32(h + header_at("values in keys"));
  if (latent > 1) return damaged_at(header_at("values in keys"), path, "it is neither 0 nor 1");
  out->latent = latent == 1;
  const std::size_t length = name_length(*out);
  if (!all_zero({h + header_at("model name") + length, sizeof out->model_name - length}) ||
      length == sizeof out->model_name) {
    return damaged_at(header_at("model name"), path, "the model's name is not ended by zeros");
  }
  return {};
}

CacheHeader::Entry decode_entry(const uint8_t* e) {
  CacheHeader::Entry entry;
  entry.kind = static_cast<SectionKind>(load32(e + entry_at("kind")));
  entry.version = load32(e + entry_at("version"));
  entry.flags = load32(e + entry_at("flags"));
  entry.offset = load64(e + entry_at("offset"));
  entry.bytes = load64(e + entry_at("size"));
  entry.table_offset = load64(e + entry_at("table offset"));
  entry.table_checksum = load64(e + entry_at("table checksum"));
  return entry;
}

// A newer writer that this reader may still read may use reserved bytes; other writers must leave
// zeros.
Status check_reserved(const uint8_t* h, uint32_t section_count, const char* path) {
  if (const Field* field = find_used_reserve(header_fields, h))
    return damaged_at(field->offset, path, "reserved bytes of the header are not zero");
  const uint32_t written = load32(h + header_at("version"));
  if (written < version && load32(h + header_at("values in keys")) != 0)
    return damaged_at(header_at("values in keys"), path, "its version has values of their own");
  if (written < windows_version && !all_zero({h + header_at("windows layers"), 24}))
    return damaged_at(header_at("windows layers"), path, "its version has no windows");
  for (uint32_t i = 0; i < section_count; ++i) {
    const uint64_t place = header_at("sections") + i * entry_bytes;
    if (load32(h + place + entry_at("flags")) & ~optional_section) {
      return damaged_at(place + entry_at("flags"), path, "a section has unknown flags");
    }
    if (find_used_reserve(entry_fields, h + place))
      return damaged_at(place, path, "reserved bytes of the section table are not zero");
  }
  const uint64_t end = header_at("sections") + section_count * entry_bytes,
                 table_end = header_at("sections") + max_sections * entry_bytes;
  if (!all_zero({h + end, table_end - end})) {
    return damaged_at(end, path, "bytes after the section table are not zero");
  }
  return {};
}

Status check_kinds(const CacheHeader& header, const char* path) {
  uint64_t seen = 0;  // bit k: known kind k has occurred
  for (uint32_t i = 0; i < header.section_count; ++i) {
    const CacheHeader::Entry& entry = header.sections[i];
    const uint64_t place = header_at("sections") + i * entry_bytes + entry_at("kind");
    const auto kind = static_cast<uint32_t>(entry.kind);
    if (is_known(entry.kind)) {
      if (seen >> kind & 1) return damaged_at(place, path, "a section occurs twice");
      seen |= uint64_t{1} << kind;
    } else if (!(entry.flags & optional_section)) {
      return Status::error(Code::version,
                           "%s has a section of kind %u, which is unknown and not optional", path,
                           kind)
          .with_offset(place);
    }
  }
  return {};
}

// Every offset must be the computed one, and the file must end at the end of the layout.
Status check_layout(const CacheHeader& header, uint64_t actual_size, const char* path) {
  CacheHeader expected = header;
  if (!expected.lay_out())
    return damaged_at(header_at("sections"), path, "the sections' sizes are impossible");
  for (uint32_t i = 0; i < header.section_count; ++i) {
    const CacheHeader::Entry &is = header.sections[i], &must = expected.sections[i];
    const uint64_t place = header_at("sections") + i * entry_bytes;
    if (is.offset != must.offset)
      return damaged_at(place + entry_at("offset"), path, "a section is not where it must be");
    if (is.table_offset != must.table_offset) {
      return damaged_at(place + entry_at("table offset"), path,
                        "a checksum table is not where it must be");
    }
  }
  if (header.file_size != expected.file_size) {
    return damaged_at(header_at("file size"), path,
                      "the file's size does not follow from its sections");
  }
  return check_file_size(path, actual_size, header.file_size);
}

}  // namespace

uint64_t CacheHeader::Entry::blocks() const { return ceil_div(bytes, block_bytes); }

uint64_t CacheHeader::tables_offset() const {
  if (section_count == 0) return header_bytes;
  const Entry& last = sections[section_count - 1];
  return round_up(last.offset + last.bytes, block_bytes);
}

bool CacheHeader::lay_out() {
  constexpr uint64_t max_bytes = uint64_t{1} << 62;  // no sum below can wrap
  uint64_t end = header_bytes;
  for (Entry& entry : entries()) {
    if (entry.bytes > max_bytes) return false;
    entry.offset = round_up(end, section_align);
    end = entry.offset + entry.bytes;
    if (end > max_bytes) return false;
  }
  end = tables_offset();
  for (Entry& entry : entries()) {
    entry.table_offset = end;
    end += entry.table_bytes();
    if (end > max_bytes) return false;
  }
  file_size = end;
  return true;
}

void CacheHeader::encode(std::span<uint8_t, header_bytes> out) const {
  uint8_t* h = out.data();
  std::memset(h, 0, out.size());
  std::copy(magic.begin(), magic.end(), h + header_at("magic"));
  store32(h + header_at("version"), version);
  store32(h + header_at("minimum reader"), minimum_reader);
  store32(h + header_at("byte order"), byte_order);
  store32(h + header_at("section count"), section_count);
  store64(h + header_at("file size"), file_size);
  std::copy(identity.model.begin(), identity.model.end(), h + header_at("model"));
  store32(h + header_at("layers"), identity.layers);
  store32(h + header_at("kv heads"), identity.kv_heads);
  store32(h + header_at("head dim"), identity.head_dim);
  store32(h + header_at("vocabulary"), identity.vocabulary);
  store64(h + header_at("tokens"), identity.tokens);
  std::copy(identity.model_hash.begin(), identity.model_hash.end(), h + header_at("model hash"));
  store32(h + header_at("windows layers"), identity.windows.layers);
  store32(h + header_at("windows kv heads"), identity.windows.kv_heads);
  store32(h + header_at("windows head dim"), identity.windows.head_dim);
  store32(h + header_at("values in keys"), identity.latent ? 1 : 0);
  store64(h + header_at("windows tokens"), identity.windows.tokens);
  std::memcpy(h + header_at("model name"), identity.model_name,
              std::min(name_length(identity), sizeof identity.model_name - 1));
  for (uint32_t i = 0; i < section_count; ++i) {
    const Entry& entry = sections[i];
    uint8_t* e = h + header_at("sections") + i * entry_bytes;
    store32(e + entry_at("kind"), static_cast<uint32_t>(entry.kind));
    store32(e + entry_at("version"), entry.version);
    store32(e + entry_at("flags"), entry.flags);
    store64(e + entry_at("offset"), entry.offset);
    store64(e + entry_at("size"), entry.bytes);
    store64(e + entry_at("table offset"), entry.table_offset);
    store64(e + entry_at("table checksum"), entry.table_checksum);
  }
  store64(h + header_at("checksum"), checksum(h, header_at("checksum"), header_seed));
}

Status CacheHeader::decode(Bytes begin, uint64_t actual_size, const char* path, CacheHeader* out) {
  RETURN_IF_ERROR(check_kind(begin, path));
  RETURN_IF_ERROR(check_magic(cache_form, begin, actual_size, path));
  const uint8_t* h = begin.data();
  RETURN_IF_ERROR(check_version(cache_form, h, path));
  CacheHeader header;
  header.version = load32(h + header_at("version"));
  header.minimum_reader = load32(h + header_at("minimum reader"));
  header.file_size = load64(h + header_at("file size"));
  header.own_checksum = load64(h + header_at("checksum"));
  RETURN_IF_ERROR(decode_identity(h, path, &header.identity));
  header.section_count = load32(h + header_at("section count"));
  if (header.section_count > max_sections)
    return damaged_at(header_at("section count"), path, "it has too many sections");
  for (uint32_t i = 0; i < header.section_count; ++i) {
    header.sections[i] = decode_entry(h + header_at("sections") + i * entry_bytes);
  }
  if (header.version <= format::version) {
    RETURN_IF_ERROR(check_reserved(h, header.section_count, path));
  }
  RETURN_IF_ERROR(check_kinds(header, path));
  RETURN_IF_ERROR(check_layout(header, actual_size, path));
  RETURN_IF_ERROR(check_section_sizes(header, path));
  *out = header;
  return {};
}

}  // namespace kvasir
