// The fields that sections begin with.
#pragma once

#include <cstdint>
#include <span>

#include "cachefile/format.h"

namespace kvasir::format {

constexpr uint64_t state_bytes = 48;
// A bit of "full precision": computed with longrope's factors for long contexts.
constexpr uint32_t long_rope_flag = 2;
inline constexpr auto state_fields = lay_out({
    {"turn", 4, FieldIs::choice},
    {"full precision", 4, FieldIs::choice},
    {"window tokens", 4, FieldIs::size},
    {"window count", 4, FieldIs::size},
    {"pages", 4, FieldIs::size},
    {"page tokens", 4, FieldIs::size},
    {"tokens", 8, FieldIs::size},
    {"document tokens", 8, FieldIs::size},
    {"document turn", 4, FieldIs::choice},
    {"probed pages", 4, FieldIs::size},
});
static_assert(end_of(state_fields) == state_bytes);
consteval uint64_t state_at(std::string_view name) { return offset_in(state_fields, name); }

// Section `representatives`, before the mean keys.
constexpr uint64_t representatives_head_bytes = 16;
inline constexpr auto representatives_fields = lay_out({
    {"decided blocks", 4, FieldIs::size},
    {"undecided tokens", 4, FieldIs::size},
    {"reserved", 8, FieldIs::reserved},
});
static_assert(end_of(representatives_fields) == representatives_head_bytes);

// Section `sketch`, behind the bases.
constexpr uint64_t sketch_counts_bytes = 8;
inline constexpr auto sketch_fields = lay_out({
    {"pages of the bases", 4, FieldIs::size},
    {"pages", 4, FieldIs::size},
});
static_assert(end_of(sketch_fields) == sketch_counts_bytes);

// Section `observed`, before the queries.
constexpr uint64_t observed_head_bytes = 16;
inline constexpr auto observed_fields = lay_out({
    {"tokens", 8, FieldIs::size},
    {"pages", 4, FieldIs::size},
    {"reserved", 4, FieldIs::reserved},
});
static_assert(end_of(observed_fields) == observed_head_bytes);

// Section `windows`.
constexpr uint32_t windows_section_version = 2;
constexpr uint64_t windows_bytes = 2048;
constexpr uint32_t max_saved_checkpoints = 64, max_saved_runs = max_saved_checkpoints + 1;
inline constexpr auto windows_fields = lay_out({
    {"rows", 4, FieldIs::size},
    {"pages", 4, FieldIs::size},
    {"checkpoints", 4, FieldIs::size},
    {"runs", 4, FieldIs::size},
    {"tokens of the first checkpoint", 8, FieldIs::size},
    {"tokens of the other checkpoints", 8 * (max_saved_checkpoints - 1), FieldIs::data},
    {"begin of the first run", 4, FieldIs::size},
    {"end of the first run", 4, FieldIs::size},
    {"the other runs", 8 * (max_saved_runs - 1), FieldIs::data},
    {"reserved", windows_bytes - 16 - 8 * max_saved_checkpoints - 8 * max_saved_runs,
     FieldIs::reserved},
});
static_assert(end_of(windows_fields) == windows_bytes);
consteval uint64_t windows_at(std::string_view name) { return offset_in(windows_fields, name); }

// The same in version 1.
constexpr uint64_t windows_1_bytes = 32;
inline constexpr auto windows_1_fields = lay_out({
    {"rows", 4, FieldIs::size},
    {"pages", 4, FieldIs::size},
    {"mark", 8, FieldIs::size},
    {"first extent at the mark", 4, FieldIs::size},
    {"end of the extents at the mark", 4, FieldIs::size},
    {"first extent", 4, FieldIs::size},
    {"end of the extents", 4, FieldIs::size},
});
static_assert(end_of(windows_1_fields) == windows_1_bytes);
consteval uint64_t windows_1_at(std::string_view name) { return offset_in(windows_1_fields, name); }

// Section `recurrent`, before the states.
constexpr uint64_t recurrent_head_bytes = 4096;
constexpr uint32_t max_saved_states = 64;
inline constexpr auto recurrent_fields = lay_out({
    {"layers", 4, FieldIs::size},
    {"states", 4, FieldIs::size},
    {"numbers of a layer", 8, FieldIs::size},
    {"tokens of the first state", 8, FieldIs::size},
    {"tokens of the other states", 8 * (max_saved_states - 1), FieldIs::data},
    {"reserved", recurrent_head_bytes - 16 - 8 * max_saved_states, FieldIs::reserved},
});
static_assert(end_of(recurrent_fields) == recurrent_head_bytes);
consteval uint64_t recurrent_at(std::string_view name) { return offset_in(recurrent_fields, name); }

// Section `drafts`, before the floats: centre, sinks, window, hidden state.
constexpr uint64_t drafts_head_bytes = 64;
constexpr uint32_t drafts_have_centre = 1, drafts_have_sinks = 2, drafts_have_hidden = 4;
inline constexpr auto drafts_fields = lay_out({
    {"first token", 8, FieldIs::size},
    {"pages", 4, FieldIs::size},
    {"window count", 4, FieldIs::size},
    {"kv heads", 4, FieldIs::size},
    {"head dim", 4, FieldIs::size},
    {"width", 4, FieldIs::size},
    {"parts", 4, FieldIs::choice},
    {"reserved", drafts_head_bytes - 32, FieldIs::reserved},
});
static_assert(end_of(drafts_fields) == drafts_head_bytes);
consteval uint64_t drafts_at(std::string_view name) { return offset_in(drafts_fields, name); }

// Section `documents`: a head, an entry for each document, then their paths without gaps.
constexpr uint64_t documents_head_bytes = 16, document_entry_bytes = 40;
constexpr uint32_t documents_have_scores = 1, document_is_candidate = 1, document_is_chosen = 2;
constexpr uint64_t max_document_path = 1000;  // bytes
inline constexpr auto documents_fields = lay_out({
    {"documents", 4, FieldIs::size},
    {"max documents", 4, FieldIs::data},
    {"scores", 4, FieldIs::choice},
    {"reserved", 4, FieldIs::reserved},
    {"checksum", 8, FieldIs::data},  // from here on the first entry
    {"file size", 8, FieldIs::size},
    {"tokens", 8, FieldIs::size},
    {"path bytes", 4, FieldIs::size},
    {"flags", 4, FieldIs::choice},
    {"score", 4, FieldIs::data},
    {"reserved entry", 4, FieldIs::reserved},
});
static_assert(end_of(documents_fields) == documents_head_bytes + document_entry_bytes);
// In the section; of a field of an entry, in the first one.
consteval uint64_t documents_at(std::string_view name) { return offset_in(documents_fields, name); }

// Sections `sparse` and `read`.
inline constexpr auto count_fields = lay_out({{"tokens", 8, FieldIs::size}});

// Sections of indexes, before the numbers of words, which are a size for each head.
constexpr uint64_t index_head_bytes = 32;
inline constexpr auto index_fields = lay_out({
    {"version", 4, FieldIs::revision},
    {"first token", 4, FieldIs::size},
    {"tokens", 4, FieldIs::size},
    {"valid tokens", 4, FieldIs::size},
    {"built tokens", 4, FieldIs::size},
    {"graphs", 4, FieldIs::size},
    {"reserved", 8, FieldIs::reserved},
    {"words of the first head", 8, FieldIs::size},
});
static_assert(end_of(index_fields) == index_head_bytes + 8);

// The words of an index's head, which begin at a multiple of 4096 behind the numbers of words.
inline constexpr auto index_word_fields = lay_out({
    {"levels", 4, FieldIs::size},
    {"entry", 4, FieldIs::size},
    {"floats", 4, FieldIs::size},
    {"reserved", 4, FieldIs::reserved},
    {"lists of the first level", 4, FieldIs::size},
    {"links of the first level", 4, FieldIs::size},
});

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
    case SectionKind::recurrent:
      return recurrent_fields;
    case SectionKind::drafts:
      return drafts_fields;
    case SectionKind::documents:
      return documents_fields;
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
