// Checks of the first bytes that cache files and packed files have in common: magic, version,
// minimum reader, byte order and the checksum of the header. No I/O.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace kvasir {

struct HeaderForm {
  std::array<uint8_t, 8> magic;
  const char* what;         // "a cache file"
  const char* has_version;  // "has format version"
  uint32_t version, oldest_readable;
  uint64_t bytes, checksum_at, seed;
};

// Code::corrupt: "PATH is damaged: reason".
Status damaged_at(uint64_t offset, const char* path, const char* reason);

bool starts_with(std::span<const uint8_t> bytes, std::span<const uint8_t> prefix);

// begin: the first min(file_bytes, form.bytes) bytes of the file. Code::not_a_cache, Code::corrupt.
Status check_magic(const HeaderForm& form, std::span<const uint8_t> begin, uint64_t file_bytes,
                   const char* path);
// After check_magic(). Verifies the header's checksum before its versions, so that a flipped bit is
// not taken for a newer format. Code::version, Code::corrupt.
Status check_version(const HeaderForm& form, const uint8_t* header, const char* path);

// Code::corrupt for a file that is shorter or longer than its header says, with the offset at which
// the sizes differ.
Status check_file_size(const char* path, uint64_t is, uint64_t must);

}  // namespace kvasir
