#include "session/saved_store.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <functional>
#include <vector>

#include "base/little_endian.h"
#include "base/magnitude.h"
#include "store/section_floats.h"

namespace kvasir {

using format::SectionKind;

namespace {

constexpr std::size_t state_bytes = 48;

std::array<uint8_t, state_bytes> encode(const SavedTimeline& s) {
  std::array<uint8_t, state_bytes> out{};
  const uint32_t small[] = {s.turn, s.full_precision, s.window_tokens, s.window_count, s.pages, s.page_tokens};
  for (std::size_t i = 0; i < 6; ++i) store32(out.data() + 4 * i, small[i]);
  store64(out.data() + 24, s.tokens);
  store64(out.data() + 32, s.document_tokens);
  store32(out.data() + 40, s.document_turn);
  store32(out.data() + 44, s.probed_pages);
  return out;
}

SavedTimeline decode(const std::byte* section) {
  const auto* at = reinterpret_cast<const uint8_t*>(section);
  const auto small = [&](std::size_t i) { return load32(at + 4 * i); };
  return {small(0), small(1), small(2), small(3), small(4), small(5), load64(at + 24), load64(at + 32), small(10), small(11)};
}

Status write_all(CacheWriter* writer, const void* data, std::size_t size, const Cancel* cancel, Progress* progress) {
  constexpr std::size_t piece = 4 << 20;  // between two looks at the cancel token
  for (std::size_t at = 0; at < size || size == 0; at += piece) {
    if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled; no file was changed");
    if (size == 0) return {};
    if (Status s = writer->write(static_cast<const std::byte*>(data) + at, std::min(piece, size - at)); !s.ok()) return s;
    if (!progress->update(writer->bytes_written(), writer->bytes_total()))
      return Status::error(Code::cancelled, "stopped by the progress callback; no file was changed");
  }
  return {};
}

Status check_version(const CacheFile& file, const CacheFile::Section& section) {
  if (section.version == section_version) return {};
  return Status::error(Code::version, "%s: section '%s' has version %u, this library reads %u; nothing was loaded", file.path().c_str(),
                       format::name_of(section.kind), section.version, section_version);
}

}  // namespace

Status expect(const CacheFile& file, SectionKind kind, uint64_t bytes, const CacheFile::Section** out) {
  const CacheFile::Section* section = file.find(kind);
  if (!section || section->bytes != bytes)
    return Status::error(Code::corrupt, "%s: section '%s' has %" PRIu64 " bytes where %" PRIu64 " belong; nothing was loaded",
                         file.path().c_str(), format::name_of(kind), section ? section->bytes : 0, bytes);
  *out = section;
  return check_version(file, *section);
}

Status take(const CacheFile& file, SectionKind kind, uint64_t bytes, ThreadPool* pool, const std::byte** out) {
  const CacheFile::Section* section = nullptr;
  if (Status s = expect(file, kind, bytes, &section); !s.ok()) return s;
  if (Status s = file.check_section(*section, pool); !s.ok()) return s;
  *out = file.bytes(kind).data();
  return {};
}

Status check_finite(const CacheFile& file, SectionKind kind, std::span<const float> values) {
  return all_finite(values) ? Status() : not_finite(file, *file.find(kind));
}

Status read_saved(const CacheFile& file, SavedTimeline* out) {
  const std::byte* at = nullptr;
  if (Status s = take(file, SectionKind::state, state_bytes, nullptr, &at); !s.ok()) return s;
  *out = decode(at);
  return {};
}

Status save_store(const std::string& path, format::Identity identity, const KvStore& store, SavedTimeline state, std::span<const SavedPart> parts,
                  const Cancel* cancel, Progress::Report report, const AtomicFile::BeforeRename& before_rename) {
  const StoreShape& shape = store.shape();
  identity.layers = shape.layers;
  identity.kv_heads = shape.kv_heads;
  identity.head_dim = shape.page.head_dim;
  identity.tokens = store.tokens();
  state.full_precision = store.window_tokens() == KvStore::keep_all;
  state.window_count = store.window_count();
  state.pages = store.pages().pages();
  state.page_tokens = shape.page.page_tokens;
  state.tokens = store.tokens();
  const auto state_data = encode(state);
  std::vector<SavedPart> all = {{SectionKind::state, state_data.data(), state_data.size()},
                                {SectionKind::centre, store.centre().data(), store.centre().size_bytes()},
                                {SectionKind::sinks, store.sink_floats().data(), store.sink_floats().size_bytes()},
                                {SectionKind::window, nullptr, store.window_size() * sizeof(float)}};
  all.insert(all.end(), parts.begin(), parts.end());

  std::unique_ptr<CacheWriter> writer;
  if (Status s = CacheWriter::create(path, identity, &writer); !s.ok()) return s;
  for (const SavedPart& part : all)
    if (Status s = writer->add_section(part.kind, section_version, part.bytes); !s.ok()) return s;
  for (SectionKind kind : PageStore::sections)
    if (Status s = writer->add_section(kind, section_version, PageStore::file_bytes(shape, kind, state.pages)); !s.ok()) return s;
  if (Status s = writer->add_section(SectionKind::sketch, KeySketch::section_version, store.sketch().file_bytes()); !s.ok()) return s;
  if (Status s = writer->add_section(SectionKind::representatives, section_version, store.representatives().file_bytes()); !s.ok()) return s;
  for (const TokenIndexes::Entry& entry : store.indexes().entries)
    if (entry.index)
      if (Status s = writer->add_section(section_of(entry.index->kind()), section_version, entry.index->file_bytes()); !s.ok()) return s;
  if (Status s = writer->begin(); !s.ok()) return s;

  Progress progress(std::move(report));
  const auto write = [&](const void* data, std::size_t size) { return write_all(writer.get(), data, size, cancel, &progress); };
  for (const SavedPart& part : all) {
    Status s = part.kind == SectionKind::window ? store.write_window(write) : write(part.data, part.bytes);
    if (!s.ok()) return s;
  }
  for (SectionKind kind : PageStore::sections)
    if (Status s = store.pages().write(kind, write); !s.ok()) return s;
  if (Status s = store.sketch().write(write); !s.ok()) return s;
  if (Status s = store.representatives().write(write); !s.ok()) return s;
  for (const TokenIndexes::Entry& entry : store.indexes().entries)
    if (entry.index)
      if (Status s = entry.index->write(entry.valid, write); !s.ok()) return s;
  if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled; no file was changed");
  return writer->finish(before_rename);
}

Status check_saved(const CacheFile& file, const StoreShape& shape, const SavedTimeline& s) {
  const auto corrupt = [&](const char* what) {
    return Status::error(Code::corrupt, "%s: section 'state': %s; nothing was loaded", file.path().c_str(), what);
  };
  const format::Identity& id = file.identity();
  if (id.layers != shape.layers || id.kv_heads != shape.kv_heads || id.head_dim != shape.page.head_dim)
    return Status::error(Code::corrupt, "%s: the header's shape is another one; nothing was loaded", file.path().c_str());
  if (s.turn > 3 || s.document_turn > 2) return corrupt("an unknown turn");
  if (s.document_tokens > s.tokens || (s.document_tokens == 0) != (s.document_turn == 0)) return corrupt("a conversation that begins nowhere");
  if (s.full_precision > 1) return corrupt("an unknown flag");
  if (s.probed_pages > s.pages) return corrupt("a measurement of pages that are not there");
  if (s.page_tokens != shape.page.page_tokens) return corrupt("another page size");
  if (s.tokens != id.tokens) return corrupt("not the header's number of tokens");
  if (s.tokens != uint64_t{s.pages} * s.page_tokens + s.window_count) return corrupt("pages and window do not add up to its tokens");
  if (s.full_precision && s.pages) return corrupt("sealed pages in a full-precision timeline");
  if (s.window_tokens == 0 || s.window_tokens > (1u << 20)) return corrupt("a window out of range");
  if ((s.turn == 0) != (s.tokens == 0)) return corrupt("a turn that does not fit its tokens");
  if (s.pages && s.window_count == 0) return corrupt("an empty window");
  return {};
}

Status load_store(const std::shared_ptr<const CacheFile>& file, const SavedTimeline& state, uint32_t group, const MemoryBudget& memory,
                  uint64_t tokens, ThreadPool* pool, const Cancel* cancel, KvStore* out) {
  if (memory.bytes && state.full_precision)
    return Status::error(Code::bad_argument, "memory_budget is set: %s has keys and values in full precision, which are kept in memory; nothing was "
                         "loaded", file->path().c_str());
  const uint32_t window_tokens = state.full_precision ? KvStore::keep_all : state.window_tokens;
  const StoreShape shape = out->shape();
  const uint64_t row = uint64_t{shape.heads_total()} * shape.page.dim * sizeof(float);
  const CacheFile::Section* centre_section = file->find(SectionKind::centre);
  const CacheFile::Section* sinks_section = file->find(SectionKind::sinks);
  const bool was_sealed = state.pages || (centre_section && centre_section->bytes);  // a rewound timeline keeps its centre
  const bool has_sinks = state.pages || (sinks_section && sinks_section->bytes);
  const CacheFile::Section* window_section = nullptr;
  const uint64_t sizes[] = {was_sealed ? row : 0,
                            has_sinks ? row * 2 * shape.page.page_tokens : 0, row * 2 * state.window_count};
  if (Status s = expect(*file, SectionKind::centre, sizes[0], &centre_section); !s.ok()) return s;
  if (Status s = expect(*file, SectionKind::sinks, sizes[1], &sinks_section); !s.ok()) return s;
  if (Status s = expect(*file, SectionKind::window, sizes[2], &window_section); !s.ok()) return s;
  for (SectionKind kind : PageStore::sections) {
    const CacheFile::Section* section = file->find(kind);
    if (!section || section->bytes != PageStore::file_bytes(shape, kind, state.pages))
      return Status::error(Code::corrupt, "%s: section '%s' does not have the size of %u pages; nothing was loaded", file->path().c_str(),
                           format::name_of(kind), state.pages);
    if (Status s = check_version(*file, *section); !s.ok()) return s;
    if (kind == SectionKind::pages) file->advise(*section, os::Mapping::Advice::random);
  }

  PageStore pages(shape);
  if (Status s = PageStore::map(shape, file, state.pages, &pages); !s.ok()) return s;
  KeySketch sketch(shape);
  if (const CacheFile::Section* section = file->find(SectionKind::sketch); section && section->bytes && section->version == KeySketch::section_version) {
    if (Status s = KeySketch::map(shape, file, state.pages, pool, &sketch); !s.ok()) return s;
  }
  Representatives representatives(shape, window_tokens);
  if (const CacheFile::Section* section = file->find(SectionKind::representatives);
      section && section->bytes && section->version == section_version && !state.full_precision) {
    if (Status s = Representatives::map(file, state.tokens, &representatives); !s.ok()) return s;
  } else if (state.tokens > 0) {
    representatives.forget();  // read by an older library
  }
  KvStore store = KvStore::restore(std::move(pages), std::move(sketch), std::move(representatives), window_tokens,
                                   {state.window_count, was_sealed, has_sinks}, memory);
  const KvStore::Restored to = store.restored();
  const auto copy = [&](const CacheFile::Section& section, uint64_t rows, const std::function<float*(uint64_t)>& place) {
    return copy_floats(*file, section, 0, rows, rows ? static_cast<std::size_t>(section.bytes / rows / sizeof(float)) : 0, pool, place,
                       cancel);
  };
  if (Status s = copy(*centre_section, was_sealed, [&](uint64_t) { return to.centre; }); !s.ok()) return s;
  if (Status s = copy(*sinks_section, has_sinks, [&](uint64_t) { return to.sinks; }); !s.ok()) return s;
  if (Status s = copy(*window_section, uint64_t{shape.heads_total()} * 2, [&](uint64_t plane) { return to.window(plane); }); !s.ok()) return s;
  for (IndexKind kind : all_index_kinds) {
    std::shared_ptr<TokenIndex> index;
    uint32_t valid = 0;
    if (Status s = TokenIndex::map(kind, shape, group, file, static_cast<uint32_t>(state.sealed_tokens()), &index, &valid);
        !s.ok())
      return s;
    if (index) store.set_index(std::move(index), valid);
  }
  if (Status s = store.set_budget(memory, tokens, cancel); !s.ok()) return s;
  *out = std::move(store);
  return {};
}

}  // namespace kvasir
