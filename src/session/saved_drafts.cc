#include "session/saved_drafts.h"

#include <array>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/little_endian.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_floats.h"
#include "cachefile/section_rules.h"

namespace kvasir {

using namespace format;

namespace {

using DraftsHead = std::array<uint8_t, drafts_head_bytes>;

struct DraftFacts {
  uint64_t first = 0;
  uint32_t pages = 0, window_count = 0, kv_heads = 0, head_dim = 0, width = 0, parts = 0;

  uint64_t rows(const PageShape& page) const {
    return uint64_t{pages} * page.page_tokens + window_count;
  }
  bool has(uint32_t part) const { return (parts & part) != 0; }
};

DraftFacts facts_of(const DraftState& drafts) {
  const KvStore& store = drafts.store;
  const uint32_t parts = (store.centre_size() ? drafts_have_centre : 0) |
                         (store.sinks_size() ? drafts_have_sinks : 0) |
                         (drafts.hidden.empty() ? 0 : drafts_have_hidden);
  return {drafts.first,
          store.pages().pages(),
          store.window_count(),
          store.shape().kv_heads,
          store.shape().page.head_dim,
          static_cast<uint32_t>(drafts.hidden.size()),
          parts};
}

DraftsHead encode(const DraftFacts& f) {
  DraftsHead head{};
  store64(head.data() + drafts_at("first token"), f.first);
  store32(head.data() + drafts_at("pages"), f.pages);
  store32(head.data() + drafts_at("window count"), f.window_count);
  store32(head.data() + drafts_at("kv heads"), f.kv_heads);
  store32(head.data() + drafts_at("head dim"), f.head_dim);
  store32(head.data() + drafts_at("width"), f.width);
  store32(head.data() + drafts_at("parts"), f.parts);
  return head;
}

DraftFacts decode_drafts(const std::byte* section) {
  const auto* at = reinterpret_cast<const uint8_t*>(section);
  return {load64(at + drafts_at("first token")),  load32(at + drafts_at("pages")),
          load32(at + drafts_at("window count")), load32(at + drafts_at("kv heads")),
          load32(at + drafts_at("head dim")),     load32(at + drafts_at("width")),
          load32(at + drafts_at("parts"))};
}

// Returns the first contradiction, or null.
const char* wrong_drafts(const DraftFacts& f, const StoreShape& shape, std::size_t width,
                         const SavedSequence& state) {
  if (f.kv_heads != shape.kv_heads || f.head_dim != shape.page.head_dim)
    return "rows of another shape";
  if (f.parts > (drafts_have_centre | drafts_have_sinks | drafts_have_hidden))
    return "unknown parts";
  if (f.width != (f.has(drafts_have_hidden) ? width : 0)) return "a hidden state of another width";
  if (f.first == 0 || f.first > state.tokens || state.tokens - f.first != f.rows(shape.page))
    return "other tokens than the sequence";
  if (state.full_precision && f.pages > 0) return "sealed pages in a full-precision sequence";
  if (f.pages > 0 && f.window_count == 0) return "an empty window";
  if (f.pages > 0 && (!f.has(drafts_have_centre) || !f.has(drafts_have_sinks)))
    return "pages without a centre or sinks";
  return nullptr;
}

// Numbers of the parts of the section.
struct DraftSizes {
  DraftSizes(const DraftFacts& f, const StoreShape& shape)
      : centre(f.has(drafts_have_centre) ? uint64_t{shape.heads_total()} * shape.page.dim : 0),
        planes(uint64_t{shape.heads_total()} * shape.page.planes()),
        sinks(f.has(drafts_have_sinks) ? planes * shape.page.page_tokens * shape.page.dim : 0),
        plane(uint64_t{f.window_count} * shape.page.dim), hidden(f.width) {}
  uint64_t bytes() const {
    return drafts_head_bytes + (centre + sinks + planes * plane + hidden) * sizeof(float);
  }
  uint64_t centre, planes, sinks, plane, hidden;
};

Status load_facts(const CacheFile& file, const StoreShape& shape, std::size_t width,
                  const SavedSequence& state, DraftFacts* out) {
  const CacheFile::Section& section = *file.find(SectionKind::drafts);
  const auto refused = [&](const char* what) {
    return Status::error(Code::corrupt, "%s: section 'drafts': %s; nothing was loaded",
                         file.path().c_str(), what);
  };
  std::array<std::byte, drafts_head_bytes> head{};
  if (section.bytes < head.size()) return refused("no head");
  RETURN_IF_ERROR(file.copy(section, 0, head.size(), head.data()));
  const DraftFacts facts = decode_drafts(head.data());
  if (const char* what = wrong_drafts(facts, shape, width, state)) return refused(what);
  if (find_used_reserve(drafts_fields, reinterpret_cast<const uint8_t*>(head.data())))
    return refused("reserved bytes that are not zero");
  const CacheFile::Section* expected = nullptr;
  RETURN_IF_ERROR(expect(file, SectionKind::drafts, DraftSizes(facts, shape).bytes(), &expected));
  for (const SectionKind kind : PageStore::arrays(shape))
    RETURN_IF_ERROR(expect(file, PageStore::section_of(shape, kind),
                           PageStore::file_bytes(shape, kind, facts.pages), &expected));
  *out = facts;
  return {};
}

// A scale that is not finite would make every draft an error.
Status check_scales(const CacheFile& file, ThreadPool* pool, const Cancel* cancel) {
  const CacheFile::Section& section = *file.find(SectionKind::drafts_scales);
  std::atomic<bool> finite{true};
  RETURN_IF_ERROR(file.scan(section, 0, section.bytes, pool, cancel,
                            [&](uint64_t, const std::byte* data, std::size_t size) {
                              const auto* scales = reinterpret_cast<const uint16_t*>(data);
                              constexpr uint16_t exponent = 0x7f80;
                              bool good = true;
                              for (std::size_t i = 0; i < size / sizeof *scales; ++i)
                                good &= (scales[i] & exponent) != exponent;
                              if (!good) finite.store(false, std::memory_order_relaxed);
                            }));
  return finite ? Status() : not_finite(file, section);
}

}  // namespace

uint64_t drafts_section_bytes(const DraftState& drafts) {
  return DraftSizes(facts_of(drafts), drafts.store.shape()).bytes();
}

Status write_drafts(const DraftState& drafts,
                    const std::function<Status(const void* data, std::size_t size)>& write) {
  const DraftsHead head = encode(facts_of(drafts));
  const KvStore& store = drafts.store;
  RETURN_IF_ERROR(write(head.data(), head.size()));
  RETURN_IF_ERROR(write(store.centre().data(), store.centre().size_bytes()));
  RETURN_IF_ERROR(write(store.sink_floats().data(), store.sink_floats().size_bytes()));
  RETURN_IF_ERROR(store.write_window(write));
  return write(drafts.hidden.data(), drafts.hidden.size() * sizeof(float));
}

Status find_wrong_drafts(const DraftState& drafts, const Cancel* cancel, const char** what) {
  *what = wrong_floats(drafts.store.centre());
  if (!*what) *what = wrong_floats(drafts.store.sink_floats());
  if (!*what) *what = wrong_floats(drafts.hidden);
  if (*what) return {};
  return drafts.store.write_window([&](const void* data, std::size_t size) {
    if (is_cancelled(cancel))
      return Status::error(Code::cancelled, "cancelled; no file was changed");
    if (!*what) *what = wrong_floats({static_cast<const float*>(data), size / sizeof(float)});
    return Status();
  });
}

Status load_drafts(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                   std::size_t width, ThreadPool* pool, const Cancel* cancel, DraftState* out,
                   bool* found) {
  *found = false;
  const CacheFile::Section* section = file->find(SectionKind::drafts);
  const bool has_pages =
      file->find(SectionKind::drafts_pages) || file->find(SectionKind::drafts_scales);
  if (!section && has_pages)
    return Status::error(Code::corrupt,
                         "%s: section 'drafts' is missing, whose pages it has; nothing was loaded",
                         file->path().c_str());
  for (const SectionKind kind :
       {SectionKind::drafts, SectionKind::drafts_pages, SectionKind::drafts_scales})
    if (const CacheFile::Section* each = file->find(kind); each && each->version != section_version)
      return {};
  if (!section) return {};
  const StoreShape shape = out->store.shape();
  DraftFacts facts;
  RETURN_IF_ERROR(load_facts(*file, shape, width, state, &facts));
  RETURN_IF_ERROR(check_scales(*file, pool, cancel));
  PageStore pages(shape);
  RETURN_IF_ERROR(PageStore::map(shape, file, facts.pages, &pages));
  Representatives none(shape, out->store.window_tokens());
  none.drop();
  KvStore store = KvStore::restore(
      std::move(pages), KeySketch(shape), std::move(none), out->store.window_tokens(),
      {facts.window_count, facts.has(drafts_have_centre), facts.has(drafts_have_sinks), 0, {}}, {});
  const KvStore::Restored to = store.restored();
  const DraftSizes sizes(facts, shape);
  out->hidden.resize(sizes.hidden);
  uint64_t at = drafts_head_bytes;
  const auto copy = [&](uint64_t rows, uint64_t row,
                        const std::function<float*(uint64_t)>& place) -> Status {
    if (rows * row == 0) return {};
    RETURN_IF_ERROR(copy_floats(*file, *section, at, rows, row, pool, cancel, place));
    at += rows * row * sizeof(float);
    return {};
  };
  RETURN_IF_ERROR(copy(1, sizes.centre, [&](uint64_t) { return to.centre; }));
  RETURN_IF_ERROR(copy(1, sizes.sinks, [&](uint64_t) { return to.sinks; }));
  RETURN_IF_ERROR(copy(sizes.planes, sizes.plane, [&](uint64_t p) { return to.window(p); }));
  RETURN_IF_ERROR(copy(1, sizes.hidden, [&](uint64_t) { return out->hidden.data(); }));
  file->advise(*section, os::Mapping::Advice::dont_need);
  out->store = std::move(store);
  out->first = facts.first;
  *found = true;
  return {};
}

Status count_saved_drafts(const CachePeek& file, uint64_t* out) {
  *out = 0;
  const CachePeek::Section* section = file.find(SectionKind::drafts);
  if (!section || section->version != section_version) return {};
  Array<std::byte> bytes;
  RETURN_IF_ERROR(file.read(SectionKind::drafts, drafts_head_bytes, &bytes));
  if (bytes.size() < drafts_head_bytes)
    return Status::error(Code::corrupt, "%s: section 'drafts': no head", file.path().c_str());
  const uint64_t first = decode_drafts(bytes.data()).first;
  *out = file.identity().tokens - std::min(file.identity().tokens, first);
  return {};
}

}  // namespace kvasir
