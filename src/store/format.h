// The cache file's format, in one place for reader and writer; format.md says it byte by byte.
// All integers are little endian. Sections begin at multiples of section_align; section and table sizes are exact.
#pragma once

#include <array>
#include <cstdint>

namespace kvasir::format {

constexpr uint32_t version = 1;          // written
constexpr uint32_t minimum_reader = 1;   // the oldest reader that understands what is written
constexpr uint64_t header_bytes = 4096;
constexpr uint64_t block_bytes = 4096;   // of checksums: a page of the store, so that checking one reads nothing else
constexpr uint64_t section_align = 65536;

enum class SectionKind : uint32_t {
  state = 1,       // the timeline's small facts (session/persist.cc)
  tokens = 2,      // zstd of int32 [tokens]
  centre = 3,      // f32 [layers][kv_heads][dim]: subtracted from every K
  sinks = 4,       // f32 [layers][kv_heads][2][sink tokens][dim]: K, V
  window = 5,      // f32 [layers][kv_heads][2][window tokens][dim]: K, V
  pages = 6,       // [extents][layers][kv_heads][16 pages][4096]
  scales = 7,      // [extents][layers][kv_heads] arrays as in compute/page.h
  bounds = 8,
  means = 9,
  statistics = 10, // JSON
  recurrent = 11,  // reserved
  index = 12,      // reserved: a strategy's own structure, by name and version
};

// Bit of a section's flags: a reader that does not know the kind may skip it. Others make the file Code::version.
constexpr uint32_t optional_section = 1;

// What a cache belongs to; compared on load, so that a cache of other weights is refused.
struct Identity {
  std::array<uint8_t, 32> model{};  // fingerprint of the weights file
  uint32_t layers = 0, kv_heads = 0, head_dim = 0;
  uint32_t vocabulary = 0;
  uint64_t tokens = 0;              // in the timeline
  char model_name[64] = {};         // for people; UTF-8, NUL-terminated
};

}  // namespace kvasir::format
