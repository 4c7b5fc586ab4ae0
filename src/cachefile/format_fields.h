// Every field of a cache file's header, of an entry of its section table, and of the sections that
// begin with fields: the format as tables, each of which covers its bytes without a gap. The reader
// checks what is reserved by them; tests lie about every field of them, so that a new field is
// tested by being here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cachefile/format.h"

namespace kvasir::format {

enum class FieldIs : uint8_t {
  data,      // opaque bytes, or text
  revision,  // a number that says how to read the rest
  size,      // a length, a count or an offset: what is allocated, read or repeated by
  choice,    // one of a few numbers
  checksum,  // of other bytes
  reserved,  // zero
};

struct Field {
  const char* name;
  uint64_t offset;
  uint64_t bytes;
  FieldIs is;
};

// Whether the fields follow each other from offset 0 to `bytes`.
constexpr bool cover(std::span<const Field> fields, uint64_t bytes) {
  uint64_t end = 0;
  for (const Field& field : fields) {
    if (field.offset != end) return false;
    end += field.bytes;
  }
  return end == bytes;
}

inline constexpr Field header_fields[] = {
    {"magic", place_magic, 8, FieldIs::data},
    {"version", place_version, 4, FieldIs::revision},
    {"minimum reader", place_minimum_reader, 4, FieldIs::revision},
    {"byte order", place_byte_order, 4, FieldIs::revision},
    {"section count", place_section_count, 4, FieldIs::size},
    {"file size", place_file_size, 8, FieldIs::size},
    {"model", place_model, 32, FieldIs::data},
    {"layers", place_layers, 4, FieldIs::size},
    {"kv heads", place_kv_heads, 4, FieldIs::size},
    {"head dim", place_head_dim, 4, FieldIs::size},
    {"vocabulary", place_vocabulary, 4, FieldIs::size},
    {"tokens", place_tokens, 8, FieldIs::size},
    {"model name", place_model_name, 64, FieldIs::data},
    {"model hash", place_model_hash, 16, FieldIs::data},
    {"windows layers", place_windows_layers, 4, FieldIs::size},
    {"windows kv heads", place_windows_kv_heads, 4, FieldIs::size},
    {"windows head dim", place_windows_head_dim, 4, FieldIs::size},
    {"reserved", 180, 4, FieldIs::reserved},
    {"windows tokens", place_windows_tokens, 8, FieldIs::size},
    {"reserved", 192, place_sections - 192, FieldIs::reserved},
    {"sections", place_sections, max_sections* entry_bytes, FieldIs::data},  // entry_fields
    {"reserved", 2304, place_checksum - 2304, FieldIs::reserved},
    {"checksum", place_checksum, 8, FieldIs::checksum},
};
static_assert(cover(header_fields, header_bytes));

inline constexpr Field entry_fields[] = {
    {"kind", entry_kind, 4, FieldIs::choice},
    {"version", entry_version, 4, FieldIs::revision},
    {"flags", entry_flags, 4, FieldIs::choice},
    {"reserved", 12, 4, FieldIs::reserved},
    {"offset", entry_offset, 8, FieldIs::size},
    {"size", entry_size, 8, FieldIs::size},
    {"table offset", entry_table_offset, 8, FieldIs::size},
    {"table checksum", entry_table_checksum, 8, FieldIs::checksum},
    {"reserved", 48, 16, FieldIs::reserved},
};
static_assert(cover(entry_fields, entry_bytes));

// Section `state`.
constexpr uint64_t state_turn = 0;            // u32
constexpr uint32_t long_rope_flag = 2;        // computed with longrope's factors for long contexts
constexpr uint64_t state_full_precision = 4;  // u32: 0 or 1, and long_rope_flag
constexpr uint64_t state_window_tokens = 8;   // u32
constexpr uint64_t state_window_count = 12;   // u32
constexpr uint64_t state_pages = 16;          // u32
constexpr uint64_t state_page_tokens = 20;    // u32
constexpr uint64_t state_tokens = 24;         // u64
constexpr uint64_t state_document_tokens = 32;  // u64
constexpr uint64_t state_document_turn = 40;    // u32
constexpr uint64_t state_probed_pages = 44;     // u32
constexpr uint64_t state_bytes = 48;

inline constexpr Field state_fields[] = {
    {"turn", state_turn, 4, FieldIs::choice},
    {"full precision", state_full_precision, 4, FieldIs::choice},
    {"window tokens", state_window_tokens, 4, FieldIs::size},
    {"window count", state_window_count, 4, FieldIs::size},
    {"pages", state_pages, 4, FieldIs::size},
    {"page tokens", state_page_tokens, 4, FieldIs::size},
    {"tokens", state_tokens, 8, FieldIs::size},
    {"document tokens", state_document_tokens, 8, FieldIs::size},
    {"document turn", state_document_turn, 4, FieldIs::choice},
    {"probed pages", state_probed_pages, 4, FieldIs::size},
};
static_assert(cover(state_fields, state_bytes));

// Section `representatives`, before the mean keys.
constexpr uint64_t representatives_head_bytes = 16;
inline constexpr Field representatives_fields[] = {
    {"decided blocks", 0, 4, FieldIs::size},
    {"undecided tokens", 4, 4, FieldIs::size},
    {"reserved", 8, 8, FieldIs::reserved},
};
static_assert(cover(representatives_fields, representatives_head_bytes));

// Section `sketch`, behind the bases.
constexpr uint64_t sketch_counts_bytes = 8;
inline constexpr Field sketch_fields[] = {
    {"pages of the bases", 0, 4, FieldIs::size},
    {"pages", 4, 4, FieldIs::size},
};
static_assert(cover(sketch_fields, sketch_counts_bytes));

// Section `observed`, before the queries.
constexpr uint64_t observed_head_bytes = 16;
inline constexpr Field observed_fields[] = {
    {"tokens", 0, 8, FieldIs::size},
    {"pages", 8, 4, FieldIs::size},
    {"reserved", 12, 4, FieldIs::reserved},
};
static_assert(cover(observed_fields, observed_head_bytes));

// Section `windows`.
constexpr uint64_t windows_rows_count = 0;  // u32
constexpr uint64_t windows_page_count = 4;  // u32
constexpr uint64_t windows_mark = 8;        // u64
constexpr uint64_t windows_runs = 16;       // u32 [2][2]
constexpr uint64_t windows_bytes = 32;
inline constexpr Field windows_fields[] = {
    {"rows", windows_rows_count, 4, FieldIs::size},
    {"pages", windows_page_count, 4, FieldIs::size},
    {"mark", windows_mark, 8, FieldIs::size},
    {"first extent at the mark", windows_runs, 4, FieldIs::size},
    {"end of the extents at the mark", windows_runs + 4, 4, FieldIs::size},
    {"first extent", windows_runs + 8, 4, FieldIs::size},
    {"end of the extents", windows_runs + 12, 4, FieldIs::size},
};
static_assert(cover(windows_fields, windows_bytes));

// Sections `sparse` and `read`.
inline constexpr Field count_fields[] = {{"tokens", 0, 8, FieldIs::size}};

// Sections of indexes, before the numbers of words, which are a size for each head.
constexpr uint64_t index_head_bytes = 32;
inline constexpr Field index_fields[] = {
    {"version", 0, 4, FieldIs::revision},   {"first token", 4, 4, FieldIs::size},
    {"tokens", 8, 4, FieldIs::size},        {"valid tokens", 12, 4, FieldIs::size},
    {"built tokens", 16, 4, FieldIs::size}, {"graphs", 20, 4, FieldIs::size},
    {"reserved", 24, 8, FieldIs::reserved}, {"words of the first head", 32, 8, FieldIs::size},
};
static_assert(cover(index_fields, index_head_bytes + 8));

// The words of an index's head, which begin at a multiple of 4096 behind the numbers of words.
inline constexpr Field index_word_fields[] = {
    {"levels", 0, 4, FieldIs::size},
    {"entry", 4, 4, FieldIs::size},
    {"floats", 8, 4, FieldIs::size},
    {"reserved", 12, 4, FieldIs::reserved},
    {"lists of the first level", 16, 4, FieldIs::size},
    {"links of the first level", 20, 4, FieldIs::size},
};

// What a section begins with, but for the sketch's counts; empty where that is no field.
constexpr std::span<const Field> fields_of(SectionKind kind) {
  switch (kind) {
    case SectionKind::state:
      return state_fields;
    case SectionKind::representatives:
      return representatives_fields;
    case SectionKind::observed:
      return observed_fields;
    case SectionKind::windows:
      return windows_fields;
    case SectionKind::sparse:
    case SectionKind::read:
      return count_fields;
    case SectionKind::hnsw:
    case SectionKind::ood:
    case SectionKind::ivf:
      return index_fields;
    default:
      return {};
  }
}

}  // namespace kvasir::format
