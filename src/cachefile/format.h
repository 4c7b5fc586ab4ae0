// The format of cache files, for reader and writer. docs/file-format.md defines it byte by byte.
//
// All integers are little endian. The layout has no freedom: sections follow each other in the
// order of the section table, each at the next multiple of section_align; the checksum tables
// follow the last section. A reader computes all offsets and refuses a file that says otherwise. So
// overlaps and gaps cannot be expressed.
#pragma once

#include <array>
#include <cstdint>

#include "cachefile/fields.h"

namespace kvasir::format {

// Reveals text-mode transfers: a byte with its high bit set, "KVC", CR LF, the DOS end of file, LF.
constexpr std::array<uint8_t, 8> magic = {0x8B, 'K', 'V', 'C', '\r', '\n', 0x1A, '\n'};
constexpr uint32_t byte_order = 0x0A0B0C0D;

// The newest, of files of latent attention; that of files with windows; and of others, which older
// readers read too. It is also the oldest reader of the file.
constexpr uint32_t version = 5, windows_version = 4, plain_version = 3;
// Versions 1 and 2, with another order of keys, were written before the first release.
constexpr uint32_t oldest_readable = 3;
constexpr uint64_t header_bytes = 4096;
// Bytes per checksum: a page of the store, so that the check of a page reads nothing else.
constexpr uint64_t block_bytes = 4096;
constexpr uint64_t section_align = 65536;
constexpr uint32_t max_sections = 32;

// Seed of the header's checksum. The seed of a block or a table is its offset in the file.
constexpr uint64_t header_seed = 0x726973'61764B01;

constexpr uint64_t entry_bytes = 64;  // of the section table

// The header. The fields up to "file size", and "checksum", hold for every future version.
inline constexpr auto header_fields = lay_out({
    {"magic", 8, FieldIs::data},
    {"version", 4, FieldIs::revision},
    {"minimum reader", 4, FieldIs::revision},
    {"byte order", 4, FieldIs::revision},
    {"section count", 4, FieldIs::size},
    {"file size", 8, FieldIs::size},
    {"model", 32, FieldIs::data},
    {"layers", 4, FieldIs::size},
    {"kv heads", 4, FieldIs::size},
    {"head dim", 4, FieldIs::size},
    {"vocabulary", 4, FieldIs::size},
    {"tokens", 8, FieldIs::size},
    {"model name", 64, FieldIs::data},
    {"model hash", 16, FieldIs::data},
    {"windows layers", 4, FieldIs::size},  // this and the next four: zeros before version 4
    {"windows kv heads", 4, FieldIs::size},
    {"windows head dim", 4, FieldIs::size},
    {"values in keys", 4, FieldIs::choice},  // 0 before version 5
    {"windows tokens", 8, FieldIs::size},
    {"reserved", 64, FieldIs::reserved},
    {"sections", max_sections* entry_bytes, FieldIs::data},  // entry_fields
    {"reserved", 1784, FieldIs::reserved},
    {"checksum", 8, FieldIs::checksum},  // of all bytes before it
});
static_assert(end_of(header_fields) == header_bytes);
consteval uint64_t header_at(std::string_view name) { return offset_in(header_fields, name); }

// An entry of the section table.
inline constexpr auto entry_fields = lay_out({
    {"kind", 4, FieldIs::choice},
    {"version", 4, FieldIs::revision},
    {"flags", 4, FieldIs::choice},
    {"reserved", 4, FieldIs::reserved},
    {"offset", 8, FieldIs::size},
    {"size", 8, FieldIs::size},
    {"table offset", 8, FieldIs::size},
    {"table checksum", 8, FieldIs::checksum},
    {"reserved", 16, FieldIs::reserved},
});
static_assert(end_of(entry_fields) == entry_bytes);
consteval uint64_t entry_at(std::string_view name) { return offset_in(entry_fields, name); }

enum class SectionKind : uint32_t {
  state = 1,   // the sequence's small facts (session/save.cc)
  tokens = 2,  // int32 [tokens]
  centre = 3,  // f32 [layers][kv_heads][dim]: subtracted from every K
  sinks = 4,   // f32 [layers][kv_heads][2][sink tokens][dim]: K, V
  window = 5,  // f32 [layers][kv_heads][2][window tokens][dim]: K, V
  pages = 6,   // [extents][layers][kv_heads][16 pages][bytes of a page]
  scales = 7,  // [extents][layers][kv_heads] arrays as in backend/page.h
  bounds = 8,
  statistics = 10,  // JSON; 9 was a section of version 1 and stays unused
  recurrent = 11,   // states of recurrent layers, and the tokens before each (format_fields.h)
  index = 12,       // reserved: a strategy's own structure, by name and version
  logits = 13,      // f32 [vocabulary]: after the last token, so that decode goes on exactly
  // f32 [layers]: how badly each layer is served by chosen pages; the plan's dense layers come from
  // it
  errors = 14,
  sketch = 15,  // store/key_sketch.h: a few numbers of every key
  // f32 [layers][tokens][heads * (head_dim + 1)]: the newest queries, for strategies that choose by
  // them
  queries = 16,
  observed = 17,         // the queries that the choice of an answer under way was made by
  representatives = 18,  // store/representatives.h: what stands for blocks of tokens
  sparse = 19,           // u64: tokens up to the last one that was read sparsely
  hnsw = 20,             // store/token_index.h: a strategy's index of the keys, each optional
  ood = 21,
  ivf = 22,
  // cachefile/token_chain.h: hashes of the tokens, by which a library finds what begins like a text
  chain = 23,
  read = 24,      // u64: tokens before the first that was not read as a document is
  chat = 25,      // session/chat_record.h: format of the turns, and instructions
  spelling = 26,  // session/spelling.h: tokens that stand for other bytes than their pieces
  // The store of the layers that see a window, whose shape is in the header (Identity::windows).
  windows = 27,         // which tokens it has
  windows_centre = 28,  // as `centre`
  windows_rows = 29,    // as `window`
  windows_pages = 30,   // as `pages`, of the extents that were kept
  windows_scales = 31,  // as `scales`, of the same
  // The store of the MTP layer, of a sequence that drafts.
  drafts = 32,         // which tokens it has, and its numbers in full precision
  drafts_pages = 33,   // as `pages`, of one layer
  drafts_scales = 34,  // as `scales`, of one layer
  documents = 35,      // session/saved_documents.h: what is before the sequence in other files
};

// Whether this reader understands a section's contents. The reserved kind is not understood yet.
constexpr bool is_known(SectionKind kind) {
  return (kind >= SectionKind::state && kind <= SectionKind::bounds) ||
         kind == SectionKind::statistics || kind == SectionKind::recurrent ||
         (kind >= SectionKind::logits && kind <= SectionKind::documents);
}

// Bit of a section's flags: a reader that does not know the kind may skip it. Others make the file
// Code::version.
constexpr uint32_t optional_section = 1;

// The flags a kind is written with: statistics are for people, an index can be built again, drafts
// change no answer. A reader that missed `chat` would put questions into turns of another format;
// one that missed `documents` would answer without them.
constexpr uint32_t flags_of(SectionKind kind) {
  return kind == SectionKind::statistics || kind == SectionKind::index ||
                 (kind >= SectionKind::logits && kind <= SectionKind::read) ||
                 kind == SectionKind::spelling ||
                 (kind >= SectionKind::drafts && kind <= SectionKind::drafts_scales)
             ? optional_section
             : 0;
}

constexpr const char* name_of(SectionKind kind) {
  constexpr const char* names[] = {"unknown",
                                   "state",
                                   "tokens",
                                   "centre",
                                   "sinks",
                                   "window",
                                   "pages",
                                   "scales",
                                   "bounds",
                                   "unknown",
                                   "statistics",
                                   "recurrent",
                                   "index",
                                   "logits",
                                   "errors",
                                   "sketch",
                                   "queries",
                                   "observed",
                                   "representatives",
                                   "sparse",
                                   "hnsw",
                                   "ood",
                                   "ivf",
                                   "chain",
                                   "read",
                                   "chat",
                                   "spelling",
                                   "windows",
                                   "windows-centre",
                                   "windows-rows",
                                   "windows-pages",
                                   "windows-scales",
                                   "drafts",
                                   "drafts-pages",
                                   "drafts-scales",
                                   "documents"};
  const auto i = static_cast<uint32_t>(kind);
  return names[i < sizeof names / sizeof *names ? i : 0];
}

// The layers whose queries see the newest `tokens` tokens. No layers: none.
struct WindowsShape {
  uint32_t layers = 0, kv_heads = 0, head_dim = 0;
  uint64_t tokens = 0;
  bool operator==(const WindowsShape&) const = default;
};

// What a cache belongs to; compared on load, so that a cache of other weights is refused.
struct Identity {
  std::array<uint8_t, 32> model{};  // fingerprint of the weights file
  uint32_t layers = 0, kv_heads = 0, head_dim = 0;
  uint32_t vocabulary = 0;
  uint64_t tokens = 0;       // in the sequence
  char model_name[64] = {};  // for people; UTF-8, NUL-terminated
  std::array<uint8_t, 16>
      model_hash{};  // of the whole weights file; zeros: unknown when the document was saved
  WindowsShape windows;
  bool latent = false;  // PageShape::latent
};

}  // namespace kvasir::format
