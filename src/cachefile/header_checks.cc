#include "cachefile/header_checks.h"

#include <algorithm>
#include <cinttypes>
#include <initializer_list>

#include "base/checksum.h"
#include "base/little_endian.h"
#include "cachefile/format.h"

namespace kvasir {

using format::header_at;

namespace {

// Whether a file begins with a magic that a text-mode transfer damaged: the high bit of its first
// byte is cleared, this byte is recoded from Latin-1 or replaced as invalid UTF-8, or the line ends
// after it changed. kind: the fourth byte of the magic.
bool looks_like_text_damage(std::span<const uint8_t> begin, uint8_t kind) {
  const auto is = [&](std::initializer_list<uint8_t> prefix) { return starts_with(begin, prefix); };
  return is({0x8B, 'K', 'V', kind}) || is({0x0B, 'K', 'V', kind}) ||
         is({0xC2, 0x8B, 'K', 'V', kind}) || is({0xEF, 0xBF, 0xBD, 'K', 'V', kind}) ||
         is({'?', 'K', 'V', kind, '\r', '\n', 0x1A});
}

}  // namespace

Status damaged_at(uint64_t offset, const char* path, const char* reason) {
  return Status::error(Code::corrupt, "%s is damaged: %s", path, reason).with_offset(offset);
}

bool starts_with(std::span<const uint8_t> bytes, std::span<const uint8_t> prefix) {
  return bytes.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), bytes.begin());
}

Status check_magic(const HeaderForm& form, std::span<const uint8_t> begin, uint64_t file_bytes,
                   const char* path) {
  const std::size_t compared = std::min(begin.size(), form.magic.size());
  if (compared == 0)
    return Status::error(Code::not_a_cache, "%s is empty, not %s", path, form.what).with_offset(0);
  if (!std::equal(begin.begin(), begin.begin() + static_cast<std::ptrdiff_t>(compared),
                  form.magic.begin())) {
    if (looks_like_text_damage(begin, form.magic[3]))
      return damaged_at(
          0, path, "a transfer that took it for text changed its bytes; copy it again as binary");
    return Status::error(Code::not_a_cache, "%s is not %s", path, form.what).with_offset(0);
  }
  if (file_bytes < form.bytes)
    return Status::error(Code::corrupt,
                         "%s is truncated after %" PRIu64 " bytes, within its header", path,
                         file_bytes)
        .with_offset(file_bytes);
  return {};
}

Status check_version(const HeaderForm& form, const uint8_t* header, const char* path) {
  if (load64(header + form.checksum_at) != checksum(header, form.checksum_at, form.seed))
    return damaged_at(0, path, "the header's checksum does not match");
  constexpr uint64_t order_at = header_at("byte order"), version_at = header_at("version"),
                     reader_at = header_at("minimum reader");
  const uint32_t order = load32(header + order_at);
  if (order == __builtin_bswap32(format::byte_order))
    return Status::error(Code::version,
                         "%s was written in big-endian order, which this reader does not support",
                         path)
        .with_offset(order_at);
  if (order != format::byte_order)
    return damaged_at(order_at, path, "the byte order mark is wrong");
  const uint32_t written = load32(header + version_at), needed = load32(header + reader_at);
  if (needed > form.version)
    return Status::error(Code::version, "%s %s %u and needs a reader of version %u; this one is %u",
                         path, form.has_version, written, needed, form.version)
        .with_offset(reader_at);
  if (needed == 0 || needed > written)
    return damaged_at(version_at, path, "the version numbers contradict each other");
  if (written < form.oldest_readable)
    return Status::error(Code::version,
                         "%s %s %u, which was written before the first release: prefill the "
                         "document again",
                         path, form.has_version, written)
        .with_offset(version_at);
  return {};
}

Status check_file_size(const char* path, uint64_t is, uint64_t must) {
  if (is < must)
    return Status::error(Code::corrupt,
                         "%s is truncated: it has %" PRIu64 " of its %" PRIu64 " bytes", path, is,
                         must)
        .with_offset(is);
  if (is > must)
    return Status::error(Code::corrupt, "%s has %" PRIu64 " extra bytes at its end", path,
                         is - must)
        .with_offset(must);
  return {};
}

}  // namespace kvasir
