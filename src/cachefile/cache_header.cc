#include "cachefile/cache_header.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/checksum.h"
#include "base/little_endian.h"
#include "cachefile/format_fields.h"
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

unsigned long long printable(uint64_t value) { return value; }

Status corrupt(const char* path, uint64_t offset, const char* reason) {
  return Status::error(Code::corrupt, "%s is damaged: %s", path, reason).with_offset(offset);
}

bool starts_with(Bytes bytes, std::initializer_list<uint8_t> prefix) {
  return bytes.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), bytes.begin());
}

// Checks the first bytes of the file.
Status check_magic(Bytes begin, uint64_t file_size, const char* path) {
  const std::size_t compared = std::min(begin.size(), magic.size());
  if (compared == 0)
    return Status::error(Code::not_a_cache, "%s is empty, not a cache file", path).with_offset(0);
  if (!std::equal(begin.begin(), begin.begin() + static_cast<std::ptrdiff_t>(compared),
                  magic.begin())) {
    if (looks_like_text_damage(begin, magic[3])) {
      return corrupt(path, 0,
                     "a transfer that took it for text changed its bytes; copy it again as binary");
    }
    if (is_packed(begin)) {
      return Status::error(Code::not_a_cache,
                           "%s is a packed document: unpack it first (kv_unpack, kvasir unpack)",
                           path)
          .with_offset(0);
    }
    if (starts_with(begin, {'G', 'G', 'U', 'F'})) {
      return Status::error(Code::not_a_cache, "%s is a GGUF model, not a cache file", path)
          .with_offset(0);
    }
    return Status::error(Code::not_a_cache, "%s is not a cache file", path).with_offset(0);
  }
  if (file_size < header_bytes) {
    return Status::error(Code::corrupt, "%s is truncated after %llu bytes, within its header", path,
                         printable(file_size))
        .with_offset(file_size);
  }
  return {};
}

// Runs after the check of the header's checksum, so that a flipped bit is not taken for a newer
// format.
Status check_version(const uint8_t* h, const char* path) {
  if (load64(h + place_checksum) != checksum(h, place_checksum, header_seed)) {
    return corrupt(path, 0, "the header's checksum does not match");
  }
  const uint32_t order = load32(h + place_byte_order);
  if (order == __builtin_bswap32(byte_order)) {
    return Status::error(Code::version,
                         "%s was written in big-endian order, which this reader does not support",
                         path)
        .with_offset(place_byte_order);
  }
  if (order != byte_order) return corrupt(path, place_byte_order, "the byte order mark is wrong");
  const uint32_t written = load32(h + place_version), needed = load32(h + place_minimum_reader);
  if (needed > version) {
    return Status::error(
               Code::version,
               "%s has format version %u and needs a reader of version %u; this one is %u", path,
               written, needed, version)
        .with_offset(place_minimum_reader);
  }
  if (written == 0 || needed == 0 || needed > written) {
    return corrupt(path, place_version, "the version numbers contradict each other");
  }
  if (written < oldest_readable) {
    return Status::error(Code::version,
                         "%s has format version %u, which was written before the first release: "
                         "prefill the document again",
                         path, written)
        .with_offset(place_version);
  }
  return {};
}

Status decode_identity(const uint8_t* h, const char* path, Identity* out) {
  std::copy_n(h + place_model, out->model.size(), out->model.begin());
  out->layers = load32(h + place_layers);
  out->kv_heads = load32(h + place_kv_heads);
  out->head_dim = load32(h + place_head_dim);
  out->vocabulary = load32(h + place_vocabulary);
  out->tokens = load64(h + place_tokens);
  std::memcpy(out->model_name, h + place_model_name, sizeof out->model_name);
  std::copy_n(h + place_model_hash, out->model_hash.size(), out->model_hash.begin());
  out->windows = {load32(h + place_windows_layers), load32(h + place_windows_kv_heads),
                  load32(h + place_windows_head_dim), load64(h + place_windows_tokens)};
  const std::size_t length = name_length(*out);
  if (!all_zero({h + place_model_name + length, sizeof out->model_name - length}) ||
      length == sizeof out->model_name) {
    return corrupt(path, place_model_name, "the model's name is not ended by zeros");
  }
  return {};
}

CacheHeader::Entry decode_entry(const uint8_t* e) {
  CacheHeader::Entry entry;
  entry.kind = static_cast<SectionKind>(load32(e + entry_kind));
  entry.version = load32(e + entry_version);
  entry.flags = load32(e + entry_flags);
  entry.offset = load64(e + entry_offset);
  entry.bytes = load64(e + entry_size);
  entry.table_offset = load64(e + entry_table_offset);
  entry.table_checksum = load64(e + entry_table_checksum);
  return entry;
}

bool is_reserved_zero(const uint8_t* begin, std::span<const Field> fields) {
  return std::all_of(fields.begin(), fields.end(), [&](const Field& f) {
    return f.is != FieldIs::reserved || all_zero({begin + f.offset, f.bytes});
  });
}

