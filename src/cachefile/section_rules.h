// The rules for contents of sections. Load and save apply the same ones, so nothing is saved that
// cannot be loaded. Each function returns null, or text that follows "section 'NAME'" in an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cachefile/format.h"

namespace kvasir {

constexpr std::size_t max_spelling_pairs = 32768;  // half a MiB

// The facts that a section is compared with.
struct SectionFacts {
  uint32_t vocabulary = 0;  // 0: a cache without a model
  uint64_t tokens = 0;
  uint32_t page_tokens = 0;
};

// All rules of a section that has no class of its own (centre, sinks, window, windows-centre,
// windows-rows, logits, errors, queries: floats; tokens; observed; sparse; read; spelling;
// documents).
const char* wrong_section(format::SectionKind kind, std::span<const std::byte> bytes,
                          const SectionFacts& facts);
// A part of a section of floats.
const char* wrong_floats(std::span<const float> values);
// A state of a recurrent layer: larger numbers than those of any layer's output overflow in the
// next step.
constexpr float max_state_number = 1e30f;
const char* wrong_state_floats(std::span<const float> values);
const char* wrong_count(uint64_t count, const SectionFacts& facts);
// The position at which the queries of section `observed` were recorded.
const char* wrong_observed(uint64_t end, uint64_t pages, const SectionFacts& facts);
// built: sealed pages when the bases were found; covered: pages with a sketch; sealed: all sealed
// pages.
const char* wrong_sketch(uint32_t built, uint32_t covered, uint32_t sealed);
// tokens: of the sequence after the documents.
const char* wrong_documents(std::span<const std::byte> bytes, uint64_t tokens);
constexpr uint32_t representatives_block_tokens = 128;
const char* wrong_representatives(uint64_t blocks, uint64_t undecided, uint64_t tokens,
                                  uint64_t window_count);
// The facts at the beginning of an index. group: query heads per KV head; sealed: tokens in pages.
struct IndexFacts {
  uint32_t first_token = 0, tokens = 0, valid = 0, built = 0, graphs = 0;
};
const char* wrong_index(const IndexFacts& index, format::SectionKind kind, uint32_t page_tokens,
                        uint64_t sealed, uint32_t group);

}  // namespace kvasir
