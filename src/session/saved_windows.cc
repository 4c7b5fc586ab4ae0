#include "session/saved_windows.h"

#include <algorithm>

#include "base/checked.h"
#include "base/little_endian.h"
#include "cachefile/section_floats.h"

namespace kvasir {

using namespace format;

namespace {

constexpr uint64_t checkpoint_at = windows_at("tokens of the first checkpoint"),
                   run_at = windows_at("begin of the first run");

ExtentRun load_run(const uint8_t* at) { return {load32(at), load32(at + 4)}; }

// Version 1 has one checkpoint at most: a mark before the end.
SavedWindows decode_1(const uint8_t* at) {
  SavedWindows out;
  out.rows = load32(at + windows_1_at("rows"));
  out.pages = load32(at + windows_1_at("pages"));
  out.checkpoints = {load64(at + windows_1_at("mark"))};
  constexpr uint64_t runs = windows_1_at("first extent at the mark");
  if (const ExtentRun older = load_run(at + runs); older.begin != older.end)
    out.runs.push_back(older);
  out.runs.push_back(load_run(at + runs + 8));
  return out;
}

// Returns the first contradiction, or null.
const char* decode(const uint8_t* at, SavedWindows* out) {
  out->rows = load32(at + windows_at("rows"));
  out->pages = load32(at + windows_at("pages"));
  const uint32_t checkpoints = load32(at + windows_at("checkpoints")),
                 runs = load32(at + windows_at("runs"));
  if (checkpoints > max_saved_checkpoints) return "too many checkpoints";
  if (runs > max_saved_runs) return "too many runs of extents";
  for (uint32_t i = 0; i < max_saved_checkpoints; ++i) {
    const uint64_t tokens = load64(at + checkpoint_at + 8 * i);
    if (i < checkpoints) out->checkpoints.push_back(tokens);
    else if (tokens != 0) return "more checkpoints than it counts";
  }
  for (uint32_t i = 0; i < max_saved_runs; ++i) {
    const ExtentRun run = load_run(at + run_at + 8 * i);
    if (i < runs) out->runs.push_back(run);
    else if (run.begin != 0 || run.end != 0) return "more runs of extents than it counts";
  }
  return find_used_reserve(windows_fields, at) ? "reserved bytes that are not zero" : nullptr;
}

bool are_disjoint(const PageStore::Runs& runs) {
  for (std::size_t i = 0; i < runs.size(); ++i)
    if (runs[i].begin > runs[i].end || (i > 0 && runs[i].begin < runs[i - 1].end) ||
        (i + 1 < runs.size() && runs[i].begin == runs[i].end))
      return false;
  return true;
}

}  // namespace

SavedWindows SavedWindows::of(const KvStore& windows) {
  return {windows.window_count(),
          windows.pages().pages(),
          {windows.checkpoints().begin(), windows.checkpoints().end()},
          windows.pages().runs()};
}

uint32_t SavedWindows::extents() const {
  uint32_t sum = 0;
  for (const ExtentRun& run : runs) sum += run.count();
  return sum;
}

// wrong() has found no contradiction.
std::array<uint8_t, windows_bytes> SavedWindows::encode() const {
  std::array<uint8_t, windows_bytes> out{};
  store32(out.data() + windows_at("rows"), rows);
  store32(out.data() + windows_at("pages"), pages);
  store32(out.data() + windows_at("checkpoints"), static_cast<uint32_t>(checkpoints.size()));
  store32(out.data() + windows_at("runs"), static_cast<uint32_t>(runs.size()));
  for (std::size_t i = 0; i < checkpoints.size(); ++i)
    store64(out.data() + checkpoint_at + 8 * i, checkpoints[i]);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    store32(out.data() + run_at + 8 * i, runs[i].begin);
    store32(out.data() + run_at + 8 * i + 4, runs[i].end);
  }
  return out;
}

uint64_t SavedWindows::resume_point(const StoreShape& shape, const SavedSequence& state,
                                    uint64_t tokens) const {
  const uint64_t dropped = state.full_precision ? state.tokens - rows : 0;
  return KvStore::resume_point(shape, runs, dropped, state.tokens, tokens);
}

