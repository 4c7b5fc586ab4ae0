#include "session/saved_windows.h"

#include <algorithm>

#include "base/checked.h"
#include "base/little_endian.h"
#include "cachefile/section_floats.h"

namespace kvasir {

using namespace format;

SavedWindows SavedWindows::of(const KvStore& windows) {
  return {windows.window_count(), windows.pages().pages(), windows.marked(),
          windows.pages().runs()};
}

std::array<uint8_t, windows_bytes> SavedWindows::encode() const {
  std::array<uint8_t, windows_bytes> out{};
  store32(out.data() + windows_at("rows"), rows);
  store32(out.data() + windows_at("pages"), pages);
  store64(out.data() + windows_at("mark"), mark);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    store32(out.data() + windows_at("first extent at the mark") + 8 * i, runs[i].begin);
    store32(out.data() + windows_at("first extent at the mark") + 8 * i + 4, runs[i].end);
  }
  return out;
}

static SavedWindows decode_windows(const std::byte* section) {
  const auto* at = reinterpret_cast<const uint8_t*>(section);
  const auto run = [&](uint64_t i) {
    return ExtentRun{load32(at + windows_at("first extent at the mark") + 8 * i),
                     load32(at + windows_at("first extent at the mark") + 8 * i + 4)};
  };
  return {load32(at + windows_at("rows")),
          load32(at + windows_at("pages")),
          load64(at + windows_at("mark")),
          {run(0), run(1)}};
}

uint64_t SavedWindows::resume_point(const StoreShape& shape, const SavedSequence& state,
                                    uint64_t tokens) const {
  if (state.full_precision)
    return KvStore::resume_point(shape, {{{}, {0, 0}}}, state.tokens - rows, state.tokens, tokens);
  return KvStore::resume_point(shape, runs, 0, state.tokens, tokens);
}

// Returns the first contradiction, or null.
static const char* wrong_windows(const SavedWindows& w, const StoreShape& shape,
                                 const SavedSequence& state) {
  const auto& [older, newest] = w.runs;
  if (w.mark > state.tokens) return "a mark behind the sequence";
  if (state.full_precision ? w.pages > 0 || w.rows > state.tokens
                           : uint64_t{w.pages} * shape.page.page_tokens + w.rows != state.tokens)
    return "other tokens than the sequence";
  if (w.pages > 0 && w.rows == 0) return "no rows";
  if (older.begin > older.end || older.end > newest.begin || newest.begin > newest.end ||
      newest.end != ceil_div(w.pages, extent_pages))
    return "extents that contradict its pages";
  if (w.resume_point(shape, state, state.tokens) != state.tokens)
    return "less than the window of the next token";
  return nullptr;
}

Status check_windows(const CachePeek& file, const StoreShape& shape, const SavedSequence& state,
                     SavedWindows* out) {
  const WindowsShape wanted = {shape.layers, shape.kv_heads, shape.page.head_dim, shape.window};
  if (file.identity().windows != (shape.layers > 0 ? wanted : WindowsShape{}))
    return Status::error(Code::corrupt,
                         "%s: the header has windows of another shape; nothing was loaded",
                         file.path().c_str());
  if (shape.layers == 0) return {};
  RETURN_IF_ERROR(expect_section(file, SectionKind::windows, windows_bytes));
  Array<std::byte> bytes;
  RETURN_IF_ERROR(file.read(SectionKind::windows, windows_bytes, &bytes));
  *out = decode_windows(bytes.data());
  if (const char* what = wrong_windows(*out, shape, state))
    return Status::error(Code::corrupt, "%s: section 'windows': %s; nothing was loaded",
                         file.path().c_str(), what);
  const uint64_t row = uint64_t{shape.heads_total()} * shape.page.dim * sizeof(float);
  const CachePeek::Section* centre = file.find(SectionKind::windows_centre);
  const bool has_centre = out->pages > 0 || (centre && centre->bytes > 0);
  RETURN_IF_ERROR(expect_section(file, SectionKind::windows_centre, has_centre ? row : 0));
  RETURN_IF_ERROR(expect_section(file, SectionKind::windows_rows, row * 2 * out->rows));
  for (const SectionKind kind : PageStore::arrays(shape))
    RETURN_IF_ERROR(
        expect_section(file, PageStore::section_of(shape, kind),
                       PageStore::file_bytes(shape, kind, out->extents() * extent_pages)));
  return {};
}

Status windows_serve(const CachePeek& file, const StoreShape& shape, uint64_t tokens, bool* out) {
  *out = true;
  if (shape.layers == 0) return {};
  SavedSequence state;
  SavedWindows saved;
  RETURN_IF_ERROR(read_saved(file, &state));
  if (state.page_tokens == 0 || state.tokens < tokens)
    return Status::error(Code::corrupt, "%s: section 'state' has fewer tokens than its document",
                         file.path().c_str());
  RETURN_IF_ERROR(check_windows(file, shape, state, &saved));
  *out = saved.resume_point(shape, state, state.kept_of(tokens)) > 0;
  return {};
}

Status load_windows(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                    const SavedWindows& saved, ThreadPool* pool, const Cancel* cancel,
                    KvStore* out) {
  const StoreShape shape = out->shape();
  const CacheFile::Section &centre = *file->find(SectionKind::windows_centre),
                           &rows = *file->find(SectionKind::windows_rows);
  PageStore pages(shape);
  RETURN_IF_ERROR(PageStore::map(shape, file, saved.pages, saved.runs, &pages));
  KvStore::SavedRows facts;
  facts.window_count = saved.rows;
  facts.has_centre = centre.bytes > 0;
  facts.dropped = state.full_precision ? state.tokens - saved.rows : 0;
  facts.mark = saved.mark;
  Representatives none(shape, out->window_tokens());
  none.drop();
  KvStore store = KvStore::restore(std::move(pages), KeySketch(shape), std::move(none),
                                   out->window_tokens(), facts, {});
  const KvStore::Restored to = store.restored();
  const uint64_t planes = uint64_t{shape.heads_total()} * 2;
  RETURN_IF_ERROR(copy_floats(*file, centre, 0, facts.has_centre,
                              static_cast<std::size_t>(centre.bytes / sizeof(float)), pool, cancel,
                              [&](uint64_t) { return to.centre; }));
  RETURN_IF_ERROR(copy_floats(*file, rows, 0, planes,
                              static_cast<std::size_t>(rows.bytes / planes / sizeof(float)), pool,
                              cancel, [&](uint64_t plane) { return to.window(plane); }));
  *out = std::move(store);
  return {};
}

}  // namespace kvasir