// A newer writer that this reader may still read may use reserved bytes; other writers must leave
// zeros.
Status check_reserved(const uint8_t* h, uint32_t section_count, const char* path) {
  for (const Field& f : header_fields)
    if (f.is == FieldIs::reserved && !all_zero({h + f.offset, f.bytes}))
      return corrupt(path, f.offset, "reserved bytes of the header are not zero");
  const bool has_windows = load32(h + place_version) > plain_version;
  if (!has_windows && !all_zero({h + place_windows_layers, 24}))
    return corrupt(path, place_windows_layers, "its version has no windows");
  for (uint32_t i = 0; i < section_count; ++i) {
    const uint64_t place = place_sections + i * entry_bytes;
    if (load32(h + place + entry_flags) & ~optional_section) {
      return corrupt(path, place + entry_flags, "a section has unknown flags");
    }
    if (!is_reserved_zero(h + place, entry_fields))
      return corrupt(path, place, "reserved bytes of the section table are not zero");
  }
  const uint64_t end = place_sections + section_count * entry_bytes,
                 table_end = place_sections + max_sections * entry_bytes;
  if (!all_zero({h + end, table_end - end})) {
    return corrupt(path, end, "bytes after the section table are not zero");
  }
  return {};
}

Status check_kinds(const CacheHeader& header, const char* path) {
  uint64_t seen = 0;  // bit k: known kind k has occurred
  for (uint32_t i = 0; i < header.section_count; ++i) {
    const CacheHeader::Entry& entry = header.sections[i];
    const uint64_t place = place_sections + i * entry_bytes + entry_kind;
    const auto kind = static_cast<uint32_t>(entry.kind);
    if (is_known(entry.kind)) {
      if (seen >> kind & 1) return corrupt(path, place, "a section occurs twice");
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
    return corrupt(path, place_sections, "the sections' sizes are impossible");
  for (uint32_t i = 0; i < header.section_count; ++i) {
    const CacheHeader::Entry &is = header.sections[i], &must = expected.sections[i];
    const uint64_t place = place_sections + i * entry_bytes;
    if (is.offset != must.offset)
      return corrupt(path, place + entry_offset, "a section is not where it must be");
    if (is.table_offset != must.table_offset) {
      return corrupt(path, place + entry_table_offset, "a checksum table is not where it must be");
    }
  }
  if (header.file_size != expected.file_size) {
    return corrupt(path, place_file_size, "the file's size does not follow from its sections");
  }
  return check_file_size(path, actual_size, header.file_size);
}

}  // namespace

Status check_file_size(const char* path, uint64_t is, uint64_t must) {
  if (is < must)
    return Status::error(Code::corrupt, "%s is truncated: it has %llu of its %llu bytes", path,
                         printable(is), printable(must))
        .with_offset(is);
  if (is > must)
    return Status::error(Code::corrupt, "%s has %llu extra bytes at its end", path,
                         printable(is - must))
        .with_offset(must);
  return {};
}

bool looks_like_text_damage(Bytes b, uint8_t kind) {
  return starts_with(b, {0x8B, 'K', 'V', kind}) || starts_with(b, {0x0B, 'K', 'V', kind}) ||
         starts_with(b, {0xC2, 0x8B, 'K', 'V', kind}) ||
         starts_with(b, {0xEF, 0xBF, 0xBD, 'K', 'V', kind}) ||
         starts_with(b, {'?', 'K', 'V', kind, '\r', '\n', 0x1A});
}

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
  std::copy(magic.begin(), magic.end(), h + place_magic);
  store32(h + place_version, version);
  store32(h + place_minimum_reader, minimum_reader);
  store32(h + place_byte_order, byte_order);
  store32(h + place_section_count, section_count);
  store64(h + place_file_size, file_size);
  std::copy(identity.model.begin(), identity.model.end(), h + place_model);
  store32(h + place_layers, identity.layers);
  store32(h + place_kv_heads, identity.kv_heads);
  store32(h + place_head_dim, identity.head_dim);
  store32(h + place_vocabulary, identity.vocabulary);
  store64(h + place_tokens, identity.tokens);
  std::copy(identity.model_hash.begin(), identity.model_hash.end(), h + place_model_hash);
  store32(h + place_windows_layers, identity.windows.layers);
  store32(h + place_windows_kv_heads, identity.windows.kv_heads);
  store32(h + place_windows_head_dim, identity.windows.head_dim);
  store64(h + place_windows_tokens, identity.windows.tokens);
  std::memcpy(h + place_model_name, identity.model_name,
              std::min(name_length(identity), sizeof identity.model_name - 1));
  for (uint32_t i = 0; i < section_count; ++i) {
    const Entry& entry = sections[i];
    uint8_t* e = h + place_sections + i * entry_bytes;
    store32(e + entry_kind, static_cast<uint32_t>(entry.kind));
    store32(e + entry_version, entry.version);
    store32(e + entry_flags, entry.flags);
    store64(e + entry_offset, entry.offset);
    store64(e + entry_size, entry.bytes);
    store64(e + entry_table_offset, entry.table_offset);
    store64(e + entry_table_checksum, entry.table_checksum);
  }
  store64(h + place_checksum, checksum(h, place_checksum, header_seed));
}

Status CacheHeader::decode(Bytes begin, uint64_t actual_size, const char* path, CacheHeader* out) {
  RETURN_IF_ERROR(check_magic(begin, actual_size, path));
  const uint8_t* h = begin.data();
  RETURN_IF_ERROR(check_version(h, path));
  CacheHeader header;
  header.version = load32(h + place_version);
  header.minimum_reader = load32(h + place_minimum_reader);
  header.file_size = load64(h + place_file_size);
  RETURN_IF_ERROR(decode_identity(h, path, &header.identity));
  header.section_count = load32(h + place_section_count);
  if (header.section_count > max_sections)
    return corrupt(path, place_section_count, "it has too many sections");
  for (uint32_t i = 0; i < header.section_count; ++i) {
    header.sections[i] = decode_entry(h + place_sections + i * entry_bytes);
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
