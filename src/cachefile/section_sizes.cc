#include "cachefile/section_sizes.h"

#include <algorithm>
#include <cinttypes>

#include "backend/page.h"
#include "base/checked.h"
#include "base/plausible.h"
#include "cachefile/format_fields.h"

namespace kvasir {

using namespace format;

namespace {

// Words per item of an index: the links of all levels and their offsets; or the item's place in a
// cluster and its share of the centroids, whose number is the square root of the number of items.
constexpr uint64_t hnsw_words = 48, ood_words = 96, ivf_words = 4;
constexpr uint64_t index_words_a_head = 64 * 1024;  // independent of the items, without a metric
constexpr uint64_t observed_tokens = 32;            // tokens whose queries are kept
constexpr uint64_t chain_tokens = 256;              // tokens per hash
constexpr uint64_t representatives_tokens = 128;    // tokens per block
constexpr uint64_t max_hidden_bytes = uint64_t{1} << 22;  // of a token
constexpr uint64_t max_state_bytes = uint64_t{1} << 31;   // of all recurrent layers of a model

// graphs: per KV head.
uint64_t max_index_bytes(const Identity& id, uint64_t graphs, uint64_t words_an_item) {
  const uint64_t dim = PageShape::of(id.head_dim, id.latent).dim,
                 words = claim_sum({id.tokens * words_an_item, index_words_a_head, dim * dim});
  return claim_product({uint64_t{id.layers} * id.kv_heads, graphs, words, sizeof(uint32_t)});
}

}  // namespace

// Of a section of the windows: of a store of their shape that has every token.
static uint64_t max_windows_bytes(SectionKind kind, const Identity& id) {
  const WindowsShape& w = id.windows;
  Identity windows;
  windows.layers = w.layers, windows.kv_heads = w.kv_heads, windows.head_dim = w.head_dim;
  windows.tokens = id.tokens;
  const SectionKind whole = kind == SectionKind::windows_centre  ? SectionKind::centre
                            : kind == SectionKind::windows_rows  ? SectionKind::window
                            : kind == SectionKind::windows_pages ? SectionKind::pages
                                                                 : SectionKind::scales;
  return w.layers == 0 ? 0 : max_section_bytes(whole, windows);
}

// Of a section of the MTP layer: of a store of one layer that has every token.
static uint64_t max_drafts_bytes(SectionKind kind, const Identity& id) {
  Identity drafts = id;
  drafts.layers = 1;
  if (kind == SectionKind::drafts_pages) return max_section_bytes(SectionKind::pages, drafts);
  if (kind == SectionKind::drafts_scales) return max_section_bytes(SectionKind::scales, drafts);
  return claim_sum({drafts_head_bytes, max_section_bytes(SectionKind::centre, drafts),
                    max_section_bytes(SectionKind::sinks, drafts),
                    max_section_bytes(SectionKind::window, drafts), max_hidden_bytes});
}

// Of a plausible shape. 0: little.
static uint64_t bytes_of_section(SectionKind kind, const Identity& id, uint32_t group) {
  const PageShape page = PageShape::of(id.head_dim, id.latent);
  const uint64_t heads = uint64_t{id.layers} * id.kv_heads,
                 extents = ceil_div(id.tokens, page.extent_tokens());
  const uint64_t row = page.dim * sizeof(float);  // one token of one head
  const uint64_t bases = 2 * uint64_t{page.dim} * page.sketch_dim() * sizeof(float) + block_bytes;
  const uint64_t queries =
      claim_product({heads, group, id.head_dim + 1, observed_tokens * sizeof(float)});
  switch (kind) {
    case SectionKind::tokens:
      return id.tokens * sizeof(int32_t);
    case SectionKind::centre:
      return heads * row;
    case SectionKind::sinks:
      return heads * row * page.planes() * page.page_tokens;
    case SectionKind::window:
      return claim_product({heads, row, page.planes(), id.tokens});
    case SectionKind::scales:
      return claim_product({extents, heads, page.scales_bytes()});
    case SectionKind::bounds:
      return claim_product({extents, heads, page.bounds_bytes()});
    case SectionKind::logits:
      return uint64_t{id.vocabulary} * sizeof(float);
    case SectionKind::errors:
      return uint64_t{id.layers} * sizeof(float);
    case SectionKind::sketch:
      return claim_sum({heads * bases, claim_product({extents, heads, page.sketch_bytes()})});
    case SectionKind::queries:
      return queries;
    case SectionKind::observed:
      return claim_sum({queries, observed_head_bytes});
    case SectionKind::representatives:
      return claim_sum({claim_product({heads, id.tokens / representatives_tokens, row / 2}),
                        claim_product({heads, id.tokens, sizeof(float)}),
                        representatives_head_bytes});
    case SectionKind::hnsw:
      return max_index_bytes(id, 1, hnsw_words);
    case SectionKind::ood:
      return max_index_bytes(id, group, ood_words);
    case SectionKind::ivf:
      return max_index_bytes(id, 1, ivf_words);
    case SectionKind::chain:
      return (1 + ceil_div(id.tokens, chain_tokens)) * sizeof(uint64_t);
    case SectionKind::windows_centre:
    case SectionKind::windows_rows:
    case SectionKind::windows_pages:
    case SectionKind::windows_scales:
      return max_windows_bytes(kind, id);
    case SectionKind::drafts:
    case SectionKind::drafts_pages:
    case SectionKind::drafts_scales:
      return max_drafts_bytes(kind, id);
    case SectionKind::state:
    case SectionKind::windows:
    case SectionKind::statistics:
    case SectionKind::sparse:
    case SectionKind::chat:
    case SectionKind::read:
    case SectionKind::spelling:
    case SectionKind::documents:
      return 0;
    case SectionKind::recurrent:
      return recurrent_head_bytes + max_saved_states * max_state_bytes;
    case SectionKind::pages:
    case SectionKind::index:
      return claim_product({extents, heads, page.pages_size()});
  }
  return 0;
}

uint64_t max_section_bytes(SectionKind kind, const Identity& id, uint32_t group) {
  if (id.layers > max_cache_layers || id.kv_heads > max_cache_heads ||
      id.tokens > max_cache_tokens || id.head_dim == 0 ||
      id.head_dim > (id.latent ? max_latent_dim : max_head_dim))
    return small_section;
  return std::max(bytes_of_section(kind, id, group), small_section);
}

Status check_section_sizes(const CacheHeader& header, const char* path, uint32_t group) {
  uint64_t unknown = 0;
  for (uint32_t i = 0; i < header.section_count; ++i) {
    const CacheHeader::Entry& section = header.sections[i];
    const bool known = is_known(section.kind);
    const SectionKind kind = known ? section.kind : SectionKind::pages;
    const uint64_t max_bytes = max_section_bytes(kind, header.identity, known ? group : 0);
    const uint64_t bytes = known ? section.bytes : (unknown = claim_sum({unknown, section.bytes}));
    if (bytes <= max_bytes) continue;
    return Status::error(Code::corrupt,
                         "%s is damaged: section %s has %" PRIu64 " bytes, where %" PRIu64
                         " tokens of its shape take at most "
                         "%" PRIu64,
                         path, name_of(section.kind), section.bytes, header.identity.tokens,
                         max_bytes)
        .with_offset(header_at("sections") + i * entry_bytes + entry_at("size"));
  }
  return {};
}

}  // namespace kvasir