const char* SavedWindows::wrong(const StoreShape& shape, const SavedSequence& state) const {
  if (checkpoints.size() > max_saved_checkpoints) return "too many checkpoints";
  if (runs.empty() || runs.size() > max_saved_runs) return "too many runs of extents, or none";
  if (state.full_precision ? pages > 0 || rows > state.tokens
                           : uint64_t{pages} * shape.page.page_tokens + rows != state.tokens)
    return "other tokens than the sequence";
  if (pages > 0 && rows == 0) return "no rows";
  if (!are_disjoint(runs) || runs.back().end != ceil_div(pages, extent_pages))
    return "extents that contradict its pages";
  if (resume_point(shape, state, state.tokens) != state.tokens)
    return "less than the window of the next token";
  for (std::size_t i = 0; i < checkpoints.size(); ++i) {
    if (checkpoints[i] == 0 || (i > 0 && checkpoints[i] <= checkpoints[i - 1]))
      return "checkpoints that do not ascend";
    if (checkpoints[i] > state.tokens) return "a checkpoint behind the sequence";
    if (resume_point(shape, state, checkpoints[i]) != checkpoints[i])
      return "less than the window of a checkpoint";
  }
  return nullptr;
}

// Reads the section of either version.
static Status read_windows(const CachePeek& file, const StoreShape& shape,
                           const SavedSequence& state, SavedWindows* out) {
  const CachePeek::Section* section = file.find(SectionKind::windows);
  const uint32_t version = section ? section->version : windows_section_version;
  if (version == 0 || version > windows_section_version)
    return Status::error(Code::version,
                         "%s: section 'windows' has version %u, this library reads up to %u; "
                         "nothing was loaded",
                         file.path().c_str(), version, windows_section_version);
  const uint64_t size = version == 1 ? windows_1_bytes : windows_bytes;
  RETURN_IF_ERROR(file.expect(SectionKind::windows, size));
  Array<std::byte> bytes;
  RETURN_IF_ERROR(file.read(SectionKind::windows, size, &bytes));
  const auto* at = reinterpret_cast<const uint8_t*>(bytes.data());
  const char* what = nullptr;
  *out = {};
  if (version == 1) {
    *out = decode_1(at);
    const uint64_t mark = out->checkpoints[0];
    if (mark > state.tokens) what = "a mark behind the sequence";
    out->checkpoints.clear();
    if (!what) what = out->wrong(shape, state);
    if (!what && mark > 0 && mark < state.tokens && out->resume_point(shape, state, mark) == mark)
      out->checkpoints = {mark};
  } else {
    what = decode(at, out);
    if (!what) what = out->wrong(shape, state);
  }
  if (!what) return {};
  return Status::error(Code::corrupt, "%s: section 'windows': %s; nothing was loaded",
                       file.path().c_str(), what);
}

Status check_windows(const CachePeek& file, const StoreShape& shape, const SavedSequence& state,
                     SavedWindows* out) {
  const WindowsShape wanted = {shape.layers, shape.kv_heads, shape.page.head_dim, shape.window};
  if (file.identity().windows != (shape.layers > 0 ? wanted : WindowsShape{}))
    return Status::error(Code::corrupt,
                         "%s: the header has windows of another shape; nothing was loaded",
                         file.path().c_str());
  if (shape.layers == 0) return {};
  RETURN_IF_ERROR(read_windows(file, shape, state, out));
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

Status load_windows(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                    const SavedWindows& saved, const WantedCheckpoints& wanted, ThreadPool* pool,
                    const Cancel* cancel, KvStore* out) {
  const StoreShape shape = out->shape();
  const CacheFile::Section &centre = *file->find(SectionKind::windows_centre),
                           &rows = *file->find(SectionKind::windows_rows);
  PageStore pages(shape);
  RETURN_IF_ERROR(PageStore::map(shape, file, saved.pages, saved.runs, &pages));
  KvStore::SavedRows facts;
  facts.window_count = saved.rows;
  facts.has_centre = centre.bytes > 0;
  facts.dropped = state.full_precision ? state.tokens - saved.rows : 0;
  facts.checkpoints = saved.checkpoints;
  std::erase_if(facts.checkpoints, [&](uint64_t at) { return at > wanted.tokens; });
  thin_out(
      wanted.limits, std::min(wanted.tokens, state.tokens), [](uint64_t at) { return at; },
      &facts.checkpoints);
  Representatives none(shape, out->window_tokens());
  none.drop();
  KvStore store = KvStore::restore(std::move(pages), KeySketch(shape), std::move(none),
                                   out->window_tokens(), facts, {});
  store.limit_checkpoints(wanted.limits);
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
