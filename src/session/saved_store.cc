#include "session/saved_store.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <functional>
#include <vector>

#include "base/little_endian.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_floats.h"
#include "cachefile/section_sizes.h"
#include "session/saved_drafts.h"
#include "session/saved_states.h"
#include "session/saved_windows.h"

namespace kvasir {

using namespace format;

namespace {

std::array<uint8_t, state_bytes> encode(const SavedSequence& s) {
  std::array<uint8_t, state_bytes> out{};
  store32(out.data() + state_at("turn"), s.turn);
  store32(out.data() + state_at("full precision"),
          s.full_precision | (s.long_rope ? long_rope_flag : 0));
  store32(out.data() + state_at("window tokens"), s.window_tokens);
  store32(out.data() + state_at("window count"), s.window_count);
  store32(out.data() + state_at("pages"), s.pages);
  store32(out.data() + state_at("page tokens"), s.page_tokens);
  store64(out.data() + state_at("tokens"), s.tokens);
  store64(out.data() + state_at("document tokens"), s.document_tokens);
  store32(out.data() + state_at("document turn"), s.document_turn);
  store32(out.data() + state_at("probed pages"), s.probed_pages);
  return out;
}

SavedSequence decode_sequence(const std::byte* section) {
  const auto* at = reinterpret_cast<const uint8_t*>(section);
  const uint32_t flags = load32(at + state_at("full precision"));
  return {load32(at + state_at("turn")),          flags & ~long_rope_flag,
          load32(at + state_at("window tokens")), load32(at + state_at("window count")),
          load32(at + state_at("pages")),         load32(at + state_at("page tokens")),
          load64(at + state_at("tokens")),        load64(at + state_at("document tokens")),
          load32(at + state_at("document turn")), load32(at + state_at("probed pages")),
          (flags & long_rope_flag) != 0};
}

// Returns the first contradiction in a sequence's facts, or null. Used by load and save.
const char* wrong_state(const SavedSequence& s, const StoreShape& shape,
                        const format::Identity& identity) {
  if (s.turn > 3 || s.document_turn > 2) return "an unknown turn";
  if (s.document_tokens > s.tokens || (s.document_tokens == 0) != (s.document_turn == 0))
    return "document tokens that contradict its turns";
  if (s.full_precision > 1) return "an unknown flag";
  if (s.probed_pages > s.pages) return "more measured pages than pages";
  if (s.page_tokens != shape.page.page_tokens) return "another page size";
  if (s.tokens != identity.tokens) return "another number of tokens than the header";
  if (s.tokens != uint64_t{s.pages} * s.page_tokens + s.window_count)
    return "other tokens than its pages and window together";
  if (s.full_precision && s.pages) return "sealed pages in a full-precision sequence";
  if (s.window_tokens == 0 || s.window_tokens > (1u << 20)) return "a window out of range";
  if ((s.turn == 0) != (s.tokens == 0)) return "a turn without tokens, or tokens without a turn";
  if (s.pages && s.window_count == 0) return "an empty window";
  return nullptr;
}

// Passes the bytes of a part to `write`.
Status write_part(const SavedStores& stores, const SavedPart& part, const Cancel* cancel,
                  const std::function<Status(const void* data, std::size_t size)>& write) {
  if (part.kind == SectionKind::window) return stores.store.write_window(write);
  if (part.kind == SectionKind::windows_rows) return stores.windows->write_window(write);
  if (part.kind == SectionKind::recurrent) return write_states(*stores.states, cancel, write);
  if (part.kind == SectionKind::drafts) return write_drafts(*stores.drafts, write);
  return write(part.data, part.bytes);
}

// Refuses to write data that load would refuse.
Status check_savable(const std::string& path, const format::Identity& identity,
                     const SavedStores& stores, const SavedSequence& state,
                     std::span<const SavedPart> parts, const Cancel* cancel) {
  const KvStore& store = stores.store;
  const auto refused = [&](SectionKind kind, const char* what) {
    return Status::error(Code::corrupt,
                         "section '%s' %s: the loaded cache file or the model file is damaged; %s "
                         "was not written",
                         format::name_of(kind), what, path.c_str());
  };
  const StoreShape& shape = store.shape();
  if (const char* what = wrong_state(state, shape, identity))
    return Status::error(Code::internal, "the sequence has %s; %s was not written", what,
                         path.c_str());
  const char* wrong_states = nullptr;
  if (stores.states) RETURN_IF_ERROR(find_wrong_state(*stores.states, cancel, &wrong_states));
  if (wrong_states) return refused(SectionKind::recurrent, wrong_states);
  const char* bad_drafts = nullptr;
  if (stores.drafts) RETURN_IF_ERROR(find_wrong_drafts(*stores.drafts, cancel, &bad_drafts));
  if (bad_drafts) return refused(SectionKind::drafts, bad_drafts);
  for (const SavedPart& part : parts) {
    if (part.kind == SectionKind::recurrent || part.kind == SectionKind::drafts) continue;
    const auto check = [&](const void* data, std::size_t size) -> Status {
      constexpr std::size_t piece = 4 << 20;  // bytes between two tests of the cancel token
      const std::span<const std::byte> all(static_cast<const std::byte*>(data), size);
      const bool whole = part.kind == SectionKind::observed;  // of several arrays
      for (std::size_t at = 0; at < size; at += whole ? size : piece) {
        if (is_cancelled(cancel))
          return Status::error(Code::cancelled, "cancelled; no file was changed");
        const auto bytes = whole ? all : all.subspan(at, std::min(piece, size - at));
        if (const char* what = wrong_section(part.kind, bytes, state.facts(identity.vocabulary)))
          return refused(part.kind, what);
      }
      return {};
    };
    RETURN_IF_ERROR(write_part(stores, part, cancel, check));
  }
  if (const char* what = store.sketch().wrong(state.pages))
    return refused(SectionKind::sketch, what);
  if (const char* what = store.representatives().wrong(state.tokens, state.window_count))
    return refused(SectionKind::representatives, what);
  for (const TokenIndexes::Entry& entry : store.indexes().entries)
    if (entry.index)
      if (const char* what = entry.index->wrong(entry.valid, state.sealed_tokens()))
        return refused(section_of(entry.index->kind()), what);
  return {};
}

Status write_all(CacheWriter* writer, const void* data, std::size_t size, const Cancel* cancel,
                 Progress* progress) {
  constexpr std::size_t piece = 4 << 20;  // bytes between two tests of the cancel token
  for (std::size_t at = 0; at < size || size == 0; at += piece) {
    if (is_cancelled(cancel))
      return Status::error(Code::cancelled, "cancelled; no file was changed");
    if (size == 0) return {};
    RETURN_IF_ERROR(
        writer->write(static_cast<const std::byte*>(data) + at, std::min(piece, size - at)));
    if (!progress->update(writer->bytes_written(), writer->bytes_total()))
      return Status::error(Code::cancelled,
                           "stopped by the progress callback; no file was changed");
  }
  return {};
}

// Declares the sections of so many pages.
Status add_pages(CacheWriter* writer, const StoreShape& shape, uint32_t pages) {
  for (SectionKind kind : PageStore::arrays(shape))
    RETURN_IF_ERROR(writer->add_section(PageStore::section_of(shape, kind), section_version,
                                        PageStore::file_bytes(shape, kind, pages)));
  return {};
}

Status check_version(const std::string& path, const CacheFile::Section& section) {
  if (section.version == section_version) return {};
  return Status::error(
      Code::version, "%s: section '%s' has version %u, this library reads %u; nothing was loaded",
      path.c_str(), format::name_of(section.kind), section.version, section_version);
}

}  // namespace

Status expect(const CacheFile& file, SectionKind kind, uint64_t bytes,
              const CacheFile::Section** out) {
  const CacheFile::Section* section = file.find(kind);
  if (!section || section->bytes != bytes)
    return Status::error(
        Code::corrupt,
        "%s: section '%s' has %" PRIu64 " bytes where %" PRIu64 " belong; nothing was loaded",
        file.path().c_str(), format::name_of(kind), section ? section->bytes : 0, bytes);
  *out = section;
  return check_version(file.path(), *section);
}

Status take(const CacheFile& file, SectionKind kind, uint64_t bytes, ThreadPool* pool,
            const Cancel* cancel, const std::byte** out) {
  const CacheFile::Section* section = nullptr;
  RETURN_IF_ERROR(expect(file, kind, bytes, &section));
  RETURN_IF_ERROR(file.check_section(*section, pool, cancel));
  *out = file.bytes(kind).data();
  return {};
}

Status take(const CacheFile& file, SectionKind kind, uint64_t bytes, const SectionFacts& facts,
            ThreadPool* pool, const Cancel* cancel, const std::byte** out) {
  RETURN_IF_ERROR(take(file, kind, bytes, pool, cancel, out));
  const char* what = wrong_section(kind, {*out, static_cast<std::size_t>(bytes)}, facts);
  if (!what) return {};
  return Status::error(Code::corrupt, "%s: section '%s' %s; nothing was loaded",
                       file.path().c_str(), format::name_of(kind), what);
}

Status expect_section(const CachePeek& file, SectionKind kind, uint64_t bytes) {
  RETURN_IF_ERROR(file.expect(kind, bytes));
  return check_version(file.path(), *file.find(kind));
}

Status read_saved(const CachePeek& file, SavedSequence* out) {
  RETURN_IF_ERROR(expect_section(file, SectionKind::state, state_bytes));
  Array<std::byte> bytes;
  RETURN_IF_ERROR(file.read(SectionKind::state, state_bytes, &bytes));
  *out = decode_sequence(bytes.data());
  return {};
}

Status read_chat(const CachePeek& file, ChatRecord* out) {
  *out = {};
  const CachePeek::Section* section = file.find(SectionKind::chat);
  if (!section || section->bytes == 0) return {};
  RETURN_IF_ERROR(check_version(file.path(), *section));
  Array<std::byte> bytes;
  RETURN_IF_ERROR(file.read(SectionKind::chat, max_chat_record + 1, &bytes));
  return decode_chat_record(bytes, file.path().c_str(), out);
}

Status save_store(const std::string& path, format::Identity identity, const SavedStores& stores,
                  SavedSequence state, std::span<const SavedPart> parts, const Cancel* cancel,
                  Progress::Report report, const AtomicFile::BeforeRename& before_rename) {
  const KvStore &store = stores.store, *windows = stores.windows;
  const StoreShape& shape = store.shape();
  identity.layers = shape.layers;
  identity.kv_heads = shape.kv_heads;
  identity.head_dim = shape.page.head_dim;
  identity.latent = shape.page.latent;
  identity.tokens = store.tokens();
  state.full_precision = store.window_tokens() == KvStore::keep_all;
  state.window_count = store.window_count();
  state.pages = store.pages().pages();
  state.page_tokens = shape.page.page_tokens;
  state.tokens = store.tokens();
  const auto state_data = encode(state);
  std::vector<SavedPart> all = {
      {SectionKind::state, state_data.data(), state_data.size()},
      {SectionKind::centre, store.centre().data(), store.centre().size_bytes()},
      {SectionKind::sinks, store.sink_floats().data(), store.sink_floats().size_bytes()},
      {SectionKind::window, nullptr, store.window_size() * sizeof(float)}};
  all.insert(all.end(), parts.begin(), parts.end());
  const SavedWindows saved_windows = windows ? SavedWindows::of(*windows) : SavedWindows();
  if (const char* what = windows ? saved_windows.wrong(windows->shape(), state) : nullptr)
    return Status::error(Code::internal, "the windows have %s; %s was not written", what,
                         path.c_str());
  const auto windows_data = saved_windows.encode();
  if (windows) {
    const StoreShape& w = windows->shape();
    identity.windows = {w.layers, w.kv_heads, w.page.head_dim, w.window};
    all.push_back({SectionKind::windows, windows_data.data(), windows_data.size()});
    all.push_back(
        {SectionKind::windows_centre, windows->centre().data(), windows->centre().size_bytes()});
    all.push_back({SectionKind::windows_rows, nullptr, windows->window_size() * sizeof(float)});
  }
  if (stores.states)
    all.push_back(
        {SectionKind::recurrent, nullptr, std::size_t{states_section_bytes(*stores.states)}});

  if (stores.drafts)
    all.push_back(
        {SectionKind::drafts, nullptr, std::size_t{drafts_section_bytes(*stores.drafts)}});

  RETURN_IF_ERROR(check_savable(path, identity, stores, state, all, cancel));
  std::unique_ptr<CacheWriter> writer;
  RETURN_IF_ERROR(CacheWriter::create(path, identity, &writer, store.budget().reaper));
  for (const SavedPart& part : all)
    RETURN_IF_ERROR(writer->add_section(
        part.kind, part.kind == SectionKind::windows ? windows_section_version : section_version,
        part.bytes));
  RETURN_IF_ERROR(add_pages(writer.get(), shape, state.pages));
  if (windows)
    RETURN_IF_ERROR(
        add_pages(writer.get(), windows->shape(), saved_windows.extents() * extent_pages));
  if (stores.drafts)
    RETURN_IF_ERROR(add_pages(writer.get(), stores.drafts->store.shape(),
                              stores.drafts->store.pages().pages()));
  RETURN_IF_ERROR(writer->add_section(SectionKind::sketch, KeySketch::section_version,
                                      store.sketch().file_bytes()));
  RETURN_IF_ERROR(writer->add_section(SectionKind::representatives, section_version,
                                      store.representatives().file_bytes()));
  for (const TokenIndexes::Entry& entry : store.indexes().entries)
    if (entry.index)
      RETURN_IF_ERROR(writer->add_section(section_of(entry.index->kind()), section_version,
                                          entry.index->file_bytes()));
  RETURN_IF_ERROR(writer->begin());

  Progress progress(std::move(report));
  const auto write = [&](const void* data, std::size_t size) {
    return write_all(writer.get(), data, size, cancel, &progress);
  };
  for (const SavedPart& part : all) RETURN_IF_ERROR(write_part(stores, part, cancel, write));
  const KvStore* const paged[] = {&store, windows, stores.drafts ? &stores.drafts->store : nullptr};
  for (const KvStore* of : paged)
    if (of)
      for (SectionKind kind : PageStore::arrays(of->shape()))
        RETURN_IF_ERROR(of->pages().write(kind, write));
  RETURN_IF_ERROR(store.sketch().write(write));
  RETURN_IF_ERROR(store.representatives().write(write));
  for (const TokenIndexes::Entry& entry : store.indexes().entries)
    if (entry.index) RETURN_IF_ERROR(entry.index->write(entry.valid, write));
  if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled; no file was changed");
  return writer->finish(before_rename);
}

Status check_saved(const CachePeek& file, const StoreShape& shape, uint32_t group,
                   const SavedSequence& state) {
  const format::Identity& id = file.identity();
  if (id.layers != shape.layers || id.kv_heads != shape.kv_heads ||
      id.head_dim != shape.page.head_dim || id.latent != shape.page.latent)
    return Status::error(Code::corrupt, "%s: the header has another shape; nothing was loaded",
                         file.path().c_str());
  if (const char* what = wrong_state(state, shape, id))
    return Status::error(Code::corrupt, "%s: section 'state': %s; nothing was loaded",
                         file.path().c_str(), what);
  const uint64_t row = uint64_t{shape.heads_total()} * shape.page.dim * sizeof(float),
                 planes = shape.page.planes();
  const auto has = [&](SectionKind kind) {
    return state.pages > 0 || (file.find(kind) && file.find(kind)->bytes > 0);
  };
  const struct {
    SectionKind kind;
    uint64_t bytes;
  } exact[] = {
      {SectionKind::tokens, id.vocabulary ? state.tokens * sizeof(int32_t) : 0},
      // a rewound sequence keeps its centre
      {SectionKind::centre, has(SectionKind::centre) ? row : 0},
      {SectionKind::sinks, has(SectionKind::sinks) ? row * planes * shape.page.page_tokens : 0},
      {SectionKind::window, row * planes * state.window_count},
      {SectionKind::pages, PageStore::file_bytes(shape, SectionKind::pages, state.pages)},
      {SectionKind::scales, PageStore::file_bytes(shape, SectionKind::scales, state.pages)},
      {SectionKind::bounds, PageStore::file_bytes(shape, SectionKind::bounds, state.pages)}};
  for (const auto& [kind, bytes] : exact) RETURN_IF_ERROR(expect_section(file, kind, bytes));
  return check_section_sizes(file.header(), file.path().c_str(), group);
}

static Status map_pages(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                        PageStore* pages) {
  file->advise(*file->find(SectionKind::pages), os::Mapping::Advice::random);
  return PageStore::map(pages->shape(), file, state.pages, pages);
}

static bool has_sketch(const CacheFile& file) {
  const CacheFile::Section* section = file.find(SectionKind::sketch);
  return section && section->bytes > 0 && section->version == KeySketch::section_version;
}

Status load_store(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                  uint32_t group, const MemoryBudget& memory, uint64_t tokens, ThreadPool* pool,
                  const Cancel* cancel, KvStore* out) {
  if (memory.bytes && state.full_precision)
    return Status::error(Code::bad_argument,
                         "memory_limit is set, but %s has full precision, which stays in memory: "
                         "load it without a limit; nothing was loaded",
                         file->path().c_str());
  const uint32_t window_tokens = state.full_precision ? KvStore::keep_all : state.window_tokens;
  const StoreShape shape = out->shape();
  const CacheFile::Section *centre_section = file->find(SectionKind::centre),
                           *sinks_section = file->find(SectionKind::sinks),
                           *window_section = file->find(SectionKind::window);
  const bool was_sealed = centre_section->bytes > 0, has_sinks = sinks_section->bytes > 0;
  PageStore pages(shape);
  KeySketch sketch(shape);
  RETURN_IF_ERROR(map_pages(file, state, &pages));
  if (has_sketch(*file))
    RETURN_IF_ERROR(KeySketch::map(shape, file, state.pages, pool, cancel, &sketch));
  Representatives representatives(shape, window_tokens);
  if (const CacheFile::Section* section = file->find(SectionKind::representatives);
      section && section->bytes && section->version == section_version && !state.full_precision) {
    RETURN_IF_ERROR(Representatives::map(file, state.tokens, state.window_count, &representatives));
  } else if (state.tokens > 0) {
    representatives.forget();  // saved by an older library
  }
  KvStore store =
      KvStore::restore(std::move(pages), std::move(sketch), std::move(representatives),
                       window_tokens, {state.window_count, was_sealed, has_sinks}, memory);
  const KvStore::Restored to = store.restored();
  const auto copy = [&](const CacheFile::Section& section, uint64_t rows,
                        const std::function<float*(uint64_t)>& place) {
    return copy_floats(*file, section, 0, rows,
                       rows ? static_cast<std::size_t>(section.bytes / rows / sizeof(float)) : 0,
                       pool, cancel, place);
  };
  RETURN_IF_ERROR(copy(*centre_section, was_sealed, [&](uint64_t) { return to.centre; }));
  RETURN_IF_ERROR(copy(*sinks_section, has_sinks, [&](uint64_t) { return to.sinks; }));
  RETURN_IF_ERROR(copy(*window_section, uint64_t{shape.heads_total()} * shape.page.planes(),
                       [&](uint64_t plane) { return to.window(plane); }));
  for (IndexKind kind : all_index_kinds) {
    std::shared_ptr<TokenIndex> index;
    uint32_t valid = 0;
    RETURN_IF_ERROR(TokenIndex::map(kind, shape, group, file,
                                    static_cast<uint32_t>(state.sealed_tokens()), &index, &valid));
    if (index) store.set_index(std::move(index), valid);
  }
  RETURN_IF_ERROR(store.set_budget(memory, tokens, cancel));
  *out = std::move(store);
  return {};
}

Status map_store(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                 const SectionFacts& facts, const Cancel* cancel, KvStore* out) {
  PageStore pages(out->shape());
  KeySketch sketch(out->shape());
  RETURN_IF_ERROR(map_pages(file, state, &pages));
  if (has_sketch(*file))
    RETURN_IF_ERROR(KeySketch::map_in_place(out->shape(), file, state.pages, &sketch));
  pages.use_mapping();
  const std::byte* centre = nullptr;
  RETURN_IF_ERROR(take(*file, SectionKind::centre, file->find(SectionKind::centre)->bytes, facts,
                       nullptr, cancel, &centre));
  const auto floats = [&](SectionKind kind) -> std::span<const float> {
    const std::span<const std::byte> bytes = file->bytes(kind);
    return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
  };
  // sinks and window are verified at their first use: KvStore::check_rows()
  const KvStore::MappedRows rows{file, floats(SectionKind::centre), floats(SectionKind::sinks),
                                 floats(SectionKind::window), state.window_count};
  *out = KvStore::map(std::move(pages), std::move(sketch),
                      state.full_precision ? KvStore::keep_all : state.window_tokens, rows);
  return {};
}

}  // namespace kvasir
